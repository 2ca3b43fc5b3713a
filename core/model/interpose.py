"""Wrappers around the forwards of modules, set as the instance attribute ``forward`` and removed by
`Wrapped.undo`.

Forward hooks are not used, for three reasons. Hooks registered with always_call run after an Exception, but
not after KeyboardInterrupt. Hooks take more host time. Hooks do not see a direct call ``module.forward(x)``.
torch.compile is told to skip the frames of these wrappers and to compile the functions that they call. So a
compiled graph breaks only before and after the forward of a unit (a group of tensors that is streamed
together).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._jit_internal import FunctionModifiers

from ..common.errors import UnsupportedError
from .compiling import pass_over, untraced
from .shared_attributes import forward_of, original_of

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
tracing: Callable[[], Any] = torch._C._get_tracing_state
_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode  # type: ignore[attr-defined]
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]


NO_GRAPH = (
    "{} streams: its weights are not where a captured graph could keep them. Close the session before torch.export, "
    "torch.jit, torch.onnx or make_fx, and stream again afterwards"
)
NO_PICKLE = "a streamed module cannot be pickled whole; save its state_dict() or close the session"


class Wrapped:
    """The forwards that one session wrapped and the attributes that it set, with the functions that undo
    this.

    `undo` also works if other code has wrapped the same forwards later.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def forward(
        self,
        module: nn.Module,
        make: Callable[[Callable], Callable],
        lasts: bool = False,
        traced: bool = False,
        earlier: Any = None,
    ) -> Any:
        """Replace ``module``'s forward by ``make(inner)``, where ``inner`` is the present forward. Return the wrapper.

        ``lasts``: keep this wrapper outermost. Wrappers that Carom sets later are then inserted between this
        wrapper and the module's own forward, unless other code has wrapped the forward in the meantime.
        ``traced``: let torch.compile trace the wrapper, which must then call nothing of Carom's while it is compiled.
        ``earlier``: a wrapper that an earlier call with the same ``make`` and ``traced`` returned and that `undo`
        removed. It is set again if the present forward is the one that it wraps. Code that torch.compile compiled
        while it was set stays valid then, because the guards of such code compare wrappers by identity.
        """
        before = module.__dict__.get("forward")
        if isinstance(before, _Forward) and before.lasts and before.live:
            front, undo_inserted = before.insert_behind(make, earlier)
            self._undo.append(undo_inserted)
            return front
        inner = forward_of(module)
        if earlier is not None and earlier.before is before and earlier.wraps(inner):
            front, front.live = earlier, True
        else:
            front = (_TracedForward if traced else _Forward)(make, inner, before, lasts)
            front.module = weakref.ref(original_of(module))
        module.forward = front  # type: ignore[method-assign]

        self._undo.append(functools.partial(_remove, module, front, before))
        return front

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Set the attribute ``name`` in the module's ``__dict__``, until `undo`."""
        before = module.__dict__.get(name)
        module.__dict__[name] = value

        def undo() -> None:
            if module.__dict__.get(name) is value:
                if before is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = before

        self._undo.append(undo)

    def undo(self) -> None:
        """Remove all wrappers and attributes, in the reverse order of their setting."""
        while self._undo:
            self._undo[-1]()  # removed afterwards, so that an interrupted call may be repeated
            self._undo.pop()


def _remove(module: nn.Module, front: _Forward, before: Any) -> None:
    """Undo that ``front`` was set as the forward of ``module``. ``before``: the attribute's value before that."""
    front.live = False
    if module.__dict__.get("forward") is not front:
        return
    previous = before
    # Skip previous wrappers that were removed before this wrapper.
    while isinstance(previous, _Forward) and not previous.live:
        previous = previous.before
    if previous is None:
        del module.__dict__["forward"]
    else:
        module.forward = previous  # type: ignore[method-assign]


def stands_first(module: nn.Module) -> bool:
    """Return whether the outermost wrapper of ``module``'s forward was set by Carom with ``lasts=True``."""
    front = module.__dict__.get("forward")
    return isinstance(front, _Forward) and front.lasts and front.live


class _Unbound:
    """The function of a `_Forward` that takes the module as its first argument, as ``method.__func__`` does.

    It is no plain function because torch.jit reads ``_torchscript_modifier`` of it, and of nothing else.
    """

    def __init__(self, function: Callable, wrapper: _Forward) -> None:
        self._function, self._wrapper = function, wrapper
        functools.update_wrapper(self, function)
        self.__signature__ = getattr(function, "__signature__", None)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._function(module, *args, **kwargs)

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        return self if module is None else types.MethodType(self, module)

    @property
    def _torchscript_modifier(self) -> Any:
        """As that of the `_Forward`."""
        return self._wrapper._torchscript_modifier


