"""What records a graph of a streamed module is refused with what to do, and nothing is broken by the try."""

from __future__ import annotations

import io
import warnings

import carom
import pytest
import torch
from tests_harness import on_some_devices
from tests_inside import inside
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    on_some_devices,
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


CAPTURES = {
    "export": lambda m, x: torch.export.export(m, (x,)),
    "strict export": lambda m, x: torch.export.export(m, (x,), strict=True),
    "export of a block": lambda m, x: torch.export.export(m.blocks[1], (x,)),
    "strict export of a block": lambda m, x: torch.export.export(m.blocks[1], (x,), strict=True),
    "export of a parent": lambda m, x: torch.export.export(Holder(m), (x,)),
    "script": lambda m, x: torch.jit.script(m),
    "script of a block": lambda m, x: torch.jit.script(m.blocks[1]),
    "script of a parent": lambda m, x: torch.jit.script(Holder(m)),
    "trace": lambda m, x: torch.jit.trace(m, (x,)),
    "trace of a block": lambda m, x: torch.jit.trace(m.blocks[1], (x,)),
    "trace of a parent": lambda m, x: torch.jit.trace(Holder(m), (x,)),
    "trace of a function": lambda m, x: torch.jit.trace(lambda y: m(y), (x,)),
    "trace of a function of a block": lambda m, x: torch.jit.trace(lambda y: m.blocks[1](y), (x,)),
    "trace of a function of a weight": lambda m, x: torch.jit.trace(lambda y: step(m, y), (x,)),
    "onnx": lambda m, x: torch.onnx.export(m, (x,), io.BytesIO(), dynamo=False),
    "make_fx": lambda m, x: make_fx(m)(x),
}


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) @ model.blocks[0].up.weight.T


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_says_to_close_the_session(model, device, name):
    x = torch.randn(2, 32)
    want = model(x)
    with carom.stream(model, device=device, vram=90_000, granularity="block") as session:
        assert inside(session).streamed
        with pytest.raises(carom.UnsupportedError, match=r"streams.*[Cc]lose the session"):
            CAPTURES[name](model, x)
        assert torch.equal(model(x), want)
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("name", ["export", "script", "trace", "make_fx"])
def test_a_capture_works_again_once_the_session_is_closed(model, device, name):
    x = torch.randn(2, 32)
    want = model(x)
    carom.stream(model, device=device, vram=90_000).close()
    graph = CAPTURES[name](model, x)
    assert torch.equal((graph.module() if name == "export" else graph)(x), want)


def test_a_symbolic_trace_runs_while_the_module_streams_and_afterwards(model, device):
    x = torch.randn(2, 32)
    want = model(x)
    with carom.stream(model, device=device, vram=90_000):
        graph = torch.fx.symbolic_trace(model)
        assert torch.equal(graph(x), want) and torch.equal(model(x), want)
    assert torch.equal(graph(x), want)


def test_signatures_are_those_of_the_module(model, device):
    import inspect

    before = inspect.signature(model.forward), inspect.signature(model.blocks[0].forward)
    with carom.stream(model, device=device, vram=90_000), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (inspect.signature(model.forward), inspect.signature(model.blocks[0].forward)) == before
