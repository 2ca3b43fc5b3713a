"""What of a file's packed tensors stays packed until it is on the device: how a unit waits in the host cache and crosses.

A tensor stays packed where a whole one of the file fills a whole one of the module and its codec is lossless; all others
(norms, rows of fused or stacked tensors, lossy codecs) are decoded by the reader, on the host. Headers are read once, when
the session is made; the rest of a blob is checked when it is read (`store.blob_check`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .codec import lossless
from .codec.lossless_format import HEADER_BYTES, Header, parse_header
from .codec.registry import LosslessCodec
from .codec.registry import codec_of as codec_named
from .codec.unit import Entry as WireEntry
from .codec.unit import RawEntry, UnitDecoder
from .errors import CaromError
from .packed_tensors import Laid, lay_headers
from .store.blob_check import Blob
from .store.index import TensorEntry
from .store.mapping import Segment
from .store.packed_source import PackedSource, codec_of
from .store.pieces import Placed
from .store.rawio import ALIGN as PAGE
from .store.reader import DiskReader, ReaderPolicy
from .transfer import Engine
from .units import Unit

if TYPE_CHECKING:
    from .checkpoint import Stand

logger = logging.getLogger("carom")
_PROOF = 8 * 4096 + 5  # elements that a decoder is tried with: tiles, and a tail


@dataclass(frozen=True, eq=False)
class Wire:
    """A unit as it waits and crosses: ``nbytes``, filled as ``placed`` says. ``blobs``: packed tensors in it, which
    ``decoder`` unpacks into the slot; without any, the bytes are the slot's."""

    nbytes: int
    placed: tuple[Placed, ...]
    blobs: tuple[Blob, ...] = ()
    decoder: UnitDecoder | None = None

    _without: dict[frozenset[int], tuple[list[tuple[int, int]], UnitDecoder | None]] = field(
        default_factory=dict
    )

    def without(self, tensors: frozenset[int]) -> tuple[list[tuple[int, int]], UnitDecoder | None]:
        """Where the bytes of all but ``tensors`` (places in ``placed``) lie, with the padding behind them, and what unpacks
        those: None where nothing is left, or nothing is packed."""
        if tensors not in self._without:
            self._without.clear()
            spans = self._spans(tensors)
            gone = {self.placed[index].at for index in tensors}
            # Raw bytes that did not cross may be decoded all the same: their tensors are copied to the slot afterwards.
            left = [
                entry
                for entry in (self.decoder.entries if self.decoder is not None and spans else ())
                if isinstance(entry, RawEntry) or entry.wire_at not in gone
            ]
            self._without[tensors] = spans, UnitDecoder(left) if left else None
        return self._without[tensors]

    def _spans(self, without: frozenset[int]) -> list[tuple[int, int]]:
        order = sorted(range(len(self.placed)), key=lambda index: self.placed[index].at)
        ends = [*(self.placed[index].at for index in order[1:]), self.nbytes]
        spans: list[tuple[int, int]] = []
        for index, end in zip(order, ends, strict=True):
            start = self.placed[index].at
            if index in without or start == end:
                continue
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        return spans


def plain_wire(unit: Unit, stand_of: Callable[[torch.Tensor], Stand | None]) -> Wire:
    """The unit as it lies in its slot."""
    return Wire(unit.nbytes, tuple(Placed(e.offset, _segments(e.tensor, stand_of)) for e in unit.entries))


class Wires:
    """Wires of units whose tensors stand for what ``headers`` describe."""

    def __init__(
        self, headers: Mapping[Stand, Header], stand_of: Callable[[torch.Tensor], Stand | None]
    ) -> None:
        self._headers, self._stand_of = headers, stand_of

    def __call__(self, unit: Unit) -> Wire:
        """The unit with its lossless tensors packed; as it lies in its slot where that is no shorter."""
        headers, laid = self._lay(unit)
        if not laid.packs:
            return plain_wire(unit, self._stand_of)
        placed, blobs = [], []
        for entry, header, at in zip(unit.entries, headers, laid.places, strict=True):
            segments = _segments(entry.tensor, self._stand_of)
            if header is None:
                placed.append(Placed(at, segments))
                continue
            stored = _stored(segments[0])
            placed.append(Placed(at, (Segment(stored, 0, 0, stored.nbytes),)))
            blobs.append(Blob(at, header, stored.name, stored.file.path))
        return Wire(laid.nbytes, tuple(placed), tuple(blobs), UnitDecoder(laid.entries))

    def nbytes(self, unit: Unit) -> int:
        """What the unit takes of a buffer on the device to be unpacked from, 0 where it crosses as it is."""
        laid = self._lay(unit)[1]
        return laid.nbytes if laid.packs else 0

    def _lay(self, unit: Unit) -> tuple[list[Header | None], Laid]:
        stands = [self._stand_of(entry.tensor) for entry in unit.entries]
        headers = [None if stand is None else self._headers.get(stand) for stand in stands]
        # As in the file: pages are read straight to where they belong, and neighbours are one read.
        laid = lay_headers(unit.entries, headers, PAGE)
        if laid.nbytes >= unit.nbytes:
            headers = [None] * len(stands)
            laid = lay_headers(unit.entries, headers, PAGE)
        return headers, laid


