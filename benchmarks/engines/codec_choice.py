"""Compares ``codec="auto"`` with each explicit setting: six models, three budgets, inference and training.

Without a GPU it runs on the simulated device, whose clock is virtual, so a step's seconds are exact and do not depend
on this machine. Each cell of the table then runs with ``codec="auto"`` on slower hosts as well, on which the choice must
be the same. In inference, packed weights are also decoded into a region with room for one decoded unit, and for two,
because a session chooses between these as well. With ``--cuda`` it runs four cells on the GPU.

    python -m carom.benchmarks.engines.codec_choice --json FILE
    python -m carom.benchmarks.engines.codec_choice --cuda --json FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...core.device.simulated import SimulatedDevice
from ...core.session.assembly import parts
from ...core.session.session import Session, stream
from ..results.provenance import ProvenanceError, provenance

CODECS = ("auto", "raw", "lossless")
PLACES = ("one", "two")  # decoded units for which the region has room
BUDGETS = (0.3, 0.5, 0.75)  # shares of the weights
BEFORE, SETTLE = 7, 4  # steps before the choice, and after it
HELD = 3  # most steps in which the device is held back before the choice
MEASURED = 4  # steps of a span on a GPU
SPANS = 3  # spans; the median counts
WITHIN = 1.03  # seconds of auto over those of the best explicit setting, at most; a cell with less between the explicit ones tells nothing
# Seconds that the simulated host takes to issue an operator, a copy or a decoding. A unit takes 10 to 20 of these, which
# is a third of the seconds that the device computes for it.
HOST_SECONDS = 8e-6
DELAYS = (2, 5, 10)  # multiples of the host's time by which slower hosts are delayed


class Part(nn.Module):
    """Two linear layers with a residual, and ``extra`` operators without weights, as attention has."""

    def __init__(self, width: int, inner: int, extra: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(inner, width, bias=False, dtype=torch.bfloat16)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        for _ in range(self.extra):
            y = torch.tanh(y)
        return x + self.down(y)


class Adapted(nn.Module):
    """A block of ``parts`` and the trainable pair of a LoRA beside it."""

    def __init__(self, width: int, inners: Sequence[int], rank: int, extra: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(width, inner, extra) for inner in inners)
        self.requires_grad_(False)
        self.a = nn.Linear(width, rank, bias=False, dtype=torch.bfloat16) if rank else None
        self.b = nn.Linear(rank, width, bias=False, dtype=torch.bfloat16) if rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for part in self.parts:
            y = part(y)
        return y + self.b(self.a(x)) if self.a is not None and self.b is not None else y


class Model(nn.Module):
    """Blocks after one another, checkpointed in training."""

    def __init__(self, width: int, blocks: Sequence[Sequence[int]], extra: int, train: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Adapted(width, inners, 4 if train else 0, extra) for inners in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x


@dataclass(frozen=True)
class Shape:
    """The shape of a model, and the device's computing for it.

    ``blocks``: for each block, the inner widths of its parts. ``ratio``: seconds of the link for all raw weights over
    seconds of computing a forward. ``decoder``: rate of the decoder over the rate of the link. docs/planning.md gives
    both rates for cards: the decoder's is 0.25 of the card's memory bandwidth.
    """

    name: str
    blocks: tuple[tuple[int, ...], ...]
    ratio: float
    decoder: float
    extra: int = 0
    width: int = 256
    tokens: int = 16

    def model(self, train: bool, device: str = "cpu") -> Model:
        """Return the model in host memory. ``device``: where its random weights are made, which is fast on a GPU."""
        with torch.device(device):
            return Model(self.width, self.blocks, self.extra, train).cpu()

    @property
    def nbytes(self) -> int:
        return sum(4 * self.width * inner for inners in self.blocks for inner in inners)

    @property
    def flops(self) -> float:
        return sum(4.0 * self.tokens * self.width * inner for inners in self.blocks for inner in inners)


H200, A100, RTX_4090, RTX_5090, RTX_4060 = 21.0, 15.0, 10.0, 8.0, 5.4  # `Shape.decoder` of these cards
SHAPES = (
    Shape("uniform, link binds", ((512,),) * 12, 6.0, H200),
    Shape("uniform, near the balance", ((512,),) * 12, 2.4, RTX_4090),
    Shape("uniform, computing binds", ((512,),) * 12, 1.0, RTX_4060),
    Shape("small blocks", ((256,),) * 32, 3.0, RTX_4090),
    Shape("double and single blocks", ((768, 256),) * 8 + ((512,),) * 16, 2.6, A100, extra=2),
    Shape("uneven", tuple((256 * (1 + n % 4),) for n in range(16)), 1.7, RTX_5090, extra=1),
)


def simulated(shape: Shape, host_seconds: float = 0.0) -> SimulatedDevice:
    """Return a device whose matrix products take 2 ms for a forward of ``shape``, and whose link has its ratio."""
    return SimulatedDevice(
        timing="early", flops=shape.flops / 2e-3, kernel_seconds=1e-6, copy_latency_seconds=1e-6, unpacks=True,
        link_bytes_per_second=shape.nbytes / (2e-3 * shape.ratio),
        decode_bytes_per_second=shape.decoder * shape.nbytes / (2e-3 * shape.ratio), host_seconds=host_seconds,
    )  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A row of the table: a model, a budget as a share of its weights, and the kind of step."""

    shape: Shape
    budget: float
    train: bool


