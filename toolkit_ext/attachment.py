"""`Attachment`: one model that Carom manages in place of ai-toolkit's memory manager.

The model carries the attributes that ai-toolkit's memory manager sets. Its `.to` moves no weights, and its weights
stream from the first forward on. Before the first forward, ai-toolkit may quantise, convert and wrap the modules, and
the weights wait on the CPU. So the session gets the final model and pins its weights once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.model.quantized import FlattenedWeights
from .loading import without_moving

if TYPE_CHECKING:
    from ..core.budget.shared_budget import SharedBudget
    from ..core.session.session import Session

LEAF_MARKS = ("_layer_memory_manager", "_memory_management_device")


class Attachment:
    """A model that Carom manages, stored as ``module._memory_manager``, with the attributes of the stock manager.

    ``module``: the model; ``process_device``: the device that computes; ``name``: the model's name in the job's log;
    ``percent``: the share (0 to 1) of the weights to stream that the YAML requests, None without a request;
    ``unmanaged_modules``: the modules that ai-toolkit asked to ignore; ``session``: the session, None before the first
    forward and while paused; ``least``: the least budget that works, in bytes, for each granularity; ``given``: the
    budget of the session, or its future budget; ``trains``: whether backward passes go through the model;
    ``trains_whole``: whether all of its own weights train; ``gone``: whether `detach` was called. The argument ``open`` makes the session, at the first forward.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, open: Callable[[Attachment], Session], *,
        name: str = "", percent: float | None = None, ignored: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.module, self.process_device = module, torch.device(device)
        self.name, self.percent = name or type(module).__name__, percent
        self.unmanaged_modules = list(ignored)
        self.session: Session | None = None
        self.least: dict[str | None, int] = {}
        self.given: int | str | SharedBudget | None = None
        self.trains = self.trains_whole = False
        self._laid_open: FlattenedWeights | None = None
        self.gone = False
        self._open = open
        self._lock = threading.RLock()
        self._hooks: list[Any] = []
        self._before = {key: module.__dict__.get(key) for key in ("forward", "to", "_apply")}
        module._memory_manager = self  # type: ignore[assignment]
        module._mm_to = module.to  # type: ignore[assignment]
        if any(t.device.type not in ("cpu", "meta") for t in tensors(module)):
            module._mm_to("cpu")  # type: ignore[operator]
        self._mark()
        self._put("forward", _First(self, module.forward))
        self._put("to", _To(self))
        self._put("_apply", _Waiting(self))
        self._listen()

    def __deepcopy__(self, memo: dict) -> Attachment:
        return self

    @property
    def streams_what_trains(self) -> bool:
        """Whether trainable weights of a dtype other than float32 stream. The optimizer steps these on the host."""
        return self.session is not None and any(
            p.requires_grad and p.dtype != torch.float32 and getattr(p, "_carom", None) is not None
            for p in self.module.parameters()
        )

    @property
    def on_disk(self) -> bool:
        """Whether weights stream from disk at present."""
        return self.session is not None and self.session.report().ram_budget_bytes > 0

    # -- life

    def activate(self) -> Session:
        """Open the session if there is none, and return it.

        After an exception the model still waits on the CPU, so that a later forward can try again.
        """
        with self._lock:
            if self.session is None:
                self._mark()
                laid_open = FlattenedWeights(self.module)
                try:
                    self.session = self._open(self)
                except BaseException:
                    laid_open.close()
                    raise
                self._laid_open = laid_open
                self._listen_no_more()
            return self.session

    def pause(self) -> None:
        """Close the session before a change that a streamed model does not allow. The model then waits on the CPU."""
        with self._lock:
            if self.session is not None:
                self._close()
                self._listen()

    def detach(self, *, discard: bool = False) -> None:
        """Restore the module as it was before: its own `.to` and forward, no marks, weights on the CPU. Idempotent.

        ``discard``: the weights will be deleted, so those on the device stay there.
        """
        with self._lock:
            if self.gone:
                return
            self.gone = True
            self._close(discard)
            self._listen_no_more()
            for key in ("_apply", "to", "forward"):
                self._take_away(key)
            for child in self.module.modules():
                for mark in LEAF_MARKS:
                    child.__dict__.pop(mark, None)
            for mark in ("_memory_manager", "_mm_to"):
                self.module.__dict__.pop(mark, None)

    def differs_from(self, dtype: torch.dtype) -> bool:
        """Return whether `.to(dtype)` would convert any weight. Inner tensors of quantised weights do not count."""
        laid_open = self._laid_open
        inner = set() if laid_open is None else laid_open.inner
        wrappers = [] if laid_open is None else laid_open.wrappers
        weights = [*wrappers, *(t for t in tensors(self.module) if id(t) not in inner)]
        return any(t.is_floating_point() and t.dtype != dtype for t in weights)

    def refresh(self) -> None:
        """Discard copies of weights, because weights were changed without the session's knowledge.

        If quantised weights were replaced, close the session; the next forward opens another one.
        """
        with self._lock:
            if self._laid_open is not None and self._laid_open.replaced:
                self.pause()
            elif self.session is not None:
                self.session.refresh()

    def _close(self, discard: bool = False) -> None:
        session, self.session = self.session, None
        laid_open, self._laid_open = self._laid_open, None
        if session is not None:
            session.close(discard=discard)
        if laid_open is not None:
            laid_open.close()

    # -- attributes of the module

    def _put(self, key: str, value: Any) -> None:
        self.module.__dict__[key] = value

    def _take_away(self, key: str) -> None:
        """Restore the module's attribute ``key`` from before, if the present value is Carom's.

        A wrapper that other code put over Carom's value stays, and calls through to that value.
        """
        if getattr(self.module.__dict__.get(key), "carom", None) is not self:
            return
        if self._before[key] is None:
            del self.module.__dict__[key]
        else:
            self.module.__dict__[key] = self._before[key]

    def _mark(self) -> None:
        """Set the stock manager's marks on layers without marks, also on (quantised) layers that replaced others."""
        for child in self.module.modules():
            if next(child.children(), None) is None and "_layer_memory_manager" not in child.__dict__:
                if not (child._parameters or child._buffers):
                    continue
                child._layer_memory_manager = LayerMark(child, self)  # type: ignore[assignment]
                child._memory_management_device = self.process_device  # type: ignore[assignment]

    def _listen(self) -> None:
        """Register pre-hooks on all submodules: a call of a submodule alone is a first forward too.

        An example is the inner model of a text encoder.
        """
        for child in self.module.modules():
            if child is not self.module:
                self._hooks.append(child.register_forward_pre_hook(_Touched(self)))

    def _listen_no_more(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


class LayerMark:
    """The object in the place of the stock per-layer manager. It does not change the layer's forward.

    ``module``: the layer; ``manager``: the `Attachment` of its model. ``_original_forward``: the layer's forward
    without an adapter, as the stock per-layer manager stores it.
    """

    def __init__(self, module: nn.Module, manager: Attachment) -> None:
        self.module, self.manager = module, manager
        ara = getattr(module, "ara_lora_ref", None)
        adapter = ara() if callable(ara) else None
        self._original_forward = module.forward if adapter is None else adapter.org_forward

    def __deepcopy__(self, memo: dict) -> LayerMark:
        return self


class _Standin:
    """Base of callables that replace methods in a module's ``__dict__``.

    ``method``: the name of the replaced method; ``carom``: the `Attachment`. A deep copy of the module gets the method
    of its own class instead of the callable.
    """

    method = ""

    def __init__(self, attachment: Attachment) -> None:
        self.carom = attachment

    def __deepcopy__(self, memo: dict) -> Any:
        copy: Any = memo.get(id(self.carom.module))
        return self if copy is None else functools.partial(getattr(type(copy), self.method), copy)


class _First(_Standin):
    """The root's forward. The first call opens the session; later calls pass through to the original forward."""

    method = "forward"

    def __init__(self, attachment: Attachment, inner: Callable) -> None:
        super().__init__(attachment)
        functools.update_wrapper(self, inner)
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self.carom
        if attachment.session is not None or attachment.gone:
            return self._inner(*args, **kwargs)
        attachment.activate()
        # ai-toolkit put the inputs on the CPU, where the weights waited. The first call moves them to the device.
        args, kwargs = _moved((args, kwargs), attachment.process_device)
        return attachment.module.forward(*args, **kwargs)


class _Touched:
    """Forward pre-hook of the submodules while the model waits. It opens the session and moves the inputs."""

    def __init__(self, attachment: Attachment) -> None:
        self.carom = attachment

    def __call__(self, module: nn.Module, args: Any) -> Any:
        if self.carom.session is not None or self.carom.gone:
            return None
        self.carom.activate()
        return _moved(args, self.carom.process_device)

    def __deepcopy__(self, memo: dict) -> Any:
        return _nothing if memo.get(id(self.carom.module)) is not None else self


def _nothing(module: nn.Module, args: Any) -> None:
    return None


class _To(_Standin):
    """The root's `.to`. The session handles moves to a device; a change of dtype closes the session and converts."""

    method = "to"

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        attachment = self.carom
        module = attachment.module
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        session = attachment.session
        if session is None:
            module._mm_to(*args, **kwargs)  # type: ignore[operator]
            return module
        if dtype is None and not session.parked and device == attachment.process_device:
            return module  # ai-toolkit calls this before every forward; the model is already on the device
        if dtype is not None and attachment.differs_from(dtype):
            attachment.pause()
            module._mm_to(dtype=dtype)  # type: ignore[operator]
            return module
        if device is not None:
            nn.Module.to(module, device)
        return module


class _Waiting(_Standin):
    """The root's `_apply` while the model waits: converts dtypes, but keeps the weights on the CPU.

    All moves and conversions go through `_apply`, those of a parent module included.
    """

    method = "_apply"

    def __call__(self, function: Callable, recurse: bool = True) -> nn.Module:
        module = self.carom.module
        plain = type(module)._apply
        dtype = next((t.dtype for t in tensors(module)), torch.float32)
        if function(torch.empty(0, dtype=dtype)).device.type in ("cpu", "meta"):
            return plain(module, function, recurse)
        return without_moving(module, function, plain, recurse)


def tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield every parameter and buffer in the tables of the module tree, without evaluating properties."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            yield from (t for t in table.values() if t is not None)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, each counted once.

    A quantised weight counts as the sum of its inner tensors.
    """
    return sum(_nbytes(t) for t in {id(t): t for t in tensors(module)}.values())


def _nbytes(tensor: torch.Tensor) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.numel() * tensor.element_size()
    return sum(_nbytes(getattr(tensor, name)) for name in flatten()[0])


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device != device else value
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    return value
