"""Defines `WireFormat`: the byte layout in which a file's unit is cached in RAM and copied to the device.
Tensors are packed if possible.

A slot is the device memory that holds a streamed unit while it is used. A tensor stays packed until it is on
the device if a whole packed tensor of the file fills a whole tensor of the module, whether it is packed
losslessly or quantised. All other packed tensors (parts of fused or stacked tensors) are decoded on the host by
the reader. The formats of packed tensors are validated once, when the session is created. The rest of a packed
tensor is verified when it is read (`host.blob_checksums`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..checkpoint.direct_io import ALIGN as PAGE
from ..checkpoint.disk_reader import DiskReader, ReaderPolicy
from ..checkpoint.header import show
from ..checkpoint.index import TensorEntry
from ..checkpoint.packed_source import PackedSource, codec_name
from ..checkpoint.segments import Segment
from ..codec import kbit, lossless
from ..codec.blob_format import BlobFormat
from ..codec.lossless_format import HEADER_BYTES, parse_header
from ..codec.registry import LosslessCodec
from ..codec.unit_decoder import KbitEntry, LosslessEntry, RawEntry, UnitDecoder
from ..common.errors import CaromError
from ..device.engine import Engine
from ..host.blob_checksums import Blob
from ..host.cache_pieces import PlacedTensor
from ..model.units import Unit
from .packed_tensor import PackedLayout, lay_out_packed

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
    """A factory of wire formats. Packs those tensors of a unit that have a format in ``formats``."""

    def __init__(
        self,
        formats: Mapping[FileTensor, BlobFormat],
        file_tensor_of: Callable[[torch.Tensor], FileTensor | None],
    ) -> None:
        self._formats, self._stand_of = formats, file_tensor_of

    def __call__(self, unit: Unit) -> WireFormat:
        """Return the unit's layout with the file's packed tensors packed, or the plain layout if packing
        saves no bytes.
        """
        formats, layout = self._lay_out(unit)
        if not layout.packs:
            return plain_wire_format(unit, self._stand_of)
        placed, blobs = [], []
        for entry, found, at in zip(unit.entries, formats, layout.places, strict=True):
            segments = _segments(entry.tensor, self._stand_of)
            if found is None:
                placed.append(PlacedTensor(at, segments))
                continue
            stored = _stored(segments[0])
            placed.append(PlacedTensor(at, (Segment(stored, 0, 0, stored.nbytes),)))
            blobs.append(Blob(at, found, stored.name, stored.file.path))
        return WireFormat(layout.nbytes, tuple(placed), tuple(blobs), UnitDecoder(layout.entries))

    def nbytes(self, unit: Unit) -> int:
        """Return the bytes of staging memory that the unit needs on the device, 0 if the unit is copied
        unpacked.
        """
        layout = self._lay_out(unit)[1]
        return layout.nbytes if layout.packs else 0

    def _lay_out(self, unit: Unit) -> tuple[Sequence[BlobFormat | None], PackedLayout]:
        """Return the formats of the unit's packed tensors (None for others) and the resulting layout."""
        file_tensors = [self._stand_of(entry.tensor) for entry in unit.entries]
        formats = [
            None if file_tensor is None else self._formats.get(file_tensor) for file_tensor in file_tensors
        ]
        packed = [None if found is None else found.entry for found in formats]
        # Align to pages, as in the file. Pages are then read directly to their place, and adjacent tensors
        # are read at once.
        layout = lay_out_packed(unit.entries, packed, PAGE)
        if layout.nbytes < unit.nbytes:
            return formats, layout
        nothing = [None] * len(file_tensors)
        return nothing, lay_out_packed(unit.entries, nothing, PAGE)


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
    packed = [file_tensor for file_tensor in file_tensors if _is_packed(file_tensor)]
    whole = [file_tensor for file_tensor in packed if _is_whole(file_tensor)]
    if not engine.decodes_lossless_files:
        whole = [file_tensor for file_tensor in whole if not _is_lossless(file_tensor)]
    formats = _formats(whole, workers)
    note = _parts_note([file_tensor for file_tensor in packed if not _is_whole(file_tensor)])
    if not formats:
        return None, note
    try:
        for found in {found.decoder_variant: found for found in formats.values()}.values():
            _check_decoder(found, engine)
    except Exception as error:
        note = f"packed weights cannot be decoded on {engine.name} ({error}): the host decodes them"
        logger.warning("carom: %s", note)
        return None, note
    return WireFormats(formats, file_tensor_of), note


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


