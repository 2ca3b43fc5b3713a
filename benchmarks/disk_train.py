"""LoRA on a Llama-shaped model that streams from its file, against the resident run: `python benchmarks/disk_train.py`.

Writes a checkpoint of random bf16 weights (a shard a block) and packs it; trains adapters of rank 16 on all of a block's
linears for a few steps, once with the weights resident, once from the file under ``--vram`` and ``--ram``, both with
gradient checkpointing; and prints whether the adapters are the same bits, and the step's time beside what its bytes take at
the rate of the stage that binds (the drive's from plain direct reads in the same run). Every part is a process of its
own; the files are removed afterwards. The defaults are Llama 2 7B's shape: 13.5 GB.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
_spec = importlib.util.spec_from_file_location("disk_stream", HERE.parent / "disk_stream.py")
disk_stream = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(disk_stream)

SHAPE = {"layers": 32, "width": 4096, "inner": 11008, "heads": 32, "vocab": 32000}


def build(shape: dict):
    """The model in bf16: embedding, blocks (RMS norm, rotary attention, gated feed-forward), norm and head."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    width, inner, heads = shape["width"], shape["inner"], shape["heads"]
    kind = {"bias": False, "dtype": torch.bfloat16}

    def rotated(x):
        length, size = x.shape[-2], x.shape[-1]
        angles = torch.arange(length, device=x.device)[:, None] * 10000 ** (
            -torch.arange(0, size, 2, device=x.device) / size
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.RMSNorm(width, dtype=torch.bfloat16)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, **kind) for _ in range(4))
            self.after = nn.RMSNorm(width, dtype=torch.bfloat16)
            self.gate, self.up = nn.Linear(width, inner, **kind), nn.Linear(width, inner, **kind)
            self.down = nn.Linear(inner, width, **kind)

        def forward(self, x):
            y = self.before(x)
            q, k, v = (p(y).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            y = self.after(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape["vocab"], width, dtype=torch.bfloat16)
            self.layers = nn.ModuleList(Block() for _ in range(shape["layers"]))
            self.norm = nn.RMSNorm(width, dtype=torch.bfloat16)
            self.head = nn.Linear(width, shape["vocab"], **kind)

        def forward(self, tokens):
            x = self.embed(tokens)
            if torch.is_grad_enabled():
                x.requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if torch.is_grad_enabled() else layer(x)
            return F.cross_entropy(
                self.head(self.norm(x))[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
            )

    return Model()


def add_adapters(model, device, rank: int = 16):
    """LoRA on every linear of the blocks, the same values each time; the trainable parameters."""
    import torch
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner = inner
            self.a = nn.Parameter(torch.randn(rank, inner.in_features, device=device) * 0.02)
            self.b = nn.Parameter(torch.randn(inner.out_features, rank, device=device) * 0.02)

        def forward(self, x):
            return self.inner(x) + ((x.float() @ self.a.T) @ self.b.T).to(x.dtype)

    torch.manual_seed(1)
    model.requires_grad_(False)
    for layer in model.layers:
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.Linear):
                setattr(layer, name, Adapted(child))
    return [p for p in model.parameters() if p.requires_grad]


def make(folder: Path, shape: dict) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weight_map = {}
    with torch.device("meta"):
        whole = build(shape).state_dict()
    groups: dict[str, list[str]] = {}
    for name in whole:
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
    for number, names in enumerate(groups.values()):
        state = {}
        for name in names:
            size = whole[name].shape
            value = torch.ones(size) if len(size) == 1 else torch.randn(size) * (size[-1] ** -0.5)
            state[name] = value.to(torch.bfloat16)
        shard = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        save_file(state, folder / "source" / shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, shard))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "source" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def train(model, trained, device, args, shape, synchronize) -> dict:
    """Seconds of each step; the optimizer steps in the backward."""
    import functools

    import torch

    optimizer = sys.modules["carom"].OptimizerInBackward(
        trained, functools.partial(torch.optim.AdamW, lr=1e-4)
    )
    seconds, losses = [], []
    for step in range(args.steps):
        tokens = torch.randint(
            0, shape["vocab"], (1, args.tokens), generator=torch.Generator().manual_seed(step)
        )
        tokens = tokens.to(device)
        synchronize()
        began = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
    return {"seconds": seconds, "losses": losses}


