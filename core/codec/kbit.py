"""NF4, NF3 and NF2: block-wise codebook quantisation with absmax scales. LOSSY.

From QLoRA (Dettmers et al. 2023, arXiv:2305.14314, section 3 and appendix E): each block of 64 weights is
divided by its largest magnitude and every quotient is replaced by the nearest of 2**k codebook values. The
values are quantiles of the standard normal distribution, so that all codes are about equally common for
Gaussian weights; zero is exact.

The codebook for k bits (`derive_codebook`): with delta = 1 - (1 / 2**(k+1) + 1 / (2 * (2**k - 1))) / 2 (for k
= 4: 0.9677083), take 2**(k-1) positive quantiles at evenly spaced probabilities from delta down to (not with)
1/2, 2**(k-1) - 1 negative quantiles likewise, and 0; then divide all by the largest. NF4 below is the
published table of bitsandbytes and of the paper's appendix E. The paper stops there; NF3 and NF2 are the same
formula at k = 3 and k = 2.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

from ..common.errors import UnsupportedError, WeightsError
from .backends import triton_works
from .kbit_host import quantize_host
from .lossless import cores

DEFAULT_BLOCK = 64
BLOCKS = (32, 64, 128, 256, 512, 1024)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A block whose largest magnitude is below this is stored as zeros, so that no decoder has to multiply
# subnormal numbers.
SMALLEST_SCALE = 2.0**-100
CHUNK = 1 << 20  # elements that are quantised or dequantised at a time


@dataclass(frozen=True)
class Codebook:
    """A quantisation codebook: ``values`` are 2**bits ascending float32 numbers from -1 to 1 (as Python
    floats).
    """

    name: str
    bits: int
    values: tuple[float, ...]


CODEBOOKS = {
    book.name: book
    for book in (
        Codebook("nf4", 4, (
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        )),
        Codebook("nf3", 3, (-1.0, -0.5350227355957031, -0.24693143367767334, 0.0, 0.1833374798297882, 0.38199394941329956, 0.6229857206344604, 1.0)),
        Codebook("nf2", 2, (-1.0, 0.0, 0.4358181655406952, 1.0)),
    )
}  # fmt: skip


def derive_codebook(bits: int) -> tuple[float, ...]:
    """Return the NF codebook of ``bits`` bits from the formula in this file's docstring, in double
    precision.
    """
    count, inverse = 1 << bits, NormalDist().inv_cdf
    delta = 1 - (1 / (2 * count) + 1 / (2 * (count - 1))) / 2

    def quantiles(number: int) -> list[float]:
        return [inverse(delta + (0.5 - delta) * i / number) for i in range(number)]

    values = [-q for q in quantiles(count // 2 - 1)] + [0.0] + quantiles(count // 2)
    return tuple(sorted(value / max(values) for value in values))


@dataclass(frozen=True)
class Layout:
    """The byte offsets of codes and scales in the blob of a quantised tensor of ``numel`` elements.

    Codes are stored in groups of 8 elements. nf4: 4 bytes, element 2i in the upper half of byte i and 2i + 1
    in the lower half (as bitsandbytes packs). nf3: one byte in each of three planes, bit i of plane j is bit
    j of element i's code. nf2: 2 bytes, little-endian, element i at bits 2i and 2i + 1. Elements that pad the
    last group have the code of zero.

    Scales are float32, one for each block of ``block`` elements, and start at byte ``scales_at``.
    """

    codebook: Codebook
    numel: int
    block: int

    @property
    def groups(self) -> int:
        """The number of groups of 8 elements."""
        return -(-self.numel // 8)

    @property
    def plane_stride(self) -> int:
        """The bytes from the start of one nf3 plane to the next, a multiple of 16."""
        return -(-self.groups // 16) * 16

    @property
    def scales_at(self) -> int:
        """The byte offset of the scales, a multiple of 16."""
        if self.codebook.bits == 3:
            return 3 * self.plane_stride
        return -(-self.groups * self.codebook.bits // 16) * 16

    @property
    def blocks(self) -> int:
        """The number of blocks, each of which has one scale."""
        return -(-self.numel // self.block)

    @property
    def total(self) -> int:
        """The number of bytes of the blob."""
        return self.scales_at + 4 * self.blocks


@functools.cache
def codebook_on(codebook: Codebook, device: torch.device) -> torch.Tensor:
    """Return the codebook's values as a float32 tensor on ``device``; the copy is cached."""
    with torch.inference_mode(False):
        return torch.tensor(codebook.values, dtype=torch.float32, device=device)


