"""`Passes`: a session's actions before and after a pass, that is, a forward of its root module, or a forward of a
part of it that is called outside the root's forward.
"""

from __future__ import annotations

from typing import Any

import torch

from ..model import managed_tensor
from ..streaming.gradient_delivery import refuse_data_parallel
from ..streaming.pass_retry import PassSnapshot
from ..streaming.runner import RunningPass, Use
from .layout_manager import LayoutManager
from .model_changes import ModelChanges
from .policies.device_memory import DeviceMemory
from .policies.raise_budget import RaiseBudget
from .policy_runner import PolicyRunner
from .recovery import Recovery


class Passes:
    """The `root_forward.PassListener` of a session.

    Before a pass, a parked session (which uses no device memory) gets a layout again, the layout is adapted
    to changes of the module tree, and policies are asked whether they want another layout.
    ``graphs``: one object for each forward whose backward may still be called.
    """

    def __init__(
        self, manager: LayoutManager, changes: ModelChanges, policies: PolicyRunner, memory: DeviceMemory,
        raise_budget: RaiseBudget, recovery: Recovery,
    ) -> None:  # fmt: skip
        self._manager, self._changes, self._policies = manager, changes, policies
        self._memory, self._raise_budget, self._recovery = memory, raise_budget, recovery
        self.graphs = manager.gate.graphs

    @property
    def root(self) -> torch.nn.Module:
        """The session's module."""
        return self._manager.module.root

    @property
    def backward(self) -> bool:
        """Whether backward passes go through the module although none of its weights are trained."""
        return self._manager.planner.backward

    @property
    def watches(self) -> bool:
        """Whether passes may run again after running out of memory, so that `before` and `passed` have to be
        called for each pass.
        """
        return self._recovery.watches

    @property
    def watches_parts(self) -> bool:
        """The same for passes of a part. A host application describes the arguments of the root only (`follow_room`), so
        these passes run again only where the budget follows the device.
        """
        return self._memory.governor is not None

    def ready(self, compiling: bool = False) -> bool:
        """Prepare for a pass. Makes another layout if one is due. Returns False if the session is closed.

        ``compiling``: whether torch.compile runs the pass.
        """
        manager = self._manager
        with manager.lock:
            if not manager.attached:
                manager.end_interrupted_change()
                self.unpark()
                if not manager.attached:
                    return False
            layout = manager.layout
            runner = layout.runner
            with runner.lock:
                # During a pass, the module tree holds views of slots and no weight may move.
                if not runner.in_use(Use.PASS):
                    if layout.wanted.packing is not None and layout.wanted.packing.keep_raw:
                        layout.placement.tier.pack_anew()
                    if torch.is_grad_enabled() and (layout.untrained or layout.one_decoded):
                        self._changes.train()
                        layout = manager.layout
                    changed = layout.tree.changed()
                    if changed:
                        self._changes.adopt()
                    present, asked = manager.layout, runner.next_layout
                    if not (present.compiled or self.graphs) and (compiling or present.tree.compiled()):
                        self._changes.adopt_compiled()
                    elif changed:
                        pass
                    elif (asked.stay or asked.region_bytes) and not self.graphs:
                        # An outstanding forward that checkpoints would be recomputed in another layout.
                        self._changes.follow_passes()
                    elif layout.meter.settled >= self._policies.at:
                        self._policies.look()
            return True

    def unpark(self) -> None:
        """Make a layout for a parked session, so that the module can run on the device again."""
        manager = self._manager
        with manager.lock:
            if not manager.phase.parked:
                return
            try:
                manager.planner.forget_least()  # the module may have new tensors since the session was parked
                manager.ledger.return_to_device()
                manager.change(manager.present(), manager.shrunk)
            finally:
                manager.ledger.promise(0)
            self._policies.plan_next()

    def begins(
        self, compiling: bool, before: PassSnapshot | None = None, part: torch.nn.Module | None = None
    ) -> tuple[RunningPass | None, Any]:
        """Begin a pass. Returns the pass, and a context manager that encloses it.

        Returns (None, None) if the session is closed.
        ``before``: the snapshot that `before` returned for the pass.
        ``part``: the module whose forward the pass is, None for the root.
        """
        manager = self._manager
        managed_tensor.refuse_transforms(manager.gate.name)
        manager.gate.let_others_first()
        with manager.lock:  # wait for another thread that is changing the layout
            placement = manager.layout.placement
            if not self.ready(compiling):
                return None, None
            if before is not None and manager.layout.placement is not placement:
                before.update_module_state(manager.module.root)
            self._memory.begins()
            layout = manager.layout
            if torch.is_grad_enabled():
                refuse_data_parallel(layout.placement.tier.backings)
            if part is not None:
                manager.module.hooks.follow_root()
            with layout.runner.lock:
                tier = layout.placement.tier
                if tier.arriving:
                    tier.begin_pass(compiling or manager.planner.compiled())
                running = layout.runner.begin_pass(part)
        return running, manager.engine.step()

    def before(self, args: tuple, kwargs: dict) -> PassSnapshot | None:
        """Return a snapshot of the module's state and inputs before a pass that may have to run again,
        otherwise None.
        """
        return self._recovery.before(args, kwargs)

    def recover(self, error: BaseException, before: PassSnapshot | None) -> bool:
        """Reduce the weights on the device after a pass ran out of memory. Returns whether the pass may run
        again.
        """
        found = self._recovery.recover(error, before)
        if self._manager.attached:
            self._policies.at = 0
        return found

    def interrupted(self) -> None:
        """Note that an interrupt ends the passes of this thread."""
        if not self._manager.unused:
            self._manager.layout.runner.interrupted()

    def passed(self, args: tuple, kwargs: dict, before: PassSnapshot | None) -> None:
        """Record that a pass has succeeded. ``before``: the snapshot that `before` returned for the pass."""
        if before is not None:
            self._recovery.went_well(before)
        if self._raise_budget.room is not None:
            self._raise_budget.passed(args, kwargs)
            if self._manager.attached:
                self._policies.plan_next()
