"""Counts of the Python calls that Carom makes on the host for one streamed unit. It needs no GPU.

    python -m carom.benchmarks.engines.host_calls [--top] [--json record.json]

The counts depend on the code alone, not on the machine's speed, so they can be compared between commits:
`tests/streaming/test_host_calls.py` has bounds for them. Cases: `ram` (weights in host memory), `disk` (weights in a
safetensors file, RAM for a third of them), `train` (frozen weights beside trainable pairs, forward and backward), and
`set_budget` (one change of the VRAM budget and the pass after it). The device is "cpu", the codec "raw".

Only calls of Python functions of `core` on the calling thread count, lambdas included, generators and comprehensions
not. Those of `disk` vary by a few per cent with the time at which reads end, so the median of several passes is taken.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.session.session import stream
from .record import new_record, write_record

CORE = str(Path(__file__).parents[2] / "core")
TOOL = "carom host calls"
CASES = ("ram", "disk", "train", "set_budget")
DEPTH, WIDTH = 24, 256
# The planner lays the weights out again within the first passes.
WARMUP, PASSES = 8, 7


class Block(nn.Module):
    """One unit of four frozen weights. ``rank``: that of a trainable pair of matrices beside them; 0: none."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.requires_grad_(False)
        self.a = nn.Linear(width, rank, bias=False) if rank else None
        self.b = nn.Linear(rank, width, bias=False) if rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.relu(self.up(self.norm(x))))
        return y + self.b(self.a(x)) if self.a is not None and self.b is not None else y


@dataclass(frozen=True)
class Calls:
    """The calls of one piece of work: how many, the files of `core` that it enters, and the calls by "file:function"."""

    count: int
    files: frozenset[str]
    functions: collections.Counter[str]


@dataclass(frozen=True)
class HostCalls:
    """The result of one case.

    ``calls``: in one pass, less those of a pass with all weights resident, divided by ``crossings``, the streamed units
    that cross in a pass. In `set_budget` they are counted whole, and ``crossings`` is 1. ``files``: the files of `core`
    that a pass enters, those of a resident pass included. ``functions``: the calls of one pass by "file:function".
    """

    calls: float
    crossings: int
    files: tuple[str, ...]
    functions: collections.Counter[str]


def calls_of(work: Callable[[], object]) -> Calls:
    """Run ``work`` and return the calls of functions of `core` that this thread makes in it."""
    functions: collections.Counter[str] = collections.Counter()
    files: set[str] = set()

    def count(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CORE):
            # Comprehensions have frames of their own only before Python 3.12: their calls must not count.
            if code.co_name.startswith("<") and code.co_name != "<lambda>":
                return
            file = code.co_filename[len(CORE) + 1 :].replace("\\", "/")
            files.add(file)
            functions[f"{file}:{code.co_name}"] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Calls(functions.total(), frozenset(files), functions)


def measure(
    case: str, folder: Path, depth: int = DEPTH, width: int = WIDTH, passes: int = PASSES
) -> HostCalls:
    """Return the calls of ``case``, one of `CASES`, for a model of ``depth`` units. ``folder`` gets the weights' file."""
    model, options = _model(case, folder, depth, width)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(4, width)

    def step() -> None:
        if case == "train":
            model(x).square().mean().backward()
        else:
            with torch.no_grad():
                model(x)

    def steady(vram: int, passes: int) -> tuple[list[Calls], int]:
        with stream(model, vram=vram, device="cpu", codec="raw", **options) as session:

            def change_and_step() -> None:
                session.set_budget(vram=2 * vram)
                step()

            for _ in range(WARMUP):
                step()
            if case == "set_budget":
                return [calls_of(change_and_step)], 1
            found = [calls_of(step) for _ in range(passes)]
            return found, round(session.report().to_dict()["raw_bytes_per_step"] * depth / nbytes)

    found, crossings = steady(nbytes // 4, passes)
    resident = 0 if case == "set_budget" else steady(2 * nbytes, 1)[0][0].count
    middle = sorted(found, key=lambda calls: calls.count)[len(found) // 2]
    # In one of the passes the planner looks at the measured times, which takes other files.
    files = min((calls.files for calls in found), key=len)
    each = (middle.count - resident) / max(1, crossings)
    return HostCalls(each, crossings, tuple(sorted(files)), middle.functions)


def _model(case: str, folder: Path, depth: int, width: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of ``case``, and the options of `carom.stream` for its weights."""
    from safetensors.torch import save_file

    def build() -> nn.Module:
        return nn.Sequential(*(Block(width, rank=4 if case == "train" else 0) for _ in range(depth)))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
    if case != "disk":
        return model, {}
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    path = folder / "model.safetensors"
    save_file(model.state_dict(), path)
    with torch.device("meta"):
        return build(), {"weights": path, "ram": nbytes // 3}


def main(argv: list[str] | None = None) -> int:
    """Count all cases, print them, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write a record to this file")
    parser.add_argument("--top", action="store_true", help="also print the functions that are called most")
    options = parser.parse_args(argv)
    record = new_record(TOOL, sys.argv[1:] if argv is None else argv) if options.json else {"cases": []}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            found = measure(case, Path(folder))
            record["cases"].append(
                {
                    "case": case,
                    "calls": round(found.calls, 1),
                    "crossings": found.crossings,
                    "files": found.files,
                }
            )
            unit = "in all" if case == "set_budget" else f"a crossing ({found.crossings} crossings)"
            print(f"{case:11} {found.calls:8.1f} calls {unit}, {len(found.files)} files")
            for function, count in found.functions.most_common(12 if options.top else 0):
                print(f"            {count:6} {function}")
    if options.json:
        write_record(record, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
