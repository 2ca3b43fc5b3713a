"""The experiments of `auto_gpu.py`: vram="auto" against hand-set budgets on small cards, and two models in one
budget.

Without a GPU they run on the simulated device, whose memory is scaled with the size of the blocks.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from ...core.budget.shared_budget import SharedBudget
from ...core.common.errors import BudgetError
from ...core.device.simulated import SimulatedDevice
from ...core.device.stream_engine import StreamEngine
from ...core.metrics.meter import Meter
from ...core.placement.resident_placer import ResidentPlacer
from ...core.session.assembly import parts
from ...core.session.session import stream
from ...tools.planner.presets import CONTEXT_BYTES
from ..hosts.card import Card
from .case import Case
from .dit import make_inputs
from .mapped_model import Pages, make_model

GB = 1e9
FULL_BLOCK = Case(d=3072).block_bytes  # bytes of a block of the model for which the cards are chosen
QUIET_STEPS, QUIET_SECONDS = 12, 1.0  # a session has settled after this long without a new layout
MEASURED = 6


@dataclass(frozen=True)
class Bench:
    """The settings of the experiments.

    ``case``: the model and its sizes; ``over``: the model's bytes divided by the card's bytes; ``codec``: as in
    `stream`; ``cuda``: whether a GPU is used instead of the simulated device.
    """

    case: Case
    over: float = 1.4
    codec: str = "raw"
    cuda: bool = True

    def depth(self, card: float) -> int:
        """Return the number of blocks of a model that is ``over`` times as large as a card of ``card`` GB."""
        return math.ceil(self.over * self.memory(card) / self.case.block_bytes)

    def memory(self, card: float) -> int:
        """Return the bytes of a card sold as ``card`` GB; on the simulated device, scaled by the size of its blocks."""
        return int(card * GB * (1 if self.cuda else self.case.block_bytes / FULL_BLOCK))

    def device(self, memory: int) -> Any:
        """Return the argument ``device=`` for a session on a device with ``memory`` bytes.

        On CUDA `SmallCard` limits the memory instead.
        """
        if self.cuda:
            return "cuda"
        return SimulatedDevice(
            timing="early", memory_bytes=memory, activation_bytes=memory // 16, kernel_seconds=3e-6, flops=2e11,
            link_bytes_per_second=self.case.block_bytes / 60e-6,
        )  # fmt: skip

    @property
    def place(self) -> torch.device:
        return torch.device("cuda" if self.cuda else "cpu")


class Run:
    """A model streamed by one session, run step by step."""

    def __init__(self, bench: Bench, case: Case, pages: Pages, **options: Any) -> None:
        self.mode = case.mode
        self.model = make_model(case, pages)
        self.inputs = make_inputs(case, bench.place)
        self.session = stream(self.model, codec=bench.codec, pool="torch", **options)
        self.engine = parts(self.session).engine
        self.digest = ""
        self.ooms_before = self._ooms()

    def _ooms(self) -> int:
        memory = self.engine.memory()
        return 0 if memory is None else memory.ooms

    @property
    def ooms(self) -> int:
        """The number of failed allocations, including failed allocations that were handled."""
        return self._ooms() - self.ooms_before

    def step(self) -> torch.Tensor:
        x, c, target = self.inputs
        if self.mode == "infer":
            with torch.inference_mode():
                return self.model(x, c)
        self.model.zero_grad(set_to_none=True)
        found = self.model(x, c)
        torch.nn.functional.mse_loss(found.float(), target.float()).backward()
        return found.detach()

    def settle(self, seconds: float, least: int = QUIET_STEPS) -> dict[str, Any]:
        """Run steps until the layout has not changed for QUIET_SECONDS and ``least`` steps, or for about ``seconds``;
        return counts.
        """
        began, quiet_since, quiet = time.monotonic(), time.monotonic(), 0
        layouts = steps = failed = 0
        placement = parts(self.session).manager.layout.placement
        real = isinstance(self.engine, StreamEngine) and not self.engine.virtual_clock
        calm = QUIET_SECONDS if real else 0.0
        while (quiet < least or time.monotonic() - quiet_since < calm) and (
            time.monotonic() - began < seconds or quiet < 4
        ):
            try:
                self.step()
                if steps % 4 == 3:
                    self.engine.synchronize()
            except torch.OutOfMemoryError as error:
                failed += 1
                del error
                if failed > 8:
                    break
            steps, quiet = steps + 1, quiet + 1
            if parts(self.session).manager.layout.placement is not placement:
                placement, quiet, quiet_since = (
                    parts(self.session).manager.layout.placement,
                    0,
                    time.monotonic(),
                )
                layouts += 1
        return {"steps": steps, "layouts": layouts, "failed_steps": failed, "settled": quiet >= least,
                "seconds": time.monotonic() - began}  # fmt: skip

    def measure(self, count: int = MEASURED) -> dict[str, Any]:
        """Return medians over ``count`` steps; ``host_s``: seconds that the host spends in the calls of a step."""
        marks, hosts = [], []
        self.engine.synchronize()
        for _ in range(count):
            begin, first = time.perf_counter(), self.engine.mark()
            found = self.step()
            marks.append((first, self.engine.mark()))
            hosts.append(time.perf_counter() - begin)
        self.engine.synchronize()
        self.digest = hashlib.sha256(found.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        report, memory = self.session.report(), self.engine.memory()
        return {
            "step_s": statistics.median(self.engine.elapsed(*pair) for pair in marks),
            "host_s": statistics.median(hosts),
            "budget_bytes": self.session.vram,
            "held_bytes": parts(self.session).ledger.held_bytes,
            "free_bytes": None if memory is None else memory.free,
            "cached_bytes": None if memory is None else memory.cached,
            "streamed_bytes": parts(self.session).manager.layout.placement.streamed_host_bytes,
            "wire_bytes_per_step": report.wire_bytes_per_step,
            "predicted_s": report.predicted_seconds,
            "stall_s": report.stall_seconds,
            "roofline_s": report.roofline_seconds,
            "units": report.units,
            "digest": self.digest,
        }

    def close(self) -> None:
        """Close the session and drop the model, whose resident weights are still on the device."""
        self.session.close(discard=True)
        self.model, self.session, self.inputs = None, None, ()  # type: ignore[assignment]
        give_back()


def give_back() -> None:
    """Free the memory of deleted objects: collect garbage and empty the device's cache."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class SmallCard:
    """A context manager that makes the card small by a second process that holds the rest; does nothing without a
    GPU.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._holder = Card(0) if bench.cuda else None

    def __enter__(self) -> SmallCard:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._holder is not None:
            self._holder.__exit__(*exception)

    def become(self, card: float) -> None:
        """Reduce the card to ``card`` GB.

        This process's CUDA context exists already and counts as part of the small card's memory, so CONTEXT_BYTES is
        subtracted.
        """
        if self._holder is not None:
            give_back()
            self._holder.leave(self._bench.memory(card) - CONTEXT_BYTES)

    def figures(self) -> dict[str, int]:
        """Return `Card.figures`; {} without a GPU."""
        return {} if self._holder is None else self._holder.figures()


def warm_up(bench: Bench, pages: Pages) -> None:
    """Load the kernels, whose memory belongs to the context's share of the card."""
    for mode in ("infer", "train"):
        run = Run(bench, bench.case.but(mode=mode, depth=2), pages, device=bench.device(bench.memory(8)), vram=bench.case.block_bytes * 2)  # fmt: skip
        run.step()
        run.close()


