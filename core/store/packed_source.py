"""Packed tensors seen as what they decode to: entries of true dtype, shape and size, whose bytes a reader decodes.

Everything above the reader (mapping, pieces, placement) then sees a packed file as it sees any other: byte ranges of
tensors. `DiskReader.submit_range` knows a `PackedSource` and hands it to `core/store/decoding.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CaromError, UnsupportedError, WeightsError
from .header import show
from .index import CODEC_KEY, PACK_KEY, Index, SourceFile, TensorEntry, format_code


@dataclass(frozen=True, slots=True)
class PackedSource(SourceFile):
    """The decoded bytes of one packed tensor as if they were a file: ``size`` counts them, ``stored`` is the blob's
    own entry, ``text`` its description (JSON, docs/codec.md)."""

    stored: TensorEntry
    text: str

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads(self.text)

    def check(self, found: os.stat_result | None = None) -> None:
        """Raise WeightsError unless the file that holds the blob is still the same, unchanged."""
        self.stored.file.check(found)


def stored(entry: TensorEntry) -> TensorEntry:
    """What stands in the file for ``entry``: its blob, or itself."""
    return entry.file.stored if isinstance(entry.file, PackedSource) else entry


def meta_of(entry: TensorEntry) -> dict[str, Any] | None:
    """How ``entry`` is packed (docs/codec.md), None where it stands as it is."""
    return entry.file.meta if isinstance(entry.file, PackedSource) else None


def codec_of(entry: TensorEntry) -> str:
    """The codec ``entry`` is packed with; "raw" where it stands as it is."""
    meta = meta_of(entry)
    return "raw" if meta is None else str(meta["codec"])


def is_lossy(index: Index) -> bool:
    """Whether any tensor holds values that quantising changed (also where they were unpacked since)."""
    return index.lossy or any((meta_of(entry) or {}).get("lossy") for entry in index.entries.values())


def require_readable(index: Index) -> None:
    """Raise UnsupportedError for files that a codec wrote which this Carom does not know."""
    if index.codec != "raw" and not all(CODEC_KEY in m for m in index.metadata if PACK_KEY in m):
        raise UnsupportedError(
            f"{index.path}: packed with codec {show(index.codec)}, which this Carom does not read: update Carom"
        )


def as_decoded(
    entries: Mapping[str, TensorEntry], files: Sequence[SourceFile], metadata: Sequence[Mapping[str, str]]
) -> dict[str, TensorEntry]:
    """``entries`` with the packed ones as what they decode to; nothing is read.

    Raises WeightsError for descriptions that do not fit the file, UnsupportedError for codecs and versions that this
    Carom does not read (naming those that it does).
    """
    from ..codec.packed import (  # imports torch; only packed files need it
        check_version,
        parse_meta,
        read_metadata,
    )
    from ..codec.registry import codec_of as known

    decoded = dict(entries)
    for file, about in zip(files, metadata, strict=True):
        try:
            metas = read_metadata(about)
        except CaromError as error:
            raise type(error)(f"{file.path}: {error}") from error
        for name, meta in metas.items():
            entry = entries.get(name)
            if entry is None:
                raise WeightsError(
                    f"{file.path}: describes {show(name)} as packed and does not hold it; download or pack it again"
                )
            if entry.file is not file:  # an index.json that gives the name to another file
                continue
            try:
                check_version(meta, known(meta, name).version, name)
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
