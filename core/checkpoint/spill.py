"""Defines `spill`: writes tensors of a program's memory to a file and maps the file in their place.

After it, the bytes of the tensors are on disk: the system can drop their pages without swapping, and
`MappedViews` finds them, so they stream from the file as the views of a checkpoint do. The file is deleted when
the last tensor that uses it is freed, at the latest at the end of the process. Files of killed processes are
deleted by the next `spill` that writes to the same folder, and so are all files on Windows, which keeps a mapped
file. Bytes that are in a file of this process already are not written again. Each call maps the file anew, so no two
tensors share memory.

The CRC-32 of each tensor is computed while it is written, and kept in memory (`checksum_of`). `RangeChecks` compares
what is read later with it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import shutil
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.errors import BudgetError, WeightsError
from ..common.progress import Progress
from ..common.sizes import MIB, format_size
from .direct_io import ALIGN
from .index import SourceFile
from .mapped_views import FileRange, memory_of

PREFIX, SUFFIX = "carom-spill-", ".bin"
# Bytes between two writes to the drive; more would fill the page cache with unwritten pages.
_CHUNK = 64 * MIB
_SAMPLE = 4096  # bytes at the start, in the middle and at the end that are hashed to find equal tensors

_number = itertools.count()
_lock = threading.Lock()


class _File:
    """The spill file ``path``, open as ``handle``. It is deleted when the last mapping of it is freed.

    ``checksums``: {offset: (bytes, CRC-32)} of the tensors in the file.
    ``discard``: closes and deletes the file. Idempotent.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self.handle = str(path.absolute()), handle
        self.checksums: dict[int, tuple[int, int]] = {}
        self.discard = weakref.finalize(self, _discard, handle, path, os.getpid())

    def map(self) -> _Mapping:
        """Return a new private mapping of the whole file. Raises OSError."""
        mapping = _Mapping(self.handle, os.fstat(self.handle).st_size, access=mmap.ACCESS_COPY)
        mapping.file = self
        return mapping


class _Mapping(mmap.mmap):
    """A private mapping of ``file``. Tensors that are views of it keep it and the file alive.

    Writes to the views stay in this mapping, so two tensors must never be views of the same bytes of one mapping.
    """

    file: _File


_Key = tuple[str, int, int]  # folder, bytes, CRC-32 of a sample
_Place = tuple[_File, int]  # file, offset

# Where the bytes of tensors are in the present files.
_spilled: dict[_Key, list[tuple[weakref.ref[_File], int]]] = {}
_by_path: weakref.WeakValueDictionary[str, _File] = weakref.WeakValueDictionary()


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
        mappings: dict[_File, _Mapping] = {}
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
    file = _by_path.get(found.file.path)
    nbytes, crc = (0, None) if file is None else file.checksums.get(found.offset, (0, None))
    return crc if nbytes == found.nbytes else None


def _spilled_at(tensor: torch.Tensor, mapping: _Mapping, offset: int) -> Spilled:
    """Return the bytes of ``mapping`` from ``offset`` as a tensor like ``tensor``."""
    with torch.inference_mode(False):
        flat = torch.frombuffer(mapping, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        view = flat.as_strided(tensor.shape, tensor.stride())
    path = mapping.file.path
    status = os.stat(path)
    file = SourceFile(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)
    return Spilled(view, FileRange(file, offset, view.nbytes))


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
        if file is None or (file, offset) in taken or not _holds(Path(file.path), offset, memory):
            continue
        taken.add((file, offset))
        return file, offset
    return None


def _map(file: _File) -> _Mapping:
    """Return a new mapping of ``file``. Raises WeightsError if the system refuses it."""
    try:
        return file.map()
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{file.path}: the spilled weights cannot be mapped ({error}); name another folder as disk="
        ) from error


def _holds(path: Path, offset: int, memory: torch.Tensor) -> bool:
    """Return whether the file has the bytes of ``memory`` at ``offset``. The mapping does not tell: pages of it may
    have been written to, and the file keeps the old bytes.
    """
    data = memory.numpy().data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return all(
                file.read(len(part)) == part
                for part in (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))
            )
    except OSError:
        return False


