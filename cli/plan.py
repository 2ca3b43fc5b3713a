"""`carom plan MODEL`: predicts the speed and memory of a model on a graphics card, without loading or running
the model.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace

from ..core.common.errors import UnsupportedError
from ..core.common.sizes import format_size, parse_size
from ..core.host import probe
from ..tools.doctor import hardware
from ..tools.planner import model_plan, presets, shape_files, shapes
from ..tools.planner.estimate import Job, Machine
from ..tools.planner.job_file import is_job
from ..tools.planner.presets import GB, Card
from . import plan_gpus
from .plan_text import text

# The card that is planned for without a GPU and without --gpu. The output says so.
REFERENCE = "rtx4090"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carom plan` to ``parser``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f".safetensors file, sharded folder, index.json, config.json, ai-toolkit job (.yaml), or one of: {', '.join(shapes.SHAPES)}",
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
        "--gpu",
        help="probe (measure this machine, the default; without a GPU the plan is for a card that the output names, and only an "
        "explicit `--gpu probe` uses this machine's RAM and drive) or one of: " + ", ".join(presets.CARDS),
    )
    parser.add_argument(
        "--vram", help="limit for the weights on the card, as 12GiB (default: all VRAM that is left)"
    )
    parser.add_argument(
        "--ram",
        help="RAM of the machine, as 32GiB (default: of this machine where it is probed, else as much as is needed)",
    )
    parser.add_argument(
        "--nvme",
        help=f"drive to stream from: {', '.join(presets.DRIVES)}, a rate as 7GB (a second), or probe",
    )
    parser.add_argument(
        "--gds", action="store_true", help="the drive reads to the card directly (GPUDirect Storage)"
    )
    parser.add_argument(
        "--link",
        help="host to card, as 22GB (a second); default: what the card's PCIe generation and lanes reach",
    )
    parser.add_argument(
        "--tokens", type=int, help="tokens of a step, batch x sequence (default: one image, clip or sequence)"
    )
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank when training (default 16)")
    parser.add_argument(
        "--codec",
        choices=("raw", "lossless"),
        default="raw",
        help="lossless: 16-bit weights packed to 70 %% on the way, and on the card where that is faster",
    )
    parser.add_argument(
        "--compute",
        choices=("bf16", "nvfp4"),
        default="bf16",
        help="number format in which the card computes",
    )
    parser.add_argument("--plot", metavar="PNG", help="draw overhead over tokens, one line per configuration")
    plan_gpus.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compute and print the plan, draw it where asked, and return exit code 0.

    A MODEL that is an ai-toolkit job is planned by plan_job.py, and several GPUs by plan_gpus.py; their exit codes are
    returned.
    """
    plan_gpus.check(args)
    if is_job(args.model):
        from .plan_job import run as run_job  # plan_job.py imports machine_of from here

        return run_job(args)
    if args.plot and not args.plot.lower().endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"--plot {args.plot!r}: give a file name that ends in .png, .svg or .pdf")
    folder = os.path.dirname(args.plot or "") or "."
    if not os.path.isdir(folder):
        raise ValueError(f"--plot {args.plot!r}: there is no folder {folder}; make it, or name another")
    shape = _shape(args.model)
    machine, remarks = machine_of(args)
    job = Job(
        args.mode, args.tokens, _quant(args.quant, shape),
        parse_size(args.vram, whole=machine.card.vram, setting="--vram") if args.vram else None,
        args.rank, args.codec, args.compute,
    )  # fmt: skip
    if "+" in (args.quant or "") and not any(group.expert_params for group in shape.groups):
        first = presets.find_quant(args.quant.partition("+")[0]).name
        remarks.append(
            f"{shape.title} has no routed experts, so --quant {args.quant} is {first} for all of it."
        )
    if args.gpus > 1:
        return plan_gpus.run(args, shape, machine, job, remarks, _rate(args.host_memory, "--host-memory"))
    plan = model_plan.plan(shape, machine, job)
    if args.plot:
        from .plan_plot import draw

        try:
            draw(plan, args.plot)
        except OSError as error:
            raise OSError(f"--plot {args.plot!r} cannot be written: {error.strerror or error}") from error
    if args.json:
        print(
            json.dumps(
                {**model_plan.to_dict(plan), "remarks": remarks, "plot": args.plot}, indent=2, allow_nan=False
            )
        )
    else:
        print(text(plan, remarks))
        if args.plot:
            print(f"\nDrawn: {args.plot}")
    return 0


def _shape(model: str) -> shapes.Shape:
    """Return the shape of the model with this path or name. Raises ValueError for an unknown name."""
    if shape_files.is_path(model):
        return shape_files.read_shape(model)
    try:
        return shapes.find_shape(model)
    except ValueError as error:
        raise ValueError(
            f"{error}. Or give a path to a checkpoint: a .safetensors file, its folder, an index.json or a config.json "
            f"(no file or folder here is called {model[:80]!r})"
        ) from None


def _quant(asked: str | None, shape: shapes.Shape) -> presets.Quant | None:
    """Return the requested format of the weights; by default None (as stored) for a checkpoint, else bf16."""
    if asked is not None:
        return presets.find_quant(asked)
    stored = any(group.stored_bytes is not None for group in shape.groups)
    return None if stored else presets.find_quant("bf16")


