"""Bouncing operators: any operator may use a streamed weight, and its autograd node keeps a handle, not the weight.

Two mechanisms, no list of operators and no list of modules:

*Handles.* While gradients are recorded, a saved-tensor hook replaces whatever an autograd node saves
of a slot (the weight, a transpose, a slice) by a `Handle`: which unit, and where in it. Backward asks
for the unit again and gets the same view of wherever it landed. torch's own kernels and backward
formulas run, so results are the resident run's bit for bit; activations go to whatever hook was
there before (checkpointing's, the user's), in the same order as without Carom, so both kinds of
checkpointing work as they are.

*Bounce.* A streamed parameter's host tensor wears a class whose ``__torch_function__`` sees every
operator that is given it outside its unit's own run (``F.linear(x, other.weight)``, attention's
fused path, a checkpoint inside a block). In a step the operator gets the slot instead; outside one
it is an ordinary host tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .asked import ForOperators
from .deliver import REGISTER_HOOKS, call_when_landed
from .errors import UnsupportedError
from .hooks import quiet, refuse_capture

if TYPE_CHECKING:
    from .backward import Backward
    from .streamed import Owner, Streamed
    from .streamer import Streamer

_hooks_api = torch._C._autograd
_push_hooks = _hooks_api._push_saved_tensors_default_hooks
_pop_hooks = _hooks_api._pop_saved_tensors_default_hooks
_top_hooks = getattr(_hooks_api, "_top_saved_tensors_default_hooks", None)
HANDLES_SUPPORTED = _top_hooks is not None


class Handle:
    """What autograd keeps of a streamed weight: where it is in its unit, never its bytes."""

    __slots__ = ("backward", "unit", "place", "_graph")

    def __init__(self, backward: Backward, unit: Streamed, saved: torch.Tensor, start: int) -> None:
        self.backward, self.unit = backward, unit
        self._graph = unit.in_graphs.token()  # alive for as long as the graph may ask for the unit
        # dtype, shape, stride in elements, start in bytes from the unit's beginning
        self.place = (saved.dtype, saved.shape, saved.stride(), start)


def push_handles(streamer: Streamer) -> None:
    """From here to `pop_handles`, what this thread's autograd nodes save of slots is kept as handles.

    The hooks run for every saved tensor, activations included, so they do next to nothing for those.
    """
    outer: Any = _top_hooks(False) if _top_hooks is not None else None
    low, high, find = streamer.low, streamer.high, streamer.backward.handle
    if outer is None:

        def pack(tensor: torch.Tensor) -> Any:
            try:
                if low <= tensor.data_ptr() < high:
                    return find(tensor)
            except RuntimeError:  # no storage of its own (fake, functional, sparse): no slot's view
                pass
            # A node that keeps its own result with its history would keep itself alive, where no backward ever runs.
            return tensor if tensor.is_leaf else tensor.detach()

        pack._carom = streamer  # type: ignore[attr-defined]
        _push_hooks(pack, _unpack)
        return

    outer_pack, outer_unpack = outer

    def pack_through(tensor: torch.Tensor) -> Any:
        try:
            if low <= tensor.data_ptr() < high:
                return find(tensor)
        except RuntimeError:
            pass
        return outer_pack(tensor)

    def unpack_through(packed: Any) -> Any:
        return packed.backward.unpack(packed) if type(packed) is Handle else outer_unpack(packed)

    pack_through._carom = streamer  # type: ignore[attr-defined]
    _push_hooks(pack_through, unpack_through)


def hooks_are_ours() -> bool:
    """Whether no foreign saved-tensor hook is on top (a checkpoint inside a unit counts what it sees, both times)."""
    top = _top_hooks(False) if _top_hooks is not None else None
    return top is None or getattr(top[0], "_carom", False)


def streaming() -> Streamer | None:
    """The streamer whose handles this thread's autograd nodes keep now; None outside units' runs with gradients."""
    top = _top_hooks(False) if _top_hooks is not None else None
    return None if top is None else getattr(top[0], "_carom", None)


_functorch: Any = getattr(torch._C, "_functorch", None)
_transforms: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", lambda: None)


def refuse_transforms(name: str) -> None:
    """Raises UnsupportedError inside torch.func's grad and jvp, and where a graph is captured: a copy there would be part
    of the function."""
    refuse_capture(name)
    level = _transforms()
    if level is not None and level.key() in (_functorch.TransformType.Grad, _functorch.TransformType.Jvp):
        raise UnsupportedError(
            f"unit {name!r} cannot be fetched inside torch.func.grad or jvp; use backward(), or close the session first"
        )


def pop_handles() -> None:
    _pop_hooks()


def _unpack(packed: Any) -> Any:
    return packed.backward.unpack(packed) if type(packed) is Handle else packed


# -- bounce

_ATTRIBUTES = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point",
    "is_complex", "is_contiguous", "is_signed", "storage_offset", "untyped_storage", "storage", "data_ptr",
    "__len__", "__repr__", "__format__", "__hash__", "requires_grad_", "register_hook", "is_pinned", "pin_memory",
    "register_post_accumulate_grad_hook", "__deepcopy__", "__reduce_ex__", "get_device", "is_inference",
    "is_set_to", "has_names", "is_same_size", "_is_view", "is_shared", "share_memory_", "zero_grad", "is_conj", "is_neg",
}  # fmt: skip
_GIVE_MEMORY = {
    "untyped_storage",
    "storage",
    "numpy",
    "__array__",
    "__dlpack__",
}  # somebody may write to it unseen
_INPLACE = {"__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
))}  # fmt: skip
_VIEW_GETTERS = {
    torch.Tensor.T.__get__, torch.Tensor.mT.__get__, torch.Tensor.H.__get__,  # type: ignore[attr-defined]
    torch.Tensor.mH.__get__, torch.Tensor.real.__get__, torch.Tensor.data.__get__,  # type: ignore[attr-defined]
}  # fmt: skip
_GET_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_GET_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _bounced(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    """What ``func`` does with a streamed tensor: the slot's bytes in a step, the host's outside one."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    streamed = getattr(args[0], "_carom", None) if args else None
    value = isinstance(args[0], Value) if args else False  # what is set of it is not set of the parameter
    if streamed is not None and name in ("__get__", "__set__"):
        streamer = streamed.streamer
        if func in (_GET_DEVICE, _GET_IS_CUDA) and (
            value or not streamed.trainable or streamer.runs.in_forward()
        ):
            # Hosts place inputs by the first parameter's device: say where the model computes. Optimizers place their state by
            # that of what trains: where it is stepped.
            return streamer.engine.device if func == _GET_DEVICE else streamer.engine.device.type == "cuda"
        if func == _SET_DATA and not value:
            return streamed.set_data(args[1])
        if func == _GET_DATA:
            if streamer.runs.computing():
                return value_of(streamed, HostValue)
            streamed.unit.epoch += 1  # may be written through: what is kept is no longer trusted
        if func == _SET_REQUIRES_GRAD and not value:
            streamed.set_trainable(bool(args[1]))
        if func not in _VIEW_GETTERS or not streamer.runs.computing():
            return plain(func, args, kwargs)
    elif name in _ATTRIBUTES:
        if streamed is not None:
            if name == "requires_grad_" and not value:
                streamed.set_trainable(bool((*args, kwargs.get("requires_grad", True))[1]))
            if name in _GIVE_MEMORY:
                streamed.unit.epoch += 1
        result = plain(func, args, kwargs)
        if name in REGISTER_HOOKS and streamed is not None:
            call_when_landed(args[0])
        return result
    leaves = tree_leaves((args, kwargs))
    found = [
        leaf for leaf in leaves if isinstance(leaf, _Bounced) and getattr(leaf, "_carom", None) is not None
    ]
    if not found:
        return plain(func, args, kwargs)
    streamer = found[0]._carom.streamer
    computing = streamer.runs.computing()
    if func is torch.autograd.grad:
        refuse_grad(found)
    if streamer.closed or not (computing or on_device(streamer, leaves)):
        return _plain_outside(func, args, kwargs, name, found)
    if (
        not computing
        and writes(name, kwargs)
        and (streamed is not None or any(kwargs.get("out") is one for one in found))
    ):
        return plain(func, *_on_host(args, kwargs))  # outside a step a weight is where it lives
    return _bounce(streamer, func, args, kwargs, found)


