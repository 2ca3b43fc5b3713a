"""Defines `QuantisedBinding`: quantised weights of a module that are made from their parts in a file.

The weights are objects of the library that quantised them, around views of the mapped file. Making them reads only
tables and scales that the library itself looks at. `FlattenedWeights` then registers their inner tensors as buffers,
and `bind_inner` lets these buffers stream from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.index import TensorEntry
from ..checkpoint.mapping import BoundTensor
from ..checkpoint.quantised_weights import MadeWeight, MappedTensors, QuantisedWeight
from ..checkpoint.segments import Segment
from ..common.sizes import format_size
from ..model.quantized import is_inner
from ..model.tensor_flatten import flatten
from ..model.units import Entry, Site, collect
from .file_tensor import FileTensor

_ABSENT = object()


@dataclass(frozen=True)
class _Placed:
    """A weight that stands in the module in place of ``original``.

    ``attributes``: values of the module's attributes before, by name. ``addresses``: where the weight's bytes were.
    """

    made: MadeWeight
    original: nn.Parameter
    sites: list[Site]
    attributes: Mapping[str, Any]
    addresses: list[int]


class QuantisedBinding:
    """The quantised weights ``found`` (by name in ``module``) of a file.

    Raises WeightsError and UnsupportedError as `QuantisedWeight.build` does. The module is changed by `place` only.
    """

    def __init__(self, module: nn.Module, found: Mapping[str, QuantisedWeight]) -> None:
        self._mapped = MappedTensors()
        self._made: list[tuple[MadeWeight, Entry]] = []
        self._placed: list[_Placed] = []
        self.kinds = sorted({weight.kind for weight in found.values()})
        entries = {id(entry.tensor): entry for entry in collect(module)}
        for name, weight in found.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            entry = entries[id(owner._parameters[leaf])]
            self._made.append((weight.build(owner, leaf, self._mapped), entry))

    def place(self) -> None:
        """Put the weights into the module."""
        for made, entry in self._made:
            owner, original = entry.sites[0].module, entry.tensor
            assert isinstance(original, nn.Parameter)
            before = {name: vars(owner).get(name, _ABSENT) for name in made.attributes}
            self._placed.append(_Placed(made, original, entry.sites, before, _addresses(made.parameter)))
            for site in entry.sites:
                site.table[site.name] = made.parameter
            vars(owner).update(made.attributes)
        self._made.clear()

    def bind_inner(
        self, module: nn.Module, bind: Callable[[BoundTensor, torch.Tensor, list[Site]], FileTensor]
    ) -> None:
        """Let the inner tensors of the weights, which are buffers of ``module`` now, stream from the file.

        ``bind``: `Checkpoint.bind`.
        """
        for entry in collect(module):
            tensor = entry.tensor
            if tensor.device.type != "cpu" or not is_inner(entry.name):
                continue
            stored = self._mapped.entries.get(tensor.data_ptr())
            if stored is not None and tensor.nbytes == stored.nbytes and tensor.is_contiguous():
                bind(_bound(entry, stored), tensor, entry.sites).mapped = True

    def undo(self) -> None:
        """Put the module's own parameters back. Idempotent.

        A weight whose values were written stays, as does one that other code put in its place.
        """
        while self._placed:
            self._put_back(
                self._placed[-1]
            )  # removed afterwards, so that an interrupted call may be repeated
            self._placed.pop()

    def _put_back(self, placed: _Placed) -> None:
        """Put one of the module's own parameters back, with the attributes that it had."""
        owner, made = placed.sites[0].module, placed.made
        moved = zip(placed.addresses, _addresses(made.parameter), strict=True)
        if any(before in self._mapped.entries and before != now for before, now in moved):
            return
        for site in placed.sites:
            if site.table.get(site.name) is made.parameter:
                site.table[site.name] = placed.original
        for name, value in placed.attributes.items():
            if vars(owner).get(name) is not made.attributes[name]:
                continue
            if value is _ABSENT:
                del vars(owner)[name]
            else:
                vars(owner)[name] = value

    @property
    def note(self) -> str:
        """A note for the report: how many bytes of quantised weights the file holds, of which kinds."""
        nbytes = sum(entry.nbytes for entry in self._mapped.entries.values())
        return f"{format_size(nbytes)} of quantised weights ({', '.join(self.kinds)}) stream from the file as they are"


def _addresses(parameter: nn.Parameter) -> list[int]:
    """Return the addresses of the inner tensors of a weight."""
    return [tensor.data_ptr() for tensor in flatten(parameter)[1]]


def _bound(entry: Entry, stored: TensorEntry) -> BoundTensor:
    """Return the description of an inner tensor whose bytes are those of ``stored``."""
    tensor = entry.tensor
    segments = (Segment(stored, 0, 0, stored.nbytes),)
    return BoundTensor(
        entry.name, (entry.name,), entry.is_buffer, tensor.dtype, tuple(tensor.shape), stored.nbytes, segments
    )
