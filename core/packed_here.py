"""Units that stay on the device packed: their wire lies there, and is unpacked into a slot at each use.

About 1.4 times as many weights stay in the same memory, and what stays crosses no link; what it costs is the unpacking, which
is some thirty times as fast as a link on an H200. To the streamer such a unit streams, from device memory: order, slots and
events are the same. Its host block stays where it is, so that it can give way at any time at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .codec.unit import RawEntry
from .host_copies import HostCopies
from .plan import SMALL_UNIT, round_up
from .streamed import Streamed
from .transfer import Engine
from .units import Unit

if TYPE_CHECKING:
    from .packed_tensors import PackedTensor
    from .packing import Packing


LEAST_UNIT = SMALL_UNIT  # bytes of what may stay packed: smaller ones share a buffer, raw


class PackedHere:
    """The wires on the device of one streamer's units, each in a buffer of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.left: Callable[[], None] = lambda: None  # is told when units came to cross
        self._buffers: dict[int, torch.Tensor] = {}  # by unit's index
        self._units: dict[int, Streamed] = {}
        self._versions: dict[int, int] = {}  # of the host bytes that a buffer has
        self._copied: dict[int, Any] = {}  # events of copies that no unpacking has waited for yet
        self._read: dict[int, Any] = {}  # events after which a buffer was last unpacked

    def __len__(self) -> int:
        return len(self._units)

    @property
    def nbytes(self) -> int:
        """Device bytes, as the allocator reserves them."""
        return sum(round_up(buffer.numel(), self._engine.grain) for buffer in self._buffers.values())

    @property
    def raw_bytes(self) -> int:
        """Of what they unpack to."""
        return sum(unit.nbytes for unit in self._units.values())

    def keep(self, units: Sequence[Streamed]) -> None:
        """Copy the units' wires to the device. Raises torch.OutOfMemoryError."""
        buffers = [self._engine.allocate(unit.host.numel()) for unit in units]
        self._engine.synchronize()  # this memory may have been others' until now
        for unit, buffer in zip(units, buffers, strict=True):
            assert unit.decoder is not None
            self._versions[unit.index] = unit.version()
            self._engine.copy_in(buffer, unit.host, (), False)
            self._buffers[unit.index], self._units[unit.index], unit.wire = buffer, unit, buffer
        self._engine.synchronize()

    def follow(self, unit: Streamed) -> None:
        """The unit's host block was made anew, and nothing is under way on the device: its next use has the new bytes."""
        buffer = self._buffers.get(unit.index)
        if buffer is None:
            return
        if unit.decoder is None or unit.host.numel() > buffer.numel():
            self._drop(unit)
            self.left()
            return
        unit.wire = buffer[: unit.host.numel()]
        self._versions.pop(unit.index, None)

    def stale(self, unit: Streamed) -> bool:
        """Whether the host's bytes were written since they were copied (norms, biases, what trains)."""
        return self._versions.get(unit.index) != unit.version()

    def renew(self, unit: Streamed, timed: bool) -> list[tuple[Any, int, int]]:
        """Issue the copies that a `stale` unit needs before it is unpacked: of each its marks, its bytes, and those of the
        weights in them. What is packed is written by making the block anew: else only what lies beside it crosses."""
        assert unit.wire is not None and unit.decoder is not None
        index, version = unit.index, unit.version()
        raw_ones = [e for e in unit.decoder.entries if isinstance(e, RawEntry) and e.nbytes]
        plain = [(e.wire_at, e.wire_at + e.nbytes, e.nbytes) for e in raw_ones]
        if (
            not plain
            or index not in self._versions
            or 2 * sum(nbytes for *_, nbytes in plain) > unit.host.numel()
        ):
            plain = [(0, unit.host.numel(), unit.unit.raw_bytes)]
        self._versions.pop(index, None)
        read = [self._read[index]] if index in self._read else []
        copies = []
        for start, end, raw in plain:
            self._copied[index], marks = self._engine.copy_in(
                unit.wire[start:end], unit.host[start:end], read, timed
            )
            copies.append((marks, end - start, raw))
        self._versions[index] = version
        return copies

    def unpack(
        self, unit: Streamed, target: torch.Tensor, after: Sequence[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Issue the unit's unpacking to ``target`` once ``after`` is reached: its done event and marks."""
        assert unit.decoder is not None and unit.wire is not None
        fresh = [self._copied[unit.index]] if unit.index in self._copied else []
        event, times = self._engine.decode(unit.decoder, unit.wire, target, (*fresh, *after), timed)
        self._read[unit.index] = event
        self._copied.pop(unit.index, None)
        return event, times

    def leave(self, wanted: int, later: Callable[[Streamed], int]) -> int:
        """Let at least ``wanted`` bytes of the device go, of units that are needed ``later`` first; they cross from now on.
        Nothing may be under way on the device. Returns how many it was."""
        freed = 0
        for unit in sorted(self._units.values(), key=later, reverse=True):
            if freed >= wanted:
                break
            freed += round_up(self._buffers[unit.index].numel(), self._engine.grain)
            self._drop(unit)
        if freed:
            self.left()
        return freed

    def _drop(self, unit: Streamed) -> None:
        unit.wire = None
        del self._buffers[unit.index], self._units[unit.index]
        for known in (self._versions, self._copied, self._read):
            known.pop(unit.index, None)

    def close(self) -> None:
        """Nothing is under way on the device."""
        for unit in list(self._units.values()):
            self._drop(unit)


def wire_bytes(
    unit: Unit,
    shelf: dict[int, PackedTensor],
    copies: HostCopies,
    policy: Packing,
    expected: float,
    least: int,
) -> int:
    """What ``unit`` packs to, 0 where it does not: as it was packed before, else as bf16 weights of at least ``least`` bytes
    mostly do (``expected`` of their bytes). Of other dtypes nothing is expected: they gain little."""
    if unit.nbytes < LEAST_UNIT:
        return 0
    known = copies.find(unit)
    if known is not None and known.decoder is not None:
        return known.nbytes
    total = saved = 0
    for entry in unit.entries:
        size, found = entry.nbytes, shelf.get(id(entry.tensor))
        if policy.leaves(entry.name):
            pass
        elif found is not None:
            size = entry.nbytes if found.header is None else found.header.total
        elif entry.tensor.dtype is torch.bfloat16 and not entry.trainable and entry.nbytes >= least:
            size = int(expected * entry.nbytes)
        saved += entry.nbytes - size
        total += -(-size // 512) * 512
    return total if saved > 0.1 * unit.nbytes else 0
