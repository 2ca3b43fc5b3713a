"""`carom plan job.yaml`: what each model of an ai-toolkit job would do on a card, and the lines to add to the job."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict

from ..core.common.sizes import parse_size
from ..tools.planner import job_file, model_plan
from ..tools.planner.estimate import Machine
from ..tools.planner.job_plan import PlannedModel, ProcessPlan, plan_process
from .plan import machine_of
from .plan_text import WIDTH, seconds, size

# Options of `carom plan` that a job decides by itself: option -> where the job says it.
DECIDED = {
    "quant": "model.quantize and model.qtype",
    "tokens": "datasets.resolution and train.batch_size",
    "plot": "nothing: a job has several models; plot one with carom plan MODEL --plot",
}


def run(args: argparse.Namespace) -> int:
    """Print the plan of the job `args.model`. Return 0, or 1 where a model does not fit or is not known.

    Raises ValueError for a file that is no job, and for options that the job decides.
    """
    for option, where in DECIDED.items():
        if getattr(args, option) is not None:
            raise ValueError(f"--{option} has no place beside a job; what counts is {where}")
    if args.gpus > 1:
        raise ValueError(
            "--gpus has no place beside a job, which trains on one GPU; plan the model: carom plan MODEL --gpus N"
        )
    job = job_file.read_job(args.model)
    machine, remarks = machine_of(args)
    vram = parse_size(args.vram, whole=machine.card.vram, setting="--vram") if args.vram else None
    plans = [
        plan_process(process, machine, vram=vram, compute=args.compute, codec=args.codec)
        for process in job.processes
    ]
    if args.json:
        print(json.dumps(to_dict(job, machine, plans, remarks), indent=2, allow_nan=False))
    else:
        print(text(job, machine, plans, remarks))
    return 0 if all(plan.complete for plan in plans) else 1


def to_dict(
    job: job_file.TrainingJob, machine: Machine, plans: list[ProcessPlan], remarks: list[str]
) -> dict:
    """Convert the plans to JSON-ready values. Sizes are in bytes, times in seconds.

    Under `plan` is what `carom plan MODEL --json` prints for that model; None where there is no plan.
    """
    return {
        "job": job.path, "name": job.name, "gpu": machine.card.title, "vram_bytes": machine.card.vram,
        "remarks": remarks, "complete": all(plan.complete for plan in plans),
        "processes": [
            {
                "number": plan.process.number, "type": plan.process.type, "model": plan.process.model.path,
                "arch": plan.process.model.arch, "batch": plan.process.batch, "complete": plan.complete,
                "lines": list(plan.lines), "remarks": list(plan.remarks),
                "models": [_model_dict(model) for model in plan.models],
            }
            for plan in plans
        ],
    }  # fmt: skip


def _model_dict(model: PlannedModel) -> dict:
    """Return the JSON of one model."""
    return {
        "role": model.role, "name": model.name, "every_step": model.every_step, "copies": model.copies,
        "vram_limit_bytes": model.vram, "problem": model.problem, "streams": model.streams,
        "steps": [
            {**asdict(case), "step_seconds": at.step.seconds, "overhead": at.step.overhead, "bound_by": at.step.bound_by}
            for case, at in model.cases
        ],
        "plan": model_plan.to_dict(model.plan) if model.plan else None,
    }  # fmt: skip


def text(job: job_file.TrainingJob, machine: Machine, plans: list[ProcessPlan], remarks: list[str]) -> str:
    """Return the plans as text for a terminal."""
    head = f"Job {job.name} ({job.path}) on: {machine.card.title}, {size(machine.card.vram)}"
    blocks = [_fill(line) for line in (head, *remarks)]
    for plan in plans:
        blocks += _process_text(plan)
    return "\n\n".join(blocks)


def _process_text(plan: ProcessPlan) -> list[str]:
    """Return the paragraphs of one process."""
    process = plan.process
    blocks = [
        f"Process {process.number} ({process.type}): {process.model.path}, arch {process.model.arch}, "
        f"batch of {process.batch}"
    ]
    for model in plan.models:
        blocks += _model_text(model)
    blocks += plan.remarks
    filled = [block if block.startswith(" ") else _fill(block) for block in blocks]
    if plan.lines:
        filled.append("\n".join(["Add under `model:`:", "", *(f"        {line}" for line in plan.lines)]))
    return filled


def _model_text(model: PlannedModel) -> list[str]:
    """Return the paragraphs of one model: what stays, what streams, and the time of each kind of step."""
    title = f"{model.role.capitalize()} {model.name}"
    if model.copies > 1:
        title += f" ({model.copies} of them share the card and take turns; figures of one)"
    if model.plan is None:
        return [f"{title}: not planned. {model.problem}."]
    plan = model.plan
    vram, quant = plan.outcome.vram, plan.job.quant
    weights = f"weights in {quant.name}, {quant.dense:g} bits each" if quant else "weights as stored"
    if model.streams:
        wait = size(int(plan.outcome.work.cached_bytes))
        where = (
            f"{plan.resident_layers} of {plan.shape.layers} layers stay on the card; the other {plan.streamed_layers} "
            f"wait in RAM ({wait}) and stream"
        )
    else:
        where = f"all {plan.shape.layers} layers stay on the card"
    when = "" if model.every_step else " It runs before the training and is then unloaded."
    lines = [
        f"{title}: {size(plan.shape.bytes_in(quant))} of {weights}; {where}. VRAM: {size(vram.total)}, of which weights "
        f"{size(vram.weights)}.{when}"
    ]
    if model.cases:
        rows = [
            (case.title, f"{case.tokens:,} tokens", f"about {seconds(at.step.seconds)} a step", _overhead(at.step.overhead))
            for case, at in model.cases
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines.append(
            "\n".join(
                f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}"
                for row in rows
            )
        )
    elif model.every_step:
        lines.append(f"It takes about {seconds(plan.outcome.step.seconds)} of each step.")
    return lines


def _fill(paragraph: str) -> str:
    """Return the paragraph wrapped to WIDTH columns, with paths and names whole."""
    return textwrap.fill(paragraph, WIDTH, break_on_hyphens=False, break_long_words=False)


def _overhead(share: float) -> str:
    """Return how much longer a step takes than on a card that holds the model."""
    return (
        "as fast as a card that holds it all"
        if share < 0.005
        else f"{share * 100:.0f} % over a card that holds it"
    )
