"""`read_ahead`: reads files into the system's page cache in the background, so that memory maps of them are in memory.

ComfyUI memory-maps checkpoints. The pages of a map are loaded one or two at a time, at a fraction of the drive's rate.
A thread that reads large pieces from the front is faster. The bytes that it reads are discarded.

Files are read one after the other by one thread, so that ComfyUI's own loaders, which read the text encoder meanwhile,
keep most of the drive. When a model is loaded (`hurry`), its file comes first and is read by `THREADS` threads, which
reach the drive's full rate. The text encoder has been read by then, so the files that are left are read likewise, while
the model samples.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

from ..core.common.background import BackgroundThread
from ..core.host.probe import host_memory

logger = logging.getLogger("carom")
THREADS = 4
PIECE = 16 << 20
SHARE = 2  # files larger than 1/2 of the free memory are not read: their pages would evict each other


class _File:
    """A file that is being read. ``pieces``: the offsets that are left; ``urgent``: whether all threads read it."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.urgent = path, False
        self.pieces: Iterator[int] = iter(range(0, size, PIECE))


_lock = threading.Lock()  # protects `_files`, their attributes, and the set of `_threads`
_files: list[_File] = []  # the first one is read
_threads: set[threading.Thread] = set()


def read_ahead(path: str) -> list[threading.Thread]:
    """Read the file at ``path`` after those that are read already; return the threads that read.

    The list is empty, and nothing is read, if the file is too large for the memory that is free on the machine, or in
    the container of this process if that is less, or if the file is unreadable.
    """
    try:
        size = os.path.getsize(path)
        if size > _room_for_pages() // SHARE:
            return []
    except OSError:  # the loader of the file reports the error
        return []
    with _lock:
        if all(file.path != path for file in _files):
            _files.append(_File(path, size))
        return _start()


def hurry(path: str) -> list[threading.Thread]:
    """Read what is left of the file at ``path`` now, with all threads, because a model waits for it.

    Returns the threads. A file for which `read_ahead` was not called, or that has been read, is not read.
    """
    with _lock:
        file = next((file for file in _files if file.path == path), None)
        if file is None:
            return []
        file.urgent = True
        _files.remove(file)
        _files.insert(0, file)
        return _start()


def _start() -> list[threading.Thread]:
    """Start as many threads as the first file is to be read by; return all that run. The caller holds the lock."""
    while _files and len(_threads) < (THREADS if _files[0].urgent else 1):
        thread = BackgroundThread(_read, "carom-ahead", _forget)
        thread.start()
        _threads.add(thread)  # the thread takes the lock before it removes itself
    return list(_threads)


def _forget() -> None:
    """Let the threads end after the pieces that they read now."""
    with _lock:
        _files.clear()


def _room_for_pages() -> int:
    """Return the bytes that the page cache can take now. The page cache of a container counts towards its limit."""
    memory = host_memory()
    if memory.cgroup_limit is None:
        return memory.available
    return min(memory.available, max(0, memory.cgroup_limit - (memory.cgroup_used or 0)))


def _next_piece() -> tuple[_File, int] | None:
    """Return what the calling thread reads next. None ends the thread: nothing is left, or one thread suffices."""
    with _lock:
        while _files:
            file = _files[0]
            if not file.urgent and len(_threads) > 1:
                break
            start = next(file.pieces, None)
            if start is not None:
                return file, start
            _files.pop(0)
            if file.urgent and _files:
                _files[0].urgent = True
        _threads.discard(threading.current_thread())
        return None


def _read() -> None:
    room = bytearray(PIECE)
    while (piece := _next_piece()) is not None:
        file, start = piece
        try:
            with open(file.path, "rb", buffering=0) as opened:
                opened.seek(start)
                opened.readinto(room)
        except OSError as error:
            logger.debug("%s was not read ahead: %s", file.path, error)
            with _lock:
                file.pieces = iter(())
