"""The printed text of `carom plan`, written for readers who do not know terms such as residency or PCIe
generations.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from ..core.common.sizes import format_size
from ..tools.planner import estimate
from ..tools.planner.estimate import Machine
from ..tools.planner.model_plan import ModelPlan
from ..tools.planner.presets import GB

WIDTH = 100


@dataclass(frozen=True)
class Table:
    """A table of the text: a heading and (name, value) rows."""

    head: str
    rows: tuple[tuple[str, str], ...]


def size(count: float) -> str:
    """Return a number of bytes as text in decimal GB or MB, the units in which cards and checkpoints are
    described.
    """
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.0f} MB"


def seconds(value: float) -> str:
    """Return a duration in seconds as text, in ms, s or min."""
    return (
        f"{value * 1e3:.0f} ms"
        if value < 0.9995
        else f"{value:.1f} s"
        if value < 60
        else f"{value / 60:.1f} min"
    )


def _tokens(value: float) -> str:
    """Return a number of tokens as text; "never" for infinity."""
    return "never" if math.isinf(value) else f"{math.ceil(value):,}"


def text(plan: ModelPlan, remarks: list[str]) -> str:
    """Return the plan as text for a terminal."""
    return "\n\n".join(_format_block(block) for block in plan_blocks(plan, remarks))


def plan_blocks(plan: ModelPlan, remarks: list[str]) -> list[str | Table]:
    """Return the paragraphs and tables of a plan, in order.

    ``remarks``: paragraphs about where the figures come from.
    """
    blocks: list[str | Table | None] = [
        _headline(plan),
        *remarks,
        _where(plan),
        _speed(plan),
        _roofline(plan),
        _generation(plan),
        _free_from(plan),
        _vram(plan),
    ]
    blocks += [_batch(plan), *_what_if(plan), _sources(plan)]
    return [block for block in blocks if block]


def _format_block(block: str | Table) -> str:
    """Return a paragraph wrapped to WIDTH columns, or a table with aligned columns."""
    if isinstance(block, str):
        return textwrap.fill(block, WIDTH)
    name, value = (max(len(row[column]) for row in block.rows) for column in (0, 1))
    return "\n".join([f"{block.head}:", *(f"  {row[0]:<{name}}  {row[1]:>{value}}" for row in block.rows)])


def _machine(machine: Machine) -> str:
    """Return the card, RAM and drive of the machine, for the headline."""
    ram = f", {format_size(machine.ram).replace('.00', '')} of RAM" if machine.ram is not None else ""
    drive = f", {machine.disk_title}" if machine.disk is not None else ""
    return f"{machine.card.title}{ram}{drive}"


def _headline(plan: ModelPlan) -> str:
    """Return the first line: the task, the model and the machine."""
    job = plan.job
    doing = "Training a LoRA on" if job.mode == "train" else "Running"
    return f"{doing} {plan.shape.title} ({_weights(plan)}) on: {_machine(plan.machine)}"


def _weights(plan: ModelPlan) -> str:
    """Return the description of the weights' number format."""
    quant = plan.job.quant
    if quant is None:
        return "weights as the files store them"
    dense, _, experts = quant.name.partition("+")
    if not any(group.expert_params for group in plan.shape.groups):
        experts = ""
    words = f"weights in {dense}, {_bits(quant.dense)}"
    return words + (f"; routed experts in {experts}, {_bits(quant.experts)}" if experts else "")


def _bits(count: float) -> str:
    """Return the description of a number of bits per weight."""
    return f"{count:g} bits each" if count == int(count) else f"about {count:.1f} bits each"


def _where(plan: ModelPlan) -> str:
    """Return the paragraph that says whether the model fits and where the layers are kept."""
    place = plan.outcome.placement
    fits = f"The weights are {size(plan.shape.bytes_in(plan.job.quant))}; the card has {size(plan.machine.card.vram)}"
    if place.streamed_wire == 0:
        how = "It fits packed" if place.packed_units else "It fits"
        return f"{how}. {fits}. All {plan.shape.layers} layers stay on the card{_packed(plan)}; nothing needs to stream."
    cached, drive = int(plan.outcome.work.cached_bytes), plan.from_drive_bytes
    source = f"wait in RAM ({size(cached)})"
    if drive:
        source = f"wait on the drive ({size(drive)})" + (f" and in RAM ({size(cached)})" if cached else "")
    return (
        f"It runs, although it does not fit. {fits}. {plan.resident_layers} of {plan.shape.layers} layers stay on the card"
        f"{_packed(plan)}. "
        f"The other {plan.streamed_layers} {source} and are copied to the card just before they are needed, while it "
        "computes something else."
        + (
            f" A drive of {plan.drive_rate_needed / GB:.2g} GB/s keeps up; `carom doctor` measures yours."
            if drive
            else ""
        )
    )


