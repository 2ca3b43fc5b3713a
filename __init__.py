"""Carom: models larger than VRAM, weights bouncing through a few device slots while the GPU computes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.checkpoint import Weights
    from .core.dense import dense_modules
    from .core.errors import BudgetError, CaromError, PinError, UnsupportedError, WeightsError
    from .core.in_backward import OptimizerInBackward
    from .core.plan import Plan
    from .core.report import Report
    from .core.session import Session, stream
    from .core.shared import SharedBudget
    from .core.simulated import SimulatedDevice
    from .core.store.loading import load_file

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CaromError",
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
    "stream",
]

# Imported when first asked for: torch alone holds hundreds of MiB, and commands like `carom pack` need none of it.
_HOME = {
    "OptimizerInBackward": "core.in_backward",
    "Plan": "core.plan",
    "Report": "core.report",
    "Session": "core.session",
    "Weights": "core.checkpoint",
    "SharedBudget": "core.shared",
    "SimulatedDevice": "core.simulated",
    "dense_modules": "core.dense",
    "load_file": "core.store.loading",
    "stream": "core.session",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME.get(name, 'core.errors')}", __name__), name)
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
