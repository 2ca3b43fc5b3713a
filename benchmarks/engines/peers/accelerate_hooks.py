"""The engine accelerate: `cpu_offload`, with weights pinned beforehand, because accelerate leaves pinning to its
users.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from ..case import Case
from ..dit import Dit
from .base import Attached, Engine, Skip


class Accelerate(Engine):
    name = "accelerate"

    def unavailable(self, case: Case) -> str | None:
        if importlib.util.find_spec("accelerate") is None:
            return "not installed (pip install accelerate)"
        if case.resident:
            return "cpu_offload offloads everything"
        if case.mode == "train":
            return "cpu_offload is for inference: weights become meta tensors between their forwards"
        return None

    def version(self) -> str | None:
        return importlib.metadata.version("accelerate")

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        reason = self.unavailable(case)
        if reason:
            raise Skip(reason)
        from accelerate import cpu_offload

        weights = model.state_dict()
        if device.type == "cuda":
            weights = {name: tensor.pin_memory() for name, tensor in weights.items()}
        cpu_offload(model, execution_device=device, state_dict=weights)
        return Attached(model, case, device)


ENGINE = Accelerate()
