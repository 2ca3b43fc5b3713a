"""Defines `Tier`, the interface of the places where a layout's streamed units are stored (pinned host memory,
packed host memory, a file).

A further tier is one subclass with `Tier.place` and a `Backing` with `Backing.fetch`. All other methods have
defaults that suit units whose bytes are always in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ..device.engine import Engine
from ..host.arena import Block
from ..model.home import Runtime
from ..model.units import Entry, Unit
from .attached_tensors import AttachedTensors
from .backing import Backing, Link

if TYPE_CHECKING:
    from .bound_checkpoint import FileTensor
    from .resident_placer import ResidentPlacer


@dataclass(frozen=True)
class ReadFigures:
    """The report's figures of a session with weights from disk.

    The ``ram`` budget and the peak of its use, bytes read, seconds of reading, seconds of waiting for reads,
    notes.
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

    ``streamed_bytes``: in slots. ``wire_bytes``: over the link. ``waiting_bytes``: host memory from which
    units stream. ``packed_units``: number of units that cross packed. ``packed_resident_...``: units whose
    packed bytes stay on the device. ``read``: figures of disk reads, None without a file.
    """

    streamed_bytes: int
    wire_bytes: int
    waiting_bytes: int
    packed_units: int
    packed_resident_bytes: int = 0
    packed_resident_raw_bytes: int = 0
    packed_resident_units: int = 0
    read: ReadFigures | None = None


class SlotReader(Protocol):
    """The streamer's interface for copying a unit's bytes back from the device."""

    def read_back(self, backing: Backing, block: Block, after_fetch: Callable[[], None]) -> None:
        """Fetch the unit to a slot, call ``after_fetch``, and copy the slot to ``block``."""


class Tier:
    """The store of one layout's streamed units, and the factory of their backings.

    ``notes``: for the report. ``left_device``: called when units whose packed bytes stayed on the device
    cross the link from now on. ``reads_ahead``: whether units may have to be read from disk first
    (`complete`, `expect`, `Backing.ready`).
    """

    reads_ahead = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backings: list[Backing] = []
        self.attached = AttachedTensors(engine)
        self.notes: list[str] = []
        self.left_device: Callable[[], None] = lambda: None

    # -- laying out, and taking back

    def place(self, units: Sequence[Unit], runtime: Runtime, residents: ResidentPlacer) -> list[Backing]:
        """Make a backing for each unit, turn its tensors into managed tensors, and store the backings in
        `backings`.

        ``residents``: its units may be moved between the streamed ones (`ResidentPlacer.placement_order`), or
        later.
        """
        raise NotImplementedError

    def load(self, entries: list[Entry], name: str, modules: list[nn.Module]) -> list[Entry]:
        """Begin to load those of the resident ``entries`` whose values this tier stores; return the others.

        ``modules``: the only modules whose forward needs the entries; empty if any forward may.
        """
        return entries

    @property
    def loading_bytes(self) -> int:
        """Device memory in bytes that `load` allocated."""
        return 0

    def replaced(self, entries: dict[int, Entry]) -> None:
        """Update the records of loaded tensors that the model replaced. ``entries``: the new tensors, by the id
        of the tensor that each replaces."""

    @property
    def staging_bytes(self) -> int:
        """Device memory in bytes from which fetches decode; known after `place`."""
        return 0

    def start(self, link: Link) -> None:
        """Begin to serve fetches over ``link``, now that the slots exist."""

    def close(self) -> None:
        """Release the resources that fetches need. Called after the last fetch, when no work is pending on the
        device."""

    def guard(self) -> None:
        """Let operators that read host bytes of streamed units in a step raise an error, on engines that see
        operators."""

    @property
    def came_on_device(self) -> bool:
        """Whether streamed weights were on a device when the session attached, and have to return there."""
        return any(device.type != "cpu" for device in self.attached.came_from)

    def undo(self) -> None:
        """Restore every streamed tensor's object, class and device, with its present value. After a failure
        the call may be repeated."""
        self.attached.undo()
        self.backings = []

    # -- reading ahead

    @property
    def complete(self) -> bool:
        """Whether all units are in host memory and stay there, so that nothing is read any more."""
        return True

    def open(self) -> None:
        """Prepare for a unit that is used without a forward of the root module."""

    def expect(self, upcoming: Iterable[int]) -> None:
        """Read ahead the units of these indexes, in this order."""

    @property
    def used_lately(self) -> AbstractSet[int]:
        """Indexes of recently used units, which read-ahead leaves out for now."""
        return frozenset()

    # -- residents that are still on their way

    @property
    def arriving(self) -> bool:
        """Whether resident weights are still to be loaded."""
        return False

    def begin_pass(self, everything: bool) -> None:
        """Load the residents that a root forward needs at its start; all of them if ``everything``."""

    def end_pass(self) -> None:
        """Note that a root forward succeeded."""

    def wrap_arriving(self) -> None:
        """Wrap forwards so that each resident unit is loaded when one of its modules runs."""

    # -- values

    def write(self, file_tensor: FileTensor, value: torch.Tensor) -> bool:
        """Give a streamed weight of a file another value; return False if that needs a new layout."""
        return False

    @property
    def packs(self) -> bool:
        """Whether weights of this tier may be packed."""
        return False

    def pack_anew(self) -> None:
        """Pack units again whose plain bytes changed. Called between passes."""

    def unpack(self, reader: SlotReader, backings: Sequence[Backing], pin: bool = True) -> Sequence[Backing]:
        """Unpack units on the host, so that they cross unpacked, and return those that failed. Called between
        passes."""
        return []

    def stay_packed(self, backings: Sequence[Backing]) -> None:
        """Keep the packed bytes of units on the device. Raise torch.OutOfMemoryError."""

    def dress(self) -> None:
        """Let weights without bytes of their own be read while the session is parked."""

    @property
    def decode_bytes_per_second(self) -> float | None:
        """Measured decoding rate of the device in bytes of output per second, None if not measured."""
        return None

    # -- memory

    @property
    def device_bytes(self) -> int:
        """Device memory in bytes that streamed units take beside slots and staging memory."""
        return 0

    def make_host_room(self, nbytes: int) -> None:
        """Release host memory by the bytes by which ``nbytes`` more would exceed the ``ram`` budget."""

    # -- accounts

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the units in slots."""
        return sum(backing.nbytes for backing in self.backings)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the units over the link, those included that stay on the device packed."""
        return sum(backing.wire_bytes for backing in self.backings)

    def figures(self) -> TierFigures:
        """Return the figures for the report."""
        crossing = [backing for backing in self.backings if not backing.on_device]
        return TierFigures(
            streamed_bytes=self.streamed_bytes,
            wire_bytes=self.wire_bytes,
            waiting_bytes=sum(backing.wire_bytes for backing in crossing),
            packed_units=sum(backing.packed for backing in crossing),
        )
