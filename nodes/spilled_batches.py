"""`in_batches`: collects tensors that loading makes, and moves them to disk meanwhile if they exceed the RAM of the node."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..core.checkpoint.spill import spill
from ..core.common.errors import BudgetError
from ..core.common.sizes import GIB
from ..core.host.arena import return_freed_memory
from . import comfyui_api
from .host_share import LEAST_BYTES
from .shared_ram import free_ram

BATCH = GIB  # bytes of tensors that are written to disk together, at most
LEAST = 4096  # bytes; smaller tensors stay in memory


def in_batches(
    made: Iterable[tuple[str, torch.Tensor]], nbytes: int, whole: int, ram: str | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``made`` by name. Each is made when the one before it is kept or on disk.

    Tensors on disk are views of a mapped file in ComfyUI's folder of temporary files, which is deleted with them.
    ``nbytes``: bytes of all tensors of ``made``; ``whole``: bytes of the model that they are a part of, which decides
    whether they are written to disk; ``ram``: the value of the node's ``ram`` widget, or None to keep all in memory.
    Raises BudgetError if the drive has no room for a batch, and what ``made`` raises.
    """
    room = whole if ram is None else free_ram(ram)
    folder = comfyui_api.spill_folder(nbytes) if nbytes and whole > room else "auto"
    most = min(BATCH, max(room, LEAST_BYTES))
    kept: dict[str, torch.Tensor] = {}
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in made:
        kept[name] = tensor
        if folder == "auto" or tensor.nbytes < LEAST:
            continue
        waiting[name] = tensor
        del tensor
        if sum(one.nbytes for one in waiting.values()) >= most:
            _spill(waiting, kept, folder)
    _spill(waiting, kept, folder)
    return kept


def _spill(waiting: dict[str, torch.Tensor], kept: dict[str, torch.Tensor], folder: str) -> None:
    """Write the tensors ``waiting`` to ``folder``. Put views of the file in their place in ``kept``."""
    if not waiting:
        return
    try:
        written = spill(list(waiting.values()), folder)
    except BudgetError as error:
        raise BudgetError(
            f"ComfyUI's folder of temporary files has no room for weights that were converted while they were loaded: "
            f"{error} on this node. {comfyui_api.OTHER_FOLDER}"
        ) from error
    for name, spilled in zip(waiting, written, strict=True):
        kept[name] = spilled.view
    waiting.clear()
    return_freed_memory()
