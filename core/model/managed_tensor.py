"""Tensor subclasses with `__torch_function__` for streamed weights, and saved-tensor hooks that save handles
of these weights.

A streamed weight belongs to a unit, a group of tensors that are copied together into a slot (reused device
memory) when the unit's forward runs. There are two mechanisms. Neither has a list of operators or of modules.

*Handles.* While gradients are recorded, a saved-tensor hook replaces every slot view that an autograd node
saves (the weight, a transpose, a slice) by a `Handle`, which names the unit and the position of the view in
the unit. In backward, the unit is copied to a slot again, and the handle is replaced by the same view of the
new slot. torch's own kernels and backward formulas run, so results equal those of a model that stays on the
device, bit for bit. Activations are passed to the saved-tensor hook that was active before (of checkpointing
or the user), in the same order as without Carom, so both kinds of checkpointing work unchanged.

*Operators outside the unit's forward.* The host tensor of a streamed parameter has a class whose
``__torch_function__`` sees every operator that gets the tensor as an argument outside the unit's own forward
(``F.linear(x, other.weight)``, attention's fused path, a checkpoint inside a block). During a step (a forward
or backward pass), the operator runs with the weight's slot instead. Outside a step, the tensor is an ordinary
host tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..common.errors import UnsupportedError
from .compiling import quiet
from .gradient_hooks import REGISTER_HOOKS, delay_hooks
from .interpose import refuse_capture
from .new_parameter import MakesParameters
from .override_queries import ForOperators
from .unread_tensor import UnreadTensor, with_values

if TYPE_CHECKING:
    from .home import Home, Runtime, SlotRange

_hooks_api = torch._C._autograd
_push_hooks = _hooks_api._push_saved_tensors_default_hooks
_pop_hooks = _hooks_api._pop_saved_tensors_default_hooks
_top_hooks = getattr(_hooks_api, "_top_saved_tensors_default_hooks", None)
HANDLES_SUPPORTED = _top_hooks is not None


class Unpacks(Protocol):
    """The interface of the object that gives saved tensors back to autograd: the streamer's `Backward`."""

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Return the tensor that ``handle`` represents, on the device."""


class Handle:
    """The object that autograd saves instead of a view of a streamed weight: the view's position in its unit.

    ``source``: the object that unpacks the handle.
    ``unit``: the unit, in the form that ``source`` uses.
    ``place``: dtype, shape, strides, and offset in the unit in bytes.
    ``_token``: an object whose references show that a graph may need the unit.
    """

    __slots__ = ("source", "unit", "place", "_token")

    def __init__(self, source: Unpacks, unit: Any, token: Any, saved: torch.Tensor, start: int) -> None:
        self.source, self.unit, self._token = source, unit, token
        # dtype, shape, strides in elements, offset in bytes from the start of the unit
        self.place = (saved.dtype, saved.shape, saved.stride(), start)


def in_slots(slots: SlotRange, address: int) -> bool:
    """Return whether ``address`` is in a slot."""
    return slots.low <= address < slots.high


def push_handles(slots: SlotRange) -> None:
    """Push saved-tensor hooks on this thread that save views of ``slots`` as handles. `pop_handles` pops the
    hooks.

    The hooks run for every saved tensor, activations included, so they do almost nothing for tensors outside
    the slots.
    """
    outer: Any = _top_hooks(False) if _top_hooks is not None else None
    low, high, find = slots.low, slots.high, slots.handle
    if outer is None:

        def pack(tensor: torch.Tensor) -> Any:
            try:
                address = tensor.data_ptr()
                if low <= address < high:
                    return find(tensor)
            # a tensor without storage (fake, functional, sparse), or a weight without an address, is no view of a slot
            except (RuntimeError, UnsupportedError):
                pass
            # If a node saved its own result together with the result's grad_fn, the node would keep itself
            # alive unless a backward runs.
            return tensor if tensor.is_leaf else tensor.detach()

        pack._carom = slots  # type: ignore[attr-defined]
        _push_hooks(pack, _unpack)
        return

    outer_pack, outer_unpack = outer

    def pack_through(tensor: torch.Tensor) -> Any:
        try:
            address = tensor.data_ptr()
            if low <= address < high:
                return find(tensor)
        except (RuntimeError, UnsupportedError):
            pass
        return outer_pack(tensor)

    def unpack_through(packed: Any) -> Any:
        return packed.source.unpack(packed) if type(packed) is Handle else outer_unpack(packed)

    pack_through._carom = slots  # type: ignore[attr-defined]
    _push_hooks(pack_through, unpack_through)


def hooks_are_ours() -> bool:
    """Return whether the topmost saved-tensor hooks of this thread are Carom's, or there are no hooks.

    The answer is False inside a checkpoint within a unit: the checkpoint pushes hooks of its own, and counts
    the tensors that they see in forward and in recomputation.
    """
    top = _top_hooks(False) if _top_hooks is not None else None
    return top is None or getattr(top[0], "_carom", False)


def streaming() -> SlotRange | None:
    """Return the `SlotRange` of the streamer whose hooks are topmost on this thread.

    Returns None outside the forwards of units, and where no gradients are recorded.
    """
    top = _top_hooks(False) if _top_hooks is not None else None
    return None if top is None else getattr(top[0], "_carom", None)


_functorch: Any = getattr(torch._C, "_functorch", None)
transforms: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", lambda: None)


def refuse_transforms(name: str) -> None:
    """Raise UnsupportedError inside torch.func.grad and jvp, and while a graph is captured. ``name``: the
    unit's name, for the message.

    The copy into a slot would become part of the differentiated or captured function.
    """
    refuse_capture(name)
    level = transforms()
    if level is not None and level.key() in (_functorch.TransformType.Grad, _functorch.TransformType.Jvp):
        raise UnsupportedError(
            f"unit {name!r} cannot be fetched inside torch.func.grad or jvp; use backward(), or close the session first"
        )


def pop_handles(slots: SlotRange) -> None:
    """Pop the saved-tensor hooks that `push_handles` pushed for ``slots``, unless an interrupted pass has popped
    them already.
    """
    top = _top_hooks(False) if _top_hooks is not None else None
    if _top_hooks is None or (top is not None and getattr(top[0], "_carom", None) is slots):
        _pop_hooks()


def pop_left_handles(slots: SlotRange) -> None:
    """Pop all saved-tensor hooks that an interrupted pass left on this thread for ``slots``."""
    while _top_hooks is not None and streaming() is slots:
        _pop_hooks()


def _unpack(packed: Any) -> Any:
    """Return the tensor that autograd saved as ``packed``: a handle's tensor, or ``packed`` itself."""
    return packed.source.unpack(packed) if type(packed) is Handle else packed


