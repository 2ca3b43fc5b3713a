"""Optimizers that step each parameter as soon as its gradient is there, and free the gradient.

Between backward and step a plain loop holds the gradients of all adapters; here one at a time exists. The method is
that of PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass" (2023) and of LEMA's
layer-wise training: when the last gradient has come, every parameter is stepped already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .core.budget import optimizer_reserve
from .core.common.errors import UnsupportedError


class OptimizerInBackward(torch.optim.Optimizer):
    """``factory(params)`` made to step in the backward pass; used in loops, schedulers and trainers as any optimizer.

    ``params``: parameters or parameter groups, as optimizers take them. ``factory``: an optimizer's class, or a partial of
    it (``functools.partial(torch.optim.AdamW, lr=1e-4)``), whose update of a parameter depends on that parameter's
    gradient and state alone, as SGD's, Adam's, Adafactor's and Lion's do; the same values come out as of
    ``factory(params)`` then.

    `step` does no stepping: it says that a step is over, and has to be called once a backward, as ever. A gradient
    that comes a second time before it (gradients that accumulate over several backwards, an adapter used in several
    segments of reentrant checkpointing) raises UnsupportedError in that backward. What needs all gradients at once finds
    none: clipping by their norm must be off (``max_grad_norm=0`` in `transformers.Trainer`), and gradient scalers refuse.
    Learning rates are those of the backward's beginning, as a scheduler that steps after `step` leaves them.

    `state_dict` is that of ``factory(params)``: either loads the other's. `remove` takes the hooks off again.
    """

    def __init__(self, params: Iterable[Any], factory: Callable[..., torch.optim.Optimizer]) -> None:
        self._inner = factory(params)
        found: list[nn.Parameter] = [p for group in self._inner.param_groups for p in group["params"]]
        if not found or not all(p.requires_grad and p.is_leaf for p in found):
            raise UnsupportedError(
                f"an optimizer in backward needs parameters that take gradients; {sum(p.requires_grad for p in found)} of "
                f"{len(found)} given do: pass those with requires_grad"
            )
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._hold = threading.Lock()  # backward passes step on autograd's threads
        self._stepped: set[int] = set()
        self._group_of = {id(p): n for n, group in enumerate(self.param_groups) for p in group["params"]}
        optimizer_reserve.make_room(self._inner, coming=True)  # within a backward it would be too late
        self._removers = [p.register_post_accumulate_grad_hook(self._arrived) for p in found]

    def _arrived(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        with self._hold, torch.no_grad():
            if id(parameter) in self._stepped:
                raise UnsupportedError(
                    f"a second gradient came for a parameter of shape {tuple(parameter.shape)} before step(): gradients "
                    "cannot accumulate with an optimizer in backward; step after each backward (gradient accumulation "
                    "of 1), use non-reentrant checkpointing, or step a plain optimizer"
                )
            group = self.param_groups[self._group_of[id(parameter)]]  # loading a state makes new ones
            inner = self._inner
            inner.param_groups, inner.state = [{**group, "params": [parameter]}], self.state
            try:
                inner.step()
                group.update({k: v for k, v in inner.param_groups[0].items() if k != "params"})
            finally:
                inner.param_groups = self.param_groups
            self._stepped.add(id(parameter))
            parameter.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """End the step: the parameters were stepped as their gradients came. ``closure`` (forward and backward) runs first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepped.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer; after a backward that failed half way (what came before is stepped), the next may begin."""
        self._stepped.clear()
        super().zero_grad(set_to_none)

    def remove(self) -> None:
        """Take the hooks off: gradients stay from here on, and nothing steps. Idempotent."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups given at the start only: UnsupportedError afterwards."""
        if hasattr(self, "_stepped"):
            raise UnsupportedError("name all parameters when the optimizer in backward is made")
        super().add_param_group(param_group)
