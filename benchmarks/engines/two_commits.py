"""Steps of the DiT in two checkouts, and in peers, measured in turns on one GPU (or a CPU).

    python -m carom.benchmarks.engines.two_commits BEFORE AFTER [--turns 5] [--peers none,musubi] [--json FILE]

BEFORE and AFTER are folders of checkouts. One process for each checkout and one for each peer live for the whole run.
For each cell, every process builds the model and attaches; then the processes take turns, in alternating order, so that
a change of the machine's speed disturbs all of them alike. A turn of a step cell is ``--steps`` steps after one step that
is not timed; its figure is their median in ms of device time. A turn of a host cell (small blocks, so that the host
limits the speed) times a resident run and a streamed run; its figure is their difference in microseconds a block.

Outputs of inference are compared by hash between the checkouts and the run without offloading. Losses of training are
not, because the backward kernels of the timed steps are not deterministic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..results.provenance import ProvenanceError, checkout_commit
from .record import new_record, write_record

# A child uses the benchmark's modules of the checkout that it measures; a peer uses those of AFTER.
_CHILD = """
import importlib.util, json, os, sys, time
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
root, engine = sys.argv[1:3]
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
spec = importlib.util.spec_from_file_location("carom", root + "/__init__.py", submodule_search_locations=[root])
carom = importlib.util.module_from_spec(spec); sys.modules["carom"] = carom; spec.loader.exec_module(carom)
import gc, torch
case_, dit, host_time, measure, peers = (
    importlib.import_module("carom.benchmarks.engines." + name)
    for name in ("case", "dit", "host_time", "measure", "peers")
)
host_time.ROUNDS = 1
attached = None
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "attach":
        case = case_.Case(**order["case"], engine=engine)
        device = torch.device(case.device if case.device == "cpu" else "cuda:0")
        answer = {"status": "ok"}
        if case.kind == "step":
            began = time.perf_counter()
            model = dit.build(case); inputs = dit.make_inputs(case, device)
            try:
                attached = peers.get_engine(engine).attach(model, case, device)
            except peers.Skip as skip:
                answer = {"status": "skipped", "reason": str(skip)}
            answer["attach_seconds"] = time.perf_counter() - began
            for _ in range(case.warmup if attached else 0):
                attached.infer(*inputs[:2]) if case.mode == "infer" else attached.train(*inputs, lambda name: None)
            measure.synchronize(device)
    elif order["do"] == "turn":
        if case.kind == "host":
            answer = host_time.host_time(case, device)
        else:
            got = []
            def step(marks):
                got[:] = [attached.infer(*inputs[:2]) if case.mode == "infer" else attached.train(*inputs, marks)]
            answer = measure.time_steps(step, case.steps, 1, device)
            answer["sha256"] = measure.fingerprint(got)["sha256"]
    else:
        answer = {"report": attached.report() if attached else None, **measure.device_memory(device)}
        if attached:
            attached.close()
        attached = model = inputs = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    out.write(json.dumps(answer) + "\\n"); out.flush()
"""


def cells(device: str, tiny: bool) -> dict[str, dict[str, Any]]:
    """Return the cells by name: the settings of a `Case`, without its engine."""
    size: dict[str, Any] = (
        {"d": 3072, "depth": 20, "tokens": 4096} if not tiny else {"d": 128, "depth": 4, "tokens": 32}
    )
    found: dict[str, dict[str, Any]] = {}
    for mode in ("infer", "train"):
        small = {"kind": "host", "d": 256, "depth": 20, "tokens": 16, "steps": 10, "warmup": 6, "slots": 4}
        found[f"host {mode}"] = {"mode": mode, "device": device, **small}
        for share in (0.0, 0.5):
            for codec in ("raw", "lossless"):
                found[f"{mode} {share:g} {codec}"] = {
                    "mode": mode, "device": device, **size, "resident": int(share * size["depth"]), "codec": codec,
                    "steps": 5, "warmup": 4,
                }  # fmt: skip
    return found


class Side:
    """One process that runs cells of one engine of one checkout."""

    def __init__(self, root: Path, engine: str) -> None:
        self.engine = engine
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(root), engine],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip

    def tell(self, **order: Any) -> None:
        assert self._child.stdin
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the child's answer. Raises SystemExit if it ended."""
        assert self._child.stdout
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.engine} ended: see its output above")
        return json.loads(line)

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.answer()

    def stop(self) -> None:
        assert self._child.stdin
        self._child.stdin.close()
        self._child.wait(timeout=60)


