"""Packed files on a device without Triton: the device decodes k-bit weights, the host losslessly packed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.checkpoint.index import open_index
from carom.core.checkpoint.packed_source import codec_name, stored_entry
from carom.core.codec import unit_decoder
from carom.core.device.simulated import SimulatedEngine
from carom.core.placement import packed_residents
from carom.tools.pack.writer import pack
from safetensors.torch import save_file
from tests_harness import SIMULATED, assert_same, infer
from tests_inside import inside
from tests_pairwise import each
from torch import nn

WIDE, DEPTH = 256, 6
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    monkeypatch.setattr(packed_residents, "LEAST_UNIT", 1)
    monkeypatch.setattr(SimulatedEngine, "decodes_lossless_files", False)


class Block(nn.Module):
    """A quantised linear and one that is packed losslessly, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDE, WIDE)
        self.experts = nn.ModuleList([nn.Linear(WIDE, WIDE)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[0](torch.relu(self.dense(x)))


def stack(meta: bool = False) -> nn.Module:
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(*(Block() for _ in range(DEPTH))).bfloat16()
    return model.requires_grad_(False).eval()


class Case:
    """What `infer` feeds the model with."""

    @staticmethod
    def inputs(index: int, device: torch.device) -> torch.Tensor:
        return torch.randn(3, WIDE, generator=torch.Generator().manual_seed(index)).bfloat16()


def packed_file(folder: Path, **packing: Any) -> tuple[Path, nn.Module]:
    model, path = stack(), folder / "packed.safetensors"
    save_file(model.state_dict(), folder / "m.safetensors")
    pack(folder / "m.safetensors", path, **packing)
    model.load_state_dict(carom.load_file(path))
    return path, model


ALL = sum(p.nbytes for p in stack(meta=True).parameters())


@each(device=SIMULATED, ram=[ALL, ALL // 4])
def test_quantised_weights_cross_packed_and_lossless_ones_unpacked(tmp_path, monkeypatch, device, ram):
    path, model = packed_file(tmp_path, codec="lossless", quant="dense=nf4")
    index = open_index(path)
    codecs = {name: codec_name(entry) for name, entry in index.entries.items()}
    assert {codecs["0.dense.weight"], codecs["0.experts.0.weight"]} == {"nf4", "lossless"}
    expected, empty = infer(model, Case, CPU, passes=4), stack(meta=True)
    refuse = lambda *_: pytest.fail("decoded losslessly packed weights on the device")  # noqa: E731
    monkeypatch.setattr(unit_decoder, "decode_torch", refuse)
    with carom.stream(empty, device=device, vram=ALL // 2, ram=ram, weights=path) as session:
        assert_same(expected, infer(empty, Case, CPU, passes=4))
        report = session.report()
        assert report.packed_units + report.resident_packed_units > 0
        assert report.vram_peak_bytes <= ALL // 2
        crossing = [unit for unit in inside(session).placement.streamed if not unit.on_device]
        homes = [home for unit in crossing for home in unit.homes]
        sizes = {
            home.file_tensor.name: stored_entry(index[home.file_tensor.name]).nbytes
            if codecs[home.file_tensor.name] == "nf4"
            else index[home.file_tensor.name].nbytes
            for home in homes
        }
        assert report.wire_bytes_per_step <= sum(sizes.values()) + 4096 * len(sizes)


@each(device=SIMULATED)
def test_a_losslessly_packed_file_is_decoded_by_the_host(tmp_path, device):
    path, model = packed_file(tmp_path, codec="lossless")
    expected, empty = infer(model, Case, CPU, passes=3), stack(meta=True)
    with carom.stream(empty, device=device, vram=ALL // 2, ram=ALL, weights=path) as session:
        assert_same(expected, infer(empty, Case, CPU, passes=3))
        report = session.report()
        assert report.packed_units == 0 and report.staging_bytes == 0
        assert report.wire_bytes_per_step >= report.raw_bytes_per_step > 0
