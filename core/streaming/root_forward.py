"""The wrappers of a session's root module (the module that it streams): of the forward, of ``_apply``, and of
the state dict. The wrapper of forwards that are called outside the root's forward.

A pass is one forward of the root module, or one forward of a part of it (a module below the root) that is
called outside the root's forward, as the encoder of a VAE is. A slot is the device memory that holds a streamed
unit (a group of weights) while it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..common.errors import UnsupportedError
from ..model.compiling import compiling, quiet, untraced
from ..model.home import Home
from ..model.interpose import NO_PICKLE
from ..model.managed_tensor import in_backward, waits_elsewhere
from .pass_retry import PassSnapshot
from .runner import RunningPass
from .streamer import Streamer

PASS = "run"  # the name of the function whose frame is on the stack of a thread while it runs a pass
OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


class PassListener(Protocol):
    """The interface of the object that wrapped forwards call before and after each pass.

    ``graphs``: one object for each forward whose backward may still be called.
    """

    graphs: WeakSet[Any]

    @property
    def root(self) -> nn.Module:
        """The root module."""

    @property
    def backward(self) -> bool:
        """Whether backward passes go through the module although none of its weights are trained."""

    @property
    def watches(self) -> bool:
        """Whether passes may run again after running out of memory, so that `before` and `passed` have to be
        called for each pass.
        """

    @property
    def watches_parts(self) -> bool:
        """The same for passes of a part. The arguments of such a pass are not those of the root."""

    def begins(
        self, compiling: bool, before: PassSnapshot | None, part: nn.Module | None
    ) -> tuple[RunningPass | None, Any]:
        """Begin a pass. Returns the pass, and a context manager that encloses it.

        Returns (None, None) if the forward has to run without streaming.
        ``before``: the snapshot that `before` returned for the pass.
        ``part``: the module whose forward the pass is, None for the root.
        """

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return a snapshot of the module's state and inputs before a pass that may have to run again,
        otherwise None.
        """

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Reduce the weights on the device after a pass ran out of memory. Returns whether the pass may run
        again.
        """

    def interrupted(self) -> None:
        """Note that an interrupt (a KeyboardInterrupt, for instance) ends the passes of this thread."""

    def passed(self, args: tuple, kwargs: dict, before: PassSnapshot | None) -> None:
        """Record that a pass has succeeded. ``before``: the snapshot that `before` returned for the pass."""


class Movable(Protocol):
    """The interface of a session that is used by ``.to()`` and similar methods of the root module."""

    @property
    def module(self) -> nn.Module:
        """The root."""

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""

    @property
    def put_aside(self) -> bool:
        """Whether the session is parked with host copies of all weights, for a quick return to the device."""

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the module's tensors."""

    def park(self) -> None:
        """Release the device memory of the session."""

    def unpark(self) -> None:
        """Move the weights to the device again."""


class _Graph:
    """A gradient hook on the results of a forward.

    The hook is in the listener's ``graphs`` until a backward begins or the autograd graph is freed.
    """

    def __init__(self, listener: PassListener, running: RunningPass) -> None:
        self._graphs, self._running = listener.graphs, running
        self._graphs.add(self)

    def __call__(self, gradient: Any) -> None:
        self._graphs.discard(self)
        self._running.begin_backward()


def _notice_backward(
    listener: PassListener, running: RunningPass, given: Any, result: Any, part: nn.Module | None
) -> None:
    """Register hooks on ``result`` that notice the start of a backward, or record that no backward is
    possible.

    The hooks are needed even if no unit is streamed.
    ``given``: the forward's arguments. ``part``: the module whose forward the pass is, None for the root.
    """
    leaves = tree_leaves(result)
    begins = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    noted = _Graph(listener, running)
    for leaf in begins:
        # A tensor without grad_fn outlives the forward, so a hook on it does not show whether a graph still
        # exists.
        leaf.register_hook(noted if leaf.grad_fn is not None else lambda _: running.begin_backward())
    # A backward is still possible if the result contains an object that tree_leaves does not look into, if
    # other code keeps the adapters that are trained, or if the loss is stored elsewhere.
    if begins or (listener.backward and not all(isinstance(leaf, torch.Tensor) for leaf in leaves)):
        return
    if not any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad
        for leaf in (*tree_leaves(given), *(part or listener.root).parameters())
    ):
        running.no_backward()


