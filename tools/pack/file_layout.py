"""The layout of packed safetensors files: which tensors go to which shard, at which offsets, and the file's
header.

The functions only compute; they read and write no files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.checkpoint.direct_io import ALIGN
from ...core.checkpoint.index import CHECKSUM_KEY, CODEC_KEY, CODEC_VERSION, PACK_KEY, PAD_PREFIX, Index

VERSION = 1


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor as written to a packed file.

    ``dtype`` and ``shape``: as in the file's header; ``begin`` and ``end``: byte offsets in the data section;
    ``sha256``: hex digest of these bytes; ``meta``: the codec's metadata of an encoded tensor, None for an
    unchanged one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    sha256: str
    meta: dict[str, Any] | None = None


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of the 4 KiB page."""
    return nbytes + -nbytes % ALIGN


def whole_pages_first(names: list[str], index: Index) -> list[str]:
    """Return ``names`` with tensors of whole 4 KiB pages first, in their order.

    The other tensors follow by descending power of two that divides their size in bytes. Without padding, the
    offset of each tensor is then a multiple of its element size at least.
    """
    whole = [n for n in names if index[n].nbytes % ALIGN == 0]
    rest = [n for n in names if index[n].nbytes % ALIGN]
    return whole + sorted(rest, key=lambda n: -(index[n].nbytes & -index[n].nbytes))


def split_shards(names: list[str], index: Index, shard_bytes: int | None) -> list[list[str]]:
    """Split ``names`` into consecutive shards of at most ``shard_bytes`` bytes; a larger tensor gets a shard
    of its own.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = whole_pages(index[name].nbytes)
        if shard_bytes is not None and shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def merged_metadata(index: Index) -> dict[str, str]:
    """Merge the metadata of the source files; where they differ, the first file's value is used.

    The key "format" is always present, because transformers refuses files without that key.
    """
    merged: dict[str, str] = {"format": "pt"}
    for metadata in reversed(index.metadata):
        merged.update({k: v for k, v in metadata.items() if k not in (PACK_KEY, CHECKSUM_KEY, CODEC_KEY)})
    return merged


def packed_header(
    written: Sequence[WrittenTensor],
    metadata: Mapping[str, str],
    codec: str,
    pad: bool,
    *,
    lossy: bool = False,
    has_metadata: bool = False,
) -> bytes:
    """Return the first bytes of the file: 8 bytes for the header's length (still zero), then the JSON header.

    ``pad``: whether padding tensors fill the last page of each tensor; ``lossy``: whether some values differ
    from the original's; ``has_metadata``: whether the header describes encoded tensors.
    """
    info: dict[str, Any] = {"version": VERSION, "codec": codec, "align": ALIGN if pad else 1}
    if lossy:
        info["lossy"] = True
    sums = {w.name: w.sha256 for w in written}
    compact = {"separators": (",", ":"), "ensure_ascii": False}
    header: dict = {
        "__metadata__": {
            **metadata,
            PACK_KEY: json.dumps(info, **compact),  # type: ignore[arg-type]
            CHECKSUM_KEY: json.dumps(sums, **compact),  # type: ignore[arg-type]
        }
    }
    if has_metadata:
        metas = {w.name: w.meta for w in written if w.meta is not None}
        described = {"version": CODEC_VERSION, "tensors": metas}
        header["__metadata__"][CODEC_KEY] = json.dumps(described, **compact)  # type: ignore[arg-type]
    pads = 0
    for w in written:
        header[w.name] = {"dtype": w.dtype, "shape": list(w.shape), "data_offsets": [w.begin, w.end]}
        gap = -w.end % ALIGN if pad else 0
        if gap:
            header[f"{PAD_PREFIX}{pads:06d}"] = {
                "dtype": "U8",
                "shape": [gap],
                "data_offsets": [w.end, w.end + gap],
            }
            pads += 1
    return struct.pack("<Q", 0) + json.dumps(header, **compact).encode()  # type: ignore[arg-type]
