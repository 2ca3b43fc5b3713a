"""Defines `share_memory` and `share_files`: put frozen weights into memory that the ranks of a machine share.

Weights in memory are copied once, by the first rank; every rank's module then has views of the same memory. Weights
of files are read once, each rank a part of them. Both give a `SharedImage`, from which a `FileTier` streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ..checkpoint.direct_io import ALIGN
from ..checkpoint.disk_reader import DiskReader, ReaderPolicy
from ..checkpoint.index import SourceFile
from ..checkpoint.mapped_views import FileRange, memory_of
from ..checkpoint.packed_source import PackedSource
from ..common.errors import GroupError, UnsupportedError
from ..common.progress import Progress
from ..common.sizes import MIB, format_size
from ..host.arena import workers
from ..host.node_group import NodeGroup
from ..host.shared_image import SharedImage
from ..host.shared_memory import SharedMemory
from ..model.units import Entry, collect
from .bound_checkpoint import Checkpoint
from .disk_binding import bind_ranges, can_stream

RANK_BYTES = 192 * MIB  # host memory of each rank for weights that the shared copy does not hold
_CHUNK = 64 * MIB
_GRANULE = 256 * MIB  # neighbouring weights that are shared, or not, together


def share_memory(module: nn.Module, node: NodeGroup, image: SharedImage) -> Checkpoint:
    """Move the frozen weights of ``module`` that are in host memory to shared memory, add that to ``image``, and let
    them stream from there.

    All ranks get the values of the first rank of the machine, as in DistributedDataParallel (`follow_first_rank` does
    that for the other tensors). To be called on all ranks at once. Raises UnsupportedError if no weight is frozen, and GroupError if the modules of the ranks differ.
    """
    entries = node.together("choosing weights", lambda: _frozen(module))
    agree(node, "the module", [describe(entry) for entry in entries])
    offsets, total = [], 0
    for entry in entries:
        offsets.append(total)
        total += -(-entry.nbytes // ALIGN) * ALIGN
    memory = _allocate(node, [total])[0]
    node.together(
        "copying weights to shared memory",
        lambda: _copy(entries, offsets, memory) if node.rank == 0 else None,
    )
    file, private = memory.file(), memory.private()
    for entry, offset in zip(entries, offsets, strict=True):
        tensor, flat = entry.tensor, private[offset : offset + entry.nbytes]
        with torch.inference_mode(False):
            typed = flat.view(tensor.dtype)
            tensor.data = typed.as_strided(tensor.shape, tensor.stride(), typed.storage_offset())
    image.add(file, memory, [(0, total)])
    ranges = [FileRange(file, offset, entry.nbytes) for entry, offset in zip(entries, offsets, strict=True)]
    note = f"{format_size(total)} of weights are in memory that {node.size} ranks share"
    return bind_ranges(module, entries, ranges, note)


def share_files(checkpoint: Checkpoint, node: NodeGroup, ram: int, image: SharedImage) -> None:
    """Read the weights of ``checkpoint`` into shared memory, as far as ``ram`` bytes of the machine allow, and add
    them to ``image``. If not all fit, the shared ones are spread evenly over the order of the files.

    To be called on all ranks at once. Raises WeightsError if a file cannot be read, and GroupError if the ranks have
    different files.
    """
    ranges = _file_ranges(checkpoint)
    files = list(dict.fromkeys(file for file, _, _ in ranges))
    agree(node, "the weights file", [(f.size, f.mtime_ns, f.inode) for f in files])
    total = sum(end - start for _, start, end in ranges)
    room = ram if total <= ram else ram - node.size * RANK_BYTES
    chosen = _spread(_granules(ranges), total, max(0, room))
    memories = _allocate(node, [file.size for file in files])
    progress = Progress(sum(end - start for granule in chosen for _, start, end in granule))

    def read() -> None:
        reader = DiskReader(ReaderPolicy(workers=checkpoint.settings.workers))
        with reader:
            mine = [part for granule in chosen[node.rank :: node.size] for part in granule]
            handles = [
                reader.submit_range(file, start, end - start, memories[files.index(file)].data[start:end])
                for file, start, end in mine
            ]
            for handle, (_, start, end) in zip(handles, mine, strict=True):
                handle.result()
                progress.add(end - start)

    node.together("reading weights into shared memory", read)
    for file, memory in zip(files, memories, strict=True):
        image.add(
            file, memory, [(start, end) for granule in chosen for f, start, end in granule if f == file]
        )
    image.complete = sum(map(len, chosen)) == len(ranges)
    held = sum(end - start for granule in chosen for _, start, end in granule)
    checkpoint.note(
        f"{format_size(held)} of {format_size(total)} of weights are in memory that {node.size} ranks share"
    )


Range = tuple[SourceFile, int, int]  # file, first byte, end


def _file_ranges(checkpoint: Checkpoint) -> list[Range]:
    """Return the byte ranges of the files that fill the module, in order, joined where they are neighbours."""
    found: dict[SourceFile, list[tuple[int, int]]] = {}
    for segment in checkpoint.segments():
        entry, start, nbytes = segment.entry, segment.start, segment.nbytes
        if isinstance(entry.file, PackedSource):  # the packed bytes are shared
            entry = entry.file.stored
            start, nbytes = 0, entry.nbytes
        if nbytes:
            begin = entry.offset + start
            found.setdefault(entry.file, []).append((begin, begin + nbytes))
    return [(file, *part) for file, parts in found.items() for part in sorted(set(parts))]


def _granules(ranges: Iterable[Range]) -> list[list[Range]]:
    """Return the ranges in groups of neighbours, each of at least `_GRANULE` bytes except the last."""
    granules: list[list[Range]] = [[]]
    nbytes = 0
    for part in ranges:
        if nbytes >= _GRANULE:
            granules.append([])
            nbytes = 0
        granules[-1].append(part)
        nbytes += part[2] - part[1]
    return granules


def _spread(granules: Sequence[list[Range]], total: int, room: int) -> list[list[Range]]:
    """Return granules of at most ``room`` bytes together, spread evenly; all of them if ``total`` fits."""
    chosen, seen, taken = [], 0, 0
    for granule in granules:
        nbytes = sum(end - start for _, start, end in granule)
        seen += nbytes
        # of the bytes seen so far, at most the share room / total is taken
        if (taken + nbytes) * total <= seen * max(room, 0) or total <= room:
            chosen.append(granule)
            taken += nbytes
    return chosen


def _allocate(node: NodeGroup, sizes: Sequence[int]) -> list[SharedMemory]:
    """Return shared memory of each of ``sizes`` bytes, made by the first rank and opened by the others."""
    made = node.together(
        "allocating shared memory",
        lambda: [SharedMemory.create(size) for size in sizes] if node.rank == 0 else [],
    )
    handles = node.exchange([memory.handle for memory in made], "sharing memory")[0]
    return node.together(
        "opening shared memory", lambda: made or [SharedMemory.open(handle) for handle in handles]
    )


def _copy(entries: Sequence[Entry], offsets: Sequence[int], memory: SharedMemory) -> None:
    """Copy the bytes of each entry to its offset in ``memory``, on several threads."""
    progress = Progress(sum(entry.nbytes for entry in entries))

    def copy(source: torch.Tensor, at: int, nbytes: int) -> None:
        ctypes.memmove(memory.data.data_ptr() + at, source.data_ptr(), nbytes)
        progress.add(nbytes)

    with ThreadPoolExecutor(workers(), thread_name_prefix="carom-share") as pool:
        jobs = []
        for entry, offset in zip(entries, offsets, strict=True):
            source = memory_of(entry.tensor)
            for start in range(0, entry.nbytes, _CHUNK):
                part = source[start : start + _CHUNK]
                jobs.append(pool.submit(copy, part, offset + start, part.numel()))
        for job in jobs:
            job.result()


def _frozen(module: nn.Module) -> list[Entry]:
    """Return the frozen weights of ``module`` that can be shared. Raises UnsupportedError if there are none."""
    frozen = [entry for entry in collect(module) if not entry.trainable]
    entries = [entry for entry in frozen if can_stream(entry)]
    elsewhere = [entry for entry in frozen if entry.tensor.device.type != "cpu"]
    if not entries and elsewhere:
        raise UnsupportedError(
            f"group= shares frozen weights in host memory, and {elsewhere[0].name} is on {elsewhere[0].tensor.device}; leave "
            "the model on the CPU, carom.stream moves it to the device"
        )
    if not entries:
        raise UnsupportedError(
            "group= shares frozen weights in host memory, and the module has none; freeze its weights "
            "(requires_grad_(False)) and train adapters, build it on meta with weights=, or leave group= out"
        )
    return entries


def describe(entry: Entry) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
    """Return what has to be equal on all ranks: name, dtype, shape and strides."""
    tensor = entry.tensor
    return entry.name, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride())


def agree(node: NodeGroup, what: str, mine: list[Any]) -> None:
    """Raise GroupError on all ranks, naming the first difference, unless ``mine`` is equal on all ranks."""
    lists = node.exchange(mine, f"comparing {what}")
    for rank, other in enumerate(lists):
        if other != lists[0]:
            pairs = zip(lists[0], other, strict=False)
            differing = next(
                (f"{a} on rank 0, {b} on rank {rank}" for a, b in pairs if a != b), "their numbers differ"
            )
            raise GroupError(
                f"carom.stream(group=...): {what} of rank {rank} is not that of rank 0: {differing}; make the same "
                "model with the same frozen weights on every rank"
            )
