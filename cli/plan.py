"""`carom plan MODEL`: what a model would do on a card, before one owns either."""

from __future__ import annotations

import argparse
import json
import math
import os
import textwrap
from dataclasses import replace

from ..core import hardware, host, paper, presets, shape_files, shapes
from ..core.errors import UnsupportedError
from ..core.paper import Job, Machine, PaperPlan
from ..core.presets import GB, Card
from ..core.sizes import format_size, parse_size

# Without a GPU and without --gpu, plans are for the card the published measurements were made on; the output says so.
REFERENCE = "rtx4090"
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f".safetensors file, sharded folder, index.json, config.json, or one of: {', '.join(shapes.SHAPES)}",
    )
    parser.add_argument(
        "--mode",
        choices=("infer", "train"),
        default="infer",
        help="train: LoRA on frozen weights, checkpointed",
    )
    parser.add_argument(
        "--quant",
        help=f"weights as: {', '.join(presets.QUANT_BITS)}; DENSE+EXPERTS for an MoE, as nf4+nf2 (default: as stored, or bf16)",
    )
    parser.add_argument(
        "--gpu", help=f"probe (measure this machine, the default) or one of: {', '.join(presets.CARDS)}"
    )
    parser.add_argument(
        "--vram", help="bound on the weights on the card, as 12GiB (default: all that is left of it)"
    )
    parser.add_argument(
        "--ram", help="RAM of the machine, as 32GiB (default: of this machine with probe, else enough)"
    )
    parser.add_argument(
        "--nvme",
        help=f"drive to stream from: {', '.join(presets.DRIVES)}, a rate as 7GB (a second), or probe",
    )
    parser.add_argument(
        "--gds", action="store_true", help="the drive reads to the card directly (GPUDirect Storage)"
    )
    parser.add_argument("--link", help="host to card, as 22GB (a second)")
    parser.add_argument(
        "--tokens", type=int, help="tokens of a step, batch x sequence (default: one image, clip or sequence)"
    )
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank when training (default 16)")
    parser.add_argument(
        "--codec",
        choices=("raw", "lossless"),
        default="raw",
        help="lossless: 16-bit weights packed to 70 %% on the way",
    )
    parser.add_argument(
        "--compute", choices=("bf16", "nvfp4"), default="bf16", help="what the card computes in"
    )
    parser.add_argument("--plot", metavar="PNG", help="draw overhead over tokens, one line per configuration")


def run(args: argparse.Namespace) -> int:
    if args.plot and not args.plot.lower().endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"--plot {args.plot!r}: give a file name that ends in .png, .svg or .pdf")
    shape = (
        shape_files.read_shape(args.model)
        if shape_files.is_path(args.model)
        else shapes.find_shape(args.model)
    )
    machine, remarks = machine_of(args)
    job = Job(
        args.mode, args.tokens, _quant(args.quant, shape),
        parse_size(args.vram, whole=machine.card.vram, setting="--vram") if args.vram else None,
        args.rank, args.codec, args.compute,
    )  # fmt: skip
    plan = paper.plan(shape, machine, job)
    if args.plot:
        from .plan_plot import draw

        draw(plan, args.plot)
    if args.json:
        print(
            json.dumps(
                {**paper.to_dict(plan), "remarks": remarks, "plot": args.plot}, indent=2, allow_nan=False
            )
        )
    else:
        print(text(plan, remarks))
        if args.plot:
            print(f"\nDrawn: {args.plot}")
    return 0


def _quant(asked: str | None, shape: shapes.Shape) -> presets.Quant | None:
    if asked is not None:
        return presets.find_quant(asked)
    stored = any(group.stored_bytes is not None for group in shape.groups)
    return None if stored else presets.find_quant("bf16")


def _rate(value: str | None, setting: str) -> float | None:
    if value is None:
        return None
    rate = float(parse_size(value.lower().removesuffix("/s"), setting=setting))
    if rate < 1e6:
        raise ValueError(f"{setting}={value!r} is less than 1 MB/s; write a rate such as 7GB")
    return rate


