"""LoRA training on several devices of one machine, with one copy of the frozen weights in host memory.

    torchrun --nproc-per-node 2 docs/examples/data_parallel.py

Without GPUs the ranks compute on the CPU and talk over gloo. Each step is trained twice, by DistributedDataParallel
on resident weights and on weights that Carom streams with `group="world"`. Rank 0 prints JSON: `bit_exact` (losses and
adapters of both are equal, bit for bit, on every rank), and `host_memory`: for each rank the bytes of its own memory
and its share of the memory that the ranks share.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys

import carom
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable update of low rank."""

    def __init__(self, base: nn.Linear, device: torch.device, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        # Drawn on the CPU: a generator on a GPU gives other numbers.
        down = torch.randn(rank, base.in_features, dtype=base.weight.dtype) / base.in_features
        self.down = nn.Parameter(down.to(device))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def make_model(width: int, blocks: int) -> nn.Sequential:
    """Return the same frozen model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks))).requires_grad_(False)


def add_adapters(model: nn.Sequential, device: torch.device) -> None:
    torch.manual_seed(1)
    for block in model:
        block.first = LoRALinear(block.first, device)


def train(model: nn.Module, width: int, device: torch.device, steps: int) -> list[torch.Tensor]:
    """Train the adapters on this rank's data; return the losses and the adapters, on the CPU."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, width, generator=generator).to(device)
        loss = (model(x) - x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    return found + [adapter.detach().cpu().clone() for adapter in adapters]


def host_memory() -> dict[str, int]:
    """Return bytes of this process: its own memory, and its share of memory that it shares (Linux)."""
    found: dict[str, int] = {}
    if sys.platform != "linux":
        return found
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            name, *words = line.split()
            if name in ("Pss_Anon:", "Pss_Shmem:"):
                found[name] = int(words[0]) << 10
    return {"own_bytes": found["Pss_Anon:"], "shared_bytes": found["Pss_Shmem:"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--vram", default="30%", help="budget of each device, in bytes or as a share of the weights"
    )
    args = parser.parse_args()
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if gpus
        else torch.device("cpu")
    )
    if gpus:
        torch.cuda.set_device(device)

    model = make_model(args.width, args.blocks).to(device)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    add_adapters(model, device)
    expected = train(DistributedDataParallel(model), args.width, device, args.steps)
    del model
    gc.collect()

    model = make_model(args.width, args.blocks)
    vram = int(nbytes * float(args.vram[:-1]) / 100) if args.vram.endswith("%") else args.vram
    with carom.stream(model, device=device, vram=vram, group="world") as session:
        add_adapters(model, device)
        found = train(DistributedDataParallel(carom.prepare_for_ddp(model)), args.width, device, args.steps)
        dist.barrier()  # all ranks measure while all of them have the shared memory
        report, memory = session.report(), host_memory()
        dist.barrier()
    same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (same, memory))
    if dist.get_rank() == 0:
        print(json.dumps({
            "bit_exact": all(equal for equal, _ in ranks), "ranks": len(ranks), "weights_bytes": nbytes,
            "vram_peak_bytes": report.vram_peak_bytes, "wire_bytes_per_step": report.wire_bytes_per_step,
            "host_memory": [memory for _, memory in ranks], "notes": report.to_dict().get("notes"),
        }, indent=2))  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # With torch 2.13, threads of gloo can abort a process that ends normally after DistributedDataParallel was used.
    sys.stdout.flush()
    os._exit(0)
