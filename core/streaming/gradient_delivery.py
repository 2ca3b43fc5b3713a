"""Defines `Deliver`, the autograd function that sends the gradient of a trainable streamed weight to
``.grad`` on the host.

A streamed weight is on the host, and is copied to a slot (device memory) while it is used. A slot view is the
weight in its slot.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..common.errors import UnsupportedError
from ..model.gradient_hooks import accumulate

if TYPE_CHECKING:
    from ..model.home import ManagedUnit


class Deliver(torch.autograd.Function):
    """An autograd node between the slot view of a trainable weight and the operators that use it. Sends the
    gradient to the host.

    One node serves all runs of a weight, as one AccumulateGrad node does in plain PyTorch, so that gradients
    are summed in the same order. The node has the parameter as an input, so that
    ``backward(inputs=[parameter])`` finds it. It returns an undefined gradient (None) for the parameter: the
    true gradient reaches ``.grad`` at the end of the pass.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Return the data of the slot view ``slot``, as a differentiable function of ``parameter``."""
        ctx.parameter = parameter
        return slot.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Send the gradient to the host through `Backward.deliver`. Returns undefined gradients (None) to
        autograd.
        """
        (gradient,) = grads
        home = getattr(ctx.parameter, "_carom", None)
        if home is None or home.runtime.closed:  # the session was closed after the forward
            accumulate(ctx.parameter, gradient.to(ctx.parameter.device, ctx.parameter.dtype))
        else:
            home.runtime.backward.deliver(home, gradient)
        return None, None


def refuse_data_parallel(units: Sequence[ManagedUnit]) -> None:
    """Raise UnsupportedError if DistributedDataParallel runs the module and trainable weights of the module
    are streamed.
    """
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