def machine_of(args: argparse.Namespace) -> tuple[Machine, list[str]]:
    """The machine to plan for, and what the reader must know about where its figures come from."""
    remarks: list[str] = []
    probed = None
    if args.gpu is None or args.gpu.lower() == "probe":
        probed = hardware.probe(_folder(args.model), disk=args.nvme in (None, "probe"), extras=False)
    if probed is not None and probed.gpu is None and args.gpu is not None:
        raise UnsupportedError(
            f"no GPU to probe here ({probed.gpu_reason}); name a card: --gpu {', '.join(presets.CARDS)}"
        )
    if probed is not None and probed.gpu is not None:
        machine = measured_machine(probed)
        remarks.append(f"Measured on this machine: {machine.card.title}.")
    else:
        card = presets.find("gpu", args.gpu or REFERENCE, presets.CARDS)
        machine = Machine(card)
        if args.gpu is None:
            remarks.append(f"No GPU found here, so this is for a {card.title}; name yours with --gpu.")
    if args.ram:
        ram = parse_size(args.ram, whole=host.host_memory().total, setting="--ram")
        machine = replace(machine, ram=ram, ram_usable=None)
    if args.link:
        machine = replace(
            machine, card=replace(machine.card, link=_rate(args.link, "--link"), good_link=None)
        )
    if args.nvme and args.nvme != "probe":
        machine = _with_drive(machine, args.nvme)
    elif args.nvme == "probe" and machine.disk is None:
        rate, reason = host.bounded(lambda: host.disk_rate(_folder(args.model)), 15.0, "the disk probe")
        if rate is None:
            raise UnsupportedError(f"the drive could not be measured ({reason}); name one: --nvme gen4")
        machine = replace(
            machine, disk=max(rate.one, rate.several), disk_title=f"the drive of {rate.folder} (measured)"
        )
    if args.gds and machine.disk is None:
        raise ValueError("--gds needs a drive: name one with --nvme")
    if args.gds and not machine.card.workstation and not machine.source:
        remarks.append(
            f"GPUDirect Storage is for workstation and data centre cards; a {machine.card.title} may not have it."
        )
    if machine.ram is None and machine.disk is not None:
        remarks.append("No --ram given: every streamed byte is read from the drive each time.")
    return replace(machine, gds=args.gds), remarks


def _folder(model: str) -> str:
    """Where the drive is measured: beside the model if it is on disk, else here."""
    if os.path.isdir(model):
        return model
    return os.path.dirname(os.path.abspath(model)) if os.path.isfile(model) else "."


def _with_drive(machine: Machine, asked: str) -> Machine:
    if asked[:1].isdigit() and asked.lower() not in presets.DRIVES:
        rate = _rate(asked, "--nvme")
        return replace(machine, disk=rate, disk_title=f"a drive of {rate / GB:g} GB/s")
    return paper.with_drive(machine, presets.find("nvme", asked, presets.DRIVES))


def measured_machine(probed: hardware.Hardware) -> Machine:
    """A `Machine` from probed figures; what could not be measured comes from the preset of the same name, if any."""
    gpu = probed.gpu
    assert gpu is not None
    try:
        preset = presets.find("gpu", gpu.name, presets.CARDS)
    except ValueError:
        preset = None
    link, flops, memory = gpu.link_rate(), gpu.flops, gpu.memory_rate
    if preset is not None:
        link, flops, memory = link or preset.link, flops or preset.bf16, memory or preset.memory
    if not (link and flops and memory):
        raise UnsupportedError(
            f"{gpu.name} could not be measured ({'; '.join(gpu.failures.values())}); name a card with --gpu"
        )
    # The probe's own context is in use already, and the plan counts one again.
    card = Card(
        gpu.name, gpu.name, gpu.free + presets.CONTEXT_BYTES, flops, link, memory, "measured on this machine",
        nvfp4=preset.nvfp4 if preset else None, workstation=True,
    )  # fmt: skip
    disk = probed.disk
    rate = max(disk.one, disk.several) if disk is not None and disk.direct else None
    return Machine(
        card, probed.memory.total, rate, f"the drive of {disk.folder} (measured)" if rate and disk else "",
        ram_usable=probed.memory.usable, source="measured on this machine",
    )  # fmt: skip


def size(count: float) -> str:
    """Bytes in decimal GB, as cards and checkpoints are sold."""
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.0f} MB"


def seconds(value: float) -> str:
    return (
        f"{value * 1e3:.0f} ms"
        if value < 0.9995
        else f"{value:.1f} s"
        if value < 60
        else f"{value / 60:.1f} min"
    )


def _tokens(value: float) -> str:
    return "no number of" if value == float("inf") else f"{math.ceil(value):,}"


def text(plan: PaperPlan, remarks: list[str]) -> str:
    """The plan in words a newcomer understands, then the figures."""
    blocks = [_headline(plan), *remarks, _where(plan), _speed(plan), _free_from(plan), _vram(plan)]
    blocks += [_batch(plan), _what_if(plan), _sources(plan)]
    return "\n\n".join(_wrap(block) for block in blocks if block)


def _wrap(block: str) -> str:
    """Prose is wrapped; lines that start with blanks are a table and stay."""
    return "\n".join(
        line if line.startswith("  ") else textwrap.fill(line, WIDTH) for line in block.split("\n")
    )


def _around(machine: Machine) -> str:
    ram = f", {format_size(machine.ram).replace('.00', '')} of RAM" if machine.ram is not None else ""
    drive = f", {machine.disk_title}" if machine.disk is not None else ""
    return f"{machine.card.title}{ram}{drive}"


def _headline(plan: PaperPlan) -> str:
    job = plan.job
    doing = "Training a LoRA on" if job.mode == "train" else "Running"
    quant = job.quant.name if job.quant else "as stored"
    return f"{doing} {plan.shape.title} ({quant} weights) on: {_around(plan.machine)}"


