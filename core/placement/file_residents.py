"""Defines `FileResidents`: the tensors of a weights file that stay on the device (residents).

Their device memory is allocated when the layout is made. Their bytes are loaded on first use. The program may write to
them: what differs from the file when they leave the device is kept in host memory. When another layout follows, those
that both layouts keep on the device stay where they are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..checkpoint.direct_io import ALIGN as PAGE
from ..common.sizes import MIB
from ..device.engine import Engine
from ..host.arena import HostArena, storage_bytes
from ..host.cache_pieces import PlacedTensor
from ..model.units import Entry, Unit
from ..plan.region import ALIGN
from ..plan.residency import round_up
from .bound_checkpoint import Checkpoint, FileTensor, replace_in_modules
from .host_copies import fingerprint
from .resident_loader import OutOfMemory, ResidentLoader
from .resident_loads import Load

logger = logging.getLogger("carom")
_TEMPORARY = 64 * MIB  # most bytes of temporary staging memory, unless one packed tensor is larger


@dataclass(eq=False)
class _Resident:
    """A tensor that stays on the device.

    ``version``: the tensor's torch version counter after loading, None before. ``address``: of its bytes after loading.
    """

    entry: Entry
    file_tensor: FileTensor
    tensor: torch.Tensor
    version: int | None = None
    address: int = 0

    def arrive(self) -> None:
        """Record that the bytes were loaded. If the tensor has a written value in host memory, copy that
        value over the bytes.
        """
        if self.version is not None:  # the model replaced the tensor before loading finished
            return
        if self.file_tensor.changed is not None:
            self.tensor.copy_(self.file_tensor.changed)
        self.version, self.address = self.tensor._version, self.tensor.data_ptr()

    def enter_module(self, entry: Entry, checkpoint: Checkpoint) -> None:
        """Put the tensor into the modules in place of the meta tensor that ``entry`` has."""
        self.entry = entry
        replace_in_modules(entry.sites, entry.tensor, self.tensor)
        entry.refer_to(self.tensor)
        checkpoint.bind_device_tensor(self.tensor, self.file_tensor)

    def leave_module(self, checkpoint: Checkpoint) -> None:
        """Put the meta tensor back into the modules."""
        replace_in_modules(self.entry.sites, self.tensor, self.file_tensor.tensor)
        self.entry.refer_to(self.file_tensor.tensor)
        checkpoint.unbind_device_tensor(self.tensor)

    @property
    def in_place(self) -> bool:
        """Whether the tensor has its bytes, where they were loaded, and is frozen."""
        loaded = self.version is not None and self.tensor.data_ptr() == self.address
        return loaded and not self.tensor.requires_grad

    @property
    def shows_change(self) -> bool:
        """Whether the tensor shows that it was written to, or that its ``.data`` was assigned."""
        moved = self.tensor._version != self.version or self.tensor.data_ptr() != self.address
        return self.version is not None and moved


@dataclass(eq=False)
class _LoadedRange:
    """The residents of one load, in one range of device memory.

    ``memory``: the range, as bytes. ``known``: the fingerprint of the bytes that were loaded, None if there is none. Writes
    through ``.data`` (as PEFT merges adapters) and kernels that update statistics raise no version counter, so bytes are
    compared.
    """

    memory: torch.Tensor
    residents: list[_Resident]
    known: torch.Tensor | None = None

    def arrive(self) -> None:
        """Record that the bytes were loaded."""
        for resident in self.residents:
            resident.arrive()
        with contextlib.suppress(OutOfMemory):  # without a fingerprint, values are compared with the file
            self.known = fingerprint([self.memory])

    def changed(self, checkpoint: Checkpoint) -> list[_Resident]:
        """Return the residents whose values differ from those that were loaded."""
        as_loaded = False
        try:
            as_loaded = self.known is not None and torch.equal(self.known, fingerprint([self.memory]))
        except OutOfMemory:
            pass
        except RuntimeError as error:  # the device fails: nothing on it can be read any more
            logger.warning(
                "carom: what was written to weights on the device may be lost: %s", str(error).splitlines()[0]
            )
            as_loaded = True
        return [
            resident
            for resident in self.residents
            if resident.shows_change or not (as_loaded or _as_in_file(resident, checkpoint))
        ]


def _as_in_file(resident: _Resident, checkpoint: Checkpoint) -> bool:
    """Return whether the tensor has the value that its file, or host memory, has for it."""
    if resident.version is None:
        return True
    stored, present = checkpoint.read(resident.file_tensor), resident.tensor.detach().cpu()
    return torch.equal(storage_bytes(stored), storage_bytes(present))


@dataclass(eq=False)
class _Group:
    """The residents of one buffer. ``nbytes``: of the buffer, as the allocator reserves it."""

    nbytes: int
    ranges: list[_LoadedRange] = field(default_factory=list)

    @property
    def residents(self) -> list[_Resident]:
        return [resident for loaded in self.ranges for resident in loaded.residents]

    @property
    def tensors(self) -> tuple[int, ...]:
        """The ids of the file's tensors, in order."""
        return tuple(id(resident.file_tensor) for resident in self.residents)

    def keep_changes(self, checkpoint: Checkpoint) -> None:
        """Keep values that changed on the device in host memory."""
        for loaded in self.ranges:
            for resident in loaded.changed(checkpoint):
                resident.file_tensor.change(resident.tensor)


