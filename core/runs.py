"""Runs of units: slot views stand in the modules while a unit's own forward runs, and for single operators.

One `Runs` serves one streamer, under its lock. It also knows which threads are in a step, and keeps
what a model writes to its weights while they are in a slot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import ops
from .deliver import Deliver
from .errors import UnsupportedError
from .from_host import NOWHERE
from .slots import Slot
from .store.arena import storage_bytes

if TYPE_CHECKING:
    from .streamed import Owner, Streamed
    from .streamer import Streamer


class _Mine(threading.local):
    """What each thread knows of its own runs."""

    def __init__(self) -> None:
        self.runs = 0  # of units and roots
        self.entered: list[tuple[Streamed, Slot]] = []  # units' runs in progress
        self.bounced = 0  # slots of operators in progress
        self.roots: list[
            tuple[int, int]
        ] = []  # root forwards in progress: what ``entered`` and ``runs`` were before
        self.hosting = False


class Runs:
    """The units' runs of one streamer, and its root's."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._under_way = 0  # units' runs
        self._bounced = 0  # slots that operators outside their units' runs use
        self._roots = 0  # root forwards
        self._local = _Mine()
        self._hosts: set[int] = set()  # threads that see the host tensors: they may keep views for a moment
        self.to_stay: dict[
            str, str
        ] = {}  # weights that better stay resident from the next layout on, and why

    @property
    def active(self) -> bool:
        """Whether a unit or the root runs now."""
        return bool(self._under_way or self._roots)

    def mine(self) -> int:
        """Slots that this thread's runs use."""
        return len(self._local.entered) + self._local.bounced

    def elsewhere(self) -> bool:
        """Whether another thread is in a forward, or takes a state dict."""
        if self._under_way + self._roots > self._local.runs:
            return True
        return bool(self._hosts) and self._hosts != {threading.get_ident()}

    def computing(self) -> bool:
        """Whether this thread is in a step: a root forward, a unit's run, or a backward."""
        if self._local.hosting:
            return False
        return self._local.runs > 0 or ops.in_backward()

    def in_forward(self) -> bool:
        """Whether this thread is in a forward of the root or of a unit."""
        return self._local.runs > 0 and not self._local.hosting

    def hosting(self, on: bool) -> None:
        """While on, this thread sees the host tensors, in a step too (a state dict is being taken)."""
        self._local.hosting = on
        (self._hosts.add if on else self._hosts.discard)(threading.get_ident())

    # -- the root's forward

    def root_begins(self) -> None:
        """The root's forward starts on this thread."""
        streamer = self._streamer
        with streamer.lock:
            if not ops.in_backward():
                streamer.resting = False
            if self._roots == 0 and not streamer.backward.running:
                streamer.meter.forward_begins(torch.is_grad_enabled())
            self._roots += 1
            self._local.roots.append((len(self._local.entered), self._local.runs))
            self._local.runs += 1

    def no_backward(self) -> None:
        """The root's forward on this thread gives nothing that a backward could begin at."""
        with self._streamer.lock:
            if self._roots == 1 and not self._streamer.backward.running:
                self._streamer.meter.no_backward()

    def root_ends(self, failed: bool) -> None:
        streamer, mine = self._streamer, self._local
        with streamer.lock:
            self._roots -= 1
            entered, mine.runs = mine.roots.pop() if mine.roots else (0, 0)
            # An interrupt may hit between any two lines: leave no unit of this thread half swapped.
            for unit, slot in reversed(mine.entered[entered:]):
                self._leave(unit, slot)
            if streamer.held:
                streamer.settle()
            if self._roots or streamer.backward.running:
                return
            if not failed:
                streamer.meter.forward_ends()
                return
            streamer.meter.abandon()
            self._bounced, mine.bounced = self._bounced - mine.bounced, 0
            if not self._under_way and not self._bounced:  # nor does another thread use any
                for unit in streamer.units:
                    unit.depth = 0
                    _swap_out(unit)
                streamer.free_all()

    # -- a unit's own forward

    def enter(self, unit: Streamed) -> tuple[Slot, bool]:
        """Swap the unit in for a run of its own forward; pairs with `leave`."""
        streamer = self._streamer
        began = time.perf_counter() if streamer.meter.profiling else None
        gradient = torch.is_grad_enabled()
        ops.refuse_transforms(unit.name)
        with streamer.lock:
            streamer.backward.note()
            slot = streamer.acquire(unit)
            self._local.entered.append((unit, slot))
            unit.depth += 1
            self._under_way += 1
            if unit.depth == 1 or (gradient and unit.trainable and not unit.differentiable):
                try:
                    if unit.standing:
                        _swap_out(unit)
                    self._swap_in(unit, slot.views.tensors, gradient)
                except BaseException:
                    self._leave(unit, slot)
                    raise
        try:
            if gradient:
                ops.push_handles(streamer)
        except BaseException:
            with streamer.lock:
                self._leave(unit, slot)
            raise
        self._local.runs += 1
        if began is not None:
            streamer.meter.spent(time.perf_counter() - began)
        return slot, gradient

    def leave(self, unit: Streamed, slot: Slot, gradient: bool) -> None:
        meter = self._streamer.meter
        began = time.perf_counter() if meter.profiling else None
        self._local.runs -= 1
        if gradient:
            ops.pop_handles()
        with self._streamer.lock:
            self._leave(unit, slot, gradient)
        if began is not None:
            meter.spent(time.perf_counter() - began)

    def _leave(self, unit: Streamed, slot: Slot, gradient: bool = False) -> None:
        entered = self._local.entered
        if (unit, slot) not in entered:
            return  # an interrupted pass was cleaned up meanwhile
        entered.reverse()  # the last such run ends
        entered.remove((unit, slot))
        entered.reverse()
        unit.depth -= 1
        self._under_way -= 1
        goes_on = False
        try:
            if unit.depth == 0:
                if unit.differentiable:
                    hand_back(unit, {id(ours): host for _, _, ours, host in unit.standing})
                _swap_out(unit)
                self.keep_writes(slot)
                goes_on = gradient and self._streamer.backward.goes_on(slot)
        finally:
            if not goes_on:
                self._streamer.release(slot)

    def _swap_in(self, unit: Streamed, tensors: list[torch.Tensor], gradient: bool) -> None:
        unit.differentiable = gradient and unit.trainable
        standing, owners = unit.standing, unit.owners
        if not unit.trainable:
            for table, name, which in unit.sites:
                host = owners[which].tensor
                if table.get(name) is host:
                    ours = table[name] = tensors[which]
                    standing.append((table, name, ours, host))
            return
        autocast = torch.is_autocast_enabled(self._streamer.engine.device.type)
        for table, name, which in unit.sites:
            host = owners[which].tensor
            if table.get(name) is host:
                ours = tensors[which]
                if owners[which].trainable:
                    if gradient:
                        ours = self._differentiable(owners[which], ours)
                    elif not autocast:  # it would keep casts of such leaves, and their slots with them
                        ours.requires_grad_(True)  # modules ask, also under no_grad (torch's attention)
                table[name] = ours
                standing.append((table, name, ours, host))

    def _differentiable(self, owner: Owner, view: torch.Tensor) -> torch.Tensor:
        """``view`` as the result of the owner's `Deliver` node: the same tensor for all runs, wherever the slot is."""
        sink = owner.sink
        if sink is None:
            sink = owner.sink = Deliver.apply(owner.tensor, view)
            sink._is_param = isinstance(owner.tensor, torch.nn.Parameter)  # type: ignore[attr-defined]
            owner.dress(sink)
            owner.sink_version = sink._version
        elif sink.data_ptr() != view.data_ptr():
            sink.data = view
        return sink

    def keep_writes(self, slot: Slot, perhaps: bool = False) -> None:
        """What the model wrote to the slot goes to the host, where the weights live.

        ``perhaps``: an operator that writes to some of its arguments may have written to the slot without raising the
        version (under a dispatch mode ``_foreach`` operators do not). Raises UnsupportedError for weights that stream from a file.
        """
        unit, views = slot.unit, slot.views
        if views is None or not (
            views.written(unit.owners) or (perhaps and all(o.keeps_writes for o in unit.owners))
        ):
            return
        views.kept_version = views.version
        if not all(owner.keeps_writes for owner in unit.owners):
            unit.epoch += 1
            raise UnsupportedError(
                f"the model writes to weights of unit {unit.name!r} within a step, and they stream from a file; load the "
                "module first and stream it without weights="
            )
        for owner, view in zip(unit.owners, views.tensors, strict=True):
            if owner.sink is not None and owner.sink.numel():
                view, owner.sink_version = owner.sink, owner.sink._version
            # One counter for the whole slot does not tell which tensor it was: look.
            with _disable_current_modes(), torch.no_grad():
                if view.shape != owner.host.shape or view.dtype != owner.host.dtype:
                    continue
                now = torch.empty_like(owner.host, device="cpu")
                self._streamer.engine.synchronize(self._streamer.engine.copy_out(now, view.detach()))
                if torch.equal(storage_bytes(now), storage_bytes(owner.read())):
                    continue
                owner.keep(now)
            self.to_stay[owner.entry.name] = "the model writes to it"
        if slot.offset == NOWHERE:
            unit.epoch += 1
        elif views.moved():
            unit.epoch += 1
            unit.views.pop(slot.offset, None)
            slot.views = None
            self._streamer.views(slot)
        else:
            slot.version = unit.version()

    # -- single operators

    def bounce(self, func: Callable, args: tuple, kwargs: dict, found: list[Any]) -> Any:
        """Run one operator with the slots of the streamed tensors ``found`` among its arguments."""
        streamer = self._streamer
        gradient = torch.is_grad_enabled()
        ops.refuse_transforms(found[0]._carom.unit.name)
        owners: list[Owner] = [tensor._carom for tensor in found]
        perhaps = ops.writes(getattr(func, "__name__", ""), kwargs)
        slots: dict[int, tuple[Streamed, Slot]] = {}
        view: torch.Tensor | None = None
        replaced: dict[int, torch.Tensor] = {}
        try:
            with streamer.lock:
                streamer.backward.note()
                for owner in owners:
                    if id(owner.unit) not in slots:
                        slots[id(owner.unit)] = (owner.unit, streamer.acquire(owner.unit))
                        self._local.bounced += 1
                        self._bounced += 1
                for tensor, owner in zip(found, owners, strict=True):
                    unit, slot = slots[id(owner.unit)]
                    view = streamer.views(slot).tensors[unit.owners.index(owner)]
                    if gradient and owner.trainable and not isinstance(tensor, ops.Value):
                        view = self._differentiable(owner, view)
                    replaced[id(tensor)] = view
            args, kwargs = ops.substitute(args, kwargs, replaced)
            if not gradient or not ops.hooks_are_ours():
                return func(*args, **kwargs)
            ops.push_handles(streamer)
            try:
                return func(*args, **kwargs)
            finally:
                ops.pop_handles()
        finally:
            replaced, args, kwargs, view = {}, (), {}, None  # only the result may hold on to a slot
            with streamer.lock:
                self._local.bounced -= len(slots)
                self._bounced -= len(slots)
                try:
                    for unit, slot in slots.values():
                        if unit.depth == 0:  # else the unit's run does it when it ends
                            self.keep_writes(slot, perhaps)
                finally:
                    streamer.release_all([(slot, None) for _, slot in slots.values()])

    def close(self) -> None:
        for unit in self._streamer.units:
            _swap_out(unit)
            unit.depth = 0
            for owner in unit.owners:
                owner.sink = None


def _swap_out(unit: Streamed) -> None:
    for table, name, ours, host in unit.standing:
        if table.get(name) is ours:  # a module that put something else there keeps it
            table[name] = host
        if ours.requires_grad and ours.is_leaf:
            ours.requires_grad_(False)
            ours.grad = None
    unit.standing.clear()


def hand_back(unit: Streamed, hosts: dict[int, Any]) -> None:
    """Give modules that list their own weights (as LSTMs do) the host's back: ``hosts`` by the view's id."""
    for module in {id(s.module): s.module for o in unit.owners for s in o.entry.sites}.values():
        for kept in vars(module).values():
            if type(kept) is list:
                kept[:] = [hosts.get(id(item), item) for item in kept]
