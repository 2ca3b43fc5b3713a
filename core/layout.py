"""A session's layout, which is its units and where each one waits: decided, put into effect on its module, taken back.

The base of `Session`, over its other parts, which ask for another layout with `_again`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakSet

from . import decide, replan, settings
from .account import describe
from .adapt import Adapts, OutOfMemory
from .adopt import Adopts
from .aimdo import NativeError
from .attach import Placement
from .disk import Disk, DiskPlacement
from .disk_residents import Residents
from .errors import BudgetError, UnsupportedError
from .learn import Learnt
from .meter import Meter
from .packed_placement import PackedPlacement
from .packing import Packing, without_codec
from .parking import Parks
from .plan import Plan
from .pooling import Pools
from .recode import NotPacked
from .report import Report
from .simulated import SimulatedEngine
from .tree import Tree
from .units import Carving, stands
from .values import Values

logger = logging.getLogger("carom")

_SEARCHED = 8  # plans that are remembered


class LaysOut(Pools, Parks, Adapts, Adopts, Values):
    """Lays out the weights of a `Session` (which see for the fields)."""

    _granularity: str
    _training: str | None
    _spill: str
    _searched: dict[Hashable, tuple[Learnt, Carving, Plan]]  # by what was asked for
    _final: Report
    _graphs: WeakSet[Any]  # of forwards whose backward may still come

    def _unbind(self) -> None:
        raise NotImplementedError

    # -- decided

    def _decide(self) -> tuple[Carving, Plan]:
        """Units and residency under the present settings."""
        chosen, grain = self._settings(), self._engine.grain
        if self._learnt is None:
            return decide.decide(self.module, chosen, grain)
        if self._among is not None and stands(self._carving, self.module):
            with contextlib.suppress(BudgetError):
                return self._carving, decide.plan_within(self._carving, chosen, grain)
        # The search takes tenths of a second; two models that take turns ask for the same budgets again and again.
        known = self._searched.get(self._search_key())
        if known is not None and known[0] is self._learnt and stands(known[1], self.module):
            return known[1], known[2]
        carving, plan = replan.decide_with(self.module, chosen, grain, self._learnt)
        self._remember(self._learnt, carving, plan)
        return carving, plan

    def _search_key(self) -> tuple[Any, ...]:
        """What a search depends on, beside what was learnt and the module."""
        policy = self._packing and dataclasses.replace(self._packing, auto=False)
        return self._vram, policy, frozenset(self._stay)

    def _remember(self, learnt: Learnt, carving: Carving, plan: Plan) -> None:
        """What was searched for the present settings by what was ``learnt``."""
        if len(self._searched) >= _SEARCHED:
            self._searched.clear()
        self._searched[self._search_key()] = learnt, carving, plan

    def _settings(self, known: bool = False) -> decide.Settings:
        """What a layout is asked for; ``known``: times are, whether or not they are taken already."""
        from_file = None if self._checkpoint is None else self._checkpoint.of
        chosen = self._packing
        packs = chosen is not None and not chosen.plain
        filed = None if self._checkpoint is None else self._checkpoint.wires
        here = chosen is not None and chosen.here and packs and self._engine.unpacks
        # Packing what could stay raw takes its time and host memory: where a step's times say that it pays.
        here = here and (known or self._stays_packed())
        wires = self._wire_bytes if here else None
        return decide.Settings(
            self._vram, self._granularity, self._training or self._kept, self._stay, from_file, packs or filed is not None,
            self._among, wires, None if wires is None else self._unpacking_rate(),
            None if filed is None else filed.nbytes, self._backward,
        )  # fmt: skip

    # -- put into effect, and taken back

    def _attach(self) -> None:
        try:
            self._attach_with_pool()
        except NativeError as error:
            self._refuse_pool(str(error))
            self._attach_with_pool()
        except (
            NotPacked
        ) as error:  # what was to stay so stays as it is; what was packed need not be packed again
            assert self._packing is not None
            logger.info("carom: %s: nothing stays on the device packed", error)
            self._packing = dataclasses.replace(self._packing, here=False)
            self._attach_with_pool()

    def _attach_with_pool(self) -> None:
        self._arena.renew(self._pin_limit())
        self._arena.notes += [note for note in (self._spill, settings.device_note(self._engine)) if note]
        disk = None
        if self._checkpoint is not None:
            residents = Residents(self._engine, self._arena)
            disk = Disk(self._checkpoint, self._ram, self._write_streamed, residents)
        self._meter = Meter(self._engine)
        if self._room is not None:
            self._room.begin_anew()
        self._carving, self.plan = self._decide()
        before: Placement | None = self.__dict__.get("_placement")
        placement = self._new_placement(disk)
        placement.here.receive([] if before is None else before.here.given())
        self._placement = placement
        try:
            resident, streamed = self._divide(disk)
            needed = [entry for entry, _ in self._carving.resident]
            if isinstance(self._engine, SimulatedEngine):
                in_units = [entry for unit in self._carving.units for entry in unit.entries]
                for entry in (*in_units, *needed, *self._carving.adapters):
                    self._engine.belongs_to_host(entry.tensor, entry.name)
            self._placement.keep_received(
                resident, needed, self._carving.adapters, streamed if self._simple else ()
            )
            self._copies.only(self._carving.units if streamed and self._simple else ())
            self._placement.keep(resident, needed, in_turn=self._simple)
            for entry in self._carving.adapters:
                self._placement.adapt(entry)
            self._streamer = self._make_streamer(disk, streamed)
            self._placement.stream(streamed, self._streamer.add)
            self._placement.settled()
            if self._packing is not None and not self._packing.plain:
                self._placement.notes += without_codec(streamed)
            if self._laid_open is not None:
                self._laid_open.follow()
            self._streamer.fixed_bytes = self.plan.vram_budget_bytes - self.plan.region_bytes
            self._streamer.start(self._arena)
            self._streamer.stay_packed(self._stay_packed())
            self._streamer.packed_here.left = self._follow_packed
            self._reruns = self._make_reruns(resident)
            if isinstance(self._engine, SimulatedEngine):
                for unit in self._placement.streamed:
                    self._engine.guard(unit.block.data, unit.name)
            self._front.of_units(self._streamer, self._placement.streamed, self._reruns)
            self._tree = Tree(self.module)
            self._account()
            self._closed = self._parked = False
            logger.info("carom: %s", describe(self.plan, len(self._carving.units), self._engine.name))
        except BaseException:
            self._detach(keep=True)
            raise

    def _new_placement(self, disk: Disk | None) -> Placement:
        """Of the kind that the present plan and settings ask for."""
        copies = self._copies if self._simple else None
        if disk is not None:
            disk.staging_bytes = self.plan.staging_bytes
            return DiskPlacement(self._engine, self._arena, disk)
        if self._shelf or self._copies.packs or (self._packing is not None and self.plan.staging_bytes):
            return PackedPlacement(
                self._engine,
                self._arena,
                self._shelf,
                self._packing or Packing(),
                self.plan.staging_bytes,
                # Until the region is there, and what stays packed:
                self.plan.region_bytes + self.plan.staging_bytes + self.plan.packed_bytes,
                self._carving.largest,
                copies,
            )
        return Placement(self._engine, self._arena, copies)

    @property
    def _simple(self) -> bool:
        """Whether the host's memory holds all there is to the weights: those in files, in a native pool or quantised lie
        otherwise each time."""
        return self._checkpoint is None and self._native is None and not len(self._laid_open or ())

    def _detach(self, leave: bool = False, keep: bool = False) -> None:
        """``leave``: what is on the device may stay there, for the layout that follows at once; ``keep``: host copies
        are kept for one that comes later."""
        if not self._closed and not self._parked:
            self._follow_replaced()
            self._follow_made()
        self._front.step_aside()
        if self._reruns is not None:
            self._reruns.close()
            self._reruns = None
        streamer = self.__dict__.get("_streamer")
        if streamer is not None:
            streamer.close()
        if isinstance(self._engine, SimulatedEngine):
            for unit in self._placement.streamed:
                self._engine.unguard(unit.block.data)
        if leave:
            self._placement.leave()
        else:
            self._placement.undo()
        if self._laid_open is not None:
            self._laid_open.follow()
        if not keep:
            self._copies.clear()
        self._closed = True

    def _refuse_graphs(self) -> None:
        """Raises UnsupportedError where a backward is under way, or an autograd graph still wants today's layout."""
        if self._parked:
            return
        streamer = self._streamer
        with streamer.lock:
            wanted = len(self._graphs) > 0 or not streamer.unreferenced or streamer.backward.running
        if wanted:
            raise UnsupportedError(
                f"the budget of {type(self.module).__name__} cannot change between a forward and its backward: its weights would "
                "move, and the graph could not find them. Call backward() first, or drop what the forward returned (under "
                "torch.no_grad() nothing is kept), then set_budget() again"
            )

    def _lay_out(self) -> None:
        """Attach under the present budget, or under less where the device has not even that."""
        with self._laying_out():  # promised between two tries too
            while True:
                try:
                    return self._again(retry=True)
                except OutOfMemory:
                    memory = None if self._governor is None else self._memory()
                    smaller = None
                    if self._governor is not None and memory is not None:
                        smaller = self._governor.short(memory, self._vram, self._least())
                    if smaller is None:
                        self._copies.clear()
                        raise
                    self._vram = smaller

    def _again(self, between: Callable[[], None] = lambda: None, retry: bool = False) -> None:
        """Detach and attach under the present settings; ``between`` runs while detached: where it fails, all is laid out
        all the same.

        Where this fails, whatever the reason, the session is parked: its weights are on the host or in their file, and the
        next forward tries again. ``retry``: the caller may try other settings where the device's memory does not suffice;
        until then host copies are kept.
        """
        with self._laying_out():
            failure: BaseException | None = None
            try:
                self._detach(leave=retry and self._simple, keep=True)
                try:
                    between()
                except BaseException as error:
                    failure = error
                if self._laid_open is not None:
                    self._laid_open.renew()
                # What the allocator keeps is whole now: the new region must not be cut from the old.
                self._engine.trim()
                self._attach()
            except BaseException as error:
                self._rest_parked(keep=retry and isinstance(error, OutOfMemory))
                raise
        if failure is not None:
            raise failure
