"""A rank of tests/streaming/test_pipelines.py: trains a two-stage pipeline with resident and with streamed stages."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import carom
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS, MICROBATCHES, STEPS = 32, 6, 4, 4
VRAM = 24_000  # bytes; the weights of a stage have 50 KB


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.second, self.checkpointed = Lora(), Lora(), checkpointed

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.second(torch.relu(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def train(kind: Any, rank: int, world: int, checkpointed: bool, device: Any = None) -> tuple[list, dict]:
    """Train; return outputs, losses, gradients and adapters, and the session's report ({} with ``device`` None)."""
    torch.manual_seed(rank)
    net = nn.Sequential(*(Block(checkpointed) for _ in range(BLOCKS)))
    session = None if device is None else carom.stream(net, device=device, vram=VRAM)
    stage = PipelineStage(net, rank, world, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    adapters = [tensor for tensor in net.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    generator = torch.Generator().manual_seed(9)
    found = []
    for _ in range(STEPS):
        x, target = (torch.randn(2 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            found.append(schedule.step(target=target, losses=losses).detach().clone())
        found += [tensor.detach().clone() for tensor in losses] + [tensor.grad.clone() for tensor in adapters]
        optimizer.step()
    found += [tensor.detach().clone() for tensor in adapters]
    report = {}
    if session is not None:
        report = session.report().to_dict()
        session.close()
    return found, report


def main() -> list[dict]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    devices: dict[str, Any] = {
        "cpu": "cpu", "late": carom.SimulatedDevice(seed=3, timing="late"), "random": carom.SimulatedDevice(seed=3, timing="random"),
    }  # fmt: skip
    found = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        for checkpointed in (False, True):
            want, _ = train(kind, rank, world, checkpointed)
            for name, device in devices.items():
                got, report = train(kind, rank, world, checkpointed, device)
                same = len(got) == len(want) and all(map(torch.equal, got, want))
                kept = ("units", "steps", "transfers_per_weight", "slot_bytes", "vram_peak_bytes")
                found.append(
                    {
                        "schedule": kind.__name__, "checkpointed": checkpointed, "device": name, "exact": same,
                        "tensors": len(got), **{key: report[key] for key in kept},
                    }
                )  # fmt: skip
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main()))
