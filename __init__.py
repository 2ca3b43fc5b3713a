"""Carom: models larger than VRAM, weights bouncing through a few device slots while the GPU computes."""

from .core.errors import BudgetError, CaromError, PinError, UnsupportedError, WeightsError
from .core.plan import Plan
from .core.report import Report
from .core.session import Session, stream
from .core.simulated import SimulatedDevice

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CaromError",
    "PinError",
    "Plan",
    "Report",
    "Session",
    "SimulatedDevice",
    "UnsupportedError",
    "WeightsError",
    "stream",
]
