"""All that Carom asks of a running ComfyUI beside its patchers. Nothing is imported before it is asked for."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..core.host.probe import on_windows

logger = logging.getLogger("carom")


def management() -> Any:
    """``comfy.model_management``."""
    import comfy.model_management  # type: ignore[import-not-found]

    return comfy.model_management


def compute_device() -> torch.device:
    """Where ComfyUI computes."""
    return management().get_torch_device()


def device_options() -> list[str]:
    """Devices that a loader's widget offers: ComfyUI's own list ("default", "cpu", "gpu:0" where there are several)."""
    listed = getattr(management(), "get_gpu_device_options", None)
    return ["default", "cpu"] if listed is None else list(listed())


def chosen_device(option: str | None) -> tuple[torch.device, dict[str, Any]]:
    """Where a loader's model computes, and ComfyUI's model options that say so.

    Raises ValueError for a device that this machine does not have.
    """
    if option in (None, "", "default"):
        return compute_device(), {}
    if option == "cpu":
        cpu = torch.device("cpu")
        return cpu, {"load_device": cpu, "offload_device": cpu}
    resolve = getattr(management(), "resolve_gpu_device_option", None)
    device = None if resolve is None else resolve(option)
    if device is None:
        raise ValueError(
            f"device={option!r} is not on this machine: choose one of {', '.join(device_options())}"
        )
    return device, {"load_device": device}


def device_bytes(device: torch.device) -> int:
    """All memory of ``device``, which percentages are of."""
    return int(management().get_total_memory(device))


def module_bytes(module: torch.nn.Module) -> int:
    """The true size of a model's weights."""
    return int(management().module_size(module))


def free_bytes(device: torch.device) -> int:
    """Bytes of ``device`` that ComfyUI counts as free, what torch's allocator keeps unused among them."""
    return int(management().get_free_memory(device))


def unload(patcher: Any) -> None:
    """Have ComfyUI take a model and its clones off the device; whoever needs it next loads it again."""
    unload_model = getattr(management(), "unload_model_and_clones", None)
    if unload_model is None:
        patcher.detach()
    else:
        unload_model(patcher)


def kept_free() -> int:
    """Bytes of the device to be left to others: what the user reserved, and on Windows, where more than the card has
    spills into host memory, what ComfyUI reserves itself."""
    found = management()
    reserved = getattr(getattr(found, "args", None), "reserve_vram", None) is not None
    return int(found.extra_reserved_memory()) if reserved or on_windows() else 0


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


class LoadingBar:
    """The bar on the node that runs, while weights are laid out; a listener for `progress_listener`.

    ComfyUI's bar raises when the user cancels. Half a model laid out is of no use to anybody, so that is kept for
    `finish`, which the caller calls when the model stands.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._interrupt: Exception | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._interrupt is not None:
            return
        try:
            if self._bar is None:
                import comfy.utils  # type: ignore[import-not-found]

                self._bar = comfy.utils.ProgressBar(total)
            self._bar.update_absolute(done, total)
        except Exception as error:
            if type(error).__name__ == "InterruptProcessingException":
                self._interrupt = error
            else:  # a page that went away is no reason to fail a prompt
                logger.debug("progress was not shown: %s", error)

    def finish(self) -> None:
        """Raises what a cancel raised meanwhile."""
        error, self._interrupt = self._interrupt, None
        if error is not None:
            raise error


def say(text: str, node: str) -> None:
    """Show ``text`` on a node of the page, and log it; silently nothing where no page listens."""
    logger.info("%s", text)
    show(text, node)


def show(text: str, node: str) -> None:
    """Show ``text`` on a node of the page."""
    if not node:
        return
    try:
        from server import PromptServer  # type: ignore[import-not-found]

        PromptServer.instance.send_progress_text(text, node)
    except Exception as error:  # a page that went away is no reason to fail a prompt
        logger.debug("progress text was not sent: %s", error)
