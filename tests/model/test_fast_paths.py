"""Paths that torch chooses by asking about its arguments are those of the plain run: nested tensors, fused attention."""

from __future__ import annotations

import carom
import pytest
import torch
from torch import nn

WIDTH = 16


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3).eval().requires_grad_(False)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = padding[2, 1:] = True
    return x, padding


@pytest.mark.parametrize("granularity", ["layer", "block"])
@pytest.mark.parametrize("device", ["cpu", carom.SimulatedDevice(timing="random", seed=1)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_with_a_padding_mask_takes_its_nested_path(granularity, device, mode):
    (x, padding), plain, model = inputs(), encoder(), encoder()
    with mode():
        expected = [plain(x, src_key_padding_mask=padding), plain(x)]
        assert not expected[0][0, 3:].any(), "the plain run did not take the nested path"
        least = 0
        try:
            carom.stream(model, vram=1, device=device, granularity=granularity)
        except carom.BudgetError as error:
            least = error.least_bytes or 0
        # One operator takes all weights of an encoder layer.
        for vram in (least, 2 * least) if granularity == "block" else (3 * least, 4 * least):
            with carom.stream(model, vram=vram, device=device, granularity=granularity) as session:
                assert session.report().slot_bytes > 0, "nothing streams: the test shows nothing"
                for _ in range(2):
                    assert torch.equal(model(x, src_key_padding_mask=padding), expected[0])
                    assert torch.equal(model(x), expected[1])


def test_a_streamed_weight_says_that_it_overrides_operators_outside_a_step_only():
    asked = []

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                asked.append(torch.overrides.has_torch_function((layer.weight, x)))
                # The operator in the same frame is given the slot all the same.
                x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))
            return x

    model, plain = Asks(), Asks()
    x = torch.randn(2, WIDTH)
    with carom.stream(model, vram=2048, device=carom.SimulatedDevice(), granularity="layer"):
        assert torch.equal(model(x), plain(x))
        assert asked == [False] * 8
        assert torch.overrides.has_torch_function((model.layers[1].weight,))
