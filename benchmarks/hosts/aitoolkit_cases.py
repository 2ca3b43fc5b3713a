"""The cases of the ai-toolkit benchmark: their words on the command line, job files, figures and the table.

The module is pure: it touches no device.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .aitoolkit_parts import job_parts, parts_table
from .rounds import pooled, spread

SHORT = 24  # steps over which long runs are compared with short runs, in addition to all of their steps
WARM = 5  # number of steps before the probe's figures begin
SAMPLE_STEPS = 4  # denoising steps of a sample
FLOAT8 = "float8-"
CONTEXT = 1 << 30  # bytes that a CUDA context and its kernels take of a card
WORD = re.compile(
    r"(?P<float8>float8-)?(?P<body>plain|stock(?P<percent>\d+)?|[^/@#]+/[^/@#]+)(?:@(?P<rank>\d+))?(?:#(?P<steps>\d+))?"
)


@dataclass(frozen=True)
class Config:
    """A configuration, parsed from a word of --configs: [float8-](plain | stock | stockPERCENT |
    BUDGET/CODEC)[@RANK][#STEPS].

    Raises ValueError for any other word.
    """

    word: str

    def __post_init__(self) -> None:
        if WORD.fullmatch(self.word) is None:
            raise ValueError(
                f"{self.word!r} is no configuration: plain, stock, stock50 or BUDGET/CODEC, then @RANK, #STEPS"
            )

    def _part(self, name: str) -> str:
        found = WORD.fullmatch(self.word)
        assert found is not None
        return found[name] or ""

    @property
    def float8(self) -> bool:
        return bool(self._part("float8"))

    @property
    def bounces(self) -> bool:
        return "/" in self.word

    @property
    def stock(self) -> bool:
        return self._part("body").startswith("stock")

    @property
    def percent(self) -> int:
        """The share of the layers that ai-toolkit's own layer offloading takes, in percent."""
        return int(self._part("percent") or 100)

    @property
    def budget(self) -> str:
        return self._part("body").partition("/")[0]

    @property
    def codec(self) -> str:
        return self._part("body").partition("/")[2]

    @property
    def rank(self) -> int | None:
        """The LoRA rank of this configuration, or None for the run's."""
        return int(self._part("rank")) if self._part("rank") else None

    @property
    def steps(self) -> int | None:
        """The number of steps of this configuration, or None for the run's."""
        return int(self._part("steps")) if self._part("steps") else None

    @property
    def plain(self) -> str:
        """The word of the plain run with which this configuration's losses and times are compared."""
        rank = f"@{self.rank}" if self.rank else ""
        steps = f"#{self.steps}" if self.steps else ""
        return f"{self._part('float8')}plain{rank}{steps}"

    def is_plain_of(self, other: Config) -> bool:
        """Return whether this configuration is a plain run of the job of ``other``, with any number of steps."""
        mine, its = self.word.partition("#")[0], other.plain.partition("#")[0]
        return mine == its


def needed(configs: Sequence[Config], stock_known: bool) -> str:
    """Return an error text if a budget depends on a run that does not come before it in ``configs``, else "".

    ``stock_known``: whether the peak of the stock run is given.
    """
    for index, config in enumerate(configs):
        before = configs[:index]
        wanted = {"half": ["plain", config.plain], "all": ["plain"] + ["stock"] * (not stock_known)}
        for word in wanted.get(config.budget, []) if config.bounces else []:
            if not any(other.word.partition("#")[0] == word.partition("#")[0] for other in before):
                return f"{config.word} needs {word} before it (--configs)"
    return ""


@dataclass(frozen=True)
class Shape:
    """The settings shared by all jobs.

    ``pixels``: side of the pictures; ``rank``: LoRA rank; ``checkpointing``: whether blocks are checkpointed;
    ``mode`` and ``granularity``: settings of `offload`; ``cached_text``: whether captions are encoded once, before
    the first step.
    """

    pixels: int
    rank: int
    checkpointing: bool = True
    device: str = "cuda"
    mode: str = "bouncing"
    granularity: str = "auto"
    cached_text: bool = True


def job(
    name: str,
    config: Config,
    shape: Shape,
    folder: Path,
    budget: int | str | None,
    steps: int,
    model: str = "zimage",
) -> dict[str, Any]:
    """Return the job file of one configuration; models, pictures and outputs are in folders below ``folder``."""
    cpu, rank = shape.device == "cpu", config.rank or shape.rank
    save_every, sample_every = pauses(steps)
    section: dict[str, Any] = {"name_or_path": str(folder / "models" / model), "arch": "zimage"}
    if config.float8:
        section |= {"quantize": True, "qtype": "float8"}
    if config.bounces:
        options = {"vram": budget, "codec": config.codec, "granularity": shape.granularity}
        section |= {"offload": shape.mode, "offload_kwargs": options}
    elif config.stock:
        section |= {"layer_offloading": True, "layer_offloading_transformer_percent": config.percent / 100}
    process = {
        "type": "sd_trainer",
        "training_folder": str(folder / "output"),
        "device": shape.device,
        "network": {"type": "lora", "linear": rank, "linear_alpha": rank},
        "save": {"dtype": "float16", "save_every": save_every, "max_step_saves_to_keep": 1},
        "datasets": [
            {
                "folder_path": str(folder / "models" / "images"), "caption_ext": "txt",
                "resolution": [shape.pixels], "cache_latents_to_disk": True,
            }
        ],
        "train": {
            "batch_size": 1, "steps": steps, "gradient_checkpointing": shape.checkpointing,
            "train_unet": True, "train_text_encoder": False, "noise_scheduler": "flowmatch", "optimizer": "adamw",
            "lr": 1e-4, "dtype": "float32" if cpu else "bf16",
            "disable_sampling": not sample_every, "skip_first_sample": True,
            "cache_text_embeddings": shape.cached_text,
        },
        "model": section,
        "sample": {
            "sampler": "flowmatch", "sample_every": sample_every, "width": shape.pixels, "height": shape.pixels,
            "prompts": ["a red cat"], "neg": "", "seed": 42, "guidance_scale": 3, "sample_steps": SAMPLE_STEPS,
        },
    }  # fmt: skip
    return {"job": "extension", "config": {"name": name, "process": [process]}, "meta": {"name": "[name]"}}


def pauses(steps: int) -> tuple[int, int]:
    """Return after how many steps a job saves, and after how many it samples; 0 stands for never.

    A job of 15 or more steps does each twice between steps, never both between the same two steps, and neither in its
    last two steps, which are profiled. A job of fewer than 6 steps only trains.
    """
    every = max(2, (steps - 5) // 2)
    return (every + 1, every) if steps >= 6 else (0, 0)


def fits(shapes: Mapping[str, tuple[int, ...]], weights: int, rank: int) -> int:
    """Return the bytes of a card that holds the weights, the adapters with their gradients and AdamW's two moments,
    and a context.

    The adapters have rank ``rank`` in float32, one for every matrix in ``shapes``. No bytes are counted for
    activations, so some weights must be streamed to make room for them.
    """
    adapters = 4 * rank * sum(sum(shape) for shape in shapes.values() if len(shape) == 2)
    return weights + 4 * adapters + CONTEXT


def figures(told: dict[str, Any]) -> dict[str, Any]:
    """Return the samples, medians, quartiles and peaks of the data that the probe recorded.

    The samples are the times from the end of a step to the end of the next, without the first steps, without the
    profiled ones, and without those in which the job sampled or saved.
    """
    ends = [end for _, end, _ in told["steps"]][: told.get("counted_steps")]
    between = {index for _, index, _, _ in told.get("pauses", ())}
    gaps = [(index, b - a) for index, (a, b) in enumerate(zip(ends, ends[1:], strict=False), start=1)]
    steady = [gap for index, gap in gaps if index > WARM and index not in between]
    warm = steady or [gap for _, gap in gaps]
    memory = told["memory"]
    end = memory["end"]
    return {
        "s_per_step": statistics.median(warm) if warm else math.nan,
        "samples_ms": [round(1e3 * gap, 3) for gap in warm],
        "quartiles_ms": [1e3 * value for value in spread(warm).get("quartiles_s", ())],
        "profile": told.get("profile"),
        "profile_failed": told.get("profile_failed"),
        "kernel_ms": {"step": told["profile"]["kernel_ms"]} if told.get("profile") else None,
        **job_parts(told, statistics.median(warm) if warm else math.nan),
        "s_in_step": statistics.median(b - a for a, b, _ in told["steps"][WARM + 1 :] or told["steps"]),
        "losses": [loss for _, _, loss in told["steps"]],
        "failed_steps": told.get("failed_steps", []),
        "peak_reserved_bytes": end.get("peak_reserved_bytes", 0),
        "peak_reserved_whole_job_bytes": max(m.get("peak_reserved_bytes", 0) for m in memory.values()),
        "rss_bytes": end["rss_bytes"],
        "anonymous_bytes": end.get("anonymous_bytes"),
        "peak_rss_bytes": end.get("peak_rss_bytes"),
        "torch_pinned_bytes": end.get("torch_pinned_bytes"),
        "memory": memory,
    }


def against(losses: list[float], plain: list[float]) -> dict[str, Any]:
    """Compare a loss curve with that of the plain run: the number of equal steps, the largest and the mean relative
    difference.
    """
    pairs = [(a, b) for a, b in zip(losses, plain, strict=False) if a is not None and b is not None]
    off = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    return {
        "compared": len(pairs),
        "equal": sum(a == b for a, b in pairs),
        "largest_relative": max(off, default=0.0),
        "mean_relative": statistics.fmean(off) if off else 0.0,
    }


def phases(told: dict[str, Any], start: float, ended: float) -> dict[str, float]:
    """Return the seconds of each part of a job: until its process had imported, until its first step, its steps, and
    the rest.
    """
    marks = [
        start,
        told["asked"],
        told.get("first_step", told["asked"]),
        told.get("last_step", told["asked"]),
        ended,
    ]
    names = ("until_imported", "loading", "steps", "ending")
    return {name: round(b - a, 2) for name, a, b in zip(names, marks, marks[1:], strict=False)}


def losses(record: dict[str, Any]) -> str:
    """Return the text that compares each run's losses with each plain run of the same job, over the steps that both
    have.

    The difference between two plain runs is the reference for the other differences.
    """
    lines = ["losses: relative differences step by step, largest and mean; and of the means of the last half"]
    done = [(index, run) for index, run in enumerate(record["runs"]) if run["status"] == "ok"]
    for index, run in done:
        for before, plain in done:
            if before == index or not Config(plain["config"]).is_plain_of(Config(run["config"])):
                continue
            if Config(run["config"]).is_plain_of(Config(run["config"])) and before > index:
                continue  # compare each pair of plain runs only once
            count = min(len(run["losses"]), len(plain["losses"]))
            for window in sorted({count, min(count, SHORT)}):
                a, b = run["losses"][:window], plain["losses"][:window]
                found = against(a, b)
                late = [statistics.fmean(x or 0.0 for x in curve[window // 2 :]) for curve in (a, b)]
                lines.append(
                    f"  {run['config']:<20} (run {index + 1}) from {plain['config']} (run {before + 1}), {window} steps: "
                    f"{found['largest_relative']:.1e}, {found['mean_relative']:.1e}; {abs(late[0] - late[1]) / late[1]:.1e}"
                )
    return "\n".join(lines)


def carom_pinned(run: dict[str, Any]) -> int:
    """Return the bytes that Carom pinned, summed over all models in its report."""
    models = ((run.get("report") or {}).get("models") or {}).values()
    return sum(model.get("pinned_peak_bytes") or 0 for model in models)


def grown(run: dict[str, Any]) -> str:
    """Return text on the growth of reserved and resident memory from step 50 to the last recorded step; "" for a
    short job.
    """
    noted = sorted((int(key), value) for key, value in run.get("memory", {}).items() if key.isdigit())
    if len(noted) < 2:
        return ""
    (first, before), (last, after) = noted[0], noted[-1]
    change = [
        f"{name} {(after[key] - before[key]) / 1e6:+.0f} MB"
        for name, key in (("VRAM", "reserved_bytes"), ("RSS", "rss_bytes"))
        if key in before and key in after
    ]
    return f"  from step {first} to {last}: {', '.join(change)}"


def line(run: dict[str, Any]) -> str:
    if run["status"] != "ok":
        return f"{run['config']}: {run['status']}: {run['reason']}"
    spent = ", ".join(f"{name} {value:.1f}" for name, value in run.get("seconds", {}).items())
    return f"{run['config']}: {run['s_per_step']:.4f} s/step ({run['job_s']:.0f} s: {spent})"


def table(record: dict[str, Any]) -> str:
    """Return the comparison with a line for each configuration, over all its processes. GB are 10^9 bytes.

    "kernels" is the time of a step in which at least one kernel ran, in profiled steps; "waited" and "late" (the host
    was late) are Carom's shares of a step. The losses are compared with those of the first plain run.
    """
    lines = [
        f"{'config':<22}{'n':>2}{'s/step':>8}{'quartiles':>18}{'of plain':>9}{'kernels':>9}{'VRAM GB':>8}{'RSS GB':>8}"
        f"{'anon GB':>8}{'pinned GB':>10}{'waited':>8}{'late':>7}  losses equal, largest and mean difference"
    ]
    done = [run for run in record["runs"] if run["status"] == "ok"]
    found = pooled((run["config"], [ms / 1e3 for ms in run["samples_ms"]]) for run in done)
    seconds = {one["case"]: one["median_s"] for one in found if "median_s" in one}
    for one in found:
        if "median_s" not in one:
            continue
        runs = [run for run in done if run["config"] == one["case"]]
        plain = seconds.get(_plain(one["case"], seconds))
        ratio = f"{one['median_s'] / plain:.3f}" if plain else ""
        low, high = one["quartiles_s"]
        profiled = [run["profile"]["kernel_ms"] for run in runs if run.get("profile")]
        kernels = f"{statistics.median(profiled):.1f} ms" if profiled else ""
        text = f"{one['case']:<22}{one['processes']:>2}{one['median_s']:>8.4f}{f'{low:.4f} to {high:.4f}':>18}{ratio:>9}"
        text += f"{kernels:>9}{max(run['peak_reserved_bytes'] for run in runs) / 1e9:>8.2f}"
        text += f"{max(run['rss_bytes'] for run in runs) / 1e9:>8.2f}"
        text += f"{max(run['anonymous_bytes'] or 0 for run in runs) / 1e9:>8.2f}"
        text += f"{max((run['torch_pinned_bytes'] or 0) + carom_pinned(run) for run in runs) / 1e9:>10.2f}"
        text += f"{_share(runs, 'stall_seconds'):>8}{_share(runs, 'host_late_seconds'):>7}  "
        text += "; ".join(
            f"{near['equal']} of {near['compared']}, {near['largest_relative']:.1e}, {near['mean_relative']:.1e}"
            for run in runs
            if (near := run.get("against_plain"))
        )
        lines.append(text + "".join(grown(run) for run in runs))
        lines += [f"  {run['oom_skipped']} steps skipped by OOM" for run in runs if run["oom_skipped"]]
    lines += [
        f"{run['config']:<22}{run['status']}: {run['reason'][:110]}"
        for run in record["runs"]
        if run["status"] != "ok"
    ]
    parts = parts_table(done, {run["config"]: _plain(run["config"], seconds) for run in done})
    return "\n".join(lines + [parts] * bool(parts))


def _plain(word: str, words: Collection[str]) -> str:
    """Return which of ``words`` is the plain run of the job of ``word``; "" if none is."""
    config = Config(word)
    others = (other for other in words if Config(other).is_plain_of(config))
    return config.plain if config.plain in words else next(others, "")


def _share(runs: list[dict[str, Any]], name: str) -> str:
    """Return the median share of a training step that Carom's report has for ``name``; "" without a report."""
    shares = [
        model[name] / model["step_seconds"]
        for run in runs
        for model in ((run["report"] or {}).get("models") or {}).values()
        if model.get("kind") == "train" and model.get("step_seconds") and model.get(name) is not None
    ]
    return f"{100 * statistics.median(shares):.1f}%" if shares else ""
