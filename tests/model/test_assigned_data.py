"""``parameter.data = tensor`` on streamed weights: as without Carom, or an error that says what to do."""

from __future__ import annotations

import carom
import pytest
import torch
from tests_limits import pack_small_weights
from torch import nn

WIDTH = 32
DEVICES = ["cpu", carom.SimulatedDevice(seed=3, timing="random")]
devices = pytest.mark.parametrize("device", DEVICES, ids=["cpu", "simulated"])


def x(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def layers(trains: bool = False, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth))).requires_grad_(trains)


def compare(work, device, trains: bool = False, **options) -> None:
    """Assert that ``work(model)`` gives the same tensors streamed as plain, and that the weights agree after close."""
    plain, model = layers(trains), layers(trains)
    options = {"codec": "raw", "granularity": "layer", **options}
    session = carom.stream(model, device=device, vram=3 * (WIDTH + 8) * WIDTH * 4, **options)
    assert session.report().streamed_bytes
    with session:
        for index, (want, got) in enumerate(zip(work(plain), work(model), strict=True)):
            assert torch.equal(want, got), f"output {index}"
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(want, got) and want.stride() == got.stride(), name


class Averages:
    """Averages of weights that are swapped in and out by their ``.data``, as trainers do for samples."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.averages = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.lerp_(weight.detach(), 0.3)

    def swap(self) -> None:
        for index, weight in enumerate(self.weights):
            kept = weight.data
            weight.data = self.averages[index]
            self.averages[index] = kept


@devices
@pytest.mark.parametrize("steps_between", [False, True])
def test_averages_swapped_in_and_out_while_training_streams(device, steps_between):
    def work(model):
        averages, found = Averages(model), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(x(step)).pow(2).mean().backward()
            optimizer.step()
            averages.update()
            averages.swap()
            if steps_between:  # also the averages can be trained on
                optimizer.zero_grad()
                model(x(30 + step)).pow(2).mean().backward()
                optimizer.step()
            with torch.no_grad():
                found.append(model(x(10 + step)))
            averages.swap()
            with torch.no_grad():
                found.append(model(x(20 + step)))
        return found

    compare(work, device, trains=True, training="stream")


@devices
@torch.no_grad()
def test_other_strides_and_swaps(device):
    def work(model):
        found = [model(x(0))]
        for layer in model:
            layer.weight.data = layer.weight.data.t()
            found.append(model(x(1)))
        for layer in model:
            own = layer.weight.data
            layer.weight.data = own * 0.5
            found.append(model(x(2)))
            layer.weight.data = own
            found.append(model(x(3)))
        model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data
        found.append(model(x(4)))
        model[2].weight.data = model[3].weight
        model[3].weight.mul_(0.5)
        return [*found, model(x(5))]

    compare(work, device)


@devices
@torch.no_grad()
def test_writes_to_the_assigned_tensor_reach_the_module(device):
    def work(model):
        assigned = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(6)]
        for layer, tensor in zip(model, assigned, strict=True):
            layer.weight.data = tensor
        found = [model(x(0))]
        for tensor in assigned:
            tensor.mul_(0.5)
        found.append(model(x(1)))
        for layer, tensor in zip(model, assigned, strict=True):
            layer.weight.add_(0.1)
            found.append(tensor.clone())
        return [*found, model(x(2))]

    compare(work, device)


def test_a_former_weight_is_copied_once_per_fetch_after_it_is_swapped_back():
    model = layers()
    with carom.stream(
        model, device="cpu", vram=3 * WIDTH * WIDTH * 4, codec="raw", granularity="layer"
    ) as session:
        with torch.no_grad():
            model(x(0))
            model(x(0))
            before = session.report().wire_bytes_per_step
            for layer in model:
                own = layer.weight.data
                layer.weight.data = own + 1
                layer.weight.data = own
            for _ in range(9):
                model(x(0))
        assert session.report().wire_bytes_per_step == before


@torch.no_grad()
def test_what_cannot_be_assigned_is_refused(monkeypatch):
    model = layers()
    session = carom.stream(model, device="cpu", vram=3 * WIDTH * WIDTH * 4, codec="raw")
    with session, pytest.raises(carom.UnsupportedError, match=r"0\.weight\.data .*contiguous"):
        model[0].weight.data = torch.zeros(1).expand(WIDTH, WIDTH)
    pack_small_weights(monkeypatch)
    model = layers(depth=12)
    with carom.stream(model, device="cpu", vram="48KiB", codec="lossless", granularity="layer") as session:
        assert session.report().packed_units
        names = [entry["name"] for entry in session.report().to_dict()["resident_by_choice"]]
        weight = next(layer.weight for index, layer in enumerate(model) if str(index) not in names)
        former = weight.data
        with pytest.raises(carom.UnsupportedError, match="strides"):
            weight.data = torch.ones(WIDTH, WIDTH).tril().t()
        weight.data = former * 0.5
        for use in (lambda: former + 1, lambda: setattr(weight, "data", former)):
            with pytest.raises(carom.UnsupportedError, match=r"\.data was replaced .*clone"):
                use()


@devices
@torch.no_grad()
def test_a_memory_format_is_that_of_the_module(device):
    def convolutions():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))).requires_grad_(False)

    plain, model = convolutions(), convolutions()
    images = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))
    with carom.stream(model, device=device, vram=8000, codec="raw", granularity="layer"):
        model(images)
        for layout in (torch.channels_last, torch.contiguous_format):
            plain.to(memory_format=layout)
            model.to(memory_format=layout)
            want, got = plain(images), model(images)
            assert torch.equal(want, got) and want.stride() == got.stride()
            assert [p.stride() for p in model.parameters()] == [p.stride() for p in plain.parameters()]
