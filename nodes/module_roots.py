"""Which module of a model a session streams, what is asked of its weights first, and the least budget for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.common.errors import BudgetError, CaromError, UnsupportedError
from ..core.session.session import stream
from .inference_tensors import own_tensors, wrapped_kind
from .node_settings import Settings
from .quantized_weights import dresses, put_together, take_apart

# What ComfyUI calls on models whose own forward it does not call: text encoders, then VAEs.
ENTRANCES = ("encode_token_weights", "generate", "encode", "decode")


class Scope(nn.Module):
    """The root of a session on a model that is entered by other methods than ``forward``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


def root_of(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The module whose forward is a step, and the methods of ``model`` that are steps where ComfyUI calls those instead."""
    inner = getattr(model, "diffusion_model", None)
    if isinstance(inner, nn.Module):
        return inner, ()
    entrances = tuple(name for name in ENTRANCES if callable(getattr(model, name, None)))
    return (Scope(model), entrances) if entrances else (model, ())


def prepare(root: nn.Module) -> None:
    """Ordinary tensors in ``root``. Raises UnsupportedError for weights that are none and cannot be taken apart."""
    kind = wrapped_kind(root)
    if kind:
        raise UnsupportedError(
            f"its weights are of the kind {kind}, which Carom cannot take apart; set mode to auto or native"
        )
    own_tensors(root)


def least_bytes(root: nn.Module, device: torch.device, settings: Settings) -> int:
    """Bytes of the least budget that works for ``root``, which no session streams; 0 where that cannot be said.

    Raises UnsupportedError where the weights cannot be streamed and ``settings`` demand it.
    """
    opened = take_apart(root)
    try:
        prepare(root)
        codec = "raw" if dresses(opened) else settings.codec
        # A budget that nothing fits into is refused before anything is moved. (A model without weights fits.)
        stream(root, device=device, vram=1, granularity=settings.granularity, codec=codec).close()
        return 0
    except BudgetError as error:
        return error.least_bytes or 0
    except CaromError:
        if settings.mode == "stream":
            raise
        return 0
    finally:
        put_together(opened)