def on_card(bench: Bench, card: float, mode: str, tokens: int, pages: Pages, until: float) -> dict[str, Any]:
    """Run vram="auto" until the layout settles, then hand-set budgets near the resulting budget until time ``until``;
    return figures.

    ``until``: a time of `time.monotonic`.
    """
    memory, began = bench.memory(card), time.monotonic()
    case = bench.case.but(mode=mode, tokens=tokens, depth=bench.depth(card))
    found: dict[str, Any] = {"card_gb": card, "mode": mode, "tokens": tokens, "blocks": case.depth,
                             "model_bytes": case.weight_bytes}  # fmt: skip
    run = Run(bench, case, pages, device=bench.device(memory), vram="auto")
    try:
        settled = run.settle((until - began) * 0.6)
        found["auto"] = {**settled, **run.measure(), "ooms": run.ooms}
    finally:
        run.close()
    auto = found["auto"]
    tried: list[dict[str, Any]] = []
    held, free = auto["held_bytes"], auto["free_bytes"] or 0
    budgets = (held + 0.95 * free, held + 0.5 * free, held, 0.85 * held)
    for budget in dict.fromkeys(int(b) for b in budgets):
        if tried and time.monotonic() > until:
            break
        tried.append(_hand_set(bench, case, memory, budget, pages))
    found["hand_set"] = tried
    works = [one for one in tried if "step_s" in one]
    if works:
        best = min(works, key=lambda one: one["step_s"])
        found |= {"best_s": best["step_s"], "best_budget_bytes": best["budget_bytes"],
                  "ratio": auto["step_s"] / best["step_s"],
                  "exact": all(one["digest"] == auto["digest"] for one in works)}  # fmt: skip
    found["seconds"] = time.monotonic() - began
    return found


