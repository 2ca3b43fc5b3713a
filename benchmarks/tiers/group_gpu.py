"""`group=` on the GPUs of one machine: LoRA training by one GPU alone, and by all with one copy of the weights.

    torchrun --nproc-per-node 2 benchmarks/tiers/group_gpu.py --record FILE

Cases, in this order: rank 0 alone, without a group; all ranks, each copying whole units; all ranks, each copying its
part of a unit and gathering it; and DistributedDataParallel on resident weights, whose losses and adapters have to be
equal bit for bit. The frozen weights are linear layers of random bf16 numbers.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
if "carom" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec and spec.loader
    sys.modules["carom"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["carom"])
carom = sys.modules["carom"]


class Block(nn.Module):
    """Two frozen linear layers and a trained adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return x + y + self.up(self.down(x))


def make(args, device) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):  # drawn on the GPU, which is fast
        model = nn.Sequential()
        for _ in range(args.blocks):
            model.append(Block(args.width).to("cpu"))
    return model.requires_grad_(False)


def adapt(model, args, device) -> nn.Module:
    torch.manual_seed(1)
    for block in model:
        block.down = nn.Linear(args.width, 16, bias=False, device=device)
        block.up = nn.Linear(16, args.width, bias=False, device=device)
    return model


def train(model, args, device, steps: int, first: int = 0) -> dict:
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=1e-3)
    losses, seconds = [], []
    for step in range(first, first + steps):
        generator = torch.Generator(device=device).manual_seed(100 * step + dist.get_rank())
        x = torch.randn(1, args.tokens, args.width, generator=generator, device=device, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    return {"losses": losses, "seconds": seconds, "adapters": [p.detach().cpu() for p in adapters]}


def memory() -> dict:
    found = {}
    if sys.platform != "linux":
        return found
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            name, *words = line.split()
            if name in ("Pss_Anon:", "Pss_Shmem:"):
                found[name] = int(words[0]) << 10
    return {"own_bytes": found["Pss_Anon:"], "shared_bytes": found["Pss_Shmem:"]}


def case(args, device, group, worth: float | None) -> dict:
    gathering = importlib.import_module("carom.core.session.gathering")
    if worth is not None:
        gathering._WORTH = worth
    before = memory()
    model = make(args, device)
    nbytes = sum(p.nbytes for p in model.parameters())
    began = time.perf_counter()
    with carom.stream(
        model, device=device, vram=int(nbytes * args.vram), codec="raw", group=group
    ) as session:
        ready = time.perf_counter() - began
        adapt(model, args, device)
        wrapped = model if group is None else DistributedDataParallel(carom.prepare_for_ddp(model))
        warm = train(wrapped, args, device, args.warm)
        timed = train(wrapped, args, device, args.steps, args.warm)
        report = session.report().to_dict()
        if group is not None:
            dist.barrier()
        used = memory()
        if group is not None:
            dist.barrier()
    median = statistics.median(timed["seconds"])
    ranks = 1 if group is None else dist.get_world_size()
    kept = ("wire_bytes_per_step", "raw_bytes_per_step", "roofline_seconds", "link_bytes_per_second", "stall_seconds",
            "compute_seconds", "vram_peak_bytes", "transfers_per_weight", "notes")  # fmt: skip
    return {
        "weights_bytes": nbytes, "ready_seconds": ready, "seconds": timed["seconds"], "median_step_seconds": median,
        "samples_per_second": ranks / median, "host_memory_before": before, "host_memory": used,
        **{name: report.get(name) for name in kept},
        "trained": (warm["losses"] + timed["losses"], timed["adapters"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vram", type=float, default=0.35, help="budget as a share of the weights")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(False)
    result: dict = {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "ranks": dist.get_world_size(),
    }
    trained = {}
    for name, group, worth in (("alone", None, None), ("whole", "world", 0.0), ("gather", "world", 10.0)):
        if group is not None or rank == 0:
            found = case(args, device, group, worth)
            trained[name] = found.pop("trained")
        else:
            found = {}
        everything: list = [None] * dist.get_world_size()
        dist.all_gather_object(everything, found)
        result[name] = [each for each in everything if each]
        gc.collect()
        torch.cuda.empty_cache()
        if rank == 0:
            print(name, json.dumps(result[name][0]), flush=True)
            keep(args, result)
    model = adapt(make(args, device).to(device), args, device)
    wrapped = DistributedDataParallel(model)
    plain = train(wrapped, args, device, args.warm + args.steps)
    result["resident_seconds"] = plain["seconds"][args.warm :]
    for name in ("whole", "gather"):
        losses, adapters = trained[name]
        same = losses == plain["losses"] and all(map(torch.equal, adapters, plain["adapters"]))
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, same)
        result[f"{name}_bit_exact"] = everything
    if rank == 0:
        print(
            json.dumps({key: value for key, value in result.items() if "exact" in key or "resident" in key})
        )
        keep(args, result)
    dist.destroy_process_group()


def keep(args, result: dict) -> None:
    if args.record is None:
        return
    record = importlib.import_module("carom.benchmarks.engines.record")
    made = record.new_record("group_gpu", sys.argv[1:])
    del made["cases"]
    record.write_record({**made, "interrupted": False, "result": result}, args.record)


if __name__ == "__main__":
    main()
