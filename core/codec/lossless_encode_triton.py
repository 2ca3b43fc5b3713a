"""Triton encoder of version 1 of the lossless format for CUDA and ROCm: two kernel launches for a tensor.

The first kernel writes the byte planes and the bit planes, and counts the escapes of each tile. From these counts
follow the tile table and the offset of each tile's escapes. The second kernel finds the escapes in the bit planes, and
writes each as two 4-bit values (of which only the first is used for escapes of 4 bits).

The terms tile, lane, byte plane, bit plane and rest bits are defined in core/codec/lossless_format.py. The bytes are
those that core/codec/lossless_device.py writes by torch operations.

Import this module only where triton can be imported. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from .lossless_format import HEADER_BYTES, MOST_SHIFT, WIDE_BIT, Header

_WARPS = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _exponent(x, KIND: tl.constexpr):
    """Return the exponents of elements, given as int32 whose lower bits are the element's."""
    if KIND == "bf16":
        found = (x >> 7) & 0xFF
    elif KIND == "fp32":
        found = (x >> 23) & 0xFF
    elif KIND == "fp16":
        found = (x >> 10) & 31
    else:
        found = (x >> 2) & 31
    return found


@triton.jit
def _count_bits(word):
    """Return the number of bits that are set in each int32."""
    count = word - ((word >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (count + (count >> 4)) & 0x0F0F0F0F
    return ((count * 0x01010101) >> 24) & 0xFF


@triton.jit(do_not_specialize=["groups", "stride", "base"])
def _split(
    source, data, planes, info, nibbles, groups, stride, base,
    KIND: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the byte planes and bit planes of a tile, and its number of escapes, flags and most escapes of a lane.

    ``groups``: groups of 8 elements that are coded. ``stride``: bytes from one byte plane to the next.
    """
    REST: tl.constexpr = 3 if KIND == "fp16" or KIND == "e5m2" else 0
    ESCAPE: tl.constexpr = (1 << K) - 1
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    i = tl.arange(0, 8)[None, :]
    words = planes + tile * ((K + REST) * LANES) + lane
    counts = tl.zeros([LANES], tl.int32)
    wide = tl.zeros([LANES], tl.int32)
    w0 = tl.zeros([LANES], tl.int32)
    w1, w2, w3, w4, w5, w6, w7 = w0, w0, w0, w0, w0, w0, w0
    for r in tl.static_range(4):
        group = tile * (4 * LANES) + r * LANES + lane
        live = (group < groups)[:, None]
        at = group[:, None] * 8 + i
        x = tl.load(source + at, mask=live, other=0).to(tl.int32)
        if KIND == "bf16":
            tl.store(data + at, (((x >> 8) & 0x80) | (x & 0x7F)).to(tl.uint8), mask=live)
        elif KIND == "fp32":
            tl.store(data + at, (x & 0xFF).to(tl.uint8), mask=live)
            tl.store(data + stride + at, ((x >> 8) & 0xFF).to(tl.uint8), mask=live)
            top = ((x >> 24) & 0x80) | ((x >> 16) & 0x7F)
            # Not 2 * stride: `stride` has 32 bits, and `at` has 64.
            tl.store(data + stride + (stride + at), top.to(tl.uint8), mask=live)
        elif KIND == "fp16":
            tl.store(data + at, (x & 0xFF).to(tl.uint8), mask=live)
        exponent = _exponent(x, KIND)
        code = exponent - base
        escaped = live & ((code < 0) | (code >= ESCAPE))
        code = tl.where(escaped, ESCAPE, code)
        nibble = tl.load(nibbles + exponent, mask=escaped, other=0).to(tl.int32)
        wide = tl.maximum(wide, tl.max((nibble == 255).to(tl.int32), axis=1))
        counts += tl.sum(escaped.to(tl.int32), axis=1)
        if KIND == "fp16":
            code = code | (((x >> 13) & 4) | ((x >> 8) & 3)) << K
        elif KIND == "e5m2":
            code = code | (((x >> 5) & 4) | (x & 3)) << K
        code = tl.where(live, code, 0)
        # Element i of a group is bit r * 2 + i // 4 of byte i % 4 of the lane's words.
        place = r * 2 + (i >> 2) + (i & 3) * 8
        w0 |= tl.sum((code & 1) << place, axis=1)
        if K + REST > 1:
            w1 |= tl.sum(((code >> 1) & 1) << place, axis=1)
        if K + REST > 2:
            w2 |= tl.sum(((code >> 2) & 1) << place, axis=1)
        if K + REST > 3:
            w3 |= tl.sum(((code >> 3) & 1) << place, axis=1)
        if K + REST > 4:
            w4 |= tl.sum(((code >> 4) & 1) << place, axis=1)
        if K + REST > 5:
            w5 |= tl.sum(((code >> 5) & 1) << place, axis=1)
        if K + REST > 6:
            w6 |= tl.sum(((code >> 6) & 1) << place, axis=1)
        if K + REST > 7:
            w7 |= tl.sum(((code >> 7) & 1) << place, axis=1)
    tl.store(words, w0)
    if K + REST > 1:
        tl.store(words + LANES, w1)
    if K + REST > 2:
        tl.store(words + 2 * LANES, w2)
    if K + REST > 3:
        tl.store(words + 3 * LANES, w3)
    if K + REST > 4:
        tl.store(words + 4 * LANES, w4)
    if K + REST > 5:
        tl.store(words + 5 * LANES, w5)
    if K + REST > 6:
        tl.store(words + 6 * LANES, w6)
    if K + REST > 7:
        tl.store(words + 7 * LANES, w7)
    tl.store(info + tile * 3, tl.sum(counts, axis=0))
    tl.store(info + tile * 3 + 1, tl.max(wide, axis=0))
    tl.store(info + tile * 3 + 2, tl.max(counts, axis=0))


@triton.jit
def _escapes(
    source, planes, entries, nibbles, halves,
    KIND: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the escapes of a tile to ``halves``, a byte for each half of a byte of the escapes section."""
    REST: tl.constexpr = 3 if KIND == "fp16" or KIND == "e5m2" else 0
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    entry = tl.load(entries + tile)
    most = (entry >> 48).to(tl.int32) & 0xFF
    if most > 0:
        wide = (entry >> 40).to(tl.int32) & 1
        target = halves + (entry & 0xFFFFFFFFFF) * 2
        words = planes + tile * ((K + REST) * LANES) + lane
        mask = tl.load(words)
        for j in tl.static_range(1, K):
            mask = mask & tl.load(words + j * LANES)
        count = _count_bits(mask)
        rank = tl.cumsum(count, axis=0) - count
        for turn in range(most):
            lowest = mask & (0 - mask)
            active = mask != 0
            mask ^= lowest
            bit = _count_bits(lowest - 1)
            group = tile * (4 * LANES) + ((bit >> 1) & 3) * LANES + lane
            x = tl.load(source + group * 8 + (bit & 1) * 4 + (bit >> 3), mask=active, other=0).to(tl.int32)
            exponent = _exponent(x, KIND)
            nibble = tl.load(nibbles + exponent, mask=active, other=0).to(tl.int32)
            at = target + ((rank + turn) << wide)
            tl.store(at, tl.where(wide != 0, exponent & 15, nibble).to(tl.uint8), mask=active)
            # Triton 3.9's interpreter rejects `active & (wide != 0)`: it broadcasts a scalar bool to int32.
            tl.store(at + 1, (exponent >> 4).to(tl.uint8), mask=(lowest & (0 - wide)) != 0)


@dataclass(frozen=True)
class Split:
    """A tensor of which all but the escapes is encoded.

    ``header``: the header of the blob. ``encode_escapes``: returns the whole blob, and needs three times the bytes of the
    escapes as temporary memory.
    """

    header: Header
    encode_escapes: Callable[[], torch.Tensor]


def split_triton(data: torch.Tensor, header: Header, limit: int) -> Split:
    """Encode all but the escapes of a tensor, whose bytes are ``data`` (1-D uint8), on its device.

    ``header``: that of the blob without its escapes. ``limit``: bytes that the blob takes at most; the memory of a
    larger one must not be asked for. The call waits for the kernel, which counts the escapes.
    """
    device, kind = data.device, header.kind
    blob = torch.zeros(limit, dtype=torch.uint8, device=device)  # the bytes between the sections are zero
    nibble_of = torch.full((256,), 255, dtype=torch.uint8)
    nibble_of[torch.tensor(list(header.escape_table))] = torch.arange(16, dtype=torch.uint8)
    nibbles = nibble_of.to(device, non_blocking=True)
    source = data.view(_INTEGERS[kind.itemsize])
    planes = blob[header.bits_at : header.tiles_at].view(torch.int32)
    entries = blob[header.tiles_at : header.tiles_at + 8 * header.tiles].view(torch.int64)
    info = torch.empty((header.tiles, 3), dtype=torch.int64, device=device)
    constants: dict[str, Any] = {"KIND": kind.name, "K": header.k, "LANES": header.lanes}
    _split[(header.tiles,)](
        source, blob[HEADER_BYTES:], planes, info, nibbles, header.words // 2, header.byte_plane_stride, header.base,
        **constants, num_warps=_WARPS,
    )  # fmt: skip
    counts, wide, most = info.unbind(1)
    sizes = ((counts << wide) + 1) >> 1
    ends = torch.cumsum(sizes, 0)
    torch.bitwise_or(ends - sizes, (wide << WIDE_BIT) | (most << MOST_SHIFT), out=entries)
    written, fullest = torch.stack([ends[-1], most.amax()]).tolist()
    header = replace(header, escape_bytes=written, most_escapes=fullest)

    def encode_escapes() -> torch.Tensor:
        if written:
            halves = torch.zeros(2 * written, dtype=torch.uint8, device=device)
            _escapes[(header.tiles,)](source, planes, entries, nibbles, halves, **constants, num_warps=_WARPS)
            stream = blob[header.escapes_at : header.escapes_at + written]
            torch.bitwise_or(halves[0::2], halves[1::2] << 4, out=stream)
        whole = blob[: header.total]
        start = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        whole[:HEADER_BYTES].copy_(start, non_blocking=True)
        return whole

    return Split(header, encode_escapes)
