"""Verification of packed files: reads every tensor back from the drive and compares its SHA-256 with the
recorded one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator

from ...core.checkpoint.direct_io import aligned_buffer
from ...core.checkpoint.disk_reader import DiskReader, ReaderPolicy
from ...core.checkpoint.header import show
from ...core.checkpoint.index import TensorEntry, open_index
from ...core.checkpoint.packed_source import stored_entry
from .journal import PackError


def verify_packed(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Compare every tensor of a packed checkpoint with its recorded SHA-256; return (tensors, bytes)
    compared.

    ``progress(done, total)``: called with numbers of bytes. Raises PackError where tensors differ (the first
    is named), are missing, or have no recorded checksum.
    """
    index = open_index(path)
    sums = index.checksums()
    unknown = [name for name in index if name not in sums]
    if unknown:
        raise PackError(
            f"{index.path}: no checksum for {len(unknown)} tensors, first {show(unknown[0])}; "
            "only files written by carom pack record them"
        )
    absent = [name for name in sums if name not in index]
    if absent:
        raise PackError(
            f"{index.path}: {len(absent)} tensors that were packed are gone, first {show(absent[0])}"
        )
    # Checksums are of the bytes in the file, not decoded.
    entries = [stored_entry(entry) for entry in index.entries.values()]
    total = sum(entry.nbytes for entry in entries)
    bad, done = [], 0
    with ChunkReader() as chunks:
        for entry in entries:
            digest = hashlib.sha256()
            for part in chunks.read(entry):
                digest.update(part)
                done += len(part)
                if progress:
                    progress(done, total)
            if digest.hexdigest() != sums[entry.name]:
                bad.append(entry.name)
    if bad:
        raise PackError(
            f"{index.path}: {len(bad)} tensors differ from what was packed, first {show(bad[0])}. "
            "The drive or a copy damaged them; pack the source again."
        )
    return len(index), done


class ChunkReader:
    """A reader that yields the bytes of tensors in chunks and reads the next chunks meanwhile, in three
    rotating buffers.
    """

    def __init__(self) -> None:
        # Small buffers, because packing must need little memory; reads of 4 MiB already reach a drive's full
        # rate.
        policy = ReaderPolicy(workers=2, chunk=4 << 20)
        self._size = policy.chunk
        self._reader = DiskReader(policy)
        self._buffers = [aligned_buffer(self._size) for _ in range(3)]

    def read(self, entry: TensorEntry) -> Iterator[memoryview]:
        """Yield the bytes of ``entry`` in chunks; each is valid until the next one is taken."""
        starts = list(range(0, entry.nbytes, self._size))
        ahead = len(self._buffers) - 1  # the caller uses the remaining buffer

        def submit(number: int):
            """Start the read of chunk ``number``; return its handle and its buffer."""
            start = starts[number]
            size = min(self._size, entry.nbytes - start)
            buffer = self._buffers[number % len(self._buffers)]
            return self._reader.submit(entry, buffer, start=start, nbytes=size), buffer[:size]

        waiting = [submit(i) for i in range(min(ahead, len(starts)))]
        try:
            for number in range(len(starts)):
                if number + ahead < len(starts):
                    waiting.append(submit(number + ahead))
                handle, part = waiting.pop(0)
                handle.result()
                yield part
        finally:
            for handle, _ in waiting:
                handle.cancel()
                handle.wait()

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
