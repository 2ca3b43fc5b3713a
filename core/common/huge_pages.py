"""Allocation of zeroed host memory that the operating system backs with huge pages, where it has them.

The pages behind memory decide the cost of a direct read (O_DIRECT) into it: the kernel cuts a request into
segments of physically contiguous memory, and a drive takes only so many segments at a time. Into scattered
pages of 4 KiB a virtual drive read at less than half its rate (`benchmarks/tiers/disk_read.py` compares). All
mappings are private: shared anonymous ones (`mmap.mmap(-1, n)`) get no huge pages by default.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from .commit_memory import with_advice

PAGE = mmap.PAGESIZE
HUGE = 2 << 20  # bytes in a huge page on x86-64 and on most arm64 systems


def allocate_pages(nbytes: int) -> memoryview:
    """Return ``nbytes`` writable, zeroed bytes that begin at a page boundary, not yet backed by physical
    memory.

    The memory is freed with the last reference to the view. From 2 MiB up, the bytes begin on a huge page and
    no huge page reaches beyond their end, so the process never holds more than ``nbytes`` rounded up to a
    page. Raises MemoryError when the operating system refuses.
    """
    size = max(1, -(-nbytes // PAGE)) * PAGE
    # Linux aligns a mapping to a huge page only if its length is a multiple of one. So map one huge page more
    # and start at the first boundary; the bytes before and after are never touched and cost no memory.
    slack = HUGE if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE") else 0
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            memory = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # type: ignore[attr-defined,call-arg,unused-ignore]
        else:
            memory = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        message = f"the system refused {size} bytes of host memory: {error}"
        raise MemoryError(with_advice(message, error)) from error
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE if slack else 0
    if slack:
        huge_bytes = size // HUGE * HUGE
        # Fails on a kernel without transparent huge pages; ordinary pages work too.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # type: ignore[attr-defined,unused-ignore]
            memory.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)  # type: ignore[attr-defined,unused-ignore]
    return memoryview(memory)[start : start + nbytes]
