"""Defines `spill`: writes tensors of a program's memory to a file and maps the file in their place.

After it, the bytes of the tensors are on disk: the system can drop their pages without swapping, and
`MappedViews` finds them, so they stream from the file as the views of a checkpoint do. The file is deleted when
the last tensor that uses it is freed, at the latest at the end of the process. Files that processes left are
deleted by the next `spill` that writes to the same folder. Bytes that are in a file of this process already are not
written again. Each call maps the file anew, so no two tensors share memory.

On Windows nothing may be written to the tensors until `allow_writes` is called.

The CRC-32 of each tensor is computed while it is written, and kept in memory (`checksum_of`). `RangeChecks` compares
what is read later with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..common.commit_memory import is_commit_limit, read_commit, with_advice
from ..common.errors import WeightsError
from ..common.progress import Progress
from ..common.sizes import MIB
from .direct_io import ALIGN, open_raw
from .index import SourceFile
from .mapped_views import FileRange, memory_of
from .spill_file import Mapping, SpillFile, delete_abandoned, no_room

# Bytes between two writes to the drive; more would fill the page cache with unwritten pages.
_CHUNK = 64 * MIB
_SAMPLE = 4096  # bytes at the start, in the middle and at the end that are hashed to find equal tensors

_lock = threading.Lock()

_Key = tuple[str, int, int]  # folder, bytes, CRC-32 of a sample
_Place = tuple[SpillFile, int]  # file, offset

# Where the bytes of tensors are in the present files.
_spilled: dict[_Key, list[tuple[weakref.ref[SpillFile], int]]] = {}
_by_identity: weakref.WeakValueDictionary[tuple[int, int], SpillFile] = weakref.WeakValueDictionary()
_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()  # by address


@dataclass(frozen=True)
class Spilled:
    """``view``: a tensor whose memory is the mapped spill file. ``range``: its bytes in that file."""

    view: torch.Tensor
    range: FileRange


def spill(tensors: Sequence[torch.Tensor], folder: str | os.PathLike[str]) -> list[Spilled]:
    """Write the memory of ``tensors`` to a file in ``folder``. Return views of the mapped file with the same
    dtypes, shapes, strides and bytes.

    ``tensors``: dense tensors on the CPU; they are not changed. Raises BudgetError if the drive has no room,
    and WeightsError if the folder cannot be written. No file is left behind after an error.
    """
    where = Path(folder)
    with _lock:
        for key, known_places in list(_spilled.items()):
            _spilled[key] = [place for place in known_places if place[0]() is not None]
            if not _spilled[key]:
                del _spilled[key]
        memories = [memory_of(tensor) for tensor in tensors]
        keys = [_key(where, memory) for memory in memories]
        # One place for each tensor: equal tensors of one call would otherwise be views of the same bytes.
        taken: set[_Place] = set()
        found = [_known(memory, key, taken) for memory, key in zip(memories, keys, strict=True)]
        offsets, nbytes = [], 0
        for memory, known in zip(memories, found, strict=True):
            offsets.append(nbytes)
            nbytes += 0 if known else -(-memory.numel() // ALIGN) * ALIGN
        mappings: dict[SpillFile, Mapping] = {}
        if nbytes:
            new = _write(where, [m for m, known in zip(memories, found, strict=True) if not known], nbytes)
            mappings[new.file] = new
            for index, known in enumerate(found):
                if known is None:
                    found[index] = new.file, offsets[index]
                    _spilled.setdefault(keys[index], []).append((weakref.ref(new.file), offsets[index]))
        places = [place for place in found if place is not None]
        for file, _ in places:
            if file not in mappings:
                mappings[file] = _map(file)
        return [
            _spilled_at(tensor, mappings[file], at)
            for tensor, (file, at) in zip(tensors, places, strict=True)
        ]


def checksum_of(found: FileRange) -> int | None:
    """Return the CRC-32 with which this process wrote ``found``, None if it is not the range of a spilled tensor."""
    file = _by_identity.get((found.file.device, found.file.inode))
    nbytes, crc = (0, None) if file is None else file.checksums.get(found.offset, (0, None))
    return crc if nbytes == found.nbytes else None


def allow_writes(tensors: Iterable[torch.Tensor]) -> int:
    """Let the process write to those of ``tensors`` that `spill` made. What is written changes no file and no other tensor.

    Windows then charges these tensors to RAM and pagefile. Where they would take more than half of what is left of
    both, they stay read-only, and a write ends the process. Returns the bytes that stay read-only. On other systems the
    tensors are writable from the beginning.
    """
    if sys.platform != "win32":
        return 0
    from .memory_maps_windows import load_kernel32, make_private

    with _lock:  # another thread may spill tensors meanwhile
        areas = [(start, start + len(mapping)) for start, mapping in _mappings.items()]
    found = []
    for tensor in tensors:
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        if any(start <= address < end for start, end in areas):
            found.append((address, tensor.nbytes))
    nbytes, commit = sum(size for _, size in found), read_commit()
    if commit is not None and nbytes > commit.left // 2:
        return nbytes
    kernel32 = load_kernel32() if found else None
    return sum(size for address, size in found if not make_private(kernel32, address, size))


def _spilled_at(tensor: torch.Tensor, mapping: Mapping, offset: int) -> Spilled:
    """Return the bytes of ``mapping`` from ``offset`` as a tensor like ``tensor``."""
    with torch.inference_mode(False):
        flat = torch.frombuffer(_buffer(mapping), dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        view = flat.as_strided(tensor.shape, tensor.stride())
    path = mapping.file.path
    status = os.stat(path)
    file = SourceFile(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)
    return Spilled(view, FileRange(file, offset, view.nbytes))


def _buffer(mapping: Mapping) -> Mapping | ctypes.Array:
    """Return the memory of ``mapping`` in a form of which torch makes a tensor without a warning that it is read-only."""
    if not memoryview(mapping).readonly:
        return mapping
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    buffer = (ctypes.c_uint8 * len(mapping)).from_address(address)
    buffer.mapping = mapping  # type: ignore[attr-defined]  # the tensors keep the buffer, and it keeps the mapping
    _mappings[address] = mapping
    return buffer


def _key(folder: Path, memory: torch.Tensor) -> _Key:
    """Return the folder, the length of ``memory`` and the CRC-32 of a sample of it."""
    nbytes, crc = memory.numel(), 0
    for at in (0, nbytes // 2, max(0, nbytes - _SAMPLE)):
        crc = zlib.crc32(memory[at : at + _SAMPLE].numpy().data, crc)
    return str(folder.absolute()), nbytes, crc


def _known(memory: torch.Tensor, key: _Key, taken: set[_Place]) -> _Place | None:
    """Return a place where the bytes of ``memory`` were spilled before and which is not in ``taken``, and add it to
    ``taken``. Return None if there is none.
    """
    for reference, offset in _spilled.get(key, ()):
        file = reference()
        if file is None or (file, offset) in taken or not _holds(file.path, offset, memory):
            continue
        taken.add((file, offset))
        return file, offset
    return None


def _map(file: SpillFile) -> Mapping:
    """Return a new mapping of ``file``. Raises WeightsError if the system refuses it."""
    try:
        return file.map()
    except (OSError, ValueError) as error:
        message = f"{file.path}: the spilled weights cannot be mapped ({error})"
        if is_commit_limit(error):
            raise WeightsError(with_advice(message, error)) from error
        raise WeightsError(f"{message}; name another folder as disk=") from error


def _holds(path: str, offset: int, memory: torch.Tensor) -> bool:
    """Return whether the file has the bytes of ``memory`` at ``offset``. The mapping does not tell: pages of it may
    have been written to, and the file keeps the old bytes.
    """
    data = memory.numpy().data
    read = memoryview(bytearray(min(_CHUNK, len(data))))
    try:
        with contextlib.closing(open_raw(path, direct=False)) as file:
            for at in range(0, len(data), _CHUNK):
                part = read[: len(data) - at]
                if file.read_into(part, offset + at) != len(part) or part != data[at : at + _CHUNK]:
                    return False
    except OSError:
        return False
    return True


def _write(folder: Path, memories: Sequence[torch.Tensor], nbytes: int) -> Mapping:
    """Write ``memories``, each from a multiple of `ALIGN`, to a new file of ``nbytes`` bytes, and map the file."""
    progress = Progress(sum(memory.numel() for memory in memories))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        delete_abandoned(folder)
        file = SpillFile.create(folder)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightsError(
            f"disk={str(folder)!r}: no file can be written there ({reason}); name a folder on a local drive"
        ) from error
    try:
        file.reserve(nbytes)
        with ThreadPoolExecutor(1, thread_name_prefix="carom-check") as thread:
            for memory in memories:
                data, crc = memory.numpy().data, 0
                offset = os.lseek(file.handle, 0, os.SEEK_CUR)
                for at in range(0, len(data), _CHUNK):
                    chunk = data[at : at + _CHUNK]
                    pending = thread.submit(zlib.crc32, chunk, crc)
                    file.write(chunk)
                    progress.add(len(chunk))
                    file.flush()
                    crc = pending.result()
                file.checksums[offset] = len(data), crc
                os.lseek(file.handle, -len(data) % ALIGN, os.SEEK_CUR)
        mapping = _map(file)
    except BaseException as error:
        file.discard()
        if isinstance(error, OSError):
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_room(folder, nbytes) from error
            raise WeightsError(
                f"{file.path}: the weights could not be written ({error.strerror}); name another folder as disk="
            ) from error
        raise
    _by_identity[file.identity] = file
    return mapping
