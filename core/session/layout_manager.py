"""`LayoutManager`: lays a session's weights out, changes and takes back layouts. Owns the session's `Phase` and `Layout`."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from weakref import WeakSet

import torch

from ..budget.ledger import BudgetLedger
from ..common.errors import BudgetError, CaromError, UnsupportedError
from ..device.engine import Engine
from ..device.vbar import NativeError
from ..metrics.meter import Meter
from ..model.tree_watch import Tree
from ..model.units import Carving
from ..placement import make_tier as tiers
from ..placement.bound_checkpoint import FileTensor
from ..placement.file_source import FileSource
from ..placement.host_store import HostStore
from ..placement.packer import without_codec
from ..placement.placement import Placement
from ..plan.residency import Plan
from ..streaming.streamer import Streamer
from ..streaming.vbar_slots import VbarSlots
from . import packed_residents, settings
from .host_tier import HostTier
from .layout import Layout, Outcome, Wanted
from .managed_module import ManagedModule
from .packed_residents import NotPacked
from .phase import Phase, advance
from .planner import Planner
from .summary import describe
from .weight_pool import WeightPool

logger = logging.getLogger("carom")
OutOfMemory = torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError

Fallback = Callable[[Wanted, BaseException], Wanted | None]


def no_fallback(failed: Wanted, error: BaseException) -> Wanted | None:
    """Return None: no other layout is tried."""
    return None


class LayoutManager:
    """The only one who lays a session's weights out.

    ``lock``: held by whoever changes the layout. ``wanted``: what the present or the next layout is asked for. ``graphs``:
    forwards whose backward may still come. ``leaving`` and ``laid_out``: called before a layout is taken back, and when one is made. ``write_streamed``:
    called where the model gives a weight of a file another value.
    """

    def __init__(
        self, module: ManagedModule, engine: Engine, host: HostTier, planner: Planner, ledger: BudgetLedger,
        pool: WeightPool, wanted: Wanted,
    ) -> None:  # fmt: skip
        self.module, self.engine, self.host = module, engine, host
        self.planner, self.ledger, self._pool = planner, ledger, pool
        self.lock = threading.RLock()
        self.wanted = wanted
        self.graphs: WeakSet[object] = WeakSet()
        self.leaving: Callable[[], object] = lambda: None
        self.laid_out: Callable[[], None] = lambda: None
        self.write_streamed: Callable[[FileTensor, torch.Tensor], None]
        self._phase = Phase.NEW
        self._layout: Layout | None = None
        # Of the last layout, complete or not: they may hold tensors that could not be brought home.
        self._placement: Placement | None = None
        self._streamer: Streamer | None = None

    # -- state

    @property
    def phase(self) -> Phase:
        """The state of the session's weights."""
        return self._phase

    def _enter(self, phase: Phase) -> None:
        self._phase = advance(self._phase, phase)

    @property
    def layout(self) -> Layout:
        """The layout in effect, or the last one of a parked or closed session."""
        assert self._layout is not None
        return self._layout

    @property
    def attached(self) -> bool:
        """Whether a layout is in effect."""
        return self._phase is Phase.ATTACHED

    @property
    def unused(self) -> bool:
        """Whether no layout was made yet, or the session was closed."""
        return self._layout is None or self._phase is Phase.CLOSED

    @property
    def vbar(self) -> VbarSlots | None:
        """The homes of units in a VBAR; None with torch's allocator."""
        return None if self._streamer is None else self._streamer.vbar

    @property
    def simple(self) -> bool:
        """Whether the host's memory holds all there is to the weights.

        Weights of files, in VBARs or of quantised modules lie otherwise in each layout.
        """
        return self.module.simple and self._pool.native is None

    @property
    def uses_vbars(self) -> bool:
        """Whether resident weights are to be in comfy-aimdo's VBARs."""
        return self._pool.native is not None

    @property
    def idle(self) -> bool:
        """Whether a layout is in effect, no pass is under way, and no graph needs the layout's units."""
        return self.attached and self.layout.streamer.idle and self.layout.streamer.unreferenced

    def present(self) -> Wanted:
        """Return what the session asks for now: `wanted` with the ledger's budget."""
        return dataclasses.replace(self.wanted, vram=self.ledger.vram)

    def note_plan(self, plan: Plan) -> None:
        """Replace the layout's plan by ``plan``, which says more exactly what is so already."""
        self._layout = dataclasses.replace(self.layout, plan=plan)

    def note_tree(self) -> None:
        """Take the module's present tree as the one that the layout is of."""
        self._layout = dataclasses.replace(self.layout, tree=Tree(self.module.root))

    def note_packed(self) -> None:
        """Let the plan say which units stay on the device packed by now."""
        layout = self.layout
        streamed = zip(layout.streamed_indices(), layout.placement.streamed, strict=True)
        packed = frozenset(index for index, unit in streamed if unit.on_device)
        nbytes = layout.placement.tier.device_bytes
        self.note_plan(dataclasses.replace(layout.plan, packed=packed, packed_bytes=nbytes))

    def need_open(self) -> None:
        """Raise CaromError if the session is closed."""
        if self._phase is Phase.CLOSED:
            raise CaromError("this session is closed; call carom.stream(module, ...) for a new one")

    def refuse_graphs(self) -> None:
        """Raise UnsupportedError while a backward is under way, or an autograd graph needs the layout's units."""
        if not self.attached:
            return
        streamer = self.layout.streamer
        with streamer.lock:
            needed = len(self.graphs) > 0 or not streamer.unreferenced or streamer.backward.running
        if needed:
            raise UnsupportedError(
                f"the budget of {self.module.name} cannot change between a forward and its backward: its weights would "
                "move, and the graph could not find them. Call backward() first, or drop what the forward returned (under "
                "torch.no_grad() nothing is kept), then set_budget() again"
            )

    # -- changes

    def attach(self, wanted: Wanted) -> None:
        """Make the session's first layout. Raises what building raises, with the module as it was."""
        self.wanted = wanted
        if self._phase is Phase.NEW:
            self._enter(Phase.LAYING_OUT)
        self._attach(wanted)

    def change(
        self, wanted: Wanted, fallback: Fallback = no_fallback, *, reuse: bool = True,
        between: Callable[[], None] | None = None,
    ) -> Outcome:  # fmt: skip
        """Take the present layout back and make the one that ``wanted`` describes.

        ``fallback``: asked for another layout where the device's memory does not suffice, until None is returned. ``reuse``:
        tensors on the device may stay there for the next layout. ``between``: called while no layout is in effect; where that
        fails, the next layout is made all the same, and the error is raised then.

        Where no layout can be made the session is parked and the error is raised: the weights are on the host or in their
        file, and the next forward tries again.
        """
        late: BaseException | None = None
        outcome = Outcome.TOOK
        with self.ledger.laying_out():
            try:
                self._take_down(reuse=reuse and self.simple, keep=True)
                if between is not None:
                    try:
                        between()
                    except BaseException as error:
                        late = error
                if self.module.quantized is not None:
                    self.module.quantized.renew()
                while True:
                    self.wanted = wanted
                    self.ledger.set(wanted.vram)
                    # What the allocator keeps is whole now: the new region must not be cut from the old.
                    self.engine.trim()
                    try:
                        self._attach(wanted)
                        break
                    except OutOfMemory as error:
                        following = fallback(wanted, error)
                        if following is None:
                            raise
                        wanted, outcome = following, Outcome.FELL_BACK
            except BaseException:
                self._park_after_failure()
                raise
        if late is not None:
            raise late
        return outcome

    def park(self, keep: bool = False) -> None:
        """Release the device. ``keep``: leave pinned host copies of all weights for a quick return."""
        if self._phase.parked:
            return
        with self.ledger.laying_out():
            self.ledger.keep_least()
            keep = keep and self.simple and not self.layout.placement.came_on_device
            try:
                self._take_down(reuse=keep, keep=keep)
            except BaseException:
                self._park_after_failure()
                raise
            interrupted: BaseException | None = None
            if keep:
                try:
                    self._copy_to_host()
                except BaseException as error:  # all is on the host: only copies for the way back are wanting
                    self.host.copies.clear()
                    logger.warning("carom: parked without pinned copies: %s", str(error))
                    interrupted = None if isinstance(error, Exception) else error
            self._enter_parked(Phase.ASIDE if keep else Phase.PARKED)
        self.engine.trim()  # what the layout held is the device's again, not this process's
        if interrupted is not None:
            raise interrupted

    def close(self, discard: bool = False) -> None:
        """Give the module back as it was. ``discard``: leave on the device what is there. May be called again where it failed."""
        if self._phase is Phase.CLOSED:  # values that found no memory last time
            self.module.unbind(self.host, self.engine)
            return
        placement = self._placement
        if placement is not None and self.attached and not discard:
            placement.tier.unpack(self.layout.streamer, placement.streamed, pin=False)
        if placement is not None:
            if discard:
                placement.device_tensors.hand_over()  # stays there: nobody wants it back
            try:
                self._take_down(reuse=False, keep=False)
            except BaseException:
                # The next close, or layout, brings home what is left on the device.
                self._enter_parked(Phase.PARKED)
                raise
            if discard:
                placement.tier.dress()
                self.host.shelf = {}
        self._enter(Phase.CLOSED)

    def finish(self) -> None:
        """After `close`: give up host copies, and give the module its own tensors and forwards back."""
        self.host.copies.clear()
        self.module.unbind(self.host, self.engine)

    def shrunk(self, failed: Wanted) -> Wanted | None:
        """Return ``failed`` with less VRAM, after the device's memory did not suffice; None where the budget is fixed."""
        ledger = self.ledger
        memory = None if ledger.governor is None else ledger.memory()
        if ledger.governor is None or memory is None:
            return None
        smaller = ledger.governor.short(memory, failed.vram, ledger.least_bytes)
        return None if smaller is None else dataclasses.replace(failed, vram=smaller)

    # -- building

    def _attach(self, wanted: Wanted) -> None:
        try:
            self._layout = self._build(wanted)
        except NativeError as error:
            self._pool.refuse(str(error))
            self._layout = self._build(wanted)
        except NotPacked as error:  # what was packed need not be packed again
            assert wanted.packing is not None
            logger.info("carom: %s: nothing stays on the device packed", error)
            self.wanted = dataclasses.replace(
                wanted, packing=dataclasses.replace(wanted.packing, stay_on_device=False)
            )
            self._layout = self._build(self.wanted)
        self._enter(Phase.ATTACHED)
        self.laid_out()
        self.ledger.holder.account()
        layout = self._layout
        logger.info("carom: %s", describe(layout.plan, len(layout.carving.units), self.engine.name))

    def _build(self, wanted: Wanted) -> Layout:
        """Make the layout that ``wanted`` describes, or leave nothing of it behind."""
        engine, module = self.engine, self.module
        self.host.begin_layout(
            wanted.ram, [note for note in (wanted.note, settings.device_note(engine)) if note]
        )
        meter = Meter(engine)
        carving, plan = self.planner.plan(wanted, self._layout)
        placement = self._make_placement(wanted, carving, plan)
        before, self._placement = self._placement, placement
        placement.device_tensors.take_over([] if before is None else before.device_tensors.hand_over())
        try:
            resident, streamed = self._pool.divide(carving, plan, wanted.ram, module.checkpoint is not None)
            needed = [entry for entry, _ in carving.resident]
            in_units = [entry for unit in carving.units for entry in unit.entries]
            for entry in (*in_units, *needed, *carving.adapters):
                engine.belongs_to_host(entry.tensor, entry.name)
            simple = self.simple
            placement.keep_matching_residents(resident, needed, carving.adapters, streamed if simple else ())
            self.host.copies.keep_only(carving.units if streamed and simple else ())
            placement.keep(resident, needed, defer=simple)
            for entry in carving.adapters:
                placement.adapt(entry)
            streamer = self._pool.make_streamer(
                carving, plan, streamed, meter, placement.tier, self.ledger, placement.resident_bytes
            )
            self._streamer = streamer
            placement.stream(streamed, streamer)
            placement.settled()
            if wanted.packing is not None and not wanted.packing.plain:
                placement.notes += without_codec(streamed)
            if module.quantized is not None:
                module.quantized.follow()
            streamer.fixed_bytes = plan.vram_budget_bytes - plan.region_bytes
            streamer.start(self.host.arena)
            placement.tier.left_device = self.note_packed
            if plan.packed:
                plan, packed = packed_residents.choose(plan, carving, placement, self.planner, engine.grain)
                placement.tier.stay_packed(packed)
            placement.tier.guard()
            # Compiled code would break at a resident's wrapped forward: its residents are all loaded when a pass begins.
            module.hooks.wrap_units(streamer, placement.tier.arriving and not self.planner.compiled())
            return Layout(wanted, carving, plan, placement, streamer, meter, Tree(module.root))
        except BaseException:
            self._take_down(reuse=False, keep=True)
            raise

    def _make_placement(self, wanted: Wanted, carving: Carving, plan: Plan) -> Placement:
        """Return a placement with the tier that the plan and the settings ask for."""
        host, checkpoint = self.host, self.module.checkpoint
        store = HostStore(host.arena, host.copies if self.simple else None, host.shelf)
        source = None if checkpoint is None else FileSource(checkpoint, wanted.ram, self.write_streamed)
        tier = tiers.make_tier(tiers.TierWish(self.engine, store, carving, plan, source, wanted.packing))
        return Placement(self.engine, store, tier)

    # -- taking back

    def _take_down(self, reuse: bool, keep: bool) -> None:
        """Take the last layout back, complete or not. Idempotent.

        ``reuse``: tensors on the device stay there, for the layout that follows at once. ``keep``: host copies are kept.
        """
        if self.attached:
            self.leaving()
            self._enter(Phase.LAYING_OUT)
        elif self._phase is not Phase.LAYING_OUT:
            self._enter(Phase.LAYING_OUT)
        self.module.hooks.unwrap_units()
        if self._streamer is not None:
            self._streamer.close()
        placement = self._placement
        if placement is not None:
            if reuse:
                placement.undo_keeping_residents()
            else:
                placement.undo()
        if self.module.quantized is not None:
            self.module.quantized.follow()
        if not keep:
            self.host.copies.clear()

    def _copy_to_host(self) -> None:
        """Let all units stream for a moment, so that each gets a host copy, and bring everything else home."""
        layout = self.layout
        placement = layout.placement
        try:
            placement.keep_matching_residents([], [], [], layout.carving.units)
            placement.stream(layout.carving.units, layout.streamer)
        finally:
            placement.undo()
        self.engine.trim()

    def _park_after_failure(self) -> None:
        """Take back what was done of a layout, and park. What cannot be taken back now is, by the next layout or `close`."""
        try:
            self._take_down(reuse=False, keep=False)
            self.ledger.keep_least()
        finally:
            self._enter_parked(Phase.PARKED)

    def _enter_parked(self, phase: Phase) -> None:
        """All weights are on the host or in their file: keep nothing wrapped but the root."""
        if self._placement is not None:
            self._placement.tier.dress()
        self.module.hooks.wrap_root()  # the next forward brings the weights back
        self._enter(phase)

    # -- settings that were tried

    def check(self, wanted: Wanted, keeps_ram: bool) -> None:
        """Raise BudgetError if ``wanted`` is impossible. ``keeps_ram``: the RAM budget is not what changes."""
        carving, plan = self.planner.plan(wanted, self._layout)
        checkpoint = self.module.checkpoint
        if checkpoint is not None:
            streamed = [unit for index, unit in enumerate(carving.units) if index not in plan.resident]
            checkpoint.require_ram(wanted.ram, streamed, plan.staging_bytes, keeps_ram)

    def try_plan(self, wanted: Wanted) -> Plan | None:
        """Return the plan for ``wanted``, None where there is no room for it."""
        try:
            return self.planner.plan(wanted, self._layout)[1]
        except BudgetError:
            return None
