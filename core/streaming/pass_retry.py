"""Defines `PassSnapshot`: decides whether a forward that failed for want of device memory may run again, and restores
its inputs.

A pass (a forward of the root module) may run again only if everything that it could have changed is as
before. Passes that record gradients never run again. Attributes, buffers and parameters of the module tree
are recorded in three cases: in a session's first passes, after a change of layout, and for inputs of a new
size. Memory can run short for the first time in these cases. Other passes compare with the latest record.
Inputs with a version counter must not have been written to. Inference-mode inputs have no version counter, so
they are copied before the pass, and the copies are written back. The contents of lists and dicts are restored
(a UNet pops what a ControlNet passed), and so are the states of random generators. A pass is not run again if
its arguments contain other objects than tensors and plain values (a growing cache, for instance), or if it
changed attributes of a module, their contents, or buffers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
LIMIT = 64 << 20  # bytes of inference-mode inputs that may be copied in the first passes of a layout
STEADY_LIMIT = 8 << 20  # the same limit where every pass is copied
_HOLD = (dict, list, OrderedDict, defaultdict, deque)  # containers whose contents can be restored
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Limits of `_describe`: levels, entries of a container, objects.
_DEPTH, _MOST, _MOST_SEEN = 4, 64, 10_000
_PACKAGE = __name__.partition(".core.")[0] + "."
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def sizes(args: tuple, kwargs: dict) -> tuple[Hashable, ...]:
    """Return the shapes of all tensors in the arguments of a pass. The memory that a pass needs beside
    weights depends on these shapes.
    """
    found: list[Hashable] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value.shape)
        elif isinstance(value, (list, tuple, dict)):
            found += [leaf.shape for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(found)


def repeats(read: Any, limit: int = LIMIT) -> bool:
    """Return whether a pass may run twice, as far as the arguments ``read`` that it reads are concerned.

    All leaves must be tensors or plain values.
    ``limit``: the most bytes of inference-mode tensors, which have to be copied.
    """
    leaves = tree_leaves(read)
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
        return False
    uncounted = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_inference()]
    return sum(t.numel() * t.element_size() for t in uncounted) <= limit


class ModuleState:
    """A record of those parts of a module that a forward may change: attributes and their contents, and
    version counters of buffers and plain parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        seen: set[int] = set()
        self._parts = [(part, shape(part, seen)) for part in module.modules()]
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
        seen: set[int] = set()
        return all(shape(part, seen) == before for part, before in self._parts)


def _is_plain(parameter: nn.Parameter | None) -> bool:
    """Return whether Carom never writes to the parameter. Carom writes to parameters that stream or are being
    loaded from a file.
    """
    return type(parameter) is nn.Parameter


class PassSnapshot:
    """The inputs of one pass, and the state of the module before the pass.

    ``read``: the arguments that the pass reads, if it does not read all.
    ``state``: the record of the module from an earlier pass, if there is one.
    ``limit``: the most bytes of inference-mode tensors that are copied, `LIMIT` by default.
    ``possible``: whether the pass could run again.
    """

    def __init__(
        self, module: nn.Module, args: tuple, kwargs: dict, read: Any = None, state: ModuleState | None = None,
        limit: int | None = None,
    ) -> None:  # fmt: skip
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.state = ModuleState(module) if state is None else state
        read = (args, kwargs) if read is None else read
        self.possible = repeats(read, LIMIT if limit is None else limit)
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
        """Record the module again. Called after the session has changed the layout, because the pass did not
        cause that change.
        """
        self.state = ModuleState(module)

    def restore(self) -> bool:
        """Restore inputs, containers and random states. Returns False if the pass must not run again."""
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
    """Return a function for each list and dict in ``arguments``, at any depth, that restores its present
    contents.
    """
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


def shape(module: nn.Module, seen: set[int]) -> dict[str, Any]:
    """Return a description of a module's own attributes. If a forward changes an attribute, a new description
    differs.

    ``seen``: ids of the objects that were described already. Each object is described once.
    """
    tables = [(*map(id, part.values()),) for part in (module._parameters, module._buffers)]
    return {"": tables} | {
        name: (id(value), len(value))
        if name in _OF_EVERY_MODULE and isinstance(value, dict)
        else _describe(value, _DEPTH, seen)
        for name, value in list(
            vars(module).items()
        )  # another thread may park the session, which sets forwards
    }


def _describe(value: Any, depth: int, seen: set[int]) -> Any:
    """Return a description of ``value``: plain values as they are, tensors by version counter, containers and
    objects by their contents.

    Other modules, functions and Carom's own objects are described by identity, and so is everything that is
    nested more than ``depth`` levels deep. Of large containers, the first `_MOST` entries are described.
    """
    if isinstance(value, PLAIN):
        return (value,)
    if type(value) in (torch.Tensor, nn.Parameter):
        return (id(value), None if value.is_inference() else value._version)
    kept = isinstance(value, (list, tuple, dict, set, deque))
    brief = (id(value), len(value) if kept else None)
    if depth == 0 or id(value) in seen or len(seen) >= _MOST_SEEN or callable(value):
        return brief
    if isinstance(value, (nn.Module, set)) or type(value).__module__.startswith(_PACKAGE):
        return brief
    seen.add(id(value))
    contents = value if kept else getattr(value, "__dict__", ())
    inner = contents.values() if isinstance(contents, dict) else contents
    return (*brief, [_describe(each, depth - 1, seen) for each in list(islice(inner, _MOST))])
