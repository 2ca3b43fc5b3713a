"""How a session enters modules' forwards: an instance's ``forward`` stands in front of the module's own.

Unlike forward hooks this survives KeyboardInterrupt (always_call hooks see only Exceptions), costs less,
and also sees ``module.forward(x)``. torch.compile is told to leave these frames alone and to compile
what they call, so a graph breaks at a unit's edge and nowhere else.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._jit_internal import FunctionModifiers
from torch.utils._pytree import tree_leaves

from .errors import UnsupportedError

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)

if TYPE_CHECKING:
    from .disk_residents import Load, Residents
    from .session import Session
    from .streamed import Owner, Streamed
    from .streamer import Streamer


_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode  # type: ignore[attr-defined]
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]

_eval_frame: Any = getattr(torch._C._dynamo, "eval_frame", None)
# Of torch 2.6. Later releases trace our frames and break there all the same.
_skip_code: Any = getattr(_eval_frame, "skip_code", None)
# None while nothing can be compiling on this thread.
_compiling: Callable[[], Any] = getattr(
    _eval_frame, "get_eval_frame_callback", lambda: sys.modules.get("torch._dynamo")
)


NO_GRAPH = (
    "{} streams: its weights are not where a captured graph could keep them. Close the session before torch.export, "
    "torch.jit, torch.onnx or make_fx, and stream again afterwards"
)
NO_PICKLE = "a streamed module cannot be pickled whole; save its state_dict() or close the session"


class Wrapped:
    """The forwards a session stands in front of; `undo` steps aside, also where others stepped in front since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def forward(self, module: nn.Module, make: Callable[[Callable], Callable], lasts: bool = False) -> None:
        """Let ``make(inner)`` run instead of ``module``'s forward, which is ``inner``.

        ``lasts``: those that come later stand behind this one, for as long as nobody else steps in front of it."""
        before = module.__dict__.get("forward")
        if isinstance(before, _Forward) and before.lasts and before.live:
            self._undo.append(before.behind(make))
            return
        front = _Forward(make, module.forward, before, lasts)
        module.forward = front  # type: ignore[method-assign]

        def undo() -> None:
            front.live = False
            if module.__dict__.get("forward") is front:
                below = before
                while isinstance(below, _Forward) and not below.live:  # it was undone first
                    below = below.before
                if below is None:
                    del module.__dict__["forward"]
                else:
                    module.forward = below  # type: ignore[method-assign]

        self._undo.append(undo)

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an instance attribute for as long as the session lasts."""
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
        while self._undo:
            self._undo.pop()()


def stands_first(module: nn.Module) -> bool:
    """Whether a front that ``lasts`` is the first that a call of ``module`` comes to."""
    front = module.__dict__.get("forward")
    return isinstance(front, _Forward) and front.lasts and front.live


class _Forward:
    """Runs what ``make(inner)`` gave while ``live``, else ``inner``. A deep copy of the module gets its own plain forward."""

    def __init__(
        self, make: Callable[[Callable], Callable], inner: Callable, before: Any, lasts: bool = False
    ) -> None:
        functools.update_wrapper(self, inner)
        self.live, self.lasts = True, lasts
        self.before = before  # the instance's own forward in front of which this one was put
        self._inner = inner
        self._run = make(self._behind if lasts else inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs) if self.live else self._inner(*args, **kwargs)

    def _behind(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)  # whatever that is by now

    def behind(self, make: Callable[[Callable], Callable]) -> Callable[[], None]:
        """Put another one between this one and what it leads to; returns what takes it away."""
        front = self._inner = _Forward(make, self._inner, None)

        def undo() -> None:
            front.live = False
            while isinstance(self._inner, _Forward) and not self._inner.live:
                self._inner = self._inner._inner

        return undo

    @property
    def _torchscript_modifier(self) -> Any:
        """Asked for by torch.jit.script and torch.jit.trace, and by nobody else, before they compile the module."""
        if self.live:
            raise UnsupportedError(NO_GRAPH.format(self._name()))
        return getattr(self._inner, "_torchscript_modifier", FunctionModifiers.DEFAULT)

    @property
    def __signature__(self) -> Any:
        """Asked for by torch.export, strict or not, before it traces the module; `inspect.signature` asks what is behind."""
        if self.live and exporting():
            raise UnsupportedError(NO_GRAPH.format(self._name()))
        raise AttributeError("__signature__")

    def _name(self) -> str:
        inner = self._inner
        while isinstance(inner, _Forward):
            inner = inner._inner
        return type(getattr(inner, "__self__", inner)).__name__

    def __deepcopy__(self, memo: dict) -> Any:
        return _without_session(self._inner, memo)

    def __reduce__(self) -> Any:
        raise UnsupportedError(NO_PICKLE)


def exporting() -> bool:
    """Whether torch.export is at work."""
    trace = sys.modules.get("torch.export._trace")
    return _exporting() or getattr(trace, "_EXPORT_FLAGS", None) is not None


def refuse_capture(name: str) -> None:
    """Raises UnsupportedError where what runs is recorded as a graph that is to be used later (torch.jit.trace,
    torch.export, make_fx): it would keep a slot's bytes as the weight's."""
    if (
        _tracing() is not None
        or _exporting()
        or (torch._C._len_torch_dispatch_stack() and _mode(_PROXY) is not None)
    ):
        raise UnsupportedError(NO_GRAPH.format(name))


def _without_session(inner: Callable, memo: dict) -> Callable:
    """``inner`` bound to the copy of its module that a running deepcopy is making."""
    while isinstance(inner, _Forward):
        inner = inner._inner
    owner = getattr(inner, "__self__", None)
    copy = memo.get(id(owner))
    if copy is None:
        return inner
    return functools.partial(type(copy).forward, copy)


def quiet(function: Callable) -> Callable:
    """``function`` and all it calls kept out of torch.compile's graphs, without importing the compiler."""
    guarded: list[Callable] = []

    @_untraced
    def call(*args: Any, **kwargs: Any) -> Any:
        if _compiling() is None:
            return function(*args, **kwargs)
        if not guarded:
            guarded.append(torch.compiler.disable(function))
        return guarded[0](*args, **kwargs)

    return call


