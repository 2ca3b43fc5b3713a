"""What a change costs: switches between two models, and changes of budget, beside the passes around them.

    python -m carom.benchmarks.engines.switches --cuda --json FILE
    python -m carom.benchmarks.engines.switches

Two models of the DiT run in turns under one VRAM budget, as a host program lets them run: the one that has run is parked,
and the next pass of the other one brings it back. Their weights wait in RAM, or in a file. A switch is timed from the park
to the end of the first pass, and so is a change of budget. Its cost is the time beyond a settled pass of the model. The
floor is the time in which the link copies the weights that the layout keeps on the device. Without ``--cuda`` a small model
runs on the CPU, which tells that everything works and nothing about times.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...core.session.session import Session, stream
from ..results.provenance import ProvenanceError
from . import dit
from .case import Case
from .record import new_record, write_record

GIB = 1 << 30
ROUNDS = 5  # switches to each model
PASSES = 3  # passes after a change that are timed as settled ones


@dataclass(frozen=True)
class Cell:
    """``homes``: where weights wait, "ram" or "file". ``codec``: as in `carom.stream`."""

    homes: str
    codec: str

    @property
    def key(self) -> str:
        return f"{self.homes} {self.codec}"


SMALL = Case(d=256, depth=6)
CELLS = (Cell("ram", "raw"), Cell("ram", "auto"), Cell("file", "raw"))


class Model:
    """One model with its session."""

    def __init__(self, case: Case, cell: Cell, vram: int, device: torch.device, folder: Path) -> None:
        self.module = dit.build(case)
        self.inputs = dit.make_inputs(case, device)[:2]
        self._device = device
        options: dict[str, Any] = {}
        if cell.homes == "file":
            path = folder / f"{case.seed}.safetensors"
            save_file(dict(self.module.state_dict()), path)
            with torch.device("meta"):
                self.module = dit.Dit(case.d, case.depth, case.head_count).requires_grad_(False)
            options["weights"] = path
        self.session: Session = stream(self.module, vram=vram, codec=cell.codec, device=device, **options)

    def passed(self) -> float:
        """Return the seconds of one pass, until the device has done its work."""
        began = time.perf_counter()
        with torch.no_grad():
            self.module(*self.inputs)
        self.finish()
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait until the device has done its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def settled(self) -> float:
        """Return the median seconds of passes without a change."""
        return statistics.median(self.passed() for _ in range(PASSES))


def link_rate(device: torch.device) -> float | None:
    """Return the bytes a second of a pinned copy to ``device``, None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GIB, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(GIB / (time.perf_counter() - began))
    return statistics.median(rates)


def spread(values: list[float]) -> dict[str, float]:
    """Return the least, the median and the largest of ``values``."""
    return {"least": min(values), "median": statistics.median(values), "largest": max(values)}


def run(cell: Cell, case: Case, vram: int, device: torch.device, rate: float | None) -> dict[str, Any]:
    """Return the figures of one cell."""
    with tempfile.TemporaryDirectory() as folder:
        # What the first layout cannot know (times, the order of use) is learnt before anything is timed.
        models = []
        for seed in (1, 2):
            model = Model(Case(**{**case.to_dict(), "seed": seed}), cell, vram, device, Path(folder))
            for _ in range(8):
                model.passed()
            model.session.park(keep=True)
            models.append(model)
        result: dict[str, Any] = {"switches": [], "budgets": []}
        for turn in range(2 * ROUNDS):
            model, other = models[turn % 2], models[1 - turn % 2]
            began = time.perf_counter()
            other.session.park(keep=True)
            parked = time.perf_counter()
            first = model.passed()
            result["switches"].append({
                "park_seconds": parked - began, "first_pass_seconds": first, "settled_seconds": model.settled(),
                "resident_bytes": model.session.report().resident_bytes,
            })  # fmt: skip
        model = models[(2 * ROUNDS - 1) % 2]
        for budget in (vram - vram // 6, vram) * ROUNDS:
            began = time.perf_counter()
            model.session.set_budget(vram=budget)
            changed = time.perf_counter()
            first = model.passed()
            result["budgets"].append({
                "vram": budget, "change_seconds": changed - began, "first_pass_seconds": first,
                "settled_seconds": model.settled(),
            })  # fmt: skip
        for model in models:
            model.session.close(discard=True)
    # The first switch to each model is not among the figures: what it prepares is used by all later ones.
    later = result["switches"][2:]
    beyond = [s["park_seconds"] + s["first_pass_seconds"] - s["settled_seconds"] for s in later]
    result["beyond_seconds"] = spread(beyond)
    if rate is not None:
        result["copies_seconds"] = later[0]["resident_bytes"] / rate
        result["beyond_copies_seconds"] = spread([seconds - result["copies_seconds"] for seconds in beyond])
    result["budget_beyond_seconds"] = {
        way: spread([
            b["change_seconds"] + b["first_pass_seconds"] - b["settled_seconds"]
            for b in result["budgets"][2:] if (b["vram"] == vram) is larger
        ])
        for way, larger in (("smaller", False), ("larger", True))
    }  # fmt: skip
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m carom.benchmarks.engines.switches", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cuda", action="store_true", help="measure two models of 9.4 GB on the GPU")
    parser.add_argument(
        "--vram", type=float, default=6.0, help="GiB for weights of the GPU's models (default: 6)"
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, help="tokens of a pass on the GPU (default: 1024)"
    )
    parser.add_argument("--only", default="", help="cells, separated by commas, such as 'ram raw,file raw'")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    given = parser.parse_args(argv)
    try:
        record = new_record(
            "carom switches", sys.argv[1:] if argv is None else argv, kept=given.json is not None
        )
    except ProvenanceError as error:
        print(f"switches: {error}", file=sys.stderr)
        return 2
    if given.cuda and not torch.cuda.is_available():
        print("switches: --cuda needs a GPU that torch can use", file=sys.stderr)
        return 2
    device = torch.device("cuda:0" if given.cuda else "cpu")
    case = Case(d=3072, depth=27, tokens=given.tokens, heads=24) if given.cuda else SMALL
    vram = int(given.vram * GIB) if given.cuda else case.block_bytes * 4
    rate = record["link_bytes_per_second"] = link_rate(device)
    asked = [name.strip() for name in given.only.split(",") if name.strip()]
    for cell in CELLS:
        if asked and cell.key not in asked:
            continue
        result = run(cell, case, vram, device, rate)
        record["cases"].append({"key": cell.key, "vram": vram, "case": case.to_dict(), "result": result})
        print(json.dumps({"cell": cell.key, **{k: v for k, v in result.items() if "beyond" in k or k == "copies_seconds"}}),
              flush=True)  # fmt: skip
        if given.json:
            write_record(record, given.json)
        gc.collect()
        if given.cuda:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
