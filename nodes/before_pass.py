"""`before_each_pass`: prepares a model for a pass after ComfyUI may have exchanged weights of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .inference_tensors import own_tensors

if TYPE_CHECKING:
    from .streaming import Streaming


def before_each_pass(root: nn.Module, streaming: Streaming) -> Callable[[], None]:
    """Prepare the session of ``streaming`` before each forward of its ``root``; return a function that ends this."""
    hook = _untraced(functools.partial(_prepare, weakref.ref(streaming)))
    return root.register_forward_pre_hook(hook).remove


def _prepare(reference: weakref.ref[Streaming], root: nn.Module, args: Any) -> None:
    """Prepare for a pass: replace weights that came since the last pass by ordinary tensors.

    The weights that ComfyUI puts there (merged LoRA) are inference tensors, and so are those of modules that nodes
    make. The call also records a changed budget and updates the node.
    """
    streaming = reference()
    model = None if streaming is None else streaming.model
    if streaming is None or model is None:
        return
    streaming.follow()
    found = (
        getattr(model, "current_weight_patches_uuid", None),
        getattr(model, "model_loaded_weight_memory", 0),
    )
    streaming.tell()
    session = streaming.session
    # Packs inject modules of their own, or put them in the place of others, without telling ComfyUI's patcher.
    if found != streaming.expected or (session is not None and session.module_changed):
        streaming.changes.take_weights_apart(root)
        own_tensors(root)
        streaming.expected = found


def _untraced(function: Callable) -> Callable:
    """Return a wrapper of ``function`` that torch.compile does not trace, without importing the compiler."""

    def call(*args: Any) -> None:
        function(*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
