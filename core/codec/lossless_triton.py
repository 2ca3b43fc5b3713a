"""Triton decoder of the lossless format for CUDA and ROCm; one launch decodes all tensors of a wire buffer.

Each GPU lane decodes 32 elements and owns one 32-bit word of every bit plane. The format makes this fast in
four ways. (1) `(word >> r) & 0x01010101` gives one bit of each of four neighbouring elements, one in each
byte, so exponents are assembled four at a time. (2) Neighbouring lanes read 8 and write 16 neighbouring
bytes. (3) A lane's escapes are the set bits of one register. (4) Every tensor in the kernel is
one-dimensional over lanes, so Triton has no layouts to convert. Escapes are then patched in registers. Each
round patches one escape of every lane, and the tile table gives the number of rounds, which is the number of
escapes in the tile's fullest lane (4 for a tile of 4096 Gaussian weights). Finding the positions of escapes
takes one prefix sum over lanes, never one over elements.

The terms tile, lane, byte plane, bit plane and rest bits are defined in core/codec/lossless_format.py.

Import this module only where triton can be imported. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .lossless_two_level_triton import decode_tile, store_tile

log = logging.getLogger(__name__)
# Int64 fields of a row of the table that describes the tensors to decode, see core/codec/unit_decoder.py.
ROW_FIELDS = 16
_R = tl.constexpr(ROW_FIELDS)
_LEAST_ROWS = 32  # as many rows as the lanes of a warp examine in one step


@triton.jit
def _interleave(low, high, ASM: tl.constexpr):
    """Interleave the bytes of two 32-bit words: return two int32 with (low, high) byte pairs, of the first
    elements first.
    """
    if ASM:
        first = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
        second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        first = (low & 0xFF) | ((high & 0xFF) << 8) | ((low & 0xFF00) << 8) | ((high & 0xFF00) << 16)
        second = ((low >> 16) & 0xFF) | ((high >> 8) & 0xFF00) | ((low >> 8) & 0xFF0000) | (high & -16777216)
    return first, second


@triton.jit
def _widen(first, second):
    """Return two 32-bit words as one int64, ``first`` in the lower half."""
    return first.to(tl.uint32, bitcast=True).to(tl.int64) | (second.to(tl.int64) << 32)


@triton.jit
def _add_plane(e0, e1, e2, e3, e4, e5, e6, e7, plane, value):
    """Add ``value`` to the bytes of a lane's eight words e0 to e7 where ``plane`` has a bit.

    Word r owns the bits r, 8 + r, 16 + r and 24 + r of the plane.
    """
    ONES: tl.constexpr = 0x01010101
    e0 += (plane & ONES) * value
    e1 += ((plane >> 1) & ONES) * value
    e2 += ((plane >> 2) & ONES) * value
    e3 += ((plane >> 3) & ONES) * value
    e4 += ((plane >> 4) & ONES) * value
    e5 += ((plane >> 5) & ONES) * value
    e6 += ((plane >> 6) & ONES) * value
    e7 += ((plane >> 7) & ONES) * value
    return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def _store(
    bytes_, data, target, stride, at, live, e_even, e_odd, r_even, r_odd,
    KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Join exponents and rest bits of two neighbouring words of each lane to 8 elements, and write them to
    ``target``.

    ``at``: the number of the word pair in the tensor. ``live``: a mask of the lanes that have elements.
    """
    z = tl.arange(0, 2)[None, :]
    if KIND == "bf16" or KIND == "fp32":
        even = bytes_.to(tl.int32)
        odd = (bytes_ >> 32).to(tl.int32)
        low_even = (even & 0x7F7F7F7F) | ((e_even << 7) & -2139062144)
        low_odd = (odd & 0x7F7F7F7F) | ((e_odd << 7) & -2139062144)
        high_even = (even & -2139062144) | ((e_even >> 1) & 0x7F7F7F7F)
        high_odd = (odd & -2139062144) | ((e_odd >> 1) & 0x7F7F7F7F)
    else:
        high_even = ((r_even & 0x04040404) << 5) | (e_even << 2) | (r_even & 0x03030303)
        high_odd = ((r_odd & 0x04040404) << 5) | (e_odd << 2) | (r_odd & 0x03030303)
    if KIND == "fp16":
        low_even = bytes_.to(tl.int32)
        low_odd = (bytes_ >> 32).to(tl.int32)

    words = target.to(tl.pointer_type(tl.int64))
    if KIND == "e5m2":
        tl.store(words + at, _widen(high_even, high_odd), mask=live)
    else:
        a, b = _interleave(low_even, high_even, ASM)
        c, d = _interleave(low_odd, high_odd, ASM)
        if KIND == "fp32":
            byte0 = tl.load(data.to(tl.pointer_type(tl.int64)) + at, mask=live, other=0)
            byte1 = tl.load((data + stride).to(tl.pointer_type(tl.int64)) + at, mask=live, other=0)
            f, g = _interleave(byte0.to(tl.int32), byte1.to(tl.int32), ASM)
            h, i = _interleave((byte0 >> 32).to(tl.int32), (byte1 >> 32).to(tl.int32), ASM)
            even = tl.join(_halves(f, a), _halves(g, b))
            odd = tl.join(_halves(h, c), _halves(i, d))
            tl.store(words + at[:, None] * 4 + z, even, mask=live[:, None])
            tl.store(words + at[:, None] * 4 + 2 + z, odd, mask=live[:, None])
        else:
            tl.store(words + at[:, None] * 2 + z, tl.join(_widen(a, b), _widen(c, d)), mask=live[:, None])


