"""Lossless encoder on the CPU: exponents become k-bit codes, and rare exponents become escapes that are
stored in order.

Method: the exponents of trained weights carry about 2.6 bits of information (NeuZip, arXiv:2410.20650;
DFloat11, arXiv:2504.11651). So fixed 3-bit codes for 7 neighbouring exponents and 4-bit escapes for the others
give 11.1 bits for each bf16 Gaussian weight. Entropy coders come closer to the minimum of 10.6 bits (2.6 bits
for the exponent, 8 for sign and mantissa), but their decoders work bit by bit, while codes of a fixed size are
unpacked four at a time.

The terms tile, lane, byte plane, bit plane and rest bits are defined in core/codec/lossless_format.py.

The work is done by NumPy on chunks that fit the CPU's cache, each thread on one chunk at a time
(core/codec/lossless_chunks.py). The temporary arrays are reused from chunk to chunk (`scratch`) and take
about 4 MB a thread whatever the tensor's size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from .blob_metadata import raw_bytes
from .lossless_chunks import ChunkEncoder, exponents_of
from .lossless_format import (
    DEFAULT_LANES,
    HEADER_BYTES,
    KIND_BY_DTYPE,
    MOST_SHIFT,
    Header,
    Kind,
    checksum,
)  # fmt: skip

# Elements that a thread encodes at a time: smaller chunks cost more NumPy calls, larger ones do not fit the
# CPU's cache.
CHUNK = 1 << 19
# In larger tensors, exponents are counted in this many evenly spread runs of this many elements.
SAMPLE_RUNS, SAMPLE_RUN = 256, 2048
# Bits that are added to the size of each escape when code widths are compared, because escapes are slow to
# decode.
ESCAPE_PENALTY = 8.0
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Code:
    """The parameters of a tensor's exponent code, which are chosen for each tensor.

    ``k``: the bits of a code. ``base``: the exponent of code 0. ``table``: the 16 exponents that 4-bit
    escapes stand for; for fp8 e4m3, the three that second codes stand for, then zeros.
    """

    k: int
    base: int
    table: bytes


def choose_code(counts: np.ndarray, kind: Kind, tile: int, widths: Sequence[int] | None = None) -> Code:
    """Return the code with the fewest expected bits for exponents that occur ``counts[e]`` times, with a
    penalty for escapes.

    ``tile``: elements in a tile. ``widths``: the code widths (k) to choose from; by default all that the
    dtype allows. An escape takes 4 bits if all escapes of its tile are among the table's 16 exponents, else 8
    bits. In version 2 of the format it takes 2 bits, or 6 if its exponent is not among the table's three. There
    is no penalty, because the decoder's time does not depend on the number of escapes.
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
        table = np.argsort(-outside, kind="stable")[: 3 if kind.two_level else 16]
        escaped = float(outside.sum())
        rare = max(0.0, escaped - float(outside[table].sum()))
        if kind.two_level:
            bits = k + 2 * escaped + 4 * rare
        else:
            bits = k + escaped * (4 + ESCAPE_PENALTY + 4 * min(1.0, tile * rare))
        if best is None or bits < best[0]:
            best = bits, Code(k, base, bytes(sorted(int(e) for e in table)).ljust(16, b"\0"))
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
    """Return the lossless blob of a CPU tensor (1-D uint8), or None where the blob would take ``limit`` bytes
    or more.

    ``limit`` defaults to the tensor's bytes. Any shape and strides; the dtypes bf16, fp16, fp32, fp8 e4m3fn
    and e5m2 (None is returned for others). ``lanes`` (32 to 256) sets the tile, which is 32 * lanes elements.
    ``threads`` defaults to the number of CPU cores. ``code`` replaces the result of `choose_code`. ``pool``:
    an executor of that many threads, for callers that encode many tensors: the threads then keep their
    scratch memory from tensor to tensor.
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
    # The pages behind the last written byte are never touched, so they cost no memory; `resize` below frees
    # them.
    blob = np.empty(limit, np.uint8)
    write_at, most, escape_bytes, entries = header.escapes_at, 0, 0, []
    largest = max(1, CHUNK // header.tile)
    encoder = ChunkEncoder(header, flat, blob, largest)
    threads = max(1, min(threads or cores(), -(-header.tiles // largest)))
    rounds = -(-header.tiles // (largest * threads))
    chunks = _split_evenly(header.tiles, rounds * threads)
    with contextlib.ExitStack() as stack:
        if threads > 1 and pool is None:
            pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="carom-encode"))
        results = _ordered_results(pool if threads > 1 else None, encoder, chunks, 4 * threads)
        stack.enter_context(contextlib.closing(results))
        for stream, sizes, flags in results:
            if write_at + len(stream) > limit:
                return None
            blob[write_at : write_at + len(stream)] = stream
            starts = escape_bytes + np.cumsum(sizes) - sizes
            entries.append((starts // 8 if kind.two_level else starts) | flags)
            write_at, escape_bytes = write_at + len(stream), escape_bytes + len(stream)
            most = 0 if kind.two_level else max(most, int((flags >> MOST_SHIFT).max()))
        header = Header(kind, code.k, lanes, code.base, len(flat), escape_bytes, code.table, tail, most)
        if header.total >= limit:
            return None
        blob[write_at : header.total] = 0
        blob[header.tiles_at : header.tiles_at + 8 * header.tiles] = np.concatenate(entries).view(np.uint8)
        blob[header.tiles_at + 8 * header.tiles : header.escapes_at] = 0
        del encoder, results
        blob.resize(header.total, refcheck=False)
        header = header.with_crc(checksum(header, blob.data[HEADER_BYTES:], pool))
    blob[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return torch.from_numpy(blob)


def cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _split_evenly(tiles: int, chunks: int) -> list[tuple[int, int]]:
    """Divide ``tiles`` into at most ``chunks`` chunks of nearly the same size; return (first tile, tiles) of
    each.

    With equal chunks no thread has to wait for another at the end.
    """
    bounds = [tiles * i // chunks for i in range(chunks + 1)]
    return [(begin, end - begin) for begin, end in zip(bounds, bounds[1:], strict=False) if end > begin]


def _ordered_results(
    pool: Executor | None, encoder: ChunkEncoder, chunks: list[tuple[int, int]], ahead: int
) -> Generator[tuple[np.ndarray, np.ndarray, np.ndarray], None, None]:
    """Yield the encoder's results for ``chunks`` in their order, with at most ``ahead`` chunks submitted at a
    time.

    When the generator is closed, no thread works on a chunk any more.
    """
    if pool is None:  # without a pool, encode on the calling thread, which has scratch memory of its own
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
    """Return (first element, number of elements) of each run in which exponents are counted, or None for a
    tensor so small that all of its exponents are counted.
    """
    if count <= SAMPLE_RUNS * SAMPLE_RUN * 2:
        return None
    return [(int(start), SAMPLE_RUN) for start in np.linspace(0, count - SAMPLE_RUN, SAMPLE_RUNS)]


def count_exponents(kind: Kind, flat: np.ndarray) -> np.ndarray:
    """Return int64 [256]: how often each exponent occurs in ``flat`` (elements viewed as unsigned
    integers).
    """
    counts = np.zeros(256, np.int64)
    for start in range(0, len(flat), CHUNK):
        exponents = exponents_of(kind, flat[start : start + CHUNK])
        if len(exponents) >= 1 << 17 and len(exponents) % 2 == 0:
            # Count pairs of exponents as 16-bit numbers: bincount's time grows with the number of its inputs.
            pairs = np.bincount(exponents.view(np.uint16), minlength=1 << 16).reshape(256, 256)
            counts += pairs.sum(0) + pairs.sum(1)
        else:
            counts += np.bincount(exponents, minlength=256)
    return counts
