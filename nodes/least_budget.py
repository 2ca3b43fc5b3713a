"""`LeastBudgets`: the least budgets of device memory with which a model can be streamed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..core.common.errors import BudgetError, CaromError
from ..core.session.session import Session, stream
from .module_roots import prepare, root_of
from .node_settings import Settings
from .quantized_weights import dressing, put_together, take_apart
from .successor import modules_of

PLENTY = (
    8  # a budget of 8 times the largest module's weights is more than the least one, if blocks may be divided
)


def suffices(model: nn.Module, limit: float, settings: Settings) -> bool:
    """Return whether ``limit`` bytes are so much that the least budget need not be known. No session is opened."""
    largest = max(
        (sum(t.nbytes for t in part.parameters(recurse=False)) for part in modules_of(model)), default=0
    )
    return settings.granularity in ("auto", "layer") and limit >= PLENTY * largest


class LeastBudgets:
    """The least budgets that work for one model, in bytes, by settings. Each is found once."""

    def __init__(self) -> None:
        self._found: dict[Settings, int] = {}

    def least(
        self, model: nn.Module, session: Session | None, device: torch.device, settings: Settings
    ) -> int:
        """Return the least budget in bytes that works for ``model`` with ``settings``; 0 if it cannot be determined.

        ``session``: the session that streams the model, or None. Raises UnsupportedError if the weights cannot be
        streamed and mode is "stream".
        """
        key = replace(settings, vram="", ram="", priority="", node="")
        if key not in self._found:
            self._found[key] = (
                _least_of_module(root_of(model)[0], device, settings)
                if session is None
                else _least_of_session(session)
            )
        return self._found[key]


def _least_of_module(root: nn.Module, device: torch.device, settings: Settings) -> int:
    opened = take_apart(root)
    try:
        prepare(root)
        codec = "raw" if dressing(opened) else settings.codec
        # A budget of 1 byte is refused before any weight is moved. (A model without weights fits.)
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


def _least_of_session(session: Session) -> int:
    try:
        session.set_budget(vram=1)  # refused, and nothing changes
    except BudgetError as error:
        return error.least_bytes or 0
    return 0
