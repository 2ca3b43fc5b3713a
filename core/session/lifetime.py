"""`end` and `end_with_module`: how a session ends, by its `close` or because nobody uses its module any more."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from torch import nn

from ..common.run_all import run_all
from .phase import Phase

if TYPE_CHECKING:
    from .assembly import Parts

logger = logging.getLogger("carom")


def end(parts: Parts, discard: bool = False) -> None:
    """Undo the session's changes to its module, and leave shared budgets. After a failure the call may be repeated.

    ``discard``: as in `Session.close`.
    """
    try:
        parts.manager.close(discard)
    finally:
        if parts.manager.phase is Phase.CLOSED:
            # the first one is called only now, because other sessions may use the freed memory after it
            run_all(parts.memory.end, parts.manager.finish)


def end_with_module(module: nn.Module, parts: Parts) -> weakref.finalize:
    """End the session when ``module`` is freed. Returns the finalizer, which `Session.close` detaches.

    The parts of a session refer to each other in cycles. Without this, the weights of a dropped module would stay
    in memory until the garbage collector runs.
    """
    finalizer = weakref.finalize(module, _dropped, parts)
    finalizer.atexit = False
    return finalizer


def _dropped(parts: Parts) -> None:
    if parts.manager.gate.graphs:
        return  # a backward may still use the weights; the garbage collector frees the session after it
    try:
        end(parts, discard=True)
    except Exception as error:  # a finalizer has no caller to raise to
        logger.warning("carom: a module that was dropped could not give its memory back: %s", str(error))