def _where(plan: PaperPlan) -> str:
    place = plan.outcome.placement
    fits = f"The weights are {size(plan.shape.bytes_in(plan.job.quant))}; the card has {size(plan.machine.card.vram)}"
    if place.streamed_wire == 0:
        return f"It fits. {fits}. All {plan.shape.layers} layers stay on the card; nothing needs to stream."
    cached, drive = int(plan.outcome.work.cached_bytes), plan.from_drive_bytes
    source = f"wait in RAM ({size(cached)})"
    if drive:
        source = f"wait on the drive ({size(drive)})" + (f" and in RAM ({size(cached)})" if cached else "")
    return (
        f"It runs, although it does not fit. {fits}. {plan.resident_layers} of {plan.shape.layers} layers stay on the card. "
        f"The other {plan.streamed_layers} {source} and are copied to the card just before they are needed, while it "
        "computes something else."
    )


def _sample(plan: PaperPlan, tokens: int) -> str:
    samples, rest = divmod(tokens, plan.shape.sample_tokens)
    if rest or not samples:
        return f"{tokens:,} tokens"
    return f"{tokens:,} tokens ({plan.shape.sample if samples == 1 else f'{samples} times a {plan.shape.sample}'})"


WAITS = {
    "link": "the copies from RAM to the card ({} GB/s)",
    "disk": "the drive ({} GB/s)",
}


def _speed(plan: PaperPlan) -> str:
    step, rates = plan.outcome.step, plan.machine.rates(plan.job)
    name = "training step" if plan.job.mode == "train" else "pass (one sampling step, or one prompt)"
    line = f"One {name} over {_sample(plan, plan.outcome.tokens)} takes about {seconds(step.seconds)}."
    if plan.outcome.placement.streamed_wire == 0:
        return line + " The card's own speed is the limit."
    if step.overhead < 0.005:
        return (
            line
            + " That is as fast as a card that holds the whole model: the copies hide behind the computing."
        )
    what = WAITS.get(step.bound_by, "unpacking the weights")
    what = what.format(f"{(rates.disk or 0) / GB:g}" if step.bound_by == "disk" else f"{rates.link / GB:.3g}")
    slower = (
        f"{step.overhead + 1:.0f} times as long as"
        if step.overhead >= 3
        else f"{step.overhead * 100:.0f} % longer than"
    )
    return f"{line} That is {slower} on a card that holds the whole model ({seconds(step.compute_seconds)}): it waits for {what}."


def _free_from(plan: PaperPlan) -> str:
    if plan.outcome.placement.streamed_wire == 0:
        return ""
    rule, phase = plan.thresholds["published_rule"], plan.thresholds["by_phase"]
    return (
        f"With these layers on the card, streaming costs nothing from about {_tokens(phase)} tokens a step on. More tokens "
        "give the card more to compute while copies arrive (tokens are batch times image or text length). The simpler "
        f"published rule says {_tokens(rule)}."
    )


def _vram(plan: PaperPlan) -> str:
    vram = plan.outcome.vram
    rows = [
        ("layers that stay", vram.resident), ("slots for layers that stream", vram.slots), ("LoRA adapters", vram.adapters),
        ("their gradients", vram.gradients), ("optimizer (8-bit Adam)", vram.optimizer),
        ("activations" + (" and KV cache" if plan.shape.kv_width and plan.job.mode == "infer" else ""), vram.activations),
        ("driver and torch (context)", vram.context), ("together", vram.total),
    ]  # fmt: skip
    return "VRAM:\n" + "\n".join(f"  {name:<32}{size(count):>10}" for name, count in rows if count)


def _batch(plan: PaperPlan) -> str:
    best, now = plan.best, plan.outcome
    if best is None or best.tokens == now.tokens:
        return ""
    sample = min(now.tokens, plan.shape.sample_tokens)
    gain = best.tokens_per_second / now.tokens_per_second
    resident = sum(
        n for n, group in zip(best.placement.resident, plan.shape.groups, strict=True) if group.repeated
    )
    return (
        f"Best batch: {best.tokens // sample} samples at once ({best.tokens:,} tokens) give {gain:.2f}x the throughput, with "
        f"{resident} layers on the card instead of {plan.resident_layers} ({seconds(best.step.seconds)} a step)."
    )


def _what_if(plan: PaperPlan) -> str:
    rows, same = [], []
    for what, how, other in plan.what_if:
        speedup = plan.outcome.step.seconds / other.step.seconds if other else 0.0
        if other is None:
            rows.append(f"  {what} ({how}): does not fit")
        elif abs(speedup - 1) < 0.01:
            same.append(f"{what} ({how})")
        else:
            rows.append(
                f"  {speedup:4.1f}x the speed, {seconds(other.step.seconds):>7} a step:  {what} ({how})"
            )
    lines = ["What would change it:", *rows] if rows else []
    if same:
        lines.append(f"No difference: {'; '.join(same)}.")
    return "\n".join(lines)


def _sources(plan: PaperPlan) -> str:
    machine = plan.machine
    lines = [f"Figures: {plan.shape.source}. Card: {machine.source or machine.card.source}."]
    if plan.shape.note:
        lines.append(plan.shape.note)
    lines.append(
        "Only the model itself is planned: text encoders and VAE come on top, before and after it."
        if plan.shape.kind == "diffusion"
        else ""
    )
    return " ".join(line for line in lines if line)
