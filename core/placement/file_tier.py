"""Defines `FileTier`: streamed units are read from a weights file, through a host cache with read-ahead.

A unit is a group of tensors that are copied to the device together. Residents are tensors that stay on the
device. The host thread waits for a disk read only if the unit that is needed at once is not in RAM. A unit is
prefetched to the device only after its bytes are in RAM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ..common.run_all import run_all
from ..device.engine import Engine
from ..host.arena import HostArena
from ..model.elsewhere_tensor import AwayParameter, AwayTensor
from ..model.home import ManagedUnit, Runtime
from ..model.units import Entry, Unit
from ..plan.residency import round_up
from ..stores.transfer import Transfer
from .attached_tensors import attach
from .backing import Backing, RunnerState
from .bound_checkpoint import FileTensor
from .file_backing import FileBacking
from .file_home import FileHome
from .file_reads import FileReads
from .file_residents import FileResidents
from .file_source import FileSource
from .packed_residents import PackedResidents
from .resident_loader import ResidentLoader
from .resident_placer import ResidentPlacer
from .tier import Tier, TierFigures


class FileTier(Tier):
    """The store of streamed weights that are in a file. In the module these weights are meta tensors.

    ``staging_bytes``: device memory into which packed units are copied before they are decoded.
    ``stay_packed``: ids of the `Unit` objects whose packed bytes stay on the device. They are fixed when the
    tier is made, because reads of their bytes begin with those of the other units.
    ``spare_bytes``: device memory of the budget that the plan leaves unused.
    """

    def __init__(
        self, engine: Engine, arena: HostArena, source: FileSource, staging_bytes: int,
        stay_packed: Collection[int] = (), spare_bytes: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(engine)
        self._stay_packed = frozenset(stay_packed)
        self.packed_residents = PackedResidents(engine)
        self._arena, self._source, self._staging_bytes = arena, source, staging_bytes
        self._residents = FileResidents(engine, arena, source.checkpoint, staging_bytes, spare_bytes)
        self.reads = FileReads(engine, arena, source, self.residents)

    @property
    def residents(self) -> ResidentLoader:
        """The loader of the file's tensors that stay on the device."""
        return self._residents.arriving

    # -- making and undoing a layout

    def load(self, entries: list[Entry], name: str, modules: list[nn.Module]) -> list[Entry]:
        """Begin to load those of ``entries`` that the file holds to the device. Returns the other entries."""
        file_tensor_of = self._source.checkpoint.of
        mine = [entry for entry in entries if file_tensor_of(entry.tensor) is not None]
        if mine:
            self._residents.load(mine, name, modules)
        return [entry for entry in entries if file_tensor_of(entry.tensor) is None] if mine else entries

    @property
    def loading_bytes(self) -> int:
        """Device memory in bytes of the file's tensors that stay on the device."""
        return self._residents.nbytes

    def replaced(self, entries: dict[int, Entry]) -> None:
        """Update the records of tensors on the device that the model replaced.

        ``entries``: the new tensors, by the id of the tensor that each replaces.
        """
        self._residents.replaced(entries)

    def place(self, units: Sequence[Unit], runtime: Runtime, residents: ResidentPlacer) -> list[Backing]:
        """Turn the units' meta tensors into managed tensors, whose values are in the file. No bytes are read
        yet. Raises torch.OutOfMemoryError if the device has no room for units that stay packed.
        """
        checkpoint, source = self._source.checkpoint, self._source
        for index, unit in enumerate(units):
            stays = id(unit) in self._stay_packed
            # Bytes that stay on the device are decoded without staging memory.
            layout = checkpoint.wire(unit, unit.nbytes if stays else self._staging_bytes)
            backing = FileBacking(unit, runtime, index, layout, self.reads, self.packed_residents)
            self.backings.append(backing)
            self.reads.backings.append(backing)
            if layout.decoder is not None and self.engine.device.type != "cpu":
                layout.decoder.prepare(self.engine.device)
            if layout.decoder is not None and stays:
                backing.stay_packed(self.residents)
            for entry in unit.entries:
                file_tensor = checkpoint.of(entry.tensor)
                # tensors that the file lacks are resident, so the lookup cannot fail
                assert file_tensor is not None
                self.attached.remember(entry.tensor, torch.device("cpu"))
                home = FileHome(backing, entry, checkpoint, file_tensor, source.write)
                backing.homes.append(home)
                attach(home, AwayParameter, AwayTensor)
        return self.backings

    @property
    def staging_bytes(self) -> int:
        """Device memory in bytes that decoding packed units needs, 0 if no unit is copied packed."""
        wanted = (self.residents.packs and self._staging_bytes) or any(
            unit.packed and not unit.on_device for unit in self.backings
        )
        return self._staging_bytes if wanted else 0

    def start(self, transfer: Transfer, runner: RunnerState) -> None:
        """Begin to read. ``transfer``: the objects with which ``runner`` copies to the device."""
        if transfer.staging is None and self.residents.packs:
            self.residents.temporary_bytes = round_up(self._residents.decoded_bytes, self.engine.grain)
        self.reads.start(transfer, runner)

    @property
    def fast_ram_bytes(self) -> float:
        """Bytes of units that the host cache holds, so that each is read from the file once; infinite if it holds all."""
        return self.reads.fast_ram_bytes

    def close(self) -> None:
        """End all reads, and release the cache and the packed bytes on the device."""
        self.reads.close()
        self.packed_residents.close()

    def undo(self) -> None:
        """Restore the tensors of the model that streamed or stayed on the device."""
        run_all(super().undo, self._residents.undo, self._residents.give_up_left)

    def undo_keeping_residents(self) -> None:
        """Restore the tensors of the model, but leave those that stay on the device there for the next layout."""
        run_all(self._residents.leave, super().undo, self._residents.undo)

    def take_over(self, before: Tier) -> None:
        """Own the residents that ``before``, the tier of the last layout, has left on the device."""
        if isinstance(before, FileTier):
            self._residents.take_over(before._residents)

    def keep_left(self, groups: Iterable[Sequence[Entry]]) -> None:
        """Free the residents that the last layout left on the device, except the tensors of ``groups``."""
        self._residents.keep_left(groups)

    @property
    def undone(self) -> bool:
        """Whether no tensor is left to be restored by `undo`."""
        return super().undone and self._residents.undone

    # -- fetches

    @property
    def complete(self) -> bool:  # type: ignore[override]
        """Whether all units are in RAM and stay there, so that nothing more is read."""
        cache = self.reads.cache
        return cache is not None and cache.complete

    def read_ahead(self, upcoming: Iterable[ManagedUnit]) -> None:
        """Read the units ``upcoming`` ahead, in this order."""
        self.reads.expect([unit.index for unit in upcoming])

    def ready(self, unit: ManagedUnit) -> bool:
        """Return whether the unit is in the cache or on a device, and has passed its checksums if it is packed."""
        return cast("FileBacking", unit).ready()

    def fetch(self, unit: ManagedUnit, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Enqueue the copy of the unit from the cache. The cache opens only after all residents have been loaded, so load
        them first if a unit is used without a forward of the root module.
        """
        if self.reads.cache is None:
            self.begin_pass(everything=True)
        self.reads.expect_now(unit.index)
        return cast("FileBacking", unit).fetch(target, after, transfer)

    def recover(self) -> None:
        """Begin all reads anew after an interrupt."""
        self.reads.recover()

    # -- residents that are not loaded yet

    @property
    def arriving(self) -> bool:
        """Whether any residents are not loaded yet."""
        return self.residents.waiting

    def begin_pass(self, everything: bool) -> None:
        """Load the residents that any module may need. Load all residents if ``everything``, or if the cache
        has to wait for them.
        """
        if self.residents.waiting:
            # If RAM is too small for the cache and the residents' buffers, the cache opens only after the
            # residents are loaded.
            self.residents.begin_pass(everything or self.reads.waits_for_residents)

    def end_pass(self) -> None:
        """Remove forward wrappers that are no longer needed. Called after a root forward has succeeded."""
        self.residents.end_pass()
        if self.reads.gather is not None:
            how = "with" if torch.is_grad_enabled() else "without"
            self.reads.gather.order.compare(f"a forward {how} gradients")

    def end_backward(self) -> None:
        """Compare the fetches of ranks that gather."""
        if self.reads.gather is not None:
            self.reads.gather.order.compare("a backward")

    def wrap_arriving(self) -> None:
        """Wrap the forwards of modules whose residents are not loaded yet, so that each forward loads what it
        needs.
        """
        self.residents.wrap_forwards()

    # -- values, memory and figures

    def write_to_file_tensor(self, file_tensor: FileTensor, value: torch.Tensor) -> bool:
        """Store ``value`` as the value of a streamed weight. Returns False if that needs a new layout."""
        return self.reads.write(file_tensor, value)

    @property
    def device_bytes(self) -> int:
        """Device memory in bytes of the units that stay on the device packed, and of temporary staging memory."""
        return self.packed_residents.nbytes + self.residents.temporary_bytes

    def figures(self) -> TierFigures:
        """Return the figures for the report, disk reads included."""
        return self.packed_residents.figures(replace(super().figures(), read=self.reads.figures()))
