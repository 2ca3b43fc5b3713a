"""All that Carom asks of a running ComfyUI beside its patchers. Nothing is imported before it is asked for."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

logger = logging.getLogger("carom")


def management() -> Any:
    """``comfy.model_management``."""
    import comfy.model_management  # type: ignore[import-not-found]

    return comfy.model_management


def compute_device() -> torch.device:
    """Where ComfyUI computes."""
    return management().get_torch_device()


def device_bytes(device: torch.device) -> int:
    """All memory of ``device``, which percentages are of."""
    return int(management().get_total_memory(device))


def module_bytes(module: torch.nn.Module) -> int:
    """The true size of a model's weights."""
    return int(management().module_size(module))


def pin_room() -> int:
    """Bytes that ComfyUI lets be pinned now; 0 where pinning is off."""
    found = management()
    most = getattr(found, "MAX_PINNED_MEMORY", None)
    if most is None:
        return 1 << 60
    return max(0, int(most - getattr(found, "TOTAL_PINNED_MEMORY", 0))) if most > 0 else 0


def count_pinned(change: int) -> None:
    """Add ``change`` bytes to what ComfyUI counts as pinned, so that its own limit holds for both of us."""
    found = management()
    if change and hasattr(found, "TOTAL_PINNED_MEMORY"):
        found.TOTAL_PINNED_MEMORY = max(0, found.TOTAL_PINNED_MEMORY + change)


def lasting_allocations() -> AbstractContextManager:
    """Held while device memory is allocated that outlives a block: newer versions record what blocks allocate."""
    try:
        from comfy import model_prefetch  # type: ignore[import-not-found]

        return model_prefetch.pause_malloc_graph()
    except (ImportError, AttributeError):
        return contextlib.nullcontext()


def say(text: str, node: str) -> None:
    """Show ``text`` on a node of the page, and log it; silently nothing where no page listens."""
    logger.info("%s", text)
    if not node:
        return
    try:
        from server import PromptServer  # type: ignore[import-not-found]

        PromptServer.instance.send_progress_text(text, node)
    except Exception as error:  # a page that went away is no reason to fail a prompt
        logger.debug("progress text was not sent: %s", error)
