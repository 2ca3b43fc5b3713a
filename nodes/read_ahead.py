"""A file read into the system's cache in the background, so that whoever maps it finds its bytes in memory.

ComfyUI maps checkpoints; pages of a map come in by ones and twos, at a fraction of the drive's rate. A few threads that
read large pieces, from the front, bring them at the whole of it. Nothing is kept here.
"""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger("carom")
THREADS = 4
PIECE = 16 << 20
SHARE = 2  # files of more than this part of the memory that is available would drive themselves out again


def read_ahead(path: str) -> list[threading.Thread]:
    """Begin, and return the threads; none where the file is too large for memory or cannot be read."""
    import psutil

    try:
        size = os.path.getsize(path)
        if size > psutil.virtual_memory().available // SHARE:
            return []
    except OSError:  # whoever loads it says what is wrong
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
