"""Defines `Tier`, the base of the stores of a layout's streamed units: pinned host memory, packed host memory, or a
file.

A unit is a group of tensors that are copied to the device together. Its backing is the object that fetches
its bytes into a slot (the device memory that holds a streamed unit while it is used). Residents are tensors
that stay on the device. The link is the connection between host and device. A tier is a `Store` (stores/store.py),
and beside that it gives the model's tensors to the store and takes them back (`place`, `undo`), and loads residents
from a file. Its methods have defaults that suit units whose bytes are always in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from ..device.engine import Engine
from ..host.arena import Block
from ..model.home import Home, ManagedUnit, Runtime
from ..model.units import Entry, Unit
from ..stores.transfer import Transfer
from .attached_tensors import AttachedTensors
from .backing import Backing, RunnerState

if TYPE_CHECKING:
    from .bound_checkpoint import FileTensor
    from .resident_placer import ResidentPlacer


@dataclass(frozen=True)
class ReadFigures:
    """The figures of disk reads for the report of a session with weights from disk.

    They are the ``ram`` budget and the peak of its use, bytes read, seconds of reading, seconds of waiting
    for reads, and notes.
    """

    ram_budget_bytes: int
    ram_peak_bytes: int
    read_bytes: int
    reading_seconds: float
    wait_seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class TierFigures:
    """Bytes of a layout's streamed units, for the report.

    ``streamed_bytes``: bytes of the units in slots.
    ``wire_bytes``: bytes that are copied over the link to fetch all units once.
    ``waiting_bytes``: host memory from which units are streamed.
    ``peer_bytes``: memory of other devices from which units are streamed.
    ``packed_units``: number of units that are copied packed.
    ``packed_resident_...``: figures of units whose packed bytes stay on the device.
    ``read``: figures of disk reads, None if no weights come from a file.
    """

    streamed_bytes: int
    wire_bytes: int
    waiting_bytes: int
    packed_units: int
    peer_bytes: int = 0
    packed_resident_bytes: int = 0
    packed_resident_raw_bytes: int = 0
    packed_resident_units: int = 0
    read: ReadFigures | None = None


class SlotReader(Protocol):
    """The streamer's interface for copying a unit's bytes back from the device."""

    def read_back(self, backing: ManagedUnit, block: Block, after_fetch: Callable[[], None]) -> None:
        """Fetch the unit to a slot, call ``after_fetch``, and copy the slot's bytes to ``block``."""


