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
from .backing import Backing, Link
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
        """The byte layout of the unit in the host cache and on the link, of 0 bytes if the unit takes no room in the
        cache, because it stays on the device packed, or is in the memory of another device.
        """
        return self.layout if self._load is None else _NOTHING

    @property
    def packed(self) -> bool:
        """Whether a fetch decodes packed bytes on the device."""
        return self.layout.decoder is not None

    @property
    def wire_bytes(self) -> int:
        """Bytes of the unit outside its slot. One fetch copies them over the link, unless they stay on the
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
        return self._reads.is_ready(self.index, self.packed)

    def fetch(self, target: torch.Tensor, after: Sequence[Any], link: Link) -> Any:
        """Enqueue the copies of the unit's pieces to ``target``, each as soon as its disk read is done.
        Returns the last event.

        Packed pieces are copied to ``link.staging`` and decoded from there. If they stay on the device, they are
        decoded from where they are. A tensor with a written value is copied from host memory and left out of
        the file's pieces, so that each byte is copied once.
        """
        engine, meter, backward, wire = link.engine, link.meter, in_backward(), self.layout
        written = [
            which for which, home in enumerate(self.file_homes) if home.file_tensor.changed is not None
        ]
        # Ranks that fetch together all copy the file's bytes, whatever values were written on one of them.
        apart = written and self._reads.gather is None and self.peer is None
        spans, decoder = wire.without(frozenset(written)) if apart else (None, wire.decoder)
        event: Any = None
        if self._load is not None and self.on_device:
            if decoder is not None:
                event = self._decode_resident(self._load, decoder, target, after, link)
                after = [event]
        elif decoder is None:
            event, _ = self._copy_pieces(target, after, link, spans)
            after = after if event is None else [event]  # None: every tensor of the unit was written
        else:
            assert link.staging is not None
            staged, free = link.staging.take(wire.nbytes)
            copied, found = self._copy_pieces(staged, free, link, spans)
            link.staging.release_after(copied)
            if self.peer is None:  # otherwise they were verified when the bytes came to the other device
                self._reads.verify_checksums(self.index, found)
            event, times = engine.decode(decoder, staged, target, (copied, *after), meter.timing)
            link.staging.release_after(event)
            meter.decoded(times)
            after = [event]
        for home in map(self.file_homes.__getitem__, written):
            value = home.file_tensor.changed
            assert value is not None
            start, end = home.entry.offset, home.entry.offset + home.entry.nbytes
            event, marks = engine.copy_in(target[start:end], storage_bytes(value), after, meter.timing)
            self._count(link, marks, end - start, backward)
        # Count one transfer, however many copies were needed, and none if everything was on the device.
        if not self.on_device or written:
            meter.copied(self.name, None, 0, self._copied_bytes(written), backward, int(not self.on_device))
        return event

    def _copied_bytes(self, written: Sequence[int]) -> int:
        """Return the unpacked bytes of what a fetch copies from the host: all of the unit, or only its
        ``written`` tensors if the rest is on the device.
        """
        if not self.on_device:
            return self.unit.raw_bytes
        return sum(self.homes[which].entry.nbytes for which in written)

    def _decode_resident(
        self, load: Load, decoder: UnitDecoder, target: torch.Tensor, after: Sequence[Any], link: Link
    ) -> Any:
        """Decode the packed bytes that stay on the device, after loading them at the first use. Returns the
        event at the end of decoding.
        """
        self._need(load)
        event, times = self._packed_residents.unpack(self, decoder, target, after, link.meter.timing)
        link.meter.decoded(times)
        return event

    def _need(self, load: Load) -> None:
        """Wait until the bytes that are loaded once are loaded."""
        if not load.loaded:
            assert self._loader is not None
            self._loader.load(load)

    def _copy_from_peer(
        self, peer: PeerCopy, load: Load, to: torch.Tensor, after: Sequence[Any], link: Link
    ) -> Any:
        """Copy the unit's bytes from another device to ``to``. Returns the event of the copy."""
        self._need(load)
        event, marks = peer.copy(to, peer.data, after, link.meter.timing)
        link.meter.copied(self.name, marks, self.layout.nbytes, 0, in_backward(), 0, from_peer=True)
        return event

    def _copy_pieces(
        self, to: torch.Tensor, after: Sequence[Any], link: Link, spans: list[tuple[int, int]] | None
    ) -> tuple[Any, list[PieceChecksums]]:
        """Copy the unit's bytes from the host cache to ``to`` on the device: all bytes, or only those in
        ``spans``.

        Returns the event of the last copy, and the checksums of the pieces.
        """
        if self.peer is not None and self._load is not None:
            return self._copy_from_peer(self.peer, self._load, to, after, link), []
        cache, engine, meter, backward = self._reads.cache, link.engine, link.meter, in_backward()
        assert cache is not None
        event: Any = None
        found: list[PieceChecksums] = []
        gather, parts = self._reads.gather, None
        if gather is not None:
            parts = gather.parts(self.layout.nbytes)
            spans = parts.spans(self.layout.nbytes)
        for piece in self._reads.pieces(self.index):
            before = engine.mark() if meter.timing and not cache.has(self.index) else None
            source = cache.acquire(piece)
            if before is not None:
                meter.waited(before, engine.mark(), self.name, backward)
            copied = None
            try:
                found.append(cache.inspection(piece))
                for start, end in ((0, piece.nbytes),) if spans is None else piece.within(spans):
                    # Do not bind the slice to a name: the traceback of an exception would keep it alive, and
                    # with it the slot.
                    copied, marks = engine.copy_in(
                        to[piece.start + start : piece.start + end], source[start:end], after, meter.timing
                    )
                    self._count(link, marks, end - start, backward)
                    event, after = copied, []
            except BaseException:
                if copied is None:
                    cache.release_unused(piece)
                else:  # a copy of one part was enqueued
                    cache.release(piece, copied)
                raise
            cache.release(piece, copied)
        if gather is not None and parts is not None:
            event = gather.run(parts, to, event, self.name)
        return event, found

    def _count(self, link: Link, marks: Any, nbytes: int, backward: bool) -> None:
        """Count one copy of ``nbytes`` of the unit in the meter. ``marks``: the time marks of the copy."""
        if link.engine.blocking and marks is not None:
            link.meter.waited(marks[0], marks[1], self.name, backward)
        link.meter.copied(self.name, marks, nbytes, 0, backward, 0)
