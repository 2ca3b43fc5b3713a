"""One engine a file. Each says whether it can run here, and attaches itself to the model as its own users would."""

from __future__ import annotations

import importlib

from .base import Attached, Engine, Skip

_MODULES = {
    "none": "resident",
    "carom": "bouncing",
    "ramtorch": "ramtorch_window",
    "diffusers": "diffusers_groups",
    "accelerate": "accelerate_hooks",
    "ai-toolkit": "ai_toolkit",
    "musubi": "musubi_ring",
}

__all__ = ["Attached", "Engine", "Skip", "get_engine"]


def get_engine(name: str) -> Engine:
    """The engine called `name` (one of `case.ENGINES`); importing it needs nothing installed."""
    return importlib.import_module(f".{_MODULES[name]}", __package__).ENGINE
