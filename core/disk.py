"""Where a session's tensors live when their values come from a file: residents are read to the device.

Residents wait for their first use (`disk_residents`), streamed units come through a host cache (`disk_streamer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .attach import Placement
from .checkpoint import Checkpoint, Stand, put
from .disk_residents import Residents
from .disk_tensors import DiskOwner, DiskParameter, DiskTensor
from .disk_wire import Wire
from .loads import Load
from .plan import round_up
from .sizes import MIB, format_size
from .slots import ALIGN
from .store.arena import Block, HostArena, storage_bytes
from .store.pieces import Placed
from .store.rawio import ALIGN as PAGE
from .store.reader import DiskReader, ReaderPolicy
from .streamed import Streamed
from .transfer import Engine
from .units import SMALL_BUFFER, Entry, Unit

_CHUNK = 4 * MIB  # bytes of one read call (docs/disk.md)


@dataclass
class Disk:
    """What placement and streamer share. ``ram``: bytes for the host cache and changed values; ``write`` replaces
    a streamed weight's value; ``staging_bytes``: of the device, from which packed units are decoded."""

    checkpoint: Checkpoint
    ram: int
    write: Callable[[Stand, torch.Tensor], None]
    residents: Residents
    staging_bytes: int = 0
    wires: list[Wire] = field(default_factory=list)  # of the streamed units, in their order

    @property
    def cache_bytes(self) -> int:
        return self.checkpoint.cache_bytes(self.ram)

    def over(self) -> tuple[str, ...]:
        """A note where changed values and the least that reads take are more than ``ram``."""
        changed = self.checkpoint.changed_bytes
        if changed + self.cache_bytes <= self.ram:
            return ()
        return (
            f"weights that were changed on the device take {format_size(changed)} of host memory, more than "
            f"ram={format_size(self.ram)} allows: raise ram",
        )

    def reader(self, largest: int) -> DiskReader:
        """A reader whose workers' own buffers stay small beside a small budget."""
        chunk = min(_CHUNK, max(PAGE, largest // PAGE * PAGE))
        policy = ReaderPolicy(workers=self.checkpoint.settings.workers, chunk=chunk)
        return DiskReader(policy, pace=self.checkpoint.pace, lanes=self.checkpoint.lanes)


@dataclass(eq=False)
class _Resident:
    entry: Entry
    stand: Stand
    tensor: torch.Tensor
    version: int | None = None  # None until its bytes are there
    loaded: torch.Tensor | None = None  # of a buffer: kernels write statistics without raising its version

    def arrive(self) -> None:
        """Its bytes are there, but for a value that was written: that comes from here."""
        if self.version is not None:  # the model has put another in its place meanwhile
            return
        if self.stand.changed is not None:
            self.tensor.copy_(self.stand.changed)
        self.version = self.tensor._version
        if self.stand.bound.is_buffer and self.entry.nbytes <= SMALL_BUFFER:
            self.loaded = self.tensor.detach().to("cpu", copy=True)

    @property
    def changed(self) -> bool:
        if self.version is None:
            return False
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
        self._modules: dict[int, list[nn.Module]] = {}  # entry of a resident unit -> whose forward needs it

    # -- residents

    def keep(self, units: list[Unit], entries: list[Entry], in_turn: bool = False) -> None:
        stand_of = self._disk.checkpoint.of
        self._modules = {id(entry): unit.modules for unit in units for entry in unit.entries}
        # A tensor that stays by need may be large: the base would move it as it is.
        mine = [entry for entry in entries if stand_of(entry.tensor) is not None]
        if mine:
            self._load(mine, "weights that stay by need", [])
        super().keep(units, [entry for entry in entries if stand_of(entry.tensor) is None])

    def _together(self, entries: list[Entry]) -> None:
        stand_of = self._disk.checkpoint.of
        super()._together([entry for entry in entries if stand_of(entry.tensor) is None])
        found = [entry for entry in entries if stand_of(entry.tensor) is not None]
        if found:
            # One unit's, or the small ones of several: those any forward waits for.
            modules = {id(m): m for e in found for m in self._modules.get(id(e), [])}
            together = len({id(self._modules.get(id(e))) for e in found}) == 1
            self._load(found, found[0].name, list(modules.values()) if together else [])

    def _load(self, entries: list[Entry], name: str, modules: list[nn.Module]) -> None:
        """Device memory of their own for these tensors; their bytes come when they are first needed."""
        places, nbytes = [], 0
        for entry in entries:
            places.append(nbytes)
            nbytes += -(-entry.nbytes // ALIGN) * ALIGN
        buffer = self._engine.allocate(nbytes)
        self.resident_bytes += round_up(nbytes, self._engine.grain)
        fresh, residents = [], []
        layout = Unit(name, "", [], nbytes=nbytes)  # of what is read
        for at, entry in zip(places, entries, strict=True):
            stand = self._disk.checkpoint.of(entry.tensor)
            assert stand is not None
            if stand.changed is None:
                fresh.append(Placed(at, stand.bound.segments))
                layout.entries.append(replace(entry, offset=at))
            with torch.inference_mode(False), torch.no_grad():
                view = self._engine.alias(buffer, at, entry.nbytes).view(stand.bound.dtype)
                tensor: torch.Tensor = view.as_strided(
                    entry.tensor.shape, entry.tensor.stride(), view.storage_offset()
                )
                if isinstance(entry.tensor, nn.Parameter):
                    tensor = nn.Parameter(tensor, requires_grad=False)
            put(entry.sites, entry.tensor, tensor)
            entry.tensor = tensor
            self._disk.checkpoint.stands_for(tensor, stand)
            residents.append(_Resident(entry, stand, tensor))
        self._residents += residents

        def arrived() -> None:
            for resident in residents:
                resident.arrive()

        wire = self._disk.checkpoint.wire(layout, self._disk.staging_bytes)
        if wire.decoder is not None and self._engine.device.type != "cpu":
            wire.decoder.prepare(self._engine.device)
        load = Load(name, buffer, nbytes, fresh, [r.tensor for r in residents], modules, arrived)
        load.wire = None if wire.decoder is None else wire
        self._disk.residents.add(load)

    def replaced(self, entries: dict[int, Entry]) -> None:
        for resident in self._residents:
            entry = entries.get(id(resident.tensor))
            if entry is not None:
                resident.tensor, resident.version = entry.tensor, -1
                self._disk.checkpoint.stands_for(entry.tensor, resident.stand)
        super().replaced(entries)

    # -- streamed units

    def stream(self, units: list[Unit], make: Callable[[Unit, int, Any], Streamed]) -> list[Streamed]:
        """Let the units' meta tensors lead to the streamer; nothing is read yet."""
        for unit in units:
            streamed = make(unit, len(self.streamed), Block(torch.empty(0, dtype=torch.uint8), False, 0))
            self.streamed.append(streamed)
            wire = self._disk.checkpoint.wire(unit, self._disk.staging_bytes)
            self._disk.wires.append(wire)
            streamed.decoder = wire.decoder
            if wire.decoder is not None and self._engine.device.type != "cpu":
                wire.decoder.prepare(self._engine.device)
            self.streamed_host_bytes += unit.nbytes
            self.wire_bytes += wire.nbytes
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
                resident.stand.change(resident.tensor)
            put(resident.entry.sites, resident.tensor, resident.stand.tensor)
            resident.entry.tensor = resident.stand.tensor
            self._disk.checkpoint.stands_no_more(resident.tensor)
        self._residents.clear()
