"""Defines `WireFormat`: the byte layout in which a file's unit is cached in RAM and copied to the device.
Tensors are packed if possible.

A slot is the device memory that holds a streamed unit while it is used. A tensor stays packed until it is on
the device if a whole packed tensor of the file fills a whole tensor of the module, and the codec is lossless.
All other packed tensors (slices of fused or stacked tensors, lossy codecs) are decoded on the host by the
reader. Headers of packed tensors are read once, when the session is created. The rest of a packed tensor is
verified when it is read (`host.blob_checksums`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.direct_io import ALIGN as PAGE
from ..checkpoint.disk_reader import DiskReader, ReaderPolicy
from ..checkpoint.index import TensorEntry
from ..checkpoint.mapping import Segment
from ..checkpoint.packed_source import PackedSource, codec_name
from ..codec import lossless
from ..codec.lossless_format import HEADER_BYTES, Header, parse_header
from ..codec.registry import LosslessCodec, codec_of
from ..codec.unit_decoder import LosslessEntry, RawEntry, UnitDecoder
from ..common.errors import CaromError
from ..device.engine import Engine
from ..host.blob_checksums import Blob
from ..host.cache_pieces import PlacedTensor
from ..model.units import Unit
from .packed_tensor import PackedLayout, lay_headers

if TYPE_CHECKING:
    from .bound_checkpoint import FileTensor

logger = logging.getLogger("carom")
# number of elements in the test tensor: whole tiles of the decoder, and a remainder
_CHECK_ELEMENTS = 8 * 4096 + 5


@dataclass(frozen=True, eq=False)
class WireFormat:
    """The byte layout of a unit in the host cache and in copies to the device. The layout is ``nbytes`` bytes
    long.

    ``placed``: the unit's tensors and their positions in the layout.
    ``blobs``: the packed tensors.
    ``decoder``: decodes the bytes into a slot. None if nothing is packed; the bytes are then those of the
    slot.
    """

    nbytes: int
    placed: tuple[PlacedTensor, ...]
    blobs: tuple[Blob, ...] = ()
    decoder: UnitDecoder | None = None

    _without: dict[frozenset[int], tuple[list[tuple[int, int]], UnitDecoder | None]] = field(
        default_factory=dict
    )

    def without(self, tensors: frozenset[int]) -> tuple[list[tuple[int, int]], UnitDecoder | None]:
        """Return (byte spans to copy, decoder) for the unit without the tensors at the positions ``tensors``
        of ``placed``.

        The spans include the padding after each tensor. The decoder is None if nothing remains or nothing is
        packed.
        """
        if tensors not in self._without:
            self._without.clear()
            spans = self._spans(tensors)
            gone = {self.placed[index].at for index in tensors}
            # An unpacked tensor that was left out may still be decoded, from undefined bytes. Its value is
            # copied to the slot afterwards.
            left = [
                entry
                for entry in (self.decoder.entries if self.decoder is not None and spans else ())
                if isinstance(entry, RawEntry) or entry.wire_at not in gone
            ]
            self._without[tensors] = spans, UnitDecoder(left) if left else None
        return self._without[tensors]

    def _spans(self, without: frozenset[int]) -> list[tuple[int, int]]:
        """Return the merged byte spans of all tensors except those at the positions ``without``."""
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


def plain_wire_format(unit: Unit, file_tensor_of: Callable[[torch.Tensor], FileTensor | None]) -> WireFormat:
    """Return the layout in which the unit's bytes are exactly as in its slot."""
    return WireFormat(
        unit.nbytes, tuple(PlacedTensor(e.offset, _segments(e.tensor, file_tensor_of)) for e in unit.entries)
    )


class WireFormats:
    """A factory of wire formats. Packs those tensors of a unit that have a lossless header in ``headers``."""

    def __init__(
        self,
        headers: Mapping[FileTensor, Header],
        file_tensor_of: Callable[[torch.Tensor], FileTensor | None],
    ) -> None:
        self._headers, self._stand_of = headers, file_tensor_of

    def __call__(self, unit: Unit) -> WireFormat:
        """Return the unit's layout with lossless tensors packed, or the plain layout if packing saves no
        bytes.
        """
        headers, layout = self._lay_out(unit)
        if not layout.packs:
            return plain_wire_format(unit, self._stand_of)
        placed, blobs = [], []
        for entry, header, at in zip(unit.entries, headers, layout.places, strict=True):
            segments = _segments(entry.tensor, self._stand_of)
            if header is None:
                placed.append(PlacedTensor(at, segments))
                continue
            stored = _stored(segments[0])
            placed.append(PlacedTensor(at, (Segment(stored, 0, 0, stored.nbytes),)))
            blobs.append(Blob(at, header, stored.name, stored.file.path))
        return WireFormat(layout.nbytes, tuple(placed), tuple(blobs), UnitDecoder(layout.entries))

    def nbytes(self, unit: Unit) -> int:
        """Return the bytes of staging memory that the unit needs on the device, 0 if the unit is copied
        unpacked.
        """
        layout = self._lay_out(unit)[1]
        return layout.nbytes if layout.packs else 0

    def _lay_out(self, unit: Unit) -> tuple[list[Header | None], PackedLayout]:
        """Return the headers of the unit's packed tensors (None for others) and the resulting layout."""
        file_tensors = [self._stand_of(entry.tensor) for entry in unit.entries]
        headers = [
            None if file_tensor is None else self._headers.get(file_tensor) for file_tensor in file_tensors
        ]
        # Align to pages, as in the file. Pages are then read directly to their place, and adjacent tensors
        # are read at once.
        layout = lay_headers(unit.entries, headers, PAGE)
        if layout.nbytes >= unit.nbytes:
            headers = [None] * len(file_tensors)
            layout = lay_headers(unit.entries, headers, PAGE)
        return headers, layout


