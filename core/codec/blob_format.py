"""Defines `BlobFormat`: what is known of the blob (the packed bytes) of a tensor before the blob is read.

A blob that goes to the device packed is never in host memory as a whole, so its format is validated first, from
the file's metadata and the blob's first bytes, and its checksum is computed from parts (`host.blob_checksums`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .blob_metadata import corrupt, metadata_crc32, parse_meta
from .lossless_format import Header
from .registry import KbitCodec, LosslessCodec, codec_of
from .unit_decoder import KbitEntry, LosslessEntry, PackedEntry, sizes


@dataclass(frozen=True)
class BlobFormat:
    """The validated format of a blob, and the checksum that the blob must have.

    ``entry``: the entry by which a `UnitDecoder` decodes the blob, with both byte offsets 0.
    ``head``: the bytes with which the blob must begin.
    ``crc_start``: the CRC-32 (zlib's) to which the bytes after ``head`` are added.
    ``crc``: the CRC-32 that results if the blob is undamaged.
    """

    entry: PackedEntry
    head: bytes
    crc_start: int
    crc: int

    @classmethod
    def lossless(cls, header: Header) -> BlobFormat:
        """Return the format of a losslessly packed blob with the validated ``header``."""
        start = zlib.crc32(header.with_crc(0).pack())
        return cls(LosslessEntry(header, 0, 0), header.pack(), start, header.crc)

    @classmethod
    def parse(cls, meta: Mapping[str, Any], head: memoryview, length: int, name: str) -> BlobFormat | None:
        """Return the format of a blob of ``length`` bytes that ``meta`` describes, or None for codecs that
        the device does not decode.

        ``head``: the first 128 bytes of a losslessly packed blob, or more; unused for other codecs. Allocates
        nothing whose size the file declares. Raises WeightsError naming ``name`` where metadata or header are
        damaged or contradict each other or ``length``, and UnsupportedError for codecs and versions that this
        Carom does not read.
        """
        codec = codec_of(meta, name)
        if isinstance(codec, LosslessCodec):
            return cls.lossless(codec.header_of(meta, head, length, name))
        if not isinstance(codec, KbitCodec):
            return None
        layout, crc = codec.layout_of(meta, length, name), meta.get("crc32")
        if type(crc) is not int:
            raise corrupt(name, "its metadata has no checksum")
        return cls(KbitEntry(layout, parse_meta(meta, name)[0], 0, 0), b"", metadata_crc32(meta, name), crc)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the blob."""
        return sizes(self.entry)[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoded tensor."""
        return self.entry.header.kind.dtype if isinstance(self.entry, LosslessEntry) else self.entry.dtype

    @property
    def header(self) -> Header | None:
        """The header of a losslessly packed blob, whose tile table has to be checked; None for other blobs."""
        return self.entry.header if isinstance(self.entry, LosslessEntry) else None

    @property
    def decoder_variant(self) -> tuple[Any, ...]:
        """A key that is equal for blobs that the same variant of the device's decoder decodes."""
        if isinstance(self.entry, LosslessEntry):
            return self.entry.header.kind.name, self.entry.header.k, self.entry.header.lanes
        return self.entry.layout.codebook.name, self.entry.layout.block, self.entry.dtype
