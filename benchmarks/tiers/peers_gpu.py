"""`peers=` on a machine with two GPUs: is a transformer whose weights wait on the second GPU computed bit for bit, and
how much faster are its steps than with weights in host memory alone?

    python3 benchmarks/tiers/peers_gpu.py --record FILE

The cases are inference and LoRA training, each resident, streamed from host memory, and streamed from host memory and
the second GPU. Inference also runs with packed weights, with weights from a file, and with pinned memory for a part of
the weights only. `--simulated` runs the same code on simulated devices with a small model.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import importlib.util
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROOT = Path(__file__).resolve().parents[2]
if "carom" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec and spec.loader
    sys.modules["carom"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["carom"])
carom = sys.modules["carom"]
KEPT = (
    "peer_bytes", "peer_wire_bytes_per_step", "wire_bytes_per_step", "raw_bytes_per_step", "pinned_bytes",
    "pageable_bytes", "link_bytes_per_second", "step_seconds", "stall_seconds", "compute_seconds", "roofline_seconds",
    "transfers_per_weight", "vram_peak_bytes", "disk_bytes_per_step", "packed_units", "notes",
)  # fmt: skip


class Block(nn.Module):
    """A layer of a transformer, with a low-rank adapter that `adapt` adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.adapter = None

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        y = self.after(x)
        z = self.down(nn.functional.gelu(self.up(y)))
        return x + z if self.adapter is None else x + z + self.adapter(y)


def make(args) -> nn.Module:
    """The frozen model on the device; on the CPU with simulated devices."""
    torch.manual_seed(0)
    model = nn.Sequential()
    with torch.device(args.draw):
        for _ in range(args.blocks):
            model.append(Block(args.width).to(torch.bfloat16))
    return model.requires_grad_(False)


def adapt(model, device) -> None:
    torch.manual_seed(1)
    for block in model:
        width = block.out.in_features
        block.adapter = nn.Sequential(nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False))
        block.adapter.to(device, torch.bfloat16)


def inputs(args, number: int, device):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(1, args.tokens, args.width, generator=generator).to(device, torch.bfloat16)


def wait(args) -> None:
    if not args.simulated:
        torch.cuda.synchronize()


def infer(model, args, device) -> dict:
    outputs, seconds = [], []
    with torch.no_grad():
        for number in range(args.warm + args.steps):
            x = inputs(args, number, device)
            wait(args)
            began = time.perf_counter()
            y = model(x)
            wait(args)
            seconds.append(time.perf_counter() - began)
            if number < 3 or number == args.warm + args.steps - 1:
                outputs.append(y.cpu())
    return {"values": outputs, "seconds": seconds[args.warm :]}


def train(model, args, device) -> dict:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    losses, seconds = [], []
    for number in range(args.warm + args.steps):
        x = inputs(args, number, device)
        wait(args)
        began = time.perf_counter()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(args)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.detach().cpu())
    return {
        "values": losses + [p.detach().cpu() for p in trained],
        "seconds": seconds[args.warm :],
    }


def without_adapters(model) -> None:
    for block in model:
        block.adapter = None


def resident(args, job, model) -> dict:
    device = torch.device(args.draw)
    if job is train:
        adapt(model, device)
    found = job(model, args, device)
    without_adapters(model)
    return found


def streamed(args, job, peers, model, **settings) -> dict:
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    began = time.perf_counter()
    settings = {"vram": int(nbytes * args.vram), "codec": "raw"} | settings
    with carom.stream(model, device=args.device, peers=peers, **settings) as session:
        ready = time.perf_counter() - began
        if job is train:
            adapt(model, session.device)
        found = job(model, args, session.device)
        report = session.report().to_dict()
        memory = importlib.import_module("carom.core.session.assembly").parts(session).manager.host.peers
        rates = [] if memory is None else [dataclasses.asdict(peer.rates) for peer in memory.peers]
    without_adapters(model)
    return {
        **found, "ready_seconds": ready, "rates": rates, "weights_bytes": nbytes,
        "median_step_seconds": statistics.median(found["seconds"]), **{name: report[name] for name in KEPT},
    }  # fmt: skip


