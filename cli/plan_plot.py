"""The picture of `carom plan --plot`: extra time per step over tokens per step, with a line for each
configuration.
"""

from __future__ import annotations

import math
from pathlib import Path

from ..core.common.held_files import write_atomically
from ..tools.planner import model_plan
from ..tools.planner.model_plan import ModelPlan

STYLES = ("-", "--", "-.", ":")
POINTS = tuple(round(2 ** (power / 4)) for power in range(4 * 8, 4 * 16 + 1))
TICKS = (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


def lines_of(plan: ModelPlan) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return (label, [(tokens, overhead), ...]) for this plan and for each suggested change, where memory
    suffices.

    The placement of layers is chosen anew at each number of tokens.
    """
    changes = model_plan.configurations(plan.shape, plan.machine, plan.job)
    asked = [("as asked", plan.machine, plan.job)] + [
        (what, machine, job) for what, _, machine, job in changes
    ]
    lines = []
    for label, machine, job in asked:
        swept = model_plan.sweep(plan.shape, machine, job, POINTS)
        points = [(tokens, at.step.overhead) for tokens, at in swept if at is not None]
        if points:
            lines.append((label, points))
    return lines


def draw(plan: ModelPlan, path: str) -> None:
    """Write the picture to the file `path` (.png, .svg or .pdf), under a temporary name first.

    matplotlib's pyplot, which has global state, is not used.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    drawn: dict[tuple, list[str]] = {}
    for label, points in lines_of(plan):
        drawn.setdefault(tuple(points), []).append(label)
    for number, (line, labels) in enumerate(drawn.items()):
        # Configurations with the same figures share a line, whose label lists all of them.
        axes.plot(
            [tokens for tokens, _ in line], [100 * overhead for _, overhead in line],
            linewidth=2.5 if number == 0 else 1.5, linestyle=STYLES[number % len(STYLES)], label="\n= ".join(labels),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylim(bottom=-1, top=max(20.0, 130 * max(over for points in drawn for _, over in points)))
    axes.set_yticks([tick for tick in TICKS if tick <= axes.get_ylim()[1]])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"+{value:,.0f} %" if value else "0 %")
    axes.axvline(plan.outcome.tokens, color="grey", linewidth=1)
    axes.text(
        plan.outcome.tokens,
        0.98,
        f" {plan.outcome.tokens:,} tokens, as planned",
        transform=axes.get_xaxis_transform(),
        va="top",
        color="grey",
    )
    threshold = plan.thresholds["by_phase"]
    if threshold and math.isfinite(threshold):
        axes.set_xlabel(
            f"tokens a step (batch x length); as planned, streaming is free from about {threshold:,.0f} on"
        )
    else:
        axes.set_xlabel("tokens a step (batch x length)")
    axes.set_ylabel("extra time against a card that holds the model")
    mode = "training" if plan.job.mode == "train" else "inference"
    axes.set_title(
        f"{plan.shape.title}, {mode}, {plan.job.quant.name if plan.job.quant else 'as stored'}, on {plan.machine.card.title}"
    )
    axes.grid(True, alpha=0.3)
    axes.legend(title="lines end where the VRAM does")
    write_atomically(Path(path), lambda part: figure.savefig(part, dpi=130))
