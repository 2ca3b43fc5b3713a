"""Tags that say whether a tensor of a simulated device is on the device or on the host.

In reality, all these tensors are CPU tensors. Storages are tagged, by weak references. A storage is on the
device if an engine allocated it there, moved it there, or an operator of a step computed it from device
tensors. A storage is on the host if a session took it over from a module, or if it is a block of pinned memory.
A storage without a tag is neutral.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch

from .dispatch_watch import plain

LOCATION = torch.device("privateuseone")  # the device that `locate` returns for tensors on a simulated device


@dataclass(frozen=True, eq=False)
class Tag:
    """The known properties of a storage. ``device``: whether the storage is on the device, otherwise on the
    host. ``what``: a description of the storage for error texts.

    ``slots``: whether the storage is device memory that an engine allocated for slots, the ranges that
    weights are copied to. Reads and overwrites of such memory are checked.
    """

    device: bool
    what: Any
    slots: bool = False
    guarded: bool = False  # whether the storage is the host copy of a streamed weight


class Ranges:
    """Address ranges of host memory that do not overlap, with a tag each."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[int, Tag]] = {}
        self._starts: list[int] = []

    def add(self, start: int, nbytes: int, tag: Tag) -> None:
        """Add a range of ``nbytes`` from ``start``."""
        if nbytes:
            self._all[start] = start + nbytes, tag
            self._starts = sorted(self._all)  # a new list, because other threads may be searching the old one

    def remove(self, start: int) -> None:
        """Remove the range that begins at ``start``."""
        if self._all.pop(start, None) is not None:
            self._starts = sorted(self._all)

    def find(self, address: int) -> Tag | None:
        """Return the tag of the range that contains ``address``, None if there is none."""
        starts = self._starts
        at = bisect_right(starts, address)
        if not at:
            return None
        end, tag = self._all.get(starts[at - 1], (0, None))
        return tag if address < end else None


class Places:
    """The tags of all storages of one simulated device, shared by all engines on it."""

    def __init__(self) -> None:
        # Tags by the storage's address. A weak reference of torch keeps each address from being used again.
        self._tags: dict[int, Tag] = {}
        self._made: dict[Any, Tag] = {}  # the tag of an operator's results, by operator
        self._limit = 1024
        self._sweeping = threading.Lock()

    def __del__(self) -> None:
        for storage in self._tags:
            torch.UntypedStorage._free_weak_ref(storage)

    def tag(self, tensor: torch.Tensor, tag: Tag, again: bool = True) -> None:
        """Set the tag of the tensor's storage; unless ``again``, only if the storage has no tag."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._tags:
            storage._weak_ref()  # while the weak reference is held, no other storage gets the same address
            if len(self._tags) >= self._limit:
                self._sweep()
        elif not again:
            return
        self._tags[key] = tag

    def of(self, tensor: torch.Tensor) -> Tag | None:
        """Return the tag of the tensor's storage, None if it has none."""
        return self._tags.get(tensor.untyped_storage()._cdata)

    def made(self, func: Any, result: Any) -> None:
        """Tag the result of ``func``, which computed with device tensors, as a device tensor."""
        tag = self._made.get(func)
        if tag is None:
            tag = self._made[func] = Tag(True, func)
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and plain(made):
                self.tag(made, tag, again=False)

    def belongs_to_host(self, tensor: torch.Tensor, name: str) -> None:
        """Tag the tensor called ``name`` as a host tensor, if it has no tag."""
        with torch._C.DisableTorchFunctionSubclass():
            if plain(tensor) and self.of(tensor) is None:
                self.tag(tensor, Tag(False, name))

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is tagged as being on the device."""
        with torch._C.DisableTorchFunctionSubclass():
            tag = self.of(tensor) if plain(tensor) else None
        return tag is not None and tag.device

    def copy_of(self, tensor: torch.Tensor, on_device: bool) -> torch.Tensor:
        """Return a copy of the tensor, tagged as being on the device if ``on_device``."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            copy = tensor.detach().clone()
            if not plain(tensor):
                return copy
            # clone() drops gaps and repeated elements, as a copy to a real device does. Here strides are
            # kept, so the storage is copied.
            if copy.stride() != tensor.stride():
                storage = tensor.untyped_storage().clone()
                copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
                # The storage of a negative or conjugate view holds other values than the view shows.
                copy = torch._neg_view(copy) if tensor.is_neg() else copy
                copy = torch._conj(copy) if tensor.is_conj() else copy
            if on_device:
                self.tag(copy, Tag(True, "moved to the device"))
        return copy

    def _sweep(self) -> None:
        """Remove the tags of storages that have died, unless another call does so: each weak reference is freed once, and
        not looked at after that.
        """
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            for key in list(self._tags):
                if torch.UntypedStorage._expired(key):
                    del self._tags[key]
                    torch.UntypedStorage._free_weak_ref(key)
            self._limit = 2 * len(self._tags) + 1024
        finally:
            self._sweeping.release()


class Reserve:
    """The device memory that a caching allocator would hold: freed segments serve requests of at most their
    size until `trim`.
    """

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._unused: list[int] = []

    def take(self, nbytes: int) -> int:
        """Account for an allocation of ``nbytes``; return the size of its segment, for `give_up`."""
        segment = min((size for size in self._unused if size >= nbytes), default=0)
        if segment:
            self._unused.remove(segment)
            return segment
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)
        return nbytes

    def give_up(self, segment: int) -> None:
        """Add a segment of ``segment`` bytes to the unused segments."""
        self._unused.append(segment)

    def trim(self) -> None:
        """Give the unused segments back to the device."""
        self.bytes -= sum(self._unused)
        self._unused.clear()
