"""What a session does to compiled code: a return to the device compiles nothing again, and a module that is compiled
after `stream` keeps its blocks whole."""

from __future__ import annotations

import weakref

import pytest
import torch
from carom import stream
from carom.core.session import rule_planner
from tests_harness import assert_same
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own
WIDTH = 32


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, x):
        return self.base(x) + (x @ self.a.t()) @ self.b.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(adapters=False) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net().requires_grad_(False)
        for block in model.blocks if adapters else ():
            block.up, block.down = LoRA(block.up), LoRA(block.down)
    return model


def size(model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def inputs(seed=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, example):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(("what", "keep"), [("whole", True), ("blocks", False)])
def test_a_return_to_the_device_compiles_nothing_again(what, keep):
    model, backend = net(), Counting()
    with torch.no_grad(), stream(model, vram=size(model) // 2, device="cpu", granularity="block") as session:
        call = torch.compile(model, backend=backend) if what == "whole" else model
        for block in model.blocks if what == "blocks" else ():
            block.compile(backend=backend)
        expected = call(inputs())
        first = backend.graphs
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                session.park(keep=keep)
                assert torch.equal(call(inputs()), expected)
        assert first > 0 and backend.graphs == first


@pytest.mark.parametrize("granularity", ["layer", "block"])
def test_a_second_model_of_the_same_kind_compiles_nothing_again(granularity):
    """ComfyUI drops a model that the present prompt does not use, and loads the file again for the next prompt."""
    backend, dropped, counts, seen = Counting(), [], [], []
    for _ in range(3):
        model = net()
        with (
            torch.no_grad(),
            stream(model, vram=size(model) // 2, device="cpu", granularity=granularity),
        ):
            seen.append(torch.compile(model, backend=backend)(inputs()))
        counts.append(backend.graphs)
        dropped.append(weakref.ref(model))
        del model
        assert dropped[-1]() is None
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert 0 < counts[0] == counts[1] == counts[2]


def test_a_module_wrapped_by_other_code_while_parked_is_wrapped_anew():
    model = net()
    seen = []
    with torch.no_grad(), stream(model, vram=size(model) // 2, device="cpu", granularity="block") as session:
        expected = model(inputs())
        for _ in range(2):
            session.park()
            for block in model.blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: (seen.append(1), inner(x))[1]
            assert torch.equal(model(inputs()), expected)
        assert len(seen) == 3 + 6


def compile_root(model):
    return torch.compile(model, backend="aot_eager")


def compile_root_in_place(model):
    model.compile(backend="aot_eager")
    return model


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def wrap_blocks(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


def train(call, model) -> list:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, seen = torch.optim.SGD(parameters, lr=0.05), []
    for seed in range(2):
        optimizer.zero_grad()
        call(inputs(seed)).pow(2).mean().backward()
        seen += [parameter.grad.clone() for parameter in parameters]
        optimizer.step()
    return seen


@pytest.mark.parametrize(
    ("how", "when"),
    [
        (compile_root, "before"),
        (compile_root, "after a step"),
        (compile_root_in_place, "after"),
        (compile_blocks, "after a step"),
        (wrap_blocks, "after"),
    ],
)
def test_blocks_of_a_compiled_module_stay_whole_and_train_to_the_same_bits(how, when, monkeypatch):
    """The blocks exceed the size above which blocks that are not compiled are divided."""
    monkeypatch.setattr(rule_planner, "PART", size(Block()) // 2 + 100)
    resident = net(adapters=True)
    expected = train(how(resident), resident)
    torch._dynamo.reset()
    model = net(adapters=True)
    call = how(model) if when == "before" else None
    with stream(model, vram=size(model) * 3 // 4, device="cpu") as session:
        if when == "after a step":
            divided = session.report().units
            with torch.no_grad():
                model(inputs())
            assert divided == session.report().units == 7
        call = how(model) if call is None else call
        assert_same(expected, train(call, model))
        assert session.report().units == 4
        assert not session.report().notes


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_report_notes_compiled_blocks_that_are_divided(when):
    model = net()
    call = torch.compile(model, backend="eager")
    with torch.no_grad():
        if when == "before":
            model.compile(backend="eager")
        with stream(model, vram=size(model) * 3 // 4, device="cpu", granularity="layer") as session:
            (model if when == "before" else call)(inputs())
            assert any("granularity='block'" in note for note in session.report().notes)
