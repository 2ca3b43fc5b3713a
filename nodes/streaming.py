"""`Streaming`: the session of one model that ComfyUI loaded, shared by all patchers of the model."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..core.common.errors import BudgetError
from ..core.common.progress import progress_listener
from ..core.common.sizes import round_up_to_mib
from ..core.host.page_release import MappedFiles
from ..core.metrics.report import Report
from ..core.session.session import Session, stream
from . import comfyui_api
from .host_allocator import give_large_blocks_back
from .host_share import Holder, Share, divide
from .inference_tensors import own_memory, own_tensors
from .leftover_memory import TakesRoom
from .module_roots import least_bytes, prepare, root_of
from .node_settings import Settings, describe, parse_limit
from .plain_ops import shorten
from .quantized_weights import dresses, put_together, take_apart
from .spilled_weights import is_on_host, spill_weights, weights_in_memory

logger = logging.getLogger("carom")
_ATTRIBUTE = "_carom_streaming"
TELL_EVERY_S = 2.0
# Models that ComfyUI unloaded and whose sessions are suspended, the longest unused first.
_suspended: weakref.WeakKeyDictionary[Streaming, None] = weakref.WeakKeyDictionary()
# Models that exist.
_all: weakref.WeakSet[Streaming] = weakref.WeakSet()
# Models that have a session.
_open: weakref.WeakSet[Streaming] = weakref.WeakSet()


class Streaming(TakesRoom):
    """Holds at most one session for a model, and opens, resizes and closes it as ComfyUI loads and unloads the model.

    ``session``: the session, None before `open` and after `close`; ``packs``: whether weights may wait packed;
    ``active``: whether Carom has the weights, or is about to take them; ``suspended``: whether ComfyUI unloaded the
    model while the session keeps the weights on the host; ``budget``: the session's budget in bytes; ``held``: bytes on
    the device (resident, adapters, slots, staging); ``weights``: bytes of all weights, each counted once; ``streamed``:
    bytes of streamed weights; ``note``: why the model does not stream, "" if it may; ``expected``: ComfyUI's id of the
    model's patches and its count of loaded bytes, as last seen; ``dressed``: whether weights are single tensors with
    added attributes (GGUF), on which ComfyUI writes patches only while they are whole; ``from_disk``: whether the
    weights stream from disk; ``ram``: bytes of RAM that the weights may take, 0 without a session.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # weak, because the model holds this object
        _all.add(self)
        self.session: Session | None = None
        self.packs = False
        self.active = False
        self.suspended = False
        self.budget: int | None = None
        self.held = 0
        self.weights = 0
        self.streamed = 0
        self.note = ""
        self.expected: tuple = ()
        self.dressed = False
        self.from_disk = False
        self.ram = 0
        self._views: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # weights, and their memory in a mapped file
        self._many_passes = True
        self._total = 0
        self._least: dict[Settings, int] = {}  # the least budget that works, in bytes, by settings
        self._pins = [0]  # bytes that ComfyUI counts as pinned for this model
        self._ends: weakref.finalize | None = None
        self._last: Report | None = None
        self._undo = contextlib.ExitStack()
        self._lengthen: Callable[[], None] = _nothing
        self._node = ""  # id of the node that shows progress text
        self._told = 0.0

    # -- life

    def check(self, device: torch.device, settings: Settings) -> None:
        """Raise BudgetError if the user's own limit is less than the least budget that works on ``device``.

        Nodes call this while they run, so that ComfyUI shows the error on the node that has the widget. Raises
        UnsupportedError if the weights cannot be streamed and mode is "stream".
        """
        limit = parse_limit(settings.vram, comfyui_api.device_bytes(device))
        if limit >= self.total:
            return
        key = replace(settings, vram="", ram="", priority="", node="")
        if key not in self._least:
            model = self._model()
            assert model is not None
            if self.session is None:
                self._least[key] = least_bytes(root_of(model)[0], device, settings)
            else:
                self._least[key] = self._session_least()
        least = self._least[key]
        if least > limit:
            raise BudgetError(
                f"vram={settings.vram} is too small for this model: set vram on this node to {round_up_to_mib(least)} or more, "
                "or to auto",
                least,
            )

    def _session_least(self) -> int:
        assert self.session is not None
        try:
            self.session.set_budget(vram=1)  # refused, and nothing changes
        except BudgetError as error:
            return error.least_bytes or 0
        return 0

    def open(self, device: torch.device, bound: int, settings: Settings) -> None:
        """Open a session with a budget of ``bound`` bytes of ``device``, or the least that works if that is more.

        Raises BudgetError if the user's own limit is less than that budget, or another CaromError. The model is
        unchanged then.
        """
        model, began = self._model(), time.monotonic()
        assert model is not None and self.session is None
        root, entrances = root_of(model)
        self._many_passes = not entrances
        self._take_apart(root)
        bar = comfyui_api.LoadingBar()
        # The bytes of GGUF weights cannot be packed further, and GGUF weights are not read through their parameters.
        if self.dressed:
            settings = replace(settings, codec="raw")
        try:
            session, bound = self._attach(root, device, bound, settings, bar)
        except BaseException:
            self._undo.close()
            raise
        self.session, self.budget, self.packs = session, bound, settings.codec != "raw"
        _open.add(self)
        self._ends = weakref.finalize(model, _dropped, weakref.ref(self), self._pins)
        self._ends.atexit = False
        for name in entrances:
            self._enter_by(model, root, name)
        handle = root.register_forward_pre_hook(_quiet(functools.partial(_guard, weakref.ref(self))))
        self._undo.callback(handle.remove)
        logger.info("Carom: weights laid out in %.2f s", time.monotonic() - began)
        self._undo.callback(self.lengthen)
        self._lengthen = shorten(root)
        self._measure()
        self._node, self._told = settings.node, time.monotonic()
        bar.finish()  # raises if the user cancelled; the caller then closes the session

    def _attach(
        self,
        root: nn.Module,
        device: torch.device,
        bound: int,
        settings: Settings,
        bar: comfyui_api.LoadingBar,
    ) -> tuple[Session, int]:
        prepare(root)
        limit = parse_limit(settings.vram, comfyui_api.device_bytes(device))
        share = self._share_ram(settings)
        with _laying_out(), progress_listener(bar):
            self._views = mapped_views(root)
            try:
                return self._stream(root, device, bound, settings, share), bound
            except BudgetError as error:
                if error.least_bytes is None or error.least_bytes > limit:
                    raise
                # The model cannot run with less. ComfyUI's estimate has reserves that cover the difference.
                return self._stream(root, device, error.least_bytes, settings, share), error.least_bytes

    def _stream(
        self, root: nn.Module, device: torch.device, budget: int, settings: Settings, share: Share
    ) -> Session:
        """Return a session for ``root`` with ``budget`` bytes of ``device`` and the RAM of ``share``."""
        _make_pin_room(comfyui_api.module_bytes(root))
        room = comfyui_api.pin_room()
        options: dict[str, Any] = {"granularity": settings.granularity, "codec": settings.codec}
        if share.whole:
            return stream(root, device=device, vram=budget, ram=min(share.nbytes, room), **options)
        if device.type == "cpu":
            give_large_blocks_back()  # else what computing takes beside the weights exceeds any bound
        # With less RAM than streams at least, the weights stream from disk also where the cache then holds all of them:
        # a cache can be divided between models.
        small = max(1, min(self.ram, (self.total - min(budget, self.total)) // 2))
        session = stream(
            root, device=device, vram=budget, ram=small, disk=comfyui_api.spill_folder(self.total), **options
        )
        if small < self.ram:
            try:
                session.set_budget(ram=self.ram)
            except BaseException:
                session.close()
                raise
        return session

    def _share_ram(self, settings: Settings) -> Share:
        """Set `ram` to the bytes of RAM that the weights get, and take RAM from other models for it."""
        others = [one for one in _suspended if one is not self]
        others += [one for one in _open if one is not self and one not in _suspended]
        holders = [Holder(one.ram, one.suspended or one.from_disk, one.from_disk) for one in others]
        limit = comfyui_api.ram_limit(settings.ram, self.ram + sum(one.nbytes for one in holders))
        share = divide(limit, self.total, self._many_passes, holders)
        for other, nbytes in zip(others, share.keeps, strict=True):
            if nbytes < other.ram:
                other.give_up_ram(nbytes)
        self.ram = min(self.total, share.nbytes) if share.whole else share.nbytes
        return share

    def claim_ram(self, settings: Settings) -> None:
        """Take the RAM that a run needs for weights on disk from models that run no more. Called before each run."""
        if not self.streams or not self.from_disk or self.ram >= self.streamed or len(_open) < 2:
            return
        assert self.session is not None
        before = self.ram
        self._share_ram(settings)
        if self.ram > before:
            with _laying_out():
                self.session.set_budget(ram=self.ram)
            self._measure()
        else:
            self.ram = before

    def give_up_ram(self, nbytes: int) -> None:
        """Reduce the RAM of the model to ``nbytes`` bytes, or to none if it is suspended and waits in RAM as a whole.

        Weights that were views of a mapped file are views of it again. The others are spilled.
        """
        model = self._model()
        assert self.session is not None and model is not None
        if self.from_disk:
            with _laying_out():
                self.session.set_budget(ram=nbytes)
            self.ram = nbytes
            return
        views = self._views
        self.close()
        with _laying_out():
            for tensor, view in views:
                if tensor.device.type == "cpu" and tensor.shape == view.shape and tensor.dtype == view.dtype:
                    tensor.data = view
            spill_weights(root_of(model)[0])

    def lengthen(self) -> None:
        """Restore ComfyUI's own forwards. Compiled code must see the same forwards as without Carom."""
        self._lengthen()
        self._lengthen = _nothing

    def _take_apart(self, root: nn.Module) -> None:
        opened = take_apart(root)
        self._undo.callback(put_together, opened)
        self.dressed = self.dressed or dresses(opened)

    def _enter_by(self, model: nn.Module, scope: nn.Module, name: str) -> None:
        method = getattr(model, name)
        model.__dict__[name] = functools.partial(scope, method)
        self._undo.callback(model.__dict__.pop, name, None)

    def resize(self, budget: int) -> int:
        """Change the budget to ``budget`` bytes, or the least that works if that is more; return the bytes given back.

        Keep the budget and return 0 if the least budget that works is not less than the bytes held.
        """
        assert self.session is not None
        before, began = self.held, time.monotonic()
        with _laying_out():
            try:
                self.session.set_budget(vram=budget)
            except BudgetError as error:
                if error.least_bytes is None or error.least_bytes >= before:
                    return 0
                budget = error.least_bytes
                self.session.set_budget(vram=budget)
        self.budget = budget
        self._measure()
        logger.info("Carom: weights laid out anew in %.2f s", time.monotonic() - began)
        return before - self.held

    @property
    def streams(self) -> bool:
        """Whether a session has the weights and is not suspended."""
        return self.session is not None and not self.suspended

    def suspend(self) -> None:
        """Release the device, because ComfyUI unloads the model.

        Weights on the host stay pinned or packed as they are, so that `resume` only copies bytes to the device.
        """
        assert self.session is not None
        began = time.monotonic()
        with _laying_out():
            self.session.park(keep=True)
        self.suspended, self.active = True, False
        self.held = self.weights = self.streamed = 0
        self._count_pinned()
        _suspended[self] = None
        logger.info("Carom: the device was released in %.2f s", time.monotonic() - began)

    def resume(self, bound: int, settings: Settings) -> None:
        """Stream again after `suspend`, with ``bound`` bytes or the least budget that works. Raises as `open` does."""
        assert self.session is not None
        began = time.monotonic()
        limit = parse_limit(settings.vram, comfyui_api.device_bytes(self.session.device))
        bar = comfyui_api.LoadingBar()
        ram = None
        if self.from_disk:
            self._share_ram(settings)
            ram = self.ram
        with _laying_out(), progress_listener(bar):
            try:
                self.session.set_budget(vram=bound, ram=ram)
            except BudgetError as error:
                if error.least_bytes is None or error.least_bytes > limit:
                    raise
                bound = error.least_bytes
                self.session.set_budget(vram=bound, ram=ram)
            self.session.unpark()
        _suspended.pop(self, None)
        self.suspended, self.budget = False, bound
        self._measure()
        logger.info("Carom: weights laid out again in %.2f s", time.monotonic() - began)
        bar.finish()

    def move_rest(self, device: Any) -> None:
        """Move what the session does not stream to ``device``: ComfyUI's own modules beside the diffusion model."""
        model = self._model()
        assert model is not None
        root, entrances = root_of(model)
        if not entrances:
            for child in model.children():
                if child is not root:
                    child.to(device)
        model.device = device  # type: ignore[assignment]

    def rank(self, priority: str) -> None:
        """Rank the session among others that share memory with it. "normal" leaves an earlier rank unchanged."""
        assert self.session is not None
        if priority == "high":
            self.session.prioritize()
        elif priority == "low":
            self.session.deprioritize()

    def give_up_pins(self) -> None:
        """Move a suspended model's bytes from pinned to ordinary host memory, so that other models can pin theirs."""
        if self.session is not None and self.suspended:
            self.session.unpin()
            self._count_pinned()

    def expect_successor(self) -> None:
        """Close the session at the next call of the model's ``named_modules``, unless `succeed` is called before.

        Called after a patcher of Carom released the model. A call of ``named_modules`` without `succeed` means that a
        patcher of ComfyUI's own is about to load the model.
        """
        model = self._model()
        if self.session is not None and model is not None:
            model.__dict__["named_modules"] = functools.partial(_taken_over, weakref.ref(self))

    def succeed(self) -> bool:
        """Undo `expect_successor`, because a patcher of Carom loads the model; return whether it was in effect."""
        model = self._model()
        return model is not None and model.__dict__.pop("named_modules", None) is not None

    def close(self) -> None:
        """Close the session and restore the model as it was before, on the host. Idempotent."""
        self.succeed()
        if self.suspended and self.packs and self.session is not None and self.session.device.type != "cpu":
            with contextlib.suppress(Exception), _laying_out():  # else weights are unpacked on the host
                self.session.unpark()
        self.active = self.suspended = False
        _suspended.pop(self, None)
        session, self.session, self.budget = self.session, None, None
        self.from_disk, self.ram, self._views = False, 0, []
        _open.discard(self)
        if session is None:
            return
        if self._ends is not None:
            self._ends.detach()
        with contextlib.suppress(Exception):
            self._last = session.report()
        try:
            with _laying_out():
                session.close()
        finally:
            self._undo.close()
            self.dressed = False
            comfyui_api.count_pinned(-self._pins[0])
            self._pins[0] = self.held = self.weights = self.streamed = 0

    # -- figures

    @property
    def total(self) -> int:
        """The size of the model in bytes."""
        if not self._total:
            model = self._model()
            assert model is not None
            self._total = comfyui_api.module_bytes(model)
        return self._total

    def in_memory(self) -> int:
        """Return the bytes of RAM that the weights take. Views of mapped files take none while there is no session."""
        model = self._model()
        if self.session is not None or model is None:
            return self.ram
        return sum(tensor.nbytes for tensor in weights_in_memory(model))

    def _measure(self) -> None:
        report = self.report()
        assert report is not None
        slots = report.slot_bytes + report.staging_bytes
        self.held = report.resident_bytes + report.adapter_bytes + slots
        self.weights = report.weight_bytes + report.adapter_bytes
        self.streamed = report.streamed_bytes
        self.from_disk = report.ram_budget_bytes > 0
        self._count_pinned()

    def _count_pinned(self) -> None:
        report = self.report()
        assert report is not None
        comfyui_api.count_pinned(report.pinned_bytes - self._pins[0])
        self._pins[0] = report.pinned_bytes

    def report(self) -> Report | None:
        """Return the report of the session, or of the last session; None if there was no session."""
        return self._last if self.session is None else self.session.report()

    def line(self, loaded: int, stall: float | None = None) -> str:
        """Return a line of text for the node. ``loaded``: bytes that ComfyUI loaded; ``stall``: as in `describe`."""
        if self.streams:
            return describe("stream", self.held, self.streamed, self.budget, stall, self.weights)
        return describe(self.note or "whole", loaded, 0, None)

    def tell(self) -> None:
        """Show residency and stall on the node, at most every `TELL_EVERY_S` seconds. Called before each pass."""
        now = time.monotonic()
        if self.session is not None and self.streams and now - self._told >= TELL_EVERY_S:
            self._told = now
            comfyui_api.show(self.line(self.held, self.session.stall_share()), self._node)

    def stall_share(self) -> float | None:
        """Return the share of the last steps' time that was spent waiting for weights, None before any measurement.

        The call waits for the device.
        """
        report = self.report()
        if report is None or not report.step_seconds or report.stall_seconds is None:
            return None
        return report.stall_seconds / report.step_seconds


def streaming_of(model: nn.Module) -> Streaming:
    """Return the model's `Streaming`, made at the first call. The model owns it."""
    found = model.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = model.__dict__[_ATTRIBUTE] = Streaming(model)
    return found


def known_streaming(model: Any) -> Streaming | None:
    """Return the model's `Streaming`, None if the model has none."""
    return getattr(model, "__dict__", {}).get(_ATTRIBUTE)


def free_ram(value: str) -> int:
    """Return the bytes of RAM that a widget ``ram`` with ``value`` leaves for the weights of one more model."""
    held = sum(one.in_memory() for one in list(_all))
    return max(0, comfyui_api.ram_limit(value, held) - held)


def mapped_views(root: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each weight of ``root`` that is in a mapped file, with a tensor over its memory."""
    files = MappedFiles()
    found = {}
    for tensor in (*root.parameters(), *root.buffers()):
        if is_on_host(tensor) and files.contains(tensor.data_ptr(), tensor.nbytes):
            found[id(tensor)] = tensor, tensor.detach()
    return list(found.values())


def _make_pin_room(nbytes: int) -> None:
    """Unpin suspended models until ComfyUI's limit allows to pin ``nbytes`` for the model that is about to run."""
    for streaming in list(_suspended):
        if comfyui_api.pin_room() >= nbytes:
            return
        streaming.give_up_pins()


@contextlib.contextmanager
def _laying_out() -> Iterator[None]:
    """Context for moving weights: disable inference mode and ComfyUI's recording of a block's allocations."""
    with torch.inference_mode(False), torch.no_grad(), comfyui_api.lasting_allocations():
        yield


def _dropped(reference: weakref.ref[Streaming], pins: list[int]) -> None:
    """Close the session of a model that ComfyUI deleted.

    The session's device memory is released at once, not at the next collection of reference cycles, because ComfyUI
    offers the free memory to the model that it loads next.
    """
    streaming = reference()
    session = None if streaming is None else streaming.session
    try:
        comfyui_api.count_pinned(-pins[0])
        pins[0] = 0
        if streaming is not None and session is not None:
            streaming.session, streaming.active, streaming.suspended = None, False, False
            streaming.ram, streaming._views = 0, []
            _suspended.pop(streaming, None)
            with _laying_out():
                session.close(discard=True)
    except Exception as error:  # a finalizer has no caller to raise to
        logger.warning("Carom: a model that was dropped could not give its memory back: %s", str(error))


def _taken_over(reference: weakref.ref[Streaming], *args: Any, **kwargs: Any) -> Any:
    streaming = reference()
    model = None if streaming is None else streaming._model()
    assert streaming is not None and model is not None  # called as the model's attribute, so both exist
    streaming.close()
    own_memory(model)
    return model.named_modules(*args, **kwargs)


def _guard(reference: weakref.ref[Streaming], root: nn.Module, args: Any) -> None:
    """Prepare for a pass: replace weights that ComfyUI exchanged since the last pass (merged LoRA) by ordinary tensors.

    The weights that ComfyUI put there are inference tensors. The call also records a changed budget and updates the
    node.
    """
    streaming = reference()
    model = None if streaming is None else streaming._model()
    if streaming is None or model is None:
        return
    streaming.follow()
    found = (
        getattr(model, "current_weight_patches_uuid", None),
        getattr(model, "model_loaded_weight_memory", 0),
    )
    streaming.tell()
    if found != streaming.expected:
        streaming._take_apart(root)
        own_tensors(root)
        streaming.expected = found


def _nothing() -> None:
    pass


def _quiet(function: Callable) -> Callable:
    """Return a wrapper of ``function`` that torch.compile does not trace, without importing the compiler."""

    def call(*args: Any) -> None:
        function(*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
