"""Quantised weights (torchao, bitsandbytes, optimum-quanto, GGUF and others), streamed by their inner
tensors.

A quantised weight is a tensor subclass. A wrapper subclass has no storage of its own, so it can neither be
pinned nor copied to a slot (the device memory that holds a streamed unit). A data subclass has bytes of its
own that can be copied, but the tensors in its attributes (scales) would not be copied along. So each weight
is flattened (`tensor_flatten`), and its inner tensors are registered as buffers of the module, which stream
like any others. The weight object stays readable as an attribute of the module. While the module's own
forward runs, the attribute is a wrapper made of the tensors that are in the buffers at that time: slot views,
or tensors that stay on the device. If autograd saves such a wrapper, its inner tensors are saved instead,
each packed by the next saved-tensor hook. While a unit runs, this hook packs them as handles.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..common.errors import UnsupportedError
from . import managed_tensor
from .ctx_attributes import pack_node_attributes
from .flattened_loading import load_inner
from .shared_attributes import forward_of, original_of
from .tensor_flatten import (
    ObjectSpec,
    SubclassSpec,
    WrapperSpec,
    aliases_of,
    can_be_rebuilt,
    flatten,
    flatten_object,
    is_data_subclass,
    is_wrapper,
    set_data,
    tensor_attributes,
)
from .wrapper_cache import CachedWrapper, WrapperReferences, cache_of, measure_references

if TYPE_CHECKING:
    from .home import SlotRange

_PLAIN = (torch.Tensor, nn.Parameter)
INNER = "__inner_"  # part of the names of buffers that hold inner tensors


class FlattenedWeights:
    """Every frozen quantised parameter below ``root``. The inner tensors are registered as buffers until
    `close`.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._flattened: list[FlattenedModule] = []
        self.renew()

    def renew(self) -> None:
        """Flatten quantised weights that were added since the last call, and drop weights that the model
        replaced.

        Must not be called during a forward.
        """
        kept = [leaf for leaf in self._flattened if leaf.intact]
        replaced = [leaf for leaf in self._flattened if not leaf.intact]
        self._flattened = kept
        for leaf in replaced:
            leaf.close()
        known = {id(leaf.module) for leaf in kept}
        try:
            for module in self._root.modules():
                names = _flattenable_names(module)
                if names and id(module) in known:
                    # the module was flattened before: leave weights that were added later as they are
                    continue
                if names:
                    self._flattened.append(FlattenedModule(module, names))
        except BaseException:
            self.close()
            raise

    def follow(self) -> None:
        """Let the weight objects share the memory of the buffers again. To be called after the buffers have
        moved.
        """
        for leaf in self._flattened:
            leaf.follow()

    def __len__(self) -> int:
        """Return the number of flattened weights."""
        return sum(len(leaf.weights) for leaf in self._flattened)

    @property
    def layers(self) -> Sequence[FlattenedModule]:
        """The modules with quantised weights."""
        return self._flattened

    @property
    def replaced(self) -> bool:
        """Whether other code has replaced a flattened weight (as a merge into quantised weights does)."""
        return any(not leaf.intact for leaf in self._flattened)

    @property
    def stale(self) -> bool:
        """Whether `renew` would change anything."""
        known = {id(leaf.module) for leaf in self._flattened}
        return self.replaced or any(
            id(module) not in known and _flattenable_names(module) for module in self._root.modules()
        )

    def read(self, name: str) -> torch.Tensor | None:
        """Return the present value of the quantised weight called ``name`` in the tree, on the CPU. Returns
        None if there is no such weight.
        """
        path, _, leaf_name = name.rpartition(".")
        try:
            module = self._root.get_submodule(path)
        except AttributeError:
            return None
        for leaf in self._flattened:
            weight = leaf.weights.get(leaf_name)
            if weight is not None and leaf.module is module:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    parts = [_bytes(leaf.module._buffers[b]).detach().cpu().clone() for b in weight.buffers]
                    return weight.spec.unflatten(iter(parts))
        return None

    @property
    def wrappers(self) -> list[nn.Parameter]:
        """The weight objects, as they were before they were flattened."""
        return [weight.wrapper for leaf in self._flattened for weight in leaf.weights.values()]

    @property
    def inner(self) -> set[int]:
        """Ids of the inner tensors. Outside a forward, these tensors are in the modules' buffers."""
        return {
            id(leaf.module._buffers.get(name))
            for leaf in self._flattened
            for weight in leaf.weights.values()
            for name in weight.buffers
        }

    def close(self) -> None:
        """Register the same Parameter objects again, around the same inner tensors. May be called more than
        once.
        """
        while self._flattened:
            self._flattened[-1].close()  # removed afterwards, so that an interrupted call may be repeated
            self._flattened.pop()


