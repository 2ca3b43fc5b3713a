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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
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


def stages_of(kind: Any, rank: int, world: int) -> tuple[int, ...]:
    """Return the numbers of the stages that ``rank`` has: one, or two where the schedule wants more than one."""
    if kind is ScheduleInterleaved1F1B:
        return rank, world + rank
    return (rank, 2 * world - 1 - rank) if kind is ScheduleZBVZeroBubble else (rank,)


def train(
    kind: Any, rank: int, world: int, checkpointed: bool, device: Any = None
) -> tuple[list, list[dict]]:
    """Train; return outputs, losses, gradients and adapters, and the sessions' reports (none with ``device`` None)."""
    numbers = stages_of(kind, rank, world)
    nets = []
    for number in numbers:
        torch.manual_seed(number)
        nets.append(nn.Sequential(*(Block(checkpointed) for _ in range(BLOCKS))))
    # A zero-bubble backward comes twice, and a checkpoint within a unit keeps the weights that it recomputed with until then.
    granularity = "layer" if kind is ScheduleZBVZeroBubble else "auto"
    sessions = (
        []
        if device is None
        else [carom.stream(net, device=device, vram=VRAM, granularity=granularity) for net in nets]
    )
    count = world * len(numbers)
    stages = [
        PipelineStage(net, number, count, torch.device("cpu"))
        for net, number in zip(nets, numbers, strict=True)
    ]
    schedule = kind(stages if len(stages) > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)
    adapters = [tensor for net in nets for tensor in net.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    generator = torch.Generator().manual_seed(9)
    found = []
    for _ in range(STEPS):
        x, target = (torch.randn(2 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        last = {"target": target, "losses": losses} if count - 1 in numbers else {}
        output = schedule.step(*((x,) if 0 in numbers else ()), **last)
        found += [output.detach().clone()] if output is not None else []
        found += [tensor.detach().clone() for tensor in losses] + [tensor.grad.clone() for tensor in adapters]
        optimizer.step()
    found += [tensor.detach().clone() for tensor in adapters]
    reports = [session.report().to_dict() for session in sessions]
    for session in sessions:
        session.close()
    return found, reports


def main() -> list[dict]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    late, random = (carom.SimulatedDevice(seed=3, timing=timing) for timing in ("late", "random"))
    everywhere = {"cpu": "cpu", "late": late, "random": random}
    cases = [
        (kind, checkpointed, everywhere)
        for kind in (ScheduleGPipe, Schedule1F1B)
        for checkpointed in (False, True)
    ] + [(kind, True, {"random": random}) for kind in (ScheduleInterleaved1F1B, ScheduleZBVZeroBubble)]
    found = []
    for kind, checkpointed, devices in cases:
        want, _ = train(kind, rank, world, checkpointed)
        for name, device in devices.items():
            got, reports = train(kind, rank, world, checkpointed, device)
            same = len(got) == len(want) and all(map(torch.equal, got, want))
            kept = ("units", "steps", "transfers_per_weight", "slot_bytes", "vram_peak_bytes")
            found += [
                {
                    "schedule": kind.__name__, "checkpointed": checkpointed, "device": name, "exact": same,
                    "tensors": len(got), **{key: report[key] for key in kept},
                }
                for report in reports
            ]  # fmt: skip
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main()), flush=True)
    os._exit(0)  # at a normal exit, threads of gloo that still run may abort the process