def run(folder: Path, args: argparse.Namespace, shape: dict, resident: bool) -> dict:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
    carom = disk_stream.load_checkout()
    import torch

    torch.use_deterministic_algorithms(True)
    device = torch.device(args.device)
    synchronize = (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
    with torch.device("meta"):
        model = build(shape)
    if resident:
        state = carom.load_file(folder / "packed.safetensors")
        model.load_state_dict(state, assign=True)
        model.to(device)
        del state
        trained = add_adapters(model, device)
        result = train(model, trained, device, args, shape, synchronize)
        torch.save([p.detach().cpu() for p in trained], folder / "resident.pt")
        return result
    began = time.perf_counter()
    weights = folder / "packed.safetensors"
    with carom.stream(model, device=device, vram=args.vram, ram=args.ram, weights=weights) as session:
        ready = time.perf_counter() - began
        trained = add_adapters(model, device)
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long, device=device))  # what appeared is adopted here
        result = train(model, trained, device, args, shape, synchronize)
        report = session.report()
        found = [p.detach().cpu() for p in trained]
    peak = importlib.import_module("carom.cli.pack").peak_rss_bytes()
    expected = torch.load(folder / "resident.pt", weights_only=True)
    return {
        **result, "ready_seconds": ready, "peak_rss_bytes": peak,
        "adapters_bit_identical": all(map(torch.equal, found, expected)), "adapters": len(found),
        "disk_bytes_per_step": report.disk_bytes_per_step, "wire_bytes_per_step": report.wire_bytes_per_step,
        "link_bytes_per_second": report.link_bytes_per_second, "bound_by": report.bound_by,
        "disk_bytes_per_second": report.disk_bytes_per_second, "transfers_per_weight": report.transfers_per_weight,
        "vram_peak_bytes": report.vram_peak_bytes, "ram_peak_bytes": report.ram_peak_bytes,
    }  # fmt: skip


def part(name: str, args: argparse.Namespace, folder: Path) -> dict:
    options = ["vram", "ram", "device", "steps", "tokens", *SHAPE]
    given = [item for option in options for item in (f"--{option}", str(getattr(args, option)))]
    return disk_stream.started([sys.executable, str(HERE), "--part", name, "--in", str(folder), *given], name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vram", default="3GiB")
    parser.add_argument("--ram", default="4GiB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048)
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", default=".", help="where the files go: on the drive to measure")
    parser.add_argument(
        "--record", type=Path, help="also write the result here, with commit, date and machine"
    )
    parser.add_argument("--part", choices=["make", "pack", "resident", "streamed"], help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in SHAPE}
    if args.part:
        folder = Path(args.inside)
        if args.part == "make":
            make(folder, shape)
        elif args.part == "pack":
            disk_stream.pack(folder)
        else:
            print(json.dumps(run(folder, args, shape, args.part == "resident")))
        return
    disk_stream.load_checkout()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="carom-disk-train-") as name:
        folder = Path(name)
        (folder / "source").mkdir()
        part("make", args, folder)
        part("pack", args, folder)
        resident, result = part("resident", args, folder), part("streamed", args, folder)
        raw = disk_stream.raw_rate(folder / "packed.safetensors")
    alone = {
        "compute": min(resident["seconds"]),
        "link": result["wire_bytes_per_step"] / (result["link_bytes_per_second"] or float("inf")),
        "disk": result["disk_bytes_per_step"] / raw,
    }
    result |= {"resident": resident, "raw_bytes_per_second": raw, "seconds_alone": alone}
    result["of_binding_stage"] = sorted(result["seconds"][2:])[len(result["seconds"][2:]) // 2] / max(
        alone.values()
    )
    print(json.dumps(result, indent=1))
    if args.record is not None:
        disk_stream.keep(args.record, "disk_train", result)


if __name__ == "__main__":
    main()