def _rate(value: str | None, setting: str) -> float | None:
    """Parse a rate such as "7GB" or "7GB/s" to bytes/s. Raises ValueError for less than 1 MB/s."""
    if value is None:
        return None
    rate = float(parse_size(value.lower().removesuffix("/s"), setting=setting))
    if rate < 1e6:
        raise ValueError(f"{setting}={value!r} is less than 1 MB/s; write a rate such as 7GB")
    return rate


def machine_of(args: argparse.Namespace) -> tuple[Machine, list[str]]:
    """Return the machine to plan for, and remarks for the reader about where its figures come from."""
    remarks: list[str] = []
    probed = None
    if args.gpu is None or args.gpu.lower() == "probe":
        probed = hardware.probe(_folder(args.model), disk=args.nvme in (None, "probe"), extras=False)
    if probed is not None and probed.gpu is not None:
        machine = measured_machine(probed)
        remarks.append(f"Measured on this machine: {machine.card.title}.")
    else:
        asked = None if probed is not None else args.gpu
        card = presets.find("gpu", asked or REFERENCE, presets.CARDS)
        machine = Machine(card)
        if probed is not None and args.gpu is not None:
            machine = machine_with_card(probed, card)
            remarks.append(
                f"No GPU to probe here ({probed.gpu_reason}): RAM and drive are this machine's, the card is "
                f"{_with_article(card.title)}; name yours with --gpu {', '.join(presets.CARDS)}."
            )
        elif args.gpu is None:
            remarks.append(
                f"No GPU found here, so the card is assumed to be {_with_article(card.title)}; name yours with --gpu."
            )
    if args.ram:
        ram = parse_size(args.ram, whole=probe.host_memory().total, setting="--ram")
        machine = replace(machine, ram=ram, ram_usable=None)
    if args.link:
        machine = replace(
            machine, card=replace(machine.card, link=_rate(args.link, "--link"), slot="", good_link=None)
        )
    if args.nvme and args.nvme != "probe":
        machine = _with_drive(machine, args.nvme)
    elif args.nvme == "probe" and machine.disk is None:
        rate, reason = probe.call_with_timeout(
            lambda: probe.disk_rate(_folder(args.model)), 15.0, "the disk probe"
        )
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
    if not machine.source:
        remarks.append(_assumed(machine, args))
    return replace(machine, gds=args.gds), remarks


def _assumed(machine: Machine, args: argparse.Namespace) -> str:
    """Return the remark that lists the assumptions of a plan for a card that was not measured, and the
    options to change.
    """
    taken = [f"nothing else uses the {machine.card.title}"]
    if not args.link:
        slot = f"{machine.card.slot}; " if machine.card.slot else ""
        taken.append(f"its link copies {machine.card.link / GB:g} GB/s ({slot}--link sets it)")
    if machine.ram is None and machine.disk is None:
        here = probe.host_memory().total
        taken.append(
            f"there is RAM for all that waits, whatever this machine has ({format_size(here)}; --ram bounds it)"
        )
    host_cost, layer = machine.host_cost, machine.host_cost.of(getattr(args, "mode", "infer"))
    taken.append(
        f"the host needs {1e3 * layer:.2g} ms of Python for each layer, {1e3 * (layer + host_cost.use):.2g} ms for one that streams"
    )
    return f"Assumed: {'; '.join(taken)}."


def _with_article(title: str) -> str:
    """Return ``title`` with the indefinite article that fits its pronunciation."""
    return f"{'an' if title[:1] in 'AEFHILMNORSX8' else 'a'} {title}"


def _folder(model: str) -> str:
    """Return the folder whose drive is measured: the model's if the model is on disk, else the current
    folder.
    """
    if os.path.isdir(model):
        return model
    return os.path.dirname(os.path.abspath(model)) if os.path.isfile(model) else os.getcwd()


def _with_drive(machine: Machine, asked: str) -> Machine:
    """Return ``machine`` with the drive that ``--nvme`` gives by name or rate."""
    if asked[:1].isdigit() and asked.lower() not in presets.DRIVES:
        rate = _rate(asked, "--nvme")
        return replace(machine, disk=rate, disk_title=f"a drive of {rate / GB:g} GB/s")
    return model_plan.with_drive(machine, presets.find("nvme", asked, presets.DRIVES))


def measured_machine(probed: hardware.Hardware) -> Machine:
    """Return a `Machine` from probed figures; missing ones come from the preset of the same card, if there is
    one.

    Raises UnsupportedError where figures are missing and there is no preset.
    """
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
    # Free VRAM already excludes the probe's own CUDA context. Add one back, because the plan subtracts a
    # context again.
    card = Card(
        gpu.name, gpu.name, gpu.free + presets.CONTEXT_BYTES, flops, link, memory, "measured on this machine",
        nvfp4=preset.nvfp4 if preset else None, workstation=True,
    )  # fmt: skip
    machine = machine_with_card(probed, card, "measured on this machine")
    if gpu.layer_seconds is None:
        return machine
    return replace(machine, host_cost=presets.HOST_COST.scaled(gpu.layer_seconds, "measured on this machine"))


def machine_with_card(probed: hardware.Hardware, card: Card, source: str = "") -> Machine:
    """Return a `Machine` with ``card``, this machine's RAM, and its drive where that was measured with direct
    I/O.
    """
    disk = probed.disk
    rate = max(disk.one, disk.several) if disk is not None and disk.direct else None
    return Machine(
        card, probed.memory.total, rate, f"the drive of {disk.folder} (measured)" if rate and disk else "",
        ram_usable=probed.memory.usable, source=source,
    )  # fmt: skip
