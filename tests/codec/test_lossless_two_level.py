"""Version 2 of the lossless format: bits are moved as defined, and e4m3 tensors of any bytes come back."""

from __future__ import annotations

import numpy as np
import pytest
import tests_lossless_reference as reference
import torch
from carom.core.codec import lossless
from carom.core.codec.lossless_device import encode_on_device
from carom.core.codec.lossless_format import parse_header
from carom.core.codec.lossless_host import decode_bytes
from carom.core.codec.lossless_torch import decode_torch
from carom.core.codec.lossless_two_level import Expansion, transpose
from carom.core.codec.lossless_validation import check_tiles
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = st.lists(
    st.tuples(*2 * [st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 1 << 31, 2**32 - 1])]),
    min_size=1,
    max_size=20,
)
LIMIT = 1 << 22  # lets tensors be packed that gain nothing by it
ZEROS = bytes(13)


def both(words: list[int]) -> list:
    """``words`` as int32 of NumPy and of torch."""
    array = np.array(words, np.uint32).view(np.int32)
    return [array, torch.from_numpy(array.copy())]


def unsigned(words) -> list[int]:
    return np.asarray(words).view(np.uint32).tolist()


def moved(word: int, mask: int) -> int:
    """The lowest bits of ``word``, one for each set bit of ``mask``, at the places of these."""
    result = 0
    for bit in range(32):
        if mask >> bit & 1:
            result |= (word & 1) << bit
            word >>= 1
    return result


@given(pairs=WORDS)
def test_the_lowest_bits_move_to_the_set_bits_of_the_mask(pairs):
    words, masks = zip(*pairs, strict=True)
    for some, mask in zip(both(list(words)), both(list(masks)), strict=True):
        expand = Expansion(mask)
        assert unsigned(expand(some)) == [moved(*pair) for pair in pairs]
        assert np.asarray(expand.counts).tolist() == [bin(one).count("1") for one in masks]


@given(planes=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8))
def test_a_transposition_exchanges_planes_and_bits_in_each_byte(planes):
    for rows in zip(*([both([word]) for word in planes]), strict=True):
        found = [unsigned(row)[0] for row in transpose(list(rows))]
        for r in range(8):
            for j in range(8):
                assert found[r] >> j & 0x01010101 == planes[j] >> r & 0x01010101


@st.composite
def elements(draw) -> np.ndarray:
    """Bytes of e4m3: a few of any values, some or none of them frequent."""
    count = draw(st.integers(8, 9000))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = random.integers(0, 256, count).astype(np.uint8)
    frequent = draw(st.binary(min_size=1, max_size=6))
    pick = random.random(count) < draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    values[pick] = random.choice(np.frombuffer(frequent, np.uint8), int(pick.sum()))
    return values


@settings(max_examples=60, deadline=None)
@given(
    data=elements(), lanes=st.sampled_from([32, 64, 128, 256]), k=st.integers(1, 3), base=st.integers(0, 15),
    three=st.sets(st.integers(0, 15), min_size=3, max_size=3), chosen=st.booleans(),
)  # fmt: skip
def test_any_bytes_come_back_from_every_decoder_with_any_code(data, lanes, k, base, three, chosen):
    tensor = torch.from_numpy(data.copy()).view(torch.float8_e4m3fn)
    code = None if chosen else lossless.Code(k, min(base, 17 - (1 << k)), bytes(sorted(three)) + ZEROS)
    blob = lossless.encode(tensor, lanes=lanes, code=code, limit=LIMIT)
    header = parse_header(blob.numpy().data, "w", len(blob))
    check_tiles(blob.numpy(), header, "w")
    assert np.array_equal(reference.encode_reference(data, header), blob.numpy())
    assert np.array_equal(reference.decode_reference(blob.numpy(), header), data)
    out = np.zeros_like(data)
    decode_bytes(blob.numpy(), header, 0, out)
    assert np.array_equal(out, data)
    decode_torch(blob, header, torch.from_numpy(out).zero_())
    assert np.array_equal(out, data)
    on_device = encode_on_device(tensor, lanes=lanes, code=code)
    assert on_device is None or torch.equal(on_device, blob)


@pytest.mark.parametrize("literals", [0, 1, 31, 32, 33])
def test_groups_hold_32_codes_and_the_sizes_follow(literals):
    """A tile of exponents with first codes, but for one lane's worth of seconds and some literals."""
    exponents = np.full(4096, 7, np.uint8)
    exponents[:64] = 9
    exponents[64 : 64 + literals] = 2
    code = lossless.Code(1, 7, bytes([8, 9, 10]) + ZEROS)
    blob = lossless.encode(torch.from_numpy(exponents << 3).view(torch.float8_e4m3fn), code=code)
    header = parse_header(blob.numpy().data, "w")
    seconds, groups = -(-(64 + literals) // 32), -(-literals // 32)
    entry = int(blob[header.tiles_at : header.tiles_at + 8].view(torch.int64))
    assert entry == seconds << 32 | groups << 48
    assert header.escape_bytes == 8 * seconds + 16 * groups
