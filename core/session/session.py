"""`carom.stream` and `Session`: attach a module to a device under a memory budget, run the module, report, close."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..budget.shared_budget import SharedBudget
from ..common.errors import CaromError
from ..host.node_group import NodeGroup, together
from ..metrics.kernel_times import record_kernels
from ..metrics.report import Report
from ..plan.residency import Plan
from . import registry, settings
from .assembly import assemble
from .first_layout import lay_out_first
from .lifetime import end, end_with_module
from .module_moves import ModuleMoves, park
from .phase import Phase
from .policies.raise_budget import Inputs
from .stream_settings import StreamSettings
from .summary import make_report, stall_share


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
    disk: str | os.PathLike[str] | None = None,
    group: Any = None,
    peers: Sequence[tuple[Any, int | str]] = (),
) -> Session:
    """Run ``module`` on ``device`` with at most ``vram`` bytes of weights on the device. The other weights
    stay in host memory or in a file.

    Returns a `Session`. The module is used as before. `Session.close`, or the end of a ``with`` block,
    restores it. Weights are streamed in units: each unit (a group of weights) is copied to the device before
    the unit's forward runs.

    ``module``: a module on the CPU, on the device, or on ``meta`` with ``weights``.
    ``weights``: a .safetensors file, a folder of shards, its index.json, or a `Weights`. Values are read from
    the file, through a host cache of at most ``ram`` bytes, and are frozen. While its unit does not run, such
    a parameter is a ``meta`` tensor, and `Session.read` returns its value.
    ``device``: a device, or a `SimulatedDevice`. Default: the current accelerator, or the CPU if there is
    none.
    ``vram``: the budget for weights on the device: bytes, "8GiB", "8GB", "50%" (of the free memory), a
    `SharedBudget`, which limits several sessions together, or "auto". "auto" starts with 70 % of the device's
    free memory, minus 1 GiB. After the first steps the budget follows the memory that steps leave free, minus
    a reserve, and falls when memory runs short.
    ``ram``: the budget for pinned host memory: bytes, "8GiB", "8GB", "50%" (of the available memory), or
    "auto" (the bytes of the module's weights in host memory, and 80 % of the available memory, or less if a
    container allows less). Weights that do not fit are streamed from pageable memory, which is slower. With ``weights`` this is the budget of the host cache.
    ``granularity``: the size of units: "block", "phase", "layer", or "auto" (blocks; blocks of more than
    128 MiB are divided into parts, and so are blocks of which two would not fit. Compiled blocks, and packed
    blocks in training, are divided only if they would not fit).
    ``codec``: "raw" (weights are not packed), "lossless" (bf16, fp16, fp32 and fp8 weights are stored and
    copied to the device packed, and are unpacked there, bit for bit), or "auto" (lossless if Triton works).
    While its unit does not run, a packed parameter has no bytes of its own; operators and `Session.read` get
    its value.
    ``pool``: "torch" (torch's allocator), "aimdo" (address ranges of comfy-aimdo, VBARs: resident weights,
    which stay on the device, can lose their memory when other memory is needed, and weights are copied
    unpacked), or "auto" (aimdo if comfy-aimdo is installed, supported and not used by other code, and weights
    are not packed). If aimdo is unavailable, torch's allocator is used, and `Report.pool_reason` tells why.
    ``host``: "raw" (while its unit does not run, a streamed parameter is its plain host tensor, even if it is
    copied packed; host memory then holds both forms) or "auto".
    ``training``: "resident" or "stream" for trainable weights. None keeps trainable weights on the device,
    unless they alone exceed the budget. They then stream like frozen weights until a forward records gradients. That
    forward lays them out for training: their gradients are delivered to host memory.
    ``disk``: what happens to weights in memory that would be streamed and exceed ``ram``. With a folder, frozen
    weights are written to a file there once, which is deleted after its last use, and are streamed from it through
    a host cache of at most ``ram`` bytes. Weights that are views of a mapped file (loaders of safetensors files
    make such views) are streamed from that file and are not written. "auto": only views of mapped files are
    streamed from disk. None: weights beyond ``ram`` are streamed from pageable memory.
    ``group``: "world", a process group of torch.distributed, or a one-dimensional DeviceMesh, whose ranks all call
    `stream` with the same model. The ranks of a machine then share one copy of the frozen weights in host memory,
    and ``ram`` is the budget of all of them together. All tensors get the values of the first rank of the machine,
    trainable weights and buffers included. Use `prepare_for_ddp` before DistributedDataParallel.
    ``peers``: other devices whose memory holds streamed weights, as pairs of a device and the bytes of its memory, for
    example ``[("cuda:1", "8GiB")]``: bytes, "8GiB", "50%" (of its free memory) or "auto" (its free memory, minus a
    reserve). These weights are copied from there, beside the copies from host memory. The links are measured first,
    and weights stay on the host where that is faster.

    Raises BudgetError (with the smallest budget that works), UnsupportedError, WeightsError and PinError, and
    GroupError if another rank of ``group`` failed.
    """
    return Session(
        module,
        StreamSettings(
            device=device, vram=vram, ram=ram, weights=weights, granularity=granularity, codec=codec, pool=pool, host=host,
            training=training, disk=disk, group=group, peers=peers,
        ),
    )  # fmt: skip


class Session:
    """A module that is streamed to a device. Made by `stream`. As a context manager, the session closes at
    the end of the block.

    ``module``: the streamed module.
    """

    def __init__(self, module: nn.Module, asked: StreamSettings) -> None:
        """Make the first layout of ``module``. Errors: those of `stream`."""
        asked.check(module)
        registry.refuse_streamed(module)
        self.module = module
        self._with_module: weakref.finalize | None = None
        self._final: Report | None = None
        node = None if asked.group is None else NodeGroup(asked.group)
        self._parts = together(node, "carom.stream", lambda: assemble(module, asked))
        self._manager = self._parts.manager
        self._manager.module.hooks.listen(self._parts.passes, ModuleMoves(module, self._parts))
        try:
            lay_out_first(self._parts, asked, node)
            registry.enter(module, self._manager)
            self._parts.policies.plan_next()
        except BaseException:
            self._parts.memory.end()
            self._end()
            raise
        self._with_module = end_with_module(module, self._parts)

    # -- closing

    def close(self, *, discard: bool = False) -> None:
        """Restore the module's tensor objects, classes and devices, with the present values. Idempotent.

        ``discard``: leave tensors that are on the device there. To be used for a module that is about to be
        dropped: moving the tensors to their original devices could take as much host memory as the device
        has.

        Waits for passes of other threads, unless one of them waits for a slot; that pass then raises CaromError. Raises
        UnsupportedError within a forward or backward of the module.
        Raises WeightsError, after the session was closed, if a spill file or a mapped file was cut off meanwhile. An
        error of the last report, or of the device, is raised after the module was restored, and so is an interrupt
        (KeyboardInterrupt). After an error for lack of memory, the call may be repeated.
        """
        try:
            self._close(discard)
        except Exception:
            raise
        except BaseException:  # an interrupt; every step of closing may be repeated
            self._close(discard)
            raise
        self._manager.module.raise_lost()

    def _close(self, discard: bool) -> None:
        """Make the last report, and undo the session's changes to its module."""
        with self._manager.gate.between_passes("closed", ends_stuck=True):
            try:
                if self._manager.phase.settled and not self.closed:
                    self._final = self._report()
            finally:
                self._end(discard)

    def _end(self, discard: bool = False) -> None:
        """Undo the session's changes to its module, and leave shared budgets. After a failure the call may be
        repeated.
        """
        try:
            end(self._parts, discard)
        finally:
            if self.closed:
                registry.leave(self.module, self._manager)
                if self._with_module is not None:
                    self._with_module.detach()

    def __enter__(self) -> Session:
        self._need_open()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _need_open(self) -> None:
        self._manager.need_open()

    # -- budgets

    def set_budget(self, vram: int | str | SharedBudget | None = None, ram: int | str | None = None) -> None:
        """Change the budgets between steps. Arguments: those of `stream`. None leaves a budget as it is.
        Waits for passes of other threads.

        Raises BudgetError with the smallest budget that works, and UnsupportedError between a forward and its
        backward. The previous budgets then stay in effect. If the new layout cannot be made for another
        reason, the session is parked (it uses no device memory), and the next forward tries again.
        """
        self._parts.budgets.set(vram, ram)

    def prioritize(self) -> None:
        """Let other sessions on the same device or shared budget give up memory before this session does.

        If this session is short of memory, the others give up memory at its next step. The call has no effect
        on sessions with a fixed budget in bytes, unless the weights that they keep on the device are in a
        comfy-aimdo pool.
        """
        with self._manager.lock:
            self._need_open()
            self._parts.ledger.prioritize()
            if self._manager.gate.idle and self._manager.vbar is not None:
                self._manager.vbar.prioritize()

    def deprioritize(self) -> None:
        """Let this session give up memory before other sessions on the same device or shared budget do."""
        with self._manager.lock:
            self._need_open()
            self._parts.ledger.deprioritize()
            if self._manager.gate.idle and self._manager.vbar is not None:
                self._manager.vbar.deprioritize()

    # -- parking

    @property
    def parked(self) -> bool:
        """Whether the session uses no device memory. The next forward moves weights to the device again."""
        return self._manager.phase.parked

    @property
    def in_pass(self) -> bool:
        """Whether the calling thread is in a forward or backward of the module, when weights cannot move."""
        return self._manager.gate.runs_here()

    def park(self, keep: bool = False) -> None:
        """Release the session's device memory. The module's next forward moves weights to the device again.

        ``keep``: keep streamed weights pinned in host memory, and copy the weights on the device to pinned
        memory too, as they are, as far as ``ram`` allows (the others are packed, if weights are packed). The copies
        stay after the return, so a later park copies only what has changed on the device. The return takes no longer
        than the copies to the device.

        Waits for passes of other threads. Raises UnsupportedError within a forward or backward of the module, and
        between a forward and its backward.
        """
        park(self._parts, keep)

    def prepare_park(self, room: float = math.inf) -> None:
        """Make the pinned host memory that ``park(keep=True)`` needs, in the background, as far as ``ram``, the memory that
        is free now, and ``room`` (bytes) allow.

        To be called when steps begin, if the session will be parked after them. Without the call, the first park takes
        longer, because it makes the memory itself.
        """
        self._need_open()
        self._manager.prepare_park(room)

    def unpark(self) -> None:
        """Move the weights of a parked session to the device again."""
        self._parts.passes.unpark()

    def unpin(self) -> None:
        """Unpin the host memory of a parked session. The weights stay in pageable host memory."""
        with self._manager.lock:
            self._need_open()
            if self.parked:
                self._manager.host.copies.unpin()

    # -- values

    def refresh(self, module: nn.Module | None = None) -> None:
        """Copy host weights to the device again at their next use. To be called after their values changed
        without the session noticing.

        ``module``: only weights of this submodule and of modules below it; None for all weights. Weights that
        stay on the device exist only there, so changes to them need no refresh.
        """
        self._need_open()
        self._parts.tensors.refresh(module)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a copy of the parameter or buffer ``name`` on ``device``. Raises WeightsError for an unknown name.

        A packed weight crosses to the session's device packed, and is unpacked there.
        """
        with (
            self._manager.lock,
            self._manager.layout.runner.lock,
        ):  # while a unit runs, its module holds a slot
            self._need_open()
            return self._parts.tensors.read(name, torch.device(device))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Set the parameter or buffer ``name`` to the values of ``tensor``. Waits for passes of other threads.

        Raises WeightsError for an unknown name, or a different shape or dtype.
        """
        with self._manager.gate.between_passes("written to", inside=True):
            self._need_open()
            self._parts.tensors.write(name, tensor)

    # -- changes of layout by measured times and free memory

    def tune(self) -> bool:
        """Review the layout by the measured times so far, and change it if a step is predicted to be at least 3 % faster.

        Returns whether the layout changed: never while the ranks of a group gather weights, as they need equal layouts.
        Must be called between steps. A session also changes its layout by
        itself, once the change would have paid for itself within the steps so far.
        """
        manager = self._manager
        with manager.lock:
            self._need_open()
            if not manager.gate.idle or manager.host.gather is not None:
                return False
            layout = manager.layout
            with layout.runner.lock:
                layout.meter.finish()
            wanted = self._parts.replan.best(layout, manager.present())
            if wanted is None:
                return False
            self._parts.replan.took(manager.change(wanted, self._parts.replan.fallback))
            self._parts.policies.plan_next()
            return True

    def follow_room(
        self,
        base: int | None = None,
        keep: int = 0,
        most: float = math.inf,
        given: Callable[[tuple, dict], Inputs] = lambda args, kwargs: (args, kwargs),
        least: int | None = None,
    ) -> None:
        """Let the budget rise by the device memory that passes leave free, once they agree on it.

        To be called again whenever the budget was set.
        ``base``: the host application's budget in bytes, to which the budget falls after a pass ran out of
        memory (default: the present budget).
        ``keep``: the least device bytes to leave free.
        ``most``: the largest budget in bytes.
        ``given``: returns the arguments that a pass reads, without callables that are called only outside the
        pass. The budget rises only if these arguments are tensors and plain values, so that the pass can run
        again.
        ``least``: a budget in bytes to which the budget falls if a pass ran out of memory with ``base``
        (default: none; the pass then fails).

        Raises UnsupportedError if the budget follows the device already (``vram="auto"``, or a
        `SharedBudget`).
        """
        with self._manager.lock:
            self._parts.raise_budget.follow(base, keep, most, given, least)

    def expect_anew(self, more: bool = False) -> None:
        """Record that other programs used the device's memory, so that the next passes may run out of memory
        again.

        ``more``: the next passes may also need more memory than those before, whatever their inputs.
        """
        self._parts.raise_budget.expect_other_passes(more)

    def forget_room(self) -> None:
        """Let the budget no longer rise above the host application's budget for the rest of the session."""
        self._parts.raise_budget.forget()

    @property
    def spare(self) -> int:
        """Bytes by which the budget may rise, according to the passes so far; 0 unless `follow_room` was called."""
        return self._parts.raise_budget.spare_bytes

    @property
    def beyond(self) -> float:
        """The most bytes by which the budget may exceed the host application's budget.

        The number falls whenever a pass runs out of memory.
        """
        return self._parts.raise_budget.beyond_bytes

    @property
    def vram(self) -> int:
        """The present budget in bytes."""
        return self._parts.ledger.vram

    # -- state and figures

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""
        return self._parts.engine.device

    @property
    def plan(self) -> Plan:
        """The plan of the present layout."""
        return self._manager.layout.plan

    @property
    def module_changed(self) -> bool:
        """Whether modules or tensors were added, replaced or removed since weights were laid out.

        The next forward of the module adapts the layout.
        """
        return self._manager.attached and self._manager.layout.tree.changed()

    @property
    def closed(self) -> bool:
        """Whether the session was closed."""
        return self._manager.phase is Phase.CLOSED

    def report(self) -> Report:
        """Return the session's figures. For a closed session, these are the last figures. Waits for the
        device.
        """
        with self._manager.lock:
            if self._manager.phase is not Phase.CLOSED:
                return self._report()
            if self._final is None:
                raise CaromError(
                    "this session has no report, because making it failed when the session was closed"
                )
            return self._final

    def profile_step(self, step: Callable[[], object]) -> Report:
        """Call ``step`` once under torch's profiler, and return a report with the times of the device's kernels.

        ``step`` runs one step: a forward of the module or, in training, a forward and its backward. The report
        then splits the step into kernels, waiting for weights, and waiting for the host
        (``kernel_source == "profiler"``), until the layout changes. Kernels of ``step`` that run outside the
        module's forward and backward (an optimizer) are not counted. On a device without kernels (the CPU, the
        simulated device) ``step`` is called, and its times come from the device's clock.

        Errors of ``step`` are raised.
        """
        self._need_open()
        with self._manager.lock, self._manager.layout.runner.lock:
            self._manager.layout.meter.profile_next()
        kernels = record_kernels(step, self._parts.engine.device)
        if kernels:
            with self._manager.lock, self._manager.layout.runner.lock:
                self._manager.layout.meter.kernels_ran(kernels, time.time() - time.perf_counter())
        return self.report()

    def stall_share(self) -> float | None:
        """Return the share of the last measured steps' seconds in which computing waited for weights.

        Returns None if nothing was measured. The call does not wait for the device.
        """
        return stall_share(self._manager.layout)

    def _report(self) -> Report:
        held = self._parts.weights.holdings()
        manager = self._manager
        engine = self._parts.engine
        return make_report(
            held, manager.layout, manager.host.arena, engine.name, settings.full_device_notes(engine)
        )
