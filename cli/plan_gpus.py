"""`carom plan MODEL --gpus N`: what several GPUs of one machine do with a model, data parallel and as a pipeline."""

from __future__ import annotations

import argparse
import json
import math
import textwrap

from ..tools.planner import gpu_table
from ..tools.planner.estimate import Job, Machine
from ..tools.planner.gpu_table import GpuRow, GpuTable
from ..tools.planner.multi_gpu import SPLITS, SplitPlan
from ..tools.planner.presets import GB
from ..tools.planner.shapes import Shape
from .plan_text import WIDTH, seconds, size

TITLES = {"data": "Data parallel", "pipeline": "Pipeline"}
KINDS = {"nvlink": "NVLink", "p2p": "P2P over PCIe", "none": "no P2P"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for several GPUs to ``parser``."""
    group = parser.add_argument_group("several GPUs of one machine")
    group.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="number of equal GPUs in this machine (default 1)"
    )
    links = group.add_mutually_exclusive_group()
    links.add_argument(
        "--nvlink", dest="peers", action="store_const", const="nvlink",
        help="the GPUs are connected by NVLink (default where the card has it)",
    )  # fmt: skip
    links.add_argument(
        "--p2p", dest="peers", action="store_const", const="p2p",
        help="the GPUs reach each other over PCIe (default for workstation and data centre cards)",
    )  # fmt: skip
    links.add_argument(
        "--no-p2p", dest="peers", action="store_const", const="none",
        help="the GPUs reach each other through host memory only (default for GeForce and Radeon cards)",
    )  # fmt: skip
    group.add_argument(
        "--split",
        choices=SPLITS,
        help="data: each GPU runs the whole model on its own tokens; pipeline: each GPU runs a part of the layers "
        "(default: the faster)",
    )
    group.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="microbatches of a step of the pipeline, each of --tokens (default: 2 for each GPU)",
    )
    group.add_argument(
        "--host-memory",
        metavar="RATE",
        help="what all GPUs together read from host memory, as 80GB (a second); default: 80GB, or 307GB beside workstation "
        "and data centre cards",
    )


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together."""
    if args.gpus < 1:
        raise ValueError(f"--gpus {args.gpus}: give 1 or more")
    if args.gpus == 1:
        given = [
            option
            for option, value in (
                (f"--{'no-p2p' if args.peers == 'none' else args.peers}", args.peers), ("--split", args.split),
                ("--microbatches", args.microbatches), ("--host-memory", args.host_memory),
            )
            if value is not None
        ]  # fmt: skip
        if given:
            raise ValueError(f"{given[0]} is for several GPUs; say how many with --gpus N")
    if args.gpus > 1 and args.plot:
        raise ValueError("--plot draws the plan of one GPU; leave --gpus out")
    if args.microbatches is not None and args.split == "data":
        raise ValueError("--microbatches is for a pipeline; leave it out, or take --split pipeline")


def run(
    args: argparse.Namespace,
    shape: Shape,
    machine: Machine,
    job: Job,
    remarks: list[str],
    memory: float | None,
) -> int:
    """Print the plan for `args.gpus` GPUs and return exit code 0. `memory`: bytes/s of host memory; None: assumed."""
    table = gpu_table.plan_gpus(
        shape, machine, job, args.gpus, kind=args.peers, split=args.split, microbatches=args.microbatches,
        host_memory=memory,
    )  # fmt: skip
    if args.json:
        print(json.dumps({**gpu_table.to_dict(table), "remarks": remarks}, indent=2, allow_nan=False))
    else:
        print(text(table, remarks))
    return 0


def text(table: GpuTable, remarks: list[str]) -> str:
    """Return the plan as text for a terminal."""
    blocks = [
        _headline(table), *remarks, _links(table), _chosen(table), *_problems(table), *_tables(table), _fewest(table),
        _more(table),
    ]  # fmt: skip
    return "\n\n".join(
        block if "\n" in block else textwrap.fill(block, WIDTH, break_on_hyphens=False) for block in blocks
    )


def _headline(table: GpuTable) -> str:
    """Return the first line: the task, the model and the GPUs."""
    job, card = table.job, table.machine.card
    doing = "Training a LoRA on" if job.mode == "train" else "Running"
    weights = f"weights in {job.quant.name}" if job.quant else "weights as stored"
    return f"{doing} {table.shape.title} ({weights}, {size(table.shape.bytes_in(job.quant))}) on {table.links.gpus} x {card.title}"


def _links(table: GpuTable) -> str:
    """Return the paragraph on the connections."""
    links = table.links
    gather = (
        f", a gather of {links.nvlink / GB:.0f} GB/s into each GPU ({links.source})" if links.nvlink else ""
    )
    return (
        f"Connections: {KINDS[links.kind]}{gather}; each GPU has a link of {table.machine.card.link / GB:.3g} GB/s to host "
        f"memory, which all together read at no more than {links.host_memory / GB:.3g} GB/s (--host-memory)."
    )


def _chosen(table: GpuTable) -> str:
    """Return the paragraph on the plan of the split that was asked for, or of the faster one."""
    plan, slowest = table.chosen, table.chosen.slowest
    if plan.split == "data":
        where = f"each GPU keeps {slowest.resident_layers} of {table.shape.layers} layers"
        how = f"{where}; a step has {plan.step_tokens:,} tokens, {plan.tokens:,} on each GPU"
    else:
        each = sorted({stage.shape.layers for stage in plan.stages}, reverse=True)
        parts = " or ".join(str(count) for count in each)
        where = f"each GPU runs {parts} of {table.shape.layers} layers and keeps {_range([stage.resident_layers for stage in plan.stages])} of them"
        how = f"{where}; a step has {plan.microbatches} microbatches of {plan.tokens:,} tokens"
    if plan.all_resident:
        streams = "Nothing streams"
    else:
        rate = f"{plan.link / GB:.3g} GB/s"
        way = (
            "each copies a part and gathers the rest"
            if plan.gathers
            else "each copies what it needs over its own link"
        )
        streams = f"The others stream at up to {rate} to each GPU ({way})"
    gain = f", {table.speedup:.2f} times one GPU" if table.speedup is not None else ""
    idle = f" {plan.bubble * 100:.0f} % of it is the pipeline's bubble." if plan.bubble >= 0.005 else ""
    return (
        f"{TITLES[plan.split]}: {how}. {streams}. A step takes about {seconds(plan.seconds)} ({plan.tokens_per_second:,.0f} "
        f"tokens a second{gain}), {_overhead(plan)}.{idle}"
    )


def _problems(table: GpuTable) -> list[str]:
    """Return a paragraph for each split that does not work with all GPUs, with the reason."""
    last = table.rows[-1]
    return [f"{TITLES[split]} does not work here: {reason}." for split, reason in last.problems.items()]


def _range(counts: list[int]) -> str:
    """Return the numbers of layers of the stages as text: "15", or "14 to 15"."""
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


LIMITS = {
    "link": "the copies from host memory",
    "memory": "host memory, which the GPUs share",
    "disk": "the drive, which the GPUs share",
    "host": "Python, which issues the GPUs' work",
    "compute": "the unpacking of weights",
}


def _overhead(plan: SplitPlan) -> str:
    """Return how much longer the step takes than with all weights on the GPUs, and what it waits for."""
    if plan.overhead < 0.005:
        return "as fast as if all layers stayed on the GPUs"
    return f"{plan.overhead * 100:.0f} % more than if all layers stayed on the GPUs: it waits for {LIMITS[plan.bound_by]}"


def _cells(row: GpuRow, split: str) -> tuple[str, ...]:
    """Return the cells of one row of a table."""
    plan = row.plan(split)
    if plan is None:
        return (str(row.gpus), "does not fit", "", "", "")
    kept = _range([stage.resident_layers for stage in plan.stages])
    streamed = _range([stage.streamed_layers for stage in plan.stages])
    threshold, by_phase = plan.threshold("own_drive"), plan.threshold("by_phase")
    return (
        str(row.gpus), f"{kept} / {streamed}", _tokens(threshold), _tokens(by_phase),
        f"{plan.tokens_per_second:,.0f}",
    )  # fmt: skip


def _tokens(value: float) -> str:
    """Return a number of tokens as text; "never" for infinity."""
    return "never" if math.isinf(value) else f"{math.ceil(value):,}"


def _tables(table: GpuTable) -> list[str]:
    """Return a table for each split, with a row for each number of GPUs."""
    heads = ("GPUs", "resident / streamed layers", "free from (rule)", "free from (Carom)", "tokens a second")
    found = []
    for split in SPLITS:
        rows = [heads, *(_cells(row, split) for row in table.rows)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = [
            "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        each = "for each GPU" if split == "data" else "for each stage and microbatch"
        found.append("\n".join([f"{TITLES[split]} ({each}):", *lines]))
    found.append(
        "Free from: tokens of a microbatch, or of each GPU's pass, from which streaming costs no time. Rule: the published rule, "
        "with a link and a drive for each GPU. Carom: each phase hides its own copies, and the GPUs share the drive and host "
        "memory."
    )
    return found


def _fewest(table: GpuTable) -> str:
    """Return the paragraph on the fewest GPUs."""
    tokens = f"with {table.tokens:,} tokens in a microbatch"
    without = "no number of them" if table.without_streaming is None else f"{table.without_streaming}"
    streaming = "no number of them" if table.with_streaming is None else f"{table.with_streaming}"
    return f"Fewest GPUs {tokens}: {without} without streaming (a pipeline with all layers on the GPUs), {streaming} with it."


def _more(table: GpuTable) -> str:
    """Return the last paragraph: how to run the plan, and what it leaves out."""
    how = (
        "Run it with torchrun and carom.stream(model, group=...)"
        if table.chosen.split == "data"
        else "Run it with torch.distributed.pipelining, and carom.stream for each stage's module"
    )
    return (
        f"{how}: docs/multi-gpu.md. Not counted: the averaging of gradients, and the activations that pass between stages. "
        "The plan of one GPU: leave --gpus out."
    )
