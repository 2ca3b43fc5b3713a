"""Gradient hooks of streamed parameters, delayed until the gradient has been copied to host memory.

For a streamed parameter, Carom returns an undefined gradient (None) to autograd, because the true gradient is
copied to the host asynchronously. The user's `register_hook` and post-accumulate-grad hooks run once that
copy is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

REGISTER_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}
_accumulating = threading.local()  # attribute ``on``: whether this thread is inside `accumulate`


class _DelayedHook:
    """A wrapper of a user's hook on a streamed parameter. Calls the hook only within `accumulate`, and
    ignores autograd's own calls.

    Autograd would call the hook too early, with the undefined gradient that the autograd function `Deliver`
    returns.
    """

    def __init__(self, hook: Callable) -> None:
        self.hook = hook

    def __call__(self, argument: Any) -> Any:
        return self.hook(argument) if getattr(_accumulating, "on", False) else None


def _hooks_of(parameter: torch.Tensor) -> list[dict]:
    """Return the parameter's dicts of tensor hooks and of post-accumulate-grad hooks that are not empty."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            found
            for found in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
            if found
        ]


def delay_hooks(parameter: torch.Tensor) -> None:
    """Delay all gradient hooks of ``parameter`` until its gradient is on the host.

    The handles that the user got from registering the hooks can still remove them.
    """
    for hooks in _hooks_of(parameter):
        for key, hook in hooks.items():
            if not isinstance(hook, _DelayedHook):
                hooks[key] = _DelayedHook(hook)


def restore_hooks(parameter: torch.Tensor) -> None:
    """Undo `delay_hooks`: let autograd call the hooks directly again."""
    for hooks in _hooks_of(parameter):
        for key, hook in hooks.items():
            if isinstance(hook, _DelayedHook):
                hooks[key] = hook.hook


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add ``gradient`` to ``parameter.grad`` and call the parameter's hooks, in the order that autograd's
    AccumulateGrad uses.
    """
    before, _accumulating.on = getattr(_accumulating, "on", False), True
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
        _accumulating.on = before
