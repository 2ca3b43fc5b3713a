"""Defines `StreamedUnit`, the run-time state of a streamed unit: its slot, its views of the slot, and the
places of its tensors in modules.

A unit is a group of tensors that are copied together. A slot is the device memory that holds a unit while it
is used. The region is the device memory of all slots.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..device.engine import storage_uses
from ..model.quantized import is_inner
from ..model.wrapper_cache import WrapperCache, alone
from ..placement.backing import Backing
from ..plan.region import Slot

_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_VIEW_SETS = 64  # number of slot positions for which a unit keeps its views


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

    The views are made once for each offset in the region, and reused for later slots of the unit at that
    offset.
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

    def kept_elsewhere(self) -> bool:
        """Return whether other code holds one of the tensors, or another tensor that uses their storage."""
        if self.uses is not None:
            own = self.uses + len(self.saved) * _uses_of_a_view() if self.saved else self.uses
            if (storage_uses(self.base) or 0) > own:
                return True
        return not alone(self.tensors) if self.around is None else self.around.has_other_references()


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


class StreamedUnit:
    """The run-time state of a streamed unit.

    ``backing``: the unit's bytes in its tier (its store).
    ``depth``: number of running forwards of the unit. While it is above zero, the modules hold views of the
    slot.
    ``sites``: (table, name, index of the home) of each place of a tensor in the modules.
    ``swapped_in``: (table, name, view, host tensor) of the places that hold a view now.
    ``differentiable``: whether the views in the modules send gradients of trainable weights to the host.
    """

    def __init__(self, backing: Backing) -> None:
        self.backing = backing
        self.unit, self.index, self.homes = backing.unit, backing.index, backing.homes
        self.name, self.nbytes = backing.name, backing.nbytes
        self.version, self.in_graphs = backing.version, backing.in_graphs
        self.slot: Slot | None = None
        self.views: OrderedDict[int, Views] = OrderedDict()
        self.depth = 0
        self.proxies = [WeightProxy() for _ in self.homes]
        self.sites: list[tuple[dict, str, int]] = [
            (site.table, site.name, which)
            for which, home in enumerate(self.homes)
            for site in home.entry.sites
        ]
        self.swapped_in: list[tuple[dict, str, Any, Any]] = []
        self.differentiable = False

    def forget(self) -> None:
        """Drop the references to the tables of the model's modules. Called when the streamer closes."""
        self.sites.clear()
        self.swapped_in.clear()

    def empty_proxies(self) -> None:
        """Release the slot memory of the weights' proxies, and drop proxies whose tensor other code keeps."""
        for proxy in self.proxies:
            if proxy.tensor is None:
                continue
            if any(map(operator.gt, _references(proxy), _UNSHARED)):
                proxy.tensor = None
            elif proxy.tensor.numel():
                proxy.tensor.data = torch.empty(0, dtype=proxy.tensor.dtype, device=proxy.tensor.device)

    def remember(self, offset: int, views: Views) -> None:
        """Keep ``views`` for later slots at ``offset``. Beyond 64 offsets, the oldest views are dropped."""
        while len(self.views) >= _VIEW_SETS:
            oldest = next(iter(self.views))
            del self.views[oldest]
        self.views[offset] = views


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
