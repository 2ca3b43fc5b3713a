"""Triton functions that decode a tile of version 2 of the lossless format (fp8 e4m3).

The steps are those of core/codec/lossless_two_level.py, which explains them; each GPU lane decodes the 32 elements
of a lane of the tile. The time does not depend on the number of escapes, except that a tile without literals skips
them.

Import this module only where triton can be imported.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _byte_counts(mask):
    """Return the number of set bits of each byte, in that byte."""
    count = mask - ((mask >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    return (count + (count >> 4)) & 0x0F0F0F0F


@triton.jit
def _parity_below(zeros):
    """Return for each position of a byte the parity of the set bits of ``zeros`` from the lowest to it."""
    parity = zeros ^ ((zeros << 1) & 0xFEFEFEFE)
    parity ^= (parity << 2) & 0xFCFCFCFC
    return parity ^ ((parity << 4) & 0xF0F0F0F0)


@triton.jit
def _expansion(mask, ones):
    """Return how bits move to the set bits of ``mask``: three shifts of whole bytes, and three masks of positions
    that bits arrive at within a byte.

    ``ones``: the result of `_byte_counts`.
    """
    zeros = (0x08080808 - ones) * 0x01010101
    # Written without `~`: in Triton 3.8 the interpreter cannot invert a uint32 with numpy 2.
    zero_bits = ((mask ^ 0xFFFFFFFF) << 1) & 0xFEFEFEFE
    parity = _parity_below(zero_bits)
    by1 = parity & mask
    left = (mask ^ by1) | (by1 >> 1)
    zero_bits ^= zero_bits & parity
    parity = _parity_below(zero_bits)
    by2 = parity & left
    left = (left ^ by2) | (by2 >> 2)
    by4 = _parity_below(zero_bits ^ (zero_bits & parity)) & left
    return zeros & 0xFF, (zeros >> 8) & 0xFF, (zeros >> 16) & 0xFF, by1, by2, by4


@triton.jit
def _expand(words, mask, to1, to2, to3, by1, by2, by4):
    """Move the lowest bits of ``words`` to the set bits of ``mask``, in their order; see `_expansion`."""
    moved = words & 0xFF
    moved |= (words << to1) & 0xFF00
    moved |= (words << to2) & 0xFF0000
    moved |= (words << to3) & 0xFF000000
    moved ^= (moved ^ (moved << 4)) & by4
    moved ^= (moved ^ (moved << 2)) & by2
    moved ^= (moved ^ (moved << 1)) & by1
    return moved & mask


@triton.jit
def _all_ones_if(number, bit):
    """Return 32 set bits if ``number`` has the bit ``bit``, else 0."""
    return (0 - ((number >> bit) & 1)).to(tl.uint32, bitcast=True)


@triton.jit
def _window(here, after, shift):
    """Return the 32 bits of each half of two 64-bit words that begin at bit ``shift`` of ``here``'s half."""
    up = 31 - shift
    low = (here.to(tl.uint32) >> shift) | ((after.to(tl.uint32) << 1) << up)
    high = ((here >> 32).to(tl.uint32) >> shift) | (((after >> 32).to(tl.uint32) << 1) << up)
    return low, high


