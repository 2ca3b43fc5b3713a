"""Packed tensors in files: plain safetensors reads them, and bad ones are refused by name, never decoded."""

from __future__ import annotations

import importlib
import json
import random
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

codec = importlib.import_module("carom.core.codec")
errors = importlib.import_module("carom.core.common.errors")
formats = importlib.import_module("carom.core.codec.lossless_format")
packed_module = importlib.import_module("carom.core.codec.blob_metadata")
registry = importlib.import_module("carom.core.codec.registry")

WEIGHTS = (torch.randn(3, 5001, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
PACKED = {name: codec.encode(WEIGHTS, name) for name in codec.NAMES}


def refused(packed, name="block.0.weight"):
    """The message of the WeightsError; anything else, a result included, fails the test."""
    with pytest.raises(errors.WeightsError) as caught:
        codec.decode(packed, name)
    assert name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", codec.NAMES)
def test_a_packed_file_is_valid_safetensors_and_decodes_from_its_metadata(name, tmp_path):
    packed = PACKED[name]
    path = tmp_path / "packed.safetensors"
    save_file({"w": packed.blob}, path, metadata=codec.write_metadata({"w": packed.meta}))
    with safe_open(path, "pt") as file:
        blob = file.get_tensor("w")
        meta = codec.read_metadata(file.metadata())["w"]
    assert blob.dtype == torch.uint8 and blob.dim() == 1
    assert meta["codec"] == name and meta["dtype"] == "bfloat16" and meta["shape"] == [3, 5001]
    back = codec.decode(codec.Packed(meta, blob), "w")
    assert back.shape == WEIGHTS.shape and back.dtype == WEIGHTS.dtype
    assert torch.equal(back, WEIGHTS) is not codec.get(name).lossy


def test_only_the_codebooks_are_lossy_and_say_so():
    assert [name for name in codec.NAMES if codec.get(name).lossy] == ["nf4", "nf3", "nf2"]
    assert [name for name in codec.NAMES if PACKED[name].meta.get("lossy")] == ["nf4", "nf3", "nf2"]


@pytest.mark.parametrize("name", codec.NAMES)
def test_decoded_size_is_known_before_decoding_and_out_is_used(name):
    packed = PACKED[name]
    assert codec.decoded_nbytes(packed.meta) == WEIGHTS.nbytes
    out = torch.zeros(WEIGHTS.nbytes + 32, dtype=torch.uint8)
    back = codec.decode(packed, out=out)
    assert back.data_ptr() == out.data_ptr() and torch.equal(back, codec.decode(packed))
    assert (out[WEIGHTS.nbytes :] == 0).all()
    with pytest.raises(ValueError, match="at least"):
        codec.decode(packed, out=out[: WEIGHTS.nbytes - 1])


@pytest.mark.parametrize("name", codec.NAMES)
def test_one_flipped_bit_anywhere_is_refused(name):
    generator = random.Random(name)
    blob = PACKED[name].blob
    places = [generator.randrange(blob.numel() * 8) for _ in range(60)]
    if name == "lossless":
        # Every bit of the header but those of the version, which is refused in other words.
        places += [bit for bit in range(8 * formats.HEADER_BYTES) if not 32 <= bit < 48]
    for place in places:
        bad = blob.clone()
        bad[place // 8] ^= 1 << place % 8
        refused(codec.Packed(PACKED[name].meta, bad))


@pytest.mark.parametrize("name", codec.NAMES)
def test_truncated_and_padded_blobs_are_refused(name):
    blob = PACKED[name].blob
    for length in (0, 1, 127, 128, blob.numel() // 2, blob.numel() - 1):
        refused(codec.Packed(PACKED[name].meta, blob[:length]))
    refused(codec.Packed(PACKED[name].meta, torch.cat([blob, torch.zeros(16, dtype=torch.uint8)])))


@pytest.mark.parametrize("version", [2, 65535, 0])
def test_an_unknown_version_says_which_carom_reads_it(version):
    bad = PACKED["lossless"].blob.clone()
    bad[4:6] = torch.from_numpy(np.array([version], "<u2").view(np.uint8))
    with pytest.raises(errors.UnsupportedError, match=r"version \d+ of .*reads version 1 \(Carom 0.1"):
        codec.decode(codec.Packed(PACKED["lossless"].meta, bad), "w")


def test_an_unknown_codec_or_meta_version_is_unsupported_not_garbage():
    for change in ({"codec": "ans"}, {"version": 2}):
        with pytest.raises(errors.UnsupportedError, match="'w'"):
            codec.decode(codec.Packed({**PACKED["lossless"].meta, **change}, PACKED["lossless"].blob), "w")
    with pytest.raises(ValueError, match="lossless"):
        codec.get("zip")


@pytest.mark.parametrize("name", codec.NAMES)
@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 47]}, {"shape": [-3, 5001]}, {"shape": [3, 5000]}, {"shape": "3"}, {"shape": [True, 5001]},
        {"shape": [1 << 63, 1 << 63, 0]}, {"shape": [1] * 4000}, {"shape": None}, {"dtype": "float32"},
        {"dtype": "bfloat17"}, {"dtype": ["x"]}, {"version": None}, {"version": "1"}, {"version": True},
        {"shape": [5001, 3]}, {"lossy": "no"},
    ],
    ids=lambda change: str(change)[:24],
)  # fmt: skip
def test_metadata_that_does_not_fit_the_bytes_is_refused_before_memory_is_taken(name, change):
    tracemalloc.start()
    try:
        refused(codec.Packed({**PACKED[name].meta, **change}, PACKED[name].blob))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(
    fields=st.lists(st.tuples(st.integers(7, 127), st.integers(0, 255)), min_size=1, max_size=6),
    length=st.integers(0, 6000),
)
def test_hostile_headers_with_a_right_checksum_never_decode_out_of_bounds(fields, length):
    blob = PACKED["lossless"].blob.clone()
    for at, value in fields:
        blob[at] = value
    blob = reseal(blob[: blob.numel() - length].clone())
    packed = codec.Packed(resealed_meta(blob), blob)
    try:
        codec.verify(packed, "w")
    except (errors.WeightsError, errors.UnsupportedError) as error:
        assert "w" in str(error)
    else:
        assert codec.decode(packed).shape == WEIGHTS.shape


