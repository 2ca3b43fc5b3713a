"""The wrappers of a session's root module (the module that it streams): of the forward and of the state dict. The
wrapper of forwards that are called outside the root's forward.

A pass is one forward of the root module, or one forward of a part of it (a module below the root) that is
called outside the root's forward, as the encoder of a VAE is. A slot is the device memory that holds a streamed
unit (a group of weights) while it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..common.errors import BudgetError, UnsupportedError
from ..model.compiling import compiling, quiet, untraced
from ..model.home import Home
from ..model.interpose import NO_PICKLE
from ..model.managed_tensor import in_backward
from .pass_retry import PassSnapshot
from .runner import RunningPass

if TYPE_CHECKING:
    from .streamer import Streamer

# The name of the function whose frame is on the stack of a thread while it runs a pass. `running_passes` looks for it, in
# this file, and for its local variable `running`, which must be unset until `begin` has returned.
PASS = "run"
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
        """Reduce the weights on the device after a pass ran out of memory, or make room for a unit that found none. Returns
        whether the pass may run again.
        """

    def interrupted(self) -> None:
        """Note that an interrupt (a KeyboardInterrupt, for instance) ends the passes of this thread."""

    def passed(self, args: tuple, kwargs: dict, before: PassSnapshot | None) -> None:
        """Record that a pass has succeeded. ``before``: the snapshot that `before` returned for the pass."""


class RootPass:
    """The `RunningPass` of a `Streamer`."""

    __slots__ = ("runner",)

    def __init__(self, streamer: Streamer) -> None:
        self.runner = streamer

    def end_forward(self, failed: bool) -> None:
        """End the pass. ``failed``: whether an error ended its forward."""
        streamer = self.runner
        streamer.forwards.root_ends(failed)
        if not failed:
            streamer.tier.end_pass()
            if streamer.first_uses is not None:
                streamer.end_first_pass()

    def begin_backward(self) -> None:
        """Register the backward whose gradient has reached a result of the pass."""
        self.runner.backward.begins()

    def no_backward(self) -> None:
        """Record that no backward of the pass is possible."""
        self.runner.forwards.no_backward()


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


@quiet
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


# The methods of listeners and passes that `_as_pass` calls, hidden from torch.compile. One of each serves all wrappers.
_begin = quiet(lambda listener, *given: listener.begins(*given))
_before = quiet(lambda listener, *given: listener.before(*given))
_recover = quiet(lambda listener, *given: listener.recover(*given))
_passed = quiet(lambda listener, *given: listener.passed(*given))
_interrupted = quiet(lambda listener: listener.interrupted())
_end = quiet(lambda running, failed: running.end_forward(failed))


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
        self._local = None if streamer is None else streamer.forwards.local

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
    ``listener`` makes room.

    ``part``: returns the module whose forward the pass is; None for the root.
    ``inner``: returns the forward to run in the pass that began, or if None began.
    """

    @untraced
    def run(before: PassSnapshot | None, args: Any, kwargs: Any) -> Any:
        # An interrupt may come at any line of Carom's code, so all of it is inside this `try`.
        try:
            module = None if part is None else part()
            running, watch = _begin(listener, compiling() is not None, before, module)
            call = inner(running)
            if running is None:  # another thread has closed the session meanwhile
                return call(*args, **kwargs)
            try:
                with watch:
                    result = call(*args, **kwargs)
                if torch.is_grad_enabled():
                    _notice_backward(listener, running, (args, kwargs), result, module)
            except Exception:
                _end(running, True)
                raise
            _end(running, False)
            return result
        except Exception:
            raise
        except BaseException:
            _interrupted(listener)
            raise

    @untraced
    def forward(*args: Any, **kwargs: Any) -> Any:
        while True:
            before, watches = None, listener.watches if part is None else listener.watches_parts
            try:
                if watches:
                    before = _before(listener, args, kwargs)
                result = run(before, args, kwargs)
            except (OutOfMemory, BudgetError) as error:
                if not _recover(listener, error, before):
                    raise
                continue
            if watches:
                _passed(listener, args, kwargs, before)
            return result

    return forward


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
            self._streamer.forwards.show_host_tensors(True)

    def __call__(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        if self._streamer is not None:
            try:  # until here the state dict holds views of slots, for which other units wait
                self._streamer.replace_slot_views(
                    state, {prefix + name: home for name, home in self._names.items()}
                )
            finally:
                self._streamer.forwards.show_host_tensors(False)

    def __deepcopy__(self, memo: dict) -> TrueValues:
        return TrueValues(None, {})

    def __reduce__(self) -> Any:
        raise UnsupportedError(NO_PICKLE)
