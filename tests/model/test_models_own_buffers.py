"""Buffers that a model assigns, registers or resizes in its forward are what they are without streaming."""

from __future__ import annotations

import copy

import carom
import pytest
import torch
from tests_harness import least_vram, on_some_devices, place
from tests_inside import inside
from torch import nn

WIDE = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)
        self.prepare()

    def prepare(self) -> None:
        self.register_buffer("cache", torch.zeros(1, WIDE), persistent=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.kept(x)

    def kept(self, x):
        raise NotImplementedError


class BySize(Block):
    """Assigned when the size changes, as timm's ConViT does."""

    def kept(self, x):
        if self.cache.shape[0] != len(x):
            self.cache = torch.linspace(0, 1, len(x) * WIDE).view(-1, WIDE).to(self.up.weight.device)
        return self.cache


class LargeBySize(Block):
    """The same, with a cache of a size at which buffers stream."""

    def kept(self, x):
        if self.cache.shape[0] != 2000 * len(x):
            self.cache = torch.linspace(0, 1, 2000 * len(x) * WIDE).view(-1, WIDE).to(x.device)
        return self.cache[: len(x)]


class Grows(Block):
    """Concatenated in every forward, as keys and values are."""

    def kept(self, x):
        self.cache = torch.cat([self.cache, x.detach()])
        return self.cache.mean(0)


class Registered(Block):
    """Registered in forward, as rotary tables are."""

    def prepare(self) -> None:
        pass

    def kept(self, x):
        if not hasattr(self, "cache") or len(self.cache) < len(x):
            table = torch.linspace(0, 1, len(x) * WIDE).view(-1, WIDE).to(x.device)
            self.register_buffer("cache", table, persistent=False)
        return self.cache[: len(x)]


class Resized(Block):
    """Resized in place, as observers of quantisation-aware training are; beside it a buffer that must stay as it is."""

    def prepare(self) -> None:
        super().prepare()
        self.register_buffer("beside", torch.ones(1, WIDE))

    def kept(self, x):
        if len(self.cache) < len(x):
            self.cache.resize_(len(x), WIDE).copy_(x.detach())
        return self.cache[:1] * self.beside


class Written(Block):
    """Written in place, and replaced by a larger one when it is too small."""

    def prepare(self) -> None:
        self.register_buffer("cache", torch.zeros(1500, WIDE))  # large enough to stream
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def kept(self, x):
        need = 1500 if len(x) < 5 else 1600
        if len(self.cache) < need:
            grown = torch.zeros(need, WIDE, device=x.device)
            grown[: len(self.cache)] = self.cache
            self.cache = grown
        self.cache[: len(x)] += x.detach()
        self.count += 1
        return self.cache[: len(x)] * self.count


class Optional(Block):
    """There and not there by turns."""

    def kept(self, x):
        self.cache = None if self.cache is not None else torch.full((1, WIDE), 0.5, device=x.device)
        return 1 if self.cache is None else self.cache


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build(block: type[Block]) -> nn.Module:
    torch.manual_seed(0)
    return Net(block)


def run(model: nn.Module, mode: str, where: torch.device) -> list:
    seen: list = []
    for index, length in enumerate((3, 3, 5, 2, 7)):
        x = torch.randn(length, WIDE, generator=torch.Generator().manual_seed(index)).to(where)
        if mode == "training":
            out = model(x)
            out.sum().backward()
            seen += [out.detach(), *[p.grad.to(where) for p in model.parameters()]]
            model.zero_grad(set_to_none=True)
        elif mode == "by turns":
            with torch.inference_mode():
                seen.append(model(x).clone())
            with torch.no_grad():
                seen.append(model(x))
        else:
            with torch.inference_mode() if mode == "inference mode" else torch.no_grad():
                seen.append(model(x).clone())
    return seen


def same(got: list, want: list) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def check_like_plain(block: type[Block], device, mode: str, vram: int | None = None) -> None:
    training = "stream" if mode == "training" else "resident"
    model = build(block).requires_grad_(mode == "training")
    twin, where = copy.deepcopy(model), place(device)
    want = run(twin.to(where), mode, where)
    twin.cpu()
    budget = vram or least_vram(model, device, training=training) + 140_000
    parameters = list(model.parameters())
    with carom.stream(model, device=device, vram=budget, training=training) as session:
        assert inside(session).streamed
        assert same(run(model, mode, where), want)
        assert session.report().vram_peak_bytes <= budget
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    ours, plain = dict(model.named_buffers()), dict(twin.named_buffers())
    assert ours.keys() == plain.keys()
    for name, buffer in ours.items():
        # What came home from a device is a tensor of its own, also where the model made it in inference mode.
        assert torch.equal(buffer, plain[name]) and buffer.is_inference() <= plain[name].is_inference()
        assert type(buffer) is torch.Tensor
    home = torch.device("cpu")
    assert same(run(model, mode, home), run(twin, mode, home))


BLOCKS = [BySize, LargeBySize, Grows, Registered, Resized, Optional]


@on_some_devices
@pytest.mark.parametrize("mode", ["inference mode", "no grad", "by turns", "training"])
@pytest.mark.parametrize("block", BLOCKS)
def test_buffers_that_change_in_forward_are_as_without_streaming(block, mode, device):
    check_like_plain(block, device, mode)


@on_some_devices
@pytest.mark.parametrize("mode", ["inference mode", "training"])
def test_buffers_that_are_written_and_then_replaced_are_as_without_streaming(mode, device):
    check_like_plain(Written, device, mode)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_least_budget_suffices_for_buffers_that_grow(block):
    """What the model makes as it runs is counted as activations are: not at all."""
    check_like_plain(block, "cpu", "inference mode", least_vram(build(block).requires_grad_(False), "cpu"))


class Keeps(Block):
    """Registers what it saw in its last forward."""

    def prepare(self) -> None:
        pass

    def kept(self, x):
        if len(x) == 5:
            self.register_buffer("seen", x * 1.0, persistent=False)
        return 1


def test_a_buffer_of_the_last_forward_goes_home_with_the_rest():
    model, device = build(Keeps).requires_grad_(False), carom.SimulatedDevice()
    with carom.stream(model, device=device, vram=400_000), torch.no_grad():
        for length in (3, 5):
            model(device.put(torch.randn(length, WIDE)))
        assert all(device.holds(block.seen) for block in model.blocks)
    assert not any(device.holds(block.seen) for block in model.blocks)


def test_a_buffer_that_grows_in_every_forward_lays_nothing_out_anew():
    model = build(Grows).requires_grad_(False)
    with carom.stream(model, device="cpu", vram=400_000) as session, torch.inference_mode():
        x = torch.randn(3, WIDE)
        model(x)
        model(x)
        arrangement = inside(session).arrangement
        for _ in range(3):
            model(x)
        assert inside(session).arrangement is arrangement


def test_a_buffer_made_under_inference_mode_before_streaming_stays_as_it_is():
    model = build(BySize).requires_grad_(False)
    x = torch.randn(3, WIDE)
    with torch.inference_mode():
        want = model(x).clone()
    before = [block.cache for block in model.blocks]
    with carom.stream(model, device="cpu", vram=400_000) as session:
        assert inside(session).streamed and torch.equal(model(x), want)
        assert ("blocks.0.cache", "made under torch.inference_mode") in {
            (place.name, place.reason) for place in session.report().resident_by_need
        }
    assert all(block.cache is cache for block, cache in zip(model.blocks, before, strict=True))


def test_a_parameter_made_under_inference_mode_is_refused_by_name():
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    with pytest.raises(carom.UnsupportedError, match="weight was made under torch.inference_mode"):
        carom.stream(model, device="cpu", vram=4096)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["inference mode", "no grad"])
@pytest.mark.parametrize("block", [BySize, Grows])
def test_buffers_made_on_the_device_go_home_at_the_close(block, mode):
    model = build(block).requires_grad_(False)
    with carom.stream(model, device="cuda", vram="8MiB"), torch.inference_mode(mode == "inference mode"):
        for length in (3, 5):
            model(torch.randn(length, WIDE, device="cuda"))
        assert model.blocks[0].cache.is_cuda
    assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    model(torch.randn(5, WIDE))
