"""A check whether Triton kernels run in this process and decode exactly; without them, torch operations decode."""

from __future__ import annotations

import functools
import logging

import torch

log = logging.getLogger(__name__)

# The names of the Triton kernels that unpack weights, as a profiler shows them.
DECODE_KERNELS = frozenset(("_decode", "_dequantize"))

# AMD architectures on which Triton kernels are not tried. On RDNA1 and RDNA2 (gfx10) they compile and compute
# wrong values (https://github.com/ROCm/TheRock/issues/6467); the older ones are no target of Triton.
_UNSUPPORTED = ("gfx10", "gfx6", "gfx7", "gfx8", "gfx900", "gfx902", "gfx906", "gfx909", "gfx90c")


def triton_supports(arch: str) -> bool:
    """Return whether Triton's AMD backend supports ``arch``, such as "gfx1100" or "gfx90a:sramecc+:xnack-"."""
    return not arch.startswith(_UNSUPPORTED)


@functools.cache
def triton_works() -> bool:
    """Return whether Triton can decode packed weights on the CUDA or ROCm device of this process.

    The first call compiles a kernel and decodes a small tensor. The answer holds for the life of the process.
    """
    if not torch.cuda.is_available():
        return False
    reason = triton_hindrance(torch.device("cuda", torch.cuda.current_device()))
    if reason:
        log.info("Triton is not usable (%s): packed weights are decoded by torch operations", reason)
    return not reason


def triton_hindrance(device: torch.device) -> str:
    """Return why Triton kernels cannot decode on ``device``, or "" if a small tensor is decoded bit for bit.

    A Triton that imports may still be unable to compile, for example on Windows without a C compiler.
    """
    if device.type == "cuda" and torch.version.hip:
        arch = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
        if not triton_supports(arch):
            return f"Triton does not support {arch}"
    # A broken installation of Triton raises errors of many kinds; torch operations decode everywhere.
    try:
        return "" if _decodes_exactly(device) else "a kernel gave other bits than torch operations"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


@torch.no_grad()
def _decodes_exactly(device: torch.device) -> bool:
    """Return whether a Triton kernel decodes a packed tensor of 8 KiB to the same bits."""
    from . import lossless_triton  # noqa: F401  (an ImportError comes before any work on the device)
    from .registry import encode, entry_of
    from .unit_decoder import UnitDecoder

    with torch.inference_mode(False):
        # On the CPU, also where the program has set another default device.
        values = ((torch.arange(4096, device="cpu") % 251 - 125) / 64).bfloat16()
        packed = encode(values)
        decoder = UnitDecoder([entry_of(packed, 0, 0)], method="triton")
        decoded = torch.empty(values.nbytes, dtype=torch.uint8, device=device)
        decoder(packed.blob.to(device), decoded)
        return torch.equal(decoded.cpu().view(torch.bfloat16), values)
