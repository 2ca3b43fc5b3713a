"""All figures of the disk tier in one bounded run: `python benchmarks/disk_gpu.py --seconds 290 --folder DIR --record FILE`.

A Llama-shaped model of 24 GB (7B's width, 59 blocks) is drawn on the device and written to DIR, which is the drive to measure. Then:

- `raw`: plain direct reads by several threads and block sizes; the best is read again beside every part;
- `first_output`: all of it built on meta and streamed with ``ram`` an eighth of its bytes: until `carom.stream` returns, until the
  first output is there, and whether it is that of the model which is still on the device, bit for bit; the process's memory,
  watched from outside;
- `lora`: its first 32 blocks, which is 7B's shape, under 3 GiB of device and 4 GiB of host memory: PEFT, checkpointing, `OptimizerInBackward`; the
  adapters against those of the resident run with plain AdamW, and the step beside what its bytes take;
- `rate`: passes over 20 blocks in turns with plain direct reads.

Parts are processes of their own, end when the time does, and what is known so far is in FILE at any time. The last line that
is printed is the record's `result`. `--device cpu` with small sizes proves the path without a GPU.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve()
CONFIGURED = ("width", "inner", "heads", "vocab", "layers", "lora_layers", "rate_layers", "tokens", "steps")
SWEPT = 1 << 30  # bytes of one measurement of plain reads
RESERVED = 3.0  # seconds kept for the end of the run


def module(name: str):
    """``carom.name`` of the checkout this script lies in, whatever its folder is called."""
    if "carom" not in sys.modules:
        root = HERE.parent.parent
        spec = importlib.util.spec_from_file_location(
            "carom", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec and spec.loader
        sys.modules["carom"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["carom"])
    return importlib.import_module(f"carom.{name}") if name else sys.modules["carom"]


# -- in the parts' processes


class Part:
    """One process: its settings, and what all parts share."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        import torch

        self.args, self.torch = args, torch
        self.carom, self.llama = module(""), module("benchmarks.disk_llama")
        self.shape = self.llama.Shape(args.width, args.inner, args.heads, args.vocab)
        self.folder, self.device = Path(args.inside), torch.device(args.device)
        self.file = self.folder / "model.safetensors"
        torch.use_deterministic_algorithms(True, warn_only=True)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).init()
        # What the first operator brings with it (context, libraries) is the process's, not the session's.
        one = torch.ones(256, 256, device=self.device, dtype=torch.bfloat16)
        float((one @ one).sum())

    def left(self) -> float:
        return self.args.until - time.time()

    def wait(self) -> None:
        if self.device.type != "cpu":
            self.torch.get_device_module(self.device).synchronize()

    def tokens(self, seed: int):
        generator = self.torch.Generator().manual_seed(seed)
        return self.torch.randint(0, self.args.vocab, (1, self.args.tokens), generator=generator).to(
            self.device
        )

    def output(self, model):
        """The logits of one pass, on the device: host memory is being measured."""
        with self.torch.no_grad():
            return model(input_ids=self.tokens(0)).logits

    def meta(self, layers: int):
        return self.llama.build(self.shape, layers, "meta")

    def train(self, model, optimizer, steps: int, first: int = 0) -> dict:
        """Seconds of each step, the losses, and what the system says the process read from drives."""
        seconds, losses, read = [], [], []
        for step in range(first, first + steps):
            tokens = self.tokens(1 + step)
            self.wait()
            before, began = read_bytes(), time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.wait()
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss))
            read.append(read_bytes() - before)
        return {"seconds": seconds, "losses": losses, "read_bytes": read}


def say(name: str, found: dict) -> None:
    print(json.dumps({name: found}), flush=True)


def read_bytes() -> int:
    """What this process has had read from drives, as Linux counts it; 0 elsewhere."""
    try:
        lines = Path("/proc/self/io").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)


def make(part: Part) -> None:
    torch, llama, args = part.torch, part.llama, part.args
    torch.manual_seed(0)
    began = time.perf_counter()
    model = llama.build(part.shape, args.layers, part.device).requires_grad_(False).eval()
    part.wait()
    drawn = time.perf_counter()
    # No more than half of the time for the file: a slow drive gets a smaller model, never one smaller than LoRA's.
    least, ending = args.lora_layers, time.time() + part.left() / 2
    kept = 0

    def tensors():
        nonlocal kept
        for name, tensor in llama.in_order_of_use(model):
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            if layer >= least and layer >= kept and time.time() > ending:
                continue
            kept = max(kept, layer + 1)
            yield name, tensor

    nbytes = llama.write_packed(str(part.file), tensors())
    seconds = time.perf_counter() - drawn
    llama.cut(model, kept)
    found = {
        "layers": kept, "weights_bytes": sum(p.nbytes for p in model.parameters()), "file_bytes": nbytes,
        "draw_seconds": drawn - began, "write_seconds": seconds, "write_bytes_per_second": nbytes / seconds,
    }  # fmt: skip
    torch.save(part.output(model), part.folder / "output.pt")
    say("make", found)
    llama.cut(model, min(kept, args.lora_layers))
    model, trained = llama.add_adapters(model)
    start = [p.detach().clone() for p in trained]
    found = {}
    in_backward = functools.partial(part.carom.OptimizerInBackward, factory=adamw(torch))
    for name, optimizer in (("plain", adamw(torch)), ("in_backward", in_backward)):
        with torch.no_grad():
            for parameter, value in zip(trained, start, strict=True):
                parameter.copy_(value)
        made = optimizer(trained)
        found[name] = part.train(model, made, args.steps)
        torch.save([p.detach().cpu() for p in trained], part.folder / f"{name}.pt")
        if name == "plain":  # its first step also sets libraries up: two more are timed
            found["timed"] = part.train(model, made, 2, args.steps)
    say("resident", found)


