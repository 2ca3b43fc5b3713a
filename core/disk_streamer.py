"""Slots filled from a host cache that is filled from disk: the streamer of weights that come from a file.

The host waits for a read only when the unit that is needed now is not in RAM; what is foreseen is copied to the
device only once it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import ops
from .account import FromDisk
from .checkpoint import Stand
from .disk import Disk
from .disk_residents import Residents
from .disk_tensors import DiskOwner
from .errors import BudgetError, UnsupportedError, WeightsError
from .meter import Meter
from .simulated import SimulatedEngine
from .slots import Slot
from .staging import Staging
from .store.arena import HostArena, storage_bytes
from .store.blob_check import BlobChecks, Sums
from .store.cache import CacheFigures, HostCache
from .store.pieces import Buffers, Piece, choose_buffers, cut
from .store.rawio import ALIGN as PAGE
from .streamed import Streamed
from .streamer import Streamer
from .transfer import Engine


@dataclass(frozen=True)
class Read:
    """What was read lately: bytes, the seconds in which a read was under way; in all: seconds that host threads
    waited for reads, the most host memory held for them."""

    nbytes: int = 0
    seconds: float = 0.0
    late_seconds: float = 0.0
    held_bytes: int = 0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class DiskStreamer(Streamer):
    """Fills slots from a host cache that is filled from disk."""

    remembers = False  # what may be brought ahead depends on what was read meanwhile
    cache: HostCache | None = None
    _final = Read()
    _pieces: list[list[Piece]] = []
    _checks: BlobChecks | None = None  # where units cross packed

    def __init__(
        self, engine: Engine, region_bytes: int, meter: Meter, disk: Disk, staging_bytes: int = 0
    ) -> None:
        super().__init__(engine, region_bytes, meter, staging_bytes)
        self._disk = disk
        self._buffers: Buffers | None = None
        self._peak = 0  # bytes of host memory that were held at most, until something of it was given up
        self._brought: set[int] = set()  # units whose pieces have been used, until residents are there

    def start(self, arena: HostArena) -> None:
        super().start(arena)
        self._arena, budget, residents = arena, self._disk.cache_bytes, self._disk.residents
        for stand in {id(o.stand): o.stand for unit in self.units for o in _owners(unit)}.values():
            if stand.block is not None:
                arena.pin(stand.block)
        wires = self._disk.wires
        if wires:
            self._buffers = choose_buffers([wire.nbytes for wire in wires], budget)
            self._pieces = cut([(wire.nbytes, wire.placed) for wire in wires], self._buffers.nbytes)
        if any(wire.blobs for wire in wires):
            self._checks = BlobChecks(self._pieces, [wire.blobs for wire in wires])
        self.meter.disk_bytes = self._total_read
        if not isinstance(self.engine, SimulatedEngine):
            self.meter.disk_reads = self._reads
        residents.join(self.lock, self.meter)
        if self.staging is None and self._staging_bytes and residents.packs:
            self.staging = Staging(self.engine, self._staging_bytes)
        beside = self._beside(budget)
        size, count = beside or residents.size_for(budget, 4, PAGE)
        if residents.wanted and not size:
            raise BudgetError(f"ram={budget} is too small to load weights through: {PAGE} bytes work", PAGE)
        residents.start(self._disk.reader, size, count, self._residents_are_there, self.staging)
        if beside:
            self._open()

    def _beside(self, budget: int) -> tuple[int, int] | None:
        """Staging buffers (bytes, count) that residents pass through while the cache fills; None where both do not fit."""
        buffers, (size, count) = self._buffers, self._disk.residents.size_for(budget, 16)
        if buffers is None or not self._disk.residents.waiting:
            return self._disk.residents.size_for(budget, 4, PAGE)
        if buffers.whole and budget < size * count + sum(p.nbytes for pieces in self._pieces for p in pieces):
            return None
        return (size, count) if size else None

    def _residents_are_there(self) -> None:
        self._peak = max(self._peak, self._host_bytes())
        if self.cache is None:
            self._open()
        else:
            self.cache.hold_back(0)
            self._brought.clear()
            self._expect(None)

    def _open(self) -> None:
        """Make the cache; the first units are on their way before anybody asks."""
        if self._buffers is None or self.cache is not None:
            return
        self.cache = HostCache(
            self._pieces, self._buffers, self._arena, self._disk.reader(self._buffers.nbytes), self.engine.landed,
            self.engine.synchronize, self._disk.checkpoint.settings.eviction,
            None if self._checks is None else self._checks.look,
        )  # fmt: skip
        if not self._buffers.whole:
            self.cache.hold_back(self._disk.residents.staging_bytes)
        self.cache.expect(self.order.upcoming())

    @property
    def residents(self) -> Residents:
        return self._disk.residents

    def begins(self, everything: bool) -> None:
        """A root forward begins: resident weights that it needs at once are brought; ``everything``: all of them."""
        if self._disk.residents.waiting:
            # Where RAM is too short for both, the cache begins when they are through.
            self._disk.residents.begins(everything or (self.cache is None and self._buffers is not None))

    def take(self, stand: Stand, value: torch.Tensor) -> bool:
        """Give a streamed weight another value; False where the cache must first become smaller to make room.

        Raises BudgetError where it cannot, UnsupportedError where a pass is under way.
        """
        with self.lock:
            changed = self._disk.checkpoint.changed_bytes
            spare = self._disk.ram - self._spoken_for() - changed - self.from_host.nbytes
            if (
                stand.kept_bytes > spare and stand.changed is not None
            ):  # over the last value: no room for both
                self.engine.synchronize()
                with torch.inference_mode(False), torch.no_grad():
                    stand.changed.copy_(value.detach())
                self._distrust(stand)
                return True
            if stand.kept_bytes > spare:
                if not self.idle:
                    raise UnsupportedError(
                        f"no room in ram for a new value of {stand.name} during a pass; write it between passes"
                    )
                sizes = [wire.nbytes for wire in self._disk.wires]
                self._disk.checkpoint.require_room(stand, self._disk.ram, sizes)
                return False
        kept = stand.copy_of(value)  # takes its time: not under the lock
        if kept.block is not None:
            self._arena.pin(kept.block)
        with self.lock:
            if stand.changed is not None:
                self.engine.synchronize()  # a copy to a slot may still read the last value
                self._peak = max(self._peak, self._host_bytes() + stand.kept_bytes)
            stand.accept(kept)
            self._distrust(stand)
        return True

    def _spoken_for(self) -> int:
        """Bytes of ``ram`` that reading takes, now or later: the cache's, and what residents pass through."""
        residents, buffers = self._disk.residents, self._buffers
        staging = residents.staging_bytes if residents.waiting else 0
        if buffers is None:
            return staging
        cache = buffers.count * buffers.nbytes if self.cache is None else self.cache.limit_bytes
        if buffers.whole:
            cache = sum(piece.nbytes for pieces in self._pieces for piece in pieces)
            if self.cache is not None:
                return cache + staging
        return max(cache, staging)  # one after the other, or within the same bound

    def _host_bytes(self) -> int:
        """Bytes of host memory for weights, now."""
        cache = 0 if self.cache is None else self.cache.figures().held_bytes
        held = self._disk.residents.staging_bytes + cache + self._disk.checkpoint.changed_bytes
        return held + self.from_host.nbytes

    def make_host_room(self, nbytes: int) -> None:
        """Shrink the host cache by the bytes that ``nbytes`` more would take above the ``ram`` budget."""
        held = self._spoken_for() + self._disk.checkpoint.changed_bytes + self.from_host.nbytes
        if self.cache is not None and held + nbytes > self._disk.ram:
            self._peak = max(self._peak, self._host_bytes())
            self.cache.shrink(held + nbytes - self._disk.ram)

    def _distrust(self, stand: Stand) -> None:
        """What is in slots is no longer the value."""
        for unit in self.units:
            if any(owner.stand is stand for owner in _owners(unit)):
                unit.epoch += 1

    def account(self) -> FromDisk:
        """Figures for the report."""
        disk, read = self._disk, self._figures()
        return FromDisk(
            ram_budget_bytes=disk.ram,
            ram_peak_bytes=read.held_bytes,
            read_bytes=read.nbytes,
            reading_seconds=read.seconds,
            wait_seconds=read.late_seconds,
            notes=(*disk.checkpoint.notes, *disk.residents.notes, *self._packing(), *disk.over()),
        )

    def _total_read(self) -> int:
        return self._disk.residents.read_bytes + (0 if self.cache is None else self.cache.total_read())

    def _reads(self) -> list[tuple[str, float, float, int]]:
        return [*self._disk.residents.spans, *(() if self.cache is None else self.cache.reads())]

    def _figures(self) -> Read:
        if self.closed:
            return self._final
        spans, residents = self._reads(), self._disk.residents
        cache = CacheFigures() if self.cache is None else self.cache.figures()
        return Read(
            sum(nbytes for *_, nbytes in spans),
            covered((start, end) for _, start, end, _ in spans),
            residents.late_seconds + cache.late_seconds,
            max(self._peak, self._host_bytes()),
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
        """The unit's pieces, each as soon as it is there, unpacked where they are packed, and values that were written from
        where they are kept: each byte crosses once. The event that ends it."""
        engine, meter, backward = self.engine, self.meter, ops.in_backward()
        wire = self._disk.wires[unit.index]
        written = [which for which, owner in enumerate(_owners(unit)) if owner.stand.changed is not None]
        spans, decoder = wire.without(frozenset(written)) if written else (None, unit.decoder)
        if decoder is None:
            event, _ = self._copy_pieces(unit, target, after, spans)
        else:
            assert self.staging is not None
            staged, free = self.staging.take(wire.nbytes)
            copied, found = self._copy_pieces(unit, staged, free, spans)
            self.staging.given(copied)
            self._judge(unit, found)
            event, times = engine.decode(decoder, staged, target, (copied, *after), meter.timing)
            self.staging.given(event)
            meter.decoded(times)
            after = [event]
        for owner in map(_owners(unit).__getitem__, written):
            value = owner.stand.changed
            assert value is not None
            start, end = owner.entry.offset, owner.entry.offset + owner.entry.nbytes
            event, marks = engine.copy_in(target[start:end], storage_bytes(value), after, meter.timing)
            self._count(unit, marks, end - start, backward)
        # One transfer, in however many copies.
        meter.copied(unit.name, None, 0, unit.unit.raw_bytes, backward)
        return event

    def _copy_pieces(
        self, unit: Streamed, to: torch.Tensor, after: list[Any], spans: list[tuple[int, int]] | None
    ) -> tuple[Any, list[Sums]]:
        """Copy the unit's bytes as they wait to ``to`` on the device, all of them or those in ``spans``: the last copy's event,
        and what was found of them."""
        cache, engine, meter, backward = self.cache, self.engine, self.meter, ops.in_backward()
        assert cache is not None
        event: Any = None
        found: list[Sums] = []
        if self._disk.residents.waiting:
            self._brought.add(unit.index)
        for piece in self._pieces[unit.index]:
            before = engine.mark() if meter.timing and not cache.has(unit.index) else None
            source = cache.need(piece)
            if before is not None:
                meter.waited(before, engine.mark(), unit.name, backward)
            copied = None
            try:
                found.append(cache.found(piece))
                for start, end in ((0, piece.nbytes),) if spans is None else piece.within(spans):
                    # No name for the slice: a traceback would keep it, and with it the slot.
                    copied, marks = engine.copy_in(
                        to[piece.start + start : piece.start + end], source[start:end], after, meter.timing
                    )
                    self._count(unit, marks, end - start, backward)
                    event, after = copied, []
            except BaseException:
                if copied is None:
                    cache.forget(piece)
                else:  # a part of it is on its way
                    cache.used(piece, copied)
                raise
            cache.used(piece, copied)
        return event, found

    def _judge(self, unit: Streamed, found: Sequence[Sums]) -> None:
        """Raises WeightsError where the packed bytes are not what their checksums say; they are read anew then."""
        assert self._checks is not None and self.cache is not None
        try:
            self._checks.judge(unit.index, found)
        except WeightsError:
            self.cache.distrust(unit.index)
            raise

    def _sound(self, unit: Streamed) -> bool:
        """Whether what is in RAM of the unit, all of it, may be used. What may not says nothing until it is needed."""
        assert self.cache is not None
        if unit.decoder is None:
            return self.cache.has(unit.index)
        found = self.cache.finds(unit.index)
        try:
            if found is not None:
                self._judge(unit, found)
        except WeightsError:
            return False
        return found is not None

    def _count(self, unit: Streamed, marks: Any, nbytes: int, backward: bool) -> None:
        """A part of the unit crosses."""
        if self.engine.blocking and marks is not None:
            self.meter.waited(marks[0], marks[1], unit.name, backward)
        self.meter.copied(unit.name, marks, nbytes, 0, backward, 0)

    # -- looking ahead

    def _fetch(self, unit: Streamed) -> Any:
        if self.cache is None:  # used without a forward of the root
            self.begins(everything=True)
        self._expect(unit)
        return super()._fetch(unit)

    def late(self, unit: Streamed) -> bool:
        return self.cache is None or not self._sound(unit)

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
        units: list[int] = []
        later: list[int] = []  # served by their slots this time: it is the next round that they are needed in
        room, near, before = self.region.nbytes, set(), -1
        if unit is not None:
            units, near, room = [unit.index], {unit.index}, room - unit.nbytes
        # Until residents are there the drive is theirs once the first pass's units are read: not for the next round.
        first = self._disk.residents.waiting
        for index in self.order.upcoming():
            if index == before:  # recomputed, and then used for gradients: from one slot
                continue
            before = index
            if first and index in self._brought:
                continue
            if room >= 0:
                again = index in near
                if not again:
                    near.add(index)
                    room -= self.units[index].nbytes
                if room >= 0 and (again or self.units[index].slot is not None):
                    later.append(index)
                    continue
            units.append(index)
        self.cache.expect(units + later)

    # -- end

    def close(self) -> None:
        self._final = self._figures()
        super().close()
        self._disk.residents.close()
        if self.cache is not None:
            self.cache.close()
            self.cache = None
        for unit in self.units:
            for owner in _owners(unit):
                if owner.stand.block is not None:
                    owner.stand.block.unpin()


def _owners(unit: Streamed) -> list[DiskOwner]:
    return [owner for owner in unit.owners if isinstance(owner, DiskOwner)]
