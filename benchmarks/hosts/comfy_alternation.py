"""The measurement of two models that take turns in one ComfyUI server, with a text encoder between the turns.

A part of `comfy_gpu`. The figures are the costs of each turn after both models were loaded once. They are compared
with a static split, which gives each model half of the memory for weights permanently and streams the rest in every
step. The wire bytes of the split are computed from the run's own figures. Carom's wire bytes include the weights
loaded anew for a turn.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .rounds import spread


def second_name(file: Path) -> Path:
    """Create a second name for the model's file and return it; ComfyUI takes a second name for a second model."""
    other = file.with_name("bench2" + file.suffix)
    if not other.exists():
        os.link(file, other)
    return other


def run(
    server: Any, bench: Any, config: Any, turns: int, steps: int, evict: Callable[[Path], None]
) -> dict[str, Any]:
    """Run a first turn and then ``turns`` of each model; return the figures.

    The files are removed from the page cache before the last turn.
    """
    node = bench.lib["comfy_host"].node
    names = (bench.file.name, second_name(bench.file).name)
    found: dict[str, Any] = {"turns": []}
    for turn in range(turns + 1):
        if turn == turns:
            evict(bench.file)
        for which, name in enumerate(names):
            before, posted = bench.io(server.pid), time.time()
            prompt = bench.prompt(config, 1, steps, name)
            told = server.run(prompt, timeout=bench.time_limit.left_s(300))["sample"]["told"][0]
            after = bench.io(server.pid)
            posted_text = time.time()
            loader = "CLIPLoader" if config.codec == "stock" else "CaromLoadCLIP"
            encode = {
                "clip": node(loader, clip_name=bench.text_encoder.name, type="stable_diffusion"),
                "encode": node("CLIPTextEncode", clip=["clip", 0], text=f"a lighthouse, view {turn} {which}"),
                "tell": node("CaromBenchText", conditioning=["encode", 0]),
            }
            server.run(encode, timeout=bench.time_limit.left_s(300))
            found["turns"].append({
                "turn": turn, "model": name, "hash": told["hash"], "wall_s": told["ended"] - posted,
                "text_s": time.time() - posted_text, "first_step_s": told["first_step_s"],
                "iterations_s": told["iterations_s"], "steps": steps, "report": told["report"],
                "read_bytes": {key: after[key] - before[key] for key in after},
            })  # fmt: skip
    return found | summary(found["turns"])


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the turns after the first, and the wire bytes compared with the best static split's."""
    later = [turn for turn in turns if turn["turn"] > 0]
    result: dict[str, Any] = {
        **spread([turn["wall_s"] for turn in later]),
        "turn_s": statistics.median(turn["wall_s"] for turn in later),
        "text_s": statistics.median(turn["text_s"] for turn in later),
        "storage_bytes": sum(turn["read_bytes"].get("storage", 0) for turn in later),
        # A text encoder ran before each of these turns. After an encoder, ComfyUI computes other bits for a prompt.
        "same_latents": len({turn["hash"] for turn in later}) == 1,
    }
    reports = [turn["report"] for turn in later if turn["report"] and turn["report"]["streamed_bytes"]]
    if len(reports) == len(later):
        ours = static = 0.0
        for turn, report in zip(later, reports, strict=True):
            ours += turn["steps"] * report["wire_bytes_per_step"] + report["resident_bytes"]
            packed = report["wire_bytes_per_step"] / max(1.0, report["raw_bytes_per_step"])
            # Half of the memory minus the same slots and staging. All other weights are copied in every step.
            resident = report["vram_budget_bytes"] / 2 - report["slot_bytes"] - report["staging_bytes"]
            held, raw = report.get("resident_packed_bytes", 0), report.get("resident_packed_raw_bytes", 0)
            whole = report["resident_bytes"] - held + raw + report["streamed_bytes"]
            if held:  # packed residents hold more weights in the same bytes
                resident *= raw / held
            static += turn["steps"] * packed * (whole - max(0.0, resident))
        result |= {"wire_bytes": ours, "static_split_wire_bytes": static, "of_static_split": ours / static}
    return result


def line(run: dict[str, Any]) -> str:
    """Return the text of a run for the table."""
    of_split = run.get("of_static_split")
    wire = "" if of_split is None else f", {of_split:.2f} of the best static split's wire bytes"
    return (
        f"a turn {run['turn_s']:.2f} s, the text encoder between {run['text_s']:.2f} s, read from disk "
        f"{run['storage_bytes'] / 1e6:.0f} MB{wire}"
    )
