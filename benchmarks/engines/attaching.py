"""How long `carom.stream` takes for a module in memory, beside the time of pinning its weights.

    python -m carom.benchmarks.engines.attaching --cuda --json FILE
    python -m carom.benchmarks.engines.attaching

With ``--cuda``, the DiT of 9.2 GB is attached under a VRAM budget, with weights as they are and packed. The floor is the time
in which the system pins the bytes of the module, in blocks of a unit's size whose pages were touched before. The first call of
each cell is told apart from the later ones: it also makes what a process makes once (kernels, pinned staging). Then the
first passes are timed, as packing may go on beside them. Without ``--cuda``, modules of ten thousand tensors of 4 KiB are
attached on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.session.session import stream
from ..results.provenance import ProvenanceError
from . import dit
from .case import Case
from .record import new_record, write_record

GIB, MIB = 1 << 30, 1 << 20
TURNS = 4  # attaches of each cell, the first of which is told apart
PASSES = 4  # passes after an attach that are timed
CODECS = ("raw", "auto", "lossless")
TENSORS, TENSOR_BYTES = 10_000, 4096


class Sums(nn.Module):
    """Adds ``count`` vectors of 1,024 float32 values to its input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            value = nn.Parameter(torch.rand(TENSOR_BYTES // 4), requires_grad=False)
            self.register_parameter(f"p{index}", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for value in self.parameters():
            x = x + value
        return x


def pin_seconds(nbytes: int, block: int, device: torch.device) -> float:
    """Return the seconds in which the system pins ``nbytes`` bytes, in blocks of ``block`` bytes."""
    runtime = torch.cuda.cudart()
    blocks = [torch.ones(block, dtype=torch.uint8) for _ in range(max(1, nbytes // block))]
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for each in blocks:
        runtime.cudaHostRegister(each.data_ptr(), each.numel(), 0)
    seconds = time.perf_counter() - began
    for each in blocks:
        runtime.cudaHostUnregister(each.data_ptr())
    return seconds


def attach(
    make: Callable[[], nn.Module], run: Callable[[nn.Module], object], device: torch.device, **options: Any
) -> dict[str, Any]:
    """Return the seconds of attaching the module that ``make`` returns, and of the passes after it.

    ``run``: runs a pass of the module. ``options``: those of `carom.stream`.
    """
    module = make()
    gc.collect()
    began = time.perf_counter()
    session = stream(module, device=device, **options)
    attached = time.perf_counter() - began
    passes = []
    for _ in range(PASSES):
        began = time.perf_counter()
        with torch.no_grad():
            run(module)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        passes.append(time.perf_counter() - began)
    report = session.report()
    began = time.perf_counter()
    session.close()
    return {
        "attach_seconds": attached, "pass_seconds": passes, "close_seconds": time.perf_counter() - began,
        "resident_bytes": report.resident_bytes,
    }  # fmt: skip


def summary(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of the first attach, and the least, the median and the largest of the later ones."""
    first, *later = [turn["attach_seconds"] for turn in turns]
    return {"first": first, "least": min(later), "median": statistics.median(later), "largest": max(later)}


def gpu_cells(vram: float, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Measure the cells of a GPU: the floor, and each codec."""
    device = torch.device("cuda:0")
    case = Case(d=3072, depth=27, tokens=tokens, heads=24)
    module = dit.build(case)
    inputs = dit.make_inputs(case, device)[:2]
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    pins = [pin_seconds(nbytes, 128 * MIB, device) for _ in range(TURNS)]
    cells: list[tuple[str, dict[str, Any]]] = [("pinning alone", {"bytes": nbytes, "pin_seconds": pins})]
    for codec in CODECS:
        turns = []
        for _ in range(TURNS):
            options = {"vram": int(vram * GIB), "codec": codec}
            turns.append(attach(lambda: module, lambda each: each(*inputs), device, **options))
            torch.cuda.empty_cache()
        cells.append((f"DiT {codec}", {"bytes": nbytes, "seconds": summary(turns), "turns": turns}))
    return cells


def cpu_cells() -> list[tuple[str, dict[str, Any]]]:
    """Measure the cells of a CPU: ten thousand tensors, in blocks of fifty and in a module each."""
    device, x, cells = torch.device("cpu"), torch.zeros(TENSOR_BYTES // 4), []
    for name, each in (("blocks of 50 tensors", 50), ("a module for each tensor", 1)):
        turns = []
        for _ in range(TURNS):
            options = {"vram": TENSORS * TENSOR_BYTES // 2, "codec": "raw"}
            turns.append(
                attach(
                    lambda each=each: nn.Sequential(*[Sums(each) for _ in range(TENSORS // each)]),  # type: ignore[misc]
                    lambda module: module(x),
                    device,
                    **options,
                )
            )
        cells.append((name, {"tensors": TENSORS, "seconds": summary(turns), "turns": turns}))
    return cells


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m carom.benchmarks.engines.attaching", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cuda", action="store_true", help="attach a DiT of 9.2 GB on the GPU")
    parser.add_argument("--vram", type=float, default=6.0, help="GiB for weights on the GPU (default: 6)")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="tokens of a pass on the GPU (default: 1024)"
    )
    parser.add_argument("--json", type=Path, help="write the record to this file")
    given = parser.parse_args(argv)
    try:
        record = new_record(
            "carom attaching", sys.argv[1:] if argv is None else argv, kept=given.json is not None
        )
    except ProvenanceError as error:
        print(f"attaching: {error}", file=sys.stderr)
        return 2
    if given.cuda and not torch.cuda.is_available():
        print("attaching: --cuda needs a GPU that torch can use", file=sys.stderr)
        return 2
    for key, result in gpu_cells(given.vram, given.tokens) if given.cuda else cpu_cells():
        record["cases"].append({"key": key, "result": result})
        print(json.dumps({"cell": key, **{k: v for k, v in result.items() if k != "turns"}}), flush=True)
    if given.json:
        write_record(record, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
