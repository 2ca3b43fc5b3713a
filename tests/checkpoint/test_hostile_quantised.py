"""Quantised files made on purpose, with checksums that are right: an error that names the tensor, and no byte outside the buffers."""

# mypy: disable-error-code="union-attr,arg-type,index"

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.codec import kbit
from carom.core.codec.blob_format import BlobFormat
from carom.core.codec.blob_metadata import METADATA_KEY
from carom.core.codec.unit_decoder import KbitEntry, UnitDecoder
from carom.core.common.errors import CaromError, WeightsError
from carom.core.device.simulated import SimulatedDevice
from carom.tools.pack.writer import pack
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tests_harness import assert_same
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

GUARD = 4096
NOTHING = memoryview(b"")
ODD: Any = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-2, 5), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


def sealed(meta: dict[str, Any], blob: torch.Tensor) -> dict[str, Any]:
    """``meta`` with the checksum that it and ``blob`` need."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    text = json.dumps(rest, separators=(",", ":"), sort_keys=True)
    return {**rest, "crc32": zlib.crc32(blob.numpy().data, zlib.crc32(text.encode()))}


@settings(max_examples=150, deadline=None)
@example(codec="nf4", dtype="bfloat16", shape=[8], block=64, length=None, odd={})
@example(codec="nf3", dtype="float32", shape=[3, 333], block=32, length=None, odd={})
@example(codec="nf4", dtype="bfloat16", shape=[1 << 40, 1 << 40], block=64, length=100, odd={})
@example(codec="nf2", dtype="float16", shape=[0], block=64, length=0, odd={})
@given(
    codec=st.sampled_from(sorted(kbit.CODEBOOKS)),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64", "uint8"]),
    shape=st.lists(st.integers(0, 60), max_size=3),
    block=st.sampled_from([*kbit.BLOCKS, 0, -64, 8, 63, 1 << 62]),
    length=st.one_of(st.none(), st.none(), st.integers(0, 20_000)),
    odd=st.dictionaries(
        st.sampled_from(["codec", "version", "dtype", "shape", "block", "crc32", "x"]), ODD, max_size=1
    ),
)
def test_whatever_metadata_say_it_is_an_error_or_decoding_stays_within_the_buffers(
    codec, dtype, shape, block, length, odd
):
    meta = {"codec": codec, "version": 1, "dtype": dtype, "shape": shape, "block": block, "crc32": 0, **odd}
    if length is None:
        count = 1
        for size in shape:
            count *= size
        length = kbit.Layout(kbit.CODEBOOKS[codec], count, block if block > 0 else 64).total
    try:
        found = BlobFormat.parse(meta, NOTHING, length, "x")
    except CaromError as error:
        assert "'x'" in str(error)
        return
    if found is None:
        assert meta["codec"] == "raw"
        return
    assert isinstance(found.entry, KbitEntry) and found.nbytes == length
    layout = found.entry.layout
    blob = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    out_bytes, outs = layout.numel * found.dtype.itemsize, []
    for beside in (0, 91):
        wire = torch.full((GUARD + length + GUARD,), beside, dtype=torch.uint8)
        wire[GUARD : GUARD + length] = blob
        out = torch.full((out_bytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        UnitDecoder([KbitEntry(layout, found.dtype, GUARD, GUARD)])(wire, out)
        assert bool((out[:GUARD] == 0xA5).all() and (out[GUARD + out_bytes :] == 0xA5).all())
        outs.append(out)
    assert torch.equal(*outs)


LARGE = """
import torch
from carom.core.codec import kbit, kbit_triton
import triton.language as tl

