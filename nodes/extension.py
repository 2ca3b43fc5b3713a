"""The ComfyUI extension object: `CaromExtension`, which returns the list of Carom's nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension  # type: ignore[import-not-found]

from .loaders import CaromLoadCheckpoint, CaromLoadCLIP, CaromLoadDiffusionModel, CaromLoadVAE
from .offload_nodes import CaromOffload, CaromOffloadCLIP, CaromOffloadControlNet, CaromOffloadVAE
from .plan_node import CaromPlan
from .report_node import CaromReport

NODES: list[Any] = [
    CaromLoadDiffusionModel,
    CaromLoadCheckpoint,
    CaromLoadCLIP,
    CaromLoadVAE,
    CaromOffload,
    CaromOffloadCLIP,
    CaromOffloadVAE,
    CaromOffloadControlNet,
    CaromPlan,
    CaromReport,
]


class CaromExtension(ComfyExtension):
    async def get_node_list(self) -> list[Any]:
        return NODES
