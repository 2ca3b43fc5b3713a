"""`PreparedPatches`: copies the tensors of patches (LoRA and others) to the device once, not for each weight and step.

ComfyUI applies patches to streamed weights in each step. The tensors of a patch lie in pageable host memory. ComfyUI
copies them to the device for each weight and in each step, and each of these copies blocks the host. Here the places
where ComfyUI keeps the patches of a model get patches whose tensors are on the device already. Tensors for which the
device has no room are copied to pinned memory once. ComfyUI still copies these in each step, and the host does not
wait. The tensors keep their dtype, and ComfyUI casts them on the device, as its dynamic patcher does, so results have
the same bits.

The patches of ComfyUI's patcher, and the adapters in them, do not change: the loader of a LoRA and other models use
them too.
"""

from __future__ import annotations

from collections.abc import Hashable, Set

import torch
from torch import nn

from ..core.streaming.pass_retry import OutOfMemory
from . import comfyui_api
from .patch_places import Place, functions_of, places
from .pinned_tensors import PinnedTensors
from .watched_patches import watch

GRAIN = 512  # bytes to which torch's allocator rounds
_PLAIN = (torch.Tensor, nn.Parameter)


class PreparedPatches:
    """The copies for the patches of one model.

    ``wanted``: bytes of the device copies that `prepare` makes if there is room for all; ``nbytes``: bytes of the copies
    that are on the device; ``room``: the bytes that they were last allowed to take; ``pinned``: the copies in pinned
    host memory.
    """

    def __init__(self) -> None:
        self.wanted = self.nbytes = 0
        self.room: float = 0
        self.pinned = PinnedTensors()
        self._device = torch.device("cpu")
        self._places: list[Place] = []
        # The source stays referred to, so that no other tensor gets its address.
        self._copies: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """Find the patches that ComfyUI's load attached to ``model``.

        Copies that are no longer needed are dropped. The others are used again: they belong to the same tensors, for
        instance under another strength.
        """
        self._device = device
        for function in functions_of(model):
            watch(function)
        self._places = places(model)
        needed: dict[Hashable, torch.Tensor] = {}
        for place in self._places:
            needed |= self._sources(place)
        self._copies = {key: found for key, found in self._copies.items() if key in needed}
        self.pinned.keep(needed)
        self.nbytes = sum(_size(source) for source, _ in self._copies.values())
        self.wanted = sum(map(_size, needed.values()))

    def prepare(self, room: float) -> None:
        """Copy to the device what patches need, weight by weight, as far as all copies take at most ``room`` bytes.

        For weights whose patches have no room, the copies are made in pinned host memory.
        """
        self.room = room
        made: set[Hashable] = set()
        left: dict[Hashable, torch.Tensor] = {}
        with comfyui_api.laying_out():
            for place in self._places:
                new = {key: t for key, t in self._sources(place).items() if key not in self._copies}
                nbytes = sum(map(_size, new.values()))
                if new and self.nbytes + nbytes > room:
                    left |= new
                    continue
                try:
                    copied = {key: (source, self._copy(self._nearest(source))) for key, source in new.items()}
                except OutOfMemory:
                    left |= new
                    room = 0
                    continue
                self._copies |= copied
                self.nbytes += nbytes
                made.update(copied)
            made |= self.pinned.add(left, self._device)
        self._exchange(made)

    def put_aside(self) -> int:
        """Drop the copies on the device and return their bytes. Their tensors are in pinned host memory afterwards.

        From there the next `prepare` copies them without blocking the host. Until then ComfyUI does.
        """
        sources = {key: source for key, (source, _) in self._copies.items()}
        freed = self._drop()
        with comfyui_api.laying_out():
            self.pinned.add(sources, self._device)
        self._exchange(sources.keys())
        return freed

    def release(self) -> int:
        """Drop all copies and return the bytes of those on the device. The places get ComfyUI's patches again."""
        for place in self._places:
            place.restore()
        self.pinned.keep({})
        return self._drop()

    def _drop(self) -> int:
        self._copies.clear()
        freed, self.nbytes = self.nbytes, 0
        return freed

    def _exchange(self, keys: Set[Hashable]) -> None:
        """Let the patches use the copies that exist now. ``keys``: those of the copies that were made or dropped."""
        for place in self._places:
            sources = self._sources(place)
            if not any(key in self._copies or self.pinned.get(key) is not None for key in sources):
                place.restore()
            elif not place.exchanged or not keys.isdisjoint(sources):
                place.exchange(self._nearest)

    def _nearest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of ``tensor`` on the device, else the one in pinned memory, else the tensor."""
        if not self._movable(tensor):
            return tensor
        key = _key(tensor)
        if key in self._copies:
            return self._copies[key][1]
        pinned = self.pinned.get(key)
        return tensor if pinned is None else pinned

    def _sources(self, place: Place) -> dict[Hashable, torch.Tensor]:
        """Return the tensors to copy for ``place``, each by the key of its copy."""
        return {_key(tensor): tensor for tensor in place.tensors() if self._movable(tensor)}

    def _movable(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is to be copied. On the CPU it is, as the session's slots there are copies."""
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_meta:
            return False
        return tensor.device != self._device or self._device.type == "cpu"

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy on the device, as ComfyUI's dynamic patcher makes it."""
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        return copied.copy_(tensor, non_blocking=tensor.is_pinned())


def _key(tensor: torch.Tensor) -> Hashable:
    """Return a key that tensors share only if they have the same values. Valid while the tensor exists."""
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes that a copy of ``tensor`` takes on the device."""
    return -(-tensor.numel() * tensor.itemsize // GRAIN) * GRAIN
