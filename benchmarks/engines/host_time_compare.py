"""Host time that each of two checkouts adds to a unit's forward and backward, on the CPU, measured in turns.

    python -m carom.benchmarks.engines.host_time_compare BEFORE AFTER [--rounds 9] [--json record.json]

BEFORE and AFTER are folders of checkouts. Each round starts one process for each checkout, in alternating order. A
process streams a model of small blocks, whose kernels take little time, and returns the median over its steps. The
result is the median over the rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..results.provenance import ProvenanceError, checkout_commit
from .record import new_record, write_record

DEPTH, WIDTH, STEPS, WARMUP = 24, 64, 60, 10
CASES = {"inference": ("raw", False), "LoRA": ("raw", True)}

# This program uses public names only, so that any checkout can be measured.
_CHILD = """
import importlib.util, json, statistics, sys, time
import torch
from torch import nn
root, codec, trains, depth, width, steps, warmup = sys.argv[1], sys.argv[2], sys.argv[3] == "1", *map(int, sys.argv[4:])
spec = importlib.util.spec_from_file_location("carom", root + "/__init__.py", submodule_search_locations=[root])
carom = importlib.util.module_from_spec(spec); sys.modules["carom"] = carom; spec.loader.exec_module(carom)
torch.manual_seed(0); torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.relu(self.up(y))) + self.b(self.a(y))

model = nn.Sequential(*(Block() for _ in range(depth))).to(torch.bfloat16)
for name, p in model.named_parameters():
    p.requires_grad_(trains and (".a." in name or ".b." in name))
unit = sum(p.nbytes for n, p in model[0].named_parameters() if ".a." not in n and ".b." not in n)
whole = sum(p.nbytes for p in model.parameters())
x = torch.randn(4, width, dtype=torch.bfloat16)

def step():
    if trains:
        model(x).sum().backward()
    else:
        with torch.no_grad():
            model(x)

with carom.stream(model, device="cpu", vram=whole - unit * (depth - 6), codec=codec) as session:
    seconds = []
    for n in range(warmup + steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    report = session.report().to_dict()
print(json.dumps({
    "unit_us": 1e6 * statistics.median(seconds[warmup:]) / depth,
    "transfers_per_weight": report["transfers_per_weight"], "wire_bytes_per_step": report["wire_bytes_per_step"],
}))
"""


def measure(checkout: Path, case: str) -> dict[str, Any]:
    """Return the measurement of one process: microseconds a block, and copied bytes. Raises SystemExit if the process
    fails.
    """
    codec, trains = CASES[case]
    command = [
        sys.executable,
        "-c",
        _CHILD,
        str(checkout),
        codec,
        str(int(trains)),
        *map(str, (DEPTH, WIDTH, STEPS, WARMUP)),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{checkout}, {case}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def main() -> None:
    """Measure both checkouts in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the samples to this file")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    record: dict[str, Any] = {}
    if options.json:
        record = new_record("carom host time of two checkouts", sys.argv[1:])
        record["commits"] = {name: checkout_commit(path) for name, path in checkouts.items()}
        for name, path in checkouts.items():
            if record["commits"][name] is None:
                raise ProvenanceError(
                    f"{name.upper()} {path} is no git checkout: name a clone or a git worktree"
                )
    samples: dict[str, dict[str, list[Any]]] = {case: {name: [] for name in checkouts} for case in CASES}
    for number in range(options.rounds):
        for case in CASES:
            for name in sorted(checkouts, reverse=bool(number % 2)):
                samples[case][name].append(measure(checkouts[name], case))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    rows = []
    for case, sides in samples.items():
        row: dict[str, Any] = {"case": case}
        for name, results in sides.items():
            times = [r["unit_us"] for r in results]
            row[name] = dict(zip(("q1", "median", "q3"), statistics.quantiles(times, n=4), strict=True))
            row[f"{name}_crossed"] = sorted(
                {(r["transfers_per_weight"], r["wire_bytes_per_step"]) for r in results}
            )
        pairs = [a["unit_us"] / b["unit_us"] for b, a in zip(sides["before"], sides["after"], strict=True)]
        row["ratio"] = dict(zip(("q1", "median", "q3"), statistics.quantiles(pairs, n=4), strict=True))
        rows.append(row)
        print(f"{case:22} {row['before']['median']:7.1f} us  {row['after']['median']:7.1f} us  ratio {row['ratio']['median']:.3f}"
              f" ({row['ratio']['q1']:.3f} to {row['ratio']['q3']:.3f})")  # fmt: skip
    if options.json:
        record |= {"cases": rows, "samples": samples}
        write_record(record, options.json)


if __name__ == "__main__":
    main()