def _end(running: RunningPass, failed: bool) -> None:
    """End a pass. ``failed``: whether an error ended its forward."""
    running.end(failed)


def root_forward(listener: PassListener) -> Callable[[Callable], Callable]:
    """Return a function that wraps the root's forward, so that each call is a pass."""

    def make(inner: Callable) -> Callable:
        return _as_pass(listener, None, lambda running: inner)

    return make


class Wrapper(Protocol):
    """The interface of the object that keeps the wrapper of a module's forward from layout to layout."""

    @property
    def streamer(self) -> Streamer | None:
        """The streamer of the layout that the wrapper serves, None if it serves none."""


def part_pass(listener: PassListener, module: nn.Module, wrapper: Wrapper) -> Callable[[Callable], Callable]:
    """Return a function that wraps ``inner``, the forward of ``module`` under the layouts that ``wrapper`` serves, so
    that each call is a pass.

    If the beginning of the pass makes a layout that ``wrapper`` does not serve, the module's present forward runs
    instead.
    """
    # A strong reference would form a cycle, because the wrapped forward is an attribute of the module.
    reference = ref(module)

    def make(inner: Callable) -> Callable:
        def now(running: RunningPass | None) -> Callable:
            part = reference()
            served = running is not None and running.runner is wrapper.streamer
            return inner if part is None or served else part.forward

        return _as_pass(listener, reference, now)

    return make


class PartForward:
    """Makes the wrapper of the forward of a module below the root that is no part of a streamed unit. Calls outside the
    root's forward and outside backward passes become passes.

    ``streamer``: the streamer of the present layout, None while the session is parked. The wrapper serves the layouts
    one after the other.
    """

    def __init__(self) -> None:
        self.connect(None)

    def connect(self, streamer: Streamer | None) -> None:
        """Let the wrapper serve the layout of ``streamer``."""
        self.streamer = streamer
        self._local = None if streamer is None else streamer.runs.local

    def wrap(self, inner: Callable, as_pass: Callable[[Callable], Callable]) -> Callable:
        """Return the wrapper of ``inner``. ``as_pass``: the result of `part_pass`."""
        outside = as_pass(inner)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # torch.compile traces this function, so that compiled code gets no break at modules that do not stream.
            if torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            local = self._local
            if (local is not None and local.mine.roots) or in_backward():
                return inner(*args, **kwargs)
            return outside(*args, **kwargs)

        return forward


def _as_pass(
    listener: PassListener,
    part: Callable[[], nn.Module | None] | None,
    inner: Callable[[RunningPass | None], Callable],
) -> Callable:
    """Return a function that begins a pass, runs the forward and ends the pass, and that runs the pass again where
    ``listener`` recovers memory.

    ``part``: returns the module whose forward the pass is; None for the root.
    ``inner``: returns the forward to run in the pass that began, or if None began.
    """
    begin, end, notice = quiet(listener.begins), quiet(_end), quiet(_notice_backward)
    recover, look, passed = quiet(listener.recover), quiet(listener.before), quiet(listener.passed)
    interrupted = quiet(listener.interrupted)

    @untraced
    def run(before: PassSnapshot | None, args: Any, kwargs: Any) -> Any:
        # An interrupt may come at any line of Carom's code, so all of it is inside this `try`.
        try:
            module = None if part is None else part()
            running, watch = begin(compiling() is not None, before, module)
            call = inner(running)
            if running is None:  # another thread has closed the session meanwhile
                return call(*args, **kwargs)
            try:
                with watch:
                    result = call(*args, **kwargs)
                if torch.is_grad_enabled():
                    notice(listener, running, (args, kwargs), result, module)
            except Exception:
                end(running, True)
                raise
            end(running, False)
            return result
        except Exception:
            raise
        except BaseException:
            interrupted()
            raise

    @untraced
    def forward(*args: Any, **kwargs: Any) -> Any:
        while True:
            before, watches = None, listener.watches if part is None else listener.watches_parts
            try:
                if watches:
                    before = look(args, kwargs)
                result = run(before, args, kwargs)
            except OutOfMemory as error:
                if not recover(error, before):
                    raise
                continue
            if watches:
                passed(args, kwargs, before)
            return result

    return forward


