"""All figures of the disk tier in one bounded run: `python benchmarks/tiers/disk_gpu.py --seconds 290 --folder DIR --record FILE`.

A Llama-shaped model of 24 GB (7B's width, 59 blocks) is drawn on the device and written to DIR, which is the drive to measure. Then:

- `raw`: plain direct reads by several threads and block sizes; the best way reads the whole file before and after the first
  output (the same bytes in the same order: what a host keeps of a virtual drive, it keeps for both), and once into 1 GiB of
  memory instead of the same few megabytes;
- `first_output`: all of it built on meta and streamed with ``ram`` an eighth of its bytes: until `carom.stream` returns, until the
  first output is there, and whether it is that of the model which is still on the device, bit for bit; the process's memory,
  watched from outside (a forward of one block went before, so that libraries and kernels are loaded);
- `lora`: its first 32 blocks, which is 7B's shape, under 3 GiB of device and 4 GiB of host memory: PEFT, checkpointing, `OptimizerInBackward`; the
  adapters against those of the resident run with plain AdamW, and the step beside what its bytes take;
- `rate`: passes over 20 blocks in turns with plain direct reads of as many bytes in the same part of the file;
- `packed`: a model of 16 blocks (7 GB) and its file, packed by `carom pack --codec lossless`: the raw and the packed file streamed one
  after the other under the same budgets, bits, first output, passes, bytes, and where was decoded. `--parts packed` runs it alone;
- `nf4`, only if asked with `--parts nf4`: LoRA on a Llama in the shape of 70B over a file of random NF4 codes (40 GB; less with a smaller
  `--nf4-layers`), under 22 GB of device and 24 GB of host memory: steps beside the roofline, wire and disk bytes, the process's memory; and
  the adapters of its first blocks against those of the resident model of the same weights, bit for bit.

Parts are processes of their own, end when the time does, and what is known so far is in FILE at any time. The last line that
is printed is the record's `result`. `--device cpu` with small sizes proves the path without a GPU, and `--device simulated`
also proves what is packed up to the device, on Carom's simulated device.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy

HERE = Path(__file__).resolve()
SWEPT = 3 << 27  # bytes of one measurement of the sweep
LARGE = 1 << 30  # bytes of the memory that successive blocks are read into
DEFAULT = ("first_output", "stream", "packed")  # `stream` is `lora` and `rate`
NAMES = (*DEFAULT, "nf4")  # parts to choose from
# The part `nf4`: the sizes of Llama 2 70B (its config.json), and the blocks that are compared with resident ones.
NF4 = {"nf4_width": 8192, "nf4_inner": 28672, "nf4_heads": 64, "nf4_kv_heads": 8, "nf4_vocab": 32000,
       "nf4_layers": 80, "nf4_compared_layers": 6}  # fmt: skip
RESERVED = 3.0  # seconds kept for the end of the run


def module(name: str):
    """Return the module ``carom.name`` of the checkout that contains this script, for any folder name."""
    if "carom" not in sys.modules:
        root = HERE.parents[2]
        spec = importlib.util.spec_from_file_location(
            "carom", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec and spec.loader
        sys.modules["carom"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["carom"])
    return importlib.import_module(f"carom.{name}") if name else sys.modules["carom"]


class Run:
    """The whole run: its parts one after the other, and the record."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.result: dict = {"seconds": {}}
        self.began = time.time()
        self.until = self.began + args.seconds - RESERVED
        self.best: dict | None = None
        self._memory = module("benchmarks.tiers.disk_parts").memory
        record = module("benchmarks.engines.record")
        self._write = record.write_record
        self.record: dict = {}
        if args.record is not None:
            self.record = record.new_record("disk_gpu", sys.argv[1:])
            del self.record["cases"]

    def keep(self, interrupted: bool = True) -> None:
        if self.args.record is not None:
            self._write({**self.record, "interrupted": interrupted, "result": self.result}, self.args.record)

    def part(self, name: str, until: float) -> None:
        """Run a part in a process; its output is added to the record at once."""
        settings = {
            key: getattr(self.args, key) for key in vars(self.args) if key not in ("record", "part", "folder")
        }
        settings |= {"part": name, "inside": str(self.folder), "until": until}
        if self.best is not None:
            settings |= {"threads": self.best["threads"], "block": self.best["block"]}
        given = [item for key, value in settings.items() if value is not None
                 for item in (f"--{key.replace('_', '-')}", str(value))]  # fmt: skip
        began, peak = time.time(), {}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [sys.executable, str(HERE), *given], stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
            )
            reader = threading.Thread(target=self._listen, args=(process,))
            reader.start()
            while process.poll() is None:
                for kind, nbytes in self._memory(process.pid).items():
                    peak[kind] = max(peak.get(kind, 0), nbytes)
                if time.time() > until:
                    process.kill()
                    self.result[f"{name}_failed"] = {"killed": "the time was over"}
                    break
                time.sleep(0.02)
            process.wait()
            reader.join()
            errors.seek(0)
            if process.returncode and f"{name}_failed" not in self.result:
                self.result[f"{name}_failed"] = {"exit": process.returncode, "stderr": errors.read()[-4000:]}
        self.result["seconds"][name] = time.time() - began
        self.result.setdefault(name, {})["peak_rss_bytes_from_outside"] = peak
        self.keep()

    def _listen(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            for name, found in said.items():
                self.result[name] = {**self.result.get(name, {}), **found}
                self.keep()
                print(f"[{time.time() - self.began:5.0f} s] {name}: {json.dumps(found)[:400]}", flush=True)

    def grow(self) -> None:
        """Write once to as much memory as the parts will use, because a virtual machine's memory grows slowly at
        first use.
        """
        sizes = module("core.common.sizes")
        most = max(
            self.result["make"]["weights_bytes"] // 8,
            *map(sizes.parse_size, (self.args.lora_ram, self.args.rate_ram)),
        )
        began = time.perf_counter()
        module("benchmarks.tiers.disk_llama").grow(2 * most)
        self.result["grown"] = {"bytes": 2 * most, "seconds": time.perf_counter() - began}

    def raw(self) -> float:
        """Return the rate in bytes/s of the fastest kind of plain reads over the whole file, with no other use of the
        drive.
        """
        assert self.best is not None
        return self.plain.rate(self.best["threads"], self.best["block"], self.result["make"]["weights_bytes"])

    def into_large(self) -> float:
        """Return the rate in bytes/s of the same reads into memory that is larger than any CPU cache."""
        assert self.best is not None
        memory = module("core.common.huge_pages").allocate_pages(
            max(self.best["block"], min(LARGE, 2 * self.args.swept))
        )
        numpy.frombuffer(memory, numpy.uint8)[:] = 0  # touch the pages first, as for the other buffers
        return self.plain.rate(self.best["threads"], self.best["block"], 4 * self.args.swept, into=memory)

    def go(self) -> None:
        wanted = self.args.parts.split(",")
        large = [name for name in ("first_output", "stream") if name in wanted]
        if large:
            self.large(large)
        if "packed" in wanted:
            if self.until - time.time() < 5:
                self.result["packed_failed"] = {"left out": "the time was over"}
            else:
                self.part("packed", self.until)
        if "nf4" in wanted:
            self.nf4()

    def nf4(self) -> None:
        """Write the file of NF4 codes, compare the first blocks with the resident model, and time the whole model."""
        args = self.args
        self.part("nf4_make", self.until)
        if "layers" not in self.result.get("nf4", {}):
            return
        args.nf4_layers = self.result["nf4"]["layers"]
        ram = module("core.common.sizes").parse_size(args.nf4_ram)
        # A virtual machine's memory grows slowly at first use.
        module("benchmarks.tiers.disk_llama").grow(min(ram, self.result["nf4"]["file_bytes"]))
        for name in ("nf4_compared", "nf4"):
            if self.until - time.time() < 5:
                self.result[f"{name}_failed"] = {"left out": "the time was over"}
            else:
                self.part(name, self.until)
        found = self.result["nf4"]
        held, before = found.get("peak_rss_bytes_from_outside", {}), found.get("process_rss_bytes", {})
        for kind in held.keys() & before.keys() & {"all", "anon"}:
            # The memory that the process had before it loaded the model is not Carom's.
            found[f"{kind}_rss_over_ram_and_process"] = held[kind] - before[kind] - ram

    def large(self, wanted: list[str]) -> None:
        """Measure the large model, and the drive's plain rates before and after each part."""
        args, result = self.args, self.result
        self.part("make", self.began + 0.6 * args.seconds)
        if "layers" not in result["make"]:
            return
        args.layers = result["make"]["layers"]
        args.lora_layers, args.rate_layers = (
            min(n, args.layers) for n in (args.lora_layers, args.rate_layers)
        )
        self.grow()
        self.plain = module("benchmarks.tiers.disk_llama").PlainReads(str(self.folder / "model.safetensors"))
        began = time.time()
        sweep = self.plain.sweep(args.swept)
        self.best = sweep[0]
        result["raw"] = {"sweep": sweep, "into_large_memory": self.into_large(), "beside": [self.raw()]}
        result["seconds"]["raw"] = time.time() - began
        self.keep()
        for name in wanted:
            if self.until - time.time() < 5:
                result[f"{name}_failed"] = {"left out": "the time was over"}
                continue
            before = result["raw"]["beside"][-1]
            self.part(name, self.until)
            if name != "stream":
                result["raw"]["beside"].append(self.raw())
            rounds = [r["raw_bytes_per_second"] for r in result.get("rate", {}).get("rounds", ())]
            raw = max(before, result["raw"]["beside"][-1], *rounds)
            self.judge("lora" if name == "stream" else name, raw)
            self.keep()

    def judge(self, name: str, raw: float) -> None:
        """Compute the figures of part ``name``; ``raw``: the fastest of the plain reads before and after it, in
        bytes/s.
        """
        found = self.result.setdefault(name, {})
        found["raw_bytes_per_second"] = raw
        if name == "first_output" and "first_output_seconds" in found:
            found["first_output_of_raw"] = found["first_output_seconds"] * raw / found["weights_bytes"]
            held, before = found["peak_rss_bytes_from_outside"], self.result["process"]["rss_bytes"]
            ram = found["weights_bytes"] // 8
            # Subtract the memory that the process had before it loaded a model; pages of library files count apart.
            found["rss_over_ram_and_process"] = held["all"] - before["all"] - ram
            if "anon" in held:
                found["anonymous_over_ram_and_process"] = held["anon"] - before["anon"] - ram
        if name == "lora" and "timed" in found:
            alone = {"disk": found["disk_bytes_per_step"] / raw}
            if "resident" in self.result:
                alone["compute"] = min(self.result["resident"]["timed"]["seconds"])
            if found["link_bytes_per_second"]:
                alone["link"] = found["wire_bytes_per_step"] / found["link_bytes_per_second"]
            found["seconds_alone"] = alone
            found["of_binding_stage"] = statistics.median(found["timed"]["seconds"]) / max(alone.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=290, help="the run is over by then")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default=".", help="where the file goes: on the drive to measure")
    parser.add_argument(
        "--record", type=Path, help="the result, with commit, date and machine, as far as it is known"
    )
    sizes = {"width": 4096, "inner": 11008, "heads": 32, "vocab": 32000, "layers": 59, "lora_layers": 32,
             "rate_layers": 20, "packed_layers": 16, "tokens": 2048, "steps": 2, "swept": SWEPT,
             **NF4}  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument(
        "--parts",
        default=",".join(DEFAULT),
        help=f"which of {', '.join(NAMES)} (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument("--vram", help="of the first output; default: an eighth of the weights, as its ram")
    parser.add_argument("--packed-vram", help="of the packed part; default: a quarter of its weights")
    parser.add_argument("--packed-ram", help="default: an eighth of its weights")
    for name, value in {
        "lora_vram": "3GiB",
        "lora_ram": "4GiB",
        "rate_vram": "2GiB",
        "rate_ram": "1GiB",
        "nf4_vram": "22GB",
        "nf4_ram": "24GB",
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=value)
    parser.add_argument(
        "--nf4-card",
        help="bytes of the card's memory for `nf4`; another process holds the rest, and --nf4-vram may be auto",
    )
    parser.add_argument(
        "--part", choices=["make", "nf4_make", "nf4_compared", *NAMES], help=argparse.SUPPRESS
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=4, help=argparse.SUPPRESS)
    parser.add_argument("--block", type=int, default=8 << 20, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        module("benchmarks.tiers.disk_parts").run_part(args)
        return
    unknown = [name for name in args.parts.split(",") if name not in NAMES]
    if unknown:
        parser.error(f"--parts: {', '.join(map(repr, unknown))} is none of {', '.join(NAMES)}")
    if not Path(args.folder).is_dir():
        parser.error(f"--folder {args.folder}: there is no such folder; make it, or name another")
    if args.record is not None and not args.record.absolute().parent.is_dir():
        parser.error(f"--record {args.record}: there is no folder for it; make it, or name another")
    if args.device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU; --device cpu with small sizes runs it in miniature")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="carom-disk-gpu-") as name:
        run = Run(args, Path(name))
        try:
            run.go()
        finally:
            failed = [key for key in run.result if key.endswith("_failed")]
            run.keep(interrupted=bool(failed))
        print(json.dumps(run.result))
    if failed:
        raise SystemExit(f"not everything was measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
