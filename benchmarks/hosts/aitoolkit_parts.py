"""The parts of a whole ai-toolkit job beside its steps: its start, its samples and its saves. Figures and their table.

The module is pure: it touches no device.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PARTS = {  # name in the record: heading of the table
    "first_step_s": "start to 1st step",
    "first_sample_s": "1st sample",
    "sample_s": "sample",
    "save_s": "save",
    "total_s": "whole job",
}


def job_parts(told: Mapping[str, Any], s_per_step: float) -> dict[str, Any]:
    """Return the seconds of the parts of a job, from the data that the probe recorded; {} for data without parts.

    ``first_step_s``: from the request of the job to the end of its first step; ``with_imports_s``: the same from the
    start of the process. ``pauses``: for each sample and save its kind, the number of steps before it, the seconds of
    the call, and the seconds that it delayed the job. The delay is the time from the end of the step before to the end
    of the step after, minus a step (``s_per_step``): a slower step after a sample counts too. It is None after the last
    step, and where the job both sampled and saved. ``first_sample_s``, ``sample_s`` and ``save_s``: the delay by the
    first sample, and the medians of the delays by the other samples and by all saves.
    """
    if "first_step_end" not in told:
        return {}
    ends = [end for _, end, _ in told["steps"]]
    places = [index for _, index, _, _ in told["pauses"]]
    pauses = [
        {
            "kind": kind,
            "after_steps": index,
            "call_s": end - begin,
            "delay_s": ends[index] - ends[index - 1] - s_per_step
            if 0 < index < len(ends) and places.count(index) == 1
            else None,
        }
        for kind, index, begin, end in told["pauses"]
    ]
    samples = _delays(pauses, "sample")
    saves = _delays(pauses, "save")
    first_step_s = told["first_step_end"] - told["asked"]
    return {
        "first_step_s": first_step_s,
        "with_imports_s": first_step_s + told["imported_s"],
        "first_sample_s": samples[0] if samples else None,
        "sample_s": statistics.median(samples[1:]) if samples[1:] else None,
        "save_s": statistics.median(saves) if saves else None,
        "pauses": pauses,
    }


def _delays(pauses: Sequence[Mapping[str, Any]], kind: str) -> list[float]:
    return [one["delay_s"] for one in pauses if one["kind"] == kind and one["delay_s"] is not None]


def parts_table(runs: Sequence[Mapping[str, Any]], plain_of: Mapping[str, str]) -> str:
    """Return a table of the parts of whole jobs: medians over the processes of each configuration.

    The numbers in brackets are ratios to the plain run (``plain_of``: the word of the plain run of each
    configuration) and to the run with ai-toolkit's own layer offloading (``stock``). "" for records without parts.
    """
    found: dict[str, dict[str, float]] = {}
    for word in dict.fromkeys(run["config"] for run in runs):
        mine = [run for run in runs if run["config"] == word]
        for part in PARTS:
            values = [run[part] for run in mine if run.get(part) is not None]
            if values:
                found.setdefault(word, {})[part] = statistics.median(values)
    found = {word: parts for word, parts in found.items() if "first_step_s" in parts}
    if not found:
        return ""
    lines = [f"{'seconds (of plain, of stock)':<30}" + "".join(f"{text:>24}" for text in PARTS.values())]
    for word, parts in found.items():
        others = [found.get(plain_of[word]), found.get("stock")]
        cells = [_cell(part, parts, others) for part in PARTS]
        lines.append(f"{word:<30}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def _cell(part: str, parts: Mapping[str, float], others: Sequence[Mapping[str, float] | None]) -> str:
    if part not in parts:
        return ""
    ratios = [
        f"{parts[part] / other[part]:.2f}" if other and other.get(part, 0) > 0 else "-" for other in others
    ]
    return f"{parts[part]:.2f} ({', '.join(ratios)})"