def _untraced(function: Callable) -> Callable:
    """Neither inlined into a graph nor compiled as a frame of its own; what it calls may be."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    # What torch says where it may not break a graph.
    function._torchdynamo_disable_msg = "carom streams this module"  # type: ignore[attr-defined]
    if _skip_code is not None:
        _skip_code(function.__code__)
    else:
        # torch.compile counts recompilations by code object. With one that all units share, a few kinds of units reach its
        # limit, and what follows runs uncompiled.
        function.__code__ = function.__code__.replace()  # type: ignore[attr-defined]
    return function


def _pass_over(code: types.CodeType) -> None:
    """Lets torch.compile leave frames of ``code`` alone and compile what they call, without importing the compiler.

    As torch._dynamo.eval_frame.skip_code (torch 2.13). Not for frames that call a module's forward: torch.compile takes up
    those of torch.nn only from a frame that it traces.
    """
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        action = _eval_frame._FrameAction
        strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _eval_frame.set_code_exec_strategy(code, strategy)


_untraced(_Forward.__call__)
_untraced(_Forward._behind)
_pass_over(_Forward.__call__.__code__)  # one for all units; the frame that it calls is each unit's own


def unit_forward(unit: Streamed) -> Callable[[Callable], Callable]:
    """Around a unit's forward: its slot is entered and left, exception, interrupt or not."""
    runs = unit.streamer.runs
    # Most calls are not compiled: they are spared the way around the compiler.
    enter, leave = runs.enter, runs.leave
    quiet_enter, quiet_leave = quiet(enter), quiet(leave)

    def make(inner: Callable) -> Callable:
        @_untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            plain = _compiling() is None
            slot, gradient = enter(unit) if plain else quiet_enter(unit)
            try:
                return inner(*args, **kwargs)
            finally:
                if plain:
                    leave(unit, slot, gradient)
                else:
                    quiet_leave(unit, slot, gradient)

        return forward

    return make


def resident_forward(residents: Residents, load: Load) -> Callable[[Callable], Callable]:
    """Around a forward that needs resident weights: they are brought first, where they still are on disk."""
    bring = quiet(residents.bring)

    def make(inner: Callable) -> Callable:
        @_untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not load.here:
                bring(load)
            return inner(*args, **kwargs)

        return forward

    return make


class _Graph:
    """A hook of a forward's results. It is among its session's ``_graphs`` until a backward comes, or the graph is dropped."""

    def __init__(self, session: Session, streamer: Streamer) -> None:
        self._graphs, self._streamer = session._graphs, streamer
        self._graphs.add(self)

    def __call__(self, gradient: Any) -> None:
        self._graphs.discard(self)
        self._streamer.backward.begins()


