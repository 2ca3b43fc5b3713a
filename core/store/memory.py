"""Fresh host memory on huge pages, where the system has them.

How memory is backed decides what a direct read into it costs: a request is cut into segments of contiguous memory, and a
drive takes only so many at a time. Into scattered pages of 4 KiB a virtual drive read at less than half its rate
(`benchmarks/disk_read.py` compares). Private mappings only: shared ones (`mmap.mmap(-1, n)`) get no huge pages by default.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
HUGE = 2 << 20  # bytes; of x86-64 and of most of arm64


def fresh(nbytes: int) -> memoryview:
    """``nbytes`` writable bytes from the beginning of a page, zero and not yet touched; freed with the last reference.

    From 2 MiB up they begin on a huge page, and no huge page reaches beyond their end: the process never holds more
    than was asked for. Raises MemoryError when the system refuses.
    """
    size = max(1, -(-nbytes // PAGE)) * PAGE
    # Linux aligns only mappings that are whole huge pages long; what is mapped besides is never touched.
    spare = HUGE if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE") else 0
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            memory = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # type: ignore[attr-defined,call-arg,unused-ignore]
        else:
            memory = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"the system refused {size} bytes of host memory: {error}") from error
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE if spare else 0
    if spare:
        whole = size // HUGE * HUGE
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: ordinary pages serve
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # type: ignore[attr-defined,unused-ignore]
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)  # type: ignore[attr-defined,unused-ignore]
    return memoryview(memory)[start : start + nbytes]
