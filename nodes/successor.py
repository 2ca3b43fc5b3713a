"""Functions that end a model's session if a patcher of ComfyUI's own loads the model after a patcher of Carom.

ComfyUI does not say which patcher loads a model next. Its own patchers call the model's ``named_modules`` first;
Carom's call `succeed`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from .inference_tensors import own_memory

if TYPE_CHECKING:
    from .streaming import Streaming


def expect_successor(model: nn.Module, streaming: Streaming) -> None:
    """Close the session at the next call of the model's ``named_modules``, unless `succeed` is called before."""
    model.__dict__["named_modules"] = functools.partial(_taken_over, weakref.ref(streaming))


def succeed(model: nn.Module) -> bool:
    """Undo `expect_successor`, because a patcher of Carom loads the model; return whether it was in effect."""
    return model.__dict__.pop("named_modules", None) is not None


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of ``model``. Unlike ``model.modules()``, this does not end the session."""
    return (module for _, module in nn.Module.named_modules(model))


def _taken_over(reference: weakref.ref[Streaming], *args: Any, **kwargs: Any) -> Any:
    streaming = reference()
    model = None if streaming is None else streaming.model
    assert streaming is not None and model is not None  # called as the model's attribute, so both exist
    streaming.close()
    own_memory(model)
    return model.named_modules(*args, **kwargs)