def _aligned(entry: Entry) -> int:
    """Return the bytes that ``entry`` takes in a buffer."""
    return -(-entry.nbytes // ALIGN) * ALIGN


def _unit(entries: list[Entry]) -> Unit:
    """Return a unit of ``entries`` in one buffer."""
    unit = Unit("", "", [])
    for entry in entries:
        unit.entries.append(replace(entry, offset=unit.nbytes))
        unit.nbytes += _aligned(entry)
    return unit


class FileResidents:
    """The tensors of one layout that stay on the device and come from a weights file.

    ``arriving``: the loader of the tensors whose bytes are not on the device yet.
    ``nbytes``: bytes of device memory of all the tensors, as the allocator reserves it.
    """

    def __init__(
        self,
        engine: Engine,
        arena: HostArena,
        checkpoint: Checkpoint,
        staging_bytes: int,
        spare_bytes: int = 0,
    ) -> None:
        """``staging_bytes``: device memory from which packed tensors are decoded. If it is 0, up to
        ``spare_bytes`` are allocated for that while tensors are loaded.
        """
        self._engine, self._checkpoint = engine, checkpoint
        self._staging_bytes = staging_bytes or spare_bytes // engine.grain * engine.grain
        self._run_bytes = staging_bytes or min(self._staging_bytes, _TEMPORARY)
        self.arriving = ResidentLoader(engine, arena)
        self.nbytes = 0
        self.decoded_bytes = 0  # packed bytes of the largest load that the device decodes
        self._groups: list[_Group] = []
        # What the layout before this one has left on the device, until `load` takes it or `keep_left` gives it up. The
        # modules have meta tensors in place of these.
        self._left: list[_Group] = []

    @property
    def residents(self) -> list[_Resident]:
        """All tensors of the layout that stay on the device, those that are not loaded yet included."""
        return [resident for group in self._groups for resident in group.residents]

    def load(self, entries: list[Entry], name: str, modules: list[nn.Module]) -> None:
        """Allocate device memory for the tensors of ``entries``, and queue the loading of their bytes, which
        happens on first use.

        ``name``: a label for the loads in reports.
        ``modules``: the only modules whose forward needs the tensors; empty if any forward may.
        """
        tensors = self._tensors(entries)
        for left in self._left:
            if left.tensors == tensors:
                self._take(left, entries)
                return
        runs = self._runs(entries)
        sizes = [sum(_aligned(entry) for entry in run) for run in runs]
        buffer, start = self._engine.allocate(sum(sizes)), 0
        group = _Group(round_up(sum(sizes), self._engine.grain))
        self._groups.append(group)
        self.nbytes += group.nbytes
        for run, nbytes in zip(runs, sizes, strict=True):
            self._load(group, run, name, modules, buffer[start : start + nbytes])
            start += nbytes

    def _tensors(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Return the ids of the file's tensors that ``entries`` stand for, in order."""
        found = (self._checkpoint.of(entry.tensor) for entry in entries)
        return tuple(id(file_tensor) for file_tensor in found if file_tensor is not None)

    # -- from one layout to the next

    def leave(self) -> None:
        """Let what is loaded stay on the device for the next layout, and put meta tensors back into the module for it.

        The caller then calls `undo`, and `take_over` of the next layout.
        """
        for group in list(self._groups):
            if group.residents and all(resident.in_place for resident in group.residents):
                for resident in group.residents:
                    resident.leave_module(self._checkpoint)
                # In this order, because an interrupt may come in between: `undo` can do the same again.
                self._left.append(group)
                self._groups.remove(group)

    def take_over(self, before: FileResidents) -> None:
        """Own the residents that ``before``, the `FileResidents` of the last layout, left on the device.

        Both objects then share one list. So an interrupt cannot leave a resident that neither of them frees.
        """
        self._left = before._left

    def keep_left(self, groups: Iterable[Sequence[Entry]]) -> None:
        """Free the residents that the last layout left on the device, except the groups that `load` will be called for.

        ``groups``: the entries of each call of `load`. Values that the program wrote to freed residents are kept in host memory.
        """
        if not self._left:
            return
        wanted = {self._tensors(entries) for entries in groups}
        unwanted = [left for left in self._left if left.tensors not in wanted]
        for left in unwanted:
            left.keep_changes(self._checkpoint)
            self._left.remove(left)
        if unwanted:
            unwanted.clear()
            del left  # it refers to the memory that `trim` returns to the device
            self._engine.trim()

    def _take(self, left: _Group, entries: Sequence[Entry]) -> None:
        """Let a group that is on the device stand for ``entries``."""
        self._groups.append(left)
        self._left.remove(left)
        self.nbytes += left.nbytes
        for resident, entry in zip(left.residents, entries, strict=True):
            resident.enter_module(entry, self._checkpoint)

    def _runs(self, entries: list[Entry]) -> list[list[Entry]]:
        """Divide ``entries`` into runs whose packed bytes fit in staging memory, unless one tensor is larger.
        The device then decodes run after run.
        """
        wires = self._checkpoint.wires
        if wires is None or wires.nbytes(_unit(entries)) <= self._run_bytes:
            return [entries]
        runs: list[list[Entry]] = []
        total = 0
        for entry in entries:
            size = round_up(wires.nbytes(_unit([entry])) or entry.nbytes, PAGE)
            if not runs or total + size > self._run_bytes:
                runs.append([])
                total = 0
            runs[-1].append(entry)
            total += size
        return runs

    def _load(
        self, group: _Group, entries: list[Entry], name: str, modules: list[nn.Module], buffer: torch.Tensor
    ) -> None:
        """Queue the loading of ``entries`` into ``buffer``, a part of the memory of ``group``, as one load."""
        fresh, nbytes, start = list[PlacedTensor](), len(buffer), 0
        # First: an interrupt may come once tensors are in the modules, and `undo` then has to find them.
        loaded = _LoadedRange(self._engine.alias(buffer, 0, nbytes), [])
        group.ranges.append(loaded)
        layout = Unit(name, "", [], nbytes=nbytes)  # describes the bytes that are read from the file
        for entry in entries:
            at, start = start, start + _aligned(entry)
            file_tensor = self._checkpoint.of(entry.tensor)
            assert file_tensor is not None
            if file_tensor.changed is None:
                fresh.append(PlacedTensor(at, file_tensor.bound.segments))
                layout.entries.append(replace(entry, offset=at))
            with torch.inference_mode(False), torch.no_grad():
                view = self._engine.alias(buffer, at, entry.nbytes).view(file_tensor.bound.dtype)
                tensor: torch.Tensor = view.as_strided(
                    entry.tensor.shape, entry.tensor.stride(), view.storage_offset()
                )
                if isinstance(entry.tensor, nn.Parameter):
                    tensor = nn.Parameter(tensor, requires_grad=False)
            resident = _Resident(entry, file_tensor, tensor)
            loaded.residents.append(resident)
            resident.enter_module(entry, self._checkpoint)
        wire = self._checkpoint.wire(layout, self._staging_bytes)
        if wire.decoder is not None and self._engine.device.type != "cpu":
            wire.decoder.prepare(self._engine.device)
        tensors = [resident.tensor for resident in loaded.residents]
        load = Load(name, buffer, nbytes, fresh, tensors, modules, loaded.arrive)
        load.wire = None if wire.decoder is None else wire
        if load.wire is not None:
            self.decoded_bytes = max(self.decoded_bytes, wire.nbytes)
        self.arriving.add(load)

    def replaced(self, entries: dict[int, Entry]) -> None:
        """Update the records of tensors that the model replaced.

        ``entries``: the new tensors, by the id of the tensor that each replaces.
        """
        for resident in self.residents:
            entry = entries.get(id(resident.tensor))
            if entry is not None:
                resident.tensor, resident.version = entry.tensor, -1
                self._checkpoint.bind_device_tensor(entry.tensor, resident.file_tensor)

    def undo(self) -> None:
        """Put the meta tensors back into the module. Values that changed on the device are kept in host
        memory.
        """
        for group in self._groups:
            group.keep_changes(self._checkpoint)
            for resident in group.residents:
                resident.leave_module(self._checkpoint)
        self._groups.clear()
        self.nbytes = 0

    def give_up_left(self) -> None:
        """Free all residents that the last layout left on the device, because no layout follows."""
        self.keep_left(())

    @property
    def undone(self) -> bool:
        """Whether no tensor is left to be put back."""
        return not (self._groups or self._left)
