"""Prompts in the real ComfyUI on the CPU, which believes in a card of 70 MB (`prompt_counts.imagine_card`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .prompt_bench import MARK, missing_files
from .prompt_cases import TINY

COMFYUI = os.environ.get("COMFYUI_PATH", "").split(os.pathsep)[0]
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
HOSTS = Path(__file__).parent
CARD = 70_000_000


def make_files(folder: Path) -> None:
    """Write the tiny models, the text encoder and the LoRA files that ``folder`` lacks."""
    jobs = missing_files(folder, TINY, cpu=True)
    if jobs:
        command = [PYTHON, str(HOSTS / "prompt_files.py"), COMFYUI, json.dumps(jobs)]
        subprocess.run(command, check=True, timeout=300)


def run(
    folder: Path,
    graphs: list[dict[str, Any] | None],
    *,
    carom: bool = True,
    interrupts: dict[int, str] | None = None,
    fills: dict[int, tuple[str, int]] | None = None,
    may_fail: bool = False,
) -> list[dict[str, Any]]:
    """Run prompts in one process; return what it told of each. A prompt that is None drops the models. Raises
    RuntimeError if a prompt, or the process, failed.

    ``carom``: whether Carom's nodes are there. ``interrupts``: parts, by the number of the prompt. ``fills``: a part and
    the bytes of the card that another program takes then, by the number of the prompt. ``may_fail``: whether a prompt that
    failed is returned too.
    """
    job: dict[str, Any] = {
        "comfyui": COMFYUI, "files": str(folder), "sizes": asdict(TINY), "cpu": True, "carom": carom, "card": CARD,
        "profile": "", "link": False, "graphs": graphs, "interrupts": interrupts or {}, "fills": fills or {},
    }  # fmt: skip
    make_files(folder)
    file = folder / "job.json"
    file.write_text(json.dumps(job), "utf-8")
    done = subprocess.run(
        [PYTHON, str(HOSTS / "prompt_host.py"), str(file)], input="\n" * len(graphs), capture_output=True, text=True,
        timeout=580,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    lines = [
        json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)
    ]
    for told in lines:
        if "failed" in told and not may_fail:
            raise RuntimeError(told["failed"])
    return [told for told in lines if "prompt" in told]
