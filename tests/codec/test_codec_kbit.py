"""NF4, NF3 and NF2: published codebook, nearest values, bounded error, decoders that agree."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

codec = importlib.import_module("carom.core.codec")
errors = importlib.import_module("carom.core.common.errors")
kbit = importlib.import_module("carom.core.codec.kbit")
kbit_host = importlib.import_module("carom.core.codec.kbit_host")

# Published: QLoRA, appendix E, and bitsandbytes' kernels, as printed there.
PUBLISHED_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
BOOKS = list(kbit.CODEBOOKS)


def test_nf4_is_the_published_codebook():
    assert list(kbit.CODEBOOKS["nf4"].values) == PUBLISHED_NF4


@pytest.mark.parametrize("name", BOOKS)
def test_codebooks_follow_the_formula(name):
    book = kbit.CODEBOOKS[name]
    derived = kbit.derive_codebook(book.bits)
    # bitsandbytes computed NF4 in float32 from a rounded offset: the last digits differ.
    assert len(book.values) == 1 << book.bits and np.allclose(book.values, derived, atol=5e-7, rtol=0)
    assert list(book.values) == sorted(book.values) and 0.0 in book.values
    assert all(float(np.float32(value)) == value for value in book.values)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(BOOKS),
    dtype=st.sampled_from(kbit.DTYPES),
    count=st.integers(0, 700),
    block=st.sampled_from(kbit.BLOCKS),
    scale=st.sampled_from([1e-38, 1e-4, 0.02, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_each_value_becomes_the_nearest_codebook_value_and_decoders_agree(
    name, dtype, count, block, scale, seed
):
    book = kbit.CODEBOOKS[name]
    weights = (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    blob = kbit.quantize(weights, book, block)
    layout = kbit.Layout(book, count, block)
    assert blob.numel() == layout.total
    exact = kbit.dequantize_reference(blob.numpy(), layout)
    out = torch.empty(count, dtype=dtype)
    kbit.dequantize_torch(blob, layout, out)
    assert torch.equal(out, torch.from_numpy(exact).to(dtype))
    for start in range(0, count, block):
        part = weights[start : start + block].double().numpy()
        peak = np.abs(part).max()
        if peak < kbit.SMALLEST_SCALE:
            assert (exact[start : start + block] == 0).all()
            continue
        distance = np.abs(part[:, None] / peak - np.array(book.values)[None]).min(1)
        got = np.abs(part / peak - exact[start : start + block] / peak)
        assert np.allclose(got, distance, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "error", "bits"), [("nf4", 0.095, 4.5), ("nf3", 0.205, 3.5), ("nf2", 0.57, 2.5)]
)
def test_error_and_size_on_gaussian_weights(name, error, bits):
    weights = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    packed = codec.encode(weights, name)
    assert packed.wire_nbytes * 8 / weights.numel() == bits
    relative = float((codec.decode(packed) - weights).norm() / weights.norm())
    assert 0.8 * error < relative < error


def test_nf4_bytes_are_packed_like_bitsandbytes():
    """First element in the upper half of the byte; code 7 is zero."""
    blob = kbit.quantize(torch.tensor([1.0, -1.0, 0.0, 0.08]), kbit.CODEBOOKS["nf4"], 64)
    assert blob[:4].tolist() == [0xF0, 0x78, 0x77, 0x77]
    assert blob[16:].view(torch.float32).tolist() == [1.0]


@pytest.mark.parametrize("name", BOOKS)
def test_decoding_may_begin_at_any_group(name):
    weights = torch.randn(1003)
    packed = codec.encode(weights, name)
    layout = codec.get(name).layout(packed)
    out = torch.zeros(1003)
    kbit.dequantize_torch(packed.blob, layout, out, 1000)
    assert torch.equal(out[1000:], codec.decode(packed)[1000:]) and (out[:1000] == 0).all()


@pytest.mark.parametrize("dtype", kbit.DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 63, 64, 1003, 2048 * 3 + 5])
def test_the_cores_write_the_bytes_that_a_device_writes(count, dtype, monkeypatch):
    monkeypatch.setattr(kbit_host, "CHUNK", 2048)
    weights = (torch.randn(count) * 0.05).to(dtype)
    weights[: count // 3] = weights[: count // 3] * 1e-35  # blocks that count as zero, and subnormals
    weights[count // 2 : count // 2 + 3] = 0
    for name, book in kbit.CODEBOOKS.items():
        for block in (32, 64, 1024):
            layout = kbit.Layout(book, count, block)
            blob = torch.zeros(layout.total, dtype=torch.uint8)
            assert kbit.quantize_torch(weights, layout, blob)
            assert torch.equal(blob, kbit.quantize(weights, book, block)), name


@pytest.mark.parametrize("name", BOOKS)
def test_decoding_ignores_the_default_device_of_the_program(name):
    packed = codec.encode(torch.randn(300), name)
    layout, out = codec.get(name).layout(packed), torch.empty(300)
    kbit._value_runs.cache_clear(), kbit._spread_bits.cache_clear(), kbit.codebook_on.cache_clear()
    with torch.device("meta"):
        kbit.dequantize_torch(packed.blob, layout, out)
    assert torch.equal(out, torch.from_numpy(kbit.dequantize_reference(packed.blob.numpy(), layout)))


@pytest.mark.parametrize("name", BOOKS)
def test_a_range_may_begin_and_end_within_a_block(name, monkeypatch):
    monkeypatch.setattr(kbit, "CHUNK", 1024)
    packed = codec.encode(torch.randn(5000).bfloat16(), name)
    layout, whole = codec.get(name).layout(packed), codec.decode(packed)
    for begin, end in ((8, 9), (72, 1003), (1000, 1032), (1024, 3073), (4992, 5000)):
        out = torch.empty(end - begin, dtype=torch.bfloat16)
        kbit.dequantize_range(packed.blob, layout, begin, out)
        assert torch.equal(out, whole[begin:end])


def test_pieces_do_not_change_the_result(monkeypatch):
    weights = torch.randn(5000).half()
    for name in BOOKS:
        whole = codec.encode(weights, name)
        decoded = codec.decode(whole)
        monkeypatch.setattr(kbit, "CHUNK", 1024)
        monkeypatch.setattr(kbit_host, "CHUNK", 1024)
        assert torch.equal(whole.blob, codec.encode(weights, name).blob)
        assert torch.equal(decoded, codec.decode(whole))
        monkeypatch.undo()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_no_codebook_has_are_refused_by_name(bad):
    weights = torch.randn(100)
    weights[77] = bad
    with pytest.raises(errors.WeightsError, match="blk.w.*NaN or infinities"):
        codec.encode(weights, "nf4", name="blk.w")


def test_other_dtypes_and_blocks_are_refused():
    with pytest.raises(errors.UnsupportedError, match="int64"):
        codec.encode(torch.arange(10), "nf4")
    with pytest.raises(ValueError, match="block"):
        codec.get("nf4").encode(torch.ones(8), block=63)
    packed = codec.encode(torch.ones(100), "nf3")
    for block in (0, -64, 63, "64", None, 1 << 40):
        with pytest.raises(errors.WeightsError, match="'w'"):
            codec.decode(codec.Packed({**packed.meta, "block": block}, packed.blob), "w")