def _plain_outside(func: Callable, args: tuple, kwargs: dict, name: str, found: list) -> Any:
    """``func`` on host tensors. Where it gives their memory away, what is kept of them is no longer trusted."""
    owners = [owner for tensor in found if (owner := getattr(tensor, "_carom", None)) is not None]
    result = plain(func, args, kwargs)  # another thread may close the session meanwhile
    for owner in owners:
        if name in _GIVE_MEMORY or (isinstance(result, torch.Tensor) and _shares(result, owner.host)):
            owner.unit.epoch += 1
    return result


def _shares(tensor: torch.Tensor, host: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in the memory of ``host``."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            start = host.data_ptr()
            return start != 0 and start <= tensor.data_ptr() < start + host.numel() * host.element_size()
        except RuntimeError:  # no storage of its own
            return False


def refuse_grad(found: list) -> None:
    """Raises UnsupportedError for torch.autograd.grad with respect to streamed parameters."""
    for tensor in found:
        if tensor._carom.trainable:
            raise UnsupportedError(
                f"torch.autograd.grad cannot return the gradient of {tensor._carom.entry.name}, which streams: its gradient "
                "arrives in .grad on the host at the end of a backward; call backward(inputs=[...]), or keep the parameter "
                "resident with training='resident'"
            )


def on_device(streamer: Streamer, leaves: list) -> bool:
    """Whether any of an operator's arguments is where the model computes."""
    device = streamer.engine.device
    return device.type != "cpu" and any(
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, _Bounced)
        and leaf.device == device
        and leaf.dim() > 0
        for leaf in leaves
    )


