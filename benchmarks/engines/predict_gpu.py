"""Predicted against measured steps on one GPU: tokens x resident share x inference and training, in under six minutes.

Run by path from any folder. Only torch and numpy must be installed:

    python benchmarks/engines/predict_gpu.py [--json FILE] [--seconds 330] [--d 3072] [--depth 20] [--tokens 256,1024,4096,16384]

A probe runs first and takes under ten seconds, apart from building its model. For each number of tokens, a model of
three blocks streams a few steps. These give the link's rate and each unit's seconds of computing. The device is kept
busy before each step, so that the host is ahead and the times are those of the kernels alone. A second probe on an
idle device times Python: the seconds of a block's calls if the block streams, and if the block is resident.

From these figures alone, `predict` predicts each step of the whole model. The step then runs under the layout that
its session chose. `learnt` is the prediction of the session from its own first steps. The errors are predicted /
measured - 1, where measured is the median of the device time of a step. `advice` is the predicted saving of another
layout, as a share of the step.

Without a GPU, `--device simulated --d 64 --depth 6 --tokens 16,64` runs in miniature on the simulated device's clock.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
MODES = ("infer", "train")
SHARES = (0.0, 0.25, 0.5, 0.75)
PROBE_BLOCKS = 3
WARMUP, STEPS = 4, 6  # the first two steps learn the order; the later ones are timed
BUSY_CYCLES = 80_000_000  # about 45 ms at 1.8 GHz, longer than the host takes for a step of the probe
HOST_STEPS = 5
INNER = 1  # number of the probe's block whose times are used for all: neither the first nor the last


def load_checkout() -> dict:
    """Return the checkout's modules by name, imported as the package carom for any folder name."""
    if "carom" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["carom"] = module
        spec.loader.exec_module(module)
    names = (
        "core.plan.profile",
        "core.plan.predict",
        "core.session.measured_planner",
        "core.session.assembly",
        "core.device.simulated",
        "benchmarks.engines.case",
        "benchmarks.engines.dit",
        "benchmarks.engines.record",
    )
    return {name.rpartition(".")[2]: importlib.import_module(f"carom.{name}") for name in names}


def run_steps(session, model, inputs, mode: str, count: int, busy: bool = False) -> None:
    """Run steps as in the benchmark, without an optimizer; ``busy``: give the device other work before each step."""
    x, c, target = inputs
    for _ in range(count):
        if busy:
            torch.cuda._sleep(BUSY_CYCLES)
        if mode == "infer":
            with torch.inference_mode():
                model(x, c)
        else:
            model.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(model(x, c).float(), target.float()).backward()
    layout = layout_of(session)
    with layout.runner.lock:
        layout.meter.finish()


def layout_of(session):
    """Return the session's present layout."""
    return sys.modules["carom.core.session.assembly"].parts(session).manager.layout


def learn_from(session, lib):
    """Return the profile learnt from the session's marked steps."""
    layout = layout_of(session)
    return lib["profile"].learn(
        lib["measured_planner"].pieces(layout.carving), layout.streamed_indices(), layout.runner.expected_uses(),
        layout.meter.profile(),
    )  # fmt: skip


def stream(model, case, device, resident: int, slots: int, depth: int):
    budget = case.but(resident=resident, depth=depth, slots=slots).budget_bytes
    session = sys.modules["carom"].stream(model, device=device, vram=budget)
    made = sys.modules["carom.core.session.assembly"].parts(session)
    # Turn off changes of the layout, so that the measured layout is the predicted one.
    made.replan.at = made.policies.at = float("inf")
    return session


def probe(model, case, device, lib):
    """Return the profile of a model of a few blocks: seconds by tensor of the middle block, and the link's rate."""
    inputs = lib["dit"].make_inputs(case, _place(device))
    with stream(model, case, device, 0, 2, PROBE_BLOCKS) as session:
        run_steps(session, model, inputs, case.mode, 2 + WARMUP, busy=device == "cuda")
        return learn_from(session, lib)


