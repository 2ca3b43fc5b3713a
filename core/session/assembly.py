"""`assemble`: makes the parts of a session and connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..budget.ledger import BudgetLedger
from ..budget.shared_budget import SharedBudget
from ..device.engine import Engine
from ..device.make_engine import make_engine
from ..model.compiling import CompiledParts
from ..model.shared_attributes import share_attributes
from ..streaming.root_hooks import RootHooks
from . import settings
from .budgets import Budgets
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
from .stream_settings import StreamSettings
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


def assemble(module: nn.Module, asked: StreamSettings) -> Parts:
    """Return the connected parts of a session, without changing the module yet. ``asked``: checked settings.

    Raises UnsupportedError as `FlatViews.refuse_trainable` does.
    """
    engine = make_engine(asked.device)
    own = settings.waiting_bytes(module) if asked.weights is None else 0
    waiting = own if engine.shares_host else 0
    budget, note = settings.within_dedicated(
        settings.vram_budget(asked.vram, engine, waiting=waiting), engine, waiting
    )
    weight_pool = WeightPool(engine, "torch" if asked.store else asked.pool)
    compiled = asked.compiled or CompiledParts(module).found()
    packing = settings.packing(asked, engine, compiled, weight_pool)
    nbytes = settings.ram_beside_device(asked.ram, engine, module, budget, own)
    wanted = Wanted(budget, nbytes, packing, note=note, store=asked.store)

    disk = None if asked.training == "stream" else asked.disk  # trainable weights cannot stream from disk
    shared = share_attributes(module)  # the module must not be referenced by what it refers to itself
    managed = ManagedModule(shared, RootHooks(shared), disk)
    if asked.training == "stream":
        managed.flat_views.refuse_trainable()
    host_resources = HostResources(engine, wanted.ram, asked.pins)
    ledger = BudgetLedger(engine, asked.vram if isinstance(asked.vram, SharedBudget) else None)
    ledger.set(budget)
    planner = Planner(
        managed, engine, host_resources, asked.granularity, asked.training, asked.backward, compiled
    )
    manager = LayoutManager(managed, engine, host_resources, planner, ledger, weight_pool, wanted)
    device_weights = DeviceWeights(manager, weight_pool, lambda budget: memory.resize(budget))
    ledger.follow(device_weights)
    changes = ModelChanges(manager)

    replan = Replan(manager, taken=lambda: taken())
    raise_budget = RaiseBudget(manager, ready=lambda: passes.ready(), raised=replan.begin_anew)
    memory = DeviceMemory(manager, device_weights, replan.begin_anew)
    host_memory = HostMemory(manager)
    policies = PolicyRunner(
        manager, device_weights, memory,
        [Neighbours(ledger), memory, VbarPressure(manager, device_weights), host_memory, raise_budget, replan],
    )  # fmt: skip
    budgets = Budgets(manager, device_weights, memory, host_memory, raise_budget, policies)
    recovery = Recovery(manager, changes, memory, raise_budget, lambda: replan.due_now)
    passes = Passes(manager, changes, policies, memory, raise_budget, recovery)

    def taken() -> None:
        raise_budget.weights_moved()
        recovery.watch_next_pass()

    def leaving() -> None:
        changes.follow()
        memory.forget_state()
        raise_budget.forget_state()

    manager.leaving, manager.laid_out = leaving, raise_budget.laid_out
    return Parts(
        engine, ledger, manager, device_weights, TensorAccess(manager), memory, host_memory, raise_budget, replan,
        policies, budgets, passes,
    )  # fmt: skip


def parts(session: Any) -> Parts:
    """Return the parts of ``session``, for benchmarks and tests that inspect a session's internals."""
    found: Parts = session._parts
    return found
