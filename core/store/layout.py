"""PURE: how a packed file is laid out: which tensors in which shard, on which bytes, under which header."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .index import CHECKSUM_KEY, CODEC_KEY, CODEC_VERSION, PACK_KEY, PAD_PREFIX, Index
from .rawio import ALIGN

VERSION = 1


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor in a packed file: ``begin`` and ``end`` are bytes from the start of its data section; ``meta``
    describes a packed one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    sha256: str
    meta: dict[str, Any] | None = None


def whole_pages(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGN


def whole_pages_first(names: list[str], index: Index) -> list[str]:
    """Tensors of whole pages in their order; then the rest by falling natural alignment (the largest power of two
    that divides their size), so that each stands where its element size, and more, divides its offset."""
    whole = [n for n in names if index[n].nbytes % ALIGN == 0]
    rest = [n for n in names if index[n].nbytes % ALIGN]
    return whole + sorted(rest, key=lambda n: -(index[n].nbytes & -index[n].nbytes))


def split_shards(names: list[str], index: Index, shard_bytes: int | None) -> list[list[str]]:
    """Runs of ``names`` of at most ``shard_bytes`` bytes each; a larger tensor stands alone."""
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
    """The sources' metadata, the first file's word where they differ. transformers refuses files without "format"."""
    merged: dict[str, str] = {"format": "pt"}
    for metadata in reversed(index.metadata):
        merged.update({k: v for k, v in metadata.items() if k not in (PACK_KEY, CHECKSUM_KEY, CODEC_KEY)})
    return merged


def packed_header(
    written: Sequence[Written],
    metadata: Mapping[str, str],
    codec: str,
    pad: bool,
    *,
    lossy: bool = False,
    describes: bool = False,
) -> bytes:
    """The file's first bytes, up to the data section, before spaces fill them up; ``describes``: packed tensors too."""
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
    if describes:
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
