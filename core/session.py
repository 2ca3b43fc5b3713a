"""`carom.stream` and `Session`: attach a module to a device under a budget, run it, report, close.

Where its weights wait meanwhile, and how they get there: `layout.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from . import decide, ops, sessions, settings
from .account import make_report
from .adapt import OutOfMemory
from .attach import wanted_residents
from .checkpoint import Checkpoint
from .deliver import refuse_data_parallel
from .disk_streamer import DiskStreamer
from .errors import BudgetError, CaromError
from .host_copies import HostCopies
from .in_front import InFront
from .layout import LaysOut
from .packed_placement import PackedPlacement
from .packed_tensors import PackedTensor, give_back
from .report import Report
from .rerun import Reruns
from .shared import SharedBudget
from .simulated import SimulatedEngine
from .store.arena import HostArena
from .transfer import Engine, make_engine
from .wrapped import LaidOpen


def stream(
    module: nn.Module,
    *,
    device: Any = None,
    vram: int | str | SharedBudget = "auto",
    ram: int | str = "auto",
    weights: Any = None,
    granularity: str = "auto",
    codec: str = "auto",
    pool: str = "auto",
    host: str = "auto",
    training: str | None = None,
) -> Session:
    """Run ``module`` on ``device`` with at most ``vram`` bytes of weights there; the rest waits on the host.

    ``module``: on the CPU, on the device, or on ``meta`` with ``weights``; it is used as before, and is itself again
    after `Session.close` (also by ``with``). ``weights``: a .safetensors file, a folder of shards, its index.json, or
    a `Weights`: the values come from there, through a host cache of at most ``ram`` bytes, and are frozen; outside
    its unit's run such a parameter is a ``meta`` tensor (`Session.read` gives its value).
    ``device``: default the current accelerator, else the CPU; or a `SimulatedDevice`.
    ``vram``, ``ram``: bytes, "8GiB", "8GB", "50%" of what is free, or "auto": ``vram`` starts with 70 % of
    what is free on the device less 1 GiB, and after the first steps takes what they leave, with headroom,
    and gives way when memory runs short; a `SharedBudget` bounds several sessions together; for ``ram`` 80 % of what is available, less where a container allows
    less (it bounds pinned memory; what does not fit is streamed from pageable memory, more slowly; with
    ``weights`` it bounds the cache).
    ``granularity``: "block", "phase", "layer", or "auto" (blocks, split where two would not fit).
    ``codec``: "raw", "lossless" (bf16, fp16, fp32 and fp8 weights wait and cross packed, and are unpacked on the device,
    every bit), or "auto" (lossless where Triton runs). Outside its unit's run a packed parameter has no bytes of its
    own; operators and `Session.read` are given its value.
    ``pool``: "torch" (its allocator), "aimdo" (comfy-aimdo's VBARs: resident weights give way when other memory is needed; weights cross as
    they are), or "auto": aimdo where it is installed, supported and nobody else's, and weights are not packed; where it
    cannot be had, torch's, and `Report.pool_reason` says why.
    ``host``: "raw" (a streamed parameter is its raw host tensor outside its unit's run, also when it crosses packed:
    then host memory holds both) or "auto".
    ``training``: "resident" or "stream" for trainable weights; None keeps them resident unless they
    alone exceed the budget, then they stream and their gradients arrive on the host.

    Raises BudgetError (with the least budget that works), UnsupportedError, WeightsError, PinError.
    """
    return Session(
        module, device=device, vram=vram, ram=ram, weights=weights, granularity=granularity,
        codec=codec, pool=pool, host=host, training=training,
    )  # fmt: skip


class Session(LaysOut):
    """A module attached to a device. Made by `stream`; a context manager that closes itself."""

    def __init__(
        self, module: nn.Module, *, device: Any, vram: int | str | SharedBudget, ram: int | str, weights: Any, granularity: str,
        codec: str, pool: str, host: str, training: str | None, backward: bool = False,
    ) -> None:  # fmt: skip
        """``backward``: backwards are to go through the module, though nothing in it trains (adapters that others keep)."""
        settings.check(module, weights, granularity, codec, pool, host, training)
        sessions.refuse_streamed(module)
        self.module = module
        self._granularity, self._training, self._backward = granularity, training, backward
        self._checkpoint: Checkpoint | None = None
        self._engine: Engine = make_engine(device)
        self._shared = vram if isinstance(vram, SharedBudget) else None
        waiting = self._waiting_bytes() if weights is None else 0
        self._vram, self._spill = settings.within_dedicated(
            settings.vram_budget(vram, self._engine, waiting=waiting), self._engine, waiting
        )
        self._ram = self._ram_budget(ram, waiting)
        self._lock = threading.RLock()
        self._closed = True  # until attached
        self._parked = False
        self._aside = False
        self._front = InFront(self)
        self._watch: Callable[[], Any] = self._engine.step
        self._peak = 0
        self._reruns: Reruns | None = None
        self._chooses_pool(pool)
        self._stay: dict[str, str] = {}
        self._searched = {}
        self._among: frozenset[str] | None = None  # units that alone may stay, after a budget that fell
        self._packing = settings.packing(codec, host, weights, self._engine)
        if self._packing is not None and self._packing.auto and decide.compiled(module):
            self._packing = None  # guards of compiled code look at weights that packed ones do not show
        if self._packing is not None and self._native is not None:
            if pool == "aimdo" and codec == "auto":
                self._packing = None
            else:
                self._refuse_pool(
                    "packed weights are unpacked into torch's memory; codec='raw' leaves the choice"
                )
        self._shelf: dict[int, PackedTensor] = {}
        self._copies = HostCopies()
        self._follow_ram(ram == "auto" and weights is None)
        self._arena = HostArena(self._engine.pinner, self._pin_limit())
        self._arena.spare = self._copies.spare
        self._laid_open = None
        self._graphs = WeakSet()
        try:
            self._adapts(vram == "auto" or self._shared is not None)
            if weights is not None:
                self._checkpoint = Checkpoint(module, weights)
                unpacks = self._engine.unpacks or isinstance(self._engine, SimulatedEngine)
                if unpacks and codec == "auto" and self._native is None:
                    self._checkpoint.stay_packed(self._engine)
                self._follow_ram(ram == "auto")
                self._set_look()
            else:
                self._laid_open = LaidOpen(module)
            self._first_attach(vram)
            sessions.enter(self)
        except BaseException:
            self._ungovern()
            self._end()
            raise

    # -- attach and close

    def _first_attach(self, vram: int | str | SharedBudget) -> None:
        shared = self._shared
        had = 0 if shared is None else shared.nbytes
        # Another new one waits until this one is laid out, and is given room then. Sessions that run do not: what this one is
        # about to hold is promised.
        with self._coming(shared), self._growing():
            try:
                with self._taking():
                    if shared is not None:
                        self._first_budget(vram)
                    if self._governor is not None and self._make_room(self._vram):
                        self._first_budget(vram)
                    self._laying = 0 if shared is None else self._vram
                self._attach()
            except BudgetError as error:
                # What activations take is not known yet: begin with the least, if it is there at all.
                least = error.least_bytes or 0
                if (vram != "auto" and shared is None) or not least:
                    raise
                with self._taking():
                    self._laying = 0
                    self._begin_with(least, had, error)
                self._attach()
            finally:
                self._laying = 0

    def _begin_with(self, least: int, had: int, error: BudgetError) -> None:
        """Take ``least`` bytes, if they are there at all. ``had``: bytes of a shared budget before others gave way."""
        shared = self._shared
        if shared is not None:
            self._ask(least - shared.free_bytes)
            shared.fall_back(least, had)
        free = self._engine.free_bytes() if shared is None else shared.free_bytes
        if least > free:
            if shared is None or least > shared.nbytes:
                raise error
            raise self._too_little(free, least) from error
        self._vram = least
        self._laying = 0 if shared is None else least

    def _first_budget(self, vram: int | str | SharedBudget) -> None:
        """What is there by now."""
        waiting = self._waiting_bytes()
        budget = settings.vram_budget(vram, self._engine, waiting=waiting)
        self._vram, self._spill = settings.within_dedicated(budget, self._engine, waiting)

    def _ram_budget(self, ram: int | str, waiting: int, held: int = 0) -> int:
        """Beside what weights take of the same memory on a device that shares it, less what they ``held`` there already."""
        if not self._engine.shares_host:
            return settings.ram_budget(ram)
        tensors = (*self.module.parameters(), *self.module.buffers())
        on_device = min(self._vram, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return settings.ram_budget(ram, max(0, on_device - held), waiting)

    def close(self, *, discard: bool = False) -> None:
        """Give the module back as it was: objects, classes, devices; values as they are now. Idempotent.

        ``discard``: the module is about to be dropped; what stays on the device is left there instead of
        being brought home, which could take as much host memory as the device has.
        """
        with self._lock:
            if self._closed:  # what found no memory last time
                self._unbind()
                sessions.leave(self)
                return
            self._final = self._report()
            packed = self._placement if isinstance(self._placement, PackedPlacement) else None
            if packed is not None and not self._parked and not discard:
                packed.unpack(self._streamer, packed.streamed, pin=False)
            if discard:
                self._placement.here.given()  # stays there: nobody wants it back
            try:
                self._end(discard)
            except BaseException:
                if (
                    not self._closed
                ):  # what is left on the device is brought home by the next close, or layout
                    self._is_parked()
                raise

    def _end(self, discard: bool = False) -> None:
        """All that this session put into its module, and joined, is undone. May be called again where it failed."""
        if "_placement" in self.__dict__:
            self._detach()
            if discard and isinstance(self._placement, PackedPlacement):
                self._placement.wear()
                self._shelf = {}
        self._parked = False
        self._ungovern()  # only now is what it held others'
        self._copies.clear()
        self._unbind()
        sessions.leave(self)

    def _unbind(self) -> None:
        """Values that were elsewhere are the module's own again, and calls of it are nobody else's."""
        self._front.leave()
        give_back(self._shelf, self._engine.move)
        if self._checkpoint is not None:
            self._checkpoint.unbind()
        if self._laid_open is not None:
            self._laid_open.close()

    def __enter__(self) -> Session:
        self._need_open()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _need_open(self) -> None:
        if self._closed:
            raise CaromError("this session is closed; call carom.stream(module, ...) for a new one")

    # -- passes

    def _begin(self, compiling: bool = False) -> Any:
        ops.refuse_transforms(type(self.module).__name__)
        with self._lock:  # whoever lays the weights out anew, or unparks them, is done
            if not self._ready():
                return None, None
            self._note_recording()
            streamer = self._streamer
            if torch.is_grad_enabled():
                refuse_data_parallel(streamer.units)
            with streamer.lock:
                if isinstance(streamer, DiskStreamer) and streamer.residents.waiting:
                    streamer.begins(compiling or decide.compiled(self.module))
                streamer.runs.root_begins()
                if self._reruns is not None:
                    self._pass_begins(self._reruns, compiling)
        return streamer, self._engine.step()

    def _ready(self) -> bool:
        """Do what is due before a pass, be it another layout; False where the session is closed."""
        with self._lock:
            if self._parked:
                self.unpark()
            if self._closed:
                return False
            streamer = self._streamer
            with streamer.lock:
                if self._packing is not None and self._packing.keep_raw and streamer.idle:
                    self._pack_anew()
                if streamer.idle:  # during a pass slots stand in the tree, and nothing may move
                    if self._tree.changed():
                        self._adopt()
                    elif streamer.runs.to_stay:
                        self._let_stay()
                    elif self._meter.settled >= self._look_at:
                        self._look()
            return True

    # -- settings and bytes

    def set_budget(self, vram: int | str | SharedBudget | None = None, ram: int | str | None = None) -> None:
        """Change budgets between steps; the old ones stay when the new ones are impossible.

        Raises BudgetError with the least budget that works, and UnsupportedError between a forward and its backward. Where
        laying out fails otherwise, the session is parked, and the next forward tries again.
        """
        with self._lock, contextlib.ExitStack() as taking:
            self._need_open()
            self._refuse_graphs()
            if isinstance(vram, SharedBudget):
                if vram is not self._shared:
                    taking.enter_context(self._coming(vram))
                taking.enter_context(vram.mates.lock)
                if vram is not self._shared:
                    self._make_room(vram.free_bytes, vram)
            before, among = (self._vram, self._ram, self._kept), self._among
            shared, governed, room = self._shared, self._governor is not None, self._room
            if vram is not None:
                mine, waiting = self._held_bytes(), self._waiting_bytes()
                if isinstance(vram, SharedBudget):
                    mine = self._promised_bytes() + self._kept_bytes() if vram is self._shared else 0
                budget = settings.vram_budget(vram, self._engine, mine, waiting)
                self._vram, self._spill = settings.within_dedicated(budget, self._engine, mine + waiting)
                # What stays under less is a part of what stayed: nothing has to come for a budget that falls.
                fell = self._vram < before[0] and not self._parked
                self._among = self._residents() if fell else None
                self._kept = None
            if ram is not None:
                self._ram = self._ram_budget(ram, self._waiting_bytes(), self._held_bytes())
            try:
                carving, plan = self._decide()
                if self._checkpoint is not None:
                    streamed = wanted_residents(carving, plan)[1]
                    self._checkpoint.require_ram(self._ram, streamed, plan.staging_bytes, ram is None)
            except BaseException:
                (self._vram, self._ram, self._kept), self._among = before, among
                raise
            if vram is not None:
                self._ungovern()
                self._shared = vram if isinstance(vram, SharedBudget) else None
                self._govern(vram == "auto" or self._shared is not None)
                self._keeps = self._least() if self._parked and self._shared is not None else 0
            taking.close()
            less = self._ram < before[1]
            if self._parked:  # the next forward lays it out so
                self._peak_anew()
                if ram is not None:
                    self._follow_ram(ram == "auto")
                    self._set_look()
                if less:
                    self._copies.unpin()
                return
            with self._laying_out():
                try:
                    self._again(self._copies.unpin if less else lambda: None, retry=True)
                except OutOfMemory:  # what was there before did fit
                    (self._vram, self._ram, self._kept), self._among = before, among
                    if vram is not None:
                        self._ungovern()
                        self._shared = shared
                        self._govern(governed)
                        self._room = room
                    self._again()
                    raise
            if ram is not None:
                self._follow_ram(ram == "auto")
                self._set_look()

    def _residents(self) -> frozenset[str]:
        return frozenset(
            unit.name
            for index, unit in enumerate(self._carving.units)
            if index in self.plan.resident or index in self.plan.packed
        )

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self._engine.device

    # -- accounts

    def report(self) -> Report:
        """Figures since attaching (waits for the device); of a closed session, its last."""
        with self._lock:
            if self._closed:
                return self._final
            return self._report()

    def stall_share(self) -> float | None:
        """Of the last measured steps' time, the part that computing waited for weights; waits for nothing itself."""
        with self._streamer.lock:
            found = self._meter.medians()
        return (
            found.stall_seconds / found.seconds if found.seconds and found.stall_seconds is not None else None
        )

    def _report(self) -> Report:
        with self._streamer.lock:
            self._meter.finish()
        return make_report(
            self._holdings(self._parked),
            self._carving, self.plan, self._placement, self._arena, self._meter, self._engine.name,
            self._streamer.account() if isinstance(self._streamer, DiskStreamer) else None,
        )  # fmt: skip
