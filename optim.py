"""An optimizer wrapper that updates each parameter during the backward pass, as soon as its gradient is complete.

Each gradient is freed after its update, so the gradients of all adapters never exist at the same time, as in an
ordinary loop. The method is that of PyTorch's tutorial "How to save memory by fusing the optimizer step into the
backward pass" (2023) and of LEMA's layer-wise training.
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
    """An optimizer that updates the parameters of ``factory(params)`` in the backward pass; loops, schedulers and
    trainers use this object as any optimizer.

    ``params``: parameters or parameter groups, as for any optimizer. ``factory``: an optimizer class, or a partial of
    a class (``functools.partial(torch.optim.AdamW, lr=1e-4)``). Its update of a parameter must depend only on the
    gradient and the state of that parameter, as in SGD, Adam, Adafactor and Lion. The results then equal those of
    ``factory(params)``.

    `step` updates no parameter. It marks the end of a step, and must be called once for each backward. If a parameter
    gets a second gradient before `step` (gradient accumulation over several backwards, or an adapter used in several
    segments of reentrant checkpointing), that backward raises UnsupportedError. Code that needs all gradients at once
    finds none: clipping by norm must be off (``max_grad_norm=0`` in `transformers.Trainer`), and gradient scalers
    raise an error. The learning rates are those at the beginning of the backward, as set by a scheduler that steps
    after `step`.

    `state_dict` has the format of ``factory(params)``, and each can load the state of the other. `remove` removes the
    hooks.
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
        self._hold = threading.Lock()  # updates run on autograd's threads
        self._stepped: set[int] = set()
        self._group_of = {id(p): n for n, group in enumerate(self.param_groups) for p in group["params"]}
        optimizer_reserve.make_room(self._inner, coming=True)  # a backward pass would be too late for this
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
            group = self.param_groups[self._group_of[id(parameter)]]  # load_state_dict creates new groups
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
        """End the step; the backward has updated the parameters already. ``closure`` (forward and backward) is called
        first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepped.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as in any optimizer.

        After a backward that failed half way, this allows the next backward; updates made before the failure remain.
        """
        self._stepped.clear()
        super().zero_grad(set_to_none)

    def remove(self) -> None:
        """Remove the hooks: gradients are kept from here on, and no parameter is updated. Idempotent."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group during construction. Raises UnsupportedError afterwards."""
        if hasattr(self, "_stepped"):
            raise UnsupportedError("name all parameters when the optimizer in backward is made")
        super().add_param_group(param_group)
