"""Tensor subclasses with `__torch_function__` for streamed weights that have no plain bytes in host memory.

The bytes of such a weight are in a file, or are packed (compressed losslessly) by a codec. The model's
Parameter is then a meta tensor, or the model's own object without its storage. During a step (a forward or
backward pass), operators use the weight's slot, the device memory into which the weight was copied. Outside a
step, the value is read for each operator that needs it. So `state_dict()` of a model larger than RAM takes no
memory until one of its values is used. The home of a weight is the object that reads and writes the weight's
value (home.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..common.errors import UnsupportedError
from . import managed_tensor
from .compiling import quiet
from .home import Home
from .managed_tensor import HostParameter, HostTensor
from .override_queries import ForOperators
from .unread_tensor import Snapshot, UnreadTensor, stays_there, unread, with_values

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
# Queries whose answer is the meta tensor's in `Home.host`. The model's own tensor may have other strides and another
# dtype than the weight (see `refuse_kernels` in placement/given_up_bytes.py).
_LAYOUT_QUERIES = {
    "stride", "is_contiguous", "element_size", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
    "__repr__", "__format__",
}  # fmt: skip
_LAYOUT_GETTERS = {
    _IS_META,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
}
# Queries that lead to the address of the weight's bytes.
_ADDRESS_QUERIES = {"data_ptr", "untyped_storage", "storage", "storage_offset"}


class ElsewhereHome(Home):
    """The home of a weight without plain bytes in host memory: values are read from, and written to, a file
    or packed bytes.
    """

    __slots__ = ()
    has_bytes = False

    def value(self) -> torch.Tensor:
        """Return the tensor that represents the weight in a state dict. Its bytes are read when an operator
        uses it.
        """
        return lazy(self)

    def read(self) -> torch.Tensor:
        """Return the present value of the weight as a new CPU tensor."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot | None:
        """Return the present value, to be read later, or None if this kind of home can only read it now."""
        return None

    def replace(self, value: torch.Tensor) -> None:
        """Store ``value``, which has the weight's shape and dtype and may be on any device, as the weight's
        new value.
        """
        raise NotImplementedError

    def refuse_other_layout(self, value: torch.Tensor) -> None:
        """Raise UnsupportedError if ``value`` has another shape or dtype than the weight."""
        if value.shape != self.host.shape or value.dtype != self.host.dtype:
            raise UnsupportedError(
                f"{self.entry.name} is streamed as {self.host.dtype} {tuple(self.host.shape)}; it cannot become "
                f"{value.dtype} {tuple(value.shape)} while attached: close the session first"
            )

    def change(self, func: Callable, args: tuple, kwargs: dict) -> None:
        """Apply ``func``, an operator that writes to its first argument, to the weight.

        Raises UnsupportedError if this kind of home cannot store the result.
        """
        raise NotImplementedError

    def set_data(self, new: torch.Tensor) -> None:
        """Perform ``parameter.data = new``: store the value of ``new``, unless the weight has this value
        already.

        Raises UnsupportedError while an autograd graph needs the present value.
        """
        given = getattr(new, "_carom", None)
        if given is self:
            _refuse_outdated(new)
            return
        moved = getattr(new, "_unread", None)
        if moved is not None and moved.layout is self.host and moved.current():
            return
        if given is not None:
            new = given.read()
        runtime = self.runtime
        if new.is_meta or runtime.low <= new.data_ptr() < runtime.high:
            return
        if new.device == runtime.device:
            if new.device.type != "cpu" and (new.shape, new.dtype) != (self.host.shape, self.host.dtype):
                return
            # ``new`` has the weight's own shape and dtype and is on the compute device. Either a submodule's
            # .to() moved the unchanged weight there, or the caller computed a new value. The comparison below
            # distinguishes the two cases.
            new = new.cpu()
        if (new.shape, new.dtype) == (self.host.shape, self.host.dtype):
            if new.dim() > 1 and new.is_contiguous() != self.host.is_contiguous():
                raise UnsupportedError(
                    f"{self.entry.name} streams from a file or packed, and its strides cannot change from {self.host.stride()} "
                    f"to {new.stride()}: assign a copy with the same strides, or close the session first"
                )
            if torch.equal(new, self.read()):
                return
        self.refuse_in_graphs()
        self.replace(new)
        self.assignments += 1


