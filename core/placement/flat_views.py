"""Defines `FlatViews`: weights that are views of one tensor that other code keeps, such as the flat parameter of an
optimizer.

A session gives such weights memory of their own, as ``module.to("cuda")`` does. A write to the flat tensor then does
not reach them, so a note says so, and streamed trainable weights are refused. When the session ends, they are views
of the flat tensor again.
"""

from __future__ import annotations

import bisect
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..checkpoint.memory_maps import mapped_files
from ..common.errors import UnsupportedError
from ..device.engine import storage_uses
from ..model.units import Entry, collect


@dataclass(frozen=True)
class _View:
    """A weight and its place in the flat tensor. The storage is not kept alive."""

    tensor: torch.Tensor
    storage: StorageWeakRef
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def restore(self) -> None:
        """Make the weight a view of the flat tensor again, with the weight's present value."""
        tensor = self.tensor
        if tensor.device.type != "cpu" or (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            return
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:  # nothing else uses the flat tensor any more
            return
        with torch.inference_mode(False), torch.no_grad():
            view = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)
            if view.data_ptr() != tensor.data_ptr():
                view.copy_(tensor.detach())
                tensor.data = view


class FlatViews:
    """The weights of ``root`` that are views of tensors that other code keeps, as they are before a session changes
    them.

    Weights of a memory-mapped file do not count: they are views of one mapping, which nothing writes to.
    ``note``: a sentence for the report, "" if the module has no such weights.
    """

    def __init__(self, root: nn.Module) -> None:
        groups: dict[int, list[Entry]] = {}
        for entry in collect(root):
            tensor = entry.tensor
            plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
            if plain and tensor.device.type == "cpu" and not tensor.is_inference() and entry.nbytes:
                groups.setdefault(tensor.untyped_storage()._cdata, []).append(entry)
        shared = [group for group in groups.values() if len(group) > 1 and _kept_by_others(group)]
        mapped = mapped_files() if shared else []
        starts = [mapping.start for mapping in mapped]
        self._entries: list[Entry] = []
        for group in shared:
            address = group[0].tensor.data_ptr()
            at = bisect.bisect_right(starts, address) - 1
            if at < 0 or address >= mapped[at].end:
                self._entries += group
        self._views = [
            _View(
                t, StorageWeakRef(t.untyped_storage()), int(t.storage_offset()), t.shape, t.stride(), t.dtype
            )
            for t in (entry.tensor for entry in self._entries)
        ]
        self.note = (
            ""
            if not self._entries
            else (
                f"{len(self._entries)} weights, such as {self._entries[0].name}, are views of a tensor that other code keeps: "
                "until close(), writes to that tensor do not reach them; close() writes their values to it"
            )
        )

    def refuse_trainable(self) -> None:
        """Raise UnsupportedError if such a weight is trained: an optimizer that steps the flat tensor would train nothing."""
        for entry in self._entries:
            if entry.trainable:
                raise UnsupportedError(
                    f"{entry.name} is a view of a tensor that other code keeps, and a step on that tensor would not reach "
                    "the streamed weight: give the weight its own memory (weight.data = weight.data.clone()), or drop the "
                    "flat tensor, before streaming with training='stream'"
                )

    def restore(self) -> None:
        """Make the weights views of the flat tensors again. Idempotent."""
        while self._views:
            self._views[-1].restore()
            self._views.pop()


def _kept_by_others(group: list[Entry]) -> bool:
    """Return whether other tensors than those of ``group`` use the storage that these share."""
    tensors = [entry.tensor for entry in group]
    bases = {id(base): base for tensor in tensors if (base := tensor._base) is not None}
    uses = storage_uses(tensors[0])
    if uses is None:
        return False
    # A view keeps the tensor that it was made from, which is no use by others unless Python code has it too.
    unseen = sum(sys.getrefcount(base) <= _UNSEEN for base in bases.values())
    return uses > _example_uses(len(tensors) + unseen)


def _example_uses(tensors: int) -> int:
    """Return what `storage_uses` returns if ``tensors`` tensors use a storage, and nothing else does."""
    made = [torch.empty(0, dtype=torch.uint8)]
    made += [torch.empty(0, dtype=torch.uint8).set_(made[0].untyped_storage()) for _ in range(tensors - 1)]
    return storage_uses(made[0]) or 0


def _unseen_references() -> int:
    """Return what `sys.getrefcount` returns, as called in `_kept_by_others`, for a base that only views keep."""
    view = torch.empty(4)[1:]
    bases = {0: view._base}
    return next(sys.getrefcount(base) for base in bases.values())


_UNSEEN = _unseen_references()
