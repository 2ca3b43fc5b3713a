"""Two models taking turns in one ComfyUI server, a text encoder between them: what each turn costs once both were loaded.

A part of `comfy_gpu`. A static split gives each model half of the weights' memory for good and streams the rest of it in
every step; its wire bytes are counted from the run's own figures, and ours with what is brought anew for a turn.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30


def second_name(file: Path) -> Path:
    """The other model: another name for the same file, which is another model for ComfyUI."""
    other = file.with_name("bench2" + file.suffix)
    if not other.exists():
        os.link(file, other)
    return other


def run(
    server: Any, bench: Any, config: Any, turns: int, steps: int, evict: Callable[[Path], None]
) -> dict[str, Any]:
    """``turns`` of each model after a first one; the files are thrown out of the page cache before the last."""
    node = bench.lib["comfy_host"].node
    names = (bench.file.name, second_name(bench.file).name)
    found: dict[str, Any] = {"turns": []}
    for turn in range(turns + 1):
        if turn == turns:
            evict(bench.file)
        for which, name in enumerate(names):
            before, posted = bench.io(server.pid), time.time()
            told = server.run(bench.prompt(config, 1, steps, name), timeout=300)["sample"]["told"][0]
            after = bench.io(server.pid)
            posted_text = time.time()
            loader = "CLIPLoader" if config.codec == "stock" else "CaromLoadCLIP"
            encode = {
                "clip": node(loader, clip_name=bench.text_encoder.name, type="stable_diffusion"),
                "encode": node("CLIPTextEncode", clip=["clip", 0], text=f"a lighthouse, view {turn} {which}"),
                "tell": node("CaromBenchText", conditioning=["encode", 0]),
            }
            server.run(encode, timeout=300)
            found["turns"].append({
                "turn": turn, "model": name, "hash": told["hash"], "wall_s": told["ended"] - posted,
                "text_s": time.time() - posted_text, "first_step_s": told["first_step_s"],
                "iterations_s": told["iterations_s"], "steps": steps, "report": told["report"],
                "read_bytes": {key: after[key] - before[key] for key in after},
            })  # fmt: skip
    return found | summary(found["turns"])


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the turns after the first, and the wire bytes beside those of the best static split."""
    later = [turn for turn in turns if turn["turn"] > 0]
    result: dict[str, Any] = {
        "turn_s": statistics.median(turn["wall_s"] for turn in later),
        "text_s": statistics.median(turn["text_s"] for turn in later),
        "storage_bytes": sum(turn["read_bytes"].get("storage", 0) for turn in later),
        # A text encoder has run before all of these: after it ComfyUI computes the same prompt to other bits.
        "same_latents": len({turn["hash"] for turn in later}) == 1,
    }
    reports = [turn["report"] for turn in later if turn["report"] and turn["report"]["streamed_bytes"]]
    if len(reports) == len(later):
        ours = static = 0.0
        for turn, report in zip(later, reports, strict=True):
            ours += turn["steps"] * report["wire_bytes_per_step"] + report["resident_bytes"]
            packed = report["wire_bytes_per_step"] / max(1.0, report["raw_bytes_per_step"])
            # Half the memory less the same slots and staging: what does not stay there crosses in every step.
            resident = report["vram_budget_bytes"] / 2 - report["slot_bytes"] - report["staging_bytes"]
            held, raw = report.get("resident_packed_bytes", 0), report.get("resident_packed_raw_bytes", 0)
            whole = report["resident_bytes"] - held + raw + report["streamed_bytes"]
            if held:  # what stays packed is more
                resident *= raw / held
            static += turn["steps"] * packed * (whole - max(0.0, resident))
        result |= {"wire_bytes": ours, "static_split_wire_bytes": static, "of_static_split": ours / static}
    return result


def line(run: dict[str, Any]) -> str:
    """For the table."""
    of_split = run.get("of_static_split")
    wire = "" if of_split is None else f", {of_split:.2f} of the best static split's wire bytes"
    return (
        f"a turn {run['turn_s']:.2f} s, the text encoder between {run['text_s']:.2f} s, read from disk "
        f"{run['storage_bytes'] / 1e6:.0f} MB{wire}"
    )