def _flattenable_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of ``module`` that can be flattened and rebuilt."""
    return [
        name
        for name, p in module._parameters.items()
        if type(p) is not nn.Parameter and p is not None and (is_wrapper(p) or is_data_subclass(p))
        and not (p.requires_grad or p.is_inference()) and can_be_rebuilt(p)
    ]  # fmt: skip


def is_inner(name: str) -> bool:
    """Return whether a buffer called ``name`` holds an inner tensor of a weight. Such buffers are never saved
    in state dicts.
    """
    return INNER in name


@dataclass(frozen=True)
class _Weight:
    """One flattened weight of a module.

    ``companions``: attributes of the module that hold tensors of the weight.
    ``references``: the reference counts of a wrapper that may be cached, None if a wrapper is built for every
    run.
    ``key``: the weight's key in a `WrapperCache`.
    """

    wrapper: nn.Parameter
    spec: WrapperSpec | SubclassSpec
    buffers: tuple[str, ...]
    companions: dict[str, ObjectSpec] = field(default_factory=dict)
    references: WrapperReferences | None = None
    key: object = field(default_factory=object)


class FlattenedModule:
    """A module with quantised weights whose inner tensors are registered as its buffers."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        self.module = module
        self.weights: dict[str, _Weight] = {}
        # For each weight whose inner tensors all stay on the device, by name: the inner tensors, their
        # device, and the wrapper around them.
        self._resident_wrappers: dict[str, tuple[list[Any], Any, CachedWrapper]] = {}
        # One for each running forward, of the module or of the unit that contains it.
        self._runs: list[None] = []
        self._source = 0  # id of the first inner tensor of which the weights are made that are set now
        self._order = list(module._parameters)
        self._shown = False  # whether the weights are parameters at the moment, for a state dict
        self._not_saved = set(module._non_persistent_buffers_set)
        for name in names:
            wrapper: Any = module._parameters[name]
            spec, tensors = flatten(wrapper)
            companions = _companions(module, spec, tensors) if isinstance(spec, SubclassSpec) else {}
            buffers = tuple(f"{name}{INNER}{i}" for i in range(len(tensors)))
            for buffer, tensor in zip(buffers, tensors, strict=True):
                if hasattr(module, buffer):
                    raise UnsupportedError(f"{type(module).__name__} has an attribute {buffer} of its own")
                module.register_buffer(buffer, tensor, persistent=False)
            del module._parameters[name]
            module.__dict__[name] = wrapper
            references = measure_references(spec, tensors) if isinstance(spec, WrapperSpec) else None
            self.weights[name] = _Weight(wrapper, spec, buffers, companions, references)
            # The buffer has the bytes now. Without this call, a data subclass would keep a second copy in
            # host memory.
            _share_memory(self.weights[name], torch.empty(0, dtype=tensors[0].dtype))
        self._hooks = [
            module.register_state_dict_pre_hook(self._begin_save),
            module._register_state_dict_hook(self._end_save),
            module._register_load_state_dict_pre_hook(self._load, with_module=True),
        ]
        self._own_forward = module.__dict__.get("forward")
        self._wrapped = _WrappedForward(self, _called(forward_of(module)))
        module.__dict__["forward"] = self._wrapped

    @property
    def intact(self) -> bool:
        """Whether the module still has the weight objects that were flattened."""
        return all(self.module.__dict__.get(name) is weight.wrapper for name, weight in self.weights.items())

    def build(self, name: str, convert: Callable | None = None) -> dict[str, Any]:
        """Return the weight and its companions, rebuilt from the tensors in the buffers, by attribute name.

        ``convert``: a function that makes the plain tensors from which to rebuild them, if they must not refer to
        a session's tensor subclasses.
        """
        weight, table = self.weights[name], self.module._buffers
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            parts: list[Any] = [_bytes(table[buffer]) for buffer in weight.buffers]
            if convert is not None:
                parts = [convert(part) for part in parts]
            tensors = iter(parts)
            made: Any = weight.spec.unflatten(tensors)
            if isinstance(weight.spec, WrapperSpec):
                made = nn.Parameter(made, requires_grad=False)
            companions = {key: held.unflatten(parts[0], tensors) for key, held in weight.companions.items()}
        return {name: made, **companions}

    def set_weight(self, name: str) -> Any:
        """Rebuild the weight and its companions from the tensors in the buffers, set them on the module, and
        return the weight.
        """
        weight, module = self.weights[name], self.module
        if weight.references is None:
            module.__dict__.update(self.build(name))
        else:
            parts = [module._buffers[buffer] for buffer in weight.buffers]
            module.__dict__[name] = self._cached_or_new(name, weight, parts, weight.references)
        return module.__dict__[name]

    def _cached_or_new(
        self, name: str, weight: _Weight, parts: list[Any], references: WrapperReferences
    ) -> Any:
        """Return a wrapper around ``parts``: the cached wrapper of exactly these tensor objects, or a new
        wrapper.
        """
        caches = set(map(cache_of, parts))
        cache = caches.pop()
        if caches or (cache is None and not all(type(part) in _PLAIN for part in parts)):
            # the inner tensors are not all in one slot, or some have only host bytes: do not cache the wrapper
            return self.build(name)[name]
        if cache is None:  # all parts stay on the device: the objects stay the same, even if their bytes move
            found = self._resident_wrappers.get(name)
            if found is not None:
                tensors, device, kept = found
                if device == parts[0].device and all(map(operator.is_, tensors, parts)) and not kept.changed:
                    return kept.made
            made = references.build(parts)
            self._resident_wrappers[name] = (parts, parts[0].device, CachedWrapper(made, parts))
            return made
        made = cache.get(weight.key)
        if made is None:
            made = references.build(parts)
            cache.add(weight.key, made, parts, references)
        return made

    @property
    def in_run(self) -> bool:
        """Whether a forward runs for which the weights are set, made of the tensors that are in the buffers now."""
        return bool(self._runs) and self._source == id(self._first_part())

    def _first_part(self) -> torch.Tensor | None:
        """Return the first inner tensor of the first weight."""
        return self.module._buffers.get(next(iter(self.weights.values())).buffers[0])

    def begin_run(self) -> list[Any]:
        """Set the weights for a forward of the module, or of the unit that contains it, and return them. Every call is
        paired with `end_run`, also if it raises an error.
        """
        self._runs.append(None)
        self._source = id(self._first_part())
        return [self.set_weight(name) for name in self.weights]

    def end_run(self) -> None:
        """Restore the weight objects after a forward, unless another forward still needs them. Drop cached wrappers of
        tensors that stay on the device if the forward changed the wrapper.
        """
        if self._runs:
            self._runs.pop()
        if not self._runs:
            self._restore()

    def _restore(self) -> None:
        """Set the weight objects as they are outside a forward."""
        for name in self.weights:
            if name in self.module._parameters:
                self._undo_assignment(name)
            self.module.__dict__.update(self.originals(name))
            found = self._resident_wrappers.get(name)
            if found is not None and found[2].changed:
                self._resident_wrappers.pop(name, None)

    def _undo_assignment(self, name: str) -> None:
        """Remove a parameter that the model assigned to the weight's name, if it consists of the weight's own tensors.

        PEFT's DoRA assigns ``weight.to(device)`` after it has dequantised the weight.
        """
        parts = [self.module._buffers[buffer] for buffer in self.weights[name].buffers]
        with torch._C.DisableTorchFunctionSubclass():
            assigned = flatten(self.module._parameters[name])[1]
            if list(map(_place, assigned)) == list(map(_place, parts)):
                del self.module._parameters[name]

    def originals(self, name: str) -> dict[str, Any]:
        """Return the attributes of the weight ``name`` on the module as they are outside a forward."""
        weight = self.weights[name]
        return {name: weight.wrapper, **{key: held.original for key, held in weight.companions.items()}}

    def follow(self) -> None:
        """Let the weight objects share the memory of the buffers."""
        if self._runs:  # an interrupt ended a run between two lines
            self._runs.clear()
            self._restore()
        for weight in self.weights.values():
            main = self.module._buffers.get(weight.buffers[0])
            if main is not None:
                _share_memory(weight, main)

    def _is_of(self, module: nn.Module) -> bool:
        """Return whether ``module`` is this module, and not a copy that has its hooks. The root of a session is
        known here by its second module object (`share_attributes`), and hooks get the original.
        """
        return original_of(self.module) is original_of(module)

    def _begin_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Register the weights as parameters made of plain tensors while the module makes its state dict.

        This is a state-dict pre-hook. It is needed because the module's class may save the weights in a
        format of its own.
        """
        if self._is_of(module) and (self.intact or self.in_run):
            # The buffers of a running unit hold views of a slot, which other units overwrite later.
            convert = _copy if self.in_run else torch.Tensor.detach
            for name in self.weights:
                made = self.build(name, convert)
                module._parameters[name] = made.pop(name)
                del module.__dict__[name]
                module.__dict__.update(made)
            self._shown = True
            self._reorder()

    def _end_save(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        """Undo `_begin_save`. This is a state-dict hook."""
        if self._is_of(module) and self._shown:
            self._shown = False
            for name in self.weights:
                if name not in module.__dict__ and module._parameters.pop(name, None) is not None:
                    module.__dict__.update(self.originals(name))
                    if self.in_run:
                        self.set_weight(name)

    def _load(
        self,
        module: nn.Module,
        state: dict,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        *_: Any,
    ) -> None:
        """Load the weights' values from a state dict. This is a hook that runs before the module itself loads.

        If a value has another form than its weight, the module gets its weights back as parameters, so that it
        loads them as it would without a session. The next layout flattens them again.
        """
        if not self._is_of(module) or not self.intact:
            return
        assign = bool(metadata.get("assign_to_params_buffers"))
        found = {name: state[prefix + name] for name in self.weights if prefix + name in state}
        for name, value in found.items():
            weight = self.weights[name]
            if assign or not load_inner(module, weight.spec, weight.buffers, value):
                self._give_copies()
                return
        for name in self.weights:
            if name in found:
                del state[prefix + name]
            elif strict:
                missing.append(prefix + name)

    def _give_copies(self) -> None:
        """Register copies of the weights as parameters. They count as replaced weights from then on."""
        for name in self.weights:
            made = self.build(name, _copy)
            self.module._parameters[name] = made.pop(name)
            del self.module.__dict__[name]
            self.module.__dict__.update(made)
        self._reorder()

    def _reorder(self) -> None:
        """Restore the original order of the module's parameters."""
        table = self.module._parameters
        ordered = {name: table[name] for name in [*self._order, *table] if name in table}
        table.clear()
        table.update(ordered)

    def close(self) -> None:
        """Remove the buffers, the hooks and the wrapped forward, and register the weights as parameters
        again.
        """
        module, table = self.module, self.module._parameters
        self._wrapped.live = False
        self._resident_wrappers.clear()
        if module.__dict__.get("forward") is self._wrapped:
            if self._own_forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = self._own_forward
        for hook in self._hooks:
            hook.remove()
        self.follow()
        for name, weight in self.weights.items():
            for buffer in weight.buffers:
                module._buffers.pop(buffer, None)
            if module.__dict__.get(name) is not None:
                table[name] = weight.wrapper
                del module.__dict__[name]
        module._non_persistent_buffers_set = self._not_saved
        self._reorder()


