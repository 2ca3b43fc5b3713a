"""Defines `PassSnapshot`: decides whether a forward that ran out of memory may run again, and restores its
inputs.

A pass may run again only if everything that it could have changed is as before. Only passes without gradients
are considered. Attributes, buffers and parameters of the module tree are recorded in a session's first
passes, after a change of layout, and for inputs of a new size, because these are the passes in which memory can
run short for the first time; later passes compare with the latest record. Inputs with a version counter must be
unwritten. Inference-mode inputs have no counter: they are copied before the pass and copied back. The contents
of lists and dicts are put back (a UNet pops what a ControlNet passed), and so are random states. A pass is not
run again if its arguments hold other objects than tensors and plain values (a growing cache, for instance), or
if it changed attributes or buffers of a module.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
LIMIT = 64 << 20  # bytes of inference-mode inputs that may be copied in passes that record the module tree
STEADY_LIMIT = 8 << 20  # the same limit in later passes
_HOLD = (dict, list, OrderedDict, defaultdict, deque)  # containers whose contents can be restored
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def sizes(args: tuple, kwargs: dict) -> tuple[Hashable, ...]:
    """Return the shapes of all tensors in a pass's arguments; the memory that a pass needs beside weights
    follows from them."""
    found: list[Hashable] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value.shape)
        elif isinstance(value, (list, tuple, dict)):
            found += [leaf.shape for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(found)


def repeats(read: Any, limit: int = LIMIT) -> bool:
    """Return whether a pass with the arguments ``read`` may run twice.

    All leaves must be tensors or plain values. ``limit``: bytes of inference-mode tensors, which have to be
    copied.
    """
    leaves = tree_leaves(read)
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
        return False
    uncounted = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_inference()]
    return sum(t.numel() * t.element_size() for t in uncounted) <= limit


class ModuleState:
    """A record of the parts of a module that a forward may change: attributes, and versions of buffers and
    plain parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(part, shape(part)) for part in module.modules()]
        buffers = [t for part, _ in self._parts for t in part._buffers.values() if t is not None]
        self.devices = {t.device for t in buffers if t.device.type == "cuda"}
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [
                (tensor, tensor._version)
                for part, _ in self._parts
                for tensor in (*part._buffers.values(), *filter(_is_plain, part._parameters.values()))
                if tensor is not None and not tensor.is_inference()
            ]

    @property
    def unchanged(self) -> bool:
        """Whether the module still equals the record."""
        with torch._C.DisableTorchFunctionSubclass():
            if any(tensor._version != version for tensor, version in self._versions):
                return False
        return all(shape(part) == before for part, before in self._parts)


def _is_plain(parameter: nn.Parameter | None) -> bool:
    """Return whether Carom never writes to the parameter: it neither streams nor is being loaded from a
    file."""
    return type(parameter) is nn.Parameter


class PassSnapshot:
    """The inputs and the module's state before one pass.

    ``read``: the arguments that the pass reads, if not all. ``state``: the module's record from an earlier
    pass, if there is one. ``possible``: whether the pass could run again.
    """

    def __init__(
        self, module: nn.Module, args: tuple, kwargs: dict, read: Any = None, state: ModuleState | None = None
    ) -> None:
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.state = ModuleState(module) if state is None else state
        read = (args, kwargs) if read is None else read
        self.possible = repeats(read, LIMIT if state is None else STEADY_LIMIT)
        if not self.possible:
            return
        tensors = [leaf for leaf in tree_leaves(read) if isinstance(leaf, torch.Tensor)]
        try:
            self._copies = [(t, t.clone()) for t in tensors if t.is_inference()]
        except OutOfMemory:
            self.possible = False
            return
        self._fill = _contents((args, kwargs))
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]
        self._random = torch.get_rng_state()
        devices = self.state.devices | {t.device for t in tensors if t.device.type == "cuda"}
        self._device_random = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def update_module_state(self, module: nn.Module) -> None:
        """Record the module again after the session changed the layout. The pass did not make this change."""
        self.state = ModuleState(module)

    def restore(self) -> bool:
        """Restore inputs, containers and random states. Return False if the pass must not run again."""
        if not self.possible or any(tensor._version != version for tensor, version in self._versions):
            return False
        if not self.state.unchanged:
            return False
        for fill in self._fill:
            fill()
        for tensor, copy in self._copies:
            with torch.inference_mode():
                tensor.copy_(copy)
        torch.set_rng_state(self._random)
        for device, state in self._device_random:
            torch.cuda.set_rng_state(state, device)
        return True


def _contents(arguments: Any) -> list[Callable[[], None]]:
    """Return functions that restore the present contents of every list and dict in ``arguments``, at any
    depth."""
    found: list[Callable[[], None]] = []
    left, seen = [arguments], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen or not (type(one) in _HOLD or isinstance(one, tuple)):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            found.append(partial(_refill, one, one.update, dict(one)))
        elif not isinstance(one, tuple):
            found.append(partial(_refill, one, one.extend, list(one)))
        left += one.values() if isinstance(one, dict) else one
    return found


def _refill(container: Any, fill: Callable, content: Any) -> None:
    """Clear ``container`` and fill it with ``content``."""
    container.clear()
    fill(content)


def shape(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes by identity, and containers by identity and length."""
    tables = [(*map(id, part.values()),) for part in (module._parameters, module._buffers)]
    return {"": tables} | {
        name: (id(value), len(value) if isinstance(value, (list, dict, set)) else value)
        if isinstance(value, (list, dict, set, int, float, str, bool))
        else id(value)
        for name, value in vars(module).items()
    }
