"""Where a session's tensors live when their values come from a file: residents are read straight to the device.

Streamed units read nothing here: `disk_streamer` does, through a host cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .attach import Placement
from .checkpoint import Checkpoint, Stand, put
from .disk_tensors import DiskOwner, DiskParameter, DiskTensor
from .errors import BudgetError
from .plan import round_up
from .sizes import MIB
from .slots import ALIGN
from .store.arena import Block, HostArena, storage_bytes
from .store.cache import CacheFigures
from .store.pieces import Placed, cut
from .store.rawio import ALIGN as PAGE
from .store.reader import DiskReader, ReaderPolicy
from .streamed import Streamed
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
        if budget < size:
            raise BudgetError(
                f"ram={budget} is too small to load weights through: {2 * PAGE} bytes work", 2 * PAGE
            )
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
            self.wire_bytes += unit.nbytes
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