def cells(shapes: Sequence[Shape] = SHAPES, budgets: Sequence[float] = BUDGETS) -> Iterator[Cell]:
    """Yield the cells of the table."""
    for shape in shapes:
        for budget in budgets:
            for train in (False, True):
                yield Cell(shape, budget, train)


def run(
    model: Model,
    cell: Cell,
    codec: str,
    device: Any,
    before: int,
    after: int = SETTLE,
    places: str | None = None,
) -> dict[str, Any]:
    """Return the seconds of a settled step of ``cell`` with ``codec``, and how weights crossed then.

    ``before``: number of steps before the session chooses. ``after``: number of steps after that and before those of a
    GPU that are measured. ``places``: one of `PLACES`, None for the session's choice.
    """
    cuda = not isinstance(device, SimulatedDevice)
    shape = cell.shape
    x = torch.randn(shape.tokens, shape.width, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.to(device) if cuda else x

    def step() -> None:
        if not cell.train:
            with torch.no_grad():
                model(x)
            return
        loss = model(x).float().square().mean()
        with engine.step():  # the simulated device's clock then also counts the backward
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    with stream(model, device=device, vram=int(cell.budget * shape.nbytes), codec=codec) as session:
        engine = parts(session).manager.engine
        if places is not None:
            decode_into(session, places)
        for _ in range(before):
            step()
        if places is None:
            session.tune()
        for _ in range(after):
            step()
        walls = []
        for _ in range(SPANS if cuda else 0):
            engine.synchronize()
            began = time.perf_counter()
            for _ in range(MEASURED):
                step()
            engine.synchronize()
            walls.append((time.perf_counter() - began) / MEASURED)
        report = session.report()
        return {
            "seconds": statistics.median(walls) if cuda else report.step_seconds,
            "predicted_seconds": report.predicted_seconds,
            "codec": "lossless" if report.packed_units else "raw",
            "one_decoded": parts(session).manager.layout.one_decoded,
            "wire_bytes_per_step": report.wire_bytes_per_step,
            "link_bytes_per_second": report.link_bytes_per_second,
            "compute_seconds": report.compute_seconds,
        }


def decode_into(session: Session, places: str) -> None:
    """Let the region have room for so many decoded units, and let the session not choose anything by itself."""
    manager, replan = parts(session).manager, parts(session).replan
    replan.at, wanted = float("inf"), manager.present()
    assert wanted.packing is not None
    packing = dataclasses.replace(wanted.packing, one_decoded=places == "one", auto=False)
    manager.change(dataclasses.replace(wanted, packing=packing), replan.fallback)


def row(cell: Cell, device: Any) -> dict[str, Any]:
    """Return the row of ``cell``: each codec's result, auto's seconds over the best explicit one's, and the seconds of
    the worst explicit one over the best one's. In inference also ``places``: packed weights by the number of decoded units
    for which the region has room, and auto's seconds over those of the best of these and raw.
    """
    free = (
        isinstance(device, SimulatedDevice) and not device.host_seconds
    )  # whether the device never waits for the host
    model = cell.shape.model(cell.train, "cpu" if isinstance(device, SimulatedDevice) else device)
    results = {codec: run(model, cell, codec, device, BEFORE if free else BEFORE + HELD) for codec in CODECS}
    best, worst = sorted(CODECS[1:], key=lambda codec: results[codec]["seconds"])
    found: dict[str, Any] = {}
    if not cell.train:
        ways = {places: run(model, cell, "lossless", device, BEFORE, places=places) for places in PLACES}
        least = min(one["seconds"] for one in (*ways.values(), results["raw"]))
        found = {"places": ways, "places_ratio": results["auto"]["seconds"] / least}
    gc.collect()
    return found | {
        "model": cell.shape.name,
        "budget": cell.budget,
        "mode": "train" if cell.train else "infer",
        "best": best,
        "chosen": results["auto"]["codec"],
        "ratio": results["auto"]["seconds"] / results[best]["seconds"],
        "spread": results[worst]["seconds"] / results[best]["seconds"],
        "results": results,
    }


def with_slow_hosts(cell: Cell) -> dict[str, str]:
    """Return the codec that ``codec="auto"`` chooses for ``cell`` by the host's delay, in multiples of `HOST_SECONDS`."""
    model = cell.shape.model(cell.train)
    hosts = {delay: simulated(cell.shape, (1 + delay) * HOST_SECONDS) for delay in DELAYS}
    return {
        str(delay): run(model, cell, "auto", host, BEFORE + HELD, after=0)["codec"]
        for delay, host in hosts.items()
    }


# The blocks of a DiT of width 3072: half resident on a GPU, few tokens (the link binds) and many (computing binds).
GPU_BLOCK = (12288, 6144)
GPU_CELLS = tuple(
    Cell(Shape(f"DiT of 12 blocks, {tokens} tokens", (GPU_BLOCK,) * 12, 0.0, 0.0, width=3072, tokens=tokens, extra=2), 0.5, train)
    for tokens in (1024, 8192)
    for train in (False, True)
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return ``rows`` as lines of text."""
    lines = [
        f"{'model':34} {'budget':>6} {'mode':>6} {'raw ms':>8} {'packed ms':>9} {'auto ms':>8} {'ratio':>6}  {'chosen':8} {'one ms':>8} "
        f"{'two ms':>8}"
    ]
    for one in rows:
        seconds = [one["results"][codec]["seconds"] * 1e3 for codec in ("raw", "lossless", "auto")]
        lines.append(
            f"{one['model']:34} {one['budget']:6.2f} {one['mode']:>6} {seconds[0]:8.3f} {seconds[1]:9.3f} {seconds[2]:8.3f} "
            f"{one['ratio']:6.3f}  {one['chosen']:8} "
            + " ".join(
                f"{1e3 * one['places'][places]['seconds']:8.3f}" for places in PLACES if "places" in one
            )
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the table, print it, and write the record. Return 1 if a cell is not within `WITHIN`, or if a slower host
    changed a choice.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cuda", action="store_true", help="run four cells on the GPU")
    parser.add_argument("--json", type=Path, help="the file for the record")
    args = parser.parse_args(argv)
    try:
        kept = provenance(kept=args.json is not None)
    except ProvenanceError as error:
        print(f"codec_choice: {error}", file=sys.stderr)
        return 2
    rows = []
    for cell in GPU_CELLS if args.cuda else cells():
        one = row(cell, "cuda" if args.cuda else simulated(cell.shape))
        if not args.cuda:
            one["slow_hosts"] = with_slow_hosts(cell)
        rows.append(one)
        print(table([one]).splitlines()[1], flush=True)
    worst = max(one["ratio"] for one in rows)
    narrow = max(one.get("places_ratio", 0.0) for one in rows)
    tells = sum(one["spread"] > WITHIN for one in rows)
    turned = sum(any(codec != one["chosen"] for codec in one.get("slow_hosts", {}).values()) for one in rows)
    print(
        f"auto over the best explicit setting: {worst:.3f} at worst, in {len(rows)} cells; the explicit settings differ by "
        f"more than {WITHIN - 1:.0%} in {tells}; a slower host changed the choice in {turned}; auto over the best of raw and of "
        f"packed with one or two decoded units: {narrow:.3f} at worst"
    )
    if args.json is not None:
        record = {
            "schema": 1, "tool": "codec_choice", "arguments": list(argv or sys.argv[1:]), **kept,
            "device": "cuda" if args.cuda else "simulated, virtual clock", "worst_ratio": worst, "cells_that_tell": tells, "worst_places_ratio": narrow,
            "choices_turned": turned, "host_seconds": HOST_SECONDS, "rows": rows,
            "shapes": [dataclasses.asdict(cell.shape) for cell in GPU_CELLS[::2]] if args.cuda
            else [dataclasses.asdict(shape) for shape in SHAPES],
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return int(worst > WITHIN or turned > 0)


if __name__ == "__main__":
    sys.exit(main())
