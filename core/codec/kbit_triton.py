"""Triton decoder of NF4, NF3 and NF2 (core/codec/kbit.py) for CUDA and ROCm. Each GPU lane decodes 8
elements.

Import this module only where triton can be imported. With TRITON_INTERPRET=1 the kernel runs on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kbit import Layout, codebook_on, dequantize_torch
from .lossless_triton import lanes_of_a_warp


@triton.jit
def _join_two(low, high, SIZE: tl.constexpr):
    """Combine the bits of two values of 2 or 4 bytes into one int32 or int64, ``low`` in the lower half."""
    if SIZE == 2:
        a = low.to(tl.uint16, bitcast=True).to(tl.int32)
        return a | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:  # noqa: RET505 - the condition is a constexpr: without `else` Triton would compile both branches
        a = low.to(tl.uint32, bitcast=True).to(tl.int64)
        return a | (high.to(tl.uint32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _decode_element(
    codes,
    codebook,
    scale,
    i: tl.constexpr,
    BITS: tl.constexpr,
    p0,
    p1,
    p2,
    DTYPE: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):
    """Decode element ``i`` of a lane's group of 8 elements: codebook[code] * scale, rounded to ``DTYPE``."""
    if BITS == 4:
        code = (codes >> ((i // 2) * 8 + 4 - (i % 2) * 4)) & 15
    elif BITS == 2:
        code = (codes >> (2 * i)) & 3
    else:
        code = ((p0 >> i) & 1) | (((p1 >> i) & 1) << 1) | (((p2 >> i) & 1) << 2)
    value = tl.load(codebook + code) * scale
    if ROUND_BF16:
        bits = value.to(tl.uint32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def _dequantize(
    blob, out, codebook, full, scales_at16, plane16,
    BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr,
    ROUND_BF16: tl.constexpr,
):  # fmt: skip
    """Decode GROUPS groups of 8 elements, one group for each lane; `dequantize_triton` launches this kernel."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    exists = group < full
    sixteen = tl.full((), 16, tl.int64)  # byte offsets in tensors of 2**32 elements and more exceed 32 bits
    scales = (blob + scales_at16 * sixteen).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + group // (BLOCK // 8), mask=exists, other=0.0)
    p0, p1, p2, codes = 0, 0, 0, 0
    if BITS == 4:
        codes = tl.load(blob.to(tl.pointer_type(tl.int32)) + group, mask=exists, other=0)
    elif BITS == 2:
        codes = tl.load(blob.to(tl.pointer_type(tl.uint16)) + group, mask=exists, other=0).to(tl.int32)
    else:
        p0 = tl.load(blob + group, mask=exists, other=0).to(tl.int32)
        p1 = tl.load(blob + plane16 * sixteen + group, mask=exists, other=0).to(tl.int32)
        p2 = tl.load(blob + plane16 * (2 * sixteen) + group, mask=exists, other=0).to(tl.int32)
    e0 = _decode_element(codes, codebook, scale, 0, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    e1 = _decode_element(codes, codebook, scale, 1, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    e2 = _decode_element(codes, codebook, scale, 2, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    e3 = _decode_element(codes, codebook, scale, 3, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    e4 = _decode_element(codes, codebook, scale, 4, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    e5 = _decode_element(codes, codebook, scale, 5, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    e6 = _decode_element(codes, codebook, scale, 6, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    e7 = _decode_element(codes, codebook, scale, 7, BITS, p0, p1, p2, DTYPE, ROUND_BF16)
    w0, w1, w2, w3 = (
        _join_two(e0, e1, SIZE),
        _join_two(e2, e3, SIZE),
        _join_two(e4, e5, SIZE),
        _join_two(e6, e7, SIZE),
    )
    pair = tl.arange(0, 2)[None, :]
    pair_exists = exists[:, None]
    pairs = out.to(tl.pointer_type(tl.int64))
    if SIZE == 2:
        front = w0.to(tl.uint32, bitcast=True).to(tl.int64) | (w1.to(tl.int64) << 32)
        back = w2.to(tl.uint32, bitcast=True).to(tl.int64) | (w3.to(tl.int64) << 32)
        tl.store(pairs + group[:, None] * 2 + pair, tl.join(front, back), mask=pair_exists)
    else:
        tl.store(pairs + group[:, None] * 4 + pair, tl.join(w0, w1), mask=pair_exists)
        tl.store(pairs + group[:, None] * 4 + 2 + pair, tl.join(w2, w3), mask=pair_exists)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dequantize_triton(blob: torch.Tensor, layout: Layout, out: torch.Tensor, warps: int = 4) -> None:
    """Decode ``blob`` (uint8) into ``out`` ([numel], bf16, fp16 or fp32) with one kernel launch on the
    current stream.

    Both must be aligned to 16 bytes. The last ``numel % 8`` elements, which weights rarely have, are decoded
    by torch operations.
    """
    full = layout.numel // 8
    # One group for each lane: with more or fewer, Triton would exchange values between lanes through shared
    # memory and write less than 16 bytes at a time.
    groups = lanes_of_a_warp(blob.device) * warps
    if full:
        _dequantize[(triton.cdiv(full, groups),)](
            # ROUND_BF16: Triton's interpreter truncates to bf16 where hardware rounds to nearest even.
            blob, out, codebook_on(layout.codebook, blob.device), full, layout.scales_at // 16, layout.plane_stride // 16,
            BITS=layout.codebook.bits, BLOCK=layout.block, GROUPS=groups, DTYPE=_DTYPES[out.dtype],
            SIZE=out.element_size(), ROUND_BF16=out.dtype == torch.bfloat16 and not blob.is_cuda, num_warps=warps,
        )  # fmt: skip
    if layout.numel % 8:
        dequantize_torch(blob, layout, out, full * 8)
