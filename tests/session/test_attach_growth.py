"""The work of attaching a model grows linearly with its number of tensors: Python and C calls are counted, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import carom
import pytest
import torch
from torch import nn

SIDE = 32  # a tensor has 4 KiB


class Layer(nn.Module):
    """A module of ``count`` tensors of 4 KiB."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(SIDE, SIDE), requires_grad=False) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def calls_of(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many calls of Python and C functions this thread makes in ``function``, and the result."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return count, result


def calls_to_attach(tensors: int, in_a_layer: int) -> int:
    """Return the number of calls to attach a model of ``tensors`` tensors, half of which stream."""
    model = nn.Sequential(*(Layer(in_a_layer) for _ in range(tensors // in_a_layer)))
    count, session = calls_of(lambda: carom.stream(model, device="cpu", vram=tensors * SIDE * SIDE * 2))
    session.close()
    return count


@pytest.mark.parametrize("in_a_layer", [1, 10, 200])
def test_calls_to_attach_grow_linearly(in_a_layer: int) -> None:
    calls_to_attach(400, in_a_layer)  # imports modules
    fewer, more = calls_to_attach(400, in_a_layer), calls_to_attach(800, in_a_layer)
    assert more <= 2.2 * fewer


def test_attaching_a_layer_of_one_tensor_takes_a_bounded_number_of_calls() -> None:
    calls_to_attach(400, 1)  # imports modules
    fewer, more = calls_to_attach(400, 1), calls_to_attach(800, 1)
    assert (more - fewer) / 400 < 800
