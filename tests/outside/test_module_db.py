"""torch's own module database: every module with its sample inputs, two of it in one parent so that they take turns."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from outside_harness import COUNT, Case, assert_same_everywhere, sampled
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map

if "expecttest" not in sys.modules:
    try:
        import expecttest  # noqa: F401
    except ImportError:  # the database needs the name of its base class only
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in

from torch.testing._internal.common_modules import module_db  # noqa: E402


class Twice(nn.Module):
    """Two modules of a kind, used one after the other: one slot, two units."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.first(*args, **kwargs), self.second(*args, **kwargs)


def cases(info: Any, dtype: torch.dtype, training: bool) -> Iterator[Case]:
    torch.manual_seed(0)
    given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for index, one in enumerate(given):

        def inputs(forward: Any = one.forward_input) -> Any:
            return tree_map(
                lambda x: x.clone() if isinstance(x, torch.Tensor) and not x.requires_grad else x,
                (forward.args, forward.kwargs),
            )

        def make(constructor: Any = one.constructor_input, inputs: Callable = inputs) -> nn.Module:
            def build() -> nn.Module:
                module = info.module_cls(*constructor.args, **constructor.kwargs)
                if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
                    args, kwargs = inputs()
                    module(*args, **kwargs)  # a lazy module learns its shapes
                return module.to(dtype)

            return Twice(build)

        name = f"{info.name} {index} {'train' if training else 'eval'}"
        call = lambda model, given: model(*given[0], **given[1])  # noqa: E731
        yield Case(name, make, inputs, ("infer", "frozen", "full"), call, training=training)


# Samples of the database that torch itself does not run as they are here, by module and dtype.
NOT_COMPARED = {
    ("nn.FractionalMaxPool2d", torch.float32): "its samples are of float64",
    ("nn.FractionalMaxPool3d", torch.float32): "its samples are of float64",
    ("nn.FractionalMaxPool2d", torch.bfloat16): "its samples are of float64",
    ("nn.FractionalMaxPool3d", torch.bfloat16): "its samples are of float64",
}
NAMES = {info.name: info for info in module_db}


def compare(name: str, dtype: torch.dtype, limit: int | None = None) -> None:
    """Every sample of a module, or ``limit`` of them, in eval and in training mode."""
    if (name, dtype) in NOT_COMPARED:
        pytest.skip(NOT_COMPARED[name, dtype])
    if dtype not in NAMES[name].dtypes and dtype is not torch.bfloat16:
        pytest.skip(f"the database has no samples of {dtype}")
    for training in (False, True):
        every = list(cases(NAMES[name], dtype, training))
        for case in every if limit is None else sampled(every, limit):
            assert_same_everywhere(case, budgets=("least",))


@pytest.mark.parametrize("name", sampled(NAMES, 4 * COUNT))
def test_a_sample(name):
    compare(name, torch.float32, limit=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sampled(NAMES, COUNT))
def test_a_sample_in_other_dtypes(name, dtype):
    compare(name, dtype, limit=1)


def test_gradients_of_which_any_dispatch_mode_changes_the_rounding():
    """This sample's gradients are summed in place plain, and out of place under a mode, as the simulated device's is one."""
    if "nn.LinearCrossEntropyLoss" not in NAMES:
        pytest.skip("this torch has no LinearCrossEntropyLoss")
    every = list(cases(NAMES["nn.LinearCrossEntropyLoss"], torch.float32, training=False))
    assert_same_everywhere(every[47], budgets=("least",))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_module(name):
    compare(name, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_module_in_other_dtypes(name, dtype):
    compare(name, dtype, limit=4)
