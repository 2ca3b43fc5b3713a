"""The engine without offloading: the whole model is on the device. Its times are the roofline's computing times."""

from __future__ import annotations

import torch

from ..case import Case
from ..dit import Dit
from .base import Attached, Engine


class Resident(Engine):
    name = "none"

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        model.to(device)
        return Attached(model, case, device)


ENGINE = Resident()
