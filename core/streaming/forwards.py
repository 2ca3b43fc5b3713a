"""Defines `Forwards`: which forwards and operators run on each thread, passes from begin to end, and single operators that
get views of slots as arguments.

A unit is a group of streamed tensors. A slot is the device memory that holds a unit while it is used. The
root is the module that the session streams. One `Forwards` serves one streamer, under the streamer's lock. A unit's own
forward is entered and left by `Run` (run.py), which notes it here. `Forwards` also tells which threads are in a step (a
forward or backward pass), and copies values that the model wrote to weights in a slot back to the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..common.errors import UnsupportedError
from ..device.slot import User
from ..host.arena import storage_bytes
from ..model import managed_tensor
from ..model.function_gradients import accumulator, function_given, redirect
from .foreach import has_places, run_each_place
from .run import Entered
from .unit import differentiable
from .units_together import acquire_together

if TYPE_CHECKING:
    from ..model.home import Home
    from .streamer import Streamer
    from .unit import StreamedUnit, UnitSlot, Views


class ThreadForwards:
    """The forwards and operators that run on one thread. What all threads do is counted from these objects, so
    that no other counter has to agree with them after an interrupt.

    ``entered``: the units whose forward is running. ``roots``: for each running root forward, the length of ``entered`` at
    its start. ``operators``: the slots that operators use. ``show_host_tensors``: whether the thread sees host tensors
    even in a step. ``user``: the user of slots for forwards on this thread's latest stream, one at a time for each unit.
    """

    __slots__ = ("entered", "roots", "operators", "show_host_tensors", "user", "__weakref__")

    def __init__(self) -> None:
        self.entered: list[Entered] = []
        self.roots: list[int] = []
        self.operators: list[UnitSlot] = []
        self.show_host_tensors = False
        self.user: User | None = None

    @property
    def active(self) -> bool:
        """Whether a forward of a unit or of the root is running on the thread."""
        return bool(self.entered or self.roots)


class Threads(threading.local):
    """The `ThreadForwards` of each thread: ``mine``. ``threads``: weak references to those of all threads."""

    def __init__(self, threads: list[weakref.ref[ThreadForwards]]) -> None:
        self.mine = ThreadForwards()
        threads.append(weakref.ref(self.mine, threads.remove))


class Forwards:
    """The running forwards of one streamer's units and root module.

    ``local``: the state of the present thread's forwards.
    """

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._threads: list[weakref.ref[ThreadForwards]] = []
        self.local = self._local = Threads(self._threads)
        # Ids of the modules with streamed weights, once one is asked for.
        self._streamed_modules: set[int] = set()
        # Ids of threads that see host tensors instead of slots. These threads may keep views of slots for a
        # short time.
        self._hosts: set[int] = set()
        # Slot views whose addresses other code may use until the present passes end, by id. A view keeps its slot in use.
        self._addressed: dict[int, torch.Tensor] = {}
        self._marked: list[Views] = []  # views of which operators under no_grad let some require gradients

    @property
    def active(self) -> bool:
        """Whether a unit's or the root's forward is running."""
        return any(thread.active for thread in self._all_threads())

    def _all_threads(self) -> list[ThreadForwards]:
        """Return the state of each thread."""
        # a copy of the list, because the end of a thread removes an entry at any time
        return [thread for reference in list(self._threads) if (thread := reference()) is not None]

    def other_thread_active(self) -> bool:
        """Return whether another thread runs a forward or takes a state dict."""
        mine = self._local.mine
        if any(thread.active for thread in self._all_threads() if thread is not mine):
            return True
        return bool(self._hosts) and self._hosts != {threading.get_ident()}

    def other_thread_uses_slots(self) -> bool:
        """Return whether another thread runs a forward, or an operator with slots."""
        mine = self._local.mine
        return any(thread.active or thread.operators for thread in self._all_threads() if thread is not mine)

    def computing(self) -> bool:
        """Return whether this thread is in a step: in a root forward, a unit's forward, or a backward
        pass."""
        mine = self._local.mine
        if mine.show_host_tensors:
            return False
        return bool(mine.roots or mine.entered) or managed_tensor.in_backward()

    def in_forward(self) -> bool:
        """Return whether this thread is in a forward of the root or of a unit."""
        mine = self._local.mine
        return bool(mine.roots or mine.entered) and not mine.show_host_tensors

    def show_host_tensors(self, on: bool) -> None:
        """Let this thread see the host tensors even in a step, while ``on`` is True. Used for state dicts and
        optimizer hooks.
        """
        self._local.mine.show_host_tensors = on
        (self._hosts.add if on else self._hosts.discard)(threading.get_ident())

    # -- the root module's forward

    def root_begins(self, part: torch.nn.Module | None = None) -> None:
        """Record that a pass starts on this thread: the root's forward, or the forward of ``part``, a module below the
        root.
        """
        streamer, mine = self._streamer, self._local.mine
        with streamer.lock:
            if streamer.torn:
                streamer.recover()
            # Inference with a part begins no training step: the optimizer may still be about to write to the weights.
            if not managed_tensor.in_backward() and (part is None or torch.is_grad_enabled()):
                streamer.awaiting_optimizer = False
            if self._marked and not self._root_count():
                self._unmark()
            # The forward of a part of which nothing streams is no step, so that the report's medians are not those of
            # small resident parts.
            counts = part is None or self._streams(part)
            if counts and not self._root_count() and not streamer.backward.running:
                streamer.begin_step(torch.is_grad_enabled(), 0 if part is None else id(part))
            mine.roots.append(len(mine.entered))

    def _root_count(self) -> int:
        """Return the number of running passes in all threads."""
        return sum(len(thread.roots) for thread in self._all_threads())

    def _streams(self, part: torch.nn.Module) -> bool:
        """Return whether a weight of ``part`` or of a module below it streams."""
        if not self._streamed_modules:
            sites = (
                site for unit in self._streamer.units for home in unit.homes for site in home.entry.sites
            )
            self._streamed_modules = {id(site.module) for site in sites}
        return not self._streamed_modules.isdisjoint(map(id, part.modules()))

    def _unmark(self) -> None:
        """Let the views that operators marked require no gradients any more. Must be called under the lock."""
        while self._marked:
            for tensor in self._marked.pop().tensors:
                tensor.requires_grad_(False)

    def no_backward(self) -> None:
        """Record that the pass on this thread has no result from which a backward could start."""
        with self._streamer.lock:
            if self._root_count() == 1 and not self._streamer.backward.running:
                self._streamer.meter.no_backward()

    def root_ends(self, failed: bool) -> None:
        """Record that a pass has ended, and end the runs of units that this thread has not finished.

        ``failed``: whether the forward raised an error. A forward that was interrupted ends with
        `Streamer.interrupted` instead.
        """
        streamer, mine = self._streamer, self._local.mine
        with streamer.lock:
            entered = mine.roots.pop() if mine.roots else 0
            # Code of the model may have kept a unit's forward from being left (a generator, for instance).
            while len(mine.entered) > entered:
                streamer.run.end(mine.entered.pop())
            if self._addressed and not streamer.backward.running:
                self.drop_addressed()
            if streamer.run.held:
                streamer.run.end_finished_uses()
            if self._marked and not self._root_count():
                self._unmark()
            if self._root_count() or streamer.backward.running:
                return
            if not failed:
                streamer.meter.forward_ends()
                return
            streamer.meter.forward_failed()
            if not (mine.entered or mine.operators or self.other_thread_uses_slots()):
                for unit in streamer.units:
                    unit.depth = 0
                    unit.hide()
                streamer.end_forward_uses()

    def abandon(self) -> None:
        """Forget all forwards and operators of this thread, because an interrupt ends them."""
        mine = self._local.mine
        mine.entered.clear()
        mine.roots.clear()
        mine.operators.clear()
        self.show_host_tensors(False)

    def restore_modules(self) -> None:
        """Put the host tensors back into the modules of all units, whatever was put in their place. Called while no
        other thread runs a forward. The runs of this thread that go on have nothing left to undo.
        """
        self._addressed.clear()
        self._local.mine.entered.clear()
        for unit in self._streamer.units:
            if unit.shown:
                unit.restore_weight_lists(unit.shown)
                unit.hide()
            unit.depth = 0
            for proxy in unit.proxies:
                proxy.tensor = proxy.accumulator = None
                proxy.forget_uses()

    def write_back(self, slot: UnitSlot, uncounted_writes: bool = False) -> None:
        """Copy values that the model wrote to weights in the slot back to the host tensors.

        ``uncounted_writes``: an operator that writes to some of its arguments has run, and may have written
        without raising the version counter (as ``_foreach`` operators do under a dispatch mode). Raises
        UnsupportedError if the model wrote to weights that stream from a file.
        """
        unit, views = slot.unit, slot.views
        if views is None or not (
            views.written(unit.proxies)
            or (uncounted_writes and all(home.keeps_writes for home in unit.homes))
        ):
            return
        views.kept_version = views.version
        if not all(home.keeps_writes for home in unit.homes):
            unit.backing.epoch += 1
            raise UnsupportedError(
                f"the model writes to weights of unit {unit.name!r} within a step, and they stream from a file; "
                "stream the module from RAM (without weights= and disk=)"
            )
        store = self._streamer.store
        for home, proxy, view in zip(unit.homes, unit.proxies, views.tensors, strict=True):
            if proxy.tensor is not None and proxy.tensor.numel():
                view, proxy.version = proxy.tensor, proxy.tensor._version
            # The slot's tensors share one version counter, which does not tell which tensor was written. So
            # compare the bytes of each tensor.
            with _disable_current_modes(), torch.no_grad():
                if view.shape != home.host.shape or view.dtype != home.host.dtype:
                    continue
                now = torch.empty_like(home.host, device="cpu")
                self._streamer.engine.synchronize(self._streamer.engine.copy_out(now, view.detach()))
                if torch.equal(storage_bytes(now), storage_bytes(store.read(home))):
                    continue
                store.write(home, now)
            self._streamer.next_layout.stay[home.entry.name] = "the model writes to it"
        if views.moved():
            unit.backing.epoch += 1
            slot.views = None
            self._streamer.run.slots.views(slot)
        else:
            self._streamer.keep_version(slot)

    # -- single operators

    def addressed(self, tensor: Any) -> torch.Tensor:
        """Return the slot view of ``tensor``, a managed tensor, for code that reads it by its address. Its storage is
        that of its own bytes, where the engine can make one. The slot stays in use until no pass is running.
        """
        view = self.run_operator(_itself, (tensor,), {}, [tensor])
        self._addressed[id(view)] = view
        with torch.inference_mode(False), torch.no_grad():
            flat = storage_bytes(view)
            own = self._streamer.engine.alias(flat, 0, flat.numel()).view(view.dtype)
            return own.as_strided(view.shape, view.stride(), own.storage_offset())

    def drop_addressed(self) -> None:
        """Forget the views that `addressed` returned, unless a forward is running. Must be called under the lock."""
        if self._addressed and not self.active:
            self._addressed.clear()

    def run_operator(self, func: Callable, args: tuple, kwargs: dict, found: list[Any]) -> Any:
        """Run the operator ``func`` with slot views in place of ``found``, the streamed tensors among its
        arguments.
        """
        streamer = self._streamer
        gradient = torch.is_grad_enabled()
        managed_tensor.refuse_transforms(found[0]._carom.unit.name)
        homes: list[Home] = [tensor._carom for tensor in found]
        name = getattr(func, "__name__", "")
        if has_places(name, args) and len({id(home.unit) for home in homes}) > 1:
            return run_each_place(self.run_operator, func, args, kwargs, found)
        uncounted_writes = managed_tensor.writes(name, kwargs)
        slots: dict[int, tuple[StreamedUnit, UnitSlot]] = {}
        run, user = streamer.run, User(threading.get_ident(), streamer.engine.stream())
        view: torch.Tensor | None = None
        replaced: dict[int, torch.Tensor] = {}
        operators = self._local.mine.operators
        autocast = torch.is_autocast_enabled(streamer.engine.device.type)
        if not gradient:
            for tensor, home in zip(found, homes, strict=True):
                if home.trainable and not isinstance(tensor, managed_tensor.Value):
                    self._note_given(tensor, home)
        try:
            with streamer.lock:
                units = {id(home.unit): _unit_of(home) for home in homes}
                for number, slot in zip(
                    units, acquire_together(streamer, run, [*units.values()], user), strict=True
                ):
                    slots[number] = (units[number], slot)
                    operators.append(slot)
                for tensor, home in zip(found, homes, strict=True):
                    unit, slot = slots[id(home.unit)]
                    index = unit.homes.index(home)
                    views = run.slots.views(slot)
                    view = views.tensors[index]
                    if gradient and home.trainable and not isinstance(tensor, managed_tensor.Value):
                        unit.proxies[index].uses += 1
                        view = differentiable(home, unit.proxies[index], view)
                    elif not (gradient or autocast or view.requires_grad) and home.trainable:
                        # A product reads requires_grad of its operands even under no_grad, to choose a kernel. A
                        # view that the operator returns has the value of its base, so do not reset it here.
                        view.requires_grad_(True)
                        self._marked.append(views)
                    replaced[id(tensor)] = view
            args, kwargs = managed_tensor.substitute(args, kwargs, replaced)
            if not gradient or not managed_tensor.hooks_are_ours():
                return func(*args, **kwargs)
            managed_tensor.push_handles(streamer)
            try:
                return func(*args, **kwargs)
            finally:
                managed_tensor.pop_handles(streamer)
        except BaseException as error:
            if not isinstance(error, Exception):
                slots, replaced, args, kwargs, view = {}, {}, (), {}, None
                streamer.interrupted()
            raise
        finally:
            # Drop all views here, so that only the operator's result can keep the slot in use.
            replaced, args, kwargs, view = {}, (), {}, None
            with streamer.lock:
                for _, slot in slots.values():
                    operators.remove(slot)
                try:
                    for unit, slot in slots.values():
                        if unit.depth == 0:  # if the unit's forward is running, its end writes back
                            self.write_back(slot, uncounted_writes)
                finally:
                    run.release_all([(slot, (user,)) for _, slot in slots.values()])

    def _note_given(self, tensor: torch.Tensor, home: Home) -> None:
        """Redirect the gradient of the weight ``tensor`` if an autograd function was given the weight. Raises
        UnsupportedError where autograd does not allow this.
        """
        name = function_given(tensor)
        if name is None:
            return
        if self._streamer.engine.device.type != "cpu":
            # autograd refuses a gradient on the device for a parameter on the host
            raise UnsupportedError(
                f"{home.entry.name} streams and requires a gradient, and it is given to the autograd function {name} outside "
                "its module's forward; its gradient would be on another device than the parameter: call the module, keep "
                "trainable parameters resident with training='resident', or freeze the weight"
            )
        unit = _unit_of(home)
        proxy = unit.proxies[unit.homes.index(home)]
        node = accumulator(tensor)
        if node is not proxy.accumulator:
            redirect(node, tensor)
            proxy.accumulator = node
        if proxy.uses == 0:
            proxy.given_first = True


def _itself(view: torch.Tensor) -> torch.Tensor:
    """Return ``view``. An operator that gives the slot view of a weight."""
    return view


def _unit_of(home: Home) -> StreamedUnit:
    """Return the `StreamedUnit` that contains the weight of ``home``."""
    return cast("Streamer", home.runtime).units[home.unit.index]
