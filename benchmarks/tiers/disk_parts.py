"""The parts of `disk_gpu.py`, each in its own process. Each measurement is printed at once as a line of JSON."""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

from ...core.checkpoint.index import open_index
from . import disk_llama, disk_nf4, disk_packed

carom = sys.modules[__name__.split(".")[0]]


class Part:
    """The process of one part: its settings, and functions that all parts use."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic cuBLAS
        self.args = args
        self.shape = (
            disk_nf4.shape(args)
            if args.part.startswith("nf4")
            else disk_llama.Shape(args.width, args.inner, args.heads, args.vocab)
        )
        simulated = args.device == "simulated"
        self.folder, self.device = Path(args.inside), torch.device("cpu" if simulated else args.device)
        # What `carom.stream` gets as its device.
        self.streams_to = carom.SimulatedDevice(seed=0) if simulated else self.device
        self.file = self.folder / "model.safetensors"
        self.kernels = "the default ones"
        torch.use_deterministic_algorithms(True)
        # Memory of the first forward (context, libraries, kernels) belongs to the process, not to the session.
        with torch.no_grad():
            disk_llama.build(self.shape, 1, self.device)(input_ids=self.tokens(0))
        self.wait()

    def exactly(self) -> None:
        """Choose kernels whose gradients are the same each time.

        A backward is tried. If a kernel is not deterministic, attention is computed by matrix products instead.
        """
        model = disk_llama.build(self.shape, 1, self.device).requires_grad_(False)
        tokens = self.tokens(0)
        ahead = torch.zeros(*tokens.shape, self.shape.width, dtype=torch.bfloat16, device=self.device)
        try:
            model(inputs_embeds=ahead.requires_grad_(), labels=tokens).loss.backward()
        except RuntimeError as error:
            self.kernels = f"attention by matrix products, because {str(error)[:200]}"
            for kind in ("flash", "mem_efficient", "cudnn"):
                getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
            torch.use_deterministic_algorithms(True, warn_only=True)

    def left(self) -> float:
        return self.args.until - time.time()

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def tokens(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.shape.vocab, (1, self.args.tokens), generator=generator).to(self.device)

    def output(self, model):
        """Return the logits of one pass, on the device, because host memory is being measured."""
        with torch.no_grad():
            return model(input_ids=self.tokens(0)).logits

    def meta(self, layers: int):
        return disk_llama.build(self.shape, layers, "meta")

    def train(self, model, optimizer, steps: int, first: int = 0) -> dict:
        """Return the seconds of each step, the losses, and the bytes that the process read from drives, as the system
        counts them.
        """
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


def manager_of(session):
    """Return the session's layout manager."""
    return sys.modules["carom.core.session.assembly"].parts(session).manager


def say(name: str, found: dict) -> None:
    print(json.dumps({name: found}), flush=True)


def read_bytes() -> int:
    """Return the bytes that this process read from drives, as Linux counts them; 0 elsewhere."""
    try:
        lines = Path("/proc/self/io").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)


def make(part: Part) -> None:
    args = part.args
    torch.manual_seed(0)
    began = time.perf_counter()
    model = disk_llama.build(part.shape, args.layers, part.device).requires_grad_(False).eval()
    part.wait()
    drawn = time.perf_counter()
    # Write for at most half of the time: a slow drive gets a smaller model, but at least the LoRA part's layers.
    least, ending = args.lora_layers, time.time() + part.left() / 2
    kept = 0

    def tensors():
        nonlocal kept
        for name, tensor in disk_llama.in_order_of_use(model):
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            if layer >= least and layer >= kept and time.time() > ending:
                continue
            kept = max(kept, layer + 1)
            yield name, tensor

    nbytes = disk_llama.write_packed(str(part.file), tensors())
    seconds = time.perf_counter() - drawn
    disk_llama.cut(model, kept)
    found = {
        "layers": kept, "weights_bytes": sum(p.nbytes for p in model.parameters()), "file_bytes": nbytes,
        "draw_seconds": drawn - began, "write_seconds": seconds, "write_bytes_per_second": nbytes / seconds,
    }  # fmt: skip
    torch.save(part.output(model), part.folder / "output.pt")
    say("make", found)
    part.exactly()
    disk_llama.cut(model, min(kept, args.lora_layers))
    model, trained = disk_llama.add_adapters(model)
    start = [p.detach().clone() for p in trained]
    found = {"kernels": part.kernels}
    in_backward = functools.partial(carom.OptimizerInBackward, factory=ADAMW)
    for name, optimizer in (("plain", ADAMW), ("in_backward", in_backward)):
        with torch.no_grad():
            for parameter, value in zip(trained, start, strict=True):
                parameter.copy_(value)
        made = optimizer(trained)
        found[name] = part.train(model, made, args.steps)
        torch.save([p.detach().cpu() for p in trained], part.folder / f"{name}.pt")
        if name == "plain":  # the first step also initialises libraries, so two more are timed
            found["timed"] = part.train(model, made, 2, args.steps)
    say("resident", found)


