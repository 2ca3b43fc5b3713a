"""Reads packed files back from the drive and compares them with the checksums they carry."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator

from .header import show
from .index import TensorEntry, open_index
from .journal import PackError
from .packed_source import stored
from .rawio import aligned_buffer
from .reader import DiskReader, ReaderPolicy


def verify_packed(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Compare every tensor of a packed checkpoint with its recorded SHA-256; (tensors, bytes) compared.

    Raises PackError that names the tensors that differ, or says that the file records no checksums.
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
    entries = [stored(entry) for entry in index.entries.values()]  # the sums are of what stands in the file
    total = sum(entry.nbytes for entry in entries)
    bad, done = [], 0
    with Chunks() as chunks:
        for entry in entries:
            digest = hashlib.sha256()
            for part in chunks.of(entry):
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


class Chunks:
    """Gives tensors' bytes in parts while the next parts are being read, in three rotating buffers."""

    def __init__(self) -> None:
        # Small, because packing promises to stay small; 4 MiB reads are at a drive's full rate.
        policy = ReaderPolicy(workers=2, chunk=4 << 20)
        self._size = policy.chunk
        self._reader = DiskReader(policy)
        self._buffers = [aligned_buffer(self._size) for _ in range(3)]

    def of(self, entry: TensorEntry) -> Iterator[memoryview]:
        starts = list(range(0, entry.nbytes, self._size))
        ahead = len(self._buffers) - 1  # the remaining one is in the consumer's hands

        def ask(number: int):
            start = starts[number]
            size = min(self._size, entry.nbytes - start)
            buffer = self._buffers[number % len(self._buffers)]
            return self._reader.submit(entry, buffer, start=start, nbytes=size), buffer[:size]

        waiting = [ask(i) for i in range(min(ahead, len(starts)))]
        try:
            for number in range(len(starts)):
                if number + ahead < len(starts):
                    waiting.append(ask(number + ahead))
                handle, part = waiting.pop(0)
                handle.result()
                yield part
        finally:
            for handle, _ in waiting:
                handle.cancel()
                handle.wait()

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
