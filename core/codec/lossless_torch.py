"""Decoder of the lossless format in torch operations: for any device, without Triton, without host
synchronisation.

Does the same steps as core/codec/lossless_triton.py, word by word, on a bounded number of tiles at a time,
and writes the same bits. Escapes are patched in rounds, one escape of every lane a round; the header gives
the number of rounds, which is the number of escapes in the fullest lane.

The terms tile, lane, byte plane, bit plane and rest bits are defined in core/codec/lossless_format.py.
"""

from __future__ import annotations

import torch

from .lossless_format import HEADER_BYTES, OFFSET_BITS, TABLE_AT, WIDE_BIT, Header
from .lossless_two_level import decode_words

SCRATCH_ELEMENTS = 1 << 24  # elements decoded at a time; each takes about 4 bytes of temporary memory
_ONES = 0x01010101


def decode_torch(blob: torch.Tensor, header: Header, out: torch.Tensor) -> None:
    """Decode ``blob`` (uint8, 8-byte aligned) into ``out`` (uint8 [raw_nbytes], same device).

    ``header`` must come from `parse_header` of the same bytes on the host, and the blob must have been
    verified.
    """
    kind, coded = header.kind, header.words * 4
    bits = blob[header.bits_at : header.tiles_at].view(torch.int32)
    bits = bits.view(header.tiles, header.planes, header.lanes)
    entries = blob[header.tiles_at : header.tiles_at + 8 * header.tiles].view(torch.int64)
    stream = blob[header.escapes_at : header.escapes_at + header.escape_bytes]
    step = max(1, SCRATCH_ELEMENTS // header.tile)
    for first in range(0, header.tiles, step):
        tiles = slice(first, min(first + step, header.tiles))
        part = slice(first * header.tile, min(tiles.stop * header.tile, coded))
        if kind.two_level:
            out[part] = _two_level(header, bits[tiles], entries[tiles], stream)[: part.stop - part.start]
        else:
            _one_level(blob, header, bits[tiles], entries[tiles], stream, part, out)
    if header.tail_count:
        out[coded * kind.itemsize :] = blob[64 : 64 + header.tail_count * kind.itemsize]


def _one_level(
    blob: torch.Tensor, header: Header, bits: torch.Tensor, entries: torch.Tensor, stream: torch.Tensor, part: slice,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the elements ``part`` of a tensor in version 1 of the format to their places in ``out``.

    ``bits`` and ``entries``: the bit planes and the tile table entries of the tiles of these elements.
    """
    kind, coded, count = header.kind, header.words * 4, part.stop - part.start
    exponent = _spread(bits[:, : header.k], header.base)
    if header.most_escapes:
        _patch(exponent, bits[:, : header.k], entries, stream, blob[TABLE_AT : TABLE_AT + 16], header)
    planes = [blob[HEADER_BYTES + p * header.byte_plane_stride :][part] for p in range(kind.byte_planes)]
    rest = _spread(bits[:, header.k :], 0)[:count] if kind.rest_bits else None
    elements = out[: coded * kind.itemsize].view(coded, kind.itemsize)
    for at, byte in enumerate(_join(planes, rest, exponent[:count])):
        elements[part, at] = byte


def _two_level(
    header: Header, bits: torch.Tensor, entries: torch.Tensor, stream: torch.Tensor
) -> torch.Tensor:
    """Return the bytes of whole tiles of a tensor in version 2 of the format."""
    words = decode_words(header, bits, entries, stream.view(torch.int32))
    return (
        torch.stack(words, 2)
        .view(len(bits), header.lanes, 4, 2)
        .transpose(1, 2)
        .reshape(-1)
        .view(torch.uint8)
    )


def _spread(planes: torch.Tensor, base: int) -> torch.Tensor:
    """Expand bit planes (int32 [tiles, p, lanes]) to one uint8 for each element: the p-bit field plus
    ``base``.

    The result has 16 spare bytes at its end.
    """
    tiles, count, lanes = planes.shape
    flat = torch.empty(tiles * lanes * 32 + 16, dtype=torch.uint8, device=planes.device)
    words = flat[:-16].view(torch.int32).view(tiles, 4, lanes, 2)
    for r in range(8):
        value = ((planes[:, 0] >> r) & _ONES) + base * _ONES
        for j in range(1, count):
            value += ((planes[:, j] >> r) & _ONES) << j
        words[:, r // 2, :, r % 2] = value
    return flat


def popcount(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of set bits of each int32."""
    count = mask - ((mask >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    return (((count + (count >> 4)) & 0x0F0F0F0F) * _ONES) >> 24


def _patch(
    exponent: torch.Tensor, codes: torch.Tensor, entries: torch.Tensor, stream: torch.Tensor, table: torch.Tensor,
    header: Header,
) -> None:  # fmt: skip
    """Overwrite the exponents of escapes (elements whose code is all ones) by those in ``stream``, the escape
    bytes.

    Each round handles one escape of every lane (32 elements) that has any left.
    """
    mask = codes[:, 0]
    for j in range(1, header.k):
        mask = mask & codes[:, j]
    tiles, lanes = mask.shape
    device = mask.device
    count = popcount(mask)
    wide = (entries >> WIDE_BIT & 1).view(tiles, 1)
    offset = (entries & ((1 << OFFSET_BITS) - 1)).view(tiles, 1)
    # The position of each lane's first escape in the stream, counted in half bytes; wide escapes take two.
    position = 2 * offset + ((torch.cumsum(count, 1) - count) << wide)
    first = (
        torch.arange(tiles, device=device).view(tiles, 1) * header.tile
        + torch.arange(lanes, device=device) * 8
    )
    mask = mask.to(torch.int64) & 0xFFFFFFFF
    discard, last = exponent.numel() - 1, stream.numel() - 1
    for _ in range(header.most_escapes):
        lowest = mask & -mask
        mask = mask ^ lowest
        byte = stream[(position >> 1).clamp_(max=last)]
        short = table[((byte >> ((position & 1) * 4).to(torch.uint8)) & 15).to(torch.int32)]
        value = torch.where(wide == 1, byte, short)
        # The log2 of a power of two below 2**32 is exactly the exponent field of its float64.
        bit = (lowest.to(torch.float64).view(torch.int64) >> 52) - 1023
        element = first + (bit >> 1 & 3) * (8 * lanes) + (bit & 1) * 4 + (bit >> 3)
        exponent.scatter_(0, torch.where(lowest == 0, discard, element).view(-1), value.view(-1))
        position = position + 1 + wide


def _join(
    planes: list[torch.Tensor], rest: torch.Tensor | None, exponent: torch.Tensor
) -> list[torch.Tensor]:
    """Return the bytes of the decoded elements as uint8 tensors: the lowest byte of all elements first."""
    if rest is None:
        signed = planes[-1]
        return [*planes[:-1], (signed & 0x7F) | (exponent << 7), (signed & 0x80) | (exponent >> 1)]
    return [*planes, ((rest & 4) << 5) | (exponent << 2) | (rest & 3)]
