"""`nn.Parameter`, its subclasses and torch's weight_norm take a streamed weight as they take an ordinary parameter."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.model.new_parameter import without_values
from safetensors.torch import save_file
from tests_limits import pack_small_weights
from torch import nn

WIDTH = 64
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
WAYS = ("raw", "lossless", "file", "spilled")
devices = pytest.mark.parametrize("device", ["cpu", carom.SimulatedDevice(seed=2, timing="random")])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors pack too."""
    pack_small_weights(monkeypatch)


class Named(nn.Parameter):
    """A parameter with a constructor of its own, as ComfyUI's LazyCastingParam."""

    def __new__(cls, name: str, tensor: torch.Tensor):
        return super().__new__(cls, tensor, requires_grad=False)

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.key = name


def layers(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
    return made.bfloat16().requires_grad_(False)


def attach(way: str, device, folder) -> tuple[nn.Module, carom.Session]:
    model, options = layers(), {"codec": "lossless" if way == "lossless" else "raw"}
    if way == "file":
        save_file(model.state_dict(), folder / "model.safetensors")
        options |= {"weights": folder / "model.safetensors", "ram": "16MiB"}
        model = layers().to("meta")
    elif way == "spilled":
        options |= {"disk": folder, "ram": 2 * WIDTH * WIDTH}
    session = carom.stream(model, device=device, vram=8 * WIDTH * WIDTH, granularity="layer", **options)
    assert session.report().streamed_bytes > 0, "nothing streams: the test shows nothing"
    return model, session


@devices
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_of_a_streamed_weight_is_an_ordinary_parameter(way, device, tmp_path):
    plain = layers()
    model, session = attach(way, device, tmp_path)
    with session, torch.no_grad():
        made = []
        for index in range(6):
            for trains in (True, False):
                made.append((index, nn.Parameter(model[index].weight, requires_grad=trains), trains))
        for index, parameter, trains in made:
            assert type(parameter) is nn.Parameter and parameter.requires_grad is trains
            assert parameter.is_leaf and torch.equal(parameter, plain[index].weight)
        assert not isinstance(model[1].weight.detach(), nn.Parameter)
        assert torch.equal(model(X), plain(X))
    assert all(torch.equal(parameter, plain[index].weight) for index, parameter, _ in made)


@devices
@pytest.mark.parametrize("way", WAYS)
def test_a_subclass_of_parameter_gets_its_own_class_and_constructor(way, device, tmp_path):
    plain = layers()
    model, session = attach(way, device, tmp_path)
    with session:
        for name, value in {**dict(model.named_parameters()), **model.state_dict()}.items():
            made = Named(name, value)
            assert type(made) is Named and made.key == name and not made.requires_grad
            assert torch.equal(made, plain.get_parameter(name))
        with without_values():
            shapes = [Named(name, value) for name, value in model.named_parameters()]
        assert [(p.shape, p.dtype, p.stride()) for p in shapes] == [
            (p.shape, p.dtype, p.stride()) for p in plain.parameters()
        ]
        if way != "raw":
            assert any(p.is_meta for p in shapes)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_made_within_a_forward_keeps_its_value(way, tmp_path):
    plain, kept = layers(), []
    model, session = attach(way, carom.SimulatedDevice(timing="early"), tmp_path)
    with session, torch.no_grad():
        model[2].register_forward_hook(lambda *_: kept.append(nn.Parameter(model[3].weight, False)))
        assert torch.equal(model(X), plain(X))
        assert torch.equal(model(X), plain(X))
        assert all(torch.equal(parameter, plain[3].weight) for parameter in kept) and len(kept) == 2


@devices
@pytest.mark.parametrize("way", WAYS)
def test_weight_norm_of_a_streamed_layer_computes_the_same(way, device, tmp_path):
    plain = layers()
    model, session = attach(way, device, tmp_path)
    with session, torch.no_grad():
        model(X)
        for one in (plain, model):
            nn.utils.parametrizations.weight_norm(one[2])
        assert torch.equal(model(X), plain(X))


def test_what_is_written_to_such_a_parameter_is_written_to_the_weight_in_host_memory(tmp_path):
    model, session = attach("raw", "cpu", tmp_path)
    with session, torch.no_grad():
        before = model(X)
        for layer in model:
            nn.Parameter(layer.weight, requires_grad=False).mul_(0.5)
        assert not torch.equal(model(X), before)
        plain = layers()
        for layer in plain:
            layer.weight.mul_(0.5)
        assert torch.equal(model(X), plain(X))
