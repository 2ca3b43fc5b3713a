"""`PinnedTensors`: copies of host tensors in pinned memory, from which copies to the device do not block the host.

Their bytes count as pinned for ComfyUI, whose limit covers ComfyUI and Carom together.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from ..core.common.huge_pages import PAGE
from ..core.device.stream_engine import runtime_pinner
from ..core.host.arena import Block, HostArena, Pinner
from ..core.host.probe import host_memory
from . import comfyui_api

ALIGN = 64  # bytes


class PinnedTensors:
    """The copies, each under the key of its source."""

    def __init__(self) -> None:
        self._arena: HostArena | None = None
        self._device: torch.device | None = None
        # The source stays referred to, so that no other tensor gets its address. The block owns the copy's memory.
        self._held: dict[Hashable, tuple[torch.Tensor, torch.Tensor, Block]] = {}

    @property
    def nbytes(self) -> int:
        """Pinned bytes."""
        return 0 if self._arena is None else self._arena.pinned_bytes

    def get(self, key: Hashable) -> torch.Tensor | None:
        """Return the copy under ``key``, None if there is none."""
        found = self._held.get(key)
        return None if found is None else found[1]

    def add(self, sources: Mapping[Hashable, torch.Tensor], device: torch.device) -> set[Hashable]:
        """Copy the host tensors among ``sources``, for copies to ``device``, as far as ComfyUI's limit and free memory allow.

        Return the keys of the new copies. They share one pinned block.
        """
        new = {k: t for k, t in sources.items() if k not in self._held and t.device.type == "cpu"}
        if not new:
            return set()
        room = min(comfyui_api.pin_room(), host_memory().usable) // PAGE * PAGE
        places: dict[Hashable, int] = {}
        end = 0
        for key, source in new.items():
            size = -(-source.nbytes // ALIGN) * ALIGN
            if end + size <= room:
                places[key], end = end, end + size
        arena = self._arena_for(device) if end else None
        if arena is None or not arena.has_room(end):  # nothing is copied for a pin that would be refused
            return set()
        try:
            block = arena.allocate(end)
        except MemoryError:
            return set()
        if not arena.pin(block):  # before the copies, which would be in vain
            return set()
        made = {}
        for key, start in places.items():
            source = new[key]
            view = block.data[start : start + source.nbytes].view(source.dtype).view(source.shape)
            made[key] = (source, view.copy_(source), block)
        comfyui_api.count_pinned(block.registered_bytes)
        weakref.finalize(block, comfyui_api.count_pinned, -block.registered_bytes).atexit = False
        self._held |= made
        return set(made)

    def keep(self, keys: Mapping[Hashable, object]) -> None:
        """Drop the copies whose keys are not among ``keys``. A block is unpinned with the last of its copies."""
        self._held = {key: found for key, found in self._held.items() if key in keys}

    def _arena_for(self, device: torch.device) -> HostArena:
        if self._arena is None or device != self._device:
            self._arena, self._device = HostArena(pinner_of(device), None), device
        return self._arena


def pinner_of(device: torch.device) -> Pinner | None:
    """Return the functions that pin memory for ``device``, None if it cannot copy from pinned memory."""
    if device.type != "cuda":
        return None
    own = runtime_pinner(device)

    def unregister(address: int) -> None:
        torch.cuda.synchronize(device)  # copies from the memory may be under way
        own.unregister(address)

    return replace(own, unregister=unregister)