def _dispatch_elsewhere(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    """Run ``func`` on a weight without plain bytes in host memory: with the weight's slot during a step, with
    the value read from the file or the packed bytes outside a step.

    Queries of metadata are answered without reading the value.
    """
    kwargs = kwargs or {}
    if UnreadTensor in types:
        return with_values(func, args, kwargs)
    name = getattr(func, "__name__", "")
    # torch.nn.init passes the weight as the keyword argument ``tensor``.
    if not args and isinstance(kwargs.get("tensor"), managed_tensor.ManagedTensor):
        kwargs = dict(kwargs)
        args = (kwargs.pop("tensor"),)
    first = args[0] if args else None
    home = getattr(first, "_carom", None)
    getter = name in ("__get__", "__set__")
    if home is not None and (name in _LAYOUT_QUERIES or (getter and func in _LAYOUT_GETTERS)):
        return managed_tensor.plain(func, (home.host, *args[1:]), kwargs)
    if home is not None and name in _ADDRESS_QUERIES:
        return _answer_by_address(home, func, args, kwargs)
    if name in managed_tensor._ATTRIBUTES or (getter and func not in managed_tensor._VIEW_GETTERS):
        # A detached value, as in a state dict, reports its own device. A streamed weight reports the compute
        # device.
        if isinstance(first, LazyTensor):
            return managed_tensor.plain(func, args, kwargs)
        return managed_tensor._dispatch_managed(cls, func, types, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    for leaf in leaves:
        # This is a resident weight whose bytes are still being read. Load the bytes first.
        if isinstance(leaf, managed_tensor.ManagedTensor) and "_pending" in leaf.__dict__:
            leaf.__dict__["_pending"]()
    ours = [leaf for leaf in leaves if isinstance(leaf, managed_tensor.ManagedTensor)]
    for leaf in ours:
        if "_made_at" in leaf.__dict__:
            _refuse_outdated(leaf)
    found = [leaf._carom for leaf in ours if isinstance(getattr(leaf, "_carom", None), ElsewhereHome)]
    if not found:
        return managed_tensor.plain(func, args, kwargs)
    runtime = found[0].runtime
    written = _written(name, args, kwargs)
    writes = home in written
    if written and not writes and not runtime.closed and not runtime.computing():
        raise UnsupportedError(
            f"{name} would write to {written[0].entry.name}, which streams from a file or packed, and the result would be "
            "lost: compute without out= and without torch._foreach_*_, and give the result to copy_() or session.write()"
        )
    if func == _DATA and home is not None and runtime.computing():
        return _detached(home)
    if not runtime.closed and (
        runtime.computing() or (managed_tensor.on_device(runtime, leaves) and not writes)
    ):
        return managed_tensor._dispatch_managed(cls, func, types, args, kwargs)
    if home is not None and (func == _DATA or name == "detach"):
        return _detached(home)
    if home is not None and stays_there(home.host.dtype, name, args, kwargs):
        if type(first) is AwayTensor:  # `nn.Module.to` puts the result into the module
            return first
        snapshot = home.snapshot()
        if snapshot is not None:
            return unread(snapshot)
    with torch._C.DisableTorchFunctionSubclass():
        if home is not None and writes:
            return _write(home, name, func, args, kwargs)
        values = {id(leaf): leaf._carom.read() for leaf in ours if isinstance(leaf._carom, ElsewhereHome)}
        args, kwargs = managed_tensor.substitute(args, kwargs, values)
    return managed_tensor.plain(func, args, kwargs)


@quiet
def _answer_by_address(home: ElsewhereHome, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Answer a query that leads to the address of the weight's bytes: in a step with the slot's address.

    Raises UnsupportedError for ``data_ptr()`` outside a step, where the bytes have no address.
    """
    runtime = home.runtime
    if not runtime.closed and runtime.computing():
        return managed_tensor.plain(func, (runtime.addressed(args[0]), *args[1:]), kwargs)
    if func is torch.Tensor.data_ptr:
        raise UnsupportedError(
            f"{home.entry.name} streams from a file or packed, and its bytes have no address outside a forward or backward: "
            "read a copy of its value with session.read() or with clone()"
        )
    return managed_tensor.plain(func, args, kwargs)


def _written(name: str, args: tuple, kwargs: dict) -> list[ElsewhereHome]:
    """Return the homes of the weights that the operator called ``name`` writes to: those of ``out``, otherwise
    those of the first argument, which may be a list.
    """
    if not managed_tensor.writes(name, kwargs):
        return []
    out = kwargs.get("out")
    homes = [getattr(leaf, "_carom", None) for leaf in tree_leaves(args[:1] if out is None else out)]
    return [home for home in homes if isinstance(home, ElsewhereHome)]


def _write(home: ElsewhereHome, name: str, func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """Apply ``func``, an in-place operator called ``name``, to the weight of ``home`` and return the weight's
    tensor. The operator is not recorded for autograd.

    Raises UnsupportedError if the operator would make the weight itself, and not ``weight.data``, depend on tensors that
    require gradients.
    """
    if torch.is_grad_enabled() and not isinstance(args[0], managed_tensor.Value):
        operands = tree_leaves((args[1:], kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in operands):
            raise UnsupportedError(
                f"{name} would make {home.entry.name}, which streams from a file or packed, part of an autograd graph: "
                "apply it to weight.data or under torch.no_grad()"
            )
    with torch.no_grad():
        return _write_value(home, name, func, args, kwargs)


def _write_value(home: ElsewhereHome, name: str, func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """Do the work of `_write` where no gradients are recorded."""
    if name == "copy_" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        source = getattr(args[1], "_carom", None)
        value = source.read() if isinstance(source, ElsewhereHome) else args[1]
        home.replace(value.to(home.host.dtype).expand(home.host.shape))
    else:
        home.change(func, args, kwargs)
    return args[0]


def lazy(home: ElsewhereHome) -> torch.Tensor:
    """Return a tensor that represents the weight's value in a state dict. The value is read when an operator
    uses the tensor.
    """
    return managed_tensor.value_of(home, LazyTensor)


def _detached(home: ElsewhereHome) -> torch.Tensor:
    """Return the result of ``parameter.data``: a tensor of `lazy` that is outdated once ``parameter.data`` is replaced."""
    tensor = lazy(home)
    tensor._made_at = home.assignments  # type: ignore[attr-defined]
    return tensor


def _refuse_outdated(tensor: Any) -> None:
    """Raise UnsupportedError if ``tensor``, a result of `_detached`, stands for a value that is gone."""
    home = tensor._carom
    if tensor.__dict__.get("_made_at", home.assignments) != home.assignments:
        raise UnsupportedError(
            f"{home.entry.name} streams from a file or packed, and its .data was replaced after this tensor was taken from it, "
            "so the former value is gone: keep a copy (.data.clone()), or stream from memory with codec='raw'"
        )


class AwayParameter(HostParameter):
    """The class of a Parameter whose value is in a file or packed, while a session streams the module."""

    __torch_function__: Any = ForOperators(_dispatch_elsewhere)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        copy = nn.Parameter(self._carom.read(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return nn.Parameter(self._carom.read(), self.requires_grad).__reduce_ex__(proto)


class AwayTensor(HostTensor):
    """The class of a buffer whose value is in a file or packed, while a session streams the module."""

    __torch_function__: Any = ForOperators(_dispatch_elsewhere)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copy = self._carom.read()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._carom.read().__reduce_ex__(proto)


class LazyTensor(AwayTensor, managed_tensor.Value):
    """A detached weight value in a state dict. The value is read when an operator uses the tensor."""
