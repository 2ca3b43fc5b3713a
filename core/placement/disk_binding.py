"""Defines `bind_memory`: lets the frozen weights of a module that is in memory stream from disk.

A weight that is a view of a mapped file streams from that file. Other weights are spilled into a folder first, or
stay in host memory if there is no folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from ..checkpoint.direct_io import ALIGN
from ..checkpoint.index import TensorEntry, format_code, has_code
from ..checkpoint.mapped_views import FileRange, MappedViews
from ..checkpoint.mapping import BoundTensor
from ..checkpoint.segments import Segment
from ..checkpoint.spill import allow_writes, checksum_of, spill
from ..common.commit_memory import with_advice
from ..common.errors import BudgetError
from ..common.sizes import format_size
from ..host.cache_pieces import LEAST_BUFFERS
from ..model.units import Entry, collect, why_not_streamed
from .bound_checkpoint import Checkpoint, Weights
from .file_tensor import FileTensor

AUTO = "auto"  # the value of disk= by which only weights of mapped files stream from disk
_LEAST = 4096  # bytes; smaller tensors stay on the device


def bind_memory(module: nn.Module, disk: str | os.PathLike[str], ram: int) -> Checkpoint | None:
    """Let the frozen weights of ``module`` stream from disk, and return the binding.

    ``disk``: a folder into which weights that are not views of a mapped file are spilled, or "auto". With "auto"
    these weights stay in host memory.
    ``ram``: the budget of host memory in bytes.
    Returns None, and leaves the module alone, if nothing of it can stream from disk, or if the weights that
    would stay in host memory exceed half of ``ram``. Raises BudgetError and WeightsError as `spill` does.
    """
    entries = [entry for entry in collect(module) if can_stream(entry)]
    # In a new module every weight is trainable, and nothing is trained yet.
    if any(not entry.trainable for entry in entries):
        entries = [entry for entry in entries if not entry.trainable]
    views = MappedViews()
    ranges = [views.find(entry.tensor) for entry in entries]
    others = [entry for entry, found in zip(entries, ranges, strict=True) if found is None]
    spilled = 0
    if disk != AUTO and others:
        written = iter(spill([entry.tensor for entry in others], disk))
        for index, entry in enumerate(entries):
            if ranges[index] is None:
                stored = next(written)
                entry.tensor.data, ranges[index] = stored.view, stored.range
        spilled, others = sum(entry.nbytes for entry in others), []
    if len(others) == len(entries) or sum(entry.nbytes for entry in others) > ram // 2:
        return None
    checkpoint = bind_ranges(module, entries, ranges, _note(entries, ranges, spilled, disk))
    checkpoint.laid_out = spilled > 0
    return checkpoint


def bind_ranges(
    module: nn.Module, entries: Sequence[Entry], ranges: Sequence[FileRange | None], note: str
) -> Checkpoint:
    """Let ``entries`` of ``module``, whose tensors are views of mapped files, stream from the file ranges ``ranges``,
    and return the binding. An entry without a range is kept in host memory.

    ``note``: for the report. Raises BudgetError if host memory has no room for the entries without a range.
    """
    checkpoint = Checkpoint(Weights(""))
    try:
        for entry, found in zip(entries, ranges, strict=True):
            _bind(checkpoint, entry, found)
        checkpoint.note(note)
    except BaseException as error:
        checkpoint.unbind()
        allow_writes(entry.tensor for entry in entries)
        if isinstance(error, MemoryError):
            message = (
                "host memory has no room for the weights that cannot stream from disk; name a folder as disk="
            )
            raise BudgetError(with_advice(message, error)) from error
        raise
    return checkpoint


def bind_replaced(
    module: nn.Module, checkpoint: Checkpoint, disk: str | os.PathLike[str] | None, ram: int
) -> None:
    """Let tensors stream with which ``module`` replaced tensors of ``checkpoint``, as ``load_state_dict(assign=True)``
    does.

    A view of a mapped file streams from that file. Another tensor is spilled if ``disk`` names a folder, otherwise it is
    kept in host memory, as a written value. Called while no layout is in effect. ``ram``: the budget of host memory in
    bytes. Raises as `spill` does, and BudgetError if ``ram`` or host memory has no room. Nothing was bound then.
    """
    replaced = checkpoint.replaced()
    if not replaced:
        return
    entries = [entry for entry in collect(module) if id(entry.tensor) in replaced and can_stream(entry)]
    views = MappedViews()
    ranges = [views.find(entry.tensor) for entry in entries]
    others = [index for index, found in enumerate(ranges) if found is None]
    if disk is not None and disk != AUTO and others:
        for index, stored in zip(others, spill([entries[i].tensor for i in others], disk), strict=True):
            entries[index].tensor.data, ranges[index] = stored.view, stored.range
    elif others:
        _require_ram(
            checkpoint, [entries[i] for i in others], [replaced[id(entries[i].tensor)] for i in others], ram
        )
    for entry, found in zip(entries, ranges, strict=True):
        before = replaced[id(entry.tensor)]
        checkpoint.forget(before)
        try:
            _bind(checkpoint, entry, found).trainable = before.trainable
        except MemoryError as error:
            message = (
                f"host memory has no room for {entry.name}, which replaced a weight that streams from disk; name a folder as "
                "disk="
            )
            raise BudgetError(with_advice(message, error)) from error


def _require_ram(
    checkpoint: Checkpoint, entries: Sequence[Entry], replaced: Sequence[FileTensor], ram: int
) -> None:
    """Raise BudgetError if ``ram`` bytes do not hold ``entries``, which replaced ``replaced``, beside what weights are
    read through.
    """
    freed = sum(tensor.kept_bytes for tensor in replaced if tensor.changed is not None)
    kept = checkpoint.changed_bytes - freed + sum(tensor.kept_bytes for tensor in replaced)
    least = kept + LEAST_BUFFERS * ALIGN
    if ram < least:
        raise BudgetError(
            f"ram={format_size(ram)} has no room for {len(entries)} weights that replaced weights from a file, first "
            f"{entries[0].name} (load_state_dict(assign=True) replaces weights): they would take {kept} bytes. Raise ram to "
            f"{least} bytes (session.set_budget(ram=...)), or close the session, load the weights and stream the module with "
            "disk=FOLDER",
            least,
        )


def _bind(checkpoint: Checkpoint, entry: Entry, found: FileRange | None) -> FileTensor:
    """Let a tensor that is a view of the mapped bytes ``found`` stream from there, or keep it in host memory if that is
    None.
    """
    tensor = checkpoint.bind(_bound(entry, found), entry.tensor, entry.sites)
    tensor.mapped = True
    if found is None:
        tensor.change(tensor.original)
        assert tensor.changed is not None
        tensor.original.data = tensor.changed
    elif (crc := checksum_of(found)) is not None:
        checkpoint.checks.add(found.file, found.offset, found.nbytes, crc, entry.name)
    return tensor


def can_stream(entry: Entry) -> bool:
    """Return whether a weight can be read from disk for each use.

    Buffers stay, because models write to them. Buffers of 8-bit numbers are quantised weights (of ai-toolkit's linear
    layers, for example), and stream. Weights of dtypes that files do not have (complex128) stay.
    """
    tensor = entry.tensor
    weight = not entry.is_buffer or (tensor.element_size() == 1 and tensor.dtype != torch.bool)
    here = tensor.device.type == "cpu" and entry.nbytes >= _LEAST and has_code(_dtype_name(tensor))
    return weight and here and why_not_streamed(entry) is None


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bound(entry: Entry, found: FileRange | None) -> BoundTensor:
    """Return the description of the entry's bytes on disk; without segments if they are not on disk."""
    tensor = entry.tensor
    segments: tuple[Segment, ...] = ()
    if found is not None:
        code = format_code(_dtype_name(tensor))
        stored = TensorEntry(entry.name, code, tuple(tensor.shape), found.file, found.offset, found.nbytes)
        segments = (Segment(stored, 0, 0, found.nbytes),)
    return BoundTensor(
        entry.name, (entry.name,), entry.is_buffer, tensor.dtype, tuple(tensor.shape), entry.nbytes, segments
    )


def _note(
    entries: Sequence[Entry], ranges: Sequence[FileRange | None], spilled: int, disk: str | os.PathLike[str]
) -> str:
    """Return a note for the report: how many bytes stream from which files."""
    nbytes = sum(found.nbytes for found in ranges if found is not None)
    files = len({found.file.path for found in ranges if found is not None})
    where = f"{files} mapped file{'s' if files > 1 else ''}"
    if spilled:
        where = f"{where}, of which {format_size(spilled)} were spilled to {os.fspath(disk)}"
    kept = sum(entry.nbytes for entry, found in zip(entries, ranges, strict=True) if found is None)
    rest = f"; {format_size(kept)} that are in no file stay in host memory" if kept else ""
    return f"{format_size(nbytes)} of weights stream from {where}{rest}"
