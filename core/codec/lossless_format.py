"""The lossless wire format, versions 1 and 2: header fields, section offsets and sizes. Handles bytes and
integers only.

docs/codec.md describes the format to the bit; this file is its only implementation of the layout. A blob is

    header | byte planes | bit planes | tile table | escapes        (each section 16-byte aligned)

and holds the floats of one tensor, split into exponent codes of ``k`` bits and the remaining bits (sign and
mantissa). The exponents ``base`` to ``base + 2**k - 2`` have a code. The last code, all ones, is the
*escape*: its element's exponent is stored in the escapes section.

The elements are divided into *tiles*. A tile has 32 to 256 *lanes* of 32 elements each; a thread of the GPU
decodes one lane. A *byte plane* holds one byte of every element. A *bit plane* holds one bit of every
element, as one 32-bit word for each lane. *Rest bits* are the sign and mantissa bits of an element that are
in no byte plane. The *tile table* holds, for each tile, the byte offset of its escapes and the largest number
of escapes in any of its lanes.

Version 2 is for fp8 e4m3 and differs in the tile table and the escapes. Every escape has a *second code* of 2
bits. Three second codes stand for an exponent each; an element with the fourth has its exponent stored as a
*literal* of 4 bits. Second codes and literals are bit planes as well, without gaps between lanes
(core/codec/lossless_two_level.py).
"""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..common.errors import UnsupportedError, WeightsError
from .blob_metadata import corrupt
from .crc import crc32

MAGIC = b"CRML"
HEADER_BYTES = 128
ALIGN = 16
TABLE_AT, TAIL_AT = 48, 64
# Fields of a tile table entry, version 1: byte offset, a flag for 8-bit escapes, most escapes of a lane.
OFFSET_BITS, WIDE_BIT, MOST_SHIFT = 40, 40, 48
# Version 2: offset in units of 8 bytes, groups of 32 second codes, groups of 32 literals.
UNIT_BITS, SECOND_SHIFT, LITERAL_SHIFT = 32, 32, 48
DEFAULT_LANES = 128
_HEADER = struct.Struct("<4sHBBBBBBIQQQ8x16s32s32x")
assert _HEADER.size == HEADER_BYTES


@dataclass(frozen=True)
class Kind:
    """The split of a float dtype of ``itemsize`` bytes into a sign bit, ``exponent_bits`` and
    ``mantissa_bits``.

    Whole bytes of the sign and mantissa are stored in ``byte_planes`` byte planes. The other ``rest_bits``
    bits are stored in bit planes. ``version``: the version of the format that blobs of this dtype have.
    """

    code: int
    name: str
    dtype: torch.dtype
    itemsize: int
    exponent_bits: int
    mantissa_bits: int
    byte_planes: int
    rest_bits: int
    version: int = 1

    @property
    def two_level(self) -> bool:
        """Whether escapes have second codes, as in version 2 of the format."""
        return self.version == 2

    @property
    def max_k(self) -> int:
        """The largest ``k`` (bits of an exponent code) that can save space and fits a byte together with the
        rest bits.
        """
        return min(self.exponent_bits - 1, 8 - self.rest_bits, 6)

    def max_base(self, k: int) -> int:
        """Return the largest exponent that code 0 may stand for when codes have ``k`` bits.

        Code ``c`` stands for the exponent base + c, where base is the returned value at most. All codes but the
        escape code must give valid exponents, and base plus the escape code must fit a byte.
        """
        return min((1 << self.exponent_bits) + 1, 256) - (1 << k)


KINDS = (
    Kind(1, "bf16", torch.bfloat16, 2, 8, 7, 1, 0),
    Kind(2, "fp16", torch.float16, 2, 5, 10, 1, 3),
    Kind(3, "fp32", torch.float32, 4, 8, 23, 3, 0),
    Kind(4, "e4m3", torch.float8_e4m3fn, 1, 4, 3, 0, 4, version=2),
    Kind(5, "e5m2", torch.float8_e5m2, 1, 5, 2, 0, 3),
)
KIND_BY_DTYPE = {kind.dtype: kind for kind in KINDS}
_KIND_BY_CODE = {kind.code: kind for kind in KINDS}


