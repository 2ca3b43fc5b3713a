"""`carom.stream` and `Session`: attach a module to a device under a budget, run it, report, close."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..budget.shared_budget import SharedBudget
from ..metrics.report import Report
from ..plan.residency import Plan
from . import registry, settings
from .assembly import assemble, attach_first
from .phase import Phase
from .policies.leftover import Inputs
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


class Session:
    """A module attached to a device. Made by `stream`; a context manager that closes itself."""

    def __init__(
        self, module: nn.Module, *, device: Any, vram: int | str | SharedBudget, ram: int | str, weights: Any, granularity: str,
        codec: str, pool: str, host: str, training: str | None, backward: bool = False,
    ) -> None:  # fmt: skip
        """``backward``: backwards are to go through the module, though nothing in it trains (adapters that others keep)."""
        settings.check(module, weights, granularity, codec, pool, host, training)
        registry.refuse_streamed(module)
        self.module = module
        parts = self._parts = assemble(
            module, device=device, vram=vram, ram=ram, weights=weights, granularity=granularity, codec=codec,
            pool=pool, host=host, training=training, backward=backward,
        )  # fmt: skip
        self._manager = manager = parts.manager
        engine, managed = parts.engine, manager.module
        managed.hooks.listen(parts.passes, self, owner=self)
        try:
            parts.memory.begin(vram == "auto" or parts.ledger.shared is not None)
            keep_packed = engine.decodes_files and codec == "auto" and not manager.uses_vbars
            managed.bind(weights, engine, keep_packed)
            parts.host_memory.begin(ram == "auto")
            attach_first(parts, vram)
            registry.enter(self)
            parts.policies.plan_next()
        except BaseException:
            parts.memory.end()
            self._end()
            raise

    # -- the end

    def close(self, *, discard: bool = False) -> None:
        """Give the module back as it was: objects, classes, devices; values as they are now. Idempotent.

        ``discard``: the module is about to be dropped; tensors on the device are left there instead of being brought home,
        which could take as much host memory as the device has.
        """
        with self._manager.lock:
            if self._manager.phase is not Phase.CLOSED:
                self._final = self._report()
            self._end(discard)

    def _end(self, discard: bool = False) -> None:
        """Undo all that this session put into its module, and joined. May be called again where that failed."""
        self._manager.close(discard)
        self._parts.memory.end()  # only now is what the session held others'
        self._manager.finish()
        registry.leave(self)

    def __enter__(self) -> Session:
        self._need_open()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _need_open(self) -> None:
        self._manager.need_open()

    # -- budgets

    def set_budget(self, vram: int | str | SharedBudget | None = None, ram: int | str | None = None) -> None:
        """Change budgets between steps; the old ones stay when the new ones are impossible.

        Raises BudgetError with the least budget that works, and UnsupportedError between a forward and its backward. Where
        laying out fails otherwise, the session is parked, and the next forward tries again.
        """
        self._parts.budgets.set(vram, ram)

    def prioritize(self) -> None:
        """Let other sessions on the same device or shared budget give way to this one first.

        At once where the next step finds this session short. Without effect on sessions with a budget of their own in bytes,
        unless resident weights are in a comfy-aimdo pool.
        """
        with self._manager.lock:
            self._need_open()
            self._parts.ledger.prioritize()
            if self._manager.idle and self._manager.vbar is not None:
                self._manager.vbar.prioritize()

    def deprioritize(self) -> None:
        """Let this session give way before other sessions on the same device or shared budget."""
        with self._manager.lock:
            self._need_open()
            self._parts.ledger.deprioritize()
            if self._manager.idle and self._manager.vbar is not None:
                self._manager.vbar.deprioritize()

    # -- parking

    @property
    def parked(self) -> bool:
        """Whether the device was released; the next forward brings the module back."""
        return self._manager.phase.parked

    @property
    def put_aside(self) -> bool:
        """Whether the module was parked to ``keep``: a module that is sent to the CPU is there already."""
        return self._manager.phase is Phase.ASIDE

    def park(self, keep: bool = False) -> None:
        """Release the device; the module stays attached and returns at its next forward.

        ``keep``: streamed weights stay pinned in host memory, and residents join them there (packed, where they are), so that
        the way back costs what has to cross to the device and no more.
        """
        with self._manager.lock:
            self._need_open()
            if not self.parked:
                self._parts.ledger.leave_device()
                self._manager.park(keep)

    def unpark(self) -> None:
        """Bring a parked module back to the device."""
        self._parts.passes.unpark()

    def unpin(self) -> None:
        """Give pinned memory of a parked session back to the system; the bytes wait on in ordinary memory."""
        with self._manager.lock:
            self._need_open()
            if self.parked:
                self._manager.host.copies.unpin()

    # -- values

    def refresh(self, module: nn.Module | None = None) -> None:
        """Fetch host weights (below ``module``) again at their next use: they changed unseen.

        Resident weights have no other copy; what changes them changes them on the device.
        """
        self._need_open()
        self._parts.tensors.refresh(module)

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of parameter or buffer ``name`` on the CPU. Raises WeightsError for an unknown name."""
        self._need_open()
        return self._parts.tensors.read(name)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Set parameter or buffer ``name``. Raises WeightsError for an unknown name, another shape or dtype."""
        self._need_open()
        self._parts.tensors.write(name, tensor)

    # -- measured times and memory that is left

    def tune(self) -> bool:
        """Lay the weights out by what the steps so far taught, if a step is predicted to be 3 % faster so.

        A session does this by itself, once, when the change has paid for itself in the steps already seen. Call between
        steps. Returns whether anything changed.
        """
        manager = self._manager
        with manager.lock:
            self._need_open()
            if not manager.idle:
                return False
            layout = manager.layout
            with layout.streamer.lock:
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
    ) -> None:
        """Let the budget rise by what passes leave free, when a better layout is made anyway.

        ``base``: the host's budget in bytes, to go back to (default: the present one); ``keep``: bytes of the device to be
        left free at least; ``most``: bytes that the budget never exceeds. ``given``: returns those of a pass's arguments that
        the pass reads, without what is called outside of it: room is taken where these are tensors and plain values, so that
        the pass can run again. To be called again whenever the budget was set.

        Raises UnsupportedError where the budget follows the device already (``vram="auto"``, or a `SharedBudget`).
        """
        with self._manager.lock:
            self._parts.leftover.follow(base, keep, most, given)

    def expect_anew(self) -> None:
        """Expect passes after other programs had the device's memory."""
        self._parts.leftover.expect_other_passes()

    def forget_room(self) -> None:
        """Take no more room for the rest of the session, whatever passes seem to leave."""
        self._parts.leftover.forget()

    @property
    def spare(self) -> int:
        """Bytes that the budget may rise by, as far as passes have shown; 0 unless `follow_room` was called."""
        return self._parts.leftover.spare_bytes

    @property
    def beyond(self) -> float:
        """Bytes that the budget may exceed the host's by at most: fewer after a pass that ran out of memory."""
        return self._parts.leftover.beyond_bytes

    @property
    def vram(self) -> int:
        """The present budget in bytes."""
        return self._parts.ledger.vram

    # -- accounts

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self._parts.engine.device

    @property
    def plan(self) -> Plan:
        """The plan of the present layout."""
        return self._manager.layout.plan

    @property
    def closed(self) -> bool:
        """Whether the session was closed."""
        return self._manager.phase is Phase.CLOSED

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the module's tensors."""
        return {entry.tensor.dtype for entry in self._manager.layout.entries()}

    def report(self) -> Report:
        """Return the figures since attaching (waits for the device); of a closed session, its last."""
        with self._manager.lock:
            return self._final if self._manager.phase is Phase.CLOSED else self._report()

    def stall_share(self) -> float | None:
        """Return the part of the last measured steps' time that computing waited for weights; waits for nothing itself."""
        return stall_share(self._manager.layout)

    def _report(self) -> Report:
        held = self._parts.weights.holdings()
        manager = self._manager
        return make_report(held, manager.layout, manager.host.arena, self._parts.engine.name)
