"""Slots filled from a host cache that is filled from disk: the streamer of weights that come from a file.

The host waits for a read only when the unit that is needed now is not in RAM; what is foreseen is copied to the
device only once it is.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from .account import FromDisk
from .checkpoint import Stand
from .disk import Disk
from .disk_tensors import DiskOwner
from .errors import UnsupportedError
from .meter import Meter
from .simulated import SimulatedEngine
from .slots import Slot
from .store.arena import HostArena, storage_bytes
from .store.cache import CacheFigures, HostCache
from .store.pieces import Piece, Placed, choose_buffers, cut
from .store.rawio import ALIGN as PAGE
from .streamed import Streamed
from .streamer import Streamer
from .transfer import Engine


class DiskStreamer(Streamer):
    """Fills slots from a host cache that is filled from disk."""

    cache: HostCache | None = None
    _last_figures = CacheFigures()
    _pieces: list[list[Piece]] = []

    def __init__(self, engine: Engine, region_bytes: int, meter: Meter, disk: Disk) -> None:
        super().__init__(engine, region_bytes, meter)
        self._disk = disk

    def start(self, arena: HostArena) -> None:
        super().start(arena)
        units = [
            (unit.nbytes, [Placed(o.entry.offset, o.stand.bound.segments) for o in _owners(unit)])
            for unit in self.units
        ]
        if not units:
            return
        buffers = choose_buffers([nbytes for nbytes, _ in units], self._disk.cache_bytes)
        self._pieces = cut(units, buffers.nbytes)
        self.cache = HostCache(
            self._pieces, buffers, arena, self._disk.reader(buffers.nbytes), self.engine.landed,
            self.engine.synchronize, self._disk.checkpoint.settings.eviction,
        )  # fmt: skip
        self.meter.disk_bytes = self.cache.total_read
        if not isinstance(self.engine, SimulatedEngine):
            self.meter.disk_reads = self.cache.reads
        self.cache.expect(self.order.upcoming())  # the first units are on their way before anybody asks

    def take(self, stand: Stand, value: torch.Tensor) -> bool:
        """Give a streamed weight another value; False where the cache must first become smaller to make room.

        Raises BudgetError where it cannot, UnsupportedError where a pass is under way.
        """
        with self.lock:
            held = 0 if self.cache is None else self.cache.limit_bytes
            grown = self._disk.checkpoint.changed_bytes + (stand.bound.nbytes if stand.changed is None else 0)
            if held + grown > self._disk.ram:
                if not self.idle:
                    raise UnsupportedError(
                        f"no room in ram for a new value of {stand.name} during a pass; write it between passes"
                    )
                choose_buffers([unit.nbytes for unit in self.units], self._disk.ram - grown)
                return False
            stand.change(value)
            for unit in self.units:  # what is in slots is no longer trusted
                if any(owner.stand is stand for owner in _owners(unit)):
                    unit.epoch += 1
            return True

    def account(self) -> FromDisk:
        """Figures for the report."""
        cache = self._last_figures if self.cache is None else self.cache.figures()
        disk, load = self._disk, self._disk.load
        changed = disk.checkpoint.changed_bytes
        return FromDisk(
            ram_budget_bytes=disk.ram,
            ram_peak_bytes=max(load.held_bytes, cache.held_bytes + changed),
            read_bytes=load.read_bytes + cache.read_bytes,
            reading_seconds=load.reading_seconds + cache.reading_seconds,
            wait_seconds=cache.late_seconds,
            notes=(*disk.checkpoint.notes, *self._packing()),
        )

    def _packing(self) -> tuple[str, ...]:
        """What `carom pack` would gain for this session, in words."""
        copied = sum(
            read.nbytes
            for pieces in self._pieces
            for piece in pieces
            for read in piece.reads
            if (read.offset - read.at) % PAGE
        )
        count = sum(len(piece.reads) for pieces in self._pieces for piece in pieces)
        whole = sum(len(pieces) for pieces in self._pieces)
        if not copied or self._disk.checkpoint.index.packed:
            return ()
        return (
            f"the file is not packed: {count} reads a pass instead of {whole}, and {copied} bytes copied once more "
            "in host memory; `carom pack` rewrites it in streaming order",
        )

    # -- bytes

    def _bring(self, unit: Streamed, target: torch.Tensor, after: list[Any]) -> Any:
        """The unit's pieces, each as soon as it is there; the event of the last copy."""
        cache, engine, meter, backward = self.cache, self.engine, self.meter, ops.in_backward()
        assert cache is not None
        event: Any = None
        for piece in self._pieces[unit.index]:
            before = engine.mark() if meter.timing and not cache.has(unit.index) else None
            source = cache.need(piece)
            if before is not None:
                meter.waited(before, engine.mark(), unit.name, backward)
            try:
                # No name for the slice: a traceback would keep it, and with it the slot.
                event, marks = engine.copy_in(
                    target[piece.start : piece.start + piece.nbytes], source, after, meter.timing
                )
            except BaseException:
                cache.forget(piece)
                raise
            cache.used(piece, event)
            self._count(unit, marks, piece.nbytes, backward, piece.number == 0)
            after = []
        for owner in _owners(unit):
            if owner.stand.changed is not None:
                start, end = owner.entry.offset, owner.entry.offset + owner.entry.nbytes
                event, _ = engine.copy_in(target[start:end], storage_bytes(owner.stand.changed), after, False)
        return event

    def _count(self, unit: Streamed, marks: Any, nbytes: int, backward: bool, first: bool) -> None:
        if self.engine.blocking and marks is not None:
            self.meter.waited(marks[0], marks[1], unit.name, backward)
        raw = unit.unit.raw_bytes if first else 0
        self.meter.copied(unit.name, marks, nbytes, raw, backward, int(first))

    # -- looking ahead

    def _fetch(self, unit: Streamed) -> Any:
        self._expect(unit)
        return super()._fetch(unit)

    def _ready(self, unit: Streamed) -> bool:
        return self.cache is not None and self.cache.has(unit.index)

    def _look_ahead(self) -> None:
        """As the base does, for units that are in RAM; the others are read meanwhile."""
        if self.cache is None:
            return
        super()._look_ahead()
        self._expect(None)

    def _still_stuck(self, released: Slot) -> bool:
        # Until everything is in RAM a read may have ended since, and the cache wants to know of every use.
        return self.cache is not None and self.cache.complete and super()._still_stuck(released)

    def _expect(self, unit: Streamed | None) -> None:
        """Tell the cache what it will be asked for: the order, less what is in slots and needed before they are reused."""
        if self.cache is None or self.cache.complete:
            return
        units = [] if unit is None else [unit.index]
        later: list[int] = []  # served by their slots this time: it is the next round that they are needed in
        room, served = self.region.nbytes, set()
        for index in self.order.upcoming():
            if room >= 0 and index not in served:
                room -= self.units[index].nbytes
                served.add(index)
                if room >= 0 and self.units[index].slot is not None:
                    later.append(index)
                    continue
            units.append(index)
        self.cache.expect(units + later)

    # -- end

    def close(self) -> None:
        super().close()
        if self.cache is not None:
            self._last_figures = self.cache.figures()
            self.cache.close()
            self.cache = None


def _owners(unit: Streamed) -> list[DiskOwner]:
    return [owner for owner in unit.owners if isinstance(owner, DiskOwner)]