def _packed(plan: ModelPlan) -> str:
    """Return the end of a sentence about resident layers, which says how many of them stay packed; "" for
    none.
    """
    place = plan.outcome.placement
    if not place.packed_units:
        return ""
    count = "all" if plan.packed_layers == plan.resident_layers else str(plan.packed_layers)
    return (
        f", {count} of them packed without loss ({size(place.packed_raw)} in {size(place.packed_bytes)}, with a copy in RAM) "
        "and unpacked at each use"
    )


def _sample(plan: ModelPlan, tokens: int) -> str:
    """Return a number of tokens with the number of samples it stands for."""
    samples, rest = divmod(tokens, plan.shape.sample_tokens)
    if rest or not samples:
        return f"{tokens:,} tokens"
    return f"{tokens:,} tokens ({plan.shape.sample if samples == 1 else f'{samples} times a {plan.shape.sample}'})"


HOST = "Python, which issues the card's work"
UNPACKING = "unpacking the weights"
WAITS = {
    "link": "the copies from RAM to the card ({} GB/s)",
    "disk": "the drive ({} GB/s)",
    "host": HOST,
}


def _speed(plan: ModelPlan) -> str:
    """Return the paragraph on the time of a step and the resource that limits it."""
    step, machine = plan.outcome.step, plan.machine
    name = "sampling step" if plan.shape.kind == "diffusion" else "forward pass"
    name = "training step" if plan.job.mode == "train" else name
    line = f"One {name} over {_sample(plan, plan.outcome.tokens)} takes about {seconds(step.seconds)}."
    if plan.outcome.placement.streamed_wire == 0 and step.overhead >= 0.005:
        held = (
            f"That is {step.overhead * 100:.0f} % longer than on a card that holds the whole model as it is"
        )
        return f"{line} {held} ({seconds(step.resident_seconds)}): it waits for {UNPACKING}."
    if plan.outcome.placement.streamed_wire == 0:
        return line + (
            f" {HOST}, is the limit: more tokens a step use the card better."
            if step.bound_by == "host"
            else " The card's own speed is the limit."
        )
    if step.overhead < 0.005:
        return (
            line
            + " That is as fast as a card that holds the whole model: the copies hide behind the computing"
            + ("." if step.bound_by == "compute" else f" and behind {HOST}: that is the limit.")
        )
    what = WAITS.get(step.bound_by, UNPACKING)
    what = what.format(
        f"{(machine.disk or 0) / GB:g}" if step.bound_by == "disk" else f"{machine.card.link / GB:.3g}"
    )
    slower = (
        f"{step.overhead + 1:.0f} times as long as"
        if step.overhead >= 3
        else f"{step.overhead * 100:.0f} % longer than"
    )
    return f"{line} That is {slower} on a card that holds the whole model ({seconds(step.resident_seconds)}): it waits for {what}."


def _roofline(plan: ModelPlan) -> str:
    """Return the paragraph on the roofline and on the efficiency, from which the time of the kernels follows."""
    step, share = plan.outcome.step, plan.machine.efficiency(plan.shape)
    least = (
        f"Roofline: {seconds(step.roofline_seconds)}, the least time of the step's kernels and copies, without the host and "
        "without unpacking."
    )
    if plan.machine.card.published:
        return f"{least} Only matrix products are counted, as in the published note."
    reached = 100 * share.of(plan.job.mode)
    return f"{least} The kernels are taken to reach {reached:.0f} % of the card's rate for matrix products."


