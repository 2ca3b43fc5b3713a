"""A model of linear layers in the form of ComfyUI's BaseModel, made of the layers of `comfy_stand_in`."""

from __future__ import annotations

import tests_comfy_stand_in as stand_in
import torch
from torch import nn

WIDTH, BLOCKS = 64, 12
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes


class Diffusion(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(stand_in.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.requires_grad_(False)


class Model(nn.Module):
    manual_cast_dtype = None

    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = Diffusion()
