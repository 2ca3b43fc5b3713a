"""The part `packed` of `disk_gpu.py`: a model's file, raw and packed by `carom pack`, each streamed from the drive.

This part makes the model, the file and the packed file, so it can run alone. Both runs have the same budgets. Each
comes after one plain read of its whole file, because a host may cache a virtual drive, and then caches both files.
"""

# mypy: ignore-errors
from __future__ import annotations

import gc
import statistics
import sys
import time

import torch

from ...core.checkpoint.index import open_index
from ...core.checkpoint.packed_source import codec_name
from ...core.codec.unit_decoder import sizes
from ...core.common.sizes import parse_size
from ...tools.pack.writer import pack
from . import disk_llama

carom = sys.modules[__name__.split(".")[0]]
RUNS = {"raw": "raw.safetensors", "packed": "packed.safetensors"}
COMPARED = (
    "first_output_seconds",
    "pass_seconds",
    "disk_bytes_per_step",
    "wire_bytes_per_step",
    "file_bytes",
)


def packed(part, say, figures) -> None:
    """Draw a model, write it, pack it, and stream both files; ``figures``: returns a session's figures."""
    args, folder = part.args, part.folder
    expected, found = _draw(part, folder / RUNS["raw"])
    say("packed", found)
    found |= _pack(folder)
    say("packed", found)
    ram = parse_size(args.packed_ram) if args.packed_ram else found["weights_bytes"] // 8
    vram = parse_size(args.packed_vram) if args.packed_vram else found["weights_bytes"] // 4
    disk_llama.grow(2 * ram)
    for name, file in RUNS.items():
        say("packed", {f"warm_{name}_seconds": _warm(part, folder / file, vram // 2, ram)})
    runs: dict[str, dict] = {}
    for name, file in RUNS.items():
        path = folder / file
        plain = disk_llama.PlainReads(str(path)).rate(args.threads, args.block, path.stat().st_size)
        runs[name] = {"file_bytes": path.stat().st_size, "plain_bytes_per_second": plain}
        # The remaining time is also needed for the other file, which gets as many passes.
        until = time.time() + part.left() / (2 if name == "raw" else 1)
        runs[name] |= _stream(part, path, expected, vram, ram, until, figures)
        runs[name]["of_plain"] = runs[name]["disk_bytes_per_step"] / runs[name]["pass_seconds"] / plain
        say("packed", {name: runs[name]})
    shares = {key: runs["packed"][key] / runs["raw"][key] for key in COMPARED if runs["raw"].get(key)}
    say("packed", {"of_raw": shares, "bit_exact": all(run["bit_exact"] for run in runs.values())})


def _draw(part, path) -> tuple[torch.Tensor, dict]:
    """Write a model to a file and return its output, computed with all weights on the device, and figures."""
    torch.manual_seed(0)
    model = disk_llama.build(part.shape, part.args.packed_layers, part.device).requires_grad_(False).eval()
    part.wait()
    began = time.perf_counter()
    nbytes = disk_llama.write_packed(str(path), disk_llama.in_order_of_use(model))
    seconds = time.perf_counter() - began
    expected = part.output(model)
    weights = sum(p.nbytes for p in model.parameters())
    del model
    gc.collect()
    if part.device.type == "cuda":
        torch.cuda.empty_cache()
    return expected, {
        "layers": part.args.packed_layers, "weights_bytes": weights, "write_seconds": seconds,
        "write_bytes_per_second": nbytes / seconds,
    }  # fmt: skip


def _pack(folder) -> dict:
    """Pack the file like `carom pack`, and return the figures of its report."""
    began = time.perf_counter()
    source, destination = (str(folder / file) for file in RUNS.values())
    told = pack(source, destination, codec="lossless").to_dict()
    kept = {key: told[key] for key in ("raw_bytes", "tensor_bytes", "codecs", "notes") if key in told}
    return {"pack": {"seconds": time.perf_counter() - began, **kept}}


def _warm(part, path, vram: int, ram: int) -> float:
    """Stream a model of one block and return the seconds.

    This work (start of libraries, compilation) is done by a process's first session, and is not the drive's.
    """
    began, model = time.perf_counter(), part.meta(1).eval()
    with carom.stream(model, device=part.streams_to, vram=vram, ram=ram, weights=path):
        part.output(model)
        part.wait()
    return time.perf_counter() - began


def _stream(part, path, expected, vram: int, ram: int, until: float, figures) -> dict:
    """Measure the first output and at most three timed passes after it, as far as time allows; return the figures."""
    model = part.meta(part.args.packed_layers).eval()
    tokens = part.tokens(0)
    began = time.perf_counter()
    with carom.stream(model, device=part.streams_to, vram=vram, ram=ram, weights=path) as session:
        found = {"ready_seconds": time.perf_counter() - began}
        found["decoded_bytes"] = decoded(session)
        began = time.perf_counter() - found["ready_seconds"]
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        part.wait()
        found["first_output_seconds"] = time.perf_counter() - began
        found["bit_exact"] = torch.equal(logits, expected)
        del logits
        passes: list[float] = []
        while len(passes) < 4 and (len(passes) < 2 or time.time() + 2 * passes[-1] < until):
            began = time.perf_counter()
            logits = part.output(model)
            part.wait()
            passes.append(time.perf_counter() - began)
            found["bit_exact"] &= torch.equal(logits, expected)
            del logits
        # The first pass is not timed: residents were still loading, and read-ahead was not steady.
        found |= {"passes_seconds": passes, "pass_seconds": statistics.median(passes[1:]), **figures(session)}
    return found


def decoded(session) -> dict[str, int]:
    """Return the bytes of weights that the device unpacks and that the host unpacks, for a session that has read
    nothing yet.
    """
    manager = sys.modules["carom.core.session.assembly"].parts(session).manager
    tier, index = manager.layout.placement.tier, open_index(manager.module.checkpoint.settings.path)
    crossing = [*(backing.wire for backing in tier.backings), *tier.residents.pending]
    there = sum(sizes(blob.format.entry)[1] for one in crossing for blob in one.blobs)
    whole = sum(entry.nbytes for entry in index.entries.values() if codec_name(entry) != "raw")
    return {"device": there, "host": whole - there}