class BlockCalls:
    """The seconds that Python spends in each forward of a block, measured by hooks."""

    def __init__(self, block) -> None:
        self.seconds, self._began = [], 0.0
        self._hooks = [block.register_forward_pre_hook(self._begin), block.register_forward_hook(self._end)]

    def _begin(self, *_) -> None:
        self._began = time.perf_counter()

    def _end(self, *_) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def host_of(model, case, device, resident: int) -> tuple[float, float]:
    """Return the seconds of Python for one use of a unit in the forward and in the backward, each step on an idle
    device.

    The forward is that of the middle block. The backward is timed as a whole and divided by the number of blocks.
    With checkpointing the backward uses each unit twice: for the recomputation and for the gradients.
    """
    x, c, target = sys.modules["carom.benchmarks.engines.dit"].make_inputs(case, _place(device))
    forward, backward = [], []
    with stream(model, case, device, resident, 2, PROBE_BLOCKS) as session:
        run_steps(session, model, (x, c, target), case.mode, 2)
        calls = BlockCalls(model.blocks[INNER])
        for _ in range(HOST_STEPS):
            sys.modules["carom.core.session.assembly"].parts(session).engine.synchronize()
            calls.seconds.clear()
            if case.mode == "infer":
                with torch.inference_mode():
                    model(x, c)
            else:
                model.zero_grad(set_to_none=True)
                loss = torch.nn.functional.mse_loss(model(x, c).float(), target.float())
                begin = time.perf_counter()
                loss.backward()
                backward.append((time.perf_counter() - begin) / PROBE_BLOCKS)
            forward.append(calls.seconds[0])
        calls.remove()
        units = sum(
            f"{unit.name}.".startswith(f"blocks.{INNER}.") for unit in layout_of(session).carving.units
        )
    return statistics.median(forward) / units, statistics.median(backward or [0.0]) / (2 * units)


def probe_host(model, case, device, lib):
    """Return the seconds in which Python issues a unit's kernels, if the unit streams and if it is resident.

    Return None on the simulated device, whose clock does not include the host.
    """
    if not isinstance(device, str):
        return None
    return lib["predict"].LaunchSeconds(
        host_of(model, case, device, 0), host_of(model, case, device, PROBE_BLOCKS)
    )


def whole(learnt, session, lib):
    """Return the profile and the workload of all units of the session, with the times of the probe's middle block for
    every block.
    """

    def middle(name: str) -> str:
        return re.sub(r"blocks\.\d+\.", f"blocks.{INNER}.", name)

    pieces = lib["measured_planner"].pieces(layout_of(session).carving)
    names = [name for piece in pieces for name in piece.tensors]
    there = replace(
        learnt,
        forward={name: learnt.forward.get(middle(name), 0.0) for name in names},
        backward={name: learnt.backward.get(middle(name), 0.0) for name in names} if learnt.train else {},
        position={name: place for place, name in enumerate(names)},
        recomputed=frozenset(name for name in names if middle(name) in learnt.recomputed),
        unused=frozenset(name for name in names if middle(name) in learnt.unused),
        held={piece.name: learnt.held.get(middle(piece.name + ".")[:-1], 1.0) for piece in pieces},
    )
    return there, there.workload(pieces, lib["measured_planner"].blocks(session.module))


def _place(device) -> torch.device:
    return torch.device(device) if isinstance(device, str) else torch.device("cpu")


def point(model, case, device, share: float, learnt, host, lib) -> dict:
    """Return the record of one predicted and measured step."""
    inputs = lib["dit"].make_inputs(case, _place(device))
    resident = round(share * case.depth)
    with stream(model, case, device, resident, 3, case.depth) as session:
        there, work = whole(learnt, session, lib)
        sizes = [unit.nbytes for unit in layout_of(session).carving.units]
        plan = session.plan
        fetches = lib["measured_planner"].fetches_of_step(work, sizes, plan.resident, plan.region_bytes)
        found = lib["predict"].predict(
            sizes, plan.resident, plan.region_bytes, work, there.link, fetches, host=host
        )
        run_steps(session, model, inputs, case.mode, WARMUP)
        begin = time.perf_counter()
        run_steps(session, model, inputs, case.mode, STEPS)
        wall = (time.perf_counter() - begin) / STEPS
        report = session.report()
        manager = sys.modules["carom.core.session.assembly"].parts(session).manager
        advice = manager.planner.advise(manager.layout, manager.present(), manager.simple)
        return {
            "mode": case.mode,
            "tokens": case.tokens,
            "share": share,
            "units": len(sizes),
            "streamed": len(sizes) - len(plan.resident),
            "measured_s": report.step_seconds,
            "wall_s": wall,
            "predicted_s": found.seconds,
            "host_s": found.host_seconds,
            "bound_by": report.bound_by,
            "error": found.seconds / report.step_seconds - 1,
            "learnt_s": advice.now if advice else None,
            "learnt_error": advice.now / report.step_seconds - 1 if advice else None,
            "advice": advice.saves / advice.now if advice else None,
            "stall_s": report.stall_seconds,
            "predicted_stall_s": found.stall_seconds,
            "roofline_s": report.roofline_seconds,
            "link_bytes_per_second": report.link_bytes_per_second,
        }


