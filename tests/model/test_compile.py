"""torch.compile of a block or of the whole model, before or after `stream`: exact, and broken at unit edges only."""

from __future__ import annotations

import copy
import shutil

import pytest
import tests_harness as harness
import tests_models as models
import torch
from tests_harness import assert_same, streamed
from tests_inside import inside
from tests_pairwise import pairwise

CASE = models.CASES["stack"]
# Not on the simulated device: torch compiles nothing under the dispatch mode that watches there.
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_real_devices = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(call, device) -> list:
    seen = []
    for seed in range(2):
        with torch.no_grad():
            seen.append(call(CASE.inputs(seed, device)))
        x = CASE.inputs(seed, device).requires_grad_()
        call(x).pow(2).sum().backward()
        seen.append(x.grad)
    return seen


def compile_blocks(model, backend) -> object:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def compile_whole(model, backend) -> object:
    return torch.compile(model, backend=backend)


WHAT = {"blocks": compile_blocks, "whole": compile_whole}


@pairwise(
    what=WHAT, when=["before", "after"], checkpoint=["none", "non-reentrant"], device={d: d for d in DEVICES}
)
def test_compiled_models_are_exact(what, when, checkpoint, device):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.Stack(2).requires_grad_(False)
    model.checkpoint = checkpoint
    expected = run(what(copy.deepcopy(model).to(device), "aot_eager"), device)
    torch._dynamo.reset()
    vram = harness.some_vram(model, device, 0.3)
    if when == "before":
        compiled = what(model, "aot_eager")
        if device == "cpu":
            run(compiled, device)  # graphs of the resident model are in the cache
    with streamed(model, device, vram):
        if when == "after":
            compiled = what(model, "aot_eager")
        assert_same(expected, run(compiled, device))
    assert_same(expected, run(compiled.to(device), device))


class Graphs:
    """A backend that runs graphs as they are and notes which operators each run of a graph computes."""

    def __init__(self) -> None:
        self.runs: list[list[str]] = []

    def __call__(self, graph, inputs):
        names = sorted(str(node.target) for node in graph.graph.nodes if node.op == "call_function")

        def call(*args):
            self.runs.append(names)
            return graph.forward(*args)

        return call


@on_real_devices
def test_a_compiled_block_is_one_graph(device):
    plain, model = CASE.build().requires_grad_(False), CASE.build().requires_grad_(False)
    resident, graphs = Graphs(), Graphs()
    with torch.no_grad():
        compile_blocks(plain.to(device), resident)(CASE.inputs(0, device))
        torch._dynamo.reset()
        with streamed(model, device, harness.least_vram(model, device, "block"), granularity="block"):
            compile_blocks(model, graphs)(CASE.inputs(0, device))
    assert len(resident.runs) == 6
    assert graphs.runs == resident.runs


@on_real_devices
def test_a_compiled_model_breaks_at_unit_edges_only(device):
    """No operator falls out of the graphs, and between two units there is one graph at most."""
    plain, model = CASE.build().requires_grad_(False), CASE.build().requires_grad_(False)
    resident, graphs = Graphs(), Graphs()
    with torch.no_grad():
        compile_whole(plain.to(device), resident)(CASE.inputs(0, device))
        assert len(resident.runs) == 1
        torch._dynamo.reset()
        with streamed(
            model, device, harness.least_vram(model, device, "block"), granularity="block"
        ) as session:
            compile_whole(model, graphs)(CASE.inputs(0, device))
            count = len(inside(session).streamed)
    assert sorted(name for names in graphs.runs for name in names) == resident.runs[0]
    assert len(graphs.runs) <= 2 * count + 1


def test_a_second_pass_compiles_nothing_new():
    model = CASE.build().requires_grad_(False)
    graphs = Graphs()
    made = []

    def counting(graph, inputs):
        made.append(graph)
        return graphs(graph, inputs)

    with (
        torch.no_grad(),
        streamed(model, "cpu", harness.least_vram(model, "cpu", "block") * 2, granularity="block"),
    ):
        compiled = compile_whole(model, counting)
        for _ in range(3):
            compiled(CASE.inputs())
        before = len(made)
        for seed in range(4):
            compiled(CASE.inputs(seed))
    assert len(made) == before


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
@pytest.mark.timeout(240)
def test_inductor_is_exact():
    """The kernels are generated from the block's graph, so both runs share them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.Stack(1).requires_grad_(False)
    x = CASE.inputs()
    with torch.no_grad():
        expected = compile_blocks(copy.deepcopy(model), "inductor")(x)
        with streamed(model, "cpu", harness.least_vram(model, "cpu", "block"), granularity="block"):
            compile_blocks(model, "inductor")
            for _ in range(2):
                assert torch.equal(model(x), expected)
