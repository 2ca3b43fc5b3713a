"""Defines `PackedBacking`: a unit whose large frozen weights are packed (losslessly compressed) in host
memory.

A fetch copies the packed bytes to the device and decodes them into a slot, the device memory that holds a
streamed unit while it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..codec.unit_decoder import UnitDecoder
from ..device.engine import Engine
from ..device.staging import Staging
from ..host.arena import storage_bytes
from ..model.home import Runtime
from ..model.managed_tensor import in_backward
from ..model.units import Unit
from ..stores.transfer import Transfer
from .packed_tensor import PackedTensor
from .pinned_tier import PinnedBacking

if TYPE_CHECKING:
    from .packed_residents import PackedResidents


class PackedBacking(PinnedBacking):
    """A unit that may be packed. Its block holds the bytes that ``decoder`` decodes, or exactly the slot's
    bytes if ``decoder`` is None.

    ``tensors``: a PackedTensor for each entry of the unit, None for entries that are not packed.
    ``encoded``: the version number of the weights when they were packed, if they keep their plain bytes too
    (`Packing.keep_raw`), otherwise None.
    ``outdated``: whether weights were written since the block was filled.
    """

    def __init__(
        self, unit: Unit, runtime: Runtime, index: int, packed_residents: PackedResidents,
        settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """``settle``: fills the block of an outdated unit anew."""
        super().__init__(unit, runtime, index)
        self._packed_residents, self._settle = packed_residents, settle
        self.outdated = False
        self.tensors: list[PackedTensor | None] = []
        self.decoder: UnitDecoder | None = None
        self.encoded: int | None = None

    def forget(self) -> None:
        super().forget()
        self.tensors.clear()

    @property
    def packed(self) -> bool:
        """Whether a fetch decodes packed bytes on the device."""
        return self.decoder is not None

    @property
    def on_device(self) -> bool:  # type: ignore[override]
        """Whether the packed bytes stay on the device, so that a fetch copies nothing from the host."""
        return self in self._packed_residents

    @property
    def host(self) -> torch.Tensor:
        """The bytes in host memory (uint8) that a fetch copies to the device."""
        return self.block.data

    def release_block(self, unpin: bool) -> None:
        """Release the block, and the decoder with its tables in device memory. ``unpin``: unpin the block."""
        super().release_block(unpin)
        self.decoder = None  # the decoder keeps tables in device memory

    def fetch(self, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Enqueue the copy or decoding of the unit's bytes into ``target``, after the events ``after``.
        Returns the last event.
        """
        if self.outdated:
            self._settle()
        if self.decoder is None:
            return super().fetch(target, after, transfer)
        # a weight has changed since it was packed
        if self.encoded is not None and self.version() != self.encoded:
            return self._copy_plain(target, after, transfer)
        if self.on_device:
            event = self._unpack_on_device(self.decoder, target, after, transfer)
        else:
            event = self._copy_packed(self.decoder, target, after, transfer)
        return self.copy_adopted(target, event, transfer) if self.adopted else event

    def _copy_plain(self, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Copy each tensor's plain bytes from host memory, because the packed bytes are outdated. Returns the
        last event.
        """
        event, meter, backward = None, transfer.meter, in_backward()
        for home in self.homes:
            start, end = home.entry.offset, home.entry.offset + home.entry.nbytes
            event, marks = transfer.engine.copy_in(
                target[start:end], storage_bytes(home.host), after, meter.timing
            )
            meter.copied(self.name, marks, end - start, end - start, backward, int(start == 0))
        return event

    def _unpack_on_device(
        self, decoder: UnitDecoder, target: torch.Tensor, after: Sequence[Any], transfer: Transfer
    ) -> Any:
        """Decode the packed bytes that stay on the device. Unpacked tensors that changed on the host are
        copied first. Returns the last event.
        """
        packed_residents, meter = self._packed_residents, transfer.meter
        if packed_residents.is_stale(self):
            for marks, nbytes, raw in packed_residents.copy_changes(self, meter.timing):
                meter.copied(self.name, marks, nbytes, raw, in_backward(), 0)
        event, times = packed_residents.unpack(self, decoder, target, after, meter.timing)
        meter.decoded(times)
        return event

    def _copy_packed(
        self, decoder: UnitDecoder, target: torch.Tensor, after: Sequence[Any], transfer: Transfer
    ) -> Any:
        """Copy the block to staging memory and decode it from there into ``target``, in pieces if needed.
        Returns the last event.

        The meter counts all pieces together as one transfer.
        """
        engine, meter, backward = transfer.engine, transfer.meter, in_backward()
        assert transfer.staging is not None
        done, raw = None, self.unit.raw_bytes
        source, copy = self.source(engine)
        for event, marks, nbytes, times in transfer.staging.bring(
            source, decoder, target, after, meter.timing, copy
        ):
            done = event
            if engine.blocking and marks is not None:
                meter.waited(marks[0], times[1], self.name, backward)
            meter.copied(self.name, marks, nbytes, raw, backward, int(raw > 0), self.peer is not None)
            meter.decoded(times)
            raw = 0
        return done


def prepare(staging: Staging, backings: Sequence[PackedBacking], engine: Engine) -> None:
    """Copy the decoding tables of all pieces of ``backings`` to the device in advance, so that fetches do not
    have to.
    """
    if engine.device.type == "cpu":
        return
    for backing in backings:
        if backing.decoder is not None:
            for piece in staging.pieces(backing.decoder, backing.host.numel()):
                piece.decoder.prepare(engine.device)
