"""A model of linear layers in the form of ComfyUI's BaseModel, made of the layers of `comfy_stand_in`, and prompts with it."""

from __future__ import annotations

import sys
from typing import Any

import tests_comfy_stand_in as stand_in
import torch
from torch import nn

WIDTH, BLOCKS = 64, 12
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes
CPU = torch.device("cpu")


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


def load(
    patcher: Any, patches: list[tuple[dict, float]], offer: float = 9 * LAYER, loaded: Any = None
) -> Any:
    """Load a clone of ``patcher`` with ``patches`` and return it, as a prompt with these LoRAs does.

    ``loaded``: the clone that is loaded now, None for ``patcher`` itself.
    """
    clone = patcher.clone()
    for found, strength in patches:
        clone.add_patches(found, strength)
    (loaded or patcher).detach(unpatch_all=False)
    with torch.inference_mode():
        clone.partially_load(CPU, offer - clone.loaded_size())
        clone.pre_run()
    return clone


def step(patcher: Any) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    with torch.inference_mode():
        return patcher.model.diffusion_model(x).clone()


def stock(patches: list[tuple[dict, float]]) -> torch.Tensor:
    patcher = sys.modules["comfy.model_patcher"].ModelPatcher(Model(), CPU, CPU)
    for found, strength in patches:
        patcher.add_patches(found, strength)
    with torch.inference_mode():
        patcher.partially_load(CPU, 1)
    return step(patcher)
