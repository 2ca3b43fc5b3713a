"""Defines `StreamedUnit`, the run-time state of a streamed unit: its slot, its views in the region, its
tensors in modules."""

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
_VIEW_SETS = 64  # slot positions for which a unit keeps its views


class WeightProxy:
    """The tensor that stands for one trainable weight in forwards that record gradients: the result of
    `Deliver`, or None.

    ``version``: the tensor's version counter when the host tensor last had the same value.
    """

    __slots__ = ("tensor", "version")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.version = 0


def _references(proxy: Any) -> tuple[int, int]:
    """Return the numbers of Python references and of torch references to a proxy's tensor."""
    return sys.getrefcount(proxy.tensor), proxy.tensor._use_count()


def _unshared_references() -> tuple[int, int]:
    """Return the numbers of references to a tensor that only its proxy holds."""
    proxy = WeightProxy()
    proxy.tensor = torch.zeros(1, requires_grad=True) * 1
    return _references(proxy)


_UNSHARED = _unshared_references()


@dataclass(eq=False)
class Views:
    """The views of a unit's tensors in the memory of a slot. The views are made once for each offset, and
    reused for later slots of the unit at that offset. ``tensors`` are in the order of the unit's homes."""

    base: torch.Tensor  # uint8, exactly the unit's bytes, if possible with a storage of its own
    # the same memory for our copies: writing to it does not raise the version that autograd checks
    target: torch.Tensor
    tensors: list[torch.Tensor]
    uses: int | None  # the storage's reference count while only Carom holds it
    addresses: list[int] = field(default_factory=list)  # the tensors' addresses when made
    # views requested by saved-tensor handles, by place
    saved: dict[tuple, torch.Tensor] = field(default_factory=dict)
    around: WrapperCache | None = (
        None  # wrapper objects over the tensors, if they belong to a quantised weight
    )
    kept_version: int = 0  # `version` when the host tensors last had the same values

    @property
    def version(self) -> int:
        """The version counter that all tensors share, raised by every write of the model."""
        return self.base._version

    def moved(self) -> bool:
        """Return whether a tensor's data was replaced."""
        return list(map(_address, self.tensors)) != self.addresses

    def written(self, proxies: list[WeightProxy]) -> bool:
        """Return whether the model wrote to a tensor since the host tensors last had the same values."""
        if self.version != self.kept_version or self.moved():
            return True
        return any(proxy.tensor is not None and proxy.tensor._version != proxy.version for proxy in proxies)

    def view(self, place: tuple) -> torch.Tensor:
        """Return the view at a handle's place (dtype, shape, strides, byte offset), from a cache."""
        found = self.saved.get(place)
        if found is None:
            found = self.saved[place] = _view(self.base, place)
            if self.uses is not None:
                self.uses += _uses_of_a_view()
        return found

    def kept_elsewhere(self) -> bool:
        """Return whether other code holds one of the tensors, or another tensor over their storage."""
        if self.uses is not None and (storage_uses(self.base) or 0) > self.uses:
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
    """Return by how much one view from `_view` raises the reference count of its storage.

    This is measured on a separate tensor: in a slot, autograd on another thread creates and drops views at
    the same time, without holding Python's GIL.
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

    ``backing``: the unit's bytes in its tier. ``depth``: number of running forwards; the slot's views are in
    the modules while this is above zero. ``sites``: (table, name, index of the home) of each place of a
    tensor in the modules. ``swapped_in``: (table, name, view, host tensor) of the places that hold a view
    now. ``differentiable``: the views in the modules send gradients of trainable weights to the host.
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

    def empty_proxies(self) -> None:
        """Release the slot memory of weight proxies, and drop proxies that other code keeps."""
        for proxy in self.proxies:
            if proxy.tensor is None:
                continue
            if any(map(operator.gt, _references(proxy), _UNSHARED)):
                proxy.tensor = None
            elif proxy.tensor.numel():
                proxy.tensor.data = torch.empty(0, dtype=proxy.tensor.dtype, device=proxy.tensor.device)

    def remember(self, offset: int, views: Views) -> None:
        """Keep ``views`` for later slots at ``offset``; beyond 64 positions, drop the oldest."""
        while len(self.views) >= _VIEW_SETS:
            oldest = next(iter(self.views))
            del self.views[oldest]
        self.views[offset] = views


def make_views(unit: StreamedUnit, base: torch.Tensor) -> Views:
    """Return the unit's tensors over ``base``, its bytes in a slot. They are normal tensors, usable for
    training and inference."""
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