def _bytes(tensor: Any) -> Any:
    """Return ``tensor``, or its value read from the file or the packed bytes if it has no bytes of its own.

    Without this call, a wrapper built of such a tensor would use the meta tensor.
    """
    return tensor._carom.read() if managed_tensor.waits_elsewhere(tensor) else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _place(tensor: Any) -> tuple[int, torch.dtype, torch.Size]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def _share_memory(weight: _Weight, data: torch.Tensor) -> None:
    """Let a data-subclass weight and its aliases use the storage of ``data``. Do nothing for a wrapper, which
    has no storage.
    """
    if isinstance(weight.spec, SubclassSpec):
        if data.is_meta:  # the bytes are on disk
            data = torch.empty(0, dtype=data.dtype)
        set_data(weight.wrapper, data)
        aliases = list(aliases_of(weight.spec, weight.wrapper))
        for held in weight.companions.values():
            aliases += aliases_of(held, held.original)
        for tensor in aliases:
            set_data(tensor, data)


def _companions(module: nn.Module, spec: SubclassSpec, tensors: list[torch.Tensor]) -> dict[str, ObjectSpec]:
    """Return specs of the module's attributes that hold tensors of the weight, or that take over attributes
    of the weight.

    An example is the state object of bitsandbytes' int8 linear modules.
    """
    attribute_names = tensor_attributes(spec)
    found: dict[str, ObjectSpec] = {}
    for name, value in module.__dict__.items():
        attributes = getattr(value, "__dict__", None)
        if name.startswith("_") or isinstance(value, (type, nn.Module, torch.Tensor)) or callable(value):
            continue
        if not isinstance(attributes, dict):
            continue
        held = flatten_object(value, tensors)
        if held is None and attribute_names & attributes.keys():
            held = ObjectSpec(value, {})
        if held is not None:
            found[name] = held
    return found


