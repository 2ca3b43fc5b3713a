"""`Streaming`: the session of one model that ComfyUI loaded, shared by all patchers of the model."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..core.common.errors import BudgetError
from ..core.common.progress import progress_listener
from ..core.common.sizes import round_up_to_mib
from ..core.metrics.report import Report
from ..core.plan.region import ALIGN
from ..core.session.session import Session
from . import comfyui_api, successor
from .before_pass import before_each_pass
from .file_views import FileViews
from .host_share import Share
from .inference_tensors import MAPPED
from .least_budget import LeastBudgets, suffices
from .leftover_memory import TakesRoom
from .model_changes import ModelChanges
from .module_roots import Scope, part_name, prepare, root_of
from .node_settings import Settings, describe, parse_limit
from .opening import open_session
from .prepared_patches import PreparedPatches
from .shared_ram import all_models, open_models, suspended_models, take_share
from .spilled_weights import spill_weights, weights_in_memory

logger = logging.getLogger("carom")
_ATTRIBUTE = "_carom_streaming"
TELL_EVERY_S = 2.0
SLOTS = 2 << 30  # bytes; at most so many of a budget are slots and staging, before a layout was made
ROUNDING = 32  # the cache of weights on disk takes at most 1/32 more than the weights that stream through it


class Streaming(TakesRoom):
    """Holds at most one session for a model, and opens, resizes and closes it as ComfyUI loads and unloads the model.

    ``session``: the session, None before `open` and after `close`; ``packs``: whether weights may wait packed;
    ``active``: whether Carom has the weights, or is about to take them; ``suspended``: whether ComfyUI unloaded the
    model while the session keeps the weights on the host; ``budget``: the session's budget in bytes; ``held``: bytes on
    the device (resident, adapters, slots, staging); ``weights``: bytes of all weights, each counted once; ``streamed``:
    bytes of streamed weights; ``slots``: bytes of slots and staging; ``layout_bytes``: ``held`` under the last layout,
    to which a suspended model returns; ``layout_streams``: ``streamed`` under that layout; ``note``: why the model does not stream, "" if it may; ``settings``: those of the patcher
    that loaded the model last; ``limit_changed``: whether the user has changed the device memory that he allows since
    the budget was set; ``expected``: ComfyUI's id of the
    model's patches and its count of loaded bytes, as last seen; ``from_disk``: whether the weights stream from disk;
    ``files``: paths of the files from which the model was loaded; ``was_dynamic``: whether a dynamic patcher of ComfyUI had the model
    before; ``loads_whole``: whether ComfyUI is loading the weights itself;
    ``ram``: bytes of RAM that the weights may take, 0 without a session; ``changes``: what Carom changed in the model;
    ``patches``: copies on the device for the model's patches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._reference = weakref.ref(model)  # weak, because the model holds this object
        all_models.add(self)
        self.session: Session | None = None
        self.packs = False
        self.active = False
        self.suspended = False
        self.budget: int | None = None
        self.held = self.layout_bytes = 0
        self.weights = 0
        self.streamed = self.layout_streams = self.slots = 0
        self.note = ""
        self.settings: Settings | None = None
        self.limit_changed = False
        self.expected: tuple = ()
        self.from_disk = False
        self.files: tuple[str, ...] = ()
        self.was_dynamic = self.loads_whole = False
        self.ram = 0
        # Weights that were in a mapped file before the session took them.
        self._views: FileViews | None = None
        self._many_passes = True
        self._total = self._tensors = 0
        self._least = LeastBudgets()
        self._pins = [0]  # bytes that ComfyUI counts as pinned for this model
        self._ends: weakref.finalize | None = None
        self._last: Report | None = None
        self.changes = ModelChanges()
        self.patches = PreparedPatches()
        self._node = ""  # id of the node that shows progress text
        self._told = 0.0

    @property
    def model(self) -> nn.Module | None:
        """The model, None if it was dropped."""
        return self._reference()

    # -- life

    def check(self, device: torch.device, settings: Settings) -> None:
        """Raise BudgetError if the user's own limit is less than the least budget that works on ``device``.

        Nodes call this while they run, so that ComfyUI shows the error on the node that has the widget. Raises
        UnsupportedError if the weights cannot be streamed and mode is "stream".
        """
        limit = parse_limit(settings.vram, comfyui_api.device_bytes(device))
        model = self.model
        assert model is not None
        if limit >= self.total or suffices(model, limit, settings):
            return
        least = self._least.least(model, self.session, device, settings)
        if least > limit:
            raise BudgetError(
                f"vram={settings.vram} is too small for this {part_name(model)}: set vram on this node to {round_up_to_mib(least)} or more, "
                "or to auto",
                least,
            )

    def follow_settings(self, settings: Settings) -> None:
        """Note the settings of the patcher that is about to load the model.

        Close the session if the weights have to be laid out in another way. The load then opens a new one.
        """
        before, self.settings = self.settings, settings
        if before is None:
            return
        self.limit_changed = self.limit_changed or not settings.limits_as(before)
        if self.limit_changed or not settings.lays_out_as(before):
            self.note = ""  # what the user changed may have been the reason
        if not settings.lays_out_as(before):
            self.close()

    def open(self, device: torch.device, bound: int, settings: Settings, compiled: bool = False) -> None:
        """Open a session with a budget of ``bound`` bytes of ``device``, or the least that works if that is more.

        ``compiled``: whether a compile node wrapped the model.

        Raises BudgetError if the user's own limit is less than that budget, or another CaromError. The model is
        unchanged then.
        """
        model, began = self.model, time.monotonic()
        assert model is not None and self.session is None
        root, entrances = root_of(model)
        self._many_passes = not entrances
        self.changes.take_weights_apart(root)
        bar = comfyui_api.LoadingBar()
        # The bytes of GGUF weights cannot be packed further, and GGUF weights are not read through their parameters.
        if self.changes.dressed:
            settings = replace(settings, codec="raw")
        try:
            prepare(root)
            limit = parse_limit(settings.vram, comfyui_api.device_bytes(device))
            share = self._share_ram(settings, bound)
            with comfyui_api.laying_out(), progress_listener(bar):
                self._views = FileViews(root)
                session, bound = open_session(
                    root, device, bound, limit, share, self.total, settings, compiled
                )
        except BaseException:
            self.changes.undo()
            raise
        self.session, self.budget, self.packs = session, bound, settings.codec != "raw"
        open_models.add(self)
        # Not a weak reference: the collector clears it before the call if model and `Streaming` die together.
        self._ends = weakref.finalize(model, _dropped, self, self._pins)
        self._ends.atexit = False
        self.changes.enter_by(model, root, entrances)
        self.changes.undo_later(before_each_pass(root, self))
        logger.info("Carom: weights laid out in %.2f s", time.monotonic() - began)
        self.changes.shorten(root)
        self._measure()
        self._node, self._told = settings.node, time.monotonic()
        bar.finish()  # raises if the user cancelled; the caller then closes the session

    def _share_ram(self, settings: Settings, budget: int) -> Share:
        """Set `ram` to the bytes of RAM that the weights get, and take RAM from other models for it.

        ``budget``: bytes of the device for weights.
        """
        if self.layout_bytes:
            # A pass may bring a budget back to ComfyUI's offer. More streams then, in whole units.
            less = max(0, self.layout_bytes - min(budget, self.offer or budget))
            streams = self.layout_streams + less + (self.slots // 2 if less else 0)
        else:  # no layout was made yet: a part of the budget is for slots
            streams = max(0, self.total - budget) + SLOTS
        streams = min(self.total, streams + streams // ROUNDING)
        share = take_share(self, self.total, streams, self._many_passes, settings.ram)
        self.ram = min(self.total, share.nbytes) if share.whole else share.nbytes
        return share

    def claim_ram(self, settings: Settings) -> None:
        """Take the RAM that a run needs for weights on disk from models that run no more. Called before each run."""
        if not self.streams or not self.from_disk or self.ram >= self.streamed or len(open_models) < 2:
            return
        assert self.session is not None
        before = self.ram
        assert self.budget is not None
        self._share_ram(settings, self.budget)
        if self.ram > before:
            with comfyui_api.laying_out():
                self.session.set_budget(ram=self.ram)
            self._measure()
        else:
            self.ram = before

    def give_up_ram(self, nbytes: int) -> None:
        """Reduce the RAM of the model to ``nbytes`` bytes, or to none if it is suspended and waits in RAM as a whole.

        Weights that were views of a mapped file are views of it again. The others are spilled.
        """
        model = self.model
        assert self.session is not None and model is not None
        if self.from_disk:
            with comfyui_api.laying_out():
                self.session.set_budget(ram=nbytes)
            self.ram = nbytes
            self.count_pinned()
            return
        views = self._views
        self.close()
        with comfyui_api.laying_out():
            if views is not None:
                views.restore()
            model.__dict__[MAPPED] = True  # on Windows nothing may be written to spilled weights
            spill_weights(root_of(model)[0])

    def resize(self, budget: int) -> int:
        """Change the budget to ``budget`` bytes, or the least that works if that is more; return the bytes given back.

        Keep the budget and return 0 if the least budget that works is not less than the bytes held.
        """
        assert self.session is not None
        before, began = self.held, time.monotonic()
        with comfyui_api.laying_out():
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

    @contextlib.contextmanager
    def loading_whole(self) -> Iterator[None]:
        """Context in which ComfyUI loads the weights itself."""
        self.loads_whole = True
        try:
            yield
        finally:
            self.loads_whole = False

    @property
    def streams(self) -> bool:
        """Whether a session has the weights and is not suspended."""
        return self.session is not None and not self.suspended

    @property
    def in_pass(self) -> bool:
        """Whether the caller is called by a forward of the model: by a node that loads another model there."""
        return self.session is not None and self.session.in_pass

    def suspend(self, attached: bool = False) -> None:
        """Release the device, because ComfyUI unloads the model or needs its memory.

        Weights on the host stay pinned or packed as they are, so that `resume` only copies bytes to the device.
        ``attached``: ComfyUI's patches stay attached, so that the model can run before its next load, which `follow`
        then notes.
        """
        assert self.session is not None
        began = time.monotonic()
        self.patches.put_aside()
        with comfyui_api.laying_out():
            self.session.park(keep=True)
        self.suspended, self.active = True, attached
        self.held = self.weights = self.streamed = 0
        self.count_pinned()
        suspended_models[self] = None
        logger.info("Carom: the device was released in %.2f s", time.monotonic() - began)

    def resume(self, budget: int | None, settings: Settings) -> None:
        """Stream again after `suspend`: as before if ``budget`` is None, else with ``budget`` bytes, or the least budget
        that works. Raises as `open` does.
        """
        assert self.session is not None and self.budget is not None
        bound = self.budget if budget is None else budget
        began = time.monotonic()
        limit = parse_limit(settings.vram, comfyui_api.device_bytes(self.session.device))
        bar = comfyui_api.LoadingBar()
        ram = None
        if self.from_disk:
            self._share_ram(settings, bound)
            ram = self.ram
        with comfyui_api.laying_out(), progress_listener(bar):
            try:
                if budget is not None or ram is not None:
                    self.session.set_budget(vram=budget, ram=ram)
                self.session.unpark()
            except BudgetError as error:
                if error.least_bytes is None or error.least_bytes > limit or not self.session.parked:
                    raise
                bound = error.least_bytes
                self.session.set_budget(vram=bound, ram=ram)
                self.session.unpark()
        suspended_models.pop(self, None)
        self.suspended, self.budget = False, bound
        self._measure()
        logger.info("Carom: weights laid out again in %.2f s", time.monotonic() - began)
        bar.finish()

    def _came_back(self) -> None:
        """Note that a pass brought the weights of the suspended model to the device again."""
        suspended_models.pop(self, None)
        self.suspended, self.active = False, True
        self._measure()
        self.patches.prepare(self.patches.room)

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
            self.patches.release()
            self.count_pinned()

    def expect_successor(self) -> None:
        """Close the session if a patcher of ComfyUI's own loads the model next, not a patcher of Carom.

        Called after a patcher of Carom released the model.
        """
        model = self.model
        if self.session is not None and model is not None:
            successor.expect_successor(model, self)

    def succeed(self) -> bool:
        """Undo `expect_successor`, because a patcher of Carom loads the model; return whether it was in effect."""
        model = self.model
        return model is not None and successor.succeed(model)

    def close(self) -> None:
        """Close the session and restore the model as it was before, on the host. Idempotent."""
        self.succeed()
        self.patches.release()
        if self.suspended and self.packs and self.session is not None and self.session.device.type != "cpu":
            with (
                contextlib.suppress(Exception),
                comfyui_api.laying_out(),
            ):  # else weights are unpacked on the host
                self.session.unpark()
        self.active = self.suspended = False
        suspended_models.pop(self, None)
        session, self.session, self.budget = self.session, None, None
        self.from_disk, self.ram, self._views = False, 0, None
        open_models.discard(self)
        if session is None:
            return
        if self._ends is not None:
            self._ends.detach()
        with contextlib.suppress(Exception):
            self._last = session.report()
        try:
            with comfyui_api.laying_out():
                session.close()
        finally:
            self.changes.undo()
            comfyui_api.count_pinned(-self._pins[0])
            self._pins[0] = self.held = self.weights = self.streamed = 0
            self.layout_bytes = self.layout_streams = 0
            self.left = None

    # -- figures

    @property
    def total(self) -> int:
        """The size of the model in bytes."""
        if not self._total:
            self.measure_model()
        return self._total

    @property
    def total_aligned(self) -> int:
        """The most bytes of device memory that the whole model takes. Each tensor begins there at a multiple of `ALIGN`."""
        return self.total + ALIGN * self._tensors

    def measure_model(self) -> None:
        """Determine `total` anew, because weights were converted."""
        model = self.model
        assert model is not None
        self._total = comfyui_api.module_bytes(model)
        self._tensors = sum(1 for _ in chain(model.parameters(), model.buffers()))

    def in_memory(self) -> int:
        """Return the bytes of RAM that the weights take. Views of mapped files take none while there is no session."""
        model = self.model
        if self.session is not None or model is None:
            return self.ram
        return sum(tensor.nbytes for tensor in weights_in_memory(model))

    def ram_now(self) -> int:
        """Return the bytes of RAM that the session's weights take now: less than `ram` while a cache of weights on disk is
        not full.
        """
        report = self.report()
        if not self.from_disk or report is None:
            return self.ram
        return min(self.ram, report.pinned_bytes + report.pageable_bytes)

    def _measure(self) -> None:
        report = self.report()
        assert report is not None
        self.slots = report.slot_bytes + report.staging_bytes
        self.held = report.resident_bytes + report.adapter_bytes + self.slots
        self.weights = report.weight_bytes + report.adapter_bytes
        self.streamed = report.streamed_bytes
        self.layout_bytes, self.layout_streams = self.held, self.streamed
        self.from_disk = report.ram_budget_bytes > 0
        self.count_pinned()

    def count_pinned(self) -> None:
        """Let ComfyUI count the session's pinned memory among its own."""
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
            if not self.streamed:
                return describe("whole", self.loaded, 0, None)
            budget = None if self.budget is None else self.budget + self.patches.nbytes
            return describe("stream", self.loaded, self.streamed, budget, stall, self.weights)
        if self.suspended:
            return describe("the weights wait in host memory", 0, 0, None)
        return describe(self.note or "whole", loaded, 0, None)

    def tell(self) -> None:
        """Show residency and stall on the node, at most every `TELL_EVERY_S` seconds. Called before each pass."""
        now = time.monotonic()
        if self.session is not None and self.streams and now - self._told >= TELL_EVERY_S:
            self._told = now
            comfyui_api.show(self.line(self.loaded, self.session.stall_share()), self._node)

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


def _dropped(streaming: Streaming, pins: list[int]) -> None:
    """Close the session of a model that ComfyUI deleted.

    The session's device memory is released at once, not at the next collection of reference cycles, because ComfyUI
    offers the free memory to the model that it loads next.
    """
    session = streaming.session
    try:
        comfyui_api.count_pinned(-pins[0])
        pins[0] = 0
        streaming.patches.release()
        if session is None:
            return
        streaming.session, streaming.active, streaming.suspended = None, False, False
        streaming.ram, streaming._views = 0, None
        suspended_models.pop(streaming, None)
        root = session.module  # shares its attributes with the model, which is gone
        successor.succeed(root.model if isinstance(root, Scope) else root)
        try:
            with comfyui_api.laying_out():
                session.close(discard=True)
        finally:
            streaming.changes.undo()  # these are references of the model's modules to themselves
    except Exception as error:  # a finalizer has no caller to raise to
        logger.warning("Carom: a model that was dropped could not give its memory back: %s", str(error))
