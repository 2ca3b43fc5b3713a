"""`ModelChanges`: what Carom changes in a model so that a session can stream it, and the way back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .plain_ops import shorten
from .quantized_weights import dressing, forget_patches, put_together, take_apart
from .watched_patches import watch


class ModelChanges:
    """The changes of one model. `undo` takes all of them back, the last one first."""

    def __init__(self) -> None:
        self._dressed: list[tuple[nn.Module, str]] = []
        self._undo = contextlib.ExitStack()
        self._lengthen: Callable[[], Any] = _nothing

    def take_weights_apart(self, root: nn.Module) -> None:
        """Let weights of tensor subclasses below ``root`` be their inner tensors."""
        opened = take_apart(root)
        self._undo.callback(put_together, opened)
        self._dressed = dressing(opened)
        for module, _ in self._dressed:
            self._undo.callback(watch(module))

    @property
    def dressed(self) -> bool:
        """Whether weights that were taken apart are single tensors with added attributes (GGUF)."""
        return bool(self._dressed)

    def forget_patches(self) -> None:
        """Remove the patches that weights carry as an attribute, as ComfyUI-GGUF does when it unloads whole weights."""
        for module, name in self._dressed:
            forget_patches(module, name)

    def enter_by(self, model: nn.Module, root: Any, names: tuple[str, ...]) -> None:
        """Let the methods ``names`` of ``model`` run as the forward of ``root``, which does not keep it alive."""
        for name in names:
            method = getattr(root.model, name)
            model.__dict__[name] = functools.partial(root, method)
            self._undo.callback(model.__dict__.pop, name, None)

    def shorten(self, root: nn.Module) -> None:
        """Replace ComfyUI's own forwards below ``root`` by shorter ones, until `lengthen`."""
        self._undo.callback(self.lengthen)
        self._lengthen = shorten(root)

    def lengthen(self) -> None:
        """Restore ComfyUI's own forwards. Compiled code must see the same forwards as without Carom."""
        self._lengthen()
        self._lengthen = _nothing

    def undo_later(self, function: Callable[[], Any]) -> None:
        """Let `undo` call ``function``."""
        self._undo.callback(function)

    def undo(self) -> None:
        """Take all changes back."""
        try:
            self._undo.close()
        finally:
            self._dressed = []


def _nothing() -> None:
    pass