def adamw(torch):
    return functools.partial(torch.optim.AdamW, lr=1e-4)


def first_output(part: Part) -> None:
    began = time.perf_counter()
    model = part.meta(part.args.layers).eval()
    built = time.perf_counter() - began
    expected = part.torch.load(part.folder / "output.pt", map_location=part.device)
    weights = sum(p.nbytes for p in model.parameters())
    tokens = part.tokens(0)
    say("process", {"rss_bytes": memory(os.getpid())})
    read = read_bytes()
    began = time.perf_counter()
    with part.carom.stream(
        model, device=part.device, vram=part.args.vram or weights // 8, ram=weights // 8, weights=part.file
    ) as session:
        ready = time.perf_counter() - began
        with part.torch.no_grad():
            logits = model(input_ids=tokens).logits
        part.wait()
        first = time.perf_counter() - began
        exact = part.torch.equal(logits, expected)
        del logits
        found = {
            "weights_bytes": weights, "bit_exact": exact, "build_seconds": built, "ready_seconds": ready,
            "first_output_seconds": first, "read_bytes": read_bytes() - read,
        }  # fmt: skip
        say("first_output", found)
        began = time.perf_counter()
        found["second_bit_exact"] = part.torch.equal(part.output(model), expected)
        say(
            "first_output",
            {**found, "second_output_seconds": time.perf_counter() - began, **figures(session)},
        )


def figures(session) -> dict:
    report = session.report().to_dict()
    wanted = (
        "ram_budget_bytes", "ram_peak_bytes", "vram_budget_bytes", "vram_peak_bytes", "resident_bytes", "slot_bytes",
        "disk_bytes_per_step", "wire_bytes_per_step", "disk_bytes_per_second", "link_bytes_per_second",
        "transfers_per_weight", "disk_wait_seconds", "step_seconds", "stall_seconds", "roofline_seconds",
        "compute_seconds", "link_seconds", "disk_seconds", "bound_by", "notes",
    )  # fmt: skip
    return {name: report[name] for name in wanted if name in report}


def lora(part: Part) -> None:
    torch, args = part.torch, part.args
    model = part.meta(args.lora_layers)
    began = time.perf_counter()
    with part.carom.stream(
        model, device=part.device, vram=args.lora_vram, ram=args.lora_ram, weights=part.file
    ) as session:
        found = {"ready_seconds": time.perf_counter() - began, "layers": args.lora_layers}
        adapted, trained = part.llama.add_adapters(model)
        optimizer = part.carom.OptimizerInBackward(trained, adamw(torch))
        found["compared"] = part.train(adapted, optimizer, args.steps)
        after = [p.detach().cpu() for p in trained]
        for name in ("plain", "in_backward"):
            expected = torch.load(part.folder / f"{name}.pt")
            found[f"adapters_bit_identical_to_{name}"] = all(map(torch.equal, after, expected))
        found["adapters"] = len(after)
        say("lora", found)
        for count in range(1, 4):  # as many as the time allows
            # What comes after it wants some as well.
            if count > 1 and part.left() < part.args.seconds / 8 + 2 * max(found["compared"]["seconds"]):
                break
            more = part.train(adapted, optimizer, 1, args.steps + count - 1)
            timed = found.setdefault("timed", {name: [] for name in more})
            for name, values in more.items():
                timed[name] += values
            say("lora", {**found, **figures(session)})


def rate(part: Part) -> None:
    args = part.args
    model = part.meta(args.rate_layers).eval()
    plain = part.llama.PlainReads(str(part.file))
    rounds: list[dict] = []
    with part.carom.stream(
        model, device=part.device, vram=args.rate_vram, ram=args.rate_ram, weights=part.file
    ) as session, part.torch.no_grad():  # fmt: skip
        tokens = part.tokens(0)

        def one_pass() -> float:
            began = time.perf_counter()
            model(input_ids=tokens)
            part.wait()
            return time.perf_counter() - began

        first = one_pass()
        while len(rounds) < 5 and (not rounds or part.left() > 3 * first + 3 * rounds[0]["raw_seconds"]):
            began = time.perf_counter()
            raw = plain.rate(args.threads, args.block, 2 * args.swept)
            raw_seconds = time.perf_counter() - began
            one_pass()  # its buffers were full when it began: not timed
            before, began = read_bytes(), time.perf_counter()
            one_pass()
            seconds = time.perf_counter() - began
            rounds.append(
                {"raw_bytes_per_second": raw, "raw_seconds": raw_seconds, "pass_seconds": seconds,
                 "read_bytes": read_bytes() - before}
            )  # fmt: skip
            found = figures(session)
            rates = [found["disk_bytes_per_step"] / r["pass_seconds"] for r in rounds]
            of_raw = [rate / r["raw_bytes_per_second"] for rate, r in zip(rates, rounds, strict=True)]
            say("rate", {
                "layers": args.rate_layers, "rounds": rounds, "bytes_per_second": statistics.median(rates),
                "of_raw_by_round": of_raw, "of_raw": statistics.median(of_raw), **found,
            })  # fmt: skip


