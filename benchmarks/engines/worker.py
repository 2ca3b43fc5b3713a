"""A program that runs one case in this process and prints its result as one line of JSON on stdout.

    python -m carom.benchmarks.engines.worker '{"engine": "none", "mode": "train", "d": 256}'

The exit code is 0 if the line was printed; its `status` is "ok", "skipped" or "failed". Output of libraries goes to
stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

from .case import Case


def main(argv: list[str] | None = None) -> int:
    """Run the case in `argv[0]`. With `--watch-stdin` the process ends when its parent's pipe closes."""
    argv = sys.argv[1:] if argv is None else argv
    if "--watch-stdin" in argv:
        argv = [a for a in argv if a != "--watch-stdin"]
        threading.Thread(target=_die_with_parent, daemon=True).start()
    if len(argv) != 1:
        print("usage: worker [--watch-stdin] CASE_JSON", file=sys.stderr)
        return 2
    real_stdout = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the result
    try:
        result = run(Case.from_json(argv[0]))
    except ValueError as error:
        result = {"status": "failed", "reason": f"bad case: {error}"}
    with os.fdopen(real_stdout, "w", encoding="utf-8") as out:
        out.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0


def run(case: Case) -> dict[str, Any]:
    """Return the result of `case`: `status` and, if "ok", its figures. Never raises for an engine's error."""
    # Set before torch uses cuBLAS, so that every engine has the same deterministic workspaces.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from .peers import Skip

    device = torch.device(case.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return {"status": "skipped", "reason": "no CUDA or ROCm device here"}
    if device.type == "cuda" and device.index is None:
        device = torch.device(
            "cuda", torch.cuda.current_device()
        )  # several calls below need the device number
    try:
        if case.kind == "touch":
            return {"status": "ok", **_touch(case.touch_bytes)}
        if case.kind == "link":
            from .measure import measure_link

            rate = measure_link(case.block_bytes, device)
            return {"status": "ok", "link_bytes_per_second": rate, "buffer_bytes": case.block_bytes}
        if case.kind == "host":
            from .host_time import host_time

            return {"status": "ok", **host_time(case, device)}
        return {"status": "ok", **_run_step_case(case, device)}
    except Skip as skip:
        return {"status": "skipped", "reason": str(skip)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def _run_step_case(case: Case, device: Any) -> dict[str, Any]:
    import torch

    from . import measure
    from .dit import build, make_inputs
    from .peers import get_engine

    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # create the context before any measurement
    engine = get_engine(case.engine)
    base_rss, base_available = measure.host_rss(), measure.host_available()
    base_memory = measure.device_memory(device)
    started = time.perf_counter()
    model = build(case)
    build_seconds = time.perf_counter() - started
    gc.collect()
    built_rss = measure.host_rss()
    measure.reset_peaks(device)
    started = time.perf_counter()
    attached = engine.attach(model, case, device)
    measure.synchronize(device)
    attach_seconds = time.perf_counter() - started
    attach_memory = measure.device_memory(device)
    gc.collect()
    result: dict[str, Any] = {
        "build_seconds": build_seconds,
        "attach_seconds": attach_seconds,
        "attach_peak_reserved_bytes": attach_memory["peak_reserved_bytes"],
        "weight_bytes": case.weight_bytes,
        "adapter_bytes": sum(p.numel() * p.element_size() for _, p in attached.adapters),
        "vram_budget_bytes": case.budget_bytes if case.engine == "carom" else None,
        "host_base_rss_bytes": base_rss,
        "host_built_rss_bytes": built_rss,
        "host_attached_rss_bytes": measure.host_rss(),
        "host_available_drop_bytes": base_available - measure.host_available(),
    }
    try:
        inputs = make_inputs(case, device)
        if case.verify:
            result["fingerprint"] = _verify(attached, case, inputs, device)
        if case.steps:
            measure.reset_peaks(device)

            def step(marks: measure.Marks) -> None:
                if case.mode == "train":
                    attached.train(*inputs, marks)
                else:
                    attached.infer(*inputs[:2])
                    marks("forward")

            result["steps"] = case.steps
            result.update(measure.time_steps(step, case.steps, case.warmup, device))
        result.update(measure.device_memory(device))
        if base_memory["card_used_bytes"] is not None and result["card_used_bytes"] is not None:
            result["card_used_bytes"] -= base_memory["card_used_bytes"]
        result["host_rss_bytes"] = measure.host_rss()
        result["host_peak_rss_bytes"] = _peak_rss()
        if case.steps:
            result.update(measure.kernel_times_of(step, device))
            attached.profile(lambda: step(measure.Marks(device)))
        result["report"] = attached.report()
        if case.verify and case.steps and case.mode == "infer":
            # Verify again with the final layout, because units stay packed only after the first passes.
            result["fingerprint"]["settled"] = measure.fingerprint([attached.infer(*inputs[:2])])
    finally:
        attached.close()
    result["engine_version"] = engine.version()
    result["torch"] = torch.__version__
    result["device_name"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return result


def _verify(attached: Any, case: Case, inputs: tuple[Any, ...], device: Any) -> dict[str, Any]:
    """Return fingerprints, computed before any timing: of the output, or of the loss and the adapters' gradients.

    Gradients are computed with deterministic kernels. Every engine starts from the same weights, so the fingerprints
    equal those of the resident run if no bits were lost.
    """
    from . import measure

    if case.mode == "infer":
        # Two passes: the first learns the order, and the second uses that order. Every kernel of this forward is
        # deterministic by default. Changing the setting would import the compiler, which takes seconds.
        first = measure.fingerprint([attached.infer(*inputs[:2])])
        second = measure.fingerprint([attached.infer(*inputs[:2])])
        return {"output": second, "passes_agree": first["sha256"] == second["sha256"]}
    with measure.deterministic():
        passes = []
        for _ in range(2):
            for _, parameter in attached.adapters:
                parameter.grad = None
            loss = attached.gradients(*inputs, lambda name: None)
            grads = [p.grad for _, p in attached.adapters]
            missing = sum(grad is None for grad in grads)
            if missing:
                raise RuntimeError(f"{missing} of {len(grads)} adapters got no gradient")
            passes.append((measure.fingerprint([loss]), measure.fingerprint(grads)))
        for _, parameter in attached.adapters:
            parameter.grad = None
    measure.synchronize(device)
    return {"loss": passes[1][0], "gradients": passes[1][1], "passes_agree": passes[0] == passes[1]}


def _touch(nbytes: int) -> dict[str, Any]:
    """Write to `nbytes` of memory once with all cores, then free them, so that a virtual machine's memory has grown
    beforehand.
    """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    started = time.perf_counter()
    workers = os.cpu_count() or 1
    pieces = [np.empty(nbytes // workers, dtype=np.uint8) for _ in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda piece: piece.fill(1), pieces))
    return {"touched_bytes": nbytes, "seconds": time.perf_counter() - started}


def _peak_rss() -> int | None:
    """Return the peak resident memory of this process in bytes, or None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return getattr(psutil.Process().memory_info(), "peak_wset", None)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _die_with_parent() -> None:
    """End this process at the end of file on stdin, whose other end the parent holds."""
    try:
        while sys.stdin.buffer.read(1):
            pass
    finally:
        os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
