"""The part `nf4` of `disk_gpu.py`: LoRA over a file as `carom pack --quant nf4` writes it, in the shape of Llama 70B.

The codes are random and go straight to the file: no weight is ever held in bf16 or quantised. Every quantised tensor
is one that `carom pack` would quantise, with random scales that give weights the spread of transformers' random ones.

- `make`: writes the file.
- `compared`: a model of the file's first blocks, streamed, beside the resident model of the same weights, which the
  host decodes: losses and adapters after the same steps, bit for bit. The budgets are shares of the weights' bytes.
- `lora`: training steps of the whole model with torch's default kernels, beside the roofline of the session's report.
"""

# mypy: ignore-errors
from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import shutil
import statistics
import sys
import time

import torch

from ...core.checkpoint.index import open_index
from ...core.checkpoint.packed_source import stored_entry
from ...core.codec.blob_metadata import describe
from ...core.codec.kbit import CODEBOOKS, DEFAULT_BLOCK, Layout
from ...core.codec.registry import get
from ...core.common.sizes import format_size, parse_size
from ...tools.pack.quant_scheme import parse_scheme
from ..hosts.card import Card
from . import disk_llama

carom = sys.modules[__name__.split(".")[0]]
FILE = "nf4.safetensors"
SCHEME = "nf4"
# Budgets of `compared`, as shares of the bytes of the model's bf16 weights, so that units cross the link, as in
# tests/placement/test_disk_packed_residents.py.
VRAM_SHARE, RAM_SHARE = 0.6, 0.33
WARM_STEPS = 2  # the order of units is learnt, and residents are loaded
TIMED_STEPS = 8  # at most
LOST_STEPS = 2  # training steps that may run out of memory before the first that succeeds
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def shape(args) -> disk_llama.Shape:
    """Return the sizes that the options ``--nf4-...`` give."""
    return disk_llama.Shape(args.nf4_width, args.nf4_inner, args.nf4_heads, args.nf4_vocab, args.nf4_kv_heads)


# -- the file


def make(part, say) -> None:
    """Write the file. A slow drive gets fewer blocks than asked, so that half of the time is left."""
    args, path = part.args, part.folder / FILE
    model = part.meta(args.nf4_layers)
    names = disk_llama.in_order_of_use(model)
    wanted = sum(sum(_nbytes(name, tensor)) for name, tensor in names)
    free = shutil.disk_usage(part.folder).free
    if free < wanted:
        raise OSError(
            f"the file takes {format_size(wanted)}, {part.folder} has {format_size(free)} free; set a smaller "
            "--nf4-layers, or name another --folder"
        )
    kept, totals, ending = 0, [0, 0], time.time() + part.left() / 2

    def stored():
        nonlocal kept
        torch.manual_seed(0)
        for name, tensor in names:
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            if layer >= max(args.nf4_compared_layers, kept) and time.time() > ending:
                continue
            kept = max(kept, layer + 1)
            for at, nbytes in enumerate(_nbytes(name, tensor)):
                totals[at] += nbytes
            yield _draw(name, tensor, model.config.initializer_range, part.device)

    began = time.perf_counter()
    nbytes = disk_llama.write_stored(str(path), stored(), SCHEME)
    seconds = time.perf_counter() - began
    disk_llama.cut(model, kept)
    say("nf4", {
        "layers": kept, "layers_wanted": args.nf4_layers, "file_bytes": nbytes, "quantised_bytes": totals[0],
        "unquantised_bytes": totals[1], "weights_bytes": sum(p.nbytes for p in model.parameters()),
        "write_seconds": seconds, "write_bytes_per_second": nbytes / seconds,
    })  # fmt: skip


def _layout(name: str, tensor: torch.Tensor) -> Layout | None:
    """Return the layout of the tensor in the file, None if `carom pack` would not quantise it."""
    chosen = parse_scheme(SCHEME).codebook(name, "BF16", tuple(tensor.shape))
    return None if chosen is None else Layout(CODEBOOKS[chosen], tensor.numel(), DEFAULT_BLOCK)


