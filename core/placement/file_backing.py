"""Defines `FileBacking`: the bytes of a streamed unit that is in a weights file. They are copied to a slot
from a host cache.

A slot is the device memory that holds a streamed unit while the unit is used. The link is the connection
between host and device. The packed bytes of a unit may stay on the device (`PackedResidents`). Such a unit is
loaded from the file once, and takes no room in the host cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..codec.unit_decoder import UnitDecoder
from ..host.arena import storage_bytes
from ..host.blob_checksums import PieceChecksums
from ..model.home import Runtime
from ..model.managed_tensor import in_backward
from ..model.units import Unit
from ..stores.transfer import Transfer
from .backing import Backing
from .file_home import FileHome
from .packed_residents import PackedResidents
from .peer_memory import PeerCopy
from .resident_loads import Load
from .wire_format import WireFormat

if TYPE_CHECKING:
    from .file_reads import FileReads
    from .resident_loader import ResidentLoader

_NOTHING = WireFormat(0, ())


class FileBacking(Backing):
    """A streamed unit that is read from a file in pieces.

    ``layout``: the byte layout of the unit outside its slot. It contains packed tensors, or is exactly the
    layout of the slot.
    """

    def __init__(
        self, unit: Unit, runtime: Runtime, index: int, layout: WireFormat, reads: FileReads,
        packed_residents: PackedResidents,
    ) -> None:  # fmt: skip
        super().__init__(unit, runtime, index)
        self.layout, self._reads, self._packed_residents = layout, reads, packed_residents
        self._loader: ResidentLoader | None = None
        self._load: Load | None = None

    def stay_packed(self, loader: ResidentLoader) -> None:
        """Allocate device memory for the unit's packed bytes, and let ``loader`` load them on first use.

        Raises torch.OutOfMemoryError.
        """
        (buffer,) = self._packed_residents.allocate([self], [self.layout.nbytes])
        self._load_once(buffer, loader)

    def wait_on(self, copy: PeerCopy) -> None:
        """Load the unit's bytes to the memory of another device on first use, and fetch them from there."""
        self.peer = copy
        self._load_once(copy.data, self._reads.loader)

    def leave_peer(self) -> None:
        """Drop the unit's bytes in the memory of another device."""
        if self._load is not None and self.peer is not None:
            # The traceback of an exception may keep the load alive, but not its memory.
            self._load.buffer = self._load.buffer.new_empty(0)
            self._load = None
        super().leave_peer()

    def _load_once(self, buffer: torch.Tensor, loader: ResidentLoader) -> None:
        """Let ``loader`` load the unit's bytes to ``buffer`` once, and not through the host cache."""
        modules, placed = self.unit.modules, list(self.layout.placed)
        self._loader = loader
        self._load = Load(self.name, buffer, self.layout.nbytes, placed, [], modules, lambda: None)
        self._load.wire, self._load.stays_packed = self.layout, True
        self._load.engine = None if self.peer is None else self.peer.peer.engine
        loader.add(self._load)

    def release(self) -> None:
        """Free the device memory of packed bytes that stay on the device. Called when the layout ends: what still
        refers to it, until the garbage collector has run, must not keep device memory.
        """
        if self._load is not None:
            self._load.buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def on_device(self) -> bool:  # type: ignore[override]
        """Whether the packed bytes stay on the device, so that a fetch copies nothing from the host."""
        return self._load is not None and self.peer is None

    @property
    def wire(self) -> WireFormat:
        """The byte layout of the unit in the host cache and on the transfer, of 0 bytes if the unit takes no room in the
        cache, because it stays on the device packed, or is in the memory of another device.
        """
        return self.layout if self._load is None else _NOTHING

    @property
    def packed(self) -> bool:
        """Whether a fetch decodes packed bytes on the device."""
        return self.layout.decoder is not None

    @property
    def wire_bytes(self) -> int:
        """Bytes of the unit outside its slot. One fetch copies them over the transfer, unless they stay on the
        device.
        """
        return self.layout.nbytes

    @property
    def file_homes(self) -> list[FileHome]:
        """The homes of the unit's tensors, the objects that read and write the tensors' values."""
        return cast("list[FileHome]", self.homes)

    def ready(self) -> bool:
        """Return whether the whole unit is in the host cache, or on the device if it stays there packed, or on
        another device if it waits there, and has passed its checksums if it is packed.
        """
        if self._load is not None:
            return self._load.loaded
        if self.layout.decoder is not None:
            return self._reads.is_verified(self.index)
        cache = self._reads.cache
        return cache is not None and cache.has(self.index)

    def fetch(self, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Enqueue the copies of the unit's pieces to ``target``, each as soon as its disk read is done.
        Returns the last event.

        Packed pieces are copied to ``transfer.staging`` and decoded from there. If they stay on the device, they are
        decoded from where they are. A tensor with a written value is copied from host memory and left out of
        the file's pieces, so that each byte is copied once.
        """
        engine, meter, backward, wire = transfer.engine, transfer.meter, in_backward(), self.layout
        homes, load = cast("list[FileHome]", self.homes), self._load
        on_device = load is not None and self.peer is None
        written = [which for which, home in enumerate(homes) if home.file_tensor.changed is not None]
        # Ranks that fetch together all copy the file's bytes, whatever values were written on one of them.
        apart = written and self._reads.gather is None and self.peer is None
        spans, decoder = wire.without(frozenset(written)) if apart else (None, wire.decoder)
        event, copied_bytes = None, 0
        if load is not None and on_device:
            if decoder is not None:
                event = self._decode_resident(load, decoder, target, after, transfer)
                after = [event]
        elif decoder is None:
            event, _, copied_bytes = self._copy_pieces(target, after, transfer, spans, backward)
            after = after if event is None else [event]  # None: every tensor of the unit was written
        else:
            assert transfer.staging is not None
            staged, free = transfer.staging.take(wire.nbytes)
            copied, found, copied_bytes = self._copy_pieces(staged, free, transfer, spans, backward)
            transfer.staging.release_after(copied)
            if self.peer is None:  # otherwise they were verified when the bytes came to the other device
                self._reads.verify_checksums(self.index, found)
            event, times = engine.decode(decoder, staged, target, (copied, *after), meter.timing)
            transfer.staging.release_after(event)
            meter.decoded(times)
            after = [event]
        for home in map(homes.__getitem__, written):
            value = home.file_tensor.changed
            assert value is not None
            start, end = home.entry.offset, home.entry.offset + home.entry.nbytes
            event, marks = engine.copy_in(target[start:end], storage_bytes(value), after, meter.timing)
            self._count(transfer, marks, end - start, backward)
        # Count one transfer, however many copies were needed, and none if everything was on the device.
        if not on_device:
            meter.copied(self.unit.name, None, copied_bytes, self.unit.raw_bytes, backward, 1)
        elif written:
            raw_bytes = sum(homes[which].entry.nbytes for which in written)
            meter.copied(self.unit.name, None, 0, raw_bytes, backward, 0)
        return event

    def _decode_resident(
        self, load: Load, decoder: UnitDecoder, target: torch.Tensor, after: Sequence[Any], transfer: Transfer
    ) -> Any:
        """Decode the packed bytes that stay on the device, after loading them at the first use. Returns the
        event at the end of decoding.
        """
        self._need(load)
        event, times = self._packed_residents.unpack(self, decoder, target, after, transfer.meter.timing)
        transfer.meter.decoded(times)
        return event

    def _need(self, load: Load) -> None:
        """Wait until the bytes that are loaded once are loaded."""
        if not load.loaded or load.copied is not None:
            assert self._loader is not None
            self._loader.load_for_all(load)

    def _copy_from_peer(
        self, peer: PeerCopy, load: Load, to: torch.Tensor, after: Sequence[Any], transfer: Transfer
    ) -> Any:
        """Copy the unit's bytes from another device to ``to``. Returns the event of the copy."""
        self._need(load)
        event, marks = peer.copy(to, peer.data, after, transfer.meter.timing)
        transfer.meter.copied(self.name, marks, self.layout.nbytes, 0, in_backward(), 0, from_peer=True)
        return event

    def _copy_pieces(
        self, to: torch.Tensor, after: Sequence[Any], transfer: Transfer, spans: list[tuple[int, int]] | None,
        backward: bool,
    ) -> tuple[Any, list[PieceChecksums], int]:  # fmt: skip
        """Copy the unit's bytes from the host cache to ``to`` on the device: all bytes, or only those in
        ``spans``.

        Returns the event of the last copy, the checksums of the pieces, and the bytes of copies that the meter has not
        counted, because they were not timed.
        """
        if self.peer is not None and self._load is not None:
            return self._copy_from_peer(self.peer, self._load, to, after, transfer), [], 0
        cache, engine, meter = self._reads.cache, transfer.engine, transfer.meter
        assert cache is not None
        timing, inspected = meter.timing, self.layout.decoder is not None
        event: Any = None
        untimed_bytes = 0
        found: list[PieceChecksums] = []
        gather, parts = self._reads.gather, None
        if gather is not None:
            parts = gather.parts(self.layout.nbytes)
            spans = parts.spans(self.layout.nbytes)
        pieces = self._reads.pieces(self.index)
        while pieces:
            before = engine.mark() if timing and not cache.has(self.index) else None
            acquired = cache.acquire(pieces)  # all pieces, or those before one that is not in RAM yet
            if before is not None:
                meter.waited(before, engine.mark(), self.name, backward)
            taken, pieces = pieces[: len(acquired)], pieces[len(acquired) :]
            copies: list[Any] = []  # of each piece, the event of its last copy
            copied: Any = None
            try:
                for piece, (source, inspection) in zip(taken, acquired, strict=True):
                    for start, end in ((0, piece.nbytes),) if spans is None else piece.within(spans):
                        # Do not bind the slice to a name: the traceback of an exception would keep it alive, and
                        # with it the slot.
                        copied, marks = engine.copy_in(
                            to[piece.start + start : piece.start + end], source[start:end], after, timing
                        )
                        if marks is None:
                            untimed_bytes += end - start
                        else:
                            self._count(transfer, marks, end - start, backward)
                        event, after = copied, []
                    copies.append(copied)
                    copied = None
                    if inspected:
                        found.append(inspection)
            finally:
                if copied is not None:
                    copies.append(copied)  # a later copy of the same piece failed
                cache.release(taken, copies)
                acquired.clear()  # the traceback of an exception would keep them alive
        if gather is not None and parts is not None:
            event = gather.run(parts, to, event, self.name)
        return event, found, untimed_bytes

    def _count(self, transfer: Transfer, marks: Any, nbytes: int, backward: bool) -> None:
        """Count one copy of ``nbytes`` of the unit in the meter. ``marks``: the time marks of the copy."""
        if transfer.engine.blocking and marks is not None:
            transfer.meter.waited(marks[0], marks[1], self.name, backward)
        transfer.meter.copied(self.name, marks, nbytes, 0, backward, 0)
