"""Functions that call ComfyUI: device choice, memory figures, pinned-memory accounting and progress display.

Modules of ComfyUI are imported inside the functions, so that this file can be imported without ComfyUI.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..core.common.sizes import format_size
from ..core.host.probe import host_memory, on_windows
from .node_settings import parse_limit

logger = logging.getLogger("carom")

# The remedy for a folder of temporary files that cannot take weights.
OTHER_FOLDER = "Start ComfyUI with --temp-directory FOLDER to name a folder on another drive"


def management() -> Any:
    """Return the module ``comfy.model_management``."""
    import comfy.model_management  # type: ignore[import-not-found]

    return comfy.model_management


def compute_device() -> torch.device:
    """Return the device on which ComfyUI computes."""
    return management().get_torch_device()


def device_options() -> list[str]:
    """Return the options of a loader's device widget: ComfyUI's own list.

    The list is "default", "cpu" and, on a machine with several GPUs, "gpu:0" and so on.
    """
    listed = getattr(management(), "get_gpu_device_options", None)
    return ["default", "cpu"] if listed is None else list(listed())


def chosen_device(option: str | None) -> tuple[torch.device, dict[str, Any]]:
    """Return the device for a loader's model and the ComfyUI model options that select this device.

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


def other_gpus(device: torch.device) -> list[str]:
    """Return the names of all GPUs of the same type as ``device``, without ``device`` itself."""
    if device.type == "cpu":
        return []
    api = torch.get_device_module(device)
    own = api.current_device() if device.index is None else device.index
    return [f"{device.type}:{index}" for index in range(api.device_count()) if index != own]


def device_bytes(device: torch.device) -> int:
    """Return the total memory of ``device`` in bytes. Percentages in widgets refer to this value."""
    return int(management().get_total_memory(device))


def module_bytes(module: torch.nn.Module) -> int:
    """Return the size of a module's weights in bytes, as ComfyUI counts it."""
    return int(management().module_size(module))


def free_bytes(device: torch.device) -> int:
    """Return the bytes of ``device`` that ComfyUI counts as free, unused memory of torch's allocator included."""
    return int(management().get_free_memory(device))


def room_on(device: torch.device) -> int:
    """Return the bytes of ``device`` that are free when ComfyUI has unloaded all of its models."""
    loaded = [
        one for one in management().current_loaded_models if one.device == device and one.model is not None
    ]
    return free_bytes(device) + sum(int(one.model.loaded_size()) for one in loaded)


def least_for_passes() -> int:
    """Return the bytes of device memory that ComfyUI keeps free for passes at least."""
    return int(management().minimum_inference_memory())


def has_dynamic_vram() -> bool:
    """Return whether ComfyUI's loaders make patchers of its dynamic VRAM."""
    memory = sys.modules.get("comfy.memory_management")  # older releases have none
    return bool(getattr(memory, "aimdo_enabled", False))


def unload(patcher: Any) -> None:
    """Have ComfyUI unload a model and its clones from the device. ComfyUI loads the model again for its next use."""
    unload_model = getattr(management(), "unload_model_and_clones", None)
    if unload_model is None:
        patcher.detach()
    else:
        unload_model(patcher)


def wipe_casts(module: torch.nn.Module) -> None:
    """Undo ComfyUI's load of ``module``: restore whether its weights are cast, and remove its patch functions."""
    import comfy.model_patcher  # type: ignore[import-not-found]

    comfy.model_patcher.wipe_lowvram_weight(module)


def kept_free() -> int:
    """Return the bytes of device memory to leave to other programs; 0 unless a reserve applies.

    ComfyUI's reserve applies where the user set one (``--reserve-vram``). It applies on Windows in any case, because
    allocations beyond the card's memory spill into host memory there.
    """
    found = management()
    reserved = getattr(getattr(found, "args", None), "reserve_vram", None) is not None
    return int(found.extra_reserved_memory()) if reserved or on_windows() else 0


