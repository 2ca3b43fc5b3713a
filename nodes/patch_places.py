"""`places`: where ComfyUI keeps the patches that a model applies in each step.

A place is a function of a module that patches a weight on the fly (`LowVramPatch`), or the attribute ``patches`` of a
weight whose own class patches it (ComfyUI-GGUF). In both cases the patches can be exchanged for others, and back.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .quantized_weights import attributes_of, parameter_names

FUNCTIONS = ("weight_function", "bias_function")  # attributes of ComfyUI's modules: lists of patch functions
_OWN = "_carom_own_patches"  # key beside exchanged patches: (the patches that ComfyUI put there, those in their place)
Change = Callable[[torch.Tensor], torch.Tensor]


class Place:
    """One place. ``find``: returns the dict with the patches under the key "patches", None if the place is gone."""

    def __init__(self, find: Callable[[], dict[str, Any] | None]) -> None:
        self._find = find

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of ComfyUI's patches."""
        held = self._find()
        if held is not None:
            for entry in _entries(held, _own(held)):
                yield from _tensors(entry[1])

    @property
    def exchanged(self) -> bool:
        """Whether other patches are there than ComfyUI's."""
        held = self._find()
        return held is not None and _own(held) is not held["patches"]

    def exchange(self, change: Change) -> None:
        """Put patches there in which ``change`` was applied to each tensor of ComfyUI's patches."""
        held = self._find()
        if held is not None:
            own, key = _own(held), held.get("key")
            new = {key: _changed(own[key], change)} if isinstance(own, dict) else _changed(own, change)
            held["patches"], held[_OWN] = new, (own, new)

    def restore(self) -> None:
        """Put ComfyUI's patches there again."""
        held = self._find()
        if held is not None and _OWN in held:
            held["patches"] = _own(held)
            del held[_OWN]


def functions_of(model: nn.Module) -> Iterator[Any]:
    """Yield the functions of ``model`` that apply the patcher's patches to a weight."""
    for module in model.modules():
        for name in FUNCTIONS:
            for function in module.__dict__.get(name) or ():
                patches = getattr(function, "patches", None)
                if isinstance(patches, dict) and getattr(function, "key", None) in patches:
                    yield function


def places(model: nn.Module) -> list[Place]:
    """Return the places of ``model``. They do not keep the functions and modules alive, which ComfyUI owns."""
    found = [Place(_function_finder(weakref.ref(function))) for function in functions_of(model)]
    for module in model.modules():
        for name in parameter_names(module):
            find = _weight_finder(weakref.ref(module), name)
            if find() is not None:
                found.append(Place(find))
    return found


def _function_finder(reference: weakref.ref[Any]) -> Callable[[], dict[str, Any] | None]:
    def find() -> dict[str, Any] | None:
        function = reference()
        return None if function is None else function.__dict__

    return find


def _weight_finder(reference: weakref.ref[nn.Module], name: str) -> Callable[[], dict[str, Any] | None]:
    def find() -> dict[str, Any] | None:
        module = reference()
        held = None if module is None else attributes_of(module, name)
        return held if held and isinstance(held.get("patches"), list) else None

    return find


def _own(held: dict[str, Any]) -> Any:
    """Return the patches that ComfyUI put there: those from before the exchange, or others that it put there since."""
    own, new = held.get(_OWN, (None, None))
    return own if new is held["patches"] else held["patches"]


def _entries(held: dict[str, Any], own: Any) -> Iterator[tuple]:
    """Yield the entries (strength, patch and more) of patches: of a dict by weight, or of a weight's own list."""
    for entry in own.get(held["key"], ()) if isinstance(own, dict) else own:
        if isinstance(entry[0], list):  # ComfyUI-GGUF: the weight's entries, and its name
            yield from entry[0]
        else:
            yield entry


def _changed(entries: list, change: Change) -> list:
    """Return a copy of ``entries`` with ``change`` applied to the tensors of their patches."""
    return [
        (_changed(entry[0], change), *entry[1:])
        if isinstance(entry[0], list)
        else (entry[0], _map(entry[1], change), *entry[2:])
        for entry in entries
    ]


def _tensors(patch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors to which `_map` applies its function."""
    if isinstance(patch, torch.Tensor):
        yield patch
    elif type(patch) is tuple:
        for part in patch:
            yield from _tensors(part)
    elif isinstance(patch, list):
        for entry in patch[1:]:
            yield from _tensors(entry[1])
    elif _is_adapter(patch):
        for part in patch.weights:
            yield from _tensors(part)


def _map(patch: Any, change: Change) -> Any:
    """Return ``patch`` with ``change`` applied to its tensors: in nested tuples and in the weights of an adapter.

    A list (merges) begins with the whole weight of another model, which stays as it is: its own patcher manages it. The
    entries of the patches of that weight follow.
    """
    if isinstance(patch, torch.Tensor):
        return change(patch)
    if type(patch) is tuple:
        return tuple(_map(part, change) for part in patch)
    if isinstance(patch, list):
        return [*patch[:1], *_changed(patch[1:], change)]
    if _is_adapter(patch):
        changed = copy.copy(patch)
        changed.weights = type(patch.weights)(_map(part, change) for part in patch.weights)
        return changed
    return patch


def _is_adapter(patch: Any) -> bool:
    return isinstance(getattr(patch, "weights", None), (tuple, list)) and hasattr(patch, "calculate_weight")