def run_cell(case: dict[str, Any], sides: dict[str, Side], turns: int) -> dict[str, Any]:
    """Return, by side, the answers of its turns and of its close; sides whose engine cannot run the case are left out."""
    taking = dict(sides)
    if case.get("kind") == "host":
        taking = {name: side for name, side in sides.items() if side.engine == "carom"}
    elif case["codec"] != "raw":
        taking = {name: side for name, side in sides.items() if side.engine in ("carom", "none")}
    for side in taking.values():
        resident = case["depth"] if side.engine == "none" else case.get("resident", 0)
        side.tell(do="attach", case={**case, "resident": resident})
    attached = {name: side.answer() for name, side in taking.items()}
    ready = [name for name in taking if attached[name]["status"] == "ok"]
    samples: dict[str, list[Any]] = {name: [] for name in ready}
    for turn in range(turns):
        for name in ready if turn % 2 == 0 else ready[::-1]:
            samples[name].append(taking[name].ask(do="turn"))
    ends = {name: side.ask(do="close") for name, side in taking.items()}
    return {
        name: {"attach": attached[name], "turns": samples.get(name, []), "end": ends[name]} for name in taking
    }


def row_of(name: str, case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the medians and quartiles of a cell by side, the ratio after / before, and whether the results agree."""
    host = case.get("kind") == "host"
    row: dict[str, Any] = {"case": name, "unit": "us a block" if host else "ms a step"}
    for side, data in found.items():
        values = [turn["added_us" if host else "ms_per_step"] for turn in data["turns"]]
        if len(values) > 1:
            row[side] = dict(zip(("q1", "median", "q3"), statistics.quantiles(values, n=4), strict=True))
    if "before" in row and "after" in row:
        row["ratio"] = row["after"]["median"] / row["before"]["median"]
    if not host and case["mode"] == "infer":
        sides = [found[side] for side in ("before", "after", "none") if side in found]
        row["equal"] = len({data["turns"][-1]["sha256"] for data in sides if data["turns"]}) == 1
    return row


def main() -> None:
    """Measure the cells and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peers", default="", help="comma-separated, of none, musubi, ai-toolkit")
    parser.add_argument(
        "--only", default="", help="cells whose name contains one of these words, comma-separated"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=560.0, help="no cell begins after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="small models, to test the program")
    parser.add_argument(
        "--commits", help="the two full commits, comma-separated, if a folder is no git checkout"
    )
    parser.add_argument("--json", type=Path, help="write the samples to this file, after each cell")
    options = parser.parse_args()
    began = time.monotonic()
    record: dict[str, Any] = {}
    if options.json:
        record = new_record("carom two commits in turns", sys.argv[1:])
        given = (
            options.commits.split(",")
            if options.commits
            else [checkout_commit(options.before), checkout_commit(options.after)]
        )
        if None in given:
            raise ProvenanceError("a folder is no git checkout: name both commits with --commits")
        record["commits"] = dict(zip(("before", "after"), given, strict=True))
        record |= {"cases": [], "samples": {}}
    peers = [name for name in options.peers.split(",") if name]
    sides = {
        "before": Side(options.before.resolve(), "carom"),
        "after": Side(options.after.resolve(), "carom"),
    }
    sides |= {name: Side(options.after.resolve(), name) for name in peers}
    words = [word for word in options.only.split(",") if word]
    for name, case in cells(options.device, options.tiny).items():
        if words and not any(word in name for word in words):
            continue
        if time.monotonic() - began > options.limit_s:
            print(f"{name}: no time left", flush=True)
            continue
        found = run_cell(case, sides, options.turns)
        row = row_of(name, case, found)
        shown = "  ".join(f"{side} {row[side]['median']:.1f}" for side in found if side in row)
        print(f"{name:20} {row['unit']}: {shown}  ratio {row.get('ratio', 0):.3f}  equal {row.get('equal')}"
              f"  ({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip
        if options.json:
            record["cases"].append(row)
            record["samples"][name] = found
            write_record(record, options.json)
    for side in sides.values():
        side.stop()


if __name__ == "__main__":
    main()