def _called(forward: Any) -> Callable:
    """Return the function that calls ``forward``, a callable or a `weakref.WeakMethod`."""
    if not isinstance(forward, weakref.WeakMethod):
        return forward

    def call(*args: Any, **kwargs: Any) -> Any:
        method = forward()
        if method is None:
            raise UnsupportedError(
                "the module of this forward does not exist any more; keep a reference to the module itself"
            )
        return method(*args, **kwargs)

    return call


class _WrappedForward:
    """A wrapper of a module's forward that sets the module's quantised weights for the duration of the call.

    The weights are built from the tensors that are in the buffers when the call begins.
    """

    def __init__(self, leaf: FlattenedModule, inner: Callable) -> None:
        functools.update_wrapper(self, leaf.module.forward)  # first: it also copies that object's attributes
        self.live, self._leaf, self._inner = True, leaf, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaf = self._leaf
        in_run = self.live and leaf.in_run  # whether the weights are set for the whole unit
        if not in_run and not (self.live and leaf.intact):
            return self._inner(*args, **kwargs)
        streamer = managed_tensor.streaming() if torch.is_grad_enabled() else None
        if in_run:
            result = self._inner(*args, **kwargs)
            if streamer is not None:
                pack_node_attributes(streamer, result, (*args, *kwargs.values()))
            return result
        saved = False
        try:
            weights = leaf.begin_run()
            if streamer is not None:
                pack_inner_tensors(streamer, weights)
                saved = True
            del weights
            result = self._inner(*args, **kwargs)
            if streamer is not None:
                pack_node_attributes(streamer, result, (*args, *kwargs.values()))
            return result
        finally:
            if saved and streamer is not None:
                managed_tensor.pop_handles(streamer)
            leaf.end_run()

    def __deepcopy__(self, memo: dict) -> Any:
        raise UnsupportedError(
            "a module with wrapped weights that stream cannot be copied; close the session first"
        )