def quantize(tensor: torch.Tensor, codebook: Codebook, block: int, name: str = "tensor") -> torch.Tensor:
    """Quantise a bf16, fp16 or fp32 tensor of any shape; return the blob (1-D uint8, on the tensor's device).

    Raises WeightsError naming ``name`` where a value is not finite, UnsupportedError for other dtypes.
    """
    if tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"tensor {name!r}: {codebook.name} takes bf16, fp16 or fp32, not {tensor.dtype}"
        )
    if block not in BLOCKS:
        raise ValueError(f"block={block!r}; choose one of {BLOCKS}")
    flat = tensor.detach().contiguous().reshape(-1)
    layout = Layout(codebook, flat.numel(), block)
    blob = torch.zeros(layout.total, dtype=torch.uint8, device=flat.device)
    if flat.device.type == "cpu":
        raw = flat.view(torch.int16).numpy().view(np.uint16) if flat.dtype == torch.bfloat16 else flat.numpy()
        with ThreadPoolExecutor(cores()) as pool:
            finite = quantize_host(raw, layout, blob.numpy(), SMALLEST_SCALE, pool)
    else:
        finite = quantize_torch(flat, layout, blob)
    if not finite:
        raise WeightsError(
            f"tensor {name!r} holds NaN or infinities, which {codebook.name} cannot express; pack it lossless or raw"
        )
    return blob


