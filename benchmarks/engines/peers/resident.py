"""No offloading: the whole model on the device. Its time is the roofline's compute."""

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