def _generation(plan: ModelPlan) -> str:
    """Return the paragraph on the time of a generated token; "" where the model generates none."""
    if plan.generation is None:
        return ""
    streams = (
        " (every streamed layer is copied again for each)" if plan.outcome.placement.streamed_wire else ""
    )
    return f"After the prompt, one new token takes about {seconds(plan.generation.seconds)}{streams}."


def _free_from(plan: ModelPlan) -> str:
    """Return the paragraph on the tokens per step from which streaming costs no time; "" where nothing
    streams.
    """
    if plan.outcome.placement.streamed_wire == 0:
        return ""
    rule, phase = plan.thresholds["published_rule"], plan.thresholds["by_phase"]
    if math.isinf(phase):
        return "With these layers on the card, no number of tokens hides the copies fully."
    free = estimate.reserved_vram(plan.shape, plan.job, math.ceil(phase)).total + plan.outcome.vram.weights
    room = " (so many take VRAM, and fewer layers could stay)" if free > plan.machine.card.vram else ""
    return (
        f"With these layers on the card, streaming costs nothing from about {_tokens(phase)} tokens a step on{room}. More "
        "tokens give the card more to compute while copies arrive; tokens are batch times image or text length. The "
        f"simpler published rule (one transfer a step, no attention) says {_tokens(rule)}."
    )


def _vram(plan: ModelPlan) -> Table:
    """Return the table of VRAM by use."""
    vram, place = plan.outcome.vram, plan.outcome.placement
    rows = [
        ("layers that stay", vram.resident - place.packed_bytes), ("layers that stay packed", place.packed_bytes), ("slots for layers that stream", vram.slots), ("LoRA adapters", vram.adapters),
        ("their gradients", vram.gradients), ("optimizer (8-bit Adam)", vram.optimizer),
        ("activations" + (" and KV cache" if plan.shape.kv_width and plan.job.mode == "infer" else ""), vram.activations),
        ("driver and torch (context)", vram.context), ("together", vram.total),
    ]  # fmt: skip
    return Table("VRAM", tuple((name, size(count)) for name, count in rows if count))


def _batch(plan: ModelPlan) -> str:
    """Return the paragraph on the best batch size; "" where that is the planned one."""
    best, now = plan.best, plan.outcome
    if best is None or best.tokens == now.tokens:
        return ""
    sample = min(now.tokens, plan.shape.sample_tokens)
    gain = best.tokens_per_second / now.tokens_per_second
    resident = sum(
        n for n, group in zip(best.placement.resident, plan.shape.groups, strict=True) if group.repeated
    )
    fewer = (
        f", with {resident} layers on the card instead of {plan.resident_layers}"
        if resident != plan.resident_layers
        else ""
    )
    return (
        f"Best batch: {best.tokens // sample} samples at once ({best.tokens:,} tokens) give {gain:.2f}x the throughput{fewer} "
        f"({seconds(best.step.seconds)} a step)."
    )


def _what_if(plan: ModelPlan) -> list[str | Table]:
    """Return the table of changes with their speedup, and a paragraph on changes that make no difference."""
    rows, same = [], []
    for what, how, other in plan.what_if:
        speedup = plan.outcome.step.seconds / other.step.seconds if other else 0.0
        if other is None:
            rows.append((f"{what} ({how})", "does not fit"))
        elif abs(speedup - 1) < 0.01:
            same.append(f"{what} ({how})")
        else:
            rows.append(
                (f"{what} ({how})", f"{speedup:.1f}x the speed, {seconds(other.step.seconds)} a step")
            )
    blocks: list[str | Table] = [Table("What would change it", tuple(rows))] if rows else []
    return [*blocks, f"No difference: {'; '.join(same)}."] if same else blocks


def _sources(plan: ModelPlan) -> str:
    """Return the paragraph on the sources of the figures."""
    machine = plan.machine
    lines = [f"Figures: {plan.shape.source}. Card: {machine.source or machine.card.source}."]
    if not machine.card.published:
        lines.append(f"Share of the card's rate: {machine.efficiency(plan.shape).source}.")
    if plan.shape.note:
        lines.append(plan.shape.note)
    lines.append(
        "Only the model itself is planned: text encoders and VAE come on top, before and after it."
        if plan.shape.kind == "diffusion"
        else ""
    )
    return " ".join(line for line in lines if line)
