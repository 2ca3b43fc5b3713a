"""Gradients of trainable streamed weights: from autograd's graph to ``.grad`` on the host, hooks included."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import UnsupportedError

if TYPE_CHECKING:
    from .streamed import Streamed


class Deliver(torch.autograd.Function):
    """Stands between a trainable streamed weight's slot and its operators; sends the gradient to the host.

    One node serves all runs of a weight, as one AccumulateGrad node does in a plain run, so that gradients are summed in
    the same order. It is connected to the parameter, so that ``backward(inputs=[parameter])`` finds it, and gives it an
    undefined gradient: the true one lands in ``.grad`` at the end of the pass.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter
        return slot.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gradient,) = grads
        owner = getattr(ctx.parameter, "_carom", None)
        if owner is None or owner.streamer.closed:  # not streamed any more since the forward
            accumulate(ctx.parameter, gradient.to(ctx.parameter.device, ctx.parameter.dtype))
        else:
            owner.streamer.backward.deliver(owner, gradient)
        return None, None


def refuse_data_parallel(units: Sequence[Streamed]) -> None:
    """Raises UnsupportedError where DistributedDataParallel runs the module and trainable weights of it stream."""
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    if distributed is None or distributed.DistributedDataParallel._active_ddp_module is None:
        return
    for unit in units:
        if unit.trainable:
            raise UnsupportedError(
                f"DistributedDataParallel averages gradients as autograd accumulates them, and those of unit {unit.name!r} arrive "
                "on the host at the end of a backward, because it streams: keep trainable parameters resident "
                "(training='resident'), or average .grad yourself after backward()"
            )


REGISTER_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_landed = threading.local()  # ``on``: this thread adds up gradients that landed


class _WhenLanded:
    """A hook of a streamed parameter. Autograd calls it for the undefined gradient that `Deliver` gives, too early."""

    def __init__(self, hook: Callable) -> None:
        self.hook = hook

    def __call__(self, argument: Any) -> Any:
        return self.hook(argument) if getattr(_landed, "on", False) else None


def _hooks_of(parameter: torch.Tensor) -> list[dict]:
    with torch._C.DisableTorchFunctionSubclass():
        return [
            found
            for found in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
            if found
        ]


def call_when_landed(parameter: torch.Tensor) -> None:
    """From here on gradient hooks of ``parameter`` run when its gradient landed. Their handles stay good."""
    for hooks in _hooks_of(parameter):
        for key, hook in hooks.items():
            if not isinstance(hook, _WhenLanded):
                hooks[key] = _WhenLanded(hook)


def call_as_usual(parameter: torch.Tensor) -> None:
    """Undo `call_when_landed`."""
    for hooks in _hooks_of(parameter):
        for key, hook in hooks.items():
            if isinstance(hook, _WhenLanded):
                hooks[key] = hook.hook


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to ``parameter.grad`` as autograd's own accumulation would, hooks included."""
    before, _landed.on = getattr(_landed, "on", False), True
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for hook in list((parameter._backward_hooks or {}).values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(parameter)
    finally:
        _landed.on = before
