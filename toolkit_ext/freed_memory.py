"""Defines `return_freed_tensors`, which makes the C allocator give the memory of freed tensors back at once."""

from __future__ import annotations

import ctypes

from ..core.common.sizes import KIB

M_MMAP_THRESHOLD = -3  # glibc's malloc.h
# glibc's own first threshold (mallopt(3)). Without a fixed one, glibc raises it up to 32 MiB as blocks are freed.
THRESHOLD = 128 * KIB


def return_freed_tensors() -> None:
    """Make glibc give blocks of at least `THRESHOLD` bytes back to the system when they are freed.

    Otherwise glibc keeps them in its heap. Quantising a model, and computing with weights that are quantised, allocate
    and free many blocks of different sizes, and a heap with gaps grows beyond what is in use. The setting holds until
    the process ends. Does nothing with other C libraries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, THRESHOLD)
