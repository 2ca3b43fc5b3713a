"""Lossless encoder on the CPU: exponents to k-bit codes with in-order escapes, chunk by chunk over threads.

Method: the exponents of trained weights carry about 2.6 bits (NeuZip, arXiv:2410.20650; DFloat11, arXiv:2504.11651),
so fixed 3-bit codes for 7 neighbouring exponents and 4-bit escapes for the others give 11.1 bits per bf16 Gaussian
weight. Entropy coders come nearer to 10.6, but their decoders walk bit by bit; fixed codes are unpacked four at a time.

The work is NumPy on chunks that fit the cache, one chunk a thread at a time (core/codec/lossless_chunks.py) in memory that
is used again (`scratch`), about 4 MB a thread whatever the tensor's size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from .lossless_chunks import Chunks, exponents_of
from .lossless_format import (
    DEFAULT_LANES,
    HEADER_BYTES,
    KIND_BY_DTYPE,
    MOST_SHIFT,
    Header,
    Kind,
    checksum,
)  # fmt: skip
from .packed import raw_bytes

CHUNK = 1 << 19  # elements that a thread holds at once: fewer cost calls, more leave the cache
SAMPLE_RUNS, SAMPLE_RUN = 256, 2048  # larger tensors: exponents are counted in evenly spread runs
ESCAPE_PENALTY = (
    8.0  # bits of size that one escape may cost before a wider code is taken: escapes decode slowly
)
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


def encode(
    tensor: torch.Tensor,
    *,
    lanes: int = DEFAULT_LANES,
    threads: int | None = None,
    code: Code | None = None,
    limit: int | None = None,
    pool: Executor | None = None,
) -> torch.Tensor | None:
    """The lossless blob of a CPU tensor (1-D uint8), or None where it would not be smaller than ``limit`` (the raw bytes).

    Any shape and strides; dtypes bf16, fp16, fp32, fp8 e4m3fn and e5m2 (others: None). ``lanes`` (32 to 256) sets
    the tile, 32 * lanes elements; ``threads`` defaults to the cores; ``code`` overrides what `choose_code` chooses.
    ``pool`` has that many threads, for who encodes many tensors: they keep their memory from one to the next.
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
    end, most, offsets, entries = header.escapes_at, 0, 0, []
    largest = max(1, CHUNK // header.tile)
    encoder = Chunks(header, flat, blob, largest)
    threads = max(1, min(threads or cores(), -(-header.tiles // largest)))
    rounds = -(-header.tiles // (largest * threads))
    chunks = _starts(header.tiles, rounds * threads)
    with contextlib.ExitStack() as stack:
        if threads > 1 and pool is None:
            pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="carom-encode"))
        results = _in_order(pool if threads > 1 else None, encoder, chunks, 4 * threads)
        stack.enter_context(contextlib.closing(results))
        for stream, sizes, flags in results:
            if end + len(stream) > limit:
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
        del encoder, results
        blob.resize(header.total, refcheck=False)
        header = header.with_crc(checksum(header, blob.data[HEADER_BYTES:], pool))
    blob[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return torch.from_numpy(blob)


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _starts(tiles: int, chunks: int) -> list[tuple[int, int]]:
    """(first tile, tiles) of at most ``chunks`` chunks of nearly the same size, so that no thread waits for another."""
    bounds = [tiles * i // chunks for i in range(chunks + 1)]
    return [(begin, end - begin) for begin, end in zip(bounds, bounds[1:], strict=False) if end > begin]


def _in_order(
    pool: Executor | None, encoder: Chunks, chunks: list[tuple[int, int]], ahead: int
) -> Generator[tuple[np.ndarray, np.ndarray, np.ndarray], None, None]:
    """Results of ``chunks`` in order, at most ``ahead`` of them waiting; when closed, none is being worked on."""
    if pool is None:  # here, where this thread's scratch memory is
        for first, count in chunks:
            yield encoder(first, count)
        return
    pending = [pool.submit(encoder, *chunk) for chunk in chunks[:ahead]]
    try:
        for position in range(len(chunks)):
            yield pending.pop(0).result()
            if position + ahead < len(chunks):
                pending.append(pool.submit(encoder, *chunks[position + ahead]))
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def sample_starts(count: int) -> list[tuple[int, int]] | None:
    """(first element, elements) of the runs that exponents are counted in; None for all of a smaller tensor."""
    if count <= SAMPLE_RUNS * SAMPLE_RUN * 2:
        return None
    return [(int(start), SAMPLE_RUN) for start in np.linspace(0, count - SAMPLE_RUN, SAMPLE_RUNS)]


def count_exponents(kind: Kind, flat: np.ndarray) -> np.ndarray:
    """int64 [256]: how often each exponent field occurs among ``flat`` (elements as unsigned integers)."""
    counts = np.zeros(256, np.int64)
    for start in range(0, len(flat), CHUNK):
        exponents = exponents_of(kind, flat[start : start + CHUNK])
        if len(exponents) >= 1 << 17 and len(exponents) % 2 == 0:
            # Two at a time: what bincount costs is a step for each number that it is given.
            pairs = np.bincount(exponents.view(np.uint16), minlength=1 << 16).reshape(256, 256)
            counts += pairs.sum(0) + pairs.sum(1)
        else:
            counts += np.bincount(exponents, minlength=256)
    return counts
