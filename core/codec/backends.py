"""A check whether Triton kernels can run in this process; without them, torch operations decode."""

from __future__ import annotations

import functools
import logging

import torch

log = logging.getLogger(__name__)

# The names of the Triton kernels that unpack weights, as a profiler shows them.
DECODE_KERNELS = frozenset(("_decode", "_dequantize"))


@functools.cache
def triton_works() -> bool:
    """Return whether Triton can be imported and a CUDA or ROCm device is there to launch its kernels on."""
    if not torch.cuda.is_available():
        return False
    try:
        from . import lossless_triton  # noqa: F401
    # A broken Triton installation raises many kinds of errors when it is imported; decoding by torch
    # operations always works.
    except Exception as error:
        log.info("Triton is not usable (%s): packed weights are decoded by torch operations", error)
        return False
    return True