@triton.jit
def _swap(low, high, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Exchange the bits ``MASK`` of ``high`` with the bits of ``low`` that are ``SHIFT`` higher."""
    swapped = ((low >> SHIFT) ^ high) & MASK
    return low ^ (swapped << SHIFT), high ^ swapped


@triton.jit
def _transpose(p0, p1, p2, p3, p4, p5, p6, p7):
    """Transpose 8 x 8 bits in each byte: bit j of result r is bit r of argument j."""
    p0, p4 = _swap(p0, p4, 4, 0x0F0F0F0F)
    p1, p5 = _swap(p1, p5, 4, 0x0F0F0F0F)
    p2, p6 = _swap(p2, p6, 4, 0x0F0F0F0F)
    p3, p7 = _swap(p3, p7, 4, 0x0F0F0F0F)
    p0, p2 = _swap(p0, p2, 2, 0x33333333)
    p1, p3 = _swap(p1, p3, 2, 0x33333333)
    p4, p6 = _swap(p4, p6, 2, 0x33333333)
    p5, p7 = _swap(p5, p7, 2, 0x33333333)
    p0, p1 = _swap(p0, p1, 1, 0x55555555)
    p2, p3 = _swap(p2, p3, 1, 0x55555555)
    p4, p5 = _swap(p4, p5, 1, 0x55555555)
    p6, p7 = _swap(p6, p7, 1, 0x55555555)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def decode_tile(planes, entry, escapes, escape_bytes, header, base, K: tl.constexpr, LANES: tl.constexpr):
    """Return the eight words of four decoded elements (uint32) of each lane of a tile.

    ``planes``: for each lane, the address of its word of the tile's first bit plane. ``entry``: the tile's entry in
    the tile table. ``escapes``: the address of the escapes section, of ``escape_bytes`` bytes. ``header``: the
    address of the blob's header. ``base``: the exponent of first code 0. Whatever ``entry`` and the planes say,
    nothing outside the section is read.
    """
    # Bit planes of the exponent: the first code plus ``base``.
    mask = tl.load(planes).to(tl.uint32, bitcast=True)
    bit = _all_ones_if(base, 0)
    e0, carry = mask ^ bit, mask & bit
    bit = _all_ones_if(base, 1)
    if K > 1:
        code = tl.load(planes + LANES).to(tl.uint32, bitcast=True)
        e1, carry = code ^ bit ^ carry, (code & bit) | (carry & (code ^ bit))
        mask &= code
    else:
        e1, carry = carry ^ bit, carry & bit
    bit = _all_ones_if(base, 2)
    if K > 2:
        code = tl.load(planes + 2 * LANES).to(tl.uint32, bitcast=True)
        e2, carry = code ^ bit ^ carry, (code & bit) | (carry & (code ^ bit))
        mask &= code
    else:
        e2, carry = carry ^ bit, carry & bit
    e3 = carry ^ _all_ones_if(base, 3)

    seconds = (entry >> 32).to(tl.int32) & 0xFFFF
    literals = (entry >> 48).to(tl.int32) & 0xFFFF
    if seconds > 0:
        offset = (entry & 0xFFFFFFFF) * 8
        stream = (escapes + offset).to(tl.pointer_type(tl.int64))
        # Words of the section from ``stream`` on.
        inside = tl.minimum(tl.maximum(escape_bytes - offset, 0) >> 3, 0x7FFFFFFF).to(tl.int32)
        first = tl.load(header + 48).to(tl.int32)
        second = first ^ tl.load(header + 49).to(tl.int32)
        third = first ^ tl.load(header + 50).to(tl.int32)
        change = first ^ (base + ((1 << K) - 1))
        ones = _byte_counts(mask)
        count = ((ones * 0x01010101) >> 24).to(tl.int32)
        position = tl.cumsum(count, axis=0) - count
        index, shift = position >> 5, (position & 31).to(tl.uint32)
        here = tl.load(stream + index, mask=index < inside, other=0)
        after = tl.load(stream + index + 1, mask=index + 1 < inside, other=0)
        low, high = _window(here, after, shift)
        to1, to2, to3, by1, by2, by4 = _expansion(mask, ones)
        low = _expand(low, mask, to1, to2, to3, by1, by2, by4)
        high = _expand(high, mask, to1, to2, to3, by1, by2, by4)
        e0 ^= (
            (mask & _all_ones_if(change, 0))
            ^ (low & _all_ones_if(second, 0))
            ^ (high & _all_ones_if(third, 0))
        )
        e1 ^= (
            (mask & _all_ones_if(change, 1))
            ^ (low & _all_ones_if(second, 1))
            ^ (high & _all_ones_if(third, 1))
        )
        e2 ^= (
            (mask & _all_ones_if(change, 2))
            ^ (low & _all_ones_if(second, 2))
            ^ (high & _all_ones_if(third, 2))
        )
        e3 ^= (
            (mask & _all_ones_if(change, 3))
            ^ (low & _all_ones_if(second, 3))
            ^ (high & _all_ones_if(third, 3))
        )
        if literals > 0:
            mask = low & high
            before = first ^ second ^ third
            ones = _byte_counts(mask)
            count = ((ones * 0x01010101) >> 24).to(tl.int32)
            position = tl.cumsum(count, axis=0) - count
            index, shift = seconds + (position >> 5) * 2, (position & 31).to(tl.uint32)
            here = tl.load(stream + index, mask=index < inside, other=0)
            after = tl.load(stream + index + 2, mask=index + 2 < inside, other=0)
            x0, x1 = _window(here, after, shift)
            here = tl.load(stream + index + 1, mask=index + 1 < inside, other=0)
            after = tl.load(stream + index + 3, mask=index + 3 < inside, other=0)
            x2, x3 = _window(here, after, shift)
            to1, to2, to3, by1, by2, by4 = _expansion(mask, ones)
            e0 ^= (mask & _all_ones_if(before, 0)) ^ _expand(x0, mask, to1, to2, to3, by1, by2, by4)
            e1 ^= (mask & _all_ones_if(before, 1)) ^ _expand(x1, mask, to1, to2, to3, by1, by2, by4)
            e2 ^= (mask & _all_ones_if(before, 2)) ^ _expand(x2, mask, to1, to2, to3, by1, by2, by4)
            e3 ^= (mask & _all_ones_if(before, 3)) ^ _expand(x3, mask, to1, to2, to3, by1, by2, by4)

    r0 = tl.load(planes + K * LANES).to(tl.uint32, bitcast=True)
    r1 = tl.load(planes + (K + 1) * LANES).to(tl.uint32, bitcast=True)
    r2 = tl.load(planes + (K + 2) * LANES).to(tl.uint32, bitcast=True)
    r3 = tl.load(planes + (K + 3) * LANES).to(tl.uint32, bitcast=True)
    return _transpose(r0, r1, r2, e0, e1, e2, e3, r3)


@triton.jit
def store_tile(target, lane, left, w0, w1, w2, w3, w4, w5, w6, w7, LANES: tl.constexpr):
    """Write the words of a tile's lanes, two neighbouring ones at a time, to ``target``.

    ``left``: the number of word pairs from the tile's first one to the tensor's end.
    """
    words = target.to(tl.pointer_type(tl.int64)) + lane
    tl.store(words, _pair(w0, w1), mask=lane < left)
    tl.store(words + LANES, _pair(w2, w3), mask=lane + LANES < left)
    tl.store(words + 2 * LANES, _pair(w4, w5), mask=lane + 2 * LANES < left)
    tl.store(words + 3 * LANES, _pair(w6, w7), mask=lane + 3 * LANES < left)


@triton.jit
def _pair(first, second):
    """Return two words as one int64, ``first`` in the lower half."""
    return first.to(tl.int64) | (second.to(tl.int64) << 32)