@triton.jit
def _halves(low, high):
    """Return the 16-bit halves of two words as (low, high) pairs: two 32-bit elements in an int64."""
    return _widen((low & 0xFFFF) | (high << 16), ((low >> 16) & 0xFFFF) | (high & -65536))


@triton.jit
def _decode_tile(
    planes, entry, escapes, escape_bytes, header, base, data, stride, target, lane, first, left, pairs,
    KIND: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, REST: tl.constexpr, SIZE: tl.constexpr,
    BYTES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode a tile of version 1 of the format and write its elements.

    ``planes``: for each lane, the address of its word of the tile's first bit plane. ``entry``: the tile's entry in
    the tile table. ``first``: the number of the tile's first word pair. ``left``: word pairs from there to the end.
    """
    mask = tl.load(planes)
    # Load the last byte plane (sign and top mantissa bits, or fp16's low byte) now, so that the load
    # is under way while the exponents are decoded.
    src = data + first * 8
    b0, b1, b2, b3 = pairs, pairs, pairs, pairs
    if BYTES > 0:
        top = (src + (BYTES - 1) * stride).to(tl.pointer_type(tl.int64)) + lane
        b0 = tl.load(top, mask=lane < left, other=0)
        b1 = tl.load(top + LANES, mask=lane + LANES < left, other=0)
        b2 = tl.load(top + 2 * LANES, mask=lane + 2 * LANES < left, other=0)
        b3 = tl.load(top + 3 * LANES, mask=lane + 3 * LANES < left, other=0)
    e0 = tl.zeros_like(mask) + base * 0x01010101
    e1, e2, e3, e4, e5, e6, e7 = e0, e0, e0, e0, e0, e0, e0
    e0, e1, e2, e3, e4, e5, e6, e7 = _add_plane(e0, e1, e2, e3, e4, e5, e6, e7, mask, 1)
    for j in tl.static_range(1, K):
        plane = tl.load(planes + j * LANES)
        mask = mask & plane
        e0, e1, e2, e3, e4, e5, e6, e7 = _add_plane(e0, e1, e2, e3, e4, e5, e6, e7, plane, 1 << j)
    r0 = tl.zeros_like(mask)
    r1, r2, r3, r4, r5, r6, r7 = r0, r0, r0, r0, r0, r0, r0
    for j in tl.static_range(0, REST):
        plane = tl.load(planes + (K + j) * LANES)
        r0, r1, r2, r3, r4, r5, r6, r7 = _add_plane(r0, r1, r2, r3, r4, r5, r6, r7, plane, 1 << j)

    most = (entry >> 48).to(tl.int32) & 0xFF
    if most > 0:
        wide = (entry >> 40).to(tl.int32) & 1
        offset = entry & 0xFFFFFFFFFF
        stream = escapes + offset
        # Bound every load by the end of the escapes section, whatever the tile table and the planes
        # say: so no hostile file makes a lane read outside the section.
        inside = tl.minimum(tl.maximum(escape_bytes - offset, 0), 0x7FFFFFFF).to(tl.int32)
        count = mask - ((mask >> 1) & 0x55555555)
        count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
        count = (count + (count >> 4)) & 0x0F0F0F0F
        count = (count * 0x01010101) >> 24
        rank = tl.cumsum(count, axis=0) - count
        for turn in range(most):
            lowest = mask & (0 - mask)
            active = mask != 0
            mask ^= lowest
            nibble = (rank + turn) << wide
            there = active & ((nibble >> 1) < inside)
            byte = tl.load(stream + (nibble >> 1), mask=there, other=0).to(tl.int32)
            value = (byte >> ((nibble & 1) * 4)) & 15
            value = tl.load(header + 48 + value, mask=active, other=0).to(tl.int32)
            value = tl.where(wide != 0, byte, value) - (base + ((1 << K) - 1))
            e0, e1, e2, e3, e4, e5, e6, e7 = _add_plane(e0, e1, e2, e3, e4, e5, e6, e7, lowest, value)

    dst = target + first * (8 * SIZE)
    _store(b0, src, dst, stride, lane, lane < left, e0, e1, r0, r1, KIND, ASM)
    _store(b1, src, dst, stride, lane + LANES, lane + LANES < left, e2, e3, r2, r3, KIND, ASM)
    _store(b2, src, dst, stride, lane + 2 * LANES, lane + 2 * LANES < left, e4, e5, r4, r5, KIND, ASM)
    _store(b3, src, dst, stride, lane + 3 * LANES, lane + 3 * LANES < left, e6, e7, r6, r7, KIND, ASM)


@triton.jit(do_not_specialize=["tensors"])
def _decode(
    wire, out, table, tensors,
    ROWS: tl.constexpr, KIND: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode ``TILES`` tiles (groups of 32 * LANES elements) of one of the tensors that the rows of ``table``
    describe.
    """
    # The tensor that this program decodes is the last one whose first program number is at most this
    # program's.
    pid = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    starts = tl.load(table + rows * _R, mask=rows < tensors, other=1 << 62)
    row = table + (tl.sum((starts <= pid).to(tl.int32), axis=0) - 1) * _R
    index = (pid - tl.load(row)).to(tl.int32)
    pairs = tl.load(row + 1)
    data = wire + tl.load(row + 2) * 16
    bits = (wire + tl.load(row + 3) * 16).to(tl.pointer_type(tl.int32))
    tile_table = (wire + tl.load(row + 4) * 16).to(tl.pointer_type(tl.int64))
    escapes = wire + tl.load(row + 5) * 16
    header = wire + tl.load(row + 6) * 16
    target = out + tl.load(row + 7) * 16
    base = tl.load(row + 8).to(tl.int32)
    tail = tl.load(row + 9).to(tl.int32)
    stride = tl.load(row + 10) * 16
    tiles = tl.load(row + 11).to(tl.int32)
    escape_bytes = tl.load(row + 12)
    plain = tl.load(row + 13)

    REST: tl.constexpr = 3 if KIND == "fp16" or KIND == "e5m2" else (4 if KIND == "e4m3" else 0)
    TWO_LEVEL: tl.constexpr = KIND == "e4m3"
    SIZE: tl.constexpr = 4 if KIND == "fp32" else (2 if KIND == "bf16" or KIND == "fp16" else 1)
    BYTES: tl.constexpr = 3 if KIND == "fp32" else (1 if KIND == "bf16" or KIND == "fp16" else 0)
    lane = tl.arange(0, LANES)

    if plain > 0:  # a tensor that is not packed: copied, eight 64-bit words a lane
        source, place = data.to(tl.pointer_type(tl.int64)), target.to(tl.pointer_type(tl.int64))
        for step in tl.static_range(8):
            word = index.to(tl.int64) * (8 * LANES) + step * LANES + lane
            tl.store(
                place + word, tl.load(source + word, mask=word < plain // 8, other=0), mask=word < plain // 8
            )
        if index == 0:
            byte = plain // 8 * 8 + tl.arange(0, 8)
            tl.store(target + byte, tl.load(data + byte, mask=byte < plain, other=0), mask=byte < plain)

    for step in range(TILES):
        tile = index * TILES + step
        if tile < tiles:
            planes = bits + tile.to(tl.int64) * ((K + REST) * LANES) + lane
            entry = tl.load(tile_table + tile)
            # Pairs of words from the tile's first one to the tensor's end.
            first = tile.to(tl.int64) * (4 * LANES)
            left = pairs - first
            if TWO_LEVEL:
                w0, w1, w2, w3, w4, w5, w6, w7 = decode_tile(
                    planes, entry, escapes, escape_bytes, header, base, K, LANES
                )
                store_tile(target + first * 8, lane, left, w0, w1, w2, w3, w4, w5, w6, w7, LANES)
            else:
                _decode_tile(
                    planes, entry, escapes, escape_bytes, header, base, data, stride, target, lane, first, left, pairs,
                    KIND, K, LANES, REST, SIZE, BYTES, ASM,
                )  # fmt: skip

    if (index == 0) & (tail > 0):
        i = tl.arange(0, 32)
        end = target + pairs * (8 * SIZE)
        tl.store(end + i, tl.load(header + 64 + i, mask=i < tail * SIZE, other=0), mask=i < tail * SIZE)


@functools.cache
def lanes_of_a_warp(device: torch.device) -> int:
    """Return the lanes in a warp of ``device``: 32, or 64 on AMD's data-centre GPUs."""
    if device.type != "cuda":
        return 32
    return int(getattr(torch.cuda.get_device_properties(device), "warp_size", 32))


def padded_rows(table: torch.Tensor) -> int:
    """Return the number of table rows that a program searches, padded so that one compiled kernel serves all
    small tables.
    """
    return max(_LEAST_ROWS, triton.next_power_of_2(table.shape[0]))


def decode_group(
    wire: torch.Tensor, out: torch.Tensor, table: torch.Tensor, programs: int, kind: str, k: int, lanes: int,
    tiles: int = 1, warps: int | None = None, asm: bool | None = None,
) -> None:  # fmt: skip
    """Launch one kernel on the current stream that decodes the tensors of all rows of ``table``.

    ``table``: int64 [tensors, ROW_FIELDS] on the device; the rows must come from validated headers. ``wire``
    and ``out``: 1-D uint8 tensors on the device, 16-byte aligned. ``tiles``: the tiles that one Triton program
    decodes. ``programs``: the number of programs, for that number of tiles. The bytes in ``wire`` may be
    anything: damaged bytes decode to wrong values, but no byte outside the rows' tensors is read or written.
    """
    if asm is None:
        asm = wire.is_cuda and torch.version.hip is None
    _decode[(programs,)](
        wire, out, table, table.shape[0],
        ROWS=padded_rows(table), KIND=kind, K=k, LANES=lanes, TILES=tiles, ASM=asm,
        num_warps=warps or max(1, lanes // lanes_of_a_warp(wire.device)),
    )  # fmt: skip


def launcher(
    wire: torch.Tensor, out: torch.Tensor, table: torch.Tensor, programs: int, kind: str, k: int, lanes: int,
    tiles: int = 1, warps: int | None = None,
) -> Callable[..., Any] | None:  # fmt: skip
    """Decode once as `decode_group` does, and return a function that repeats the launch with other buffers.

    The function takes (wire address, out address, stream=None), where addresses are multiples of 16 and
    ``stream`` is a raw handle (None: the current stream). Each call launches the compiled kernel without
    Triton's look-up by arguments, in a fraction of the host time. Returns None where this version of Triton
    does not allow that.
    """
    asm = wire.is_cuda and torch.version.hip is None
    constants = {"ROWS": padded_rows(table), "KIND": kind, "K": k, "LANES": lanes, "TILES": tiles, "ASM": asm}
    arguments = (wire, out, table, table.shape[0])
    warps = warps or max(1, lanes // lanes_of_a_warp(wire.device))
    compiled = _decode[(programs,)](*arguments, **constants, num_warps=warps)
    return compiled_launcher(compiled, programs, arguments, constants)


def compiled_launcher(
    compiled: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> Callable[..., Any] | None:
    """Return a function that repeats a launch with other buffers, as `launcher` says.

    ``compiled``: the compiled kernel that Triton returned for the launch. ``arguments``: those of the launch,
    first the buffers of packed and of decoded bytes. The other tensors among them must not be freed while the
    function is used. ``constants``: the constants of the launch, in order.
    """
    if compiled is None:  # Triton's interpreter compiles nothing
        return None
    wire, out, *others = arguments
    others = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in others]
    # Triton's version decides whether the constants are passed, so try both.
    for constant_arguments in (tuple(constants.values()), ()):
        try:
            runner, rest = compiled[(programs, 1, 1)], (*others, *constant_arguments)

            def launch(
                source: int, target: int, stream: int | None = None, runner: Any = runner, rest: tuple = rest
            ) -> None:
                runner(source, target, *rest, stream=stream)

            launch(wire.data_ptr(), out.data_ptr())
            return launch
        # An incompatible version of Triton: the caller goes on with ordinary launches.
        except Exception as error:
            log.debug(
                "the compiled kernel cannot be launched with %d arguments: %s",
                len(arguments) + len(constant_arguments),
                error,
            )
    return None