def first_output(part: Part) -> None:
    began = time.perf_counter()
    model = part.meta(part.args.layers).eval()
    built = time.perf_counter() - began
    expected = torch.load(part.folder / "output.pt", map_location=part.device)
    weights = sum(p.nbytes for p in model.parameters())
    tokens = part.tokens(0)
    say("process", {"rss_bytes": memory(os.getpid())})
    read = read_bytes()
    began = time.perf_counter()
    with carom.stream(
        model,
        device=part.streams_to,
        vram=part.args.vram or weights // 8,
        ram=weights // 8,
        weights=part.file,
    ) as session:
        ready = time.perf_counter() - began
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        part.wait()
        first = time.perf_counter() - began
        exact = torch.equal(logits, expected)
        del logits
        found = {
            "weights_bytes": weights, "bit_exact": exact, "build_seconds": built, "ready_seconds": ready,
            "first_output_seconds": first, "read_bytes": read_bytes() - read,
        }  # fmt: skip
        say("first_output", found)
        began = time.perf_counter()
        found["second_bit_exact"] = torch.equal(part.output(model), expected)
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
        "compute_seconds", "link_seconds", "disk_seconds", "bound_by", "notes", "raw_bytes_per_step", "packed_units",
        "staging_bytes", "streamed_bytes", "waiting_bytes", "decode_seconds", "units", "pinned_peak_bytes", "adapter_bytes",
        "resident_packed_bytes", "resident_packed_raw_bytes", "resident_packed_units",
    )  # fmt: skip
    tuner = manager_of(session).module.checkpoint.path_tuner
    ways = {"aside": tuner.bounce_bytes, "rates": tuner.rates}
    return {**{name: report[name] for name in wanted if name in report}, "reads": ways}


def last_byte(file: Path, layers: int) -> int:
    """Return the offset at which the first ``layers`` blocks end in the file."""
    blocks = {n: e for n, e in open_index(file).entries.items() if n.startswith("model.layers.")}
    return max(e.offset + e.nbytes for n, e in blocks.items() if int(n.split(".")[2]) < layers)


def lora(part: Part) -> None:
    args = part.args
    part.exactly()
    model = part.meta(args.lora_layers)
    began = time.perf_counter()
    with carom.stream(
        model, device=part.streams_to, vram=args.lora_vram, ram=args.lora_ram, weights=part.file
    ) as session:
        found = {"ready_seconds": time.perf_counter() - began, "layers": args.lora_layers}
        adapted, trained = disk_llama.add_adapters(model)
        optimizer = carom.OptimizerInBackward(trained, ADAMW)
        found["compared"] = part.train(adapted, optimizer, args.steps)
        after = [p.detach().cpu() for p in trained]
        for name in ("plain", "in_backward"):
            expected = torch.load(part.folder / f"{name}.pt")
            found[f"adapters_bit_identical_to_{name}"] = all(map(torch.equal, after, expected))
        found["adapters"] = len(after)
        say("lora", found)
        for count in range(1, 4):  # as many as the time allows
            # The later measurements need time too.
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
    plain = disk_llama.PlainReads(str(part.file))
    end = last_byte(part.file, args.rate_layers)
    rounds: list[dict] = []
    with carom.stream(
        model, device=part.streams_to, vram=args.rate_vram, ram=args.rate_ram, weights=part.file
    ) as session, torch.no_grad():  # fmt: skip
        tokens = part.tokens(0)

        def one_pass() -> tuple[float, int, float]:
            """Return the seconds, the bytes as the system counts them, and the share of the time in which a worker
            was reading.
            """
            reader = manager_of(session).layout.placement.tier.reads.cache._reader
            before, busy, began = read_bytes(), reader.stats().busy_seconds, time.perf_counter()
            model(input_ids=tokens)
            part.wait()
            seconds = time.perf_counter() - began
            busy = (reader.stats().busy_seconds - busy) / seconds / reader.policy.workers
            return seconds, read_bytes() - before, busy

        model(input_ids=tokens)  # also loads residents
        first, read, _ = one_pass()
        while len(rounds) < 5 and (not rounds or part.left() > 3 * first + 2 * rounds[0]["raw_seconds"]):
            began = time.perf_counter()
            raw = plain.rate(args.threads, args.block, read, end)
            raw_seconds = time.perf_counter() - began
            one_pass()  # not timed, because its buffers were full at the start
            seconds, read, busy = one_pass()
            rounds.append(
                {"raw_bytes_per_second": raw, "raw_seconds": raw_seconds, "pass_seconds": seconds,
                 "read_bytes": read, "workers_busy": busy}
            )  # fmt: skip
            found = figures(session)
            rates = [found["disk_bytes_per_step"] / r["pass_seconds"] for r in rounds]
            of_raw = [rate / r["raw_bytes_per_second"] for rate, r in zip(rates, rounds, strict=True)]
            say("rate", {
                "layers": args.rate_layers, "rounds": rounds, "bytes_per_second": statistics.median(rates),
                "of_raw_by_round": of_raw, "of_raw": statistics.median(of_raw), **found,
            })  # fmt: skip


def packed(part: Part) -> None:
    disk_packed.packed(part, say, figures)


def nf4_make(part: Part) -> None:
    disk_nf4.make(part, say)


def nf4_compared(part: Part) -> None:
    disk_nf4.compared(part, say, figures)


def nf4(part: Part) -> None:
    disk_nf4.lora(part, say, figures)


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
PARTS = {
    "make": (make,), "first_output": (first_output,), "stream": (lora, rate), "packed": (packed,),
    "nf4_make": (nf4_make,), "nf4_compared": (nf4_compared,), "nf4": (nf4,),
}  # fmt: skip


def run_part(args: argparse.Namespace) -> None:
    part = Part(args)
    for work in PARTS[args.part]:
        try:
            work(part)
        except Exception:  # noqa: BLE001 - the record has the error, and other parts continue
            say(f"{work.__name__}_failed", {"traceback": traceback.format_exc()})


def memory(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process: all, and on Linux also those neither of a file nor shared."""
    import psutil

    try:
        found = {"all": psutil.Process(pid).memory_info().rss}
        for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
            if line.startswith(("RssAnon:", "RssFile:", "RssShmem:")):
                found[line[3:].split(":")[0].lower()] = int(line.split()[1]) << 10
        return found
    except (psutil.Error, OSError):
        return {}
