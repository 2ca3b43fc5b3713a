"""Defines `ResidentCache`: the host cache through which the weights of a file that stay on the device (residents) pass.

A load is a group of residents that are loaded together. Each load is read into buffers in host memory, ahead of its use, and
copied from there to the device once. Packed bytes are verified, and decoded on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..checkpoint.direct_io import ALIGN as PAGE
from ..checkpoint.disk_reader import DiskReader
from ..common.errors import WeightsError
from ..common.sizes import MIB
from ..device.engine import Engine
from ..device.staging import Staging
from ..host.arena import HostArena
from ..host.blob_checksums import BlobChecks
from ..host.cache_buffer import CacheFigures
from ..host.cache_pieces import BufferPlan, cut
from ..host.host_cache import HostCache
from ..host.kept_pieces import KeptPieces
from ..plan.residency import round_up
from .resident_loads import Load

_BUFFER = 16 * MIB  # bytes of each of a few buffers
_BUFFERS = 4


def few_buffers(sizes: Sequence[int], budget: int, share: int, least: int = 0) -> BufferPlan | None:
    """Return a plan of a few buffers that all loads pass through.

    ``sizes``: the bytes of the loads. ``budget``: bytes of host memory. Each buffer takes at most ``budget // share`` bytes,
    but at least ``least``. Returns None if that is less than one page.
    """
    size = max(least, min(_BUFFER, round_up(max(sizes, default=0), PAGE), budget // share // PAGE * PAGE))
    if not 0 < size <= budget:
        return None
    count = min(_BUFFERS, budget // size, sum(-(-nbytes // size) for nbytes in sizes))
    return BufferPlan(count, size, count, False)


class ResidentCache:
    """The cache of ``loads``, in the order in which they are expected to be used, in the buffers that ``buffers`` plans. Reading
    begins at once.

    ``arena``: allocates the buffers. ``kept``: the bytes of earlier layouts that are in RAM. ``keeps``: whether what the
    buffers hold at the end is added to these.
    """

    def __init__(
        self, engine: Engine, loads: Sequence[Load], reader: DiskReader, buffers: BufferPlan, arena: HostArena,
        kept: KeptPieces, keeps: bool,
    ) -> None:  # fmt: skip
        self._engine, self._keeps = engine, keeps
        self._numbers = {item: number for number, item in enumerate(loads)}
        self._pieces = cut([item.read for item in loads], buffers.nbytes)
        blobs = [item.blobs for item in loads]
        self._checks = BlobChecks(self._pieces, blobs)
        self._cache = HostCache(
            self._pieces, buffers, arena, reader, engine.landed, engine.synchronize, "belady",
            self._checks.checksum if any(blobs) else None, kept,
        )  # fmt: skip
        if keeps:
            self._cache.adopt(range(len(loads)))
        # else: with few buffers, what was adopted for later loads would be evicted for the first ones
        self.expect(loads)

    @property
    def limit_bytes(self) -> int:
        """The most bytes of host memory that the buffers take."""
        return self._cache.limit_bytes

    def expect(self, loads: Iterable[Load]) -> None:
        """Read ``loads`` ahead, in this order."""
        self._cache.expect([self._numbers[item] for item in loads])

    def has(self, item: Load) -> bool:
        """Return whether all bytes of ``item`` are in RAM."""
        return self._cache.has(self._numbers[item])

    def copy(self, item: Load, staging: Staging | None) -> Any:
        """Enqueue the copies of ``item`` to the device, and their decoding. Returns the event at the end.

        ``staging``: device memory from which packed bytes are decoded. Waits for bytes that are not in RAM. Raises
        WeightsError; then no copy is under way, and a later call tries again.
        """
        try:
            return self._copy(item, staging)
        except Exception:
            (item.engine or self._engine).synchronize()
            raise

    def _copy(self, item: Load, staging: Staging | None) -> Any:
        engine, after, found, event = item.engine or self._engine, list[Any](), list[Any](), None
        target, number = item.buffer, self._numbers[item]
        if item.decodes:
            assert staging is not None
            target, after = staging.take(item.read[0])
        pieces = self._pieces[number]
        while pieces:
            acquired = self._cache.acquire(pieces)  # all pieces, or those before one that is not in RAM yet
            taken, pieces = pieces[: len(acquired)], pieces[len(acquired) :]
            copies: list[Any] = []
            try:
                for piece, (source, inspection) in zip(taken, acquired, strict=True):
                    end = piece.start + piece.nbytes
                    event, _ = engine.copy_in(target[piece.start : end], source, after, False)
                    copies.append(event)
                    found.append(inspection)
                    after = []
            finally:
                self._cache.release(taken, copies)
                acquired.clear()  # the traceback of an exception would keep them alive
        if item.decodes:
            assert staging is not None
            staging.release_after(event)
        if item.blobs:
            try:
                self._checks.verify(number, found)
            except WeightsError:
                engine.synchronize()
                self._cache.discard(number)  # so that a later call reads them again
                raise
        if item.decodes:
            assert staging is not None and item.wire is not None and item.wire.decoder is not None
            event, _ = engine.decode(item.wire.decoder, target, item.buffer, (event,), False)
            staging.release_after(event)
        return event

    def recover(self) -> None:
        """Drop what is being read, after an interrupt. Called while the device is idle; `expect` must follow."""
        self._cache.recover()

    def close(self) -> None:
        """End all reads, and release the buffers. No copy may be under way."""
        self._cache.close(keep=self._keeps)

    def figures(self) -> CacheFigures:
        """Return the bytes read from disk, the seconds of waiting, and the host memory of the buffers."""
        return self._cache.figures()

    def reads(self) -> list[tuple[str, float, float, int]]:
        """Return recent reads as (label, start, end, bytes)."""
        return self._cache.reads()
