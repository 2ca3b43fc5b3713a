"""Which decoder can run here."""

from __future__ import annotations

import functools
import logging

import torch

log = logging.getLogger(__name__)


@functools.cache
def triton_works() -> bool:
    """Whether Triton kernels can be launched here: Triton imports, and there is a CUDA or ROCm device to run on."""
    if not torch.cuda.is_available():
        return False
    try:
        from . import lossless_triton  # noqa: F401
    except Exception as error:  # a broken Triton fails in many ways at import; plain torch always works
        log.info("Triton is not usable (%s): packed weights are decoded by plain torch operations", error)
        return False
    return True
