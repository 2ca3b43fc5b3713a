"""Patch functions that raise the OutOfMemory which ComfyUI's weight adapters catch.

An adapter (LoRA, LoHa and others) catches every exception, logs it and returns the weight without its patch. If memory
is short for one weight, the image is wrong. Here an OutOfMemory that an operator raised is noted before the adapter
catches it, and raised when the adapter is done. The pass then runs again with fewer weights on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..core.streaming.pass_retry import OutOfMemory

FORWARD = "forward_comfy_cast_weights"
FUNCTIONS = ("weight_function", "bias_function")  # attributes of ComfyUI's modules: lists of patch functions


class _Watch(TorchFunctionMode):
    """Notes the first OutOfMemory that an operator raises."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except OutOfMemory as error:
            self.error = self.error or error
            raise

    def check(self) -> None:
        """Raise the noted error, if there is one."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the error refers to this frame


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Context in which patches are applied: at its end an OutOfMemory is raised that was caught inside."""
    with _Watch() as watch:
        yield
    watch.check()


class WatchedPatch:
    """A function that applies patches. Other attributes are those of ``function``."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        with _Watch() as watch:
            result = self.function(*args, **kwargs)
        watch.check()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["function"], name)


def watch_forward(module: nn.Module) -> Callable[[], None]:
    """Watch the casting forward of a module that applies patches itself (GGUF); return an undo function."""
    own = getattr(module, FORWARD, None)
    if own is None or isinstance(own, WatchedPatch):
        return lambda: None
    module.__dict__[FORWARD] = WatchedPatch(own)
    return lambda: module.__dict__.pop(FORWARD, None)


def watch_patches(model: nn.Module) -> None:
    """Let the patch functions that ComfyUI attached to the modules of ``model`` raise what adapters catch.

    ComfyUI replaces the lists of functions with its next load.
    """
    for module in model.modules():
        for name in FUNCTIONS:
            found = module.__dict__.get(name)
            if found:
                module.__dict__[name] = [
                    one if isinstance(one, WatchedPatch) else WatchedPatch(one) for one in found
                ]