class _Forward:
    """A wrapper that calls ``make(inner)`` while ``live`` is true, and ``inner`` afterwards.

    ``inner``: a callable, or a `weakref.WeakMethod` of the module that holds the wrapper.
    A deep copy of the module gets the module's forward without the wrapper.
    ``module``: returns the module whose attribute ``forward`` was set to this wrapper.
    """

    module: Callable[[], nn.Module | None] = staticmethod(lambda: None)

    def __init__(
        self, make: Callable[[Callable], Callable], inner: Any, before: Any, lasts: bool = False
    ) -> None:
        self._held = inner
        functools.update_wrapper(self, self._inner)
        weak = isinstance(inner, weakref.WeakMethod)
        if weak:
            del self.__dict__["__wrapped__"]  # a reference to the module; `__getattr__` returns it
        self.live, self.lasts = True, lasts
        # value of the instance attribute ``forward`` before this wrapper was set, or None
        self.before = before
        self._run = make(self._call_inner if lasts or weak else inner)

    @property
    def _inner(self) -> Callable:
        """The present inner forward."""
        held = self._held
        if isinstance(held, weakref.WeakMethod):
            held = held()
            if held is None:
                raise UnsupportedError(
                    "the module of this forward does not exist any more; keep a reference to the module itself"
                )
        return held

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__" and "_held" in self.__dict__:
            return self._inner
        raise AttributeError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs) if self.live else self._inner(*args, **kwargs)

    def _call_inner(self, *args: Any, **kwargs: Any) -> Any:
        """Call the present inner forward. `insert_behind` may have replaced it since this wrapper was made."""
        inner = self._present()  # looked up at each call, because insert_behind replaces it
        return inner(*args, **kwargs)

    def _present(self) -> Callable:
        # torch.compile cannot break a graph where an attribute is read, but where a function is called.
        return self._inner

    def wraps(self, inner: Any) -> bool:
        """Return whether ``inner``, a callable or a `weakref.WeakMethod`, is the forward that this wrapper calls."""
        ours = self._held
        # The methods of a module are bound anew at each access.
        method = type(inner) is type(ours) and isinstance(inner, (types.MethodType, weakref.WeakMethod))
        return inner is ours or (method and inner == ours)

    def insert_behind(
        self, make: Callable[[Callable], Callable], earlier: Any = None
    ) -> tuple[_Forward, Callable[[], None]]:
        """Insert a wrapper between this wrapper and its inner forward. Return it, and a function that removes it.

        ``earlier``: as in `Wrapped.forward`.
        """
        if earlier is not None and earlier.wraps(self._held):
            front, front.live = earlier, True
        else:
            front = _Forward(make, self._held, None)
        self._held = front

        def undo() -> None:
            front.live = False
            while isinstance(self._held, _Forward) and not self._held.live:
                self._held = self._held._held

        return front, undo

    @property
    def __func__(self) -> Callable:
        """A function of the module and the forward's arguments, as a bound method has it.

        Code that wraps a forward (`Accelerator.prepare`) binds ``forward.__func__`` to the module again. It would bind
        this wrapper itself if there was no such attribute, and each call would then get the module as a further argument.
        """
        wrapper, owner = self, self.module

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # In a deep copy of the module, this function is bound to the copy.
            return (
                wrapper(*args, **kwargs)
                if module is owner()
                else type(module).forward(module, *args, **kwargs)
            )

        forward.__name__ = "forward"
        with contextlib.suppress(TypeError, ValueError):
            signature = inspect.signature(self._inner)
            first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
                parameters=[first, *signature.parameters.values()]
            )
        return _Unbound(untraced(forward), self)

    @property
    def _torchscript_modifier(self) -> Any:
        """The TorchScript modifier of the forward. Raises UnsupportedError while a session streams the
        module.

        torch.jit.script and torch.jit.trace read this attribute before they compile the module. Nothing else
        reads it.
        """
        if self.live:
            raise UnsupportedError(NO_GRAPH.format(self._name()))
        return getattr(self._inner, "_torchscript_modifier", FunctionModifiers.DEFAULT)

    @property
    def __signature__(self) -> Any:
        """An attribute that always raises an error: UnsupportedError while torch.export runs, otherwise
        AttributeError.

        torch.export, in strict mode or not, reads this attribute before it traces the module. After an
        AttributeError, `inspect.signature` reads the signature of the wrapped forward instead.
        """
        if self.live and exporting():
            raise UnsupportedError(NO_GRAPH.format(self._name()))
        raise AttributeError("__signature__")

    def _name(self) -> str:
        """Return the class name of the module whose forward is wrapped."""
        inner = self._inner
        while isinstance(inner, _Forward):
            inner = inner._inner
        return type(getattr(inner, "__self__", inner)).__name__

    def __deepcopy__(self, memo: dict) -> Any:
        return _without_session(self._inner, memo)

    def __reduce__(self) -> Any:
        raise UnsupportedError(NO_PICKLE)


def exporting() -> bool:
    """Return whether torch.export is running."""
    trace = sys.modules.get("torch.export._trace")
    return is_exporting() or getattr(trace, "_EXPORT_FLAGS", None) is not None


def refuse_capture(name: str) -> None:
    """Raise UnsupportedError while torch.jit.trace, torch.export or make_fx records a graph. ``name``: the
    module's name, for the message.

    A recorded graph would store the bytes of a slot (reused device memory) as the value of the weight.
    """
    if (
        tracing() is not None
        or is_exporting()
        or (torch._C._len_torch_dispatch_stack() and _mode(_PROXY) is not None)
    ):
        raise UnsupportedError(NO_GRAPH.format(name))


def _without_session(inner: Callable, memo: dict) -> Callable:
    """Return ``inner`` bound to the copy of its module that a running deepcopy makes. ``memo``: the
    deepcopy's memo.
    """
    while isinstance(inner, _Forward):
        inner = inner._inner
    owner = getattr(inner, "__self__", None)
    copy = memo.get(id(owner))
    if copy is None:
        return inner
    return functools.partial(type(copy).forward, copy)


class _TracedForward(_Forward):
    """A wrapper that torch.compile traces, so that it does not break the graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs) if self.live else self._inner(*args, **kwargs)


untraced(_Forward.__call__)
untraced(_Forward._call_inner)
untraced(_Forward._present)
# All wrappers share the code object of __call__. The function that __call__ calls has a code object for each
# unit.
pass_over(_Forward.__call__.__code__)
pass_over(_Forward._present.__code__)
