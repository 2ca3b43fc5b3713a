"""Carom: models larger than VRAM, weights bouncing through a few device slots while the GPU computes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.budget.shared_budget import SharedBudget
    from .core.checkpoint.load_file import load_file
    from .core.common.errors import (
        BudgetError,
        CaromError,
        GroupError,
        PinError,
        UnsupportedError,
        WeightsError,
    )
    from .core.device.simulated import SimulatedDevice
    from .core.metrics.report import Report
    from .core.model.ddp import prepare_for_ddp
    from .core.model.dense_modules import dense_modules
    from .core.placement.bound_checkpoint import Weights
    from .core.plan.residency import Plan
    from .core.session.session import Session, stream
    from .optim import OptimizerInBackward

__version__ = "0.2.0"  # pyproject.toml has the same, which ComfyUI's registry reads

__all__ = [
    "BudgetError",
    "CaromError",
    "GroupError",
    "OptimizerInBackward",
    "PinError",
    "Plan",
    "Report",
    "Session",
    "SharedBudget",
    "SimulatedDevice",
    "UnsupportedError",
    "Weights",
    "WeightsError",
    "dense_modules",
    "load_file",
    "prepare_for_ddp",
    "stream",
]

# Imported when first asked for: torch alone holds hundreds of MiB, and commands like `carom pack` need none of it.
_HOME = {
    "OptimizerInBackward": "optim",
    "Plan": "core.plan.residency",
    "Report": "core.metrics.report",
    "Session": "core.session.session",
    "Weights": "core.placement.bound_checkpoint",
    "SharedBudget": "core.budget.shared_budget",
    "SimulatedDevice": "core.device.simulated",
    "dense_modules": "core.model.dense_modules",
    "load_file": "core.checkpoint.load_file",
    "prepare_for_ddp": "core.model.ddp",
    "stream": "core.session.session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME.get(name, 'core.common.errors')}", __name__), name)
    globals()[name] = value
    return value


# Read by ComfyUI: where the page finds the nodes' docs.
WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """What ComfyUI asks for when this folder lies in its custom_nodes; nothing of the nodes is imported before."""
    from .nodes.extension import CaromExtension

    return CaromExtension()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
