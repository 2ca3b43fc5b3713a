"""Trains LoRA adapters on a model that is larger than the memory of all pipeline stages together.

    torchrun --nproc-per-node 2 docs/examples/pipeline.py

Each process is one stage of torch.distributed.pipelining: it has its part of the layers, and `carom.stream` keeps at most
`--vram` bytes of the part's weights on its device. The other weights wait in host memory, and are copied to the device
for each microbatch. The budget emulates a small card, so that the example runs anywhere: on the CPU with gloo, or with
one GPU for each process with NCCL. `--simulated` streams to simulated devices, which raise an error if a copy and its use
race. The weights are random and seeded.

Rank 0 prints JSON. `bit_exact`: whether losses, gradients and trained adapters equal those of the same pipeline with all
weights on the devices. `model_bytes`, `vram_bytes`: the frozen weights of the model, and the budgets of all stages together.
`stages`: for each stage, the peak of weights on its device in bytes, and the copies of a streamed weight in a step.
"""

from __future__ import annotations

import argparse
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

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A residual MLP that keeps only its input for the backward (activation checkpointing)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.up, self.down = LoraLinear(width, 4 * width), LoraLinear(4 * width, width)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False)


def make_stage(rank: int, blocks: int, width: int) -> nn.Sequential:
    """Return the layers of stage `rank`, with seeded weights on the CPU."""
    torch.manual_seed(rank)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of one microbatch; the last stage calls this."""
    return nn.functional.mse_loss(output, target)


def train(module: nn.Module, device: torch.device, options: argparse.Namespace) -> list[torch.Tensor]:
    """Train the pipeline in which this process has the stage `module`; return losses, gradients and adapters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(module, rank, world, device)
    schedule = SCHEDULES[options.schedule](stage, n_microbatches=options.microbatches, loss_fn=loss_of)
    adapters = [tensor for tensor in module.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    data = torch.Generator().manual_seed(1)
    found = []
    for _ in range(options.steps):
        x, target = (
            torch.randn(options.microbatches * options.batch, options.width, generator=data).to(device)
            for _ in range(2)
        )
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": target, "losses": losses} if rank == world - 1 else {}))
        found += [loss.detach().clone() for loss in losses]
        found += [tensor.grad.clone() for tensor in adapters if tensor.grad is not None]
        optimizer.step()
    return found + [tensor.detach().clone() for tensor in adapters]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train with resident and with streamed stages; return what rank 0 prints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )

    resident = train(make_stage(rank, options.blocks, options.width).to(device), device, options)

    module = make_stage(rank, options.blocks, options.width)
    frozen = sum(t.numel() * t.element_size() for t in module.parameters() if not t.requires_grad)
    target = carom.SimulatedDevice(seed=rank, timing="random") if options.simulated else device
    with carom.stream(module, device=target, vram=options.vram) as session:
        streamed = train(module, device, options)
        report = session.report().to_dict()

    same = len(resident) == len(streamed) and all(map(torch.equal, resident, streamed))
    mine = {
        "weight_bytes": frozen, "vram_peak_bytes": report["vram_peak_bytes"], "exact": same,
        "transfers_per_weight": report["transfers_per_weight"], "steps": report["steps"],
    }  # fmt: skip
    stages: list[Any] = [None] * world
    dist.all_gather_object(stages, mine)
    return {
        "bit_exact": all(stage["exact"] for stage in stages),
        "model_bytes": sum(stage["weight_bytes"] for stage in stages),
        "vram_bytes": world * report["vram_budget_bytes"],
        "schedule": options.schedule, "microbatches": options.microbatches, "device": "simulated" if options.simulated else device.type, "stages": stages,
    }  # fmt: skip


def main() -> None:
    """Read the options, meet the other processes, and print the result on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vram", default="5MiB", help="budget for the weights of each stage (default 5MiB)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step (default 4)")
    parser.add_argument("--steps", type=int, default=4, help="training steps (default 4)")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each stage (default 8)")
    parser.add_argument("--width", type=int, default=256, help="width of the blocks (default 256)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a microbatch (default 8)")
    parser.add_argument("--simulated", action="store_true", help="stream to simulated devices, on the CPU")
    options = parser.parse_args()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks and not options.simulated
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    try:
        found = run(options)
        if dist.get_rank() == 0:
            print(json.dumps(found, indent=2))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # With torch 2.13, threads of gloo can abort a process that ends normally after DistributedDataParallel was used.
    sys.stdout.flush()
    os._exit(0)