for name, numel in (("nf4", (1 << 32) + 4096), ("nf3", (1 << 33) + 4096)):
    book, count = kbit.CODEBOOKS[name], 1024
    large, small = kbit.Layout(book, numel, 64), kbit.Layout(book, count, 64)
    part = kbit.quantize(torch.randn(count).bfloat16(), book, 64)
    blob = torch.empty(large.scales_at + 4096, dtype=torch.uint8)  # few of its pages are touched
    for plane in range(3 if name == "nf3" else 1):
        codes = part[plane * small.plane_stride : small.scales_at][: count // 8 * (1 if name == "nf3" else 4)]
        blob[plane * large.plane_stride :][: len(codes)] = codes
    blob[large.scales_at :][: 4 * small.blocks] = part[small.scales_at :]
    expected, out = torch.empty(count, dtype=torch.float32), torch.empty(count, dtype=torch.float32)
    kbit.dequantize_torch(part, small, expected)
    table = torch.tensor([[0, count // 8, 0, 0, large.scales_at // 16, large.plane_stride // 16, 0, 0]])
    kbit_triton._dequantize[(1,)](
        blob, out, table, 1, kbit.codebook_on(book, blob.device),
        ROWS=kbit_triton.padded_rows(table), BITS=book.bits, BLOCK=64, GROUPS=count // 8, DTYPE=tl.float32, SIZE=4,
        ROUND_BF16=False,
    )
    assert torch.equal(out, expected), name
print("exact")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_finds_scales_beyond_two_gibibytes_of_codes():
    """Stacked experts have so many elements. In a process of its own: a wrong address ends it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LARGE],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    if "can't allocate memory" in done.stderr:
        pytest.skip("this system gives no memory that is not used")
    assert done.stdout == "exact\n", f"exit code {done.returncode}: {done.stderr[-2000:]}"


# -- files

WIDE = 256


def model(meta: bool = False) -> nn.Sequential:
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(8)))
        if not meta:
            for part in made:
                nn.init.normal_(part.weight, std=0.05)
    return made.bfloat16().requires_grad_(False)


def quantised_file(folder: Path) -> Path:
    path = folder / "p.safetensors"
    if not path.exists():
        save_file({n: t.clone() for n, t in model().state_dict().items()}, folder / "m.safetensors")
        pack(folder / "m.safetensors", path, quant="nf4")
    return path


def scales_of(blob: torch.Tensor) -> torch.Tensor:
    return blob[kbit.Layout(kbit.CODEBOOKS["nf4"], WIDE * WIDE, 64).scales_at :].view(torch.float32)


HOSTILE: dict[str, Any] = {
    "larger blocks": lambda meta, blob: ({**meta, "block": 1024}, blob),
    "smaller blocks": lambda meta, blob: ({**meta, "block": 32}, blob),
    "no blocks": lambda meta, blob: ({**meta, "block": 0}, blob),
    "negative blocks": lambda meta, blob: ({**meta, "block": -64}, blob),
    "huge blocks": lambda meta, blob: ({**meta, "block": 1 << 60}, blob),
    "blocks in words": lambda meta, blob: ({**meta, "block": "64"}, blob),
    "fewer bits": lambda meta, blob: ({**meta, "codec": "nf2"}, blob),
    "other planes": lambda meta, blob: ({**meta, "codec": "nf3"}, blob),
    "truncated": lambda meta, blob: (meta, blob[:-16].clone()),
    "longer": lambda meta, blob: (meta, torch.cat([blob, blob[:4096]])),
}


def hostile_file(folder: Path, name: str, change: Any, seal: bool = True) -> Path:
    """A file of `model`, hostile in the tensor ``name``."""
    with safe_open(quantised_file(folder), "pt") as file:
        tensors, about = {n: file.get_tensor(n) for n in file.keys()}, dict(file.metadata())  # noqa: SIM118
    metas = json.loads(about[METADATA_KEY])
    meta, tensors[name] = change(metas["tensors"][name], tensors[name])
    metas["tensors"][name] = sealed(meta, tensors[name]) if seal else meta
    save_file(tensors, folder / "h.safetensors", {**about, METADATA_KEY: json.dumps(metas)})
    return folder / "h.safetensors"


ALL = sum(p.nbytes for p in model(meta=True).parameters())


def names_by_place(folder: Path, kept: bool, options: dict[str, Any]) -> list[str]:
    """The names of the matrices that stay on the device (``kept``) or stream."""
    with carom.stream(model(meta=True), weights=quantised_file(folder), **options) as session:
        stay = {resident.entry.name for resident in inside(session).placement.tier._residents.residents}
    return [name for name in (f"{index}.weight" for index in range(8)) if (name in stay) == kept]


@pytest.mark.parametrize("how", [*HOSTILE, "no checksum", "a checksum of 80 bits"])
@pytest.mark.parametrize("kept", [False, True], ids=["streams", "stays"])
def test_a_session_names_the_tensor_and_the_rest_of_the_file_is_right(tmp_path, monkeypatch, how, kept):
    units_apart_from(monkeypatch, 1 << 10)  # units of this size come one by one
    options: Any = {"device": SimulatedDevice(timing="random"), "vram": ALL * 4 // 5, "ram": 64 << 10}
    other, *_, name = names_by_place(tmp_path, kept, options)
    if how in HOSTILE:
        path = hostile_file(tmp_path, name, HOSTILE[how])
    else:
        crc = None if how == "no checksum" else 1 << 79
        path = hostile_file(tmp_path, name, lambda meta, blob: ({**meta, "crc32": crc}, blob), seal=False)
    plain = model()
    plain.load_state_dict(carom.load_file(quantised_file(tmp_path)))
    empty = model(meta=True)
    with carom.stream(empty, weights=path, **options) as session:
        x = torch.randn(2, WIDE).bfloat16()
        for _ in range(2):
            with (
                torch.no_grad(),
                pytest.raises(WeightsError, match=rf"h\.safetensors.*'{name[0]}\.weight'"),
            ):
                empty(x)
        assert torch.equal(session.read(other), plain.get_parameter(other))
        with pytest.raises(WeightsError, match=rf"'{name[0]}\.weight'"):
            session.read(name)
    assert all(p.is_meta for p in empty.parameters())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_dtype_that_is_not_the_modules_is_refused(tmp_path, dtype):
    path = hostile_file(tmp_path, "3.weight", lambda meta, blob: ({**meta, "dtype": dtype}, blob))
    with pytest.raises(CaromError, match=r"3\.weight"):
        carom.stream(model(meta=True), device=SimulatedDevice(), weights=path, vram=ALL // 2, ram=ALL)


def test_scales_of_any_value_are_decoded_as_the_host_decodes_them(tmp_path):
    """A scale that is huge, infinite or NaN gives values, not places."""

    def change(meta: dict, blob: torch.Tensor) -> tuple[dict, torch.Tensor]:
        blob = blob.clone()
        scales_of(blob)[:5] = torch.tensor([float("inf"), float("-inf"), float("nan"), 3e38, -1e-45])
        return meta, blob

    path = hostile_file(tmp_path, "7.weight", change)
    plain, empty = model(), model(meta=True)
    plain.load_state_dict(carom.load_file(path))
    x = torch.randn(2, WIDE).bfloat16()
    with (
        carom.stream(empty, device=SimulatedDevice(), vram=ALL // 2, weights=path, ram=ALL) as session,
        torch.no_grad(),
    ):
        assert session.report().units
        ours, theirs = empty(x), plain(x)
        assert_same([theirs.view(torch.int16)], [ours.view(torch.int16)])
