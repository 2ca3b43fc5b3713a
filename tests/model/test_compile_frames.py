"""Units of more classes than the compiler's limit of recompilations: all of them stay compiled, as without streaming."""

from __future__ import annotations

import pytest
import tests_harness as harness
import torch
from tests_harness import streamed
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own
KINDS = 12  # above the default of torch._dynamo.config.recompile_limit


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(index: int) -> nn.Module:
    """A linear layer whose class has a forward of its own."""
    scope: dict = {}
    exec(f"def forward(self, x): return self.linear(x) + {index}", scope)
    kind = type(f"Layer{index}", (nn.Module,), {"forward": scope["forward"]})
    made = kind()
    made.linear = nn.Linear(32, 32)
    return made


def test_units_of_many_classes_stay_compiled():
    computed: list[int] = []

    def backend(graph, inputs):
        count = sum(node.op == "call_function" for node in graph.graph.nodes)

        def call(*args):
            computed.append(count)
            return graph.forward(*args)

        return call

    model = nn.Sequential(*map(layer, range(KINDS))).requires_grad_(False)
    x = torch.randn(2, 32)
    expected = model(x)
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True),
        streamed(model, "cpu", harness.some_vram(model, "cpu", 0.3), granularity="layer"),
    ):
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            computed.clear()
            assert torch.equal(compiled(x), expected)
            assert sum(computed) == 2 * KINDS  # each layer's linear and its sum
