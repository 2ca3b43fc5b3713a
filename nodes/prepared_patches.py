"""`PreparedPatches`: copies the tensors of patches (LoRA and others) to the device once, not for each weight and step.

ComfyUI applies patches to streamed weights in each step. The tensors of a patch lie in pageable host memory. ComfyUI
copies them to the device for each weight and in each step, and each of these copies blocks the host. Here the patch
functions that ComfyUI attached to a model's modules get patches whose tensors are on the device already. The tensors
keep their dtype, and ComfyUI casts them there, as its dynamic patcher does, so results have the same bits.

The patches of ComfyUI's patcher, and the adapters in them, do not change: the loader of a LoRA and other models use
them too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from ..core.streaming.pass_retry import OutOfMemory
from . import comfyui_api
from .watched_patches import watch

FUNCTIONS = ("weight_function", "bias_function")  # attributes of ComfyUI's modules: lists of patch functions
GRAIN = 512  # bytes to which torch's allocator rounds
_PLAIN = (torch.Tensor, nn.Parameter)
_OWN = "_carom_own_patches"  # attribute of a function with prepared patches: the patches that ComfyUI gave it


class PreparedPatches:
    """The copies on the device for the patches of one model.

    ``wanted``: bytes of the copies that `prepare` makes if there is room for all; ``nbytes``: bytes of the copies that
    are on the device; ``room``: the bytes that they were last allowed to take.
    """

    def __init__(self) -> None:
        self.wanted = self.nbytes = 0
        self.room: float = 0
        self._device = torch.device("cpu")
        # ComfyUI owns the functions, which refer to the tensors of the patcher's patches.
        self._functions: list[weakref.ref] = []
        # The source stays referred to, so that no other tensor gets its address.
        self._copies: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """Find the patch functions that ComfyUI's load attached to ``model``.

        Copies that are no longer needed are dropped. The others are used again: they belong to the same tensors, for
        instance under another strength.
        """
        self._device = device
        functions = list(_functions(model))
        for function in functions:
            watch(function)
        self._functions = [weakref.ref(function) for function in functions]
        needed: dict[Hashable, torch.Tensor] = {}
        for function in functions:
            needed |= self._sources(function)
        self._copies = {key: found for key, found in self._copies.items() if key in needed}
        self.nbytes = sum(_size(source) for source, _ in self._copies.values())
        self.wanted = sum(map(_size, needed.values()))

    def prepare(self, room: float) -> None:
        """Copy to the device what patches need, weight by weight, as far as all copies take at most ``room`` bytes.

        For weights whose patches have no room, ComfyUI copies them in each step.
        """
        self.room = room
        with comfyui_api.laying_out():
            for reference in self._functions:
                function = reference()
                if function is None or _OWN in function.__dict__:
                    continue
                new = {key: t for key, t in self._sources(function).items() if key not in self._copies}
                nbytes = sum(map(_size, new.values()))
                if new and self.nbytes + nbytes > room:
                    continue
                try:
                    made = {key: (source, self._copy(source)) for key, source in new.items()}
                except OutOfMemory:
                    break
                self._copies |= made
                self.nbytes += nbytes
                own = function.__dict__[_OWN] = function.patches
                function.patches = {function.key: [self._entry(entry) for entry in own[function.key]]}

    def release(self) -> int:
        """Drop all copies and return their bytes. The functions get ComfyUI's patches again."""
        for reference in self._functions:
            function = reference()
            if function is not None and _OWN in function.__dict__:
                function.patches = function.__dict__.pop(_OWN)
        self._copies.clear()
        freed, self.nbytes = self.nbytes, 0
        return freed

    def _sources(self, function: Any) -> dict[Hashable, torch.Tensor]:
        """Return the tensors to copy for ``function``, each by the key of its copy."""
        own = function.__dict__.get(_OWN, function.patches)
        found: dict[Hashable, torch.Tensor] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if self._movable(tensor):
                found[_key(tensor)] = tensor
            return tensor

        for entry in own[function.key]:
            _map(entry[1], note)
        return found

    def _entry(self, entry: tuple) -> tuple:
        """Return a copy of ``entry`` (strength, patch and more) with the tensors of its patch on the device."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return self._copies[_key(tensor)][1] if self._movable(tensor) else tensor

        return (entry[0], _map(entry[1], copied), *entry[2:])

    def _movable(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is to be copied. On the CPU it is, as the session's slots there are copies."""
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_meta:
            return False
        return tensor.device != self._device or self._device.type == "cpu"

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy on the device, as ComfyUI's dynamic patcher makes it."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device).copy_(tensor)


def _functions(model: nn.Module) -> Iterator[Any]:
    """Yield the functions of ``model`` that apply the patcher's patches to a weight."""
    for module in model.modules():
        for name in FUNCTIONS:
            for function in module.__dict__.get(name) or ():
                patches = getattr(function, "patches", None)
                if isinstance(patches, dict) and getattr(function, "key", None) in patches:
                    yield function


def _map(patch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``patch`` with ``change`` applied to its tensors: in nested tuples and in the weights of an adapter.

    Lists stay as they are: they refer to whole weights of another model (merges), which its own patcher manages.
    """
    if isinstance(patch, torch.Tensor):
        return change(patch)
    if type(patch) is tuple:
        return tuple(_map(part, change) for part in patch)
    weights = getattr(patch, "weights", None)
    if isinstance(weights, (tuple, list)) and hasattr(patch, "calculate_weight"):
        changed = copy.copy(patch)
        changed.weights = type(weights)(_map(part, change) for part in weights)
        return changed
    return patch


def _key(tensor: torch.Tensor) -> Hashable:
    """Return a key that tensors share only if they have the same values. Valid while the tensor exists."""
    version = 0 if tensor.is_inference() else tensor._version
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes that a copy of ``tensor`` takes on the device."""
    return -(-tensor.numel() * tensor.itemsize // GRAIN) * GRAIN