def resealed_meta(blob: torch.Tensor) -> dict:
    return packed_module.describe("lossless", 1, WEIGHTS, blob.numpy().data[: formats.HEADER_BYTES])


def resealed(blob: torch.Tensor):
    blob = reseal(blob)
    return codec.Packed(resealed_meta(blob), blob)


def reseal(blob: torch.Tensor) -> torch.Tensor:
    """The blob with the checksum that its bytes need, as an attacker would write it."""
    try:
        header = formats.parse_header(blob.numpy().data, "w")
    except (errors.WeightsError, errors.UnsupportedError):
        return blob
    crc = formats.checksum(header, blob.numpy().data[formats.HEADER_BYTES :])
    blob[12:16] = torch.from_numpy(np.array([crc], "<u4").view(np.uint8))
    return blob


def test_tile_tables_and_masks_that_point_outside_are_refused_despite_a_right_checksum():
    good = PACKED["lossless"]
    header = formats.parse_header(good.blob.numpy().data, "w")
    changes = {
        "offset": (header.tiles_at + 8, 0xFF), "wide": (header.tiles_at + 5, 1), "fullest lane": (header.tiles_at + 6, 0),
        "unknown bit": (header.tiles_at + 7, 1), "mask": (header.bits_at, 0xFF), "last offset": (header.tiles_at + 8 * header.tiles - 8, 1),
    }  # fmt: skip
    for label, (at, value) in changes.items():
        bad = good.blob.clone()
        bad[at] = value
        if label == "mask":
            bad[header.bits_at : header.bits_at + header.planes * header.lanes * 4] = 0xFF
        assert not torch.equal(bad, good.blob), label
        assert "tile table" in refused(resealed(bad)), label


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version":1}', '{"version":"1","tensors":{}}', '{"version":1,"tensors":{"w":3}}', "[" * 100_000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_malformed_file_metadata_is_refused(text):
    with pytest.raises(errors.WeightsError, match="carom.codec"):
        codec.read_metadata({codec.METADATA_KEY: text})


def test_file_metadata_of_a_later_carom_says_so_and_absent_metadata_is_empty():
    later = {codec.METADATA_KEY: json.dumps({"version": 9, "tensors": {}})}
    with pytest.raises(errors.UnsupportedError, match="version 9"):
        codec.read_metadata(later)
    assert codec.read_metadata(None) == {} and codec.read_metadata({"format": "pt"}) == {}


def test_blobs_of_other_dtypes_and_shapes_are_refused():
    for name in codec.NAMES:
        for blob in (PACKED[name].blob.to(torch.int16), PACKED[name].blob[::2], PACKED[name].blob[None]):
            refused(codec.Packed(PACKED[name].meta, blob))


@pytest.mark.parametrize("name", codec.NAMES)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (1,), (), (2, 3, 5), (1, 1, 1)], ids=str)
def test_small_and_empty_shapes_survive_every_codec(name, shape):
    tensor = torch.ones(shape)
    back = codec.decode(codec.encode(tensor, name))
    assert back.shape == tensor.shape and torch.equal(back, tensor)
    strided = torch.ones(4, 4)[:, :1][:1]
    assert torch.equal(codec.decode(codec.encode(strided, name)), strided)


def test_a_unit_of_all_codecs_is_decoded_into_its_slot_and_nothing_else_is_touched():
    tensors = [(name, codec.encode(WEIGHTS[: i + 1].clone(), name)) for i, name in enumerate(codec.NAMES[:3])]
    tensors += [(name, PACKED[name]) for name in codec.NAMES]
    entries, wire_at, out_at = [], 0, 16
    wire = torch.full((1 << 18,), 0x5A, dtype=torch.uint8)
    for name, packed in tensors:
        entries.append(codec.entry_of(packed, wire_at, out_at, name))
        wire[wire_at : wire_at + packed.wire_nbytes] = packed.blob
        wire_at += formats.align(packed.wire_nbytes)
        out_at += formats.align(codec.decoded_nbytes(packed.meta)) + 32
    slot = torch.full((out_at,), 0xA5, dtype=torch.uint8)
    codec.UnitDecoder(entries)(wire, slot)
    free = torch.ones(out_at, dtype=torch.bool)
    for entry, (name, packed) in zip(entries, tensors, strict=True):
        want = packed_module.raw_bytes(codec.decode(packed))
        assert torch.equal(slot[entry.out_at : entry.out_at + len(want)], want), name
        free[entry.out_at : entry.out_at + len(want)] = False
    assert free.sum() >= 32 * len(tensors) and (slot[free] == 0xA5).all()


def test_a_unit_refuses_what_it_cannot_decode_in_place():
    bad = PACKED["lossless"].blob.clone()
    bad[-1] ^= 1
    with pytest.raises(errors.WeightsError, match="blk"):
        codec.entry_of(codec.Packed(PACKED["lossless"].meta, bad), 0, 0, "blk")
    with pytest.raises(errors.WeightsError, match="multiple of 16"):
        codec.UnitDecoder([codec.entry_of(PACKED["raw"], 8, 0)])
    with pytest.raises(ValueError, match="16 bytes in the slot"):
        codec.UnitDecoder([codec.entry_of(PACKED["lossless"], 0, 2)], method="triton")
