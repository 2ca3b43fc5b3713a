"""A session's weights from disk: resident ones are read straight to the device, streamed ones pass a host cache.

Built as `attach.Placement` and `streamer.Streamer` with another source of bytes. The host waits for a read only
when the unit that is needed now is not in RAM; what is foreseen is copied to the device only once it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import ops
from .account import FromDisk
from .attach import Placement
from .checkpoint import Checkpoint, Stand, put
from .disk_tensors import DiskOwner, DiskParameter, DiskTensor
from .meter import Meter
from .plan import round_up
from .simulated import SimulatedEngine
from .sizes import MIB
from .slots import ALIGN
from .store.arena import Block, HostArena, storage_bytes
from .store.cache import CacheFigures, HostCache
from .store.pieces import Piece, Placed, choose_buffers, cut
from .store.rawio import ALIGN as PAGE
from .store.reader import DiskReader, ReaderPolicy
from .streamed import Streamed
from .streamer import Streamer
from .transfer import Engine
from .units import SMALL_BUFFER, Entry, Unit

_STAGING = 16 * MIB  # bytes of one of the buffers that residents are loaded through
_CHUNK = 8 * MIB  # bytes of one read call


@dataclass
class Disk:
    """What placement and streamer share. ``ram``: bytes for the host cache and changed values; ``write`` replaces
    a streamed weight's value."""

    checkpoint: Checkpoint
    ram: int
    write: Callable[[Stand, torch.Tensor], None]
    load: CacheFigures = CacheFigures()  # of reading the residents

    @property
    def cache_bytes(self) -> int:
        return max(0, self.ram - self.checkpoint.changed_bytes)

    def reader(self, largest: int) -> DiskReader:
        """A reader whose workers' own buffers stay small beside a small budget."""
        chunk = min(_CHUNK, max(PAGE, largest // PAGE * PAGE))
        return DiskReader(ReaderPolicy(workers=self.checkpoint.settings.workers, chunk=chunk))


@dataclass(eq=False)
class _Resident:
    entry: Entry
    stand: Stand
    tensor: torch.Tensor
    version: int
    loaded: torch.Tensor | None  # of a buffer: kernels write statistics without raising its version

    @property
    def changed(self) -> bool:
        if self.tensor._version != self.version:
            return True
        return self.loaded is not None and not torch.equal(
            storage_bytes(self.loaded), storage_bytes(self.tensor.detach().cpu())
        )


class DiskPlacement(Placement):
    """Places a carving whose weights are on meta and in files."""

    def __init__(self, engine: Engine, arena: HostArena, disk: Disk) -> None:
        super().__init__(engine, arena)
        self._disk = disk
        self._residents: list[_Resident] = []

    # -- residents

    def _together(self, entries: list[Entry]) -> None:
        stand_of = self._disk.checkpoint.of
        super()._together([entry for entry in entries if stand_of(entry.tensor) is None])
        found = [(entry, stand) for entry in entries if (stand := stand_of(entry.tensor)) is not None]
        if found:
            self._load(found)

    def keep(self, units: list[Unit], entries: list[Entry]) -> None:
        stand_of = self._disk.checkpoint.of
        # A tensor that stays by need may be large: the base would move it as it is.
        mine = [entry for entry in entries if stand_of(entry.tensor) is not None]
        super().keep(units, [entry for entry in entries if stand_of(entry.tensor) is None])
        self._together(mine)

    def _load(self, found: list[tuple[Entry, Stand]]) -> None:
        """Device memory of their own for these tensors, filled from disk through a few host buffers."""
        places, nbytes = [], 0
        for entry, _ in found:
            places.append(nbytes)
            nbytes += -(-entry.nbytes // ALIGN) * ALIGN
        buffer = self._engine.allocate(nbytes)
        self.resident_bytes += round_up(nbytes, self._engine.grain)
        fresh = [
            Placed(at, stand.bound.segments)
            for at, (_, stand) in zip(places, found, strict=True)
            if stand.changed is None
        ]
        self._fill(buffer, nbytes, fresh)
        for at, (entry, stand) in zip(places, found, strict=True):
            with torch.inference_mode(False), torch.no_grad():
                view = self._engine.alias(buffer, at, entry.nbytes).view(stand.bound.dtype)
                tensor: torch.Tensor = view.as_strided(
                    entry.tensor.shape, entry.tensor.stride(), view.storage_offset()
                )
                if stand.changed is not None:
                    tensor.copy_(stand.changed)
                if isinstance(entry.tensor, nn.Parameter):
                    tensor = nn.Parameter(tensor, requires_grad=False)
            put(entry.sites, entry.tensor, tensor)
            entry.tensor = tensor
            self._disk.checkpoint.stands_for(tensor, stand)
            loaded = None
            if stand.bound.is_buffer and entry.nbytes <= SMALL_BUFFER:
                loaded = tensor.detach().to("cpu", copy=True)
            self._residents.append(_Resident(entry, stand, tensor, tensor._version, loaded))

    def _fill(self, target: torch.Tensor, nbytes: int, tensors: list[Placed]) -> None:
        budget = self._disk.cache_bytes
        size = max(PAGE, min(_STAGING, round_up(nbytes, PAGE), budget // 4 // PAGE * PAGE))
        pieces = [piece for piece in cut([(nbytes, tensors)], size)[0] if piece.reads]
        count = min(len(pieces), 4, max(1, budget // size))
        engine, began = self._engine, time.perf_counter()
        engine.synchronize()  # memory that the device still uses for what was freed is not copied into early
        blocks = [self._arena.allocate(size) for _ in range(count)]
        events: list[Any] = [None] * count
        try:
            with self._disk.reader(size) as reader:
                for block in blocks:
                    self._arena.pin(block)

                def ask(number: int) -> list:
                    block, event = blocks[number % count], events[number % count]
                    if event is not None:
                        engine.synchronize(event)
                    return [
                        reader.submit_range(
                            r.file, r.offset, r.nbytes, block.data[r.at : r.at + r.nbytes], what=r.what
                        )
                        for r in pieces[number].reads
                    ]

                waiting = [ask(number) for number in range(count)]
                for number, piece in enumerate(pieces):
                    for handle in waiting.pop(0):
                        handle.result()
                    here = target[piece.start : piece.start + piece.nbytes]
                    source = blocks[number % count].data[: piece.nbytes]
                    events[number % count], _ = engine.copy_in(here, source, (), False)
                    if number + count < len(pieces):
                        waiting.append(ask(number + count))
        finally:
            engine.synchronize()
            for block in blocks:
                block.unpin()
            load = self._disk.load
            self._disk.load = CacheFigures(
                load.read_bytes + sum(read.nbytes for piece in pieces for read in piece.reads),
                load.reading_seconds + time.perf_counter() - began,
                held_bytes=max(load.held_bytes, count * size),
            )

    def replaced(self, old: torch.Tensor, new: torch.Tensor) -> None:
        for resident in self._residents:
            if resident.tensor is old:
                resident.tensor, resident.version = new, -1
                self._disk.checkpoint.stands_for(new, resident.stand)
                return
        super().replaced(old, new)

    # -- streamed units

    def stream(self, units: list[Unit], make: Callable[[Unit, int, Any], Streamed]) -> list[Streamed]:
        """Let the units' meta tensors lead to the streamer; nothing is read yet."""
        for unit in units:
            streamed = make(unit, len(self.streamed), Block(torch.empty(0, dtype=torch.uint8), False, 0))
            self.streamed.append(streamed)
            self.streamed_host_bytes += unit.nbytes
            for entry in unit.entries:
                tensor = entry.tensor
                stand = self._disk.checkpoint.of(tensor)
                assert stand is not None  # the carver keeps all others resident
                owner = DiskOwner(
                    streamed.streamer, streamed, entry, self._disk.checkpoint, stand, self._disk.write
                )
                self._worn.append((tensor, type(tensor), torch.device("cpu")))
                streamed.owners.append(owner)
                tensor._carom = owner  # type: ignore[attr-defined]
                tensor.__class__ = DiskParameter if isinstance(tensor, nn.Parameter) else DiskTensor
        return self.streamed

    # -- the way back

    def _undo(self) -> None:
        super()._undo()
        for resident in self._residents:
            if resident.changed:
                resident.stand.changed = resident.tensor.detach().to("cpu", copy=True)
            put(resident.entry.sites, resident.tensor, resident.stand.tensor)
            resident.entry.tensor = resident.stand.tensor
            self._disk.checkpoint.stands_no_more(resident.tensor)
        self._residents.clear()


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

    @property
    def cache_limit(self) -> int:
        """Host bytes that the cache may come to hold."""
        return 0 if self.cache is None else self.cache.limit_bytes

    def changed(self, stand: Stand) -> None:
        """A streamed weight has another value: what is in slots is no longer trusted."""
        for unit in self.units:
            if any(owner.stand is stand for owner in _owners(unit)):
                unit.epoch += 1

    def refuse_less_than(self, ram: int) -> None:
        """Raises BudgetError where ``ram`` bytes are too few for these units."""
        choose_buffers([unit.nbytes for unit in self.units], ram)

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

    def _look_ahead(self) -> None:
        """As the base does, for units that are in RAM; the others are read meanwhile."""
        cache = self.cache
        if cache is None:
            return
        guarded = self._last.slot if self._last is not None and ops.in_backward() else None
        room, seen = self.region.nbytes, set()
        for distance, index in enumerate(self.order.upcoming(), 1):
            if index in seen:
                continue
            seen.add(index)
            unit = self.units[index]
            room -= unit.nbytes
            if room < 0:
                break
            if unit.slot is not None or not cache.has(index):
                continue
            place = self.region.place(unit.nbytes, self._use_of, later_than=distance, guarded=guarded)
            if place is None:
                break
            self._fill(unit, *place)
        self._expect(None)

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
