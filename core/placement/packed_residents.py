"""Defines `PackedResidents`: units whose packed bytes stay in device memory and are decoded into a slot at
each use.

A slot is the device memory that holds a unit while it is used. The link is the connection between host and
device. About 1.4 times as many weights fit into the same device memory if they are packed, and they are not
copied over the link. The cost is the time of decoding. On an H200 the decoder alone writes 2009 GB/s of
unpacked weights (benchmarks/records/2026-11-22-h200-codec-3.json), and the link copies 54.6 GB/s
(benchmarks/records/2026-11-22-h200-suite-12.json). The streamer treats such a unit as any streamed unit:
order, slots and events are the same, but the bytes come from device memory. A unit of host memory keeps its
host block, so its packed bytes on the device can be given up at no cost. A unit of a weights file has no host
copy; its packed bytes are loaded from the file on first use (`resident_loads.Load`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..codec.unit_decoder import RawEntry, UnitDecoder
from ..device.engine import Engine
from ..model.units import Unit
from ..plan.residency import SMALL_UNIT, round_up
from .backing import Backing
from .host_copies import HostCopies
from .packer import packs
from .tier import TierFigures

if TYPE_CHECKING:
    from .packed_backing import PackedBacking
    from .packed_tensor import PackedTensor


# Bytes of the smallest unit that may stay packed. Smaller units stay on the device unpacked, in one shared
# buffer.
LEAST_UNIT = SMALL_UNIT


class PackedResidents:
    """The packed bytes on the device of one streamer's units, one buffer for each unit.

    ``on_unit_dropped``: called when the bytes of a unit can no longer stay on the device. The unit is copied
    over the link from then on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.on_unit_dropped: Callable[[], None] = lambda: None
        self._buffers: dict[int, torch.Tensor] = {}  # the device memory of each unit, by the unit's index
        self._wires: dict[int, torch.Tensor] = {}  # the part of each buffer that holds the packed bytes
        self._units: dict[int, Backing] = {}
        self._versions: dict[int, int] = {}  # the version of the host bytes that each buffer holds
        self._copied: dict[int, Any] = {}  # events of copies that decoding has to wait for
        self._read: dict[int, Any] = {}  # events of the last decoding from each buffer

    def __len__(self) -> int:
        return len(self._units)

    def __contains__(self, unit: Backing) -> bool:
        return self._units.get(unit.index) is unit

    @property
    def nbytes(self) -> int:
        """Device bytes of all buffers, as the allocator reserves them."""
        return sum(round_up(buffer.numel(), self._engine.grain) for buffer in self._buffers.values())

    @property
    def raw_bytes(self) -> int:
        """Bytes of the units when decoded."""
        return sum(unit.nbytes for unit in self._units.values())

    def allocate(self, units: Sequence[Backing], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return a device buffer for each of ``units``, of as many bytes as ``sizes`` says, which the caller
        fills with the unit's packed bytes. Raises torch.OutOfMemoryError.
        """
        buffers = [self._engine.allocate(nbytes) for nbytes in sizes]
        self._engine.synchronize()  # other streams may still use memory that the allocator reused
        for unit, buffer in zip(units, buffers, strict=True):
            self._buffers[unit.index] = self._wires[unit.index] = buffer
            self._units[unit.index] = unit
        return buffers

    def keep(self, units: Sequence[PackedBacking]) -> None:
        """Copy the packed bytes of ``units`` to the device. Raises torch.OutOfMemoryError."""
        buffers = self.allocate(units, [unit.host.numel() for unit in units])
        for unit, buffer in zip(units, buffers, strict=True):
            self._versions[unit.index] = unit.version()
            self._engine.copy_in(buffer, unit.host, (), False)
        self._engine.synchronize()

    def update(self, unit: PackedBacking) -> None:
        """Use the unit's new host block at the next decoding. Drop the unit if the block does not fit into
        the unit's buffer.

        Must not be called while work is pending on the device.
        """
        buffer = self._buffers.get(unit.index)
        if buffer is None:
            return
        if unit.decoder is None or unit.host.numel() > buffer.numel():
            self._drop(unit)
            self.on_unit_dropped()
            return
        self._wires[unit.index] = buffer[: unit.host.numel()]
        self._versions.pop(unit.index, None)

    def is_stale(self, unit: PackedBacking) -> bool:
        """Return whether unpacked tensors of the unit (norms, biases, trainable weights) have changed on the
        host since they were copied.
        """
        return self._versions.get(unit.index) != unit.version()

    def copy_changes(self, unit: PackedBacking, timed: bool) -> list[tuple[Any, int, int]]:
        """Enqueue the copies that an outdated unit needs before decoding. Returns (time marks, bytes, bytes
        of weights) of each copy.

        The value of a packed tensor changes only together with a new block. So after the first copy, only the
        unpacked tensors are copied, or the whole block if they take more than half of it. ``timed``: whether
        to record time marks.
        """
        assert unit.decoder is not None
        index, version, wire = unit.index, unit.version(), self._wires[unit.index]
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
                wire[start:end], unit.host[start:end], read, timed
            )
            copies.append((marks, end - start, raw))
        self._versions[index] = version
        return copies

    def unpack(
        self, unit: Backing, decoder: UnitDecoder, target: torch.Tensor, after: Sequence[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Enqueue the decoding of the unit by ``decoder`` into ``target``, after the events ``after``. Returns
        the event at the end of decoding, and the time marks.
        """
        fresh = [self._copied[unit.index]] if unit.index in self._copied else []
        event, times = self._engine.decode(decoder, self._wires[unit.index], target, (*fresh, *after), timed)
        self._read[unit.index] = event
        self._copied.pop(unit.index, None)
        return event, times

    def _drop(self, unit: Backing) -> None:
        """Release the unit's buffer on the device."""
        del self._buffers[unit.index], self._units[unit.index], self._wires[unit.index]
        for known in (self._versions, self._copied, self._read):
            known.pop(unit.index, None)

    def figures(self, others: TierFigures) -> TierFigures:
        """Return ``others``, the figures of a tier, with those of the tier's units that stay packed."""
        return replace(
            others,
            packed_resident_bytes=self.nbytes,
            packed_resident_raw_bytes=self.raw_bytes,
            packed_resident_units=len(self),
        )

    def close(self) -> None:
        """Release all buffers. Must not be called while work is pending on the device."""
        for unit in list(self._units.values()):
            self._drop(unit)


def worth_keeping(unit: Unit, packed_bytes: int, saved_bytes: int | None = None) -> int:
    """Return ``packed_bytes``, or 0 if the unit is small or packing saves less than 10 % of its bytes.

    ``saved_bytes``: by default the difference to the unit's bytes.
    """
    saved = unit.nbytes - packed_bytes if saved_bytes is None else saved_bytes
    return packed_bytes if unit.nbytes >= LEAST_UNIT and saved > 0.1 * unit.nbytes else 0


def crossing_bytes(unit: Unit, shelf: dict[int, PackedTensor], expected: float) -> int:
    """Return the bytes that a copy of ``unit`` takes on the link if its weights are packed.

    The bytes of weights on the ``shelf`` are known. Other bf16 weights that are packed are expected to shrink to the
    fraction ``expected``.
    """
    total = 0
    for entry in unit.entries:
        found = shelf.get(id(entry.tensor))
        if found is not None:
            total += found.blob.numel()
        elif entry.tensor.dtype is torch.bfloat16 and packs(entry):
            total += int(expected * entry.nbytes)
        else:
            total += entry.nbytes
    return total


def wire_bytes(
    unit: Unit,
    shelf: dict[int, PackedTensor],
    copies: HostCopies,
    expected: float,
    least: int,
) -> int:
    """Return the expected packed bytes of ``unit``, or 0 if packing saves less than 10 %.

    The bytes of a unit that was packed before are known. Otherwise, bf16 weights of at least ``least`` bytes
    are expected to shrink to the fraction ``expected``. Other dtypes shrink little, and count as unpacked.
    """
    if unit.nbytes < LEAST_UNIT:
        return 0
    known = copies.find(unit)
    if known is not None and known.decoder is not None:
        return known.nbytes
    total = saved = 0
    for entry in unit.entries:
        size, found = entry.nbytes, shelf.get(id(entry.tensor))
        if found is not None:
            size = entry.nbytes if found.header is None else found.header.total
        elif entry.tensor.dtype is torch.bfloat16 and not entry.trainable and entry.nbytes >= least:
            size = int(expected * entry.nbytes)
        saved += entry.nbytes - size
        total += -(-size // 512) * 512
    return worth_keeping(unit, total, saved)
