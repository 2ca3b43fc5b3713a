"""A TorchDispatchMode that shows every operator of a step to the simulated device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class DispatchWatch:
    """Shows every operator that runs within `step`, on any thread, to two functions.

    ``check(operator, tensors)``: called before the operator runs; returns whether any of its tensors is on the
    device. ``account(operator, args, kwargs, result, on_device)``: called after an operator that is no view;
    ``on_device`` is the value that ``check`` returned for the operator.
    """

    def __init__(self, check: Callable[..., bool], account: Callable[..., None]) -> None:
        self.check, self.account = check, account
        self._local = threading.local()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return a context in which operators of this thread are shown."""
        if getattr(self._local, "watching", False):
            yield
            return
        self._local.watching = True
        try:
            with _Mode(self):
                yield
        finally:
            self._local.watching = False

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Return a context in which this thread's operators are not shown."""
        before = self.suspended
        self._local.suspended = True
        try:
            with _disable_current_modes():  # each operator that a mode sees takes many times as long
                yield
        finally:
            self._local.suspended = before

    @property
    def suspended(self) -> bool:
        """Whether this thread is inside `unwatched`."""
        return getattr(self._local, "suspended", False)


class _HigherOrderCall:
    """A higher-order operator (flex_attention), shown as one operator that writes to none of its
    arguments.
    """

    is_view = False
    _schema = SimpleNamespace(is_mutable=False)

    def __init__(self, func: HigherOrderOperator) -> None:
        self._overloadpacket = func

    def __str__(self) -> str:
        return str(self._overloadpacket)


class _Mode(TorchDispatchMode):
    """The dispatch mode of a `DispatchWatch`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: keep the mode active while torch.compile runs."""
        return True

    def __init__(self, watch: DispatchWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watch = self._watch
        if watch.suspended:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            seen = _HigherOrderCall(func) if isinstance(func, HigherOrderOperator) else func
            on_device = watch.check(seen, _tensors((*args, *kwargs.values())))
        result = func(*args, **kwargs)
        if not seen.is_view:
            watch.account(seen, args, kwargs, result, on_device)
        return result


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the plain tensors among an operator's arguments, lists of tensors included."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if plain(value):
                found.append(value)
        elif isinstance(value, (list, tuple, dict)):  # nested deeper for higher-order operators only
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and plain(t)]
    return found


def plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has CPU storage of its own; wrapper subclasses have none."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    own = dispatch is None or dispatch is torch._C._disabled_torch_dispatch_impl
    return own and tensor.device.type == "cpu" and tensor.layout == torch.strided