def _notice_backward(session: Session, streamer: Streamer, given: Any, result: Any) -> None:
    """Learn where a backward through ``result`` begins, also when everything is resident, or that there can be none."""
    leaves = tree_leaves(result)
    begins = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    noted = _Graph(session, streamer)
    for leaf in begins:
        # A leaf outlives the forward: a hook on it says nothing about a graph.
        leaf.register_hook(noted if leaf.grad_fn is not None else lambda _: streamer.backward.begins())
    # The result may be an object that is not looked into, what trains may be others' adapters, a loss may be kept elsewhere.
    if begins or (session._backward and not all(isinstance(leaf, torch.Tensor) for leaf in leaves)):
        return
    if not any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad
        for leaf in (*tree_leaves(given), *session.module.parameters())
    ):
        streamer.runs.no_backward()


def _root_ends(streamer: Streamer, failed: bool) -> None:
    streamer.runs.root_ends(failed)
    residents = getattr(streamer, "residents", None)
    if residents is not None and not failed:
        residents.pass_ended()


def root_forward(session: Session) -> Callable[[Callable], Callable]:
    """Around the root's forward: a pass begins and ends, the tree is looked over for what is new."""
    begin, end, notice = quiet(session._begin), quiet(_root_ends), quiet(_notice_backward)
    gives_way, look, settle = quiet(session._gives_way), quiet(session._before), quiet(session._after_giving)
    passed = quiet(session._passed)

    def make(inner: Callable) -> Callable:
        @_untraced
        @_untraced
        def run(args: Any, kwargs: Any) -> Any:
            streamer, watch = begin(_compiling() is not None)
            if streamer is None:  # closed by another thread meanwhile
                return inner(*args, **kwargs)
            failed = True
            try:
                with watch:
                    result = inner(*args, **kwargs)
                if torch.is_grad_enabled():
                    notice(session, streamer, (args, kwargs), result)
                failed = False
                return result
            finally:
                end(streamer, failed)

        @_untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            while True:
                before = None
                try:
                    if session._governor is not None or session._room is not None:
                        before = look(args, kwargs)
                    result = run(args, kwargs)
                except OutOfMemory as error:
                    if not gives_way(error, before):
                        raise
                    continue
                room, reruns = session._room, session._reruns
                if room is not None:
                    passed(room, args, kwargs)
                if reruns is not None and reruns.gave:
                    settle()
                return result

        return forward

    return make


class Apply:
    """Stands for the root's ``_apply``, through which .to(), .cuda(), .half() and the like go."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, function: Callable, recurse: bool = True) -> nn.Module:
        session = self._session
        device, engine = None, session._engine
        for dtype in {entry.tensor.dtype for entry in session._known()}:
            before = torch.empty(0, dtype=dtype)
            after = function(before)
            if after.dtype != dtype:
                raise UnsupportedError(
                    f"a streamed module cannot become {after.dtype}; close the session, convert, and stream again"
                )
            device = after.device
        if session.put_aside and device is not None and device.type == "cpu":
            return session.module
        if (
            device is None
            or device == engine.device
            or (device.type, device.index) == (engine.device.type, None)
        ):
            session.unpark()
        elif device.type == "cpu":
            session.park()
        else:
            raise UnsupportedError(
                f"the module streams on {engine.device}; it cannot move to {device}: close the session first"
            )
        return session.module

    def __deepcopy__(self, memo: dict) -> Any:
        copy: Any = memo.get(id(self._session.module))
        return functools.partial(type(copy)._apply, copy)


class TrueValues:
    """State dict hook of the root: slots that stand in the tree are replaced by what they stand for."""

    def __init__(self, streamer: Streamer | None, names: dict[str, Owner]) -> None:
        self._streamer, self._names = streamer, names

    def begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._streamer is not None:
            self._streamer.runs.hosting(True)

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        if self._streamer is not None:
            try:  # until then the state dict keeps views of slots, which others wait for
                self._streamer.true_values(
                    state, {prefix + name: owner for name, owner in self._names.items()}
                )
            finally:
                self._streamer.runs.hosting(False)

    def __deepcopy__(self, memo: dict) -> TrueValues:
        return TrueValues(None, {})

    def __reduce__(self) -> Any:
        raise UnsupportedError(NO_PICKLE)