def writes(name: str, kwargs: dict) -> bool:
    """Whether the operator called ``name`` writes to its first argument, or to ``out``."""
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in _INPLACE or kwargs.get("out") is not None


def _on_host(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """``args`` and ``kwargs`` with values that are elsewhere brought to the host."""

    def bring(leaf: Any) -> Any:
        away = isinstance(leaf, torch.Tensor) and not isinstance(leaf, _Bounced) and leaf.device.type != "cpu"
        return leaf.cpu() if away else leaf

    return tree_map(bring, (args, kwargs))


@quiet
def _bounce(streamer: Streamer, func: Callable, args: tuple, kwargs: dict, found: list) -> Any:
    """The streamer at work is no part of a graph: traced, its lists would be changed twice."""
    return streamer.runs.bounce(func, args, kwargs, found)


def plain(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``func`` on the host tensors themselves."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class _Bounced:
    """Marks streamed host tensors; ``_carom`` (an `Owner`) leads to the streamer while attached."""

    _carom: Any

    __torch_function__: Any = ForOperators(_bounced)

    def set_(
        self, *source: Any
    ) -> Any:  # no operator that __torch_function__ sees; `parametrize` assigns by it
        owner = getattr(self, "_carom", None)
        if owner is None:  # one that somebody made of a streamed weight's class
            return plain(torch.Tensor.set_, (self, *source), {})
        if len(source) == 1 and isinstance(source[0], torch.Tensor):
            owner.set_data(source[0])
            return self
        raise UnsupportedError(
            f"{owner.entry.name} is streamed; it cannot be given another storage while attached: close the session first"
        )


class HostParameter(_Bounced, nn.Parameter):
    """The class a streamed Parameter wears while attached; the object stays the same."""

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            copy = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(proto)


class HostTensor(_Bounced, torch.Tensor):
    """The same for buffers."""

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copy = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(proto)


class Value:
    """Marks what ``parameter.data`` gives within a step: the parameter's value, without its gradient."""


class HostValue(HostTensor, Value):
    """The value of a weight that waits in host memory. Operators read and write its slot, as they do of the weight."""


def value_of(owner: Owner, cls: type) -> torch.Tensor:
    """A tensor of class ``cls`` that stands for the value of ``owner``'s weight."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = owner.host.detach()
    tensor.__class__ = cls
    tensor._carom = owner  # type: ignore[attr-defined]
    return tensor


def substitute(args: tuple, kwargs: dict, slots: dict[int, torch.Tensor]) -> tuple[tuple, dict]:
    """``args`` and ``kwargs`` with streamed host tensors replaced by their slots, by identity."""

    def replace(leaf: Any) -> Any:
        return slots.get(id(leaf), leaf)

    return tree_map(replace, (args, kwargs))


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (checkpointing's recomputation included)."""
    return torch._C._current_graph_task_id() != -1
