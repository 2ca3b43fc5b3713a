"""`LayoutManager`: makes, changes and undoes the layouts of a session. Owns the session's `Phase` and
`Layout`.

A layout assigns each weight to device memory, or to host memory or a file from which it is streamed. A
session is parked while it has no layout and uses no device memory; its next forward makes a layout again. A
unit is a group of weights that are copied to the device together. Residents stay on the device. A VBAR is a
range of device addresses of comfy-aimdo, whose pages can lose their memory to other programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from weakref import WeakSet

import torch

from ..budget.ledger import BudgetLedger
from ..common.errors import BudgetError, CaromError
from ..common.run_all import run_all
from ..device.engine import Engine
from ..device.vbar import NativeError
from ..metrics.meter import Meter
from ..model.tree_watch import Tree
from ..model.units import Carving
from ..placement.backing import Backing
from ..placement.bound_checkpoint import FileTensor
from ..placement.file_source import FileSource
from ..placement.host_copies import HostStore
from ..placement.packer import host_bytes, without_codec
from ..placement.placement import Placement
from ..placement.store_kinds import StoreWish, make_tier
from ..plan.residency import Plan
from ..streaming.runner import Runner
from ..streaming.streamer import Streamer
from ..streaming.unit_schedules import kept_units
from ..streaming.vbar_slots import VbarSlots
from . import managed_module, packed_residents, rule_planner, settings
from .host_resources import HostResources
from .layout import Layout, Outcome, Wanted
from .managed_module import ManagedModule
from .packed_residents import NotPacked
from .pass_gate import PassGate
from .phase import Phase, advance
from .planner import Planner
from .summary import describe, training_note
from .weight_pool import WeightPool

logger = logging.getLogger("carom")
OutOfMemory = torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError

Fallback = Callable[[Wanted, BaseException], Wanted | None]


def no_fallback(failed: Wanted, error: BaseException) -> Wanted | None:
    """Return None. The default for ``fallback`` in `LayoutManager.change`: no other layout is tried."""
    return None


class LayoutManager:
    """The only object that makes and undoes a session's layouts.

    ``lock``: held by a thread while it changes the layout.
    ``wanted``: the request for the present or the next layout.
    ``gate``: tells when a change may begin.
    ``leaving``: called before a layout is undone.
    ``laid_out``: called after a layout was made.
    ``write_streamed``: called when the model assigns new values to a weight from a file.
    """

    def __init__(
        self, module: ManagedModule, engine: Engine, host: HostResources, planner: Planner, ledger: BudgetLedger,
        pool: WeightPool, wanted: Wanted,
    ) -> None:  # fmt: skip
        self.module, self.engine, self.host = module, engine, host
        self.planner, self.ledger, self._pool = planner, ledger, pool
        self.lock = threading.RLock()
        self.gate = PassGate(self.lock, module.name, self._attached_runner)
        self.wanted = wanted
        self.leaving: Callable[[], object] = lambda: None
        self.laid_out: Callable[[], None] = lambda: None
        self.write_streamed: Callable[[FileTensor, torch.Tensor], None]
        self._phase = Phase.NEW
        self._finished = False
        # The backings of all layouts that still exist. Each is in a reference cycle with its homes.
        self._backings: WeakSet[Backing] = WeakSet()
        self._layout: Layout | None = None
        # The placement and streamer of the last layout, which may be incomplete. They may hold tensors that
        # could not be moved back to their original devices. The streamer is handed on to what serves the layout with it
        # (hooks, tier); the manager itself uses it as a `Runner`.
        self._placement: Placement | None = None
        self._streamer: Streamer | None = None
        self._vbar: VbarSlots | None = None
        self._known = managed_module.recall_known(module.root)  # what earlier layouts have shown

    # -- state

    @property
    def phase(self) -> Phase:
        """The state of the session's weights."""
        return self._phase

    def _enter(self, phase: Phase) -> None:
        self._phase = advance(self._phase, phase)

    @property
    def layout(self) -> Layout:
        """The layout in effect. For a parked or closed session, the last layout."""
        assert self._layout is not None
        return self._layout

    @property
    def attached(self) -> bool:
        """Whether a layout is in effect."""
        return self._phase is Phase.ATTACHED

    def _attached_runner(self) -> Runner | None:
        """Return the layout's runner, None if no layout is in effect."""
        return self.layout.runner if self.attached else None

    @property
    def unused(self) -> bool:
        """Whether no layout has been made yet, or the session was closed."""
        return self._layout is None or self._phase is Phase.CLOSED

    @property
    def vbar(self) -> VbarSlots | None:
        """The units' memory in a VBAR, None if torch's allocator is used."""
        return self._vbar

    @property
    def simple(self) -> bool:
        """Whether all weights are plain tensors in memory, so that the next layout can reuse residents and
        host copies.

        False for weights from files, weights in VBARs and quantised modules: each layout stores these again.
        """
        return self.module.simple and self._pool.native is None

    @property
    def uses_vbars(self) -> bool:
        """Whether layouts put weights that stay on the device into VBARs."""
        return self._pool.native is not None

    def leave_vbars(self, reason: str) -> None:
        """Put no weights into VBARs. Called before the first layout. ``reason``: for the report."""
        if self.uses_vbars:
            self._pool.refuse(reason)

    def present(self) -> Wanted:
        """Return `wanted` with the present VRAM budget of the ledger."""
        return dataclasses.replace(self.wanted, vram=self.ledger.vram)

    def note_plan(self, plan: Plan) -> None:
        """Replace the layout's plan by ``plan``, a more exact description of the present state. No weights
        are moved.
        """
        self._layout = dataclasses.replace(self.layout, plan=plan)

    def note_tree(self) -> None:
        """Record the module's present tree as the tree for which the layout was made."""
        self._layout = dataclasses.replace(self.layout, tree=Tree(self.module.root))

    def note_compiled(self) -> None:
        """Record that the layout serves a compiled module as it is."""
        placement = self.layout.placement
        placement.notes += rule_planner.divided([unit.unit for unit in placement.streamed])
        self._layout = dataclasses.replace(self.layout, compiled=True)

    def note_packed(self) -> None:
        """Update the plan with the units that now stay on the device packed, and with their bytes."""
        layout = self.layout
        streamed = zip(layout.streamed_indices(), layout.placement.streamed, strict=True)
        packed = frozenset(index for index, unit in streamed if unit.on_device)
        nbytes = layout.placement.tier.device_bytes
        self.note_plan(dataclasses.replace(layout.plan, packed=packed, packed_bytes=nbytes))

    def need_open(self) -> None:
        """Raise CaromError if the session is closed."""
        if self._phase is Phase.CLOSED:
            raise CaromError("this session is closed; call carom.stream(module, ...) for a new one")

    # -- changes

    def attach(self, wanted: Wanted) -> None:
        """Make the session's first layout. After an error, the module is as it was before."""
        self.wanted = wanted
        if self._phase is Phase.NEW:
            self._enter(Phase.LAYING_OUT)
        self._attach(wanted)

    def change(
        self, wanted: Wanted, fallback: Fallback = no_fallback, *, reuse: bool = True,
        between: Callable[[], None] | None = None,
    ) -> Outcome:  # fmt: skip
        """Undo the present layout, make the layout ``wanted``, and return the outcome.

        ``fallback``: called with the error if the device's memory does not suffice, or weights cannot move to
        disk; returns the next request to try, or None to give up.
        ``reuse``: whether tensors on the device may stay there for the next layout.
        ``between``: called while no layout is in effect. If it raises an error, the next layout is made
        nevertheless, and the error is raised afterwards.

        If no layout can be made, the session is parked and the error is raised. The weights are then in host
        memory or in their file, and the next forward tries again.
        """
        self.gate.refuse_running()
        late: BaseException | None = None
        outcome = Outcome.TOOK
        with self.ledger.laying_out():
            try:
                moves = self._exceeds_ram(wanted)
                self._take_down(reuse=reuse and not moves, keep=not moves)
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
                    # Release the allocator's cached blocks while they are free as a whole. Otherwise the
                    # allocator could take the new region out of the block of the old region.
                    self.engine.trim()
                    try:
                        self._attach(wanted)
                        break
                    except (OutOfMemory, CaromError) as error:
                        following = fallback(self.wanted, error)  # `_attach` may have replaced self.wanted
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
        """Release the device memory. ``keep``: keep pinned host copies of all weights if possible, for a
        quick return.
        """
        if self._phase.parked:
            return
        with self.ledger.laying_out():
            self.ledger.keep_least()
            self.host.parks |= keep
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
                except BaseException as error:  # the weights are in host memory, but not pinned
                    self.host.copies.clear()
                    logger.warning("carom: parked without pinned copies: %s", str(error))
                    interrupted = None if isinstance(error, Exception) else error
            self._enter_parked(Phase.ASIDE if keep else Phase.PARKED)
        self.engine.trim()  # return the allocator's cached memory to the device
        if interrupted is not None:
            raise interrupted

    def prepare_park(self, room: float) -> None:
        """Begin to make pinned blocks, of at most ``room`` bytes, for the residents that `park` would copy to the host."""
        with self.lock:
            self.host.parks = True
            if self.attached and self.simple and not self.engine.shares_host:
                placement = self.layout.placement
                if not placement.came_on_device:
                    self.host.spares.prepare(placement.residents.unsaved_bytes(), room)

    def close(self, discard: bool = False) -> None:
        """Restore the module as it was before the session. After a failure the call may be repeated.

        ``discard``: leave tensors that are on the device there.
        """
        if self._phase is Phase.CLOSED:
            return
        placement = self._placement
        failure: Exception | None = None
        if placement is not None and self.attached and not discard:
            self.unpack_streamed(pin=False)
        if placement is not None:
            if discard:
                # drop the records of these tensors, so that they stay on the device
                placement.device_tensors.hand_over()
            try:
                self._take_down(reuse=False, keep=False)
            except Exception as error:
                if not placement.undone:
                    # The next call of `close`, or the next layout, moves the remaining tensors off the device.
                    self._enter_parked(Phase.PARKED)
                    raise
                failure = error  # of the device, or of a reader; the weights are back
                if self._streamer is not None:
                    with contextlib.suppress(Exception):
                        self._streamer.close()  # once more, so that a passing error costs no memory
            if discard:
                placement.tier.dress()
                self.host.shelf = {}
        self.host.kept.clear()
        self._enter(Phase.CLOSED)
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Free host copies, and restore the module's own tensors and forwards. Called after `close`.

        Afterwards nothing refers to the module and its tensors. The parts of a session refer to each other, so they
        stay in memory until the garbage collector runs. After a failure the call may be repeated.
        """
        if self._finished:
            return
        self.host.copies.clear()
        self.host.spares.clear()
        self.module.unbind(self.host, self.engine)
        if self.host.image is not None:
            self.host.image.close()
        self._finished = True
        self.module.forget()
        self.planner.forget()
        for backing in self._backings:
            backing.forget()
        if self._placement is not None:
            self._placement.tier.forget()
        self._placement = self._streamer = self._vbar = None
        if self._layout is not None:
            self._layout = dataclasses.replace(
                self._layout, carving=Carving([], [], []), tree=Tree(torch.nn.Module())
            )

    def shrunk(self, failed: Wanted, error: BaseException) -> Wanted | None:
        """Return ``failed``, which ended in ``error``, with a smaller VRAM budget.

        Returns None if the budget is fixed, no smaller budget works, or the device's memory is not what was
        short.
        """
        if not isinstance(error, OutOfMemory):
            return None
        ledger = self.ledger
        memory = None if ledger.governor is None else ledger.memory()
        if ledger.governor is None or memory is None:
            return None
        smaller = ledger.governor.short(memory, failed.vram, ledger.least_bytes)
        return None if smaller is None else dataclasses.replace(failed, vram=smaller)

    # -- making a layout

    def _attach(self, wanted: Wanted) -> None:
        self.module.follow_replaced(wanted.ram)
        if wanted.gradients:
            self.host.unpack_trained(self.engine)
        if self._exceeds_ram(wanted) and self.module.move_to_disk(wanted.ram):
            # The device unpacks only what is packed in its file.
            self.wanted = wanted = dataclasses.replace(wanted, packing=None)
        try:
            self._layout = self._build(wanted)
        except NativeError as error:
            self._pool.refuse(str(error))
            self._layout = self._build(wanted)
        except NotPacked as error:  # weights that were packed in the first attempt are not packed again
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
        """Return the layout for the request ``wanted``. After an error, everything that was done for it is
        undone.
        """
        engine, module = self.engine, self.module
        self.host.begin_layout(
            wanted.ram,
            [note for note in (wanted.note, settings.device_note(engine), module.flat_views.note) if note],
        )
        meter = Meter(engine)
        carving, plan = self.planner.plan(wanted)
        placement = self._make_placement(wanted, carving, plan)
        before = self._placement
        # In this order, because an interrupt may come in between: one of the two has the records.
        if before is not None:
            placement.device_tensors.take_over(before.device_tensors.moved)
            placement.tier.take_over(before.tier)
        self._placement = placement
        if before is not None:
            before.device_tensors.hand_over()
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
            streamer, vbar = self._pool.make_streamer(
                carving, plan, streamed, meter, placement.tier, self.ledger, placement.resident_bytes
            )
            self._streamer, self._vbar = streamer, vbar
            self._backings.update(placement.stream(streamed, streamer))
            self.host.copies.drop_unused()
            placement.settled()
            if self.host.peers is not None:
                stay = {id(carving.units[index]) for index in plan.packed}
                known = self._known.order, self._known.schedules
                stay |= kept_units(placement.tier.backings, plan.region_bytes, *known)
                self.host.peers.place(placement.tier, stay, plan.slots)
                placement.notes += self.host.peers.notes
            if wanted.packing is not None and not wanted.packing.plain:
                placement.notes += without_codec(streamed)
            if module.quantized is not None:
                module.quantized.follow()
            streamer.start(self.host.arena, self._known.order, self._known.schedules)
            self.host.arena.log_refusals()
            placement.tier.left_device = self.note_packed
            if plan.packed:
                plan, packed = packed_residents.choose(plan, carving, placement, self.planner, engine.grain)
                placement.tier.stay_packed(packed)
            placement.tier.guard()
            compiled = self.planner.compiled()
            if compiled:
                placement.notes += rule_planner.divided(streamed)
            untrained = [e for u in carving.units for e in u.entries if e.untrained]
            placement.notes += training_note(untrained, carving, wanted.gradients)
            # A wrapped forward of a resident would break the graph of compiled code. So in a compiled module,
            # all residents are loaded when a pass begins.
            arriving = placement.tier.wrap_arriving if placement.tier.arriving and not compiled else None
            units, watched = ((), ()) if compiled else (carving.units, resident)
            module.hooks.wrap_units(streamer, arriving, units, module.quantized, watched)
            tree = Tree(module.root)
            return Layout(wanted, carving, plan, placement, streamer, meter, tree, compiled, bool(untrained))
        except BaseException:
            self._take_down(reuse=False, keep=True)
            raise

    def _exceeds_ram(self, wanted: Wanted) -> bool:
        """Return whether the weights would stream from host memory beyond ``wanted.ram``, and could stream from
        disk instead.
        """
        if self.module.disk is None or self.module.checkpoint is not None:
            return False
        try:
            carving, plan = self.planner.plan(wanted)
        except BudgetError:  # the least budget that the next layout's error names is that of weights on disk
            return self.ledger.holder.loading_bytes > wanted.ram
        streamed = [unit for index, unit in enumerate(carving.units) if index not in plan.resident]
        packs = wanted.packing is not None and not wanted.packing.plain
        return sum(host_bytes(unit, packs) for unit in streamed) > wanted.ram

    def _make_placement(self, wanted: Wanted, carving: Carving, plan: Plan) -> Placement:
        """Return a new placement, with the tier (the store of streamed units) that the plan and the settings
        require.
        """
        host, checkpoint = self.host, self.module.checkpoint
        store = HostStore(host.arena, host.copies if self.simple else None, host.shelf, host.spares)
        source = None
        if checkpoint is not None:
            checkpoint.make_room = host.kept.yield_bytes
            source = FileSource(
                checkpoint,
                host.own_ram(wanted.ram),
                self.write_streamed,
                host.kept,
                host.parks,
                host.image,
                host.gather,
            )
        wish = StoreWish(self.engine, store, carving, plan, source, wanted.packing, wanted.store)
        return Placement(self.engine, store, make_tier(wish))

    # -- undoing a layout

    def _take_down(self, reuse: bool, keep: bool) -> None:
        """Undo the last layout, even if it is incomplete. Idempotent.

        ``reuse``: leave tensors on the device, so that the next layout can use them.
        ``keep``: keep host copies.
        """
        steps: list[Callable[[], object]] = [self.leaving] if self.attached else []
        if self._phase is not Phase.LAYING_OUT:
            steps.append(lambda: self._enter(Phase.LAYING_OUT))
        steps.append(self.module.hooks.unwrap_units)
        if self._streamer is not None:
            steps += [self._note_order, self._streamer.close]
        if self.host.peers is not None:
            steps.append(self.host.peers.release)
        placement = self._placement
        if placement is not None:
            steps.append(self._undo_for_next(placement) if reuse else placement.undo)
        if self.module.quantized is not None:
            steps.append(self.module.quantized.follow)
        if not keep:
            steps.append(self.host.copies.clear)
        run_all(*steps, self.planner.forget_replaced)

    def _undo_for_next(self, placement: Placement) -> Callable[[], object]:
        """Return the method that undoes ``placement`` and leaves tensors on the device that the next layout can use."""
        return placement.undo_keeping_residents if self.simple else placement.undo_keeping_loaded

    def _note_order(self) -> None:
        """Keep the order in which units were used, for the next layout and the next session of the module."""
        order = None if self._streamer is None else self._streamer.learnt_order()
        if order is not None:
            self._known.order = order
            managed_module.note_known(self.module.root, self._known)

    def _copy_to_host(self) -> None:
        """Let all units use host copies, pinned if possible. Nothing stays on the device.

        Units without a host copy get one by a temporary layout that streams them.
        """
        layout, copies = self.layout, self.host.copies
        placement = layout.placement
        try:
            placement.put_aside(layout.carving.units)
            copied = copies.tensors()

            def waits(tensor: torch.Tensor) -> bool:
                """Whether the value of ``tensor`` is in a host copy, and can be read from there."""
                return id(tensor) in copied and (
                    id(tensor) not in self.host.shelf or "_carom" in tensor.__dict__
                )

            left = [
                unit
                for unit in layout.carving.units
                if not all(waits(entry.tensor) for entry in unit.entries)
            ]
            if left:
                assert self._streamer is not None
                self._backings.update(placement.stream(left, self._streamer))
        finally:
            placement.undo()
        self.engine.trim()

    def unpack_streamed(self, pin: bool = True) -> bool:
        """Decode all packed units that stream into host memory, as `Tier.unpack` does. Returns whether none failed. Called
        between passes, while a layout is in effect.
        """
        assert self._streamer is not None
        placement = self.layout.placement
        return not placement.tier.unpack(self._streamer, placement.streamed, pin=pin)

    def _park_after_failure(self) -> None:
        """Undo an incomplete layout, and park the session.

        Tensors that cannot be moved back now are moved by the next layout or by `close`.
        """
        try:
            self._take_down(reuse=False, keep=False)
            self.host.kept.clear()
            self.ledger.keep_least()
        finally:
            self._enter_parked(Phase.PARKED)

    def end_interrupted_change(self) -> None:
        """Park the session if an interrupt ended a change of layout halfway. Called with the lock held, outside of
        changes.
        """
        if self._phase is Phase.LAYING_OUT:
            self._park_after_failure()

    def _enter_parked(self, phase: Phase) -> None:
        """Enter the phase ``phase``. All weights are on the host or in their file."""
        if self._placement is not None:
            self._placement.tier.dress()
        self.module.hooks.wrap_parked()  # the next forward makes a layout again
        self._enter(phase)

    # -- checks of a request

    def check(self, wanted: Wanted, keeps_ram: bool) -> None:
        """Raise BudgetError if no layout for ``wanted`` is possible. ``keeps_ram``: whether the RAM budget
        stays the same.
        """
        if self._phase.parked:  # a layout may have failed for want of RAM for weights that were replaced
            self.module.follow_replaced(wanted.ram)
        carving, plan = self.planner.plan(wanted)
        checkpoint = self.module.checkpoint
        if checkpoint is not None:
            streamed = [unit for index, unit in enumerate(carving.units) if index not in plan.resident]
            checkpoint.require_ram(wanted.ram, streamed, plan.staging_bytes, keeps_ram)

    def try_plan(self, wanted: Wanted) -> Plan | None:
        """Return the plan for ``wanted``, or None if the budget is too small."""
        try:
            return self.planner.plan(wanted)[1]
        except BudgetError:
            return None