@dataclass(frozen=True)
class _PackedWrapper:
    """The object that autograd saves instead of a wrapper: the wrapper's spec, and its inner tensors as
    packed by the saved-tensor hook that was pushed before.
    """

    spec: WrapperSpec | SubclassSpec
    parts: tuple[Any, ...]
    unpack: Callable


def pack_inner_tensors(slots: SlotRange, wrappers: list[Any]) -> None:
    """Push saved-tensor hooks that save each of ``wrappers`` as its inner tensors.
    `managed_tensor.pop_handles` pops the hooks.

    The inner tensors are packed by the hooks that were pushed before, which belong to ``slots``.
    """
    pack_below, unpack_below = managed_tensor._top_hooks(False)  # type: ignore[misc]
    shapes = {type(wrapper) for wrapper in wrappers}

    def pack(tensor: torch.Tensor) -> Any:
        if type(tensor) in shapes or is_wrapper(tensor):
            spec, parts = flatten(tensor)
            return _PackedWrapper(spec, tuple(pack_below(part) for part in parts), unpack_below)
        return pack_below(tensor)

    def unpack(packed: Any) -> Any:
        if type(packed) is not _PackedWrapper:
            return unpack_below(packed)
        parts = [packed.unpack(part) for part in packed.parts]  # this may run a checkpoint's recomputation
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return packed.spec.unflatten(iter(parts))

    pack._carom = slots  # type: ignore[attr-defined]
    managed_tensor._push_hooks(pack, unpack)