class Tier:
    """The store of one layout's streamed units. Makes their backings.

    ``notes``: notes for the report.
    ``left_device``: called when units whose packed bytes stayed on the device have to be copied over the link
    from now on.
    ``complete``: whether all units are in host memory and stay there, so that nothing more is read.
    """

    complete = True  # no property: the runner asks at each use of a unit

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backings: list[Backing] = []
        self.attached = AttachedTensors(engine)
        self.notes: list[str] = []
        self.left_device: Callable[[], None] = lambda: None

    # -- making and undoing a layout

    def place(self, units: Sequence[Unit], runtime: Runtime, residents: ResidentPlacer) -> list[Backing]:
        """Make a backing for each unit, turn the unit's tensors into managed tensors, and store the backings
        in `backings`.

        ``runtime``: the streamer that will use the tensors.
        ``residents``: the placer of residents. Its units may be moved between the streamed units
        (`ResidentPlacer.placement_order`), or later.
        """
        raise NotImplementedError

    def load(self, entries: list[Entry], name: str, modules: list[nn.Module]) -> list[Entry]:
        """Begin to load those of ``entries`` whose values this tier stores to the device, where they stay.
        Returns the other entries.

        ``modules``: the only modules whose forward needs the entries; empty if any forward may.
        """
        return entries

    @property
    def loading_bytes(self) -> int:
        """Device memory in bytes that `load` allocated."""
        return 0

    def replaced(self, entries: dict[int, Entry]) -> None:
        """Update the records of loaded tensors that the model replaced.

        ``entries``: the new tensors, by the id of the tensor that each replaces.
        """

    @property
    def staging_bytes(self) -> int:
        """Device memory in bytes that fetches need for packed bytes before decoding. Known after `place`."""
        return 0

    def start(self, transfer: Transfer, runner: RunnerState) -> None:
        """Begin to serve fetches by ``transfer`` for ``runner``. Called once the slots exist, after `read_ahead`."""

    # -- units in the memory of other devices (`PeerMemory`)

    @property
    def fast_ram_bytes(self) -> float:
        """Bytes of units that host memory holds from which copies run at the link's rate. Known after `place`."""
        return math.inf

    def left_host(self) -> None:
        """Give up the host memory that units in the memory of other devices do not need. Called before `start`."""

    def close(self) -> None:
        """Release the resources that fetches need. Called after the last fetch, when no work is pending on the
        device."""

    def guard(self) -> None:
        """Let operators that read host bytes of streamed units in a step raise an error, if the engine can
        observe operators.
        """

    @property
    def came_on_device(self) -> bool:
        """Whether streamed weights were on a device when the session was created. They have to return there
        at the end.
        """
        return any(device.type != "cpu" for device in self.attached.came_from)

    def undo(self) -> None:
        """Restore every streamed tensor's object, class and device, with its present value. After a failure
        the call may be repeated."""
        self.attached.undo()
        self.backings = []

    def undo_keeping_residents(self) -> None:
        """Do what `undo` does, but leave tensors that `load` has loaded on the device, for the tier of the next layout."""
        self.undo()

    def take_over(self, before: Tier) -> None:
        """Own the tensors that ``before``, the tier of the last layout, has left on the device."""

    def keep_left(self, groups: Iterable[Sequence[Entry]]) -> None:
        """Free the tensors that the last layout left on the device, except the tensors of ``groups``. Called before `load`,
        which is then called for each of these groups.
        """

    @property
    def undone(self) -> bool:
        """Whether no tensor is left to be restored by `undo`."""
        return not self.backings and self.attached.empty

    # -- fetches and values, as `Store` describes them

    def read_ahead(self, upcoming: Iterable[ManagedUnit]) -> None:
        """Read the units ``upcoming`` ahead, in this order."""

    def ready(self, unit: ManagedUnit) -> bool:
        """Return whether the unit can be fetched without waiting for a disk read."""
        return True

    def fetch(self, unit: ManagedUnit, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Enqueue the copy of the unit into ``target``, after the events ``after``. Returns the event of the copy."""
        return cast("Backing", unit).fetch(target, after, transfer)

    def read(self, weight: Home) -> torch.Tensor:
        """Return the weight's present value, as a CPU tensor that the caller must not write to."""
        return weight.read()

    def write(self, weight: Home, value: torch.Tensor) -> None:
        """Store ``value``, a CPU tensor, as the weight's value."""
        weight.keep(value)

    def recover(self) -> None:
        """Bring reads and caches into order after an interrupt. Called while no fetch is running and the device is
        idle.
        """

    # -- residents that are not loaded yet

    @property
    def arriving(self) -> bool:
        """Whether any residents are not loaded yet."""
        return False

    def begin_pass(self, everything: bool) -> None:
        """Load the residents that a root forward needs at its start. Load all residents if ``everything``."""

    def end_pass(self) -> None:
        """Note that a root forward has succeeded."""

    def end_backward(self) -> None:
        """Note that a backward has ended."""

    def wrap_arriving(self) -> None:
        """Wrap forwards so that each resident unit is loaded when one of its modules runs."""

    # -- values that the program writes to weights, and packing

    def write_to_file_tensor(self, file_tensor: FileTensor, value: torch.Tensor) -> bool:
        """Store ``value`` as the value of a streamed weight from a file. Returns False if that needs a new
        layout.
        """
        return False

    @property
    def packs(self) -> bool:
        """Whether weights of this tier may be packed."""
        return False

    def pack_anew(self) -> None:
        """Pack units again whose plain bytes have changed. Called between passes."""

    def unpack(self, reader: SlotReader, backings: Sequence[Backing], pin: bool = True) -> Sequence[Backing]:
        """Decode units into host memory, so that they are copied to the device unpacked. Returns the backings
        that failed. Called between passes.

        ``reader``: copies a unit's decoded bytes back from the device.
        ``pin``: pin each new block whose old block was pinned.
        """
        return []

    def stay_packed(self, backings: Sequence[Backing]) -> None:
        """Keep the packed bytes of the units ``backings`` on the device. Raises torch.OutOfMemoryError."""

    def dress(self) -> None:
        """Let the values of weights without plain bytes be read while the session is parked, that is, while
        it uses no device memory.
        """

    def forget(self) -> None:
        """Drop the references to the model's tensors. Called after the session was closed."""

    @property
    def decode_bytes_per_second(self) -> float | None:
        """Measured decoding rate of the device in bytes of output per second, None if it was not measured."""
        return None

    # -- memory

    @property
    def device_bytes(self) -> int:
        """Device memory in bytes that streamed units take beside slots and staging memory."""
        return 0

    # -- figures

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the units in slots."""
        return sum(backing.nbytes for backing in self.backings)

    @property
    def wire_bytes(self) -> int:
        """Bytes that are copied over the link to fetch all units once. Units that stay on the device packed
        are counted too.
        """
        return sum(backing.wire_bytes for backing in self.backings)

    def figures(self) -> TierFigures:
        """Return the figures for the report."""
        crossing = [backing for backing in self.backings if not backing.on_device]
        return TierFigures(
            streamed_bytes=self.streamed_bytes,
            wire_bytes=self.wire_bytes,
            waiting_bytes=sum(backing.wire_bytes for backing in crossing if backing.peer is None),
            packed_units=sum(backing.packed for backing in crossing),
            peer_bytes=sum(backing.wire_bytes for backing in crossing if backing.peer is not None),
        )