PARTS = {"make": (make,), "first_output": (first_output,), "stream": (lora, rate)}


def run_part(args: argparse.Namespace) -> None:
    part = Part(args)
    for work in PARTS[args.part]:
        try:
            work(part)
        except Exception:  # noqa: BLE001 - the record says so, and other parts go on
            say(f"{work.__name__}_failed", {"traceback": traceback.format_exc()})


# -- around them


def memory(pid: int) -> dict[str, int]:
    """Resident bytes of a process: all of it, and on Linux what is neither a file's nor shared."""
    import psutil

    try:
        found = {"all": psutil.Process(pid).memory_info().rss}
        for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
            if line.startswith(("RssAnon:", "RssFile:", "RssShmem:")):
                found[line[3:].split(":")[0].lower()] = int(line.split()[1]) << 10
        return found
    except (psutil.Error, OSError):
        return {}


class Run:
    """The whole: parts one after the other, and the record."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.result: dict = {"seconds": {}}
        self.began = time.time()
        self.until = self.began + args.seconds - RESERVED
        self.best: dict | None = None
        record = module("benchmarks.record")
        self._write = record.write_record
        self.record = record.new_record("disk_gpu", sys.argv[1:])
        del self.record["cases"]

    def keep(self, interrupted: bool = True) -> None:
        if self.args.record is not None:
            self._write({**self.record, "interrupted": interrupted, "result": self.result}, self.args.record)

    def part(self, name: str, until: float) -> None:
        """Run a part; what it says is in the record at once."""
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
                for kind, nbytes in memory(process.pid).items():
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

    def raw(self) -> float | None:
        """The best way of plain reads once more, with the drive to itself."""
        if self.best is None:
            return None
        return self.plain.rate(self.best["threads"], self.best["block"], 2 * self.args.swept)

    def go(self) -> None:
        args, result = self.args, self.result
        self.part("make", self.began + 0.6 * args.seconds)
        if "layers" not in result["make"]:
            return
        args.layers = result["make"]["layers"]
        args.lora_layers, args.rate_layers = (
            min(n, args.layers) for n in (args.lora_layers, args.rate_layers)
        )
        self.plain = module("benchmarks.disk_llama").PlainReads(str(self.folder / "model.safetensors"))
        began = time.time()
        sweep = self.plain.sweep(args.swept)
        self.best = sweep[0]
        result["raw"] = {"sweep": sweep, "beside": [self.raw()]}
        result["seconds"]["raw"] = time.time() - began
        self.keep()
        for name in ("first_output", "stream"):
            if self.until - time.time() < 5:
                result[f"{name}_failed"] = {"left out": "the time was over"}
                continue
            before = result["raw"]["beside"][-1]
            self.part(name, self.until)
            if self.until - time.time() > 2 or name != "stream":
                result["raw"]["beside"].append(self.raw())
            rounds = [r["raw_bytes_per_second"] for r in result.get("rate", {}).get("rounds", ())]
            raw = max(before, result["raw"]["beside"][-1], *rounds)
            self.judge("lora" if name == "stream" else name, raw)
            self.keep()

    def judge(self, name: str, raw: float) -> None:
        """The figures that are wanted, from what was measured; ``raw``: the fastest of the plain reads before and after."""
        found = self.result.setdefault(name, {})
        found["raw_bytes_per_second"] = raw
        if name == "first_output" and "first_output_seconds" in found:
            found["first_output_of_raw"] = found["first_output_seconds"] * raw / found["weights_bytes"]
            held, before = found["peak_rss_bytes_from_outside"], self.result["process"]["rss_bytes"]
            ram = found["weights_bytes"] // 8
            # What the process was before it heard of a model is not the disk tier's; nor are pages of libraries' files.
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
             "rate_layers": 20, "tokens": 2048, "steps": 2, "swept": SWEPT}  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--vram", help="of the first output; default: an eighth of the weights, as its ram")
    for name, value in {
        "lora_vram": "3GiB",
        "lora_ram": "4GiB",
        "rate_vram": "2GiB",
        "rate_ram": "1GiB",
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=value)
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=4, help=argparse.SUPPRESS)
    parser.add_argument("--block", type=int, default=8 << 20, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args)
        return
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