def _memory_format(function: Callable) -> torch.memory_format | None:
    """Return the memory format to which ``function``, an argument of ``_apply``, converts; None if it keeps formats."""
    for layout, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        rows = torch.empty((2,) * dims)
        try:
            from_rows, from_layout = function(rows), function(rows.to(memory_format=layout))
        except RuntimeError:  # torch has each format for one number of dimensions
            continue
        if from_rows.stride() != rows.stride():
            return layout
        if from_layout.stride() == rows.stride():
            return torch.contiguous_format
    return None


class Apply:
    """The replacement of the root's ``_apply``, which .to(), .cuda(), .half() and similar methods call.

    A move to the CPU parks the session (it then uses no device memory), and a move to the session's device
    moves the weights to the device again. A memory format is applied to the weights while the session is parked, so
    that the next layout has it. Raises UnsupportedError for another dtype or another device, and for a memory format of
    weights that stream packed or from a file.
    """

    def __init__(self, session: Movable) -> None:
        self._session = session

    def __call__(self, function: Callable, recurse: bool = True) -> nn.Module:
        session = self._session
        device, own = None, session.device
        for dtype in session.dtypes():
            after = function(torch.empty(0, dtype=dtype))
            if after.dtype != dtype:
                raise UnsupportedError(
                    f"a streamed module cannot become {after.dtype}; close the session, convert, and stream again"
                )
            device = after.device
        layout = _memory_format(function)
        if layout is not None:
            self._change_format(layout, recurse)
        if session.put_aside and device is not None and device.type == "cpu":
            return session.module
        if device is None or device == own or (device.type, device.index) == (own.type, None):
            session.unpark()
        elif device.type == "cpu":
            session.park()
        else:
            raise UnsupportedError(
                f"the module streams on {own}; it cannot move to {device}: close the session first"
            )
        return session.module

    def _change_format(self, layout: torch.memory_format, recurse: bool) -> None:
        """Give the module's tensors of four and five dimensions the memory format ``layout``."""
        module = self._session.module
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.dim() in (4, 5) and waits_elsewhere(tensor):
                raise UnsupportedError(
                    f"{name} streams packed or from a file, so its memory format cannot change to {layout}: close the "
                    "session, convert, and stream again, or stream with codec='raw' from memory"
                )
        self._session.park()

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(memory_format=layout) if tensor.dim() in (4, 5) else tensor

        type(module)._apply(module, convert, recurse)

    def __deepcopy__(self, memo: dict) -> Any:
        copy: Any = memo.get(id(self._session.module))
        return functools.partial(type(copy)._apply, copy)


class TrueValues:
    """A state dict hook of the root. Replaces views of slots in the state dict by the host tensors of the
    weights.

    ``names``: the home (the object that reads the host value) of each streamed tensor, by the tensor's name
    in the root.
    """

    def __init__(self, streamer: Streamer | None, names: dict[str, Home]) -> None:
        self._streamer, self._names = streamer, names

    def begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._streamer is not None:
            self._streamer.runs.show_host_tensors(True)

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        if self._streamer is not None:
            try:  # until here the state dict holds views of slots, for which other units wait
                self._streamer.replace_slot_views(
                    state, {prefix + name: home for name, home in self._names.items()}
                )
            finally:
                self._streamer.runs.show_host_tensors(False)

    def __deepcopy__(self, memo: dict) -> TrueValues:
        return TrueValues(None, {})

    def __reduce__(self) -> Any:
        raise UnsupportedError(NO_PICKLE)
