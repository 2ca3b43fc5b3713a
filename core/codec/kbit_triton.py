"""Triton decoder of NF4, NF3 and NF2 (core/codec/kbit.py) for CUDA and ROCm. Each GPU lane decodes 8
elements. One launch decodes all tensors of a wire buffer that have the same codebook, block size and dtype.

Import this module only where triton can be imported. With TRITON_INTERPRET=1 the kernel runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .kbit import Codebook, Layout, codebook_on, dequantize_torch
from .lossless_triton import compiled_launcher, lanes_of_a_warp, padded_rows

ROW_FIELDS = 8  # int64 fields of a row of the table that describes the tensors to decode, see `rows_of`
WARPS = 4
_R = tl.constexpr(ROW_FIELDS)


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


@triton.jit(do_not_specialize=["tensors"])
def _dequantize(
    wire, target, table, tensors, codebook,
    ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr,
    SIZE: tl.constexpr, ROUND_BF16: tl.constexpr,
):  # fmt: skip
    """Decode GROUPS groups of 8 elements, one group for each lane, of one of the tensors that the rows of
    ``table`` describe.
    """
    # The tensor that this program decodes is the last one whose first program number is at most this
    # program's.
    pid = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    starts = tl.load(table + rows * _R, mask=rows < tensors, other=1 << 62)
    row = table + (tl.sum((starts <= pid).to(tl.int32), axis=0) - 1) * _R
    # The fields are 64 bits wide: byte offsets in tensors of 2**32 elements and more exceed 32 bits.
    group = (pid - tl.load(row)) * GROUPS + tl.arange(0, GROUPS)
    exists = group < tl.load(row + 1)
    blob = wire + tl.load(row + 2) * 16
    out = target + tl.load(row + 3) * 16
    scales = (blob + tl.load(row + 4) * 16).to(tl.pointer_type(tl.float32))
    plane = tl.load(row + 5) * 16
    scale = tl.load(scales + group // (BLOCK // 8), mask=exists, other=0.0)
    p0, p1, p2, codes = 0, 0, 0, 0
    if BITS == 4:
        codes = tl.load(blob.to(tl.pointer_type(tl.int32)) + group, mask=exists, other=0)
    elif BITS == 2:
        codes = tl.load(blob.to(tl.pointer_type(tl.uint16)) + group, mask=exists, other=0).to(tl.int32)
    else:
        p0 = tl.load(blob + group, mask=exists, other=0).to(tl.int32)
        p1 = tl.load(blob + plane + group, mask=exists, other=0).to(tl.int32)
        p2 = tl.load(blob + 2 * plane + group, mask=exists, other=0).to(tl.int32)
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


def rows_of(
    tensors: Sequence[tuple[Layout, int, int]], device: torch.device, warps: int = WARPS
) -> tuple[list[list[int]], int]:
    """Return the rows of the table for ``tensors`` (layout, byte offset in the wire buffer, byte offset in the
    slot), and the number of Triton programs that decode them. The offsets are multiples of 16.

    The last ``numel % 8`` elements of each tensor are left out.
    """
    groups, programs, rows = lanes_of_a_warp(device) * warps, 0, []
    for layout, wire_at, out_at in tensors:
        full = layout.numel // 8
        rows.append(
            [
                programs,
                full,
                wire_at // 16,
                out_at // 16,
                layout.scales_at // 16,
                layout.plane_stride // 16,
                0,
                0,
            ]
        )
        programs += triton.cdiv(full, groups)
    return rows, programs


def _arguments(
    wire: torch.Tensor, out: torch.Tensor, table: torch.Tensor, codebook: Codebook, block: int,
    dtype: torch.dtype, warps: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return the arguments and the constants of a launch."""
    constants = {
        # One group for each lane: with more or fewer, Triton would exchange values between lanes through shared
        # memory and write less than 16 bytes at a time.
        "ROWS": padded_rows(table), "BITS": codebook.bits, "BLOCK": block,
        "GROUPS": lanes_of_a_warp(wire.device) * warps, "DTYPE": _DTYPES[dtype], "SIZE": dtype.itemsize,
        # Triton's interpreter truncates to bf16 where hardware rounds to nearest even.
        "ROUND_BF16": dtype == torch.bfloat16 and not wire.is_cuda,
    }  # fmt: skip
    return (wire, out, table, table.shape[0], codebook_on(codebook, wire.device)), constants


def launcher(
    wire: torch.Tensor, out: torch.Tensor, table: torch.Tensor, programs: int, codebook: Codebook, block: int,
    dtype: torch.dtype, warps: int = WARPS,
) -> Callable[..., Any] | None:  # fmt: skip
    """Decode the tensors of all rows of ``table`` (from `rows_of`, int64 on the device) from ``wire`` into
    ``out`` with one kernel launch on the current stream.

    Both are 1-D uint8 tensors, 16-byte aligned. Returns a function that repeats the launch with other buffers,
    as `lossless_triton.launcher` does, or None where this version of Triton does not allow that.
    """
    arguments, constants = _arguments(wire, out, table, codebook, block, dtype, warps)
    compiled = _dequantize[(programs,)](*arguments, **constants, num_warps=warps)
    return compiled_launcher(compiled, programs, arguments, constants)


def dequantize_triton(blob: torch.Tensor, layout: Layout, out: torch.Tensor, warps: int = WARPS) -> None:
    """Decode ``blob`` (uint8) into ``out`` ([numel], bf16, fp16 or fp32) with one kernel launch on the
    current stream.

    Both must be aligned to 16 bytes. The last ``numel % 8`` elements, which weights rarely have, are decoded
    by torch operations.
    """
    full = layout.numel // 8
    if full:
        rows, programs = rows_of([(layout, 0, 0)], blob.device, warps)
        table = torch.tensor(rows, dtype=torch.int64, device=blob.device)
        arguments, constants = _arguments(
            blob, out.view(torch.uint8), table, layout.codebook, layout.block, out.dtype, warps
        )
        _dequantize[(programs,)](*arguments, **constants, num_warps=warps)
    if layout.numel % 8:
        dequantize_torch(blob, layout, out, full * 8)
