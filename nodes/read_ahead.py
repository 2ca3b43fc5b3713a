"""`read_ahead`: reads a file into the system's page cache in the background, so that a memory map of it is in memory.

ComfyUI memory-maps checkpoints. The pages of a map are loaded one or two at a time, at a fraction of the drive's rate.
A few threads that read large pieces from the front reach the drive's full rate. The bytes that they read are discarded.
"""

from __future__ import annotations

import logging
import os
import threading

from ..core.host.probe import host_memory

logger = logging.getLogger("carom")
THREADS = 4
PIECE = 16 << 20
SHARE = 2  # files larger than 1/2 of the free memory are not read: their pages would evict each other


def read_ahead(path: str) -> list[threading.Thread]:
    """Start the reading threads and return them; an empty list if the file is too large for memory or unreadable.

    The memory is what is free on the machine, or in the container of this process if that is less.
    """
    try:
        size = os.path.getsize(path)
        if size > _room_for_pages() // SHARE:
            return []
    except OSError:  # the loader of the file reports the error
        return []
    pieces = iter(range(0, size, PIECE))
    lock = threading.Lock()
    threads = [
        threading.Thread(target=_read, args=(path, pieces, lock), name="carom-ahead", daemon=True)
        for _ in range(min(THREADS, max(1, size // PIECE)))
    ]
    for thread in threads:
        thread.start()
    return threads


def _room_for_pages() -> int:
    """Return the bytes that the page cache can take now. The page cache of a container counts towards its limit."""
    memory = host_memory()
    if memory.cgroup_limit is None:
        return memory.available
    return min(memory.available, max(0, memory.cgroup_limit - (memory.cgroup_used or 0)))


def _read(path: str, pieces: object, lock: threading.Lock) -> None:
    room = bytearray(PIECE)
    try:
        with open(path, "rb", buffering=0) as file:
            while True:
                with lock:
                    start = next(pieces, None)  # type: ignore[call-overload]
                if start is None:
                    return
                file.seek(start)
                file.readinto(room)
    except OSError as error:
        logger.debug("%s was not read ahead: %s", path, error)
