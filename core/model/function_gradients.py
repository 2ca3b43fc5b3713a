"""Gradients of streamed parameters that are given to custom autograd functions.

``Function.apply`` does not dispatch to ``__torch_function__``, so the function's node leads to the parameter
itself, and not to the `Deliver` node that operators get. Fused losses of LLM trainers are such functions: they
take the weight of the head as an argument. A prehook of the parameter's AccumulateGrad node sends such a
gradient the same way as all others: autograd accumulates nothing, the gradient is added to ``.grad`` on the host
at the end of the backward pass, and the parameter's hooks run then.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

_APPLY: Any = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def function_given(parameter: torch.Tensor) -> str | None:
    """Return the name of the autograd function that is running its forward with ``parameter`` as an argument and
    records gradients. Returns None if there is no such function.
    """
    frame, called = sys._getframe(1), None
    while frame is not None:
        if frame.f_code is _APPLY and called is not None:
            given = frame.f_locals
            if any(argument is parameter for argument in given.get("args", ())):
                return given["cls"].__name__ if _records(called) else None
        frame, called = frame.f_back, frame  # type: ignore[assignment]
    return None


def _records(forward: Any) -> bool:
    """Return whether the node of the autograd function with the frame ``forward`` leads to other nodes.

    A forward without the argument ``ctx`` is taken to record gradients.
    """
    for value in forward.f_locals.values():
        if isinstance(value, torch.autograd.function.FunctionCtx):
            return bool(value.next_functions)  # type: ignore[attr-defined]
    return True


def accumulator(parameter: torch.Tensor) -> Any:
    """Return the parameter's AccumulateGrad node. It exists as long as it is referenced."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def redirect(node: Any, parameter: torch.Tensor) -> None:
    """Let gradients that reach ``node``, the parameter's AccumulateGrad node, be sent by the session that
    streams the parameter then.
    """
    # The node refers to the parameter, and the garbage collector does not see that reference.
    reference = weakref.ref(parameter)

    def send(gradients: tuple) -> Any:
        home = getattr(reference(), "_carom", None)
        if gradients[0] is None or home is None or home.runtime.closed:
            return None
        home.runtime.backward.deliver_given(home, gradients[0])
        return (None,)

    node.register_prehook(send)