def _nbytes(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Return (quantised bytes, unquantised bytes) of the tensor in the file; one of them is 0."""
    layout = _layout(name, tensor)
    return (0, tensor.nbytes) if layout is None else (layout.total, 0)


def _draw(name: str, tensor: torch.Tensor, std: float, device: torch.device) -> disk_llama.Stored:
    """Return random contents of the tensor ``tensor`` (on meta), drawn on ``device``; ``std``: of its values."""
    layout = _layout(name, tensor)
    if layout is None:
        one_dimensional = tensor.dim() == 1  # the factors of a norm
        value = torch.ones(tensor.shape, dtype=torch.bfloat16, device=device)
        value = value if one_dimensional else value.normal_(std=std)
        return disk_llama.Stored(name, "BF16", tuple(tensor.shape), value.view(-1).view(torch.uint8))
    blob = torch.randint(256, (layout.total,), dtype=torch.uint8, device=device)
    blob[layout.groups * layout.codebook.bits : layout.scales_at] = 0
    # All codes are equally common, so this is the spread of the codebook's values.
    spread = math.sqrt(statistics.fmean(value**2 for value in layout.codebook.values))
    scales = blob[layout.scales_at :].view(torch.float32)
    scales.uniform_(0.5 * std / spread, 1.5 * std / spread)
    codec = get(layout.codebook.name)
    told = functools.partial(
        describe, codec.name, codec.version, tensor, block=layout.block, lossy=codec.lossy
    )
    return disk_llama.Stored(name, "U8", (layout.total,), blob, told)


# -- LoRA


def compared(part, say, figures) -> None:
    """Train the first blocks streamed, and resident with the weights that the host decodes; compare every bit."""
    args = part.args
    part.exactly()
    count = args.nf4_compared_layers
    model = part.meta(count)
    nbytes = sum(p.nbytes for p in model.parameters())
    resident = disk_llama.build(part.shape, count, part.device).requires_grad_(False)
    budgets = {"vram": int(VRAM_SHARE * nbytes), "ram": int(RAM_SHARE * nbytes)}
    with carom.stream(model, device=part.streams_to, weights=part.folder / FILE, **budgets) as session:
        with torch.no_grad():
            for name, parameter in resident.named_parameters():
                parameter.copy_(session.read(name))
        resident, expected = disk_llama.add_adapters(resident)
        plain = part.train(resident, ADAMW(expected), args.steps)
        adapted, trained = disk_llama.add_adapters(model)
        found = part.train(adapted, carom.OptimizerInBackward(trained, ADAMW), args.steps)
        same = all(
            torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in zip(trained, expected, strict=True)
        )
        say("nf4", {"compared": {
            "layers": count, "kernels": part.kernels, "adapters": len(trained), "adapters_bit_identical": same,
            "losses": found["losses"], "losses_identical": found["losses"] == plain["losses"],
            **wire_beside_file(session), **figures(session),
        }})  # fmt: skip


def lora(part, say, figures) -> None:
    """Train the whole model and time steps, as many as the time allows."""
    from .disk_parts import memory

    args = part.args
    torch.use_deterministic_algorithms(
        False
    )  # only times are measured here, of the kernels that torch chooses
    gc.collect()
    accelerator = torch.get_device_module(part.device) if part.device.type == "cuda" else None
    if accelerator is not None:
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
    model = part.meta(args.nf4_layers)
    say("nf4", {"process_rss_bytes": memory(os.getpid())})
    began = time.perf_counter()
    with (
        Card(parse_size(args.nf4_card)) if args.nf4_card else contextlib.nullcontext() as card,
        carom.stream(
            model, device=part.streams_to, vram=args.nf4_vram, ram=args.nf4_ram, weights=part.folder / FILE
        ) as session,
    ):
        found = {"ready_seconds": time.perf_counter() - began}
        adapted, trained = disk_llama.add_adapters(model)
        found["adapters"] = len(trained)
        optimizer = carom.OptimizerInBackward(trained, ADAMW)
        found["warm"], found["lost_steps"] = warm_up(part, adapted, optimizer, accelerator)
        say("nf4", found)
        timed = found["timed"] = {"seconds": [], "losses": [], "read_bytes": []}
        for step in range(TIMED_STEPS):
            if step and part.left() < part.args.seconds / 20 + 2 * max(timed["seconds"]):
                break
            for name, values in part.train(adapted, optimizer, 1, WARM_STEPS + step).items():
                timed[name] += values
            found |= {**wire_beside_file(session), **figures(session)}
            found["median_step_seconds"] = statistics.median(timed["seconds"])
            if found.get("roofline_seconds"):
                found["of_roofline"] = found["median_step_seconds"] / found["roofline_seconds"]
            if accelerator is not None:
                found["device_peak_bytes"] = accelerator.max_memory_reserved()
                found["device_allocated_peak_bytes"] = accelerator.max_memory_allocated()
            if card is not None:
                found["card"] = {"bytes": parse_size(args.nf4_card), **card.figures()}
            say("nf4", found)


def warm_up(part, adapted, optimizer, accelerator) -> tuple[dict, int]:
    """Train the first steps. Return their figures, and how often the device's memory ran out before they succeeded.

    With ``vram="auto"`` a training step that runs out of memory is lost, and the session holds less from the next step
    on. Programs like ai-toolkit repeat such a step, at most a few times, and so does this.
    """
    for lost in range(LOST_STEPS + 1):
        try:
            return part.train(adapted, optimizer, WARM_STEPS), lost
        except torch.OutOfMemoryError:
            if lost == LOST_STEPS:
                raise
        for parameter in adapted.parameters():
            parameter.grad = None
        gc.collect()
        accelerator.empty_cache()
    raise AssertionError


def wire_beside_file(session) -> dict:
    """Return the bytes that the file has for units that cross the link, and the wire bytes of a step beside them.

    ``wire_of_file_bytes``: the wire bytes of a step over the file's bytes times the mean number of transfers. The mean
    counts every unit alike, so the ratio is near 1, not exactly 1, where units of different sizes cross differently
    often.
    """
    from .disk_parts import manager_of

    manager, report = manager_of(session), session.report()
    index = open_index(manager.module.checkpoint.settings.path)
    crossing = [unit for unit in manager.layout.placement.streamed if not unit.on_device]
    nbytes = sum(
        stored_entry(index[home.file_tensor.name]).nbytes for unit in crossing for home in unit.homes
    )
    found = {"file_bytes_of_crossing_units": nbytes, "crossing_units": len(crossing)}
    if nbytes and report.transfers_per_weight:
        found["wire_of_file_bytes"] = report.wire_bytes_per_step / (report.transfers_per_weight * nbytes)
    return found
