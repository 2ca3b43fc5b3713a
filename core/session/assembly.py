"""`assemble`: makes the parts of a session and connects them. `attach_first`: makes a session's first layout.

A layout assigns each weight of the module to device memory, or to host memory or a file from which it is
streamed.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..budget.ledger import BudgetLedger
from ..budget.shared_budget import SharedBudget
from ..common.errors import BudgetError
from ..device.engine import Engine
from ..device.make_engine import make_engine
from ..host.node_group import NodeGroup
from ..host.shared_image import SharedImage
from . import settings
from .budgets import Budgets
from .codec_choice import CodecChoice
from .device_weights import DeviceWeights
from .host_resources import HostResources
from .layout import Wanted
from .layout_manager import LayoutManager
from .managed_module import ManagedModule
from .model_changes import ModelChanges
from .passes import Passes
from .planner import Planner
from .policies.device_memory import DeviceMemory
from .policies.host_memory import HostMemory
from .policies.neighbours import Neighbours
from .policies.raise_budget import RaiseBudget
from .policies.replan import Replan
from .policies.vbar_pressure import VbarPressure
from .policy_runner import PolicyRunner
from .recovery import Recovery
from .root_hooks import RootHooks
from .tensor_access import TensorAccess
from .weight_pool import WeightPool


@dataclass(frozen=True)
class Parts:
    """The objects that make up a session. A table in docs/architecture.md describes each."""

    engine: Engine
    ledger: BudgetLedger
    manager: LayoutManager
    weights: DeviceWeights
    tensors: TensorAccess
    memory: DeviceMemory
    host_memory: HostMemory
    raise_budget: RaiseBudget
    replan: Replan
    policies: PolicyRunner
    budgets: Budgets
    passes: Passes


def assemble(
    module: nn.Module, *, device: Any, vram: Any, ram: int | str, weights: Any, granularity: str, codec: str, pool: str,
    host: str, training: str | None, disk: str | os.PathLike[str] | None, shared: bool, backward: bool,
) -> Parts:  # fmt: skip
    """Return the connected parts of a session, without changing the module yet.

    Arguments: those of `carom.stream`, already checked. Trainable weights cannot stream from disk, so ``disk`` has no
    effect with ``training="stream"``.
    ``shared``: whether the weights will be in memory that several processes share, where they are not packed.
    ``backward``: whether backward passes go through the module although none of its weights are trained.
    """
    engine = make_engine(device)
    waiting = settings.waiting_bytes(module) if weights is None and engine.shares_host else 0
    budget, note = settings.within_dedicated(
        settings.vram_budget(vram, engine, waiting=waiting), engine, waiting
    )
    weight_pool = WeightPool(engine, pool)
    packing = None if shared else settings.packing(codec, host, weights, engine, module, weight_pool)
    nbytes = settings.ram_beside_device(ram, engine, module, budget, waiting)
    wanted = Wanted(budget, nbytes, packing, note=note)

    managed = ManagedModule(module, RootHooks(module), None if training == "stream" else disk)
    host_resources = HostResources(engine, wanted.ram)
    ledger = BudgetLedger(engine, vram if isinstance(vram, SharedBudget) else None)
    ledger.set(budget)
    planner = Planner(managed, engine, host_resources, granularity, training, backward)
    manager = LayoutManager(managed, engine, host_resources, planner, ledger, weight_pool, wanted)
    device_weights = DeviceWeights(manager, weight_pool, lambda budget: memory.resize(budget))
    ledger.follow(device_weights)
    changes = ModelChanges(manager)

    raise_budget = RaiseBudget(
        manager,
        ready=lambda: passes.ready(),
        thought_over=lambda: replan.thought_over,
        reconsider=lambda: replan.reconsider(),
        grows_now=lambda: replan.grows_now,
    )
    replan = Replan(
        manager,
        CodecChoice(manager),
        spare_bytes=lambda: raise_budget.spare_bytes,
        unsure=lambda: raise_budget.unsure,
        worth=raise_budget.worth,
        forget_spare=raise_budget.forget,
        taken=raise_budget.weights_moved,
    )
    memory = DeviceMemory(manager, device_weights, replan.improve, replan.begin_anew)
    host_memory = HostMemory(manager)
    policies = PolicyRunner(
        manager, device_weights, memory,
        [Neighbours(ledger), memory, VbarPressure(manager, device_weights), host_memory, replan],
    )  # fmt: skip
    budgets = Budgets(manager, device_weights, memory, host_memory, raise_budget, policies)
    passes = Passes(manager, changes, policies, memory, raise_budget, Recovery(memory, raise_budget))

    def leaving() -> None:
        changes.follow()
        memory.forget_state()

    manager.leaving, manager.laid_out = leaving, raise_budget.laid_out
    return Parts(
        engine, ledger, manager, device_weights, TensorAccess(manager), memory, host_memory, raise_budget, replan,
        policies, budgets, passes,
    )  # fmt: skip


def parts(session: Any) -> Parts:
    """Return the parts of ``session``, for benchmarks and tests that inspect a session's internals."""
    found: Parts = session._parts
    return found


def share(made: Parts, node: NodeGroup) -> None:
    """Move the weights of a session that has no layout yet to memory that the ranks of ``node`` share.

    All ranks use the smallest of their RAM budgets. Raises as `share_memory` and `share_files` do.
    """
    manager = made.manager
    ram = min(node.exchange(manager.wanted.ram, "comparing RAM budgets"))
    manager.wanted = dataclasses.replace(manager.wanted, ram=ram)
    manager.host.image = SharedImage()
    manager.module.share(node, ram, manager.host.image)


def attach_first(made: Parts, vram: Any) -> None:
    """Make a session's first layout.

    If an automatic or shared budget does not suffice, the session begins with the smallest budget that works.
    ``vram``: as in `carom.stream`. Raises BudgetError if the smallest budget is not available either, or if a
    fixed budget is too small.
    """
    ledger, manager, shared = made.ledger, made.manager, made.ledger.shared
    had = 0 if shared is None else shared.nbytes
    # Other new sessions wait until this session has its layout, and get memory afterwards. Running sessions
    # do not wait: the bytes that this session is about to take are reserved in the ledger by a promise.
    with manager.lock, ledger.coming(shared), ledger.growing():
        try:
            with ledger.taking():
                if shared is not None:
                    _budget_now(made, vram)
                if ledger.governor is not None and ledger.make_room(ledger.vram):
                    _budget_now(made, vram)
                ledger.promise(0 if shared is None else ledger.vram)
            manager.attach(manager.present())
        except BudgetError as error:
            # The bytes that activations need are not known yet. Begin with the smallest budget, if it is
            # available.
            least = error.least_bytes or 0
            if (vram != "auto" and shared is None) or not least:
                raise
            with ledger.taking():
                ledger.promise(0)
                ledger.begin_with_least(least, had, error)
            manager.attach(manager.present())
        finally:
            ledger.promise(0)


def _budget_now(made: Parts, vram: Any) -> None:
    """Set the VRAM budget to the number of bytes that ``vram`` (a percentage, for example) amounts to at this
    moment.
    """
    waiting, manager = made.weights.waiting_bytes or 0, made.manager
    budget, note = settings.within_dedicated(
        settings.vram_budget(vram, made.engine, waiting=waiting), made.engine, waiting
    )
    made.ledger.set(budget)
    manager.wanted = dataclasses.replace(manager.wanted, note=note)
