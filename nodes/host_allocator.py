"""`give_large_blocks_back`: lets the C library return the memory of large tensors to the system when they are freed."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from ..core.common.sizes import MIB

LARGE = 4 * MIB  # bytes
M_MMAP_THRESHOLD = -3  # of malloc.h


@cache
def give_large_blocks_back() -> bool:
    """Let blocks of at least `LARGE` bytes be mappings of their own, until the process ends; return whether that worked.

    glibc raises its threshold to 32 MiB by itself and then keeps freed blocks in the heaps of its threads. ComfyUI makes
    each module with weights of its own, which loading frees before they were touched. Where a CPU computes, each use of a
    weight converts it into one of these free blocks, and memory grows by up to the size of the model (by 2 GB in three
    steps of the model of tests/comfyui/test_comfy_quarter_of_file.py). Other C libraries have no such threshold.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE))
    except (OSError, AttributeError):
        return False