def _is_packed(file_tensor: FileTensor) -> bool:
    """Return whether any part of the tensor is packed in the file."""
    return any(isinstance(segment.entry.file, PackedSource) for segment in file_tensor.bound.segments)


def _is_whole(file_tensor: FileTensor) -> bool:
    """Return whether the tensor is one whole tensor of the file."""
    bound = file_tensor.bound
    if len(bound.segments) != 1 or not bound.nbytes:
        return False
    segment = bound.segments[0]
    return segment.start == segment.at == 0 and segment.nbytes == bound.nbytes == segment.entry.nbytes


def _is_lossless(file_tensor: FileTensor) -> bool:
    """Return whether the tensor, one whole tensor of the file, is packed losslessly there."""
    return codec_name(file_tensor.bound.segments[0].entry) == LosslessCodec.name


def _parts_note(parts: Sequence[FileTensor]) -> str:
    """Return a note on packed tensors that the host decodes because they are ``parts`` or joins of the
    file's tensors.
    """
    parts = [file_tensor for file_tensor in parts if file_tensor.bound.nbytes]
    if not parts:
        return ""
    return (
        f"the host decodes {len(parts)} packed weights, first {show(parts[0].name)}: only a weight that is one "
        "whole tensor of the file is copied to the device packed"
    )


def _formats(packed: Sequence[FileTensor], workers: int) -> dict[FileTensor, BlobFormat]:
    """Return the formats of those of ``packed`` that are valid and have the dtype that the module expects.

    The headers of losslessly packed tensors are read with ``workers`` threads. The formats of quantised
    tensors are in the file's metadata.
    """
    segments = [file_tensor.bound.segments[0] for file_tensor in packed]
    memory = torch.empty(len(packed), HEADER_BYTES, dtype=torch.uint8)
    found: dict[FileTensor, BlobFormat] = {}
    with DiskReader(ReaderPolicy(direct=False, workers=workers)) as reader:
        reads = [
            reader.submit(_stored(segment), row, nbytes=min(HEADER_BYTES, _stored(segment).nbytes))
            if _is_lossless(file_tensor)
            else None
            for file_tensor, segment, row in zip(packed, segments, memory, strict=True)
        ]
        for file_tensor, segment, row, read in zip(packed, segments, memory, reads, strict=True):
            source, stored = segment.entry.file, _stored(segment)
            assert isinstance(source, PackedSource)
            try:
                head = row.numpy().data[: 0 if read is None else read.result()]
                blob = BlobFormat.parse(source.meta, head, stored.nbytes, stored.name)
            except CaromError as error:
                logger.debug("carom: %s is decoded on the host: %s", stored.name, error)
                continue
            if blob is not None and blob.dtype is file_tensor.bound.dtype:
                found[file_tensor] = blob
    return found


def _check_decoder(like: BlobFormat, engine: Engine) -> None:
    """Decode a test tensor in the format of ``like`` on the device. Raises RuntimeError if the bytes differ."""
    if engine.device.type == "cpu":
        return
    value = torch.linspace(-3, 3, _CHECK_ELEMENTS).to(like.dtype)
    entry: LosslessEntry | KbitEntry
    if isinstance(like.entry, LosslessEntry):
        header = like.entry.header
        code = lossless.Code(header.k, header.base, header.escape_table)
        packed = lossless.encode(value, lanes=header.lanes, code=code, limit=4 * value.nbytes + PAGE)
        if packed is None:
            return
        blob, expected = packed, value
        entry = LosslessEntry(
            parse_header(blob.numpy().data[:HEADER_BYTES], "decoder_check", len(blob)), 0, 0
        )
    else:
        layout = dataclasses.replace(like.entry.layout, numel=len(value))
        blob, expected = kbit.quantize(value, layout.codebook, layout.block), torch.empty_like(value)
        kbit.dequantize_torch(blob, layout, expected)
        entry = KbitEntry(layout, like.dtype, 0, 0)
    out = torch.empty(value.nbytes, dtype=torch.uint8, device=engine.device)
    UnitDecoder([entry])(blob.to(engine.device), out)
    if not torch.equal(out.cpu(), expected.view(torch.uint8)):
        raise RuntimeError("what was decoded is not what was encoded")