# -- operators that use a streamed weight outside its unit's forward

_ATTRIBUTES = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point",
    "is_complex", "is_contiguous", "is_signed", "storage_offset", "untyped_storage", "storage", "data_ptr",
    "__len__", "__repr__", "__format__", "__hash__", "requires_grad_", "register_hook", "is_pinned", "pin_memory",
    "register_post_accumulate_grad_hook", "__deepcopy__", "__reduce_ex__", "get_device", "is_inference",
    "is_set_to", "has_names", "is_same_size", "_is_view", "is_shared", "share_memory_", "zero_grad", "is_conj", "is_neg",
}  # fmt: skip
# Methods that give access to the tensor's memory, which the caller may then change without torch noticing.
_EXPOSES_MEMORY = {
    "untyped_storage",
    "storage",
    "numpy",
    "__array__",
    "__dlpack__",
}
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


def _dispatch_managed(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    """Run ``func`` with the weight's slot during a step, with the weight's host tensor outside a step."""
    kwargs = kwargs or {}
    if UnreadTensor in types:
        return with_values(func, args, kwargs)
    name = getattr(func, "__name__", "")
    streamed = getattr(args[0], "_carom", None) if args else None
    # Attributes set on a detached value do not apply to the parameter.
    value = isinstance(args[0], Value) if args else False
    if streamed is not None and name in ("__get__", "__set__"):
        runtime = streamed.runtime
        if func in (_GET_DEVICE, _GET_IS_CUDA) and (value or not streamed.trainable or runtime.in_forward()):
            # Programs move inputs to the device of the first parameter, so a frozen weight reports the
            # compute device. Optimizers allocate their state on the parameter's device, so a trainable weight
            # reports the CPU, where the optimizer updates it.
            return runtime.device if func == _GET_DEVICE else runtime.device.type == "cuda"
        if func == _SET_DATA and not value:
            return streamed.set_data(args[1])
        if func == _GET_DATA:
            if runtime.computing():
                return value_of(streamed, HostValue)
            # The caller may write through .data unnoticed, so mark copies of the host bytes as outdated.
            streamed.unit.epoch += 1
        if func == _SET_REQUIRES_GRAD and not value:
            streamed.set_trainable(bool(args[1]))
        if func not in _VIEW_GETTERS or not runtime.computing():
            return plain(func, args, kwargs)
    elif name in _ATTRIBUTES:
        if streamed is not None:
            if name == "requires_grad_" and not value:
                streamed.set_trainable(bool((*args, kwargs.get("requires_grad", True))[1]))
            if name in _EXPOSES_MEMORY:
                streamed.unit.epoch += 1
        result = plain(func, args, kwargs)
        if name in REGISTER_HOOKS and streamed is not None:
            delay_hooks(args[0])
        return result
    leaves = tree_leaves((args, kwargs))
    found = [
        leaf
        for leaf in leaves
        if isinstance(leaf, ManagedTensor) and getattr(leaf, "_carom", None) is not None
    ]
    if not found:
        return plain(func, args, kwargs)
    runtime = found[0]._carom.runtime
    computing = runtime.computing()
    if func is torch.autograd.grad:
        refuse_grad(found)
    if runtime.closed or not (computing or on_device(runtime, leaves)):
        return _run_on_host(func, args, kwargs, name, found)
    if (
        not computing
        and writes(name, kwargs)
        and (streamed is not None or any(kwargs.get("out") is tensor for tensor in found))
    ):
        # Outside a step a write goes to the weight in host memory.
        return plain(func, *_copies_on_host(args, kwargs))
    return _run_with_slots(runtime, func, args, kwargs, found)


def _run_on_host(func: Callable, args: tuple, kwargs: dict, name: str, found: list) -> Any:
    """Run ``func`` on host tensors. Increment the units' epochs if the result gives access to the tensors'
    memory.

    The caller may then write to the host bytes without torch noticing, so copies of the bytes in slots count
    as outdated.
    """
    homes = [home for tensor in found if (home := getattr(tensor, "_carom", None)) is not None]
    # Read the homes before the call, because another thread may close the session during func.
    result = plain(func, args, kwargs)
    for home in homes:
        if name in _EXPOSES_MEMORY or (isinstance(result, torch.Tensor) and _shares(result, home.host)):
            home.unit.epoch += 1
    return result


def _shares(tensor: torch.Tensor, host: torch.Tensor) -> bool:
    """Return whether ``tensor`` lies in the memory of ``host``."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            start = host.data_ptr()
            return start != 0 and start <= tensor.data_ptr() < start + host.numel() * host.element_size()
        except RuntimeError:  # the tensor has no storage
            return False


def refuse_grad(found: list) -> None:
    """Raise UnsupportedError for torch.autograd.grad with respect to streamed parameters."""
    for tensor in found:
        if tensor._carom.trainable:
            raise UnsupportedError(
                f"torch.autograd.grad cannot return the gradient of {tensor._carom.entry.name}, which streams: its gradient "
                "arrives in .grad on the host at the end of a backward; call backward(inputs=[...]), or keep the parameter "
                "resident with training='resident'"
            )


def on_device(runtime: Runtime, leaves: list) -> bool:
    """Return whether any of ``leaves`` is a tensor on the compute device with one dimension or more."""
    device = runtime.device
    return device.type != "cpu" and any(
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, ManagedTensor)
        and leaf.device == device
        and leaf.dim() > 0
        for leaf in leaves
    )


def writes(name: str, kwargs: dict) -> bool:
    """Return whether the operator called ``name`` writes to its first argument, or to the keyword argument
    ``out``.
    """
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in _INPLACE or kwargs.get("out") is not None


def _copies_on_host(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return ``args`` and ``kwargs`` with tensors of other devices replaced by CPU copies."""

    def copy_to_host(leaf: Any) -> Any:
        on_a_device = (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, ManagedTensor)
            and leaf.device.type != "cpu"
        )
        return leaf.cpu() if on_a_device else leaf

    return tree_map(copy_to_host, (args, kwargs))