def quantize_torch(flat: torch.Tensor, layout: Layout, blob: torch.Tensor) -> bool:
    """Write codes and scales of 1-D ``flat`` into ``blob`` (zeros), on any device; return False if a value is
    not finite.
    """
    block = layout.block
    scales = blob[layout.scales_at :].view(torch.float32)
    values = codebook_on(layout.codebook, flat.device)
    middles = (values[1:] + values[:-1]) / 2
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK].float()
        blocks = torch.nn.functional.pad(part, (0, -len(part) % block)).view(-1, block)
        scale = blocks.abs().amax(1)
        if not bool(torch.isfinite(scale).all()):
            return False
        scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
        scales[start // block : start // block + len(scale)] = scale
        quotient = blocks / torch.where(scale == 0, 1.0, scale)[:, None]
        quotient *= (scale != 0)[:, None]
        codes = torch.bucketize(quotient.view(-1), middles, out_int32=True).to(torch.uint8)
        _pack(codes[: -(-len(part) // 8) * 8].view(-1, 8), blob, layout, start // 8)
    return True


def _pack(codes: torch.Tensor, blob: torch.Tensor, layout: Layout, first: int) -> None:
    """Write uint8 ``codes`` [groups, 8] into ``blob``, starting with group number ``first``."""
    bits, count = layout.codebook.bits, len(codes)
    if bits == 4:
        blob[first * 4 : (first + count) * 4] = ((codes[:, 0::2] << 4) | codes[:, 1::2]).view(-1)
    elif bits == 2:
        pairs = codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
        blob[first * 2 : (first + count) * 2] = pairs.view(-1)
    else:
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=codes.device)
        for plane in range(3):
            at = plane * layout.plane_stride + first
            blob[at : at + count] = ((codes >> plane & 1) * weights).sum(1, dtype=torch.uint8)


def _values(blob: torch.Tensor, layout: Layout, first: int, count: int) -> torch.Tensor:
    """Return the codebook values (float32 [count * 8]) of ``count`` groups, starting with group number
    ``first``.
    """
    bits = layout.codebook.bits
    if bits == 3:
        codes = torch.zeros(count, dtype=torch.int64, device=blob.device)  # a byte for each code
        for plane in range(3):
            at = plane * layout.plane_stride + first
            codes |= _spread_bits(blob.device).index_select(0, blob[at : at + count].int()) << plane
        pairs = codes.view(torch.int16)
        index = ((pairs >> 5) | pairs) & 63
    else:
        index = blob[first * bits : (first + count) * bits]
    return _value_runs(layout.codebook, blob.device).index_select(0, index.int()).view(torch.float32)


@functools.cache
def _value_runs(codebook: Codebook, device: torch.device) -> torch.Tensor:
    """Return a table of the float32 values that a packed byte stands for (nf3: two 3-bit codes, the first in
    the lower bits), on ``device``; the copy is cached.

    Each run of 2 or 4 values is one element of 8 or 16 bytes, because ``index_select`` copies one element at a
    time. The dtype of the table has no other meaning.
    """
    shifts = {4: (4, 0), 3: (0, 3), 2: (0, 2, 4, 6)}[codebook.bits]
    with torch.inference_mode(False):
        # On the CPU, also where the program has set another default device.
        codes = torch.arange(64 if codebook.bits == 3 else 256, device="cpu")[:, None]
        codes = codes >> torch.tensor(shifts, device="cpu") & (1 << codebook.bits) - 1
        values = codebook_on(codebook, torch.device("cpu"))[codes]
        runs = values.view(torch.int64 if len(shifts) == 2 else torch.complex128)
        return runs.view(-1).to(device)


@functools.cache
def _spread_bits(device: torch.device) -> torch.Tensor:
    """Return a table (int64 [256]) of the 8 bits of a byte, each in a byte of its own, on ``device``."""
    with torch.inference_mode(False):
        bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1
        return bits.to(torch.uint8).view(torch.int64).view(-1).to(device)


def dequantize_torch(blob: torch.Tensor, layout: Layout, out: torch.Tensor, begin: int = 0) -> None:
    """Write codebook[code] * scale, computed in float32 and rounded to nearest even, into ``out`` ([numel],
    bf16/fp16/fp32).

    Elements before ``begin`` (a multiple of 8) are left as they are.
    """
    dequantize_range(blob, layout, begin, out[begin : layout.numel])


def dequantize_range(blob: torch.Tensor, layout: Layout, begin: int, out: torch.Tensor) -> None:
    """Dequantise elements ``begin`` (a multiple of 8) to ``begin + len(out)`` into ``out``, as
    `dequantize_torch` does.

    Takes at most 8 bytes of temporary memory for each of CHUNK elements, and a copy of the scales where they are
    not aligned.
    """
    block, last = layout.block, begin + len(out)
    scales = blob[layout.scales_at :]
    scales = (scales if scales.storage_offset() % 4 == 0 else scales.clone()).view(torch.float32)
    for start in range(begin // block * block, last, CHUNK):
        end = min(start + CHUNK, last)
        values = _values(blob, layout, start // 8, -(-(end - start) // 8))[: end - start]
        scale = scales[start // block : -(-end // block)]
        whole = len(values) // block
        values[: whole * block].view(whole, block).mul_(scale[:whole, None])
        if whole < len(scale):
            values[whole * block :].mul_(scale[whole])
        skipped = max(0, begin - start)
        out[start + skipped - begin : end - begin].copy_(values[skipped:])


def relative_error(tensor: torch.Tensor, blob: torch.Tensor, layout: Layout) -> float:
    """Return the norm of (decoded ``blob`` - ``tensor``) over the norm of ``tensor``; sums are float64, and 0
    / 0 counts as 0.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    error_squared = norm_squared = 0.0
    decoded = torch.empty(min(CHUNK, flat.numel()), dtype=flat.dtype, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        original = flat[start : start + CHUNK]
        dequantize_range(blob, layout, start, decoded[: len(original)])
        exact = original.float()
        error_squared += float((decoded[: len(original)].float() - exact).pow_(2).sum(dtype=torch.float64))
        norm_squared += float(exact.pow_(2).sum(dtype=torch.float64))
    return math.sqrt(error_squared / norm_squared) if norm_squared else 0.0


def dequantize(blob: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """Dequantise ``blob`` into ``out`` with the Triton kernel where it can run, else with torch operations.

    Both write the same bits.
    """
    aligned = blob.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    if layout.numel and blob.is_cuda and aligned and triton_works():
        from .kbit_triton import dequantize_triton

        with torch.cuda.device(blob.device):  # Triton launches kernels on the current device
            dequantize_triton(blob, layout, out)
    else:
        dequantize_torch(blob, layout, out)


def dequantize_reference(blob: np.ndarray, layout: Layout) -> np.ndarray:
    """Return float32 [numel], decoded one element at a time: codebook[code] * scale in float32, not rounded
    to the dtype.
    """
    scales = blob[layout.scales_at :].view("<f4")
    values = np.array(layout.codebook.values, np.float32)
    out = np.empty(layout.numel, np.float32)
    for i in range(layout.numel):
        group, at = divmod(i, 8)
        if layout.codebook.bits == 4:
            byte = int(blob[group * 4 + at // 2])
            code = byte & 15 if at % 2 else byte >> 4
        elif layout.codebook.bits == 2:
            code = int(blob[group * 2 + at // 4]) >> 2 * (at % 4) & 3
        else:
            code = sum((int(blob[p * layout.plane_stride + group]) >> at & 1) << p for p in range(3))
        out[i] = values[code] * scales[i // layout.block]
    return out
