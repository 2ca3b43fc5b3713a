"""Defines `StreamedUnit`, the run-time state of a streamed unit: its views of a slot, and the
places of its tensors in modules.

A unit is a group of tensors that are copied together. A slot is the device memory that holds a unit while it
is used. The region is the device memory of all slots.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..common.errors import UnsupportedError
from ..device.engine import storage_uses, use_count
from ..device.pool_memory import PoolMemory
from ..device.slot import Slot, SlotState
from ..model.home import Home, ManagedUnit
from ..model.quantized import is_inner
from ..model.wrapper_cache import OWN_REFERENCES, WrapperCache
from .gradient_delivery import Deliver

_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")


class WeightProxy:
    """The holder of the tensor that represents one trainable weight in forwards that record gradients.

    ``tensor``: the result of `Deliver`, or None.
    ``version``: the tensor's version counter when the host tensor last had the same value.
    ``accumulator``: the weight's AccumulateGrad node, if the weight was given to an autograd function.
    ``uses``: how often ``tensor`` was used since the last backward.
    ``given_first``: whether the weight was given to an autograd function before the first of these uses.
    """

    __slots__ = ("tensor", "version", "accumulator", "uses", "given_first")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.version = 0
        self.accumulator: Any = None
        self.forget_uses()

    def forget_uses(self) -> None:
        """Begin to count uses anew."""
        self.uses, self.given_first = 0, False


def _references(proxy: Any) -> tuple[int, int]:
    """Return the number of Python references and the number of torch references to the tensor of a proxy."""
    return sys.getrefcount(proxy.tensor), proxy.tensor._use_count()


def _unshared_references() -> tuple[int, int]:
    """Return the numbers of references to a tensor that only its proxy holds, measured on an example."""
    proxy = WeightProxy()
    proxy.tensor = torch.zeros(1, requires_grad=True) * 1
    return _references(proxy)


_UNSHARED = _unshared_references()


@dataclass(eq=False)
class Views:
    """The views of a unit's tensors in the memory of a slot.

    The views are made once for each slot, and reused for later copies of the unit to it.
    ``tensors``: in the order of the unit's homes.
    """

    base: torch.Tensor  # uint8, exactly the unit's bytes, with a storage of its own if possible
    # The same memory, as the target of Carom's copies. Writing to it does not raise the version that autograd
    # checks.
    target: torch.Tensor
    tensors: list[torch.Tensor]
    uses: int | None  # the storage's reference count while only Carom holds it, without the views in `saved`
    addresses: list[int] = field(default_factory=list)  # the addresses of the tensors when they were made
    # Views that saved-tensor handles asked for, by place (dtype, shape, strides, byte offset).
    saved: dict[tuple, torch.Tensor] = field(default_factory=dict)
    around: WrapperCache | None = (
        None  # wrapper objects over the tensors, if they belong to a quantised weight
    )
    kept_version: int = 0  # value of `version` when the host tensors last had the same values

    @property
    def version(self) -> int:
        """The version counter that all tensors share. Every write of the model raises it."""
        return self.base._version

    def untouched(self) -> bool:
        """Return whether the model neither wrote to a tensor nor keeps one. The weights must not be trainable."""
        if self.base._version != self.kept_version or list(map(_address, self.tensors)) != self.addresses:
            return False
        return not self.kept_elsewhere()

    def moved(self) -> bool:
        """Return whether the model replaced a tensor's data by other memory."""
        return list(map(_address, self.tensors)) != self.addresses

    def written(self, proxies: list[WeightProxy]) -> bool:
        """Return whether the model wrote to a tensor since the host tensors last had the same values."""
        if self.version != self.kept_version or self.moved():
            return True
        return any(proxy.tensor is not None and proxy.tensor._version != proxy.version for proxy in proxies)

    def view(self, place: tuple) -> torch.Tensor:
        """Return the view at the place of a handle (dtype, shape, strides, byte offset). Views are cached."""
        found = self.saved.get(place)
        if found is None:
            found = self.saved[place] = _view(self.base, place)
        return found

    def kept_by_model(self, unit: StreamedUnit) -> bool:
        """Return whether the model keeps one of the tensors, which are those of ``unit``.

        Tensors in modules' lists of weights and in cached wrapper objects are dropped first, because they are Carom's own.
        """
        if self.around is not None:  # wrapper objects of quantised weights may cache views
            self.around.clear()
        unit.restore_weight_lists(self.tensors)
        return self.kept_elsewhere()

    def kept_elsewhere(self) -> bool:
        """Return whether other code holds one of the tensors, or another tensor that uses their storage."""
        if self.uses is not None:
            own = self.uses + len(self.saved) * _uses_of_a_view() if self.saved else self.uses
            storage = self.base.untyped_storage()
            # As `storage_uses` counts, without a call at each use of a unit.
            if use_count(storage._cdata) + sys.getrefcount(storage) > own:
                return True
        if self.around is not None:
            return self.around.has_other_references()
        return max(map(sys.getrefcount, self.tensors), default=0) > OWN_REFERENCES


