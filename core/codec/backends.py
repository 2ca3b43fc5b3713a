"""A check whether Triton kernels run in this process and decode exactly; without them, torch operations decode."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace

import torch

from ..common import interruptible
from .lossless_format import KIND_BY_DTYPE

log = logging.getLogger(__name__)

# The names of the Triton kernels that unpack weights, as a profiler shows them.
DECODE_KERNELS = frozenset(("_decode", "_dequantize"))

# AMD architectures on which Triton kernels are not tried. On RDNA1 and RDNA2 (gfx10) they compile and compute
# wrong values (https://github.com/ROCm/TheRock/issues/6467); the older ones are no target of Triton.
_UNSUPPORTED = ("gfx10", "gfx6", "gfx7", "gfx8", "gfx900", "gfx902", "gfx906", "gfx909", "gfx90c")

# The answer of `triton_works` (None: not known), which the first thread of `warm_up` finds.
_trial: Future[bool | None] | None = None
_warmed: set[torch.dtype] = set()  # the dtypes whose kernels `warm_up` compiles


def triton_supports(arch: str) -> bool:
    """Return whether Triton's AMD backend supports ``arch``, such as "gfx1100" or "gfx90a:sramecc+:xnack-"."""
    return not arch.startswith(_UNSUPPORTED)


def _answered(trial: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that calls ``trial`` once and keeps its answer for the life of the process.

    Memory that is missing tells nothing about Triton: the answer is then False, and is not kept.
    """
    kept = functools.cache(trial)

    @functools.wraps(trial)
    def answer() -> bool:
        try:
            return kept()
        except torch.OutOfMemoryError:
            return False

    answer.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    return answer


@_answered
def triton_works() -> bool:
    """Return whether Triton can decode packed weights on the CUDA or ROCm device of this process.

    The first call compiles a kernel and decodes a small tensor, or waits until `warm_up` has done so. The answer holds
    for the life of the process.
    """
    if not torch.cuda.is_available():
        return False
    found = None if _trial is None else interruptible.result(_trial)
    return _try() if found is None else found


@_answered
def triton_encodes() -> bool:
    """Return whether Triton can encode weights on the CUDA or ROCm device of this process. The first call compiles kernels
    and encodes a small tensor.
    """
    if not triton_works():
        return False
    try:
        if _encodes_exactly(torch.device("cuda", torch.cuda.current_device())):
            return True
        log.info("Triton encodes other bytes than the host: torch operations encode weights")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.info("Triton cannot encode weights, torch operations do: %s", error)
    return False


def warm_up(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Begin to compile the kernels that decode and encode weights of ``dtypes`` on ``device``, in a thread.

    Triton takes seconds for its first kernel on a machine, which then pass while files are read. Does nothing where
    `triton_works` is known to be False. Errors are left to the first real use of a kernel, which raises them again.
    """
    global _trial
    # The trial of `triton_works` decodes bf16.
    wanted = {torch.bfloat16, *(dtype for dtype in dtypes if dtype in KIND_BY_DTYPE)} - _warmed
    if device.type != "cuda" or not wanted or not torch.cuda.is_available():
        return
    first = _trial is None
    trial: Future[bool | None] = _trial or Future()
    thread = threading.Thread(target=_compile, args=(device, wanted, trial, first), name="carom-triton")
    with contextlib.suppress(RuntimeError):  # no thread can be started
        thread.start()
        _warmed.update(wanted)
        _trial = trial


def _compile(
    device: torch.device, dtypes: Iterable[torch.dtype], trial: Future[bool | None], first: bool
) -> None:
    """Compile the kernels for ``dtypes``. ``first``: set the result of ``trial`` at the end, instead of waiting for it."""
    works = None
    try:
        with torch.cuda.device(device):
            works = _try() if first else trial.result()
            for dtype in dtypes if works else ():
                with contextlib.suppress(Exception):
                    _use_kernels(device, dtype)
    except Exception as error:
        log.debug("kernels were not compiled ahead: %s", error)
    finally:
        if first:
            trial.set_result(works)


def _use_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Decode and encode tensors with the code widths that weights of ``dtype`` usually have."""
    if dtype != torch.bfloat16:  # which the trial of `triton_works` decodes
        _decodes_exactly(device, dtype)
    if dtype == torch.float8_e4m3fn:  # which torch operations encode
        _decodes_exactly(device, dtype, 2)
    else:
        _encodes_exactly(device, dtype)


def _try() -> bool:
    """Return whether a kernel decodes exactly on the current device; log why not."""
    reason = triton_hindrance(torch.device("cuda", torch.cuda.current_device()))
    if reason:
        log.info("Triton is not usable (%s): packed weights are decoded by torch operations", reason)
    return not reason


def triton_hindrance(device: torch.device) -> str:
    """Return why Triton kernels cannot decode on ``device``, or "" if a small tensor is decoded bit for bit.

    A Triton that imports may still be unable to compile, for example on Windows without a C compiler. Raises
    torch.OutOfMemoryError if the device has no room for the tensor.
    """
    if device.type == "cuda" and torch.version.hip:
        arch = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
        if not triton_supports(arch):
            return f"Triton does not support {arch}"
    # A broken installation of Triton raises errors of many kinds; torch operations decode everywhere.
    try:
        return "" if _decodes_exactly(device) else "a kernel gave other bits than torch operations"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


@torch.no_grad()
def _decodes_exactly(device: torch.device, dtype: torch.dtype = torch.bfloat16, power: int = 1) -> bool:
    """Return whether a Triton kernel decodes a packed tensor of 4096 elements of ``dtype`` to the same bits.

    Its code has the width that weights of the dtype usually have, and a larger one with a ``power`` of 2.
    """
    from . import lossless_triton  # noqa: F401  (an ImportError comes before any work on the device)
    from .registry import encode, entry_of
    from .unit_decoder import UnitDecoder

    with torch.inference_mode(False):
        values = _values(dtype, power)
        packed = encode(values)
        decoder = UnitDecoder([entry_of(packed, 0, 0)], method="triton")
        decoded = torch.empty(values.nbytes, dtype=torch.uint8, device=device)
        decoder(packed.blob.to(device), decoded)
        return torch.equal(decoded.cpu(), values.view(torch.uint8))


@torch.no_grad()
def _encodes_exactly(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether Triton kernels encode a tensor of 4096 elements of ``dtype`` to the bytes of the host's encoder."""
    from . import lossless
    from .lossless_encode_triton import split_triton
    from .lossless_format import HEADER_BYTES, parse_header

    with torch.inference_mode(False):
        values = _values(dtype, 1)
        expected = lossless.encode(values)
        assert expected is not None
        header = parse_header(expected.numpy().data, "trial")
        before = replace(header, escape_bytes=0, most_escapes=0, crc=0)
        split = split_triton(values.view(torch.uint8).to(device), before, values.nbytes)
        if split.header != header.with_crc(0):
            return False
        return torch.equal(split.encode_escapes().cpu()[HEADER_BYTES:], expected[HEADER_BYTES:])


def _values(dtype: torch.dtype, power: int) -> torch.Tensor:
    """Return 4096 elements on the CPU, also where the program has set another default device."""
    values = (torch.arange(4096, device="cpu") % 251 - 125) / 64
    return (values * values.abs() ** (power - 1)).to(dtype)
