"""Where tensors of a simulated device live: on the device, or on the host. Physically all of them are CPU tensors.

Storages are tagged, by weak references. On the device is what an engine allocated or moved there, and what operators of
a step made of it; on the host is what a session took over from a module, and its blocks. What nobody tagged is neutral.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch

from .watched import plain

LOCATION = torch.device("privateuseone")  # what a tensor on a simulated device says of where it lives


@dataclass(frozen=True, eq=False)
class Tag:
    """What is known of a storage. ``slots``: it is memory of an engine, read and overwritten under events."""

    device: bool
    what: Any
    slots: bool = False
    guarded: bool = False  # a streamed weight's host copy


class Ranges:
    """Stretches of host memory that do not overlap, by address."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[int, Tag]] = {}
        self._starts: list[int] = []

    def add(self, start: int, nbytes: int, tag: Tag) -> None:
        if nbytes:
            self._all[start] = start + nbytes, tag
            self._starts = sorted(self._all)  # replaced whole: other threads search meanwhile

    def remove(self, start: int) -> None:
        if self._all.pop(start, None) is not None:
            self._starts = sorted(self._all)

    def find(self, address: int) -> Tag | None:
        starts = self._starts
        at = bisect_right(starts, address)
        if not at:
            return None
        end, tag = self._all.get(starts[at - 1], (0, None))
        return tag if address < end else None


class Places:
    """The tags of one simulated device, for all engines on it."""

    def __init__(self) -> None:
        self._tags: dict[int, Tag] = {}  # by the storage's address, held by a weak reference of torch's each
        self._made: dict[Any, Tag] = {}  # by operator
        self._limit = 1024

    def __del__(self) -> None:
        for storage in self._tags:
            torch.UntypedStorage._free_weak_ref(storage)

    def tag(self, tensor: torch.Tensor, tag: Tag, again: bool = True) -> None:
        """``again``: whatever it was tagged as before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._tags:
            storage._weak_ref()  # while it is held no other storage takes the address
            if len(self._tags) >= self._limit:
                self._sweep()
        elif not again:
            return
        self._tags[key] = tag

    def of(self, tensor: torch.Tensor) -> Tag | None:
        return self._tags.get(tensor.untyped_storage()._cdata)

    def made(self, func: Any, result: Any) -> None:
        """``func`` computed with what is on the device: so is its result."""
        tag = self._made.get(func)
        if tag is None:
            tag = self._made[func] = Tag(True, func)
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and plain(made):
                self.tag(made, tag, again=False)

    def belongs_to_host(self, tensor: torch.Tensor, name: str) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if plain(tensor) and self.of(tensor) is None:
                self.tag(tensor, Tag(False, name))

    def on_device(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            tag = self.of(tensor) if plain(tensor) else None
        return tag is not None and tag.device

    def copy_of(self, tensor: torch.Tensor, on_device: bool) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            copy = tensor.detach().clone()
            if not plain(tensor):
                return copy
            if (
                copy.stride() != tensor.stride()
            ):  # gaps or repeated elements, which a real device would not keep
                storage = tensor.untyped_storage().clone()
                copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            if on_device:
                self.tag(copy, Tag(True, "moved to the device"))
        return copy

    def _sweep(self) -> None:
        for key in list(self._tags):
            if torch.UntypedStorage._expired(key) and self._tags.pop(key, None) is not None:
                torch.UntypedStorage._free_weak_ref(key)
        self._limit = 2 * len(self._tags) + 1024


class Reserve:
    """What a caching allocator has of the device: given-up memory serves what is no larger, until it is trimmed."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._unused: list[int] = []

    def take(self, nbytes: int) -> int:
        """Memory for ``nbytes``: the size of its segment, for `give_up`."""
        segment = min((size for size in self._unused if size >= nbytes), default=0)
        if segment:
            self._unused.remove(segment)
            return segment
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)
        return nbytes

    def give_up(self, segment: int) -> None:
        self._unused.append(segment)

    def trim(self) -> None:
        self.bytes -= sum(self._unused)
        self._unused.clear()