@quiet
def _run_with_slots(runtime: Runtime, func: Callable, args: tuple, kwargs: dict, found: list) -> Any:
    """Run an operator with slot views in place of ``found``, the managed tensors among its arguments, outside
    the graphs of torch.compile.

    If the compiler traced the streamer, it would run the streamer's code again, and the streamer's lists
    would be changed twice.
    """
    return runtime.run_operator(func, args, kwargs, found)


def plain(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` on the tensors themselves, without ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class ManagedTensor(MakesParameters):
    """Base class of the tensor subclasses that streamed tensors have while a session streams the module.

    ``_carom``: the tensor's `Home`, which refers to the streamer.
    """

    _carom: Any

    __torch_function__: Any = ForOperators(_dispatch_managed)

    def set_(self, *source: Any) -> Any:
        """Perform ``parameter.data = source``. Raises UnsupportedError for other arguments than one tensor.

        This method is overridden because ``set_`` does not dispatch to ``__torch_function__``, and
        `torch.nn.utils.parametrize` assigns values with ``set_``.
        """
        home = getattr(self, "_carom", None)
        if home is None:  # other code made a tensor of this class, which has no home
            return plain(torch.Tensor.set_, (self, *source), {})
        if len(source) == 1 and isinstance(source[0], torch.Tensor):
            home.set_data(source[0])
            return self
        raise UnsupportedError(
            f"{home.entry.name} is streamed; it cannot be given another storage while attached: close the session first"
        )


class HostParameter(ManagedTensor, nn.Parameter):
    """The class of a streamed Parameter while a session streams the module. The object stays the same."""

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            copy = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(proto)


class HostTensor(ManagedTensor, torch.Tensor):
    """The class of a streamed buffer while a session streams the module. The object stays the same."""

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copy = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(proto)


class Value:
    """A mixin that marks the result of ``parameter.data`` during a step: the parameter's value, without its
    gradient.
    """


class HostValue(HostTensor, Value):
    """The detached value of a streamed weight whose bytes are in host memory.

    Operators read and write the weight's slot through this tensor, as they do through the weight itself.
    """


def value_of(home: Home, cls: type) -> torch.Tensor:
    """Return a tensor of class ``cls`` that represents the value of the weight of ``home``."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = home.host.detach()
    tensor.__class__ = cls
    tensor._carom = home  # type: ignore[attr-defined]
    return tensor


def waits_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is managed and has no bytes in its own storage."""
    return not getattr(getattr(tensor, "_carom", None), "has_bytes", True)


def substitute(args: tuple, kwargs: dict, slots: dict[int, torch.Tensor]) -> tuple[tuple, dict]:
    """Return ``args`` and ``kwargs`` with host tensors of streamed weights replaced by slot views.

    ``slots``: the slot view of each host tensor, by the host tensor's id.
    """

    def replace(leaf: Any) -> Any:
        return slots.get(id(leaf), leaf)

    return tree_map(replace, (args, kwargs))


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass (a checkpoint's recomputation included)."""
    return torch._C._current_graph_task_id() != -1
