"""Lossless encoder for tensors that are on a device: by Triton kernels (core/codec/lossless_encode_triton.py) where
they work, else by torch operations. Writes the same bytes as the CPU encoder.

Weights that are loaded from a file lie in host memory and are packed there (core/codec/lossless.py). This
encoder is for weights that were made or changed on the device.

The terms tile, lane, byte plane, bit plane and rest bits are defined in core/codec/lossless_format.py.
"""

from __future__ import annotations

import torch

from .backends import triton_encodes
from .blob_metadata import raw_bytes
from .lossless import Code, choose_code, sample_starts
from .lossless_format import (
    DEFAULT_LANES,
    HEADER_BYTES,
    KIND_BY_DTYPE,
    LITERAL_SHIFT,
    MOST_SHIFT,
    SECOND_SHIFT,
    WIDE_BIT,
    Header,
    Kind,
    checksum,
)
from .lossless_second_codes import GROUP, SECOND_ESCAPE, second_codes_of
from .lossless_torch import popcount

SCRATCH_ELEMENTS = 1 << 24
STEP_BYTES = 32  # bytes of temporary device memory for each element that torch operations encode at a time
_ONES = 0x01010101


def split_torch(
    kind: Kind, elements: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    """Split elements, given as bytes (uint8 [n, itemsize]), into (byte planes, rest bits or None, exponents),
    all uint8 [n].
    """
    high = elements[:, -1].contiguous()
    if kind.name in ("bf16", "fp32"):
        low = elements[:, -2]
        planes = [elements[:, p] for p in range(kind.itemsize - 2)]
        return [*planes, (high & 0x80) | (low & 0x7F)], None, (high << 1) | (low >> 7)
    if kind.name == "e4m3":
        return [], (high >> 7 << 3) | (high & 7), high >> 3 & 15
    return [elements[:, p] for p in range(kind.itemsize - 1)], (high >> 7 << 2) | (high & 3), high >> 2 & 31


def encode_on_device(
    tensor: torch.Tensor, *, lanes: int = DEFAULT_LANES, code: Code | None = None
) -> torch.Tensor | None:
    """Encode a tensor on its device and return the blob in host memory (1-D uint8), or None where it would
    not be smaller.

    The bytes are those that `lossless.encode` writes.
    """
    result = encode_device_blob(tensor, lanes=lanes, code=code)
    if result is None:
        return None
    header, device_blob = result
    blob = device_blob.cpu()
    header = header.with_crc(checksum(header, blob.numpy().data[HEADER_BYTES:]))
    blob[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    return blob


def encode_device_blob(
    tensor: torch.Tensor,
    *,
    lanes: int = DEFAULT_LANES,
    code: Code | None = None,
    limit: int | None = None,
    step_elements: int = SCRATCH_ELEMENTS,
) -> tuple[Header, torch.Tensor] | None:
    """Encode a tensor on its device; return the header and the blob (1-D uint8 on that device), without a
    checksum.

    Returns None where the blob would take ``limit`` bytes or more (default: the tensor's bytes).
    ``step_elements``: elements that torch operations encode at a time. Temporary memory is bounded by `STEP_BYTES`
    for each.
    """
    kind = KIND_BY_DTYPE.get(tensor.dtype)
    if kind is None or tensor.numel() < 8:
        return None
    elements = raw_bytes(tensor).view(-1, kind.itemsize)
    if code is None:
        starts = sample_starts(len(elements))
        sample = elements
        if starts is not None:
            positions = torch.tensor([start for start, _ in starts], device=elements.device)
            runs = torch.arange(starts[0][1], device=elements.device)
            sample = elements[(positions[:, None] + runs).view(-1)]
        # Counted on the device: a core of an EPYC takes 0.7 ms to count half a million exponents, for each tensor.
        counts = torch.bincount(split_torch(kind, sample)[2], minlength=256)
        code = choose_code(counts.cpu().numpy(), kind, 32 * lanes)
    coded = len(elements) // 8 * 8
    last = elements[coded:].cpu().numpy().tobytes() if coded < len(elements) else b""
    tail = last.ljust(32, b"\0")
    header = Header(kind, code.k, lanes, code.base, len(elements), 0, code.table, tail, 0)
    limit = header.raw_nbytes if limit is None else limit
    if header.total >= limit:
        return None
    device = elements.device
    if device.type == "cuda" and not kind.two_level and triton_encodes():
        with torch.cuda.device(device):
            from .lossless_encode_triton import split_triton

            split = split_triton(elements.view(-1), header, limit)
            if split.header.total >= limit:
                return None
            # Tensors with very many escapes are encoded in steps, below.
            if 2 * split.header.escape_bytes <= step_elements * STEP_BYTES:
                return split.header, split.encode_escapes()
        del split
    fixed = torch.zeros(header.escapes_at, dtype=torch.uint8, device=device)
    bits = fixed[header.bits_at : header.tiles_at].view(torch.int32)
    bits = bits.view(header.tiles, header.planes, lanes)
    entries = fixed[header.tiles_at : header.tiles_at + 8 * header.tiles].view(torch.int64)
    nibble_of = torch.full((256,), 255, dtype=torch.uint8)
    nibble_of[torch.tensor(list(code.table))] = torch.arange(16, dtype=torch.uint8)
    nibble_of = nibble_of.to(device)
    second_codes = torch.from_numpy(second_codes_of(header)).to(device)
    positions = torch.arange(8, dtype=torch.int32, device=device).view(4, 1, 2)
    streams, written, most = [], 0, 0
    step = max(1, min(step_elements, SCRATCH_ELEMENTS) // header.tile)
    for first in range(0, header.tiles, step):
        tiles = min(step, header.tiles - first)
        begin, end = first * header.tile, min((first + tiles) * header.tile, coded)
        planes, rest, exponent = split_torch(kind, elements[begin:end])
        for p, plane in enumerate(planes):
            at = HEADER_BYTES + p * header.byte_plane_stride
            fixed[at + begin : at + end] = plane
        escape = (1 << code.k) - 1
        combined = (exponent - code.base).clamp_(max=escape)
        if rest is not None:
            combined |= rest << code.k
        combined = torch.nn.functional.pad(combined, (0, tiles * header.tile - (end - begin)))
        part = bits[first : first + tiles]
        words = combined.view(torch.int32).view(tiles, 4, lanes, 2)
        # The eight words of a lane contribute different bits, so their sum is their bitwise OR.
        for j in range(header.planes):
            part[:, j] = (((words >> j) & _ONES) << positions).sum((1, 3), dtype=torch.int32)
        mask = part[:, 0]
        for j in range(1, code.k):
            mask = mask & part[:, j]
        if kind.two_level:
            stream, tile_entries = _two_level_escapes(mask, exponent, second_codes)
            entries[first : first + tiles] = tile_entries + written // 8
            fullest = 0
        else:
            stream, tile_entries, fullest = _escapes(mask, exponent, nibble_of)
            entries[first : first + tiles] = tile_entries + written
        streams.append(stream)
        written += len(stream)
        most = max(most, fullest)
        if header.escapes_at + written >= limit:
            return None
    header = Header(kind, code.k, lanes, code.base, len(elements), written, code.table, tail, most)
    if header.total >= limit:
        return None
    blob = torch.zeros(header.total, dtype=torch.uint8, device=device)
    blob[: header.escapes_at] = fixed
    blob[header.escapes_at : header.escapes_at + written] = torch.cat(streams)
    blob[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8).to(device)
    return header, blob


def _escapes(
    mask: torch.Tensor, exponent: torch.Tensor, nibble_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (escape bytes, table entry of each tile, largest number of escapes in a lane) for the escapes
    set in ``mask``.

    ``mask``: int32 [tiles, lanes], a bit for each element. ``exponent``: the exponents of all elements.
    ``nibble_of``: maps an exponent to its index in the table of 4-bit escapes, or to 255.
    """
    tiles = len(mask)
    device = mask.device
    by_lane = popcount(mask)
    counts, most = by_lane.sum(1), by_lane.amax(1).to(torch.int64)
    element, tile = _positions(mask)
    values = exponent[element]
    nibbles = nibble_of[values.to(torch.int32)]
    wide = torch.zeros(tiles, dtype=torch.int64, device=device)
    wide[tile[nibbles == 255]] = 1
    sizes = ((counts << wide) + 1) >> 1
    offsets = torch.cumsum(sizes, 0) - sizes
    rank = torch.arange(len(element), device=device) - (torch.cumsum(counts, 0) - counts)[tile]
    of_wide = wide[tile] == 1
    at = 2 * offsets[tile] + (rank << wide[tile])
    half = torch.zeros(2 * int(sizes.sum()), dtype=torch.uint8, device=device)
    half[at] = torch.where(of_wide, values & 15, nibbles)
    half[at[of_wide] + 1] = values[of_wide] >> 4
    entries = offsets | wide << WIDE_BIT | most << MOST_SHIFT
    return half[0::2] | (half[1::2] << 4), entries, int(most.max())


def _positions(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the element number and the tile of each bit that is set in ``mask``, by tile, lane and bit (int64)."""
    lanes = mask.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    found = ((mask.reshape(-1, 1) >> shifts) & 1).to(torch.bool).view(-1).nonzero().view(-1)
    bit, lane, tile = found & 31, (found >> 5) % lanes, (found >> 5) // lanes
    return tile * (32 * lanes) + ((bit >> 1 & 3) * lanes + lane) * 8 + (bit & 1) * 4 + (bit >> 3), tile


def _two_level_escapes(
    mask: torch.Tensor, exponent: torch.Tensor, second_codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (escape bytes, table entry of each tile) for the escapes set in ``mask`` (version 2 of the format).

    ``second_codes``: maps an exponent to its second code. Otherwise as `_escapes`.
    """
    tiles = len(mask)
    element, tile = _positions(mask)
    values = exponent[element]
    codes = second_codes[values.to(torch.int32)]
    literal = (codes == SECOND_ESCAPE).nonzero().view(-1)
    counts = torch.bincount(tile, minlength=tiles)
    of_tile = torch.bincount(tile[literal], minlength=tiles)
    seconds, literals = -(-counts // GROUP), -(-of_tile // GROUP)
    second_words = _planes(codes, tile, counts, seconds, 2)
    literal_words = _planes(values[literal], tile[literal], of_tile, literals, 4)
    sizes = seconds + 2 * literals
    starts = torch.cumsum(sizes, 0) - sizes
    stream = torch.empty(len(second_words) + len(literal_words), dtype=torch.int64, device=mask.device)
    stream[_consecutive(starts, seconds)] = second_words
    stream[_consecutive(starts + seconds, 2 * literals)] = literal_words
    return stream.view(torch.uint8), starts | seconds << SECOND_SHIFT | literals << LITERAL_SHIFT


def _planes(
    values: torch.Tensor, tile: torch.Tensor, counts: torch.Tensor, groups: torch.Tensor, bits: int
) -> torch.Tensor:
    """Return the bit planes (int64) of ``values``: in groups of 32 values, with a group's planes together.

    ``tile``: the tile of each value. ``counts`` and ``groups``: the values and the groups of each tile.
    """
    moved = GROUP * (torch.cumsum(groups, 0) - groups) - (torch.cumsum(counts, 0) - counts)
    padded = torch.zeros(GROUP * int(groups.sum()), dtype=torch.int64, device=values.device)
    padded[torch.arange(len(values), device=values.device) + moved[tile]] = values.to(torch.int64)
    padded = padded.view(-1, 1, GROUP)
    planes = torch.arange(bits, device=values.device).view(1, bits, 1)
    words = ((padded >> planes & 1) << torch.arange(GROUP, device=values.device)).sum(2)
    return words[:, 0::2].reshape(-1) | words[:, 1::2].reshape(-1) << 32


def _consecutive(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``counts[0]`` numbers from ``starts[0]`` on, then ``counts[1]`` from ``starts[1]`` on, and so on."""
    moved = torch.repeat_interleave(starts - (torch.cumsum(counts, 0) - counts), counts)
    return torch.arange(len(moved), device=starts.device) + moved