def table(rows: list[dict]) -> str:
    """Return the measured points as text for people."""
    lines = [
        "mode   tokens  share  measured ms  predicted   error  learnt error  could save  host ms  bound by"
    ]
    for row in rows:
        learnt = "-" if row["learnt_error"] is None else f"{100 * row['learnt_error']:+.1f} %"
        saves = "-" if row["advice"] is None else f"{100 * row['advice']:.1f} %"
        lines.append(
            f"{row['mode']:<6} {row['tokens']:>6} {100 * row['share']:>4.0f} %  {1e3 * row['measured_s']:>11.3f}"
            f"  {1e3 * row['predicted_s']:>9.3f}  {100 * row['error']:>+5.1f} %  {learnt:>12}  {saves:>10}"
            f"  {1e3 * row['host_s']:>7.2f}  {row['bound_by']}"
        )
    worst = max((abs(row["error"]) for row in rows), default=0.0)
    within = sum(abs(row["error"]) <= 0.1 for row in rows)
    lines.append(f"{within} of {len(rows)} within 10 %; the worst is off by {100 * worst:.1f} %")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (default), or simulated")
    parser.add_argument("--d", type=int, default=3072)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--tokens", default="256,1024,4096,16384")
    parser.add_argument("--seconds", type=float, default=330.0, help="start no point after so many")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    args = parser.parse_args()
    lib = load_checkout()
    fresh = lib["record"].new_record("carom predict", sys.argv[1:]) if args.json else {}
    tokens = [int(count) for count in args.tokens.split(",")]
    device = args.device
    if device == "simulated":
        block = lib["case"].Case(d=args.d).block_bytes
        device = lib["simulated"].SimulatedDevice(
            timing="early", link_bytes_per_second=block / 60e-6, kernel_seconds=3e-6, flops=2e11
        )
    elif not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device simulated runs it in miniature")
    begin = time.perf_counter()
    rows, probes, hosts, probe_seconds = [], {}, {}, 0.0
    for mode in MODES:
        case = lib["case"].Case(
            engine="carom",
            mode=mode,
            d=args.d,
            depth=args.depth,
            device="cuda" if args.device == "cuda" else "cpu",
        )
        small = lib["dit"].build(case.but(depth=PROBE_BLOCKS))
        for count in tokens:
            start = time.perf_counter()
            probes[mode, count] = probe(small, case.but(depth=PROBE_BLOCKS, tokens=count), device, lib)
            if count == tokens[0]:
                hosts[mode] = probe_host(small, case.but(depth=PROBE_BLOCKS, tokens=count), device, lib)
            probe_seconds += time.perf_counter() - start
        del small
        print(f"{mode}: probed, {probe_seconds:.1f} s so far; building the model", flush=True)
        model = lib["dit"].build(case)
        for share in SHARES:
            for count in tokens:
                if time.perf_counter() - begin > args.seconds:
                    print(f"out of time before {mode} {count} tokens, {share:.0%} resident", flush=True)
                    continue
                rows.append(
                    point(model, case.but(tokens=count), device, share, probes[mode, count], hosts[mode], lib)
                )
        del model
    record = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else str(device),
        "torch": torch.__version__,
        "d": args.d,
        "depth": args.depth,
        "probe_seconds": probe_seconds,
        "host_seconds_per_use": {
            mode: None if host is None else {"streamed": host.streamed, "resident": host.resident}
            for mode, host in hosts.items()
        },
        "seconds": time.perf_counter() - begin,
        "rows": rows,
    }
    if args.json:
        lib["record"].write_record(fresh | record, Path(args.json))
    print(table(rows))
    print(f"probe {probe_seconds:.1f} s, all {record['seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
