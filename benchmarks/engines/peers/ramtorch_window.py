"""The engine RamTorch 1.11: `OffloadModel` streams chunks through a window, and pins evenly spaced chunks on the
device.

The settings are its fastest. Each block is a chunk. Frozen weights are buffers, because RamTorch differentiates every
parameter of a chunk and copies the gradients to the host. Training uses its own non-reentrant checkpointing, which
its README measured as the faster of its two kinds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch
from torch import nn

from ..case import Case
from ..dit import Dit
from .base import Attached, Engine, Mark, Skip, frozen_to_buffers, mse


class _Chunk(nn.Module):
    """A block that reads its conditioning from a shared list, so that only x passes from chunk to chunk."""

    def __init__(self, block: nn.Module, shared: list[torch.Tensor]) -> None:
        super().__init__()
        self.block = block
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, self.shared[0])


class _Attached(Attached):
    def __init__(self, model: Dit, case: Case, device: torch.device) -> None:
        from ramtorch import OffloadModel

        model.set_checkpointing("off")  # the engine checkpoints chunks itself
        model.embed.to(device)
        model.head.to(device)
        self.shared: list[torch.Tensor] = [torch.empty(0)]
        for block in model.blocks:
            frozen_to_buffers(block)
        self.engine = OffloadModel(
            [_Chunk(block, self.shared) for block in model.blocks],
            device=device,
            window=case.slots if case.slots >= 2 else 2,
            pin=case.resident,
            keep_activations="checkpoint" if case.mode == "train" else False,
        )
        super().__init__(model, case, device)

    def infer(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        self.shared[0] = c
        with torch.no_grad():
            return self.model.finish(self.engine(self.model.embed(x)))

    def gradients(self, x: torch.Tensor, c: torch.Tensor, target: torch.Tensor, mark: Mark) -> torch.Tensor:
        self.shared[0] = c
        with torch.no_grad():
            hidden = self.model.embed(x)
        result = self.engine.step(
            hidden, targets=target, loss_fn=lambda out, t: mse(self.model.finish(out), t)
        )
        self.engine.flush_grads()
        mark("backward")  # forward and backward are one call
        return result.loss

    def close(self) -> None:
        self.engine.close()


class RamTorch(Engine):
    name = "ramtorch"

    def unavailable(self, case: Case) -> str | None:
        if importlib.util.find_spec("ramtorch") is None:
            return "not installed (pip install ramtorch)"
        return None

    def version(self) -> str | None:
        return importlib.metadata.version("ramtorch")

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        reason = self.unavailable(case)
        if reason:
            raise Skip(reason)
        return _Attached(model, case, device)


ENGINE = RamTorch()