def _hand_set(bench: Bench, case: Case, memory: int, budget: int, pages: Pages) -> dict[str, Any]:
    asked = {"budget_bytes": budget}
    run = failed = None
    try:
        run = Run(bench, case, pages, device=bench.device(memory), vram=budget)
    except (BudgetError, torch.OutOfMemoryError) as error:
        failed = f"{type(error).__name__} at attach"  # text only: error's frames hold tensors
    if run is None:
        give_back()
        return asked | {"failed": failed}
    try:
        for _ in range(6):
            run.step()
        run.session.tune()
        run.step()
        return {**run.measure(), **asked, "ooms": run.ooms}
    except torch.OutOfMemoryError:
        return asked | {"failed": "out of memory in a step"}
    finally:
        run.close()


class Wire:
    """A context manager that counts all bytes copied to the device: for slots, and for residents loaded by each
    layout.
    """

    def __init__(self) -> None:
        self.slots = self.loads = 0

    def __enter__(self) -> Wire:
        self._undo = contextlib.ExitStack()
        copied = Meter.copied

        def counted(meter: Meter, name: str, marks: Any, nbytes: int, *args: Any) -> None:
            copied(meter, name, marks, nbytes, *args)
            self.slots += nbytes

        for name in ("keep", "place_deferred"):
            self._put(ResidentPlacer, name, self._loading(getattr(ResidentPlacer, name)))
        self._put(Meter, "copied", counted)
        return self

    def _loading(self, call: Any) -> Any:
        def counted(placer: ResidentPlacer, *args: Any, **more: Any) -> Any:
            before = placer.loaded_bytes
            result = call(placer, *args, **more)
            self.loads += placer.loaded_bytes - before
            return result

        return counted

    def _put(self, owner: type, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    @property
    def total(self) -> int:
        return self.slots + self.loads


def alternating(bench: Bench, depth: int, tokens: int, rounds: int, pages: Pages) -> dict[str, Any]:
    """Run two models in turn under one budget that holds 1.5 models, and under fixed splits of that budget; return
    figures.

    The copies of all steps count, including those of the layout changes.
    """
    case = bench.case.but(mode="infer", tokens=tokens, depth=depth)
    budget = int(1.5 * case.weight_bytes)
    device = bench.device(4 * budget)
    most = case.weight_bytes + case.weight_bytes // 16  # enough to hold one model completely
    splits = []
    for share in (0.5, 0.6, 0.7):
        vrams = [min(most, int(part * budget)) for part in (share, 1 - share)]
        splits.append({"share": share, **_take_turns(bench, case, device, vrams, rounds, pages)})
    shared = SharedBudget(budget)
    together = _take_turns(bench, case, device, [shared, shared], rounds, pages)
    best = min(split["wire_bytes"] for split in splits)
    return {"model_bytes": case.weight_bytes, "budget_bytes": budget, "rounds": rounds, "fixed": splits,
            "shared": together, "ratio": together["wire_bytes"] / best,
            "exact": len({one["digest"] for one in (*splits, together)}) == 1}  # fmt: skip


def _take_turns(
    bench: Bench, case: Case, device: Any, vrams: list[Any], rounds: int, pages: Pages
) -> dict[str, Any]:
    began = time.monotonic()
    with Wire() as wire:
        runs = [Run(bench, case, pages, device=device, vram=vram) for vram in vrams]
        layouts, last_change, held = 0, 0, 0
        placements = [parts(run.session).manager.layout.placement for run in runs]
        for number in range(rounds):
            for run in runs:
                run.step()
            held = max(held, sum(parts(run.session).ledger.held_bytes for run in runs))
            now = [parts(run.session).manager.layout.placement for run in runs]
            if any(a is not b for a, b in zip(now, placements, strict=True)):
                layouts, last_change, placements = layouts + 1, number, now
        reports = [run.session.report() for run in runs]
        # More than one transfer of a unit in a forward would be a reload of what that forward evicted.
        twice = max(report.transfers_per_weight or 0.0 for report in reports)
        digests = [run.measure(1)["digest"] for run in runs]
        for run in runs:
            run.close()
    return {"wire_bytes": wire.total, "slot_bytes": wire.slots, "loaded_bytes": wire.loads, "most_held_bytes": held,
            "layouts": layouts, "last_change_round": last_change, "transfers_per_weight": twice,
            "digest": "/".join(digests), "seconds": time.monotonic() - began}  # fmt: skip


def sliced(until: float, shares: list[float]) -> float:
    """Return the time by which the first remaining part must end, if the time until ``until`` is split in proportion
    to ``shares``.
    """
    now = time.monotonic()
    return now + max(0.0, until - now) * shares[0] / sum(shares)