def _write(folder: Path, memories: Sequence[torch.Tensor], nbytes: int) -> _Mapping:
    """Write ``memories``, each from a multiple of `ALIGN`, to a new file of ``nbytes`` bytes, and map the file."""
    progress = Progress(sum(memory.numel() for memory in memories))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(folder)
        file = _create(folder)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightsError(
            f"disk={str(folder)!r}: no file can be written there ({reason}); name a folder on a local drive"
        ) from error
    handle = file.handle
    try:
        _reserve(handle, nbytes, folder)
        with ThreadPoolExecutor(1, thread_name_prefix="carom-check") as thread:
            for memory in memories:
                data, crc = memory.numpy().data, 0
                offset = os.lseek(handle, 0, os.SEEK_CUR)
                for at in range(0, len(data), _CHUNK):
                    chunk = data[at : at + _CHUNK]
                    pending = thread.submit(zlib.crc32, chunk, crc)
                    _write_all(handle, chunk)
                    progress.add(len(chunk))
                    _flush(handle)
                    crc = pending.result()
                file.checksums[offset] = len(data), crc
                os.lseek(handle, -len(data) % ALIGN, os.SEEK_CUR)
        mapping = file.map()
    except BaseException as error:
        file.discard()
        if isinstance(error, OSError):
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(folder, nbytes) from error
            raise WeightsError(
                f"{file.path}: the weights could not be written ({error.strerror}); name another folder as disk="
            ) from error
        raise
    _by_path[file.path] = file
    return mapping


def _create(folder: Path) -> _File:
    """Create an empty file in ``folder`` that `_delete_abandoned` leaves alone."""
    while True:
        # A process in another container may have the same number and write to the same folder.
        path = folder / f"{PREFIX}{os.getpid()}-{next(_number)}{SUFFIX}"
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
            _hold(handle)
            if path.exists():
                return _File(path, handle)
            os.close(handle)  # another process deleted the file before it was locked


def _write_all(handle: int, data: memoryview) -> None:
    """Write all of ``data`` at the file's position."""
    while data:
        data = data[os.write(handle, data) :]


def _flush(handle: int) -> None:
    """Wait until the drive has what was written, and release its pages in the page cache."""
    os.fsync(handle)
    if sys.platform == "linux":
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _reserve(handle: int, nbytes: int, folder: Path) -> None:
    """Give the file its length, and its room on the drive where the system can."""
    if shutil.disk_usage(folder).free < nbytes:
        raise _no_room(folder, nbytes)
    os.ftruncate(handle, nbytes)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def _no_room(folder: Path, nbytes: int) -> BudgetError:
    """Return the error for a drive without room for ``nbytes`` bytes. It names no least budget, because the bytes of
    the drive are not a budget of Carom's.
    """
    free = shutil.disk_usage(folder).free
    return BudgetError(
        f"disk={str(folder)!r}: the weights take {format_size(nbytes)} and the drive has {format_size(free)} free; make "
        "room, name a folder on another drive, or raise ram"
    )


# -- deletion


def _hold(handle: int) -> None:
    """Lock the file, so that other processes see that it is in use. The system unlocks it when this process
    ends, however that happens. Waits for a process that is about to delete the file.
    """
    if os.name == "nt":
        return  # Windows does not delete an open file
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)  # type: ignore[attr-defined,unused-ignore]


def _discard(handle: int, path: Path, owner: int) -> None:
    """Close a spill file that nothing uses any more, and delete it in the process that made it, ``owner``. A forked
    process has a copy of the mapping, and the file is not its own.
    """
    with contextlib.suppress(OSError):
        os.close(handle)
    if os.getpid() == owner:
        _delete(path)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _delete_abandoned(folder: Path) -> None:
    """Delete the spill files of processes that ended without deleting them. Process numbers do not tell whose a
    file is, because a container gives the same ones again.
    """
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        if os.name == "nt":
            _delete(path)  # Windows refuses this for a file that is open
        else:
            import fcntl

            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDWR)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined,unused-ignore]
                    _delete(path)
                finally:
                    os.close(handle)
