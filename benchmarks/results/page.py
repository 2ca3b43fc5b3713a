"""The generated page `docs/performance.md`: every cell with its newest record, and the range over all records of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .history import Cell, Measurement, cells
from .table import markdown_line, number

RECORDS = "../benchmarks/records/"
HEAD = """# Performance

This page is generated from the [records](../benchmarks/records/) by `carom bench --write-docs`;
do not edit it. [benchmarks/README.md](../benchmarks/README.md) says how each figure is measured.
`carom bench --show benchmarks/records/FILE` prints one record as a table.

## How to read the tables

- *newest* is the median of the newest record. Its quartiles stand in brackets where the record has
  the samples.
- *x base* divides it by the base case of the same record; the table or the row names it. A table
  may hold rows of several records; only *x base* compares.
- *x roofline* divides the newest value by the [roofline](planning.md#the-roofline). The link's rate is
  measured once, in a process of its own, and copies within a step can be a little faster; so a value
  just below 1 is possible.
- *GB* is the peak that the device's allocator reserved, in 10^9 bytes. In ComfyUI it is the peak use
  of the card.
- *same bits* says whether outputs (in training: loss and all gradients) equal those of the base case
  bit for bit.
- *range* is the least and the greatest value over all records of the cell, with their number;
  records that were deleted since are counted. The host's speed stands in parentheses: the base case
  in the same record, then the time of a fixed loop in Python where the record has it. A host with
  slow Python makes both greater.
- A value marked † comes from a disturbed run, because there is no other run of the cell. Disturbed
  runs do not count in a range.
"""


@dataclass(frozen=True)
class Part:
    """A part of the page. ``of``: which cells it shows; ``words``: what was measured, in one or two sentences;
    ``merged``: whether all groups of a card stand in one table.
    """

    title: str
    words: str
    of: Callable[[Cell], bool]
    merged: bool = False


def _wide(cell: Cell) -> bool:
    """Return whether the model of a cell is large enough that the device, not the host, takes the time."""
    return "width 256" not in cell.group


PARTS = (
    Part(
        "Whole prompts in ComfyUI",
        "ComfyUI's executor, unmodified, without its server: a new text, an fp8 text encoder of T5 XXL's size, Flux-shaped "
        "models of random bfloat16 weights, 1024 x 1024 pixels, 20 steps. The card is emulated: another process holds the "
        "rest of its memory. Stock is ComfyUI's own loaders. *same bits* compares conditioning and latents. The notes "
        "divide the seconds of one prompt into parts.",
        lambda cell: cell.kind == "comfyui prompts",
    ),
    Part(
        "Python engine",
        "A synthetic diffusion transformer (DiT), bfloat16, whose weights wait in pinned host memory. Each case is a process "
        "of its own. Training adapts four linears a block with LoRA and recomputes activations by block.",
        lambda cell: cell.kind == "engines" and _wide(cell) and cell.group != "link",
    ),
    Part(
        '`vram="auto"`',
        "The budget that Carom finds by itself, beside the best of several budgets set by hand. The card is emulated: only "
        "so much of its memory is free.",
        lambda cell: cell.kind == "auto" and ('vram="auto"' in cell.case or "two models" in cell.group),
        merged=True,
    ),
    Part(
        "Switches and budgets",
        "Two models run in turns under one VRAM budget: the one that has run is parked, and the next pass of the other one "
        "brings it back. Seconds from the park to the end of that pass, without those of a settled pass; and the same for "
        "a change of the budget. The floor is the time in which the link copies the weights that stay on the device.",
        lambda cell: cell.kind == "switches",
    ),
    Part(
        "Attaching",
        "Seconds that `carom.stream` takes for a module whose weights are in memory. The floor is the time in which the "
        "system pins all of the module's bytes. The first attach of a process also makes what is made once, such as compiled "
        "kernels.",
        lambda cell: cell.kind == "attaching",
    ),
    Part(
        "Host memory",
        "Anonymous memory of a process with one session (two in the last case) beyond what it had before, without the page "
        "cache, on the simulated device, whose own memory is subtracted. A part is what the allocators keep.",
        lambda cell: cell.kind == "session memory",
    ),
    Part(
        "Steps in ComfyUI",
        "A headless ComfyUI server, unmodified, with a Flux-shaped model of random bfloat16 weights, 1024 x 1024 pixels. The "
        "card is emulated: another process holds the rest of its memory. Stock is ComfyUI's own loader. Carom changes its "
        "layout once after the first prompts, so the second prompt and the settled layout stand apart.",
        lambda cell: cell.kind == "comfyui",
    ),
    Part(
        "ai-toolkit",
        "A `run.py` job of ai-toolkit, unmodified: LoRA on a Z-Image-shaped model, 512 pixels. The losses of two runs "
        "without offloading differ as well; the notes say by how much.",
        lambda cell: cell.kind == "ai-toolkit",
    ),
    Part(
        "From disk",
        "Weights streamed from NVMe with direct reads. The best plain read is the highest rate that plain direct reads "
        "reached at any point of the same run, with any number of threads and any block size.",
        lambda cell: cell.kind.startswith("disk"),
        merged=True,
    ),
    Part(
        "Several GPUs",
        "Data parallel training by all GPUs of a machine with one copy of the weights in host memory, beside one GPU alone; "
        "and weights in the memory of a second GPU, beside host memory alone.",
        lambda cell: cell.kind == "several GPUs",
        merged=True,
    ),
    Part(
        "Codec",
        "Rates of raw bfloat16 bytes. On the device the base is a copy of the same bytes within the device.",
        lambda cell: cell.kind == "codec",
    ),
    Part(
        '`codec="auto"`',
        'Steps with `codec="auto"` beside the faster one of `raw` and `lossless`. On the simulated device the clock is '
        "virtual, so these times do not depend on a machine; the notes name the codec that was chosen.",
        lambda cell: cell.kind == "codec choice",
        merged=True,
    ),
    Part(
        "Host time",
        "What Carom adds on the host. In small models the host limits the speed: their blocks have few and short kernels. "
        "Counts of calls depend on the code alone, not on the machine.",
        lambda cell: cell.kind in ("host time", "host calls", "two commits") or (cell.kind == "engines" and not _wide(cell)),
    ),
    Part(
        "Predicted steps",
        "The time of a step, with the time that `core/plan` predicted from a probe of three blocks as the base.",
        lambda cell: cell.kind == "predict",
        merged=True,
    ),
    Part(
        "Schedules",
        "Predicted seconds of a cycle with the table of `make_schedule`, over those of a prefetcher that decides at "
        "each use what to fetch next and where to, as Carom did before, in random cases. Both predictions are computed; nothing is run.",
        lambda cell: cell.kind == "schedules",
    ),
)  # fmt: skip


def page(index: dict[str, Any]) -> str:
    """Return the page for an index."""
    found = cells(index)
    out = [HEAD]
    for part in PARTS:
        mine = [cell for cell in found if part.of(cell)]
        if mine:
            out.append(_part(part, mine))
    shown = {cell.newest.entry["file"] for part in PARTS for cell in found if part.of(cell)}
    rest = [one for one in index["records"] if one["file"] not in shown]
    if rest:
        out.append(
            "## Other records\n\nNewer records have their cells, or they measure something else once.\n"
        )
        out.append(_records(rest))
    return "\n".join(out)


def _part(part: Part, mine: Sequence[Cell]) -> str:
    newest = [cell.newest.entry for cell in mine]
    cards = sorted({one["machine"]["accelerator"] or "CPU" for one in newest})
    torch = sorted({one["versions"]["torch"] for one in newest if "torch" in one["versions"]})
    words = f"{part.words} Measured on {_and(cards)}" + (f", torch {_and(torch)}" if torch else "") + "."
    words = textwrap.fill(words, 100, break_on_hyphens=False)
    out = [f"## {part.title}\n\n{words}\n"]
    groups: dict[tuple[str | None, str], list[Cell]] = {}
    for cell in mine:
        groups.setdefault((cell.accelerator, "" if part.merged else cell.group), []).append(cell)
    for (card, group), members in groups.items():
        bases = sorted({cell.newest.cell["base_case"] for cell in members if cell.newest.base})
        title = ", on ".join(word for word in (group, card or "") if word) or "on the CPU"
        out.append(f"**{title}**" + (f" (base: {bases[0]})" if len(bases) == 1 else "") + "\n")
        out.append(_table(members, bases, part.merged) + "\n")
    files = {one["file"] for one in newest}
    by_file = {one["file"]: one for one in newest}
    out.append("Records of this part:\n\n" + _records(by_file[file] for file in sorted(files)))
    return "\n".join(out)


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _table(members: Sequence[Cell], bases: Sequence[str], merged: bool) -> str:
    many = len(bases) > 1
    heads = ("job", "case", "what", "newest", "x base", "base", "GB", "same bits", "range", "record", "note")
    metrics = list(dict.fromkeys(cell.metric for cell in members))
    groups = list(dict.fromkeys(cell.group for cell in members))
    ordered = sorted(
        members,
        key=lambda c: (groups.index(c.group), metrics.index(c.metric), c.case not in bases, c.newest.value),
    )
    rows = [(cell.group if merged else "", *_row(cell, many)) for cell in ordered]
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = [
        tuple(heads[i] for i in kept),
        ("---",) * len(kept),
        *(tuple(row[i] for i in kept) for row in rows),
    ]
    return "\n".join(markdown_line(line) for line in lines)


def _row(cell: Cell, many: bool) -> tuple[str, ...]:
    """Return the cells of a line; ``many``: the table has several base cases, so that the line names its own."""
    run = cell.newest
    own = run.cell
    value = f"{number(run.value)} {cell.unit}" + (" †" if run.disturbed else "")
    if "quartiles" in own:
        value += f" [{number(own['quartiles'][0])} to {number(own['quartiles'][1])}]"
    notes = [f"† {run.disturbed}"] if run.disturbed else []
    notes += [own["note"]] if own.get("note") else []
    notes += [f"{own['processes']} runs"] if own.get("processes", 1) > 1 else []
    if own.get("kernels"):
        notes.append("kernels " + ", ".join(f"{name} {number(ms)} ms" for name, ms in own["kernels"].items()))
    if own.get("floor"):
        notes.append(f"{number(run.value / own['floor'])} x roofline")
    return (
        cell.case,
        cell.metric,
        value,
        number(run.value / run.base if run.base else None),
        own.get("base_case", "") if many else "",
        number(own["device_bytes"] / 1e9 if "device_bytes" in own else None),
        {True: "yes", False: "no", None: ""}[own.get("same_bits")],
        _range(cell),
        link(run.entry["file"]),
        "; ".join(notes),
    )


def _range(cell: Cell) -> str:
    """Return the least and the greatest value, each with the speed of its host."""
    if cell.counted < 2:
        return ""
    low, high = cell.range
    return f"{number(low.value)}{_host(low)} to {number(high.value)}{_host(high)}, {cell.counted} records"


def _host(run: Measurement) -> str:
    parts = [number(run.base)] if run.base else []
    parts += [f"loop {1e3 * run.python_loop_seconds:.0f} ms"] if run.python_loop_seconds else []
    return f" ({', '.join(parts)})" if parts else ""


def link(file: str) -> str:
    """Return a link to a record; its text is the name without the date's year."""
    return f"[{file.rpartition('.')[0].removeprefix('2026-')}]({RECORDS}{file})"


def _records(entries: Iterable[dict[str, Any]]) -> str:
    lines = [markdown_line(("record", "date", "commit", "host", "remarks")), markdown_line(("---",) * 5)]
    for one in entries:
        marks = [
            f"Disturbed{' (' + mark['group'] + ')' if mark['group'] else ''}: {mark['why'].rstrip('.')}."
            for mark in one.get("disturbed", ())
        ]
        lines.append(
            markdown_line(
                (link(one["file"]), one.get("date", "")[:10], (one["commit"] or "")[:7], _machine(one),
                 " ".join([one["remarks"], *marks]).strip())
            )
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _machine(entry: dict[str, Any]) -> str:
    machine = entry.get("machine")
    if machine is None:
        return ""
    parts = [machine["cpu_model"]] if machine["cpu_model"] else []
    if machine["cores"]:
        parts.append(f"{machine['cores']} cores")
    if machine["memory_bytes"]:
        parts.append(f"{machine['memory_bytes'] / 1e9:.0f} GB")
    if machine["link_bytes_per_second"]:
        parts.append(f"link {machine['link_bytes_per_second'] / 1e9:.1f} GB/s")
    if machine["python_loop_seconds"]:
        parts.append(f"Python loop {1e3 * machine['python_loop_seconds']:.0f} ms")
    return ", ".join(parts)
