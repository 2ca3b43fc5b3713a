"""`carom install-ai-toolkit DIR [--uninstall]`: installs Carom's extension in an ai-toolkit checkout, or
removes the extension.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from ..tools import ai_toolkit_folder as folder
from .host_python import host_python
from .shell_text import typed

ROOT = Path(__file__).resolve().parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carom install-ai-toolkit` to ``parser``."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="ai-toolkit's folder: the one with run.py")
    parser.add_argument("--uninstall", action="store_true", help="remove the extension again")


def run(args: argparse.Namespace) -> int:
    """Install or remove the extension, print the result, and return the exit code."""
    if args.uninstall:
        was_there = folder.uninstall(args.dir)
        _print(args.json, {"installed": False, "removed": was_there}, [
            "removed; ai-toolkit is as before" if was_there else "nothing to remove: Carom is not installed there",
        ])  # fmt: skip
        return 0
    place = folder.install(args.dir)
    python = host_python(args.dir.absolute())
    sees = None if python is None else _imports_carom(python)
    lines = [
        f"installed: {place}",
        "now write `offload: bouncing` under `model:` in a job's YAML (docs/ai-toolkit.md)",
    ]
    if python is not None and sees is False:
        # No package index has Carom, so pip can only install it from a checkout; name this one if the program
        # runs from one.
        source = str(ROOT) if (ROOT / "README.md").exists() else "PATH_OF_CAROMS_CHECKOUT"
        lines += [
            "Carom is not in ai-toolkit's own Python yet; run this:",
            typed([*python, "-m", "pip", "install", source]),
        ]
    facts = {"installed": True, "path": str(place), "python": python and python[0], "python_has_carom": sees}
    _print(args.json, facts, lines)
    return 0


def _imports_carom(python: list[str]) -> bool | None:
    """Return whether the interpreter can import Carom; None where it does not run."""
    try:
        found = subprocess.run([*python, "-c", "import carom"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.returncode == 0


def _print(as_json: bool, facts: dict, lines: list[str]) -> None:
    """Print ``facts`` as JSON, or ``lines`` as text."""
    if as_json:
        print(json.dumps(facts))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
