"""Every operator of a step seen: what the simulated device looks on through."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watched:
    """Base of an engine that is told of the operators between the beginning and the end of a step, on any thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def _operator(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """``func`` is about to run on ``tensors``; returns whether any of them is on the device."""
        raise NotImplementedError

    def _spend(self, func: Any, args: Any, kwargs: Any, result: Any, on_device: bool) -> None:
        """``func``, which is no view, has run; ``on_device``: as `_operator` said."""
        raise NotImplementedError

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What this thread computes inside is seen."""
        if getattr(self._local, "watching", False):
            yield
            return
        self._local.watching = True
        try:
            with _Watch(self):
                yield
        finally:
            self._local.watching = False

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """The engine's own work is not the model's."""
        before = getattr(self._local, "quiet", False)
        self._local.quiet = True
        try:
            yield
        finally:
            self._local.quiet = before


class _Whole:
    """An operator of higher order (flex_attention), as an engine is told of it: as one operator, which writes to nothing."""

    is_view = False
    _schema = SimpleNamespace(is_mutable=False)

    def __init__(self, func: HigherOrderOperator) -> None:
        self._overloadpacket = func

    def __str__(self) -> str:
        return str(self._overloadpacket)


class _Watch(TorchDispatchMode):
    """Sees every operator of a step."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, engine: Watched) -> None:
        super().__init__()
        self._engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        engine = self._engine
        if getattr(engine._local, "quiet", False):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            seen = _Whole(func) if isinstance(func, HigherOrderOperator) else func
            on_device = engine._operator(seen, _tensors((*args, *kwargs.values())))
        result = func(*args, **kwargs)
        if not seen.is_view:
            engine._spend(seen, args, kwargs, result, on_device)
        return result


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """What an operator reads: its arguments are tensors, lists of tensors and plain values."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if plain(value):
                found.append(value)
        elif isinstance(value, (list, tuple, dict)):  # (nested for operators of higher order only)
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and plain(t)]
    return found


def plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has CPU storage of its own (wrapper subclasses have not)."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    own = dispatch is None or dispatch is torch._C._disabled_torch_dispatch_impl
    return own and tensor.device.type == "cpu" and tensor.layout == torch.strided
