"""The list of nodes, as ComfyUI asks for it."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension  # type: ignore[import-not-found]

from .loaders import CaromLoadCheckpoint, CaromLoadCLIP, CaromLoadDiffusionModel
from .offload import CaromOffload, CaromOffloadCLIP
from .reports import CaromPlan, CaromReport

NODES: list[Any] = [
    CaromLoadDiffusionModel,
    CaromLoadCheckpoint,
    CaromLoadCLIP,
    CaromOffload,
    CaromOffloadCLIP,
    CaromPlan,
    CaromReport,
]


class CaromExtension(ComfyExtension):
    async def get_node_list(self) -> list[Any]:
        return NODES