def find_wires(
    stands: Iterable[Stand],
    stand_of: Callable[[torch.Tensor], Stand | None],
    engine: Engine,
    workers: int = 4,
) -> tuple[Wires | None, str]:
    """Wires for what of ``stands`` can stay packed up to ``engine``'s device, None where nothing can; and a note for the
    report. Raises nothing for a header that is damaged or cannot be read: whoever needs that tensor is told."""
    packed = {stand: _stored(stand.bound.segments[0]) for stand in stands if _stays_packed(stand)}
    headers = _headers(packed, workers)
    if not headers:
        return None, ""
    try:
        kinds = {(header.kind.name, header.k, header.lanes): header for header in headers.values()}
        for one in kinds.values():
            _prove(one, engine)
    except Exception as error:
        note = f"packed weights cannot be decoded on {engine.name} ({error}): the host decodes them"
        logger.warning("carom: %s", note)
        return None, note
    return Wires(headers, stand_of), ""


def _segments(tensor: torch.Tensor, stand_of: Callable[[torch.Tensor], Stand | None]) -> tuple[Segment, ...]:
    stand = stand_of(tensor)
    assert stand is not None  # the carver keeps all others resident
    return stand.bound.segments


def _stored(segment: Segment) -> TensorEntry:
    """The blob that is decoded to the segment's tensor."""
    assert isinstance(segment.entry.file, PackedSource)
    return segment.entry.file.stored


def _stays_packed(stand: Stand) -> bool:
    bound = stand.bound
    if len(bound.segments) != 1 or not bound.nbytes:
        return False
    segment = bound.segments[0]
    whole = segment.start == segment.at == 0 and segment.nbytes == bound.nbytes == segment.entry.nbytes
    return whole and codec_of(segment.entry) == LosslessCodec.name


def _headers(packed: Mapping[Stand, TensorEntry], workers: int) -> dict[Stand, Header]:
    """The headers that are whole, and of the dtype that the module wants."""
    memory = torch.empty(len(packed), HEADER_BYTES, dtype=torch.uint8)
    found: dict[Stand, Header] = {}
    with DiskReader(ReaderPolicy(direct=False, workers=workers)) as reader:
        reads = [
            reader.submit(stored, row, nbytes=min(HEADER_BYTES, stored.nbytes))
            for stored, row in zip(packed.values(), memory, strict=True)
        ]
        for (stand, stored), row, read in zip(packed.items(), memory, reads, strict=True):
            source = stand.bound.segments[0].entry.file
            assert isinstance(source, PackedSource)
            try:
                head = row.numpy().data[: read.result()]
                codec: Any = codec_named(source.meta, stored.name)
                header = codec.header_of(source.meta, head, stored.nbytes, stored.name)
            except CaromError as error:
                logger.debug("carom: %s is decoded on the host: %s", stored.name, error)
                continue
            if header.kind.dtype is stand.bound.dtype:
                found[stand] = header
    return found


def _prove(like: Header, engine: Engine) -> None:
    """Decode a tensor of this kind once and compare: a decoder that does not work here is found out now."""
    if engine.device.type == "cpu":
        return
    value = torch.linspace(-3, 3, _PROOF).to(like.kind.dtype)
    code = lossless.Code(like.k, like.base, like.escape_table)
    blob = lossless.encode(value, lanes=like.lanes, code=code, limit=4 * value.nbytes + PAGE)
    if blob is None:
        return
    header = parse_header(blob.numpy().data[:HEADER_BYTES], "proof", blob.numel())
    out = torch.empty(header.raw_nbytes, dtype=torch.uint8, device=engine.device)
    UnitDecoder([WireEntry(header, 0, 0)])(blob.to(engine.device), out)
    if not torch.equal(out.cpu(), value.view(torch.uint8)):
        raise RuntimeError("what was decoded is not what was encoded")
