"""Lossless encoder on the CPU: exponents to k-bit codes with in-order escapes, chunk by chunk over threads.

Method: the exponents of trained weights carry about 2.6 bits (NeuZip, arXiv:2410.20650; DFloat11, arXiv:2504.11651),
so fixed 3-bit codes for 7 neighbouring exponents and 4-bit escapes for the others give 11.1 bits per bf16 Gaussian
weight. Entropy coders come nearer to 10.6, but their decoders walk bit by bit; fixed codes are unpacked four at a time.

The work is NumPy on chunks that fit the cache, one chunk a thread at a time (ufuncs release the GIL) in memory that is
used again (`scratch`), about 4 MB a thread whatever the tensor's size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from .lossless_format import (
    DEFAULT_LANES,
    HEADER_BYTES,
    KIND_BY_DTYPE,
    MOST_SHIFT,
    WIDE_BIT,
    Header,
    Kind,
    checksum,
)  # fmt: skip
from .packed import raw_bytes
from .scratch import scratch

CHUNK = 1 << 18  # elements that a thread holds at once: fewer cost calls, more leave the cache
SAMPLE_RUNS, SAMPLE_RUN = 256, 2048  # larger tensors: exponents are counted in evenly spread runs
ESCAPE_PENALTY = (
    8.0  # bits of size that one escape may cost before a wider code is taken: escapes decode slowly
)
_BYTE_ONES = np.uint64(0x0101010101010101)
_ONES_OF_BYTE = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Code:
    """What is chosen per tensor: ``k`` bits a code, the exponent ``base`` of code 0, 16 exponents of 4-bit escapes."""

    k: int
    base: int
    table: bytes


def choose_code(counts: np.ndarray, kind: Kind, tile: int, widths: Sequence[int] | None = None) -> Code:
    """The code with the least expected bits for exponents seen ``counts[e]`` times (with a price on escapes).

    ``widths``: the code widths to choose from, all that the dtype allows by default. Escapes take 4 bits if all those of their tile are among the 16 commonest ones, else 8.
    """
    share = counts.astype(np.float64) / max(1, int(counts.sum()))
    fields = 1 << kind.exponent_bits
    best: tuple[float, Code] | None = None
    for k in widths or range(1, kind.max_k + 1):
        window = (1 << k) - 1
        inside = np.convolve(share[:fields], np.ones(window), "valid")[: kind.max_base(k) + 1]
        base = int(np.argmax(inside))
        outside = share[:fields].copy()
        outside[base : base + window] = 0
        table = np.argsort(-outside, kind="stable")[:16]
        escaped = float(outside.sum())
        rare = max(0.0, escaped - float(outside[table].sum()))
        bits = k + escaped * (4 + ESCAPE_PENALTY + 4 * min(1.0, tile * rare))
        if best is None or bits < best[0]:
            best = bits, Code(k, base, bytes(sorted(int(e) for e in table)))
    assert best is not None
    return best[1]


def split(kind: Kind, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray | None, np.ndarray]:
    """Elements as unsigned integers -> (byte planes, rest bits or None, exponents), all uint8."""
    # NumPy shifts uint8 to the left one by one, 15 times slower than it multiplies: hence the products.
    high = x if kind.itemsize == 1 else (x >> (8 * kind.itemsize - 8)).astype(np.uint8)
    if kind.name in ("bf16", "fp32"):
        low = (x >> 16).astype(np.uint8) if kind.itemsize == 4 else x.astype(np.uint8)
        exponent = (x >> (8 * kind.itemsize - 9)).astype(np.uint8)
        high ^= low
        high &= 0x80
        low ^= high  # the exponent's lowest bit gives way to the sign
        if kind.itemsize == 2:
            return [low], None, exponent
        return [x.astype(np.uint8), (x >> 8).astype(np.uint8), low], None, exponent
    if kind.name == "e4m3":
        return [], (high >> 7) * np.uint8(8) | (high & 7), high >> 3 & 15
    rest = (high >> 7) * np.uint8(4) | (high & 3)
    return ([x.astype(np.uint8)] if kind.itemsize == 2 else []), rest, high >> 2 & 31


def encode(
    tensor: torch.Tensor,
    *,
    lanes: int = DEFAULT_LANES,
    threads: int | None = None,
    code: Code | None = None,
    limit: int | None = None,
) -> torch.Tensor | None:
    """The lossless blob of a CPU tensor (1-D uint8), or None where it would not be smaller than ``limit`` (the raw bytes).

    Any shape and strides; dtypes bf16, fp16, fp32, fp8 e4m3fn and e5m2 (others: None). ``lanes`` (32 to 256) sets
    the tile, 32 * lanes elements; ``threads`` defaults to the cores; ``code`` overrides what `choose_code` chooses.
    """
    kind = KIND_BY_DTYPE.get(tensor.dtype)
    if kind is None or tensor.numel() < 8 or lanes not in (32, 64, 128, 256):
        return None
    flat = raw_bytes(tensor).numpy().view(_UNSIGNED[kind.itemsize])
    if code is None:
        runs = sample_starts(len(flat))
        sample = flat if runs is None else np.concatenate([flat[at : at + n] for at, n in runs])
        code = choose_code(count_exponents(kind, sample), kind, 32 * lanes)
    tail = flat[len(flat) // 8 * 8 :].tobytes().ljust(32, b"\0")
    header = Header(kind, code.k, lanes, code.base, len(flat), 0, code.table, tail, 0)
    limit = header.raw_nbytes if limit is None else limit
    if header.total >= limit:
        return None
    blob = np.empty(limit, np.uint8)  # pages beyond what is written are never touched, and given back below
    encoder = _Chunks(header, flat, blob)
    end, most, offsets, entries = header.escapes_at, 0, 0, []
    step = max(1, CHUNK // header.tile)
    starts = range(0, header.tiles, step)
    with ThreadPoolExecutor(max(1, min(threads or cores(), len(starts)))) as pool:
        for stream, sizes, flags in _in_order(pool, encoder, starts, step):
            if end + len(stream) > limit:
                pool.shutdown(wait=True, cancel_futures=True)
                return None
            blob[end : end + len(stream)] = stream
            before = offsets + np.cumsum(sizes) - sizes
            entries.append(before | flags)
            end, offsets = end + len(stream), offsets + len(stream)
            most = max(most, int((flags >> MOST_SHIFT).max()))
        header = Header(kind, code.k, lanes, code.base, len(flat), offsets, code.table, tail, most)
        if header.total >= limit:
            return None
        blob[end : header.total] = 0
        blob[header.tiles_at : header.tiles_at + 8 * header.tiles] = np.concatenate(entries).view(np.uint8)
        blob[header.tiles_at + 8 * header.tiles : header.escapes_at] = 0
        del encoder
        blob.resize(header.total, refcheck=False)
        header = header.with_crc(checksum(header, blob.data[HEADER_BYTES:], pool))
    blob[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return torch.from_numpy(blob)


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_order(pool: ThreadPoolExecutor, encoder: _Chunks, starts: range, step: int) -> Iterator[tuple]:
    """Results of chunks in order, with a bounded number of them waiting."""
    if len(starts) == 1:  # here, where this thread's scratch memory is
        yield encoder(starts[0], step)
        return
    ahead = 4 * pool._max_workers
    pending = [pool.submit(encoder, first, step) for first in starts[:ahead]]
    for position in range(len(starts)):
        yield pending.pop(0).result()
        if position + ahead < len(starts):
            pending.append(pool.submit(encoder, starts[position + ahead], step))


def sample_starts(count: int) -> list[tuple[int, int]] | None:
    """(first element, elements) of the runs that exponents are counted in; None for all of a smaller tensor."""
    if count <= SAMPLE_RUNS * SAMPLE_RUN * 2:
        return None
    return [(int(start), SAMPLE_RUN) for start in np.linspace(0, count - SAMPLE_RUN, SAMPLE_RUNS)]


def count_exponents(kind: Kind, flat: np.ndarray) -> np.ndarray:
    """int64 [256]: how often each exponent field occurs among ``flat`` (elements as unsigned integers)."""
    counts = np.zeros(256, np.int64)
    for start in range(0, len(flat), CHUNK):
        counts += np.bincount(split(kind, flat[start : start + CHUNK])[2], minlength=256)
    return counts


def ones_of(mask: np.ndarray) -> np.ndarray:
    """Set bits of each uint32."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.bitwise_count(mask)
    by_byte = _ONES_OF_BYTE.take(mask.view(np.uint8)).view(np.uint32)
    return by_byte.reshape(mask.shape) * np.uint32(0x01010101) >> 24