def _view(base: torch.Tensor, place: tuple) -> torch.Tensor:
    """Return a view of ``base`` at ``place`` (dtype, shape, strides, byte offset)."""
    dtype, shape, stride, start = place
    with torch.inference_mode(False), torch.no_grad():
        typed = base.view(dtype)
        return typed.as_strided(shape, stride, typed.storage_offset() + start // typed.element_size())


@functools.cache
def _uses_of_a_view() -> int:
    """Return by how much one view made by `_view` raises the reference count of its storage.

    The increase is measured on a separate tensor, because autograd may create and drop views of a slot on
    another thread at the same time, without holding Python's GIL.
    """
    with _disable_current_modes():
        base = torch.zeros(16, dtype=torch.uint8, device="cpu")
        before = storage_uses(base) or 0
        made = _view(base, (torch.float32, (2,), (1,), 4))
        after = storage_uses(base) or 0
        del made
    return after - before


class UnitSlot(Protocol):
    """What a run reads of a slot (`device.slot.Slot`).

    ``unit``: the `StreamedUnit`. ``offset``: where the slot begins in its chunk, in bytes. ``views``: the `Views` of it.
    """

    unit: Any
    offset: int
    views: Any


class StreamedUnit:
    """The run-time state of a streamed unit.

    ``backing``: the unit as its store knows it, with its homes and its version.
    ``depth``: number of running forwards of the unit. While it is above zero, the modules hold views of the
    slot.
    ``places``: (table, name, index of the home, host tensor) of each place of a tensor in the modules.
    ``shown``: what stands in the modules for each home, in place of its host tensor; empty if nothing does.
    ``differentiable``: whether the views in the modules send gradients of trainable weights to the host.
    """

    def __init__(self, backing: ManagedUnit) -> None:
        self.backing = backing
        self.unit, self.index, self.homes = backing.unit, backing.index, backing.homes
        self.name, self.nbytes = backing.name, backing.nbytes
        self.version, self.in_graphs = backing.version, backing.in_graphs
        self.depth = 0
        self.proxies = [WeightProxy() for _ in self.homes]
        self.places: list[tuple[dict, str, int, torch.Tensor]] = [
            (site.table, site.name, index, home.tensor)
            for index, home in enumerate(self.homes)
            for site in home.entry.sites
        ]
        self.shown: Sequence[torch.Tensor] = ()
        self.differentiable = False

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put ``tensors``, one for each home, into the modules in place of the host tensors."""
        # Noted first, so that an interrupt in between leaves no tensor in a module that is not noted.
        self.shown = tensors
        for table, name, index, host in self.places:
            if table.get(name) is host:
                table[name] = tensors[index]

    def show_trainable(self, tensors: Sequence[torch.Tensor], gradient: bool, autocast: bool) -> None:
        """Put slot views of trainable weights into the modules, and the outputs of `Deliver` nodes if ``gradient``.

        ``autocast``: whether autocast is enabled.
        """
        self.differentiable = gradient
        if gradient:
            for proxy in self.proxies:
                proxy.uses += 1
        shown = self.shown = list(tensors)
        for table, name, index, host in self.places:
            home = self.homes[index]
            if table.get(name) is not host or not home.trainable:
                continue
            if gradient:
                shown[index] = differentiable(home, self.proxies[index], tensors[index])
            elif not autocast:
                # Modules such as torch's attention read requires_grad even under no_grad. Under autocast do not set it:
                # autocast would cache casts of such leaves, and with them the slot's views.
                shown[index].requires_grad_(True)
        self.show(shown)

    def hide(self) -> None:
        """Put the host tensors back into the modules, and into lists of weights that modules keep (as LSTMs do)."""
        shown = self.shown
        if not shown:
            return
        if self.differentiable:
            self.restore_weight_lists(shown)
        for table, name, index, host in self.places:
            # A tensor with which the module replaced ours during the run stays.
            if table.get(name) is shown[index]:
                table[name] = host
        for ours in filter(_requires_grad, shown):
            if ours.is_leaf:
                ours.requires_grad_(False)
                ours.grad = None
        self.shown = ()

    def restore_weight_lists(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put host tensors back into lists of weights that modules themselves keep, in place of ``tensors``, one for each
        home.
        """
        hosts = {id(ours): home.tensor for ours, home in zip(tensors, self.homes, strict=True)}
        for module in {id(s.module): s.module for home in self.homes for s in home.entry.sites}.values():
            for kept in vars(module).values():
                if type(kept) is list:
                    kept[:] = [hosts.get(id(item), item) for item in kept]

    def forget(self) -> None:
        """Drop the references to the tables of the model's modules. Called when the streamer closes."""
        self.places.clear()
        self.shown = ()

    def empty_proxies(self) -> None:
        """Release the slot memory of the weights' proxies, and drop proxies whose tensor other code keeps."""
        for proxy in self.proxies:
            if proxy.tensor is None:
                continue
            if any(map(operator.gt, _references(proxy), _UNSHARED)):
                proxy.tensor = None
            elif proxy.tensor.numel():
                proxy.tensor.data = torch.empty(0, dtype=proxy.tensor.dtype, device=proxy.tensor.device)


class UnitSlots(dict[tuple[StreamedUnit, int], Slot]):
    """The slots in the region of ``memory`` by unit and offset. Each is made when it is first asked for."""

    def __init__(self, memory: PoolMemory) -> None:
        super().__init__()
        self._memory = memory
        self._viewed: dict[int, WeakSet[Slot]] = {}  # slots with views, by unit

    def __missing__(self, key: tuple[StreamedUnit, int]) -> Slot:
        unit, offset = key
        slot = self[key] = self._memory.make_slot(unit, self._memory.region, offset)
        return slot

    def views(self, slot: Any) -> Views:
        """Return views of the unit's tensors in ``slot``. They are made once for each slot."""
        if slot.views is None:
            slot.views = make_views(slot.unit, slot.base)
            self._viewed.setdefault(slot.unit.index, WeakSet()).add(slot)
        return slot.views

    def forget_views(self, unit: StreamedUnit) -> None:
        """Forget the views of the slots of ``unit``, because the strides of one of its weights changed."""
        for slot in self._viewed.pop(unit.index, ()):
            slot.views = None

    def drop_views(self) -> None:
        """Drop the views of all slots, except of those that the model keeps."""
        for slots in self._viewed.values():
            for slot in list(slots):
                if slot.state is not SlotState.HELD:
                    slot.views = None


def differentiable(home: Home, proxy: WeightProxy, view: torch.Tensor) -> torch.Tensor:
    """Return the differentiable tensor that represents a trainable weight: the output of the weight's `Deliver` node, with
    the data of ``view``.

    The tensor is created at the first use, and later runs return the same tensor. If the weight has moved to another slot
    since, the tensor's ``data`` is set to ``view``. Raises UnsupportedError if the layout was made for passes without
    gradients.
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


def make_views(unit: StreamedUnit, base: torch.Tensor) -> Views:
    """Return views of the unit's tensors in ``base``, the unit's bytes in a slot. The views are normal
    tensors, usable for training and inference.
    """
    with torch.inference_mode(False), torch.no_grad():
        tensors: list[torch.Tensor] = []
        for home in unit.homes:
            entry = home.entry
            piece = base[entry.offset : entry.offset + entry.nbytes].view(home.host.dtype)
            view = piece.as_strided(home.host.shape, home.host.stride(), piece.storage_offset())
            is_parameter = isinstance(home.tensor, nn.Parameter)
            tensors.append(nn.Parameter(view, requires_grad=False) if is_parameter else view)
            home.dress(tensors[-1])
    del piece, view
    views = Views(
        base, base.data, tensors, storage_uses(base), addresses=[tensor.data_ptr() for tensor in tensors],
        kept_version=base._version,
    )  # fmt: skip
    if any(is_inner(home.entry.name) for home in unit.homes):
        views.around = WrapperCache(tensors)
    return views
