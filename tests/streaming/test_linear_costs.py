"""Host work grows in proportion to the number of weights. It is counted in calls, which do not depend on the machine."""

from __future__ import annotations

import sys

import carom
import pytest
import torch
from carom.core.placement.packed_tier import PackedTier
from safetensors.torch import save_file
from tests_wrappers import Codes
from torch import nn

FEW, MANY = 20, 80


def calls_of(function):
    """The number of calls, those of C functions included, that this thread makes in ``function``."""
    count = 0

    def count_one(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_one)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(32, 32, bias=False)


def net(count, trains=False):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(count))).requires_grad_(trains)


def train(count, folder):
    model, x = net(count, trains=True), torch.ones(2, 32)
    with carom.stream(model, vram=40_000, device="cpu", training="stream", codec="raw"):
        model(x).sum().backward()
        model.zero_grad()
        return calls_of(lambda: model(x).sum().backward())


def read_quantised(count, folder):
    model = net(count)
    for layer in model:
        codes = Codes(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 1))
        layer.weight = nn.Parameter(codes, requires_grad=False)
    with carom.stream(model, vram="1MiB", device="cpu") as session:
        return calls_of(lambda: session.read(f"{count // 2}.weight"))


def write_from_file(count, folder):
    plain = net(count)
    save_file(plain.state_dict(), folder / f"{count}.safetensors")
    nbytes = count * 32 * 32 * 4
    options = {"weights": folder / f"{count}.safetensors", "vram": 40_000, "ram": 3 * nbytes + (1 << 20)}
    with carom.stream(net(count).to("meta"), device="cpu", granularity="layer", **options) as session:
        new = torch.zeros(32, 32)
        session.write("0.weight", new)
        return calls_of(lambda: [session.write(f"{i}.weight", new) for i in range(1, count)])


@pytest.mark.parametrize(("work", "count"), [(train, 100), (write_from_file, 40)])
def test_work_on_all_weights_is_proportional_to_their_number(work, count, tmp_path):
    few, many = work(count, tmp_path), work(4 * count, tmp_path)
    assert many < 1.25 * 4 * few


def test_reading_one_quantised_weight_is_no_walk_through_all_modules(tmp_path):
    few, many = read_quantised(FEW, tmp_path), read_quantised(MANY, tmp_path)
    assert many < few + 2 * (MANY - FEW)


def write_packed(count, monkeypatch):
    """The bytes of blocks that are copied while all weights of one packed unit are written, and used once."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(count))) for _ in range(8))
    model = nn.Sequential(*blocks).requires_grad_(False)
    copied = []
    build = PackedTier._build

    def counting(self, backing, *arguments, **options):
        copied.append(backing.nbytes)
        return build(self, backing, *arguments, **options)

    device = carom.SimulatedDevice(unpacks=True)
    options = {"device": device, "codec": "lossless", "granularity": "block"}
    x = torch.ones(2, 128)
    with torch.no_grad():
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        with carom.stream(model, vram=int(0.6 * nbytes), **options) as session:
            assert session.report().packed_units
            monkeypatch.setattr(PackedTier, "_build", counting)
            for block in range(8):
                for index in range(count):
                    session.write(f"{block}.{index}.weight", torch.eye(128))
            assert torch.equal(model(x), x)
            monkeypatch.undo()
    return sum(copied)


def test_writing_all_weights_of_a_packed_unit_copies_the_unit_once(monkeypatch):
    few, many = write_packed(10, monkeypatch), write_packed(40, monkeypatch)
    assert 0 < many <= 4 * few