class _Chunks:
    """Encodes runs of tiles into the fixed sections of ``blob``; escapes are handed back. Any thread may call it."""

    def __init__(self, header: Header, flat: np.ndarray, blob: np.ndarray) -> None:
        self.header, self.flat, self.blob = header, flat, blob
        self.nibble_of = np.full(256, 255, np.uint8)
        self.nibble_of[np.frombuffer(header.escape_table, np.uint8)] = np.arange(16, dtype=np.uint8)
        lane, bit = np.arange(header.lanes)[:, None], np.arange(32)
        self.element_of_bit = (
            8 * ((bit >> 1 & 3) * header.lanes + lane) + (bit & 1) * 4 + (bit >> 3)
        ).reshape(-1)
        bits = blob[header.bits_at : header.tiles_at].view(np.uint32)
        self.bits = bits.reshape(header.tiles, header.planes, header.lanes)

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tiles first .. first + count: (escape bytes, bytes of each tile, flag bits of each tile's table entry)."""
        header = self.header
        tiles = min(count, header.tiles - first)
        start, end = first * header.tile, min((first + tiles) * header.tile, header.words * 4)
        targets = []
        for i in range(header.kind.byte_planes):
            at = HEADER_BYTES + i * header.byte_plane_stride
            targets.append(self.blob[at + start : at + end])
            if end == header.words * 4:
                self.blob[at + end : at + header.byte_plane_stride] = 0
        rest, exponent = self._split(self.flat[start:end], targets)
        escape = np.uint8((1 << header.k) - 1)
        whole = scratch("combined", tiles * header.tile, np.uint8)
        whole[end - start :] = 0  # code 0 where the last tile has no elements
        combined = whole[: end - start]
        np.subtract(exponent, np.uint8(header.base), out=combined)
        # NumPy's minimum of uint8 takes five times as long as these four.
        out_of_reach = scratch("above", end - start, np.bool_)
        np.greater_equal(combined, escape, out=out_of_reach)
        above = out_of_reach.view(np.uint8)
        np.multiply(above, np.uint8(255), out=above)
        np.bitwise_or(combined, above, out=combined)
        np.bitwise_and(combined, escape, out=combined)
        if rest is not None:
            combined |= rest * np.uint8(1 << header.k)
        mask = self._bit_planes(whole.view(np.uint64).reshape(tiles, 4, header.lanes), first)
        return self._escapes(mask, exponent)

    def _split(self, x: np.ndarray, targets: list[np.ndarray]) -> tuple[np.ndarray | None, np.ndarray]:
        """`split`, with the byte planes written to ``targets``: (rest bits, exponents)."""
        kind = self.header.kind
        if kind.name not in ("bf16", "fp32"):
            planes, rest, exponent = split(kind, x)
            for target, plane in zip(targets, planes, strict=True):
                target[:] = plane
            return rest, exponent
        exponent = scratch("exponents", len(x), np.uint8)
        high = scratch("high bytes", len(x), np.uint8)
        shifted = scratch("shifted", len(x), x.dtype.type)
        for i, target in enumerate(targets):
            if i:
                np.right_shift(x, 8 * i, out=shifted)
            np.copyto(target, shifted if i else x, casting="unsafe")
        np.right_shift(x, 8 * kind.itemsize - 9, out=shifted)
        np.copyto(exponent, shifted, casting="unsafe")
        np.right_shift(shifted, 1, out=shifted)
        np.copyto(high, shifted, casting="unsafe")
        np.bitwise_and(high, np.uint8(0x80), out=high)
        np.bitwise_and(targets[-1], np.uint8(0x7F), out=targets[-1])
        np.bitwise_or(targets[-1], high, out=targets[-1])
        return None, exponent

    def _bit_planes(self, words: np.ndarray, first: int) -> np.ndarray:
        """Writes all bit planes of uint64 ``words`` [tiles, 4, lanes] (8 elements each); returns the escape mask."""
        header = self.header
        tiles, _, lanes = words.shape
        even, odd, gathered, moved = (
            scratch(name, tiles * lanes, np.uint64).reshape(tiles, lanes)
            for name in ("even", "odd", "gathered", "moved")
        )
        mask = scratch("mask", tiles * lanes, np.uint32).reshape(tiles, lanes)
        ones = _BYTE_ONES * np.uint64(17)
        for nibble in range(0, header.planes, 4):
            part = words if header.planes <= 4 else words >> np.uint64(nibble) & _BYTE_ONES * np.uint64(15)
            # Two words a byte, rows 0 and 2, and 1 and 3, so that one operation takes a bit of both.
            for row, both in ((0, even), (1, odd)):
                np.left_shift(part[:, row + 2], np.uint64(4), out=both)
                np.bitwise_or(both, part[:, row], out=both)
            for j in range(nibble, min(nibble + 4, header.planes)):
                np.right_shift(odd, np.uint64(j - nibble), out=gathered)
                np.bitwise_and(gathered, ones, out=gathered)
                np.left_shift(gathered, np.uint64(2), out=gathered)
                np.right_shift(even, np.uint64(j - nibble), out=moved)
                np.bitwise_and(moved, ones, out=moved)
                np.bitwise_or(gathered, moved, out=gathered)
                # The upper four elements go to the odd bits: bit 32 + b to bit b + 1.
                np.right_shift(gathered, np.uint64(31), out=moved)
                np.bitwise_or(gathered, moved, out=gathered)
                plane = self.bits[first : first + tiles, j]
                np.copyto(plane, gathered, casting="unsafe")
                if j == 0:
                    np.copyto(mask, plane)
                elif j < header.k:
                    np.bitwise_and(mask, plane, out=mask)
        return mask

    def _escapes(self, mask: np.ndarray, exponent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tile = self.header.tile
        found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_))
        by_lane = ones_of(mask)
        counts = by_lane.sum(1, dtype=np.int64)
        flags = by_lane.max(1).astype(np.int64) << MOST_SHIFT
        values = exponent.take((found & -tile) + self.element_of_bit.take(found & (tile - 1)))
        nibbles = self.nibble_of.take(values)
        if len(found) and nibbles.max() == 255:
            return self._wide(found // tile, counts, flags, values, nibbles)
        odd = counts & 1  # a tile's odd last half byte is zero
        half = np.zeros(len(found) + int(odd.sum()), np.uint8)
        half[np.arange(len(found)) + np.repeat(np.cumsum(odd) - odd, counts)] = nibbles
        return half[0::2] | (half[1::2] * np.uint8(16)), (counts + 1) >> 1, flags

    def _wide(
        self, tile: np.ndarray, counts: np.ndarray, flags: np.ndarray, values: np.ndarray, nibbles: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`_escapes` where some tiles (``tile``: of each escape) have exponents that are not in the table."""
        wide = np.zeros(len(counts), np.int64)
        wide[tile[nibbles == 255]] = 1
        sizes = ((counts << wide) + 1) >> 1
        start = 2 * (np.cumsum(sizes) - sizes) - ((np.cumsum(counts) - counts) << wide)
        at = start[tile] + (np.arange(len(tile)) << wide[tile])
        of_wide = wide[tile] == 1
        half = np.zeros(2 * int(sizes.sum()), np.uint8)
        half[at] = np.where(of_wide, values & 15, nibbles)
        half[at[of_wide] + 1] = values[of_wide] >> 4
        return half[0::2] | (half[1::2] << 4), sizes, flags | (wide << WIDE_BIT)
