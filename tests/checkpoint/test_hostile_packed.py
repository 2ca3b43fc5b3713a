"""Packed files made on purpose, with checksums that are right: an error that names the tensor, never values of no encoder's."""

# mypy: disable-error-code="union-attr,arg-type,index"

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.codec import lossless
from carom.core.codec.blob_format import BlobFormat
from carom.core.codec.blob_metadata import METADATA_KEY, describe
from carom.core.codec.lossless_format import HEADER_BYTES, KINDS, Header, checksum, parse_header
from carom.core.codec.lossless_torch import decode_torch
from carom.core.codec.lossless_validation import check_runs, check_tiles, summarize_run
from carom.core.common.errors import WeightsError
from carom.core.device.simulated import SimulatedDevice
from carom.core.host.blob_checksums import Blob, BlobChecks
from carom.core.host.cache_pieces import cut
from carom.tools.pack.writer import pack
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tests_harness import assert_same
from tests_inside import inside
from tests_limits import units_apart_from
from torch import nn

GUARD = 4096
DAMAGE = ("offset", "wide", "fullest lane", "unknown bit", "planes", "all escapes", "noise")
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)  # versions 1 and 2 of the format


def sealed(header: Header, body: torch.Tensor) -> torch.Tensor:
    """The blob of ``header`` and what follows it, with the checksum that it needs."""
    header = header.with_crc(checksum(header, body.numpy().data))
    return torch.cat([torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8), body])


