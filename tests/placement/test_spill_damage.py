"""A byte of a spill file that is not what was written is noticed before anything is computed with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import carom
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests_disk_harness import least_on_disk
from torch import nn

RAM = 256 << 10
WEIGHT = 64 << 10  # bytes of one of the sixteen weights
X = torch.linspace(-1, 1, 128).reshape(1, 128)


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(8)))
    return model.requires_grad_(False)


def weight_of(model: nn.Module, name: str) -> bytes:
    return model.get_parameter(name).detach().numpy().tobytes()


def flip(folder: Path, weight: bytes, at: int) -> None:
    """Change bit 0 of byte ``at`` of ``weight`` in the spill file, as a drive does: the file's times stay."""
    if sys.platform == "win32":
        pytest.skip("Windows lets only programs open a spill file that allow its deletion")
    (path,) = folder.glob("carom-spill-*")
    status, offset = path.stat(), path.read_bytes().index(weight) + at
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([weight[at] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def model() -> nn.Module:
    return build()


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("at", [0, 40_000, WEIGHT - 1], ids=["first", "middle", "last"])
def test_a_damaged_byte_is_an_error_that_names_tensor_and_file(tmp_path, model, device, at):
    expected, weight = model(X), weight_of(model, "6.1.weight")
    where = carom.SimulatedDevice(timing="random") if device == "simulated" else device
    vram = 2 * least_on_disk(model, "cpu", tmp_path, RAM)
    with carom.stream(model, device=where, vram=vram, ram=RAM, disk=tmp_path) as session:
        flip(tmp_path, weight, at)
        for _ in range(2):
            with pytest.raises(carom.WeightsError, match=r"carom-spill-.*6\.1\.weight.*do not save.*drive"):
                model(X)
        with pytest.raises(carom.WeightsError, match=r"6\.1\.weight"):
            session.read("6.1.weight")
        assert torch.equal(session.read("0.0.weight"), build().get_parameter("0.0.weight"))
    # The module is whole again, over the damaged file. Closing reads nothing.
    assert not torch.equal(model.get_parameter("6.1.weight"), build().get_parameter("6.1.weight"))
    assert model(X).shape == expected.shape


def test_a_damaged_resident_weight_is_not_computed_with(tmp_path, model):
    """Weights that stay on the device are read from the spill file once, at their first use."""
    weights = {name: weight_of(model, name) for name, _ in model.named_parameters() if "weight" in name}
    with carom.stream(model, device="cpu", vram=12 * WEIGHT, ram=RAM, disk=tmp_path) as session:
        unit = session.report().resident_by_choice[-1].name
        name = next(name for name in weights if name.startswith(unit))
        flip(tmp_path, weights[name], 5000)
        for _ in range(3):
            with pytest.raises(carom.WeightsError, match=name):
                model(X)


def test_another_layout_notices_what_was_not_read_before(tmp_path, model):
    weight = weight_of(model, "3.0.weight")
    vram = 2 * least_on_disk(model, "cpu", tmp_path, RAM)
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path) as session:
        flip(tmp_path, weight, 77)
        for change in ({"vram": 10 * WEIGHT}, {"ram": RAM // 2}, {"vram": vram}):
            with pytest.raises(carom.WeightsError, match=r"3\.0\.weight"):
                model(X)
            session.set_budget(**change)
        with pytest.raises(carom.WeightsError, match=r"3\.0\.weight"):
            model(X)


def test_a_second_session_over_the_same_file_compares_it_again(tmp_path, model):
    expected, weight = model(X), weight_of(model, "3.0.weight")
    vram = 2 * least_on_disk(model, "cpu", tmp_path, RAM)
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path):
        assert torch.equal(model(X), expected)
    flip(tmp_path, weight, 12_345)
    with (
        carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path),
        pytest.raises(carom.WeightsError, match=r"3\.0\.weight"),
    ):
        model(X)


def test_what_was_compared_is_not_compared_again(tmp_path, model, monkeypatch):
    from carom.core.checkpoint import range_checks

    counted = []
    crc32 = range_checks.zlib.crc32
    vram = 2 * least_on_disk(model, "cpu", tmp_path, RAM)
    # Before the session opens: its reads begin at once.
    monkeypatch.setattr(
        range_checks.zlib, "crc32", lambda data, *a: counted.append(len(data)) or crc32(data, *a)
    )
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path) as session:
        model(X)
        model(X)
        first = sum(counted)
        assert first >= 16 * WEIGHT
        model(X)
        session.set_budget(ram=RAM // 2)
        model(X)
        assert sum(counted) == first


@pytest.mark.parametrize("left", [0, 9 * (WEIGHT + 4096)], ids=["nothing", "the first half"])
def test_weights_in_a_part_that_was_cut_off_are_empty_after_close(tmp_path, model, left):
    """A use of the mapped memory would end the process (SIGBUS)."""
    expected = dict(build().named_parameters())
    vram = 2 * least_on_disk(model, "cpu", tmp_path, RAM)
    session = carom.stream(model, device="cpu", vram=vram, ram=RAM, disk=tmp_path)
    model(X)
    (path,) = tmp_path.glob("carom-spill-*")
    os.truncate(path, left)
    with pytest.raises(carom.WeightsError, match=r"carom-spill-.*cut off.*weights, first \d\.\d\.weight"):
        session.close()
    assert session.closed
    session.close()
    lost = [name for name, weight in model.named_parameters() if not weight.numel()]
    assert "7.1.weight" in lost and ("0.0.weight" in lost) is (left == 0)
    for name, weight in model.named_parameters():
        assert name in lost or torch.equal(weight, expected[name]), name
    with pytest.raises(RuntimeError, match="matrix"):
        model(X)


def test_a_users_file_that_was_cut_off_is_an_error_at_close(tmp_path, model):
    path = tmp_path / "w.safetensors"
    save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path), assign=True)
    vram = 2 * least_on_disk(model, "cpu", "auto", RAM)
    session = carom.stream(model, device="cpu", vram=vram, ram=RAM, disk="auto")
    model(X)
    os.truncate(path, 4096)
    with pytest.raises(carom.WeightsError, match=r"w\.safetensors.*cut off"):
        session.close()
    assert not any(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows replaces no mapped file")
def test_a_file_that_was_replaced_by_a_shorter_one_is_mapped_still(tmp_path, model):
    path = tmp_path / "w.safetensors"
    save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path), assign=True)
    vram = 2 * least_on_disk(model, "cpu", "auto", RAM)
    with carom.stream(model, device="cpu", vram=vram, ram=RAM, disk="auto"):
        other = tmp_path / "other"
        other.write_bytes(b"short")
        other.replace(path)
    assert torch.equal(model(X), build()(X))
