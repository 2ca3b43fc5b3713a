"""Defines `Runs`: while a unit's forward runs, its modules hold views of the unit's slot; single operators
get such views as arguments.

A unit is a group of streamed tensors. A slot is the device memory that holds a unit while it is used. The
root is the module that the session streams. One `Runs` serves one streamer, under the streamer's lock. `Runs`
also tells which threads are in a step (a forward or backward pass), and copies values that the model wrote to
weights in a slot back to the host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..common.errors import UnsupportedError
from ..host.arena import storage_bytes
from ..model import managed_tensor
from ..model.function_gradients import accumulator, function_given, redirect
from ..plan.region import Slot
from .gradient_delivery import Deliver
from .host_mapped_slots import NOWHERE

if TYPE_CHECKING:
    from ..model.home import Home
    from ..placement.backing import Backing
    from .streamer import Streamer
    from .unit import StreamedUnit, Views, WeightProxy


class _Thread:
    """The forwards and operators that run on one thread. What all threads do is counted from these objects, so
    that no other counter has to agree with them after an interrupt.

    ``entered``: the units whose forward is running, with their slots.
    ``roots``: for each running root forward, the length of ``entered`` at its start.
    ``operators``: the slots that operators use.
    ``show_host_tensors``: whether the thread sees host tensors even in a step.
    """

    __slots__ = ("entered", "roots", "operators", "show_host_tensors", "__weakref__")

    def __init__(self) -> None:
        self.entered: list[tuple[StreamedUnit, Slot]] = []
        self.roots: list[int] = []
        self.operators: list[Slot] = []
        self.show_host_tensors = False

    @property
    def active(self) -> bool:
        """Whether a forward of a unit or of the root is running on the thread."""
        return bool(self.entered or self.roots)


class _Local(threading.local):
    """The `_Thread` of each thread.

    ``threads``: weak references to those of all threads.
    """

    def __init__(self, threads: list[weakref.ref[_Thread]]) -> None:
        self.mine = _Thread()
        threads.append(weakref.ref(self.mine, threads.remove))


class Runs:
    """The running forwards of one streamer's units and root module.

    ``local``: the state of the present thread's forwards.
    ``to_stay``: names of weights that the next layout should keep on the device, with the reasons.
    """

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._threads: list[weakref.ref[_Thread]] = []
        self.local = self._local = _Local(self._threads)
        self._streamed_modules: set[int] = (
            set()
        )  # ids of the modules with streamed weights, once one is asked for
        # Ids of threads that see host tensors instead of slots. These threads may keep views of slots for a
        # short time.
        self._hosts: set[int] = set()
        # Slot views whose addresses other code may use until the present passes end, by id. A view keeps its slot in use.
        self._addressed: dict[int, torch.Tensor] = {}
        self.to_stay: dict[str, str] = {}
        self._marked: list[Views] = []  # views of which operators under no_grad let some require gradients

    @property
    def active(self) -> bool:
        """Whether a unit's or the root's forward is running."""
        return any(thread.active for thread in self._all_threads())

    def _all_threads(self) -> list[_Thread]:
        """Return the state of each thread."""
        # a copy of the list, because the end of a thread removes an entry at any time
        return [thread for reference in list(self._threads) if (thread := reference()) is not None]

    def slots_used_by_thread(self) -> int:
        """Return the number of slots that this thread's runs use."""
        mine = self._local.mine
        return len(mine.entered) + len(mine.operators)

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
                streamer.meter.forward_begins(torch.is_grad_enabled(), 0 if part is None else id(part))
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
            for unit, slot in reversed(mine.entered[entered:]):
                self._leave(unit, slot)
            if self._addressed and not streamer.backward.running:
                self.drop_addressed()
            if streamer.held:
                streamer.end_finished_uses()
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
                    _swap_out(unit)
                streamer.free_all()

    def interrupted(self) -> None:
        """Note that an interrupt ends what this thread does with slots. See `Streamer.interrupted`."""
        self._streamer.interrupted()

    def abandon(self) -> None:
        """Forget all forwards and operators of this thread, because an interrupt ends them."""
        mine = self._local.mine
        mine.entered.clear()
        mine.roots.clear()
        mine.operators.clear()
        self.show_host_tensors(False)

    def restore_modules(self) -> None:
        """Put the host tensors back into the modules of all units, whatever was put in their place. Called while no
        forward is running.
        """
        self._addressed.clear()
        for unit in self._streamer.units:
            restore_weight_lists(unit, {id(ours): host for _, _, ours, host in unit.swapped_in})
            _swap_out(unit)
            unit.depth = 0
            for proxy in unit.proxies:
                proxy.tensor = proxy.accumulator = None
                proxy.forget_uses()

    # -- a unit's own forward

    def enter(self, unit: StreamedUnit) -> tuple[Slot, bool]:
        """Acquire the unit's slot and put views of it into the unit's modules. Called before the unit's
        forward; `leave` undoes this.

        Returns the slot, and whether gradients are recorded.
        """
        streamer = self._streamer
        gradient = torch.is_grad_enabled()
        managed_tensor.refuse_transforms(unit.name)
        with streamer.lock:
            streamer.backward.register_pass()
            slot = streamer.acquire(unit)
            self._local.mine.entered.append((unit, slot))
            unit.depth += 1
            if unit.depth == 1 or (gradient and unit.backing.trainable and not unit.differentiable):
                try:
                    if unit.swapped_in:
                        _swap_out(unit)
                    self._swap_in(unit, slot.views.tensors, gradient)
                except Exception:
                    self._leave(unit, slot)
                    raise
        if gradient:
            managed_tensor.push_handles(streamer)
        return slot, gradient

    def leave(self, unit: StreamedUnit, slot: Slot, gradient: bool) -> None:
        """Put the host tensors back into the unit's modules, and release the slot. Called after the unit's
        forward.
        """
        if gradient:
            managed_tensor.pop_handles(self._streamer)
        with self._streamer.lock:
            self._leave(unit, slot, gradient)

    def _leave(self, unit: StreamedUnit, slot: Slot, gradient: bool = False) -> None:
        """Do the work of `leave` under the lock. Do nothing if the run was removed already."""
        entered = self._local.mine.entered
        if (unit, slot) not in entered:
            return  # the run was removed already, when the root's forward ended
        entered.reverse()  # search from the end, so that the most recent run of the unit is removed
        entered.remove((unit, slot))
        entered.reverse()
        unit.depth -= 1
        continues = False
        try:
            if unit.depth == 0:
                if unit.differentiable:
                    restore_weight_lists(unit, {id(ours): host for _, _, ours, host in unit.swapped_in})
                _swap_out(unit)
                self.write_back(slot)
                continues = gradient and self._streamer.backward.continue_use(slot)
        finally:
            if not continues:
                self._streamer.release(slot)

    def _swap_in(self, unit: StreamedUnit, tensors: list[torch.Tensor], gradient: bool) -> None:
        """Put the slot's ``tensors`` into the unit's modules in place of the host tensors."""
        unit.differentiable = gradient and unit.backing.trainable
        swapped_in, homes = unit.swapped_in, unit.homes
        if not unit.backing.trainable:
            for table, name, index in unit.sites:
                host = homes[index].tensor
                if table.get(name) is host:
                    ours = tensors[index]
                    # Recorded first, so that an interrupt in between leaves no view that is not recorded.
                    swapped_in.append((table, name, ours, host))
                    table[name] = ours
            return
        if gradient:
            for proxy in unit.proxies:
                proxy.uses += 1
        autocast = torch.is_autocast_enabled(self._streamer.engine.device.type)
        for table, name, index in unit.sites:
            host = homes[index].tensor
            if table.get(name) is host:
                ours = tensors[index]
                if homes[index].trainable and gradient:
                    ours = self._differentiable(homes[index], unit.proxies[index], ours)
                swapped_in.append((table, name, ours, host))
                # Under autocast do not set this: autocast would cache casts of such leaves, and with them the
                # slot's views.
                if homes[index].trainable and not gradient and not autocast:
                    # Modules such as torch's attention read requires_grad even under no_grad.
                    ours.requires_grad_(True)
                table[name] = ours

    def _differentiable(self, home: Home, proxy: WeightProxy, view: torch.Tensor) -> torch.Tensor:
        """Return the differentiable tensor that represents a trainable weight: the output of the weight's
        `Deliver` node, with the data of ``view``.

        The tensor is created at the first use, and later runs return the same tensor. If the weight has moved
        to another slot since, the tensor's ``data`` is set to ``view``. Raises UnsupportedError if the layout was made
        for passes without gradients.
        """
        if home.entry.untrained:
            raise UnsupportedError(
                f"{home.entry.name} requires a gradient, and gradients are recorded within a forward that began without "
                "them, so the weights are laid out for inference: begin the forward with gradients, stream with "
                "training='stream', or freeze the weight"
            )
        tensor = proxy.tensor
        if tensor is None:
            tensor = proxy.tensor = Deliver.apply(home.tensor, view.detach())
            tensor._is_param = isinstance(home.tensor, torch.nn.Parameter)  # type: ignore[attr-defined]
            home.dress(tensor)
            proxy.version = tensor._version
        elif tensor.data_ptr() != view.data_ptr():
            tensor.data = view
        return tensor

    def write_back(self, slot: Slot, uncounted_writes: bool = False) -> None:
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
                if torch.equal(storage_bytes(now), storage_bytes(home.read())):
                    continue
                home.keep(now)
            self.to_stay[home.entry.name] = "the model writes to it"
        if slot.offset == NOWHERE:
            unit.backing.epoch += 1
        elif views.moved():
            unit.backing.epoch += 1
            unit.views.pop(slot.offset, None)
            slot.views = None
            self._streamer.views(slot)
        else:
            slot.version = unit.version()

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
        uncounted_writes = managed_tensor.writes(getattr(func, "__name__", ""), kwargs)
        slots: dict[int, tuple[StreamedUnit, Slot]] = {}
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
                streamer.backward.register_pass()
                for home in homes:
                    if id(home.unit) not in slots:
                        unit = _unit_of(home)
                        slots[id(home.unit)] = (unit, streamer.acquire(unit))
                        operators.append(slots[id(home.unit)][1])
                for tensor, home in zip(found, homes, strict=True):
                    unit, slot = slots[id(home.unit)]
                    index = unit.homes.index(home)
                    view = streamer.views(slot).tensors[index]
                    if gradient and home.trainable and not isinstance(tensor, managed_tensor.Value):
                        unit.proxies[index].uses += 1
                        view = self._differentiable(home, unit.proxies[index], view)
                    elif not (gradient or autocast or view.requires_grad) and home.trainable:
                        # A product reads requires_grad of its operands even under no_grad, to choose a kernel. A
                        # view that the operator returns has the value of its base, so do not reset it here.
                        view.requires_grad_(True)
                        self._marked.append(streamer.views(slot))
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
                    streamer.release_all([(slot, None) for _, slot in slots.values()])

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

    def close(self) -> None:
        """Put the host tensors back into the modules of all units."""
        self.restore_modules()


def _itself(view: torch.Tensor) -> torch.Tensor:
    """Return ``view``. An operator that gives the slot view of a weight."""
    return view


def _unit_of(home: Home) -> StreamedUnit:
    """Return the `StreamedUnit` that contains the weight of ``home``."""
    return cast("Streamer", home.runtime).units[cast("Backing", home.unit).index]


def _swap_out(unit: StreamedUnit) -> None:
    """Put the host tensors back into the unit's modules in place of slot views."""
    for table, name, ours, host in unit.swapped_in:
        if table.get(name) is ours:  # leave a tensor with which the module replaced the view during the run
            table[name] = host
        if ours.requires_grad and ours.is_leaf:
            ours.requires_grad_(False)
            ours.grad = None
    unit.swapped_in.clear()


def restore_weight_lists(unit: StreamedUnit, hosts: dict[int, Any]) -> None:
    """Put host tensors back into lists of weights that modules themselves keep (as LSTMs do).

    ``hosts``: the host tensors, by the id of the view that represents each.
    """
    for module in {id(s.module): s.module for home in unit.homes for s in home.entry.sites}.values():
        for kept in vars(module).values():
            if type(kept) is list:
                kept[:] = [hosts.get(id(item), item) for item in kept]