def damaged(blob: torch.Tensor, how: str) -> torch.Tensor:
    """``blob`` made hostile: its tile table and its planes no longer fit, its checksum does."""
    header, blob = parse_header(blob.numpy().data, "x"), blob.clone()
    assert header.escape_bytes
    table = blob[header.tiles_at : header.tiles_at + 8 * header.tiles].view(torch.int64)
    planes = blob[header.bits_at : header.tiles_at]
    last = header.tiles // 2
    if how == "offset":
        table[last] += 1 << 30
    elif how == "wide":
        table[last] ^= 1 << 40
    elif how == "fullest lane":
        table[last] ^= 1 << 48
    elif how == "unknown bit":
        table[last] |= 1 << 60
    elif how == "planes":
        planes[len(planes) // 2 // header.lanes * header.lanes :][: header.planes * header.lanes * 4] = 255
    elif how == "all escapes":
        planes[:] = 255
    else:
        planes[:] = torch.randint(0, 256, planes.shape, dtype=torch.uint8)
    return sealed(header, blob[HEADER_BYTES:])


def weights(count: int = 40_013, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.5).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_a_header_and_a_body_say_the_torch_decoder_stays_within_them(data):
    kind = data.draw(st.sampled_from(KINDS))
    k = data.draw(st.integers(1, kind.max_k))
    escapes = data.draw(st.integers(0, 3000))
    exponents, most = data.draw(st.binary(min_size=16, max_size=16)), data.draw(st.integers(1, 32))
    if kind.two_level:
        escapes, most = escapes // 8 * 8, 0
        exponents = bytes(sorted(data.draw(st.sets(st.integers(0, 15), min_size=3, max_size=3)))).ljust(
            16, b"\0"
        )
    header = Header(
        kind, k, data.draw(st.sampled_from([32, 64, 128, 256])), data.draw(st.integers(0, kind.max_base(k))),
        data.draw(st.integers(8, 20_000)), escapes, exponents, bytes(32), most if escapes else 0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    body = torch.randint(0, 256, (header.total - HEADER_BYTES,), generator=generator, dtype=torch.uint8)
    if data.draw(st.booleans()):
        body[header.bits_at - HEADER_BYTES : header.tiles_at - HEADER_BYTES] = 255
    table = body[header.tiles_at - HEADER_BYTES :][: 8 * header.tiles].view(torch.int64)
    table |= data.draw(st.sampled_from([0, -1, (1 << 40) - 1]))
    blob = sealed(header, body)
    found = []
    for fill in (0, 91):  # what lies beside the blob
        wire = torch.full((GUARD + len(blob) + GUARD,), fill, dtype=torch.uint8)
        wire[GUARD : GUARD + len(blob)] = blob
        out = torch.full((header.raw_nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        parsed = parse_header(blob.numpy().data, "x")
        decode_torch(wire[GUARD : GUARD + len(blob)], parsed, out[GUARD : GUARD + header.raw_nbytes])
        assert bool((out[:GUARD] == 0xA5).all() and (out[GUARD + header.raw_nbytes :] == 0xA5).all())
        found.append(out)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("lanes", [32, 256])
def test_whatever_the_cut_a_table_that_does_not_fit_is_named(how, lanes, dtype):
    blob = lossless.encode(weights(dtype=dtype), lanes=lanes, limit=1 << 20)
    padded = -(-len(blob) // 4096) * 4096
    header = parse_header(blob.numpy().data, "a")
    for pages in (1, 2, 5, 100):
        for good in (True, False):
            memory = torch.zeros(padded, dtype=torch.uint8)
            memory[: len(blob)] = blob if good else damaged(blob, how)
            parsed = parse_header(memory.numpy().data[: len(blob)], "a")
            pieces = cut([(padded, ())], 4096 * pages)
            checks = BlobChecks(pieces, [[Blob(0, BlobFormat.lossless(parsed), "a", "f")]])
            for _ in range(2):
                found = [checks.checksum(p, memory[p.start : p.start + p.nbytes]) for p in pieces[0]]
                if good:
                    checks.verify(0, found)
                    assert not any(one.tiles for sums in found for one in sums), "kept no longer than needed"
                else:
                    with pytest.raises(WeightsError, match="f: .*'a'.*tile table"):
                        checks.verify(0, found)
    assert header.tiles > 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 60_000), max_size=6), st.sampled_from([32, 64, 128, 256]), st.sampled_from(DTYPES)
)
def test_what_runs_of_a_blob_show_is_what_all_of_it_does(cuts, lanes, dtype):
    blob = lossless.encode(weights(20_000, dtype), lanes=lanes, limit=1 << 20).numpy()
    header = parse_header(blob.data, "a")
    check_tiles(blob, header, "a")
    bounds = [0, *sorted(min(at, len(blob)) for at in cuts), len(blob)]
    runs = [summarize_run(header, blob[a:b], a) for a, b in zip(bounds, bounds[1:], strict=False)]
    check_runs(header, runs, "a")
    with pytest.raises(WeightsError, match="'a'"):
        check_runs(dataclasses.replace(header, escape_bytes=header.escape_bytes - 1), runs, "a")


def test_second_codes_that_ask_for_other_literals_than_the_table_are_named():
    """The second codes are in the escapes: more literals than the tile has room for, or none where it has room."""
    blob = lossless.encode(weights(dtype=torch.float8_e4m3fn))
    header = parse_header(blob.numpy().data, "a")
    check_tiles(blob.numpy(), header, "a")
    table = blob[header.tiles_at : header.tiles_at + 8 * header.tiles].view(torch.int64)
    assert bool((table >> 48 > 0).all())
    for fill in (0, 255):
        bad = blob.clone()
        at, seconds = header.escapes_at, int(table[0] >> 32 & 0xFFFF)
        bad[at : at + 8 * seconds] = fill
        with pytest.raises(WeightsError, match="'a'.*tile table"):
            check_tiles(bad.numpy(), header, "a")


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


def packed_file(folder: Path) -> Path:
    path = folder / "p.safetensors"
    if not path.exists():
        save_file({n: t.clone() for n, t in model().state_dict().items()}, folder / "m.safetensors")
        pack(folder / "m.safetensors", path, codec="lossless")
    return path


def hostile_file(folder: Path, name: str, how: str) -> Path:
    """A packed file of `model`, hostile in the tensor ``name``."""
    with safe_open(packed_file(folder), "pt") as file:
        tensors, about = {n: file.get_tensor(n) for n in file.keys()}, dict(file.metadata())  # noqa: SIM118
    tensors[name] = blob = damaged(tensors[name], how)
    metas = json.loads(about[METADATA_KEY])
    metas["tensors"][name] = describe(
        "lossless", 1, model().get_parameter(name), blob.numpy().data[:HEADER_BYTES]
    )
    save_file(tensors, folder / "h.safetensors", {**about, METADATA_KEY: json.dumps(metas)})
    return folder / "h.safetensors"


ALL = sum(p.nbytes for p in model(meta=True).parameters())


@pytest.mark.parametrize("how", ["offset", "planes", "noise"])
@pytest.mark.parametrize("kept", [False, True], ids=["streams", "stays"])
@pytest.mark.parametrize("ram", [ALL, 64 << 10], ids=["all of it", "little"])
def test_a_session_names_the_tensor_and_the_rest_of_the_file_is_right(tmp_path, monkeypatch, how, kept, ram):
    units_apart_from(monkeypatch, 1 << 10)  # units of this size come one by one
    options: Any = {"device": SimulatedDevice(timing="random"), "vram": ALL * 4 // 5, "ram": ram}
    with carom.stream(model(meta=True), weights=packed_file(tmp_path), **options) as session:
        stay = {resident.entry.name for resident in inside(session).placement.tier._residents.residents}
    names = [f"{index}.weight" for index in range(8)]
    name = [n for n in names if (n in stay) == kept][-1]
    path, plain, empty = hostile_file(tmp_path, name, how), model(), model(meta=True)
    with carom.stream(empty, weights=path, **options) as session:
        x = torch.randn(2, WIDE).bfloat16()
        for _ in range(2):
            with (
                torch.no_grad(),
                pytest.raises(WeightsError, match=rf"h\.safetensors.*'{name[0]}\.weight'.*tile table"),
            ):
                empty(x)
        other = next(n for n in names if n != name and (n in stay) == kept)
        assert torch.equal(session.read(other), plain.get_parameter(other))
        with pytest.raises(WeightsError, match=rf"'{name[0]}\.weight'"):
            session.read(name)
    assert all(p.is_meta for p in empty.parameters())


@pytest.mark.parametrize("how", DAMAGE)
def test_loading_and_decoding_on_the_host_name_the_tensor(tmp_path, how):
    path = hostile_file(tmp_path, "3.weight", how)
    with pytest.raises(WeightsError, match=r"'3\.weight'"):
        carom.load_file(path)
    with (
        carom.stream(model(meta=True), device="cpu", vram=ALL // 2, weights=path, ram=ALL) as session,
        torch.no_grad(),
        pytest.raises(WeightsError, match=r"'3\.weight'"),
    ):
        session.module(torch.randn(2, WIDE).bfloat16())


def test_the_file_that_is_not_hostile_is_used(tmp_path):
    path, plain, empty = packed_file(tmp_path), model(), model(meta=True)
    x = torch.randn(2, WIDE).bfloat16()
    with (
        carom.stream(empty, device=SimulatedDevice(), vram=ALL // 2, weights=path, ram=ALL),
        torch.no_grad(),
    ):
        assert_same([plain(x)], [empty(x)])
