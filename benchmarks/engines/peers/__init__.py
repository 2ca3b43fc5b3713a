"""The engines of the benchmark, one a file.

Each engine reports whether it can run here, and attaches to the model as its users would attach it.
"""

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
    """Return the engine called `name` (one of `case.ENGINES`). This needs no installed peer."""
    return importlib.import_module(f".{_MODULES[name]}", __package__).ENGINE
