"""Index entries for packed tensors that describe the decoded tensor, so that other code can treat packed
files like raw ones.

Such an entry has the decoded dtype, shape and size, and its file is a `PackedSource`. Code above the reader
(mapping, cache, placement) reads byte ranges of tensors whether they are packed or not:
`DiskReader.submit_range` recognises a `PackedSource` and decodes the range
(core/checkpoint/decode_on_read.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import CaromError, UnsupportedError, WeightsError
from .header import show
from .index import CODEC_KEY, PACK_KEY, Index, SourceFile, TensorEntry, format_code


@dataclass(frozen=True, slots=True)
class PackedSource(SourceFile):
    """The decoded bytes of a packed tensor, represented as a file.

    ``size``: the number of decoded bytes. ``stored``: the entry of the blob in the real file. ``text``: the
    blob's metadata (JSON, docs/codec.md).
    """

    stored: TensorEntry
    text: str

    @property
    def meta(self) -> dict[str, Any]:
        """The blob's metadata: codec, dtype, shape and further values."""
        return json.loads(self.text)

    def check(self, found: os.stat_result | None = None) -> None:
        """Raise WeightsError if the file that holds the blob was replaced or changed."""
        self.stored.file.check(found)


def stored_entry(entry: TensorEntry) -> TensorEntry:
    """Return the entry of the bytes in the file: that of the blob if ``entry`` is packed, else ``entry``
    itself.
    """
    return entry.file.stored if isinstance(entry.file, PackedSource) else entry


def meta_of(entry: TensorEntry) -> dict[str, Any] | None:
    """Return the metadata of a packed entry (docs/codec.md), or None if ``entry`` is not packed."""
    return entry.file.meta if isinstance(entry.file, PackedSource) else None


def codec_name(entry: TensorEntry) -> str:
    """Return the name of the codec that ``entry`` is packed with; "raw" if the entry is not packed."""
    meta = meta_of(entry)
    return "raw" if meta is None else str(meta["codec"])


def is_lossy(index: Index) -> bool:
    """Return whether any tensor was quantised, including tensors that were unpacked to raw files later."""
    return index.lossy or any((meta_of(entry) or {}).get("lossy") for entry in index.entries.values())


def require_readable(index: Index) -> None:
    """Raise UnsupportedError if a codec that this Carom does not know wrote the files."""
    if index.codec != "raw" and not all(CODEC_KEY in m for m in index.metadata if PACK_KEY in m):
        raise UnsupportedError(
            f"{index.path}: packed with codec {show(index.codec)}, which this Carom does not read: update Carom"
        )


def as_decoded(
    entries: Mapping[str, TensorEntry], files: Sequence[SourceFile], metadata: Sequence[Mapping[str, str]]
) -> dict[str, TensorEntry]:
    """Return ``entries`` with each packed entry replaced by one that describes the decoded tensor; read
    nothing.

    Raises WeightsError if the metadata does not fit the file, UnsupportedError for codecs and versions that
    this Carom does not read (the message names those that it does).
    """
    from ..codec.blob_metadata import check_version, parse_meta, read_metadata
    from ..codec.registry import codec_of as registered_codec

    decoded = dict(entries)
    for file, file_metadata in zip(files, metadata, strict=True):
        try:
            metas = read_metadata(file_metadata)
        except CaromError as error:
            raise type(error)(f"{file.path}: {error}") from error
        for name, meta in metas.items():
            entry = entries.get(name)
            if entry is None:
                raise WeightsError(
                    f"{file.path}: describes {show(name)} as packed and does not hold it; download or pack it again"
                )
            if entry.file is not file:  # an index.json assigns this name to another file
                continue
            try:
                check_version(meta, registered_codec(meta, name).version, name)
                dtype, shape, nbytes = parse_meta(meta, name)
            except CaromError as error:
                raise type(error)(f"{file.path}: {error}") from error
            if entry.dtype != "U8" or len(entry.shape) != 1:
                raise WeightsError(
                    f"{file.path}: {show(name)} is said to be packed, but stands there as {entry.dtype} "
                    f"{list(entry.shape)}; download or pack the file again"
                )
            source = PackedSource(
                file.path, nbytes, file.mtime_ns, file.inode, file.device, entry, json.dumps(meta)
            )
            code = format_code(str(dtype).removeprefix("torch."))
            decoded[name] = TensorEntry(name, code, shape, source, 0, nbytes)
    return decoded