def align(count: int) -> int:
    """Return ``count`` bytes rounded up to the alignment of sections."""
    return -(-count // ALIGN) * ALIGN


@dataclass(frozen=True)
class Header:
    """The parsed header of a losslessly packed blob; section offsets (bytes from the blob's start) follow
    from its fields.

    ``k``: bits of an exponent code. ``lanes``: lanes of 32 elements in a tile. ``base``: the exponent of code
    0. ``numel``: elements. ``escape_bytes``: bytes of the escapes section. ``escape_table``: the 16 exponents
    of 4-bit escapes; in version 2, the exponents of second codes 0 to 2, then zeros. ``tail``: the last
    ``numel % 8`` elements, raw. ``most_escapes``: the largest number of escapes in a lane; 0 in version 2.
    """

    kind: Kind
    k: int
    lanes: int
    base: int
    numel: int
    escape_bytes: int
    escape_table: bytes
    tail: bytes
    most_escapes: int
    crc: int = 0

    @property
    def words(self) -> int:
        """The number of groups of 4 elements that are coded; the last ``numel % 8`` elements are stored raw
        in the header.
        """
        return self.numel // 8 * 2

    @property
    def tile(self) -> int:
        """The number of elements in a tile: 32 for each lane."""
        return 32 * self.lanes

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.words * 4 // self.tile)

    @property
    def planes(self) -> int:
        """The number of bit planes: k for the exponent code, then one for each rest bit."""
        return self.k + self.kind.rest_bits

    @property
    def byte_plane_stride(self) -> int:
        """The bytes from the start of one byte plane to the next."""
        return align(self.words * 4)

    @cached_property
    def bits_at(self) -> int:
        """The byte offset of the bit planes."""
        return HEADER_BYTES + self.kind.byte_planes * self.byte_plane_stride

    @cached_property
    def tiles_at(self) -> int:
        """The byte offset of the tile table."""
        return self.bits_at + self.tiles * self.planes * self.lanes * 4

    @cached_property
    def escapes_at(self) -> int:
        """The byte offset of the escapes."""
        return align(self.tiles_at + self.tiles * 8)

    @cached_property
    def total(self) -> int:
        """The number of bytes of the blob."""
        return align(self.escapes_at + self.escape_bytes)

    @property
    def raw_nbytes(self) -> int:
        """The number of bytes of the decoded tensor."""
        return self.numel * self.kind.itemsize

    @property
    def tail_count(self) -> int:
        """The number of elements that are stored raw in the header, 0 to 7."""
        return self.numel % 8

    def pack(self) -> bytes:
        """Return the 128 bytes of the header."""
        return _HEADER.pack(
            MAGIC, self.kind.version, self.kind.code, self.k, self.lanes.bit_length() - 1, self.base, self.tail_count,
            self.most_escapes, self.crc, self.numel, self.total, self.escape_bytes, self.escape_table, self.tail,
        )  # fmt: skip

    def with_crc(self, crc: int) -> Header:
        """Return a copy of the header with the checksum ``crc``."""
        return replace(self, crc=crc)


def checksum(header: Header, body: memoryview, pool: Executor | None = None) -> int:
    """Return the CRC-32 (zlib) of the whole blob, with the header's crc field counted as zero.

    ``body``: the blob's bytes after the header. ``pool``: an executor whose threads share the work.
    """
    return crc32(body, zlib.crc32(header.with_crc(0).pack()), pool)


def parse_header(blob: memoryview, name: str, length: int | None = None) -> Header:
    """Return the validated header of ``blob``; allocate nothing whose size the header declares.

    ``blob``: all bytes of the blob, or only the first 128 together with ``length``, the blob's true length.
    Raises WeightsError naming ``name`` for a header that no encoder writes, and UnsupportedError
    for a version that this Carom does not read.
    """
    length = len(blob) if length is None else length
    if len(blob) < HEADER_BYTES:
        raise WeightsError(
            f"tensor {name!r}: packed data is truncated: {len(blob)} bytes are less than the {HEADER_BYTES} of its "
            "header; copy or download the file again"
        )
    fields = _HEADER.unpack(blob[:HEADER_BYTES])
    magic, version, code, k, lanes_log2, base, tail_count, most, crc, numel, total, escape_bytes = fields[:12]
    if magic != MAGIC:
        raise corrupt(name, "it does not start with a lossless header")
    kind = _KIND_BY_CODE.get(code)
    known = 1 if kind is None else kind.version
    if version != known:
        raise UnsupportedError(
            f"tensor {name!r} is packed in version {version} of Carom's lossless format; for its dtype this Carom "
            f"reads version {known} (Carom 0.1 and later): "
            + ("update Carom" if version > known else "pack the original file again")
        )
    if kind is None or not 1 <= k <= kind.max_k or not 5 <= lanes_log2 <= 8:
        raise corrupt(name, "its header has an unknown dtype or code width")
    header = Header(kind, k, 1 << lanes_log2, base, numel, escape_bytes, fields[12], fields[13], most, crc)
    if (
        numel < 8
        or base > kind.max_base(k)
        or most > 32
        or (most > 0) != (escape_bytes > 0 and not kind.two_level)
        or (kind.two_level and (escape_bytes % 8 or not _is_second_table(fields[12])))
        or tail_count != header.tail_count
        or total != header.total
        or header.pack() != bytes(blob[:HEADER_BYTES])
    ):
        raise corrupt(name, "the fields of its header contradict each other")
    if total != length:
        raise corrupt(name, f"the blob has {length} bytes, its header declares {total}")
    return header


def _is_second_table(table: bytes) -> bool:
    """Return whether ``table`` has three exponents of 4 bits, in increasing order, and then zeros."""
    return table[0] < table[1] < table[2] < 16 and not any(table[3:])
