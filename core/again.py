"""Whether a forward that ran out of memory may be run once more: only where everything it could have changed is as it was.

Looked at in a session's first passes, after its layout changed, and with inputs of a size that was not seen before: there memory
runs short for the first time. Without gradients only. Inputs that torch counts writes to must not have been written; those made in inference mode
are copied beforehand and put back; what lists and dicts hold (a UNet pops what a ControlNet gave it) and random states too.
A pass that was given anything but tensors and plain values in them (a cache that grows, say), or that changed a module's
attributes or buffers, is not run again.
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
LIMIT = 64 << 20  # bytes of inputs that are copied
_HOLD = (dict, list, OrderedDict, defaultdict, deque)  # whose contents can be put back
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def sizes(args: tuple, kwargs: dict) -> tuple[Hashable, ...]:
    """Of the tensors given to a pass: what it needs of memory beside the weights follows from these."""
    found: list[Hashable] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value.shape)
        elif isinstance(value, (list, tuple, dict)):
            found += [leaf.shape for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(found)


def repeats(read: Any, limit: int | None = None) -> bool:
    """Whether a pass that reads these arguments may run twice. ``limit``: bytes of those made in inference mode."""
    leaves = tree_leaves(read)
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
        return False
    uncounted = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_inference()]
    return sum(t.numel() * t.element_size() for t in uncounted) <= (LIMIT if limit is None else limit)


class Before:
    """What a pass found, or a unit's forward. ``limit``: bytes of inputs made in inference mode that may be copied;
    ``read``: what it reads of its arguments, where that is not all."""

    def __init__(
        self, module: nn.Module, args: tuple, kwargs: dict, limit: int | None = None, read: Any = None
    ) -> None:
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._modules = [(part, shape(part)) for part in module.modules()]
        read = (args, kwargs) if read is None else read
        self.possible = repeats(read, limit)
        if not self.possible:
            return
        tensors = [leaf for leaf in tree_leaves(read) if isinstance(leaf, torch.Tensor)]
        try:
            self._copies = [(t, t.clone()) for t in tensors if t.is_inference()]
        except OutOfMemory:
            self.possible = False
            return
        self._fill = _contents((args, kwargs))
        for part, _ in self._modules:
            tensors += [t for t in part._buffers.values() if t is not None]
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]
        self._random = torch.get_rng_state()
        devices = {t.device for t in tensors if t.device.type == "cuda"}
        self._device_random = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> bool:
        """Put back what can be; False where the pass must not be run again."""
        if not self.possible or any(tensor._version != version for tensor, version in self._versions):
            return False
        if any(shape(part) != before for part, before in self._modules):
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
    """For every list and dict in ``arguments``, at any depth: puts back what it holds now."""
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
    container.clear()
    fill(content)


def shape(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes: by identity, and containers by their length too."""
    tables = [(*map(id, part.values()),) for part in (module._parameters, module._buffers)]
    return {"": tables} | {
        name: (id(value), len(value) if isinstance(value, (list, dict, set)) else value)
        if isinstance(value, (list, dict, set, int, float, str, bool))
        else id(value)
        for name, value in vars(module).items()
    }