def find_wire_formats(
    file_tensors: Iterable[FileTensor],
    file_tensor_of: Callable[[torch.Tensor], FileTensor | None],
    engine: Engine,
    workers: int = 4,
) -> tuple[WireFormats | None, str]:
    """Return the wire formats for those of ``file_tensors`` that the device of ``engine`` can decode, and a
    note for the report.

    The formats are None if no tensor can stay packed. A damaged or unreadable header raises no error here;
    the error is raised when the tensor is needed.
    """
    packed = {
        file_tensor: _stored(file_tensor.bound.segments[0])
        for file_tensor in file_tensors
        if _stays_packed(file_tensor)
    }
    headers = _headers(packed, workers)
    if not headers:
        return None, ""
    try:
        kinds = {(header.kind.name, header.k, header.lanes): header for header in headers.values()}
        for header in kinds.values():
            _check_decoder(header, engine)
    except Exception as error:
        note = f"packed weights cannot be decoded on {engine.name} ({error}): the host decodes them"
        logger.warning("carom: %s", note)
        return None, note
    return WireFormats(headers, file_tensor_of), ""


def _segments(
    tensor: torch.Tensor, file_tensor_of: Callable[[torch.Tensor], FileTensor | None]
) -> tuple[Segment, ...]:
    """Return the segments of the file that fill ``tensor``."""
    file_tensor = file_tensor_of(tensor)
    # Tensors that the file lacks stay on the device, so a streamed tensor is always found.
    assert file_tensor is not None
    return file_tensor.bound.segments


def _stored(segment: Segment) -> TensorEntry:
    """Return the file's entry of the packed tensor that is decoded to the segment's tensor."""
    assert isinstance(segment.entry.file, PackedSource)
    return segment.entry.file.stored


def _stays_packed(file_tensor: FileTensor) -> bool:
    """Return whether the tensor is one whole tensor of the file, packed by the lossless codec."""
    bound = file_tensor.bound
    if len(bound.segments) != 1 or not bound.nbytes:
        return False
    segment = bound.segments[0]
    whole = segment.start == segment.at == 0 and segment.nbytes == bound.nbytes == segment.entry.nbytes
    return whole and codec_name(segment.entry) == LosslessCodec.name


def _headers(packed: Mapping[FileTensor, TensorEntry], workers: int) -> dict[FileTensor, Header]:
    """Read the headers of packed tensors with ``workers`` threads. Return those that are valid and have the
    dtype that the module expects.
    """
    memory = torch.empty(len(packed), HEADER_BYTES, dtype=torch.uint8)
    found: dict[FileTensor, Header] = {}
    with DiskReader(ReaderPolicy(direct=False, workers=workers)) as reader:
        reads = [
            reader.submit(stored, row, nbytes=min(HEADER_BYTES, stored.nbytes))
            for stored, row in zip(packed.values(), memory, strict=True)
        ]
        for (file_tensor, stored), row, read in zip(packed.items(), memory, reads, strict=True):
            source = file_tensor.bound.segments[0].entry.file
            assert isinstance(source, PackedSource)
            try:
                head = row.numpy().data[: read.result()]
                codec: Any = codec_of(source.meta, stored.name)
                header = codec.header_of(source.meta, head, stored.nbytes, stored.name)
            except CaromError as error:
                logger.debug("carom: %s is decoded on the host: %s", stored.name, error)
                continue
            if header.kind.dtype is file_tensor.bound.dtype:
                found[file_tensor] = header
    return found


def _check_decoder(like: Header, engine: Engine) -> None:
    """Decode a test tensor in the format of ``like`` on the device. Raises RuntimeError if the bytes differ."""
    if engine.device.type == "cpu":
        return
    value = torch.linspace(-3, 3, _CHECK_ELEMENTS).to(like.kind.dtype)
    code = lossless.Code(like.k, like.base, like.escape_table)
    blob = lossless.encode(value, lanes=like.lanes, code=code, limit=4 * value.nbytes + PAGE)
    if blob is None:
        return
    header = parse_header(blob.numpy().data[:HEADER_BYTES], "decoder_check", blob.numel())
    out = torch.empty(header.raw_nbytes, dtype=torch.uint8, device=engine.device)
    UnitDecoder([LosslessEntry(header, 0, 0)])(blob.to(engine.device), out)
    if not torch.equal(out.cpu(), value.view(torch.uint8)):
        raise RuntimeError("what was decoded is not what was encoded")
