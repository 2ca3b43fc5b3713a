"""The choice of the module that a session streams, the preparation of its weights, and moves of the other modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..core.common.errors import UnsupportedError
from ..core.model.shared_attributes import share_attributes
from .inference_tensors import own_tensors, wrapped_kind

# The methods that ComfyUI calls on models whose forward it does not call: text encoders, then VAEs.
ENTRANCES = ("encode_token_weights", "generate", "encode", "decode")


class Scope(nn.Module):
    """The root module of a session for a ``model`` that ComfyUI enters by other methods than ``forward``.

    ``forward(function, *args, **kwargs)`` calls ``function``, which is such a method of the model. So each call of the
    method is a step of the session.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


def root_of(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the module whose forward is a step of the session, and names of methods of ``model`` to route through it.

    The names are empty where ComfyUI calls the module's forward itself. The module does not keep ``model`` alive:
    ComfyUI frees the memory of a model by dropping it.
    """
    inner = getattr(model, "diffusion_model", None)
    if isinstance(inner, nn.Module):
        return inner, ()
    entrances = tuple(name for name in ENTRANCES if callable(getattr(model, name, None)))
    shared = share_attributes(model)
    return (Scope(shared), entrances) if entrances else (shared, ())


def part_name(model: nn.Module) -> str:
    """Return what users call ``model``. A checkpoint has several models, to which one node gives one budget."""
    if isinstance(getattr(model, "diffusion_model", None), nn.Module):
        return "model"
    if any(callable(getattr(model, name, None)) for name in ENTRANCES[:2]):
        return "text encoder"
    return "VAE" if any(callable(getattr(model, name, None)) for name in ENTRANCES[2:]) else "ControlNet"


def prepare(root: nn.Module) -> None:
    """Replace the inference tensors in ``root`` by ordinary tensors.

    Raises UnsupportedError for weights of another tensor class that could not be taken apart.
    """
    kind = wrapped_kind(root)
    if kind:
        raise UnsupportedError(
            f"its weights are of the kind {kind}, which Carom cannot take apart; set mode to auto or native"
        )
    own_tensors(root)


def move_rest(model: nn.Module, device: Any) -> None:
    """Move what a session does not stream to ``device``: ComfyUI's own modules beside the diffusion model."""
    root, entrances = root_of(model)
    if not entrances:
        for child in model.children():
            if child is not root:
                child.to(device)
    model.device = device