def save(model, path: Path) -> None:
    """Write the weights of ``model`` to a .safetensors file."""
    state, header, at = model.state_dict(), {}, 0
    for name, value in state.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in state.values():
            file.write(value.contiguous().view(torch.uint8).numpy().tobytes())


def same(mine: list, theirs: list) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vram", type=float, default=0.3, help="budget as a share of the weights")
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="begin no further case after so many seconds"
    )
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    arguments = {key: str(value) for key, value in vars(args).items()}
    if args.simulated:
        torch.set_num_threads(1)
        args.width, args.blocks, args.tokens, args.warm, args.steps = 128, 6, 8, 4, 4
        args.draw, args.device = "cpu", carom.SimulatedDevice(seed=1)
        others, names = [carom.SimulatedDevice(seed=2)], ["simulated", "simulated"]
    else:
        torch.use_deterministic_algorithms(True)
        args.draw = args.device = "cuda:0"
        others = [f"cuda:{index}" for index in range(1, torch.cuda.device_count())][:1]
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if not others:
            raise SystemExit("a second GPU is needed")
    peers = [(device, "auto") for device in others]
    began = time.perf_counter()
    result: dict = {"arguments": arguments, "devices": names, "torch": torch.__version__, "cases": {}}
    want: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = 24 * args.width**2 * args.blocks
        jobs = {
            "infer, host": (infer, (), {}),
            "infer, peer": (infer, peers, {}),
            "infer, peer of a quarter": (infer, [(others[0], whole // 4)], {}),
            "train, host": (train, (), {}),
            "train, peer": (train, peers, {}),
            "infer, little pinned memory, host": (infer, (), {"ram": whole // 4}),
            "infer, little pinned memory, peer": (infer, peers, {"ram": whole // 4}),
            "infer, packed, host": (infer, (), {"codec": "lossless"}),
            "infer, packed, peer": (infer, peers, {"codec": "lossless"}),
            "infer, file, host": (infer, (), {"weights": folder, "ram": whole // 3}),
            "infer, file, peer": (infer, peers, {"weights": folder, "ram": whole // 3}),
        }
        model = make(args)
        for job in (infer, train):
            found = resident(args, job, model)
            want[job] = found.pop("values")
            result["cases"][f"{job.__name__}, resident"] = {
                **found,
                "median_step_seconds": statistics.median(found["seconds"]),
            }
        model.to("cpu")
        release(args)
        for name, (job, with_peers, settings) in jobs.items():
            if time.perf_counter() - began > args.seconds:
                result.setdefault("left_out", []).append(name)
                continue
            try:
                if "weights" in settings and not model[0].out.weight.is_meta:
                    save(model, Path(folder) / "model.safetensors")
                    model = model.to("meta")
                found = streamed(args, job, with_peers, model, **settings)
                found["bit_exact"] = same(found.pop("values"), want[job])
            except Exception as error:  # the other cases are worth their time nevertheless
                found = {"error": f"{type(error).__name__}: {error}"}
            result["cases"][name] = found
            told = {
                key: found.get(key)
                for key in ("bit_exact", "median_step_seconds", "peer_bytes", "error", "notes")
            }
            print(name, json.dumps(told), flush=True)
            keep(args, result)
            without_adapters(model)
            release(args)
    result["seconds"] = time.perf_counter() - began
    exact = [
        found.get("bit_exact", False) for name, found in result["cases"].items() if "resident" not in name
    ]
    result["bit_exact"] = all(exact)
    print(json.dumps({"bit_exact": result["bit_exact"], "seconds": result["seconds"]}))
    keep(args, result)
    sys.exit(not result["bit_exact"])


def release(args) -> None:
    gc.collect()
    if not args.simulated:
        torch.cuda.empty_cache()


def keep(args, result: dict) -> None:
    if args.record is None:
        return
    record = importlib.import_module("carom.benchmarks.engines.record")
    made = record.new_record("peers_gpu", sys.argv[1:])
    del made["cases"]
    record.write_record({**made, "interrupted": False, "result": result}, args.record)


if __name__ == "__main__":
    main()