def pin_room() -> int:
    """Return the bytes of host memory that ComfyUI's limit still allows to pin; 0 where pinning is off."""
    found = management()
    most = getattr(found, "MAX_PINNED_MEMORY", None)
    if most is None:
        return 1 << 60
    return max(0, int(most - getattr(found, "TOTAL_PINNED_MEMORY", 0))) if most > 0 else 0


def ram_limit(value: str, held: int) -> int:
    """Return the bytes of RAM that the weights of all models may take, for the value of a ``ram`` widget.

    ``held``: bytes that Carom's models hold now. "auto": these bytes and what is free, less a reserve for the system
    (2 GiB, or a tenth of the memory of the machine or its container). Percentages refer to the machine's memory.
    """
    memory = host_memory()
    wanted = parse_limit(value, memory.total, "ram")
    return max(memory.usable, memory.free // 4) + held if math.isinf(wanted) else int(wanted)


def spill_folder(nbytes: int) -> str:
    """Return the folder for weights that loading copied out of their file, if they must wait on disk.

    It lies in ComfyUI's folder of temporary files. The result is "auto" (nothing is written) if the folder cannot be
    written or its drive has no room for ``nbytes`` bytes. Such weights then stay in memory.
    """
    import folder_paths  # type: ignore[import-not-found]

    folder = os.path.join(folder_paths.get_temp_directory(), "carom")
    try:
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > nbytes:
            return folder
        reason = f"{folder} is read-only, or its drive has less than {format_size(nbytes)} free"
    except OSError as error:
        reason = f"{folder}: {error.strerror}"
    logger.warning("Carom: weights that are in no file stay in RAM: %s. %s", reason, OTHER_FOLDER)
    return "auto"


def count_pinned(change: int) -> None:
    """Add ``change`` bytes to ComfyUI's count of pinned bytes, so that its limit covers ComfyUI and Carom together.

    A model may be freed after ComfyUI's modules (a process that ends, tests). There is no count then.
    """
    found: Any = sys.modules.get("comfy.model_management")
    if change and hasattr(found, "TOTAL_PINNED_MEMORY"):
        found.TOTAL_PINNED_MEMORY = max(0, found.TOTAL_PINNED_MEMORY + change)


def lasting_allocations() -> AbstractContextManager:
    """Return a context manager for allocations of device memory that outlive a block of the model.

    Newer ComfyUI versions record the allocations of a block. The context manager pauses this recording.
    """
    try:
        from comfy import model_prefetch  # type: ignore[import-not-found]

        return model_prefetch.pause_malloc_graph()
    except (ImportError, AttributeError):
        return contextlib.nullcontext()


@contextlib.contextmanager
def laying_out() -> Iterator[None]:
    """Context for moving weights: disable inference mode and ComfyUI's recording of a block's allocations."""
    with torch.inference_mode(False), torch.no_grad(), lasting_allocations():
        yield


class LoadingBar:
    """The progress bar on the running node while weights are laid out; a listener for `progress_listener`.

    ComfyUI's bar raises an exception when the user cancels. A partly laid out model is unusable, so the listener stores
    this exception. The caller calls `finish` after the layout is complete.
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
            else:  # a prompt does not fail because the browser page was closed
                logger.debug("progress was not shown: %s", error)

    def finish(self) -> None:
        """Raise the stored exception if the user cancelled during the layout."""
        error, self._interrupt = self._interrupt, None
        if error is not None:
            raise error


def say(text: str, node: str) -> None:
    """Log ``text`` and show it on the node with the id ``node``, if a browser page is connected."""
    logger.info("%s", text)
    show(text, node)


def show(text: str, node: str) -> None:
    """Show ``text`` on the node with the id ``node``, if a browser page is connected. Does nothing for an empty id."""
    if not node:
        return
    try:
        from server import PromptServer  # type: ignore[import-not-found]

        PromptServer.instance.send_progress_text(text, node)
    except Exception as error:  # a prompt does not fail because the browser page was closed
        logger.debug("progress text was not sent: %s", error)
