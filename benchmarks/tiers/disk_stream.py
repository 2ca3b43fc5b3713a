"""A model larger than its RAM budget, streamed from disk: `python benchmarks/tiers/disk_stream.py --size 2GiB --ram 256MiB`.

Writes a sharded checkpoint of random bf16 blocks, packs it with `carom pack`, builds the module on meta, streams it,
and prints whether the output is the loaded blocks' bit for bit, the most memory the process held (as the operating
system counts it, from start to end, asked by itself and watched from outside) and the rates. Every part is a process
of its own, so that no part's memory is counted in another's; the files are removed afterwards. ``--record FILE``
keeps what is printed.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()


def load_checkout():
    """Return this script's checkout, imported as the package carom for any folder name."""
    if "carom" not in sys.modules:
        root = HERE.parents[2]
        spec = importlib.util.spec_from_file_location(
            "carom", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec and spec.loader
        sys.modules["carom"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["carom"])
    return sys.modules["carom"]


def build(blocks: int, width: int):
    """Return ``blocks`` feed-forward blocks of 16 * ``width``² bytes each, in bf16."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(width, 4 * width, bias=False, dtype=torch.bfloat16)
            self.down = nn.Linear(4 * width, width, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Model()


def make(folder: Path, blocks: int, width: int, device: str) -> None:
    """Write one shard for each block and their index, and the output of the loaded blocks, computed block by block on
    ``device``.
    """
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    x = torch.randn(1, width, dtype=torch.bfloat16)
    torch.save(x, folder / "input.pt")
    weight_map = {}
    with torch.no_grad():
        for number in range(blocks):
            one = build(1, width)
            state = {f"blocks.{number}.{n.removeprefix('blocks.0.')}": t for n, t in one.state_dict().items()}
            shard = f"model-{number + 1:05d}-of-{blocks:05d}.safetensors"
            save_file(state, folder / "source" / shard, {"format": "pt"})
            weight_map.update(dict.fromkeys(state, shard))
            x = one.to(device)(x.to(device))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "source" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    torch.save(x.cpu(), folder / "output.pt")


def run(folder: Path, blocks: int, width: int, vram: str, ram: str, device: str, passes: int, packed: bool):
    carom = load_checkout()
    import torch

    from_here = time.perf_counter()
    with torch.device("meta"):
        model = build(blocks, width)
    where = torch.device(device)
    x, expected = torch.load(folder / "input.pt").to(where), torch.load(folder / "output.pt")
    weights = folder / ("packed.safetensors" if packed else "source")
    began = time.perf_counter()
    with carom.stream(model, device=device, vram=vram, ram=ram, weights=weights) as session, torch.no_grad():
        ready = time.perf_counter()
        seconds, exact = [], True
        for _ in range(passes):
            start = time.perf_counter()
            exact = torch.equal(model(x).cpu(), expected) and exact
            seconds.append(time.perf_counter() - start)
        report = session.report()
    from importlib import import_module

    peak = import_module("carom.cli.pack").peak_rss_bytes()
    steady = min(seconds)
    return {
        "bit_exact": exact, "weights_bytes": sum(p.nbytes for p in model.parameters()), "packed": packed,
        "peak_rss_bytes": peak, "ram_budget_bytes": report.ram_budget_bytes, "ram_peak_bytes": report.ram_peak_bytes,
        "vram_budget_bytes": report.vram_budget_bytes, "build_seconds": began - from_here,
        "ready_seconds": ready - began, "first_output_seconds": ready - began + seconds[0], "pass_seconds": steady,
        "disk_bytes_per_step": report.disk_bytes_per_step, "disk_bytes_per_second": report.disk_bytes_per_second,
        "pass_bytes_per_second": report.disk_bytes_per_step / steady, "bound_by": report.bound_by,
        "passes_seconds": seconds,
    }  # fmt: skip


def raw_rate(path: Path) -> float:
    """Return the bytes/s of plain direct reads of the file: the best of 1, 2, 4 and 8 threads, three times each."""
    spec = importlib.util.spec_from_file_location("disk_read", HERE.parent / "disk_read.py")
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    _, rawio, *_ = plain.load_checkout()
    size = path.stat().st_size // 4096 * 4096
    buffers = [rawio.aligned_buffer(plain.CHUNK) for _ in range(8)]
    return max(size / plain.plain_loop(str(path), size, n, buffers) for n in (1, 2, 4, 8) * 3)


def part(name: str, args: argparse.Namespace, folder: Path) -> dict:
    command = [sys.executable, str(HERE), "--part", name, "--in", str(folder)]
    for option in ("blocks", "width", "vram", "ram", "device", "passes"):
        command += [f"--{option}", str(getattr(args, option))]
    return started(command, name)


def started(command: list[str], name: str) -> dict:
    """Run a part as a process; return the result that it prints, and the most memory that it was seen to hold."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        peak = watch(process)
        out.seek(0), errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{errors.read()}")
        result = json.loads(out.read() or "{}")
    return {**result, "peak_rss_bytes_from_outside": peak} if result else result


def watch(process: subprocess.Popen) -> int:
    """Wait for the process and return the most resident bytes found by looks every 20 ms."""
    import psutil

    peak = 0
    while True:
        with contextlib.suppress(psutil.Error):  # the process has ended
            peak = max(peak, psutil.Process(process.pid).memory_info().rss)
        try:
            process.wait(0.02)
            return peak
        except subprocess.TimeoutExpired:
            continue


def pack(folder: Path) -> None:
    load_checkout()
    from importlib import import_module

    import_module("carom.tools.pack.writer").pack(
        folder / "source", folder / "packed.safetensors", verify=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="2GiB", help="of the checkpoint")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--ram", default="256MiB")
    parser.add_argument("--vram", default="128MiB")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--folder", default=".", help="where the files go: on the drive to measure")
    parser.add_argument("--unpacked", action="store_true", help="also stream from the original shards")
    parser.add_argument(
        "--record", type=Path, help="also write the result here, with commit, date and machine"
    )
    parser.add_argument("--part", choices=["make", "pack", "run", "run-unpacked"], help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="inside", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not Path(args.folder).is_dir():
        parser.error(f"--folder {args.folder}: there is no such folder; make it, or name another")
    if args.record is not None and not args.record.absolute().parent.is_dir():
        parser.error(f"--record {args.record}: there is no folder for it; make it, or name another")
    if args.part:
        folder = Path(args.inside)
        if args.part == "make":
            make(folder, args.blocks, args.width, args.device)
        elif args.part == "pack":
            pack(folder)
        else:
            packed = args.part == "run"
            print(
                json.dumps(
                    run(
                        folder, args.blocks, args.width, args.vram, args.ram, args.device, args.passes, packed
                    )
                )
            )
        return
    load_checkout()
    from importlib import import_module

    size = import_module("carom.core.common.sizes").parse_size(args.size, setting="--size")
    record = import_module("carom.benchmarks.engines.record")
    fresh = record.new_record("disk_stream", sys.argv[1:]) if args.record is not None else {}
    args.blocks = max(1, size // (16 * args.width**2))
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="carom-disk-stream-") as name:
        folder = Path(name)
        (folder / "source").mkdir()
        part("make", args, folder)
        part("pack", args, folder)
        result = part("run", args, folder)
        result["raw_bytes_per_second"] = raw = raw_rate(folder / "packed.safetensors")
        result["first_output_of_raw"] = result["first_output_seconds"] * raw / result["weights_bytes"]
        result["pass_of_raw"] = result["pass_bytes_per_second"] / raw
        if args.unpacked:
            result["unpacked"] = part("run-unpacked", args, folder)
    print(json.dumps(result, indent=1))
    if args.record is not None:
        del fresh["cases"]
        record.write_record({**fresh, "result": result}, args.record)


if __name__ == "__main__":
    main()
