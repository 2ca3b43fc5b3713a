"""Starts a Python process in the Windows shape: `python run.py [options] ARGUMENTS OF PYTHON`.

Tests start processes by `environment`, which needs no import of the shape itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def environment(
    *, memory: str = "", roots: Sequence[str] = (), symlinks: bool = True, base: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a process in the shape: ``base`` (default: this process's) with what the shape needs.

    ``memory``: "total,available,commit_limit,commit_available" in MiB; empty: those of this machine. ``roots``: further
    folders whose code sees Windows. ``symlinks``: whether symbolic links may be made (an administrator's right, or
    that of Developer Mode).
    """
    found = dict(os.environ if base is None else base)
    path = [str(HERE / "start"), *found.get("PYTHONPATH", "").split(os.pathsep)]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in path if part))
    found["CAROM_WINDOWS_SHAPE"] = "1"
    found["CAROM_WINDOWS_SHAPE_MEMORY"] = memory
    found["CAROM_WINDOWS_SHAPE_ROOTS"] = os.pathsep.join(roots)
    found["CAROM_WINDOWS_SHAPE_SYMLINKS"] = "1" if symlinks else "0"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Start Python in the Windows shape. Other arguments are Python's: -m pytest, a script, -c CODE.",
        allow_abbrev=False,
    )
    parser.add_argument("--memory", default="", help="total,available,commit limit,commit available in MiB")
    parser.add_argument("--root", action="append", default=[], help="a folder whose code sees Windows, too")
    parser.add_argument(
        "--no-symlinks", action="store_true", help="symbolic links need a privilege that is missing"
    )
    args, arguments = parser.parse_known_args()
    surroundings = environment(memory=args.memory, roots=args.root, symlinks=not args.no_symlinks)
    return subprocess.run([sys.executable, *arguments], env=surroundings).returncode


if __name__ == "__main__":
    sys.exit(main())
