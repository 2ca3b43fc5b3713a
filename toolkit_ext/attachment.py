"""One model under Carom, as ai-toolkit sees it: the marks of its memory manager, a cheap `.to`, streamed from its first forward on.

Nothing is streamed before the first forward: until then ai-toolkit quantises, converts and wraps the modules
as it likes, and the weights wait on the CPU untouched. What is streamed then is the final model, pinned once.
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
    """``module`` on ``device``; ``open`` makes its session, once, at the first forward.

    It stands at ``module._memory_manager`` and has the stock manager's attributes.
    ``percent``: the share of the weights to stream that the YAML asked for, None where it did not.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, open: Callable[[Attachment], Session], *,
        name: str = "", percent: float | None = None, ignored: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        self.module, self.process_device = module, torch.device(device)
        self.name, self.percent = name or type(module).__name__, percent
        self.unmanaged_modules = list(ignored)
        self.session: Session | None = None
        self.least: dict[str | None, int] = {}  # granularity -> the least budget that works, in bytes
        self.given: int | str | SharedBudget | None = None  # the budget it has or will have
        self.trains = False  # whether backwards are to go through it
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
        """Whether weights that train, in less than float32, stream: an optimizer steps them on the host."""
        return self.session is not None and any(
            p.requires_grad and p.dtype != torch.float32 and getattr(p, "_carom", None) is not None
            for p in self.module.parameters()
        )

    # -- life

    def activate(self) -> Session:
        """Stream from here on. What fails leaves the model waiting as before, so that a later forward may try again."""
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
        """Back to waiting on the CPU: something is about to happen that a streamed model does not allow."""
        with self._lock:
            if self.session is not None:
                self._close()
                self._listen()

    def detach(self, *, discard: bool = False) -> None:
        """The module as it was before: its own `.to` and forward, no marks, weights on the CPU. Idempotent.

        ``discard``: the weights are about to be dropped, so those on the device stay there.
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
        """Whether a `.to(dtype)` would convert anything; what wrapped weights hold inside is their own business."""
        laid_open = self._laid_open
        inner = set() if laid_open is None else laid_open.inner
        wrappers = [] if laid_open is None else laid_open.wrappers
        weights = [*wrappers, *(t for t in tensors(self.module) if id(t) not in inner)]
        return any(t.is_floating_point() and t.dtype != dtype for t in weights)

    def refresh(self) -> None:
        """The weights were changed unseen: no copy is trusted, and weights that were replaced are taken up anew."""
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

    # -- what stands in the module

    def _put(self, key: str, value: Any) -> None:
        self.module.__dict__[key] = value

    def _take_away(self, key: str) -> None:
        """Ours goes; what others put over it since stays, and passes through to it."""
        if getattr(self.module.__dict__.get(key), "carom", None) is not self:
            return
        if self._before[key] is None:
            del self.module.__dict__[key]
        else:
            self.module.__dict__[key] = self._before[key]

    def _mark(self) -> None:
        """The stock marks of layers; modules that came since the last time (quantised ones) get them too."""
        for child in self.module.modules():
            if next(child.children(), None) is None and "_layer_memory_manager" not in child.__dict__:
                if not (child._parameters or child._buffers):
                    continue
                child._layer_memory_manager = LayerMark(child, self)  # type: ignore[assignment]
                child._memory_management_device = self.process_device  # type: ignore[assignment]

    def _listen(self) -> None:
        """Parts may be called past the root (a text encoder's inner model): that is a first forward too."""
        for child in self.module.modules():
            if child is not self.module:
                self._hooks.append(child.register_forward_pre_hook(_Touched(self)))

    def _listen_no_more(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


class LayerMark:
    """Stands where the stock per-layer manager stands; the layer's forward is left alone."""

    def __init__(self, module: nn.Module, manager: Attachment) -> None:
        self.module, self.manager = module, manager
        ara = getattr(module, "ara_lora_ref", None)
        adapter = ara() if callable(ara) else None
        self._original_forward = module.forward if adapter is None else adapter.org_forward

    def __deepcopy__(self, memo: dict) -> LayerMark:
        return self


class _Standin:
    """A callable in a module's dict; a deep copy of the module gets its class's own method instead."""

    method = ""

    def __init__(self, attachment: Attachment) -> None:
        self.carom = attachment

    def __deepcopy__(self, memo: dict) -> Any:
        copy: Any = memo.get(id(self.carom.module))
        return self if copy is None else functools.partial(getattr(type(copy), self.method), copy)


class _First(_Standin):
    """The root's forward until it streams; a pass-through from then on."""

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
        # Inputs were placed by where the weights waited; this once they follow them.
        args, kwargs = _moved((args, kwargs), attachment.process_device)
        return attachment.module.forward(*args, **kwargs)


class _Touched:
    """Forward pre-hook of the parts while the model waits."""

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
    """`.to`: moving is Carom's business, a change of dtype is done as without it."""

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
            return module  # said before every forward, of a model that is there
        if dtype is not None and attachment.differs_from(dtype):
            attachment.pause()
            module._mm_to(dtype=dtype)  # type: ignore[operator]
            return module
        if device is not None:
            nn.Module.to(module, device)
        return module


class _Waiting(_Standin):
    """`_apply` of a waiting model, through which all moving and converting goes, a parent's too: it stays on the CPU."""

    method = "_apply"

    def __call__(self, function: Callable, recurse: bool = True) -> nn.Module:
        module = self.carom.module
        plain = type(module)._apply
        dtype = next((t.dtype for t in tensors(module)), torch.float32)
        if function(torch.empty(0, dtype=dtype)).device.type in ("cpu", "meta"):
            return plain(module, function, recurse)
        return without_moving(module, function, plain, recurse)


def tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer in the tables of the tree, none of them computed by a property."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            yield from (t for t in table.values() if t is not None)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each once; of wrapped quantised tensors what they hold inside."""
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
