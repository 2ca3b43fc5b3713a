"""`carom install-comfyui DIR`: installs this package in the custom_nodes folder of a ComfyUI, or removes the
package again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.common.errors import CaromError
from .host_python import host_python
from .installed_folder import copy_folder, delete_leftovers, is_link, is_marked, link_folder, put, take
from .shell_text import typed

NAME = "carom"
LEAST = (0, 16)  # the first ComfyUI version with the node interface that Carom uses
_LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "tests", "benchmarks", "build", "dist", "*.egg-info", "venv*", "carom-demo"
)


@dataclass(frozen=True)
class Installation:
    """The result of the command. ``how``: "linked", "copied", "present", "removed" or "absent"."""

    how: str
    target: str
    comfyui: str
    version: str
    next_step: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carom install-comfyui` to ``parser``."""
    parser.add_argument(
        "dir", metavar="DIR", help="the ComfyUI folder (the one with main.py), or its portable folder"
    )
    parser.add_argument(
        "--uninstall", action="store_true", help="remove Carom again; nothing else is changed"
    )
    parser.add_argument("--copy", action="store_true", help="copy the files instead of linking this folder")


def run(args: argparse.Namespace) -> int:
    """Install or remove the nodes, print the result, and return exit code 0."""
    root = find_comfyui(Path(args.dir))
    done = uninstall(root) if args.uninstall else install(root, copy=args.copy)
    if args.json:
        print(json.dumps(asdict(done), indent=2))
    else:
        print(f"{done.how}: {done.target}" + (f" (ComfyUI {done.version})" if done.version else ""))
        if done.next_step:
            print(done.next_step)
    return 0


def find_comfyui(folder: Path) -> Path:
    """Return the folder that contains custom_nodes: ``folder`` itself, or `ComfyUI` in a portable
    installation.

    Raises ValueError where ``folder`` is not a ComfyUI.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the ComfyUI folder, the one with main.py in it")
    for place in (folder, folder / "ComfyUI"):
        if (place / "custom_nodes").is_dir() or (
            (place / "main.py").is_file() and (place / "comfy").is_dir()
        ):
            return place
    raise ValueError(
        f"{folder} is no ComfyUI: it has neither custom_nodes nor main.py and comfy; give the folder that main.py is in"
    )


def version_of(root: Path) -> str:
    """Return ComfyUI's version; "" where the folder has none, such as a data folder given with
    --base-directory.
    """
    try:
        found = re.search(
            r"""__version__\s*=\s*["']([^"']+)""", (root / "comfyui_version.py").read_text("utf-8")
        )
    except OSError:
        return ""
    return found[1] if found else ""


def source() -> Path:
    """Return this package's folder."""
    return Path(__file__).resolve().parent.parent


def install(root: Path, *, copy: bool = False) -> Installation:
    """Link this package's folder to custom_nodes/carom, or copy it where links are not possible. Idempotent.

    Raises CaromError for a ComfyUI that is too old, or where custom_nodes/carom exists and is not from this
    command.
    """
    version = version_of(root)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if version and numbers < LEAST:
        raise CaromError(
            f"ComfyUI {version} is too old for these nodes; update it to {LEAST[0]}.{LEAST[1]} or newer, then run this again"
        )
    target = root / "custom_nodes" / NAME
    if _is_source(target) and not (copy and is_link(target)):
        return Installation("present", str(target), str(root), version, "")
    if os.path.lexists(target) and not _is_ours(target):
        raise CaromError(
            f"{target} is there already and is not from this command; move it away, then run this again"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    how = put(target, lambda path: _link_or_copy(path, copy))
    python = host_python(root) or [r"path\to\python.exe" if sys.platform == "win32" else "python3"]
    step = (
        "Next, with the Python that runs ComfyUI, run this, and then restart ComfyUI:\n"
        f"{typed([*python, '-m', 'pip', 'install', '-r', str(target / 'requirements.txt')])}"
    )
    return Installation(how, str(target), str(root), version, step)


def uninstall(root: Path) -> Installation:
    """Remove the link or folder that `install` created.

    Raises CaromError for a folder that `install` did not create.
    """
    target = root / "custom_nodes" / NAME
    version = version_of(root)
    if not os.path.lexists(target):
        delete_leftovers(target)
        return Installation("absent", str(target), str(root), version, "")
    if not is_link(target) and target.resolve() == source():
        raise CaromError(
            f"{target} is this very checkout, not an installed copy; remove it by hand if you are sure"
        )
    if not _is_ours(target) and not _is_source(target):
        raise CaromError(f"{target} was not made by this command; remove it by hand if you are sure")
    step = "Restart ComfyUI."
    if not take(target):
        step += f" Files of Carom that a program has open are left in {target.parent}; run this again later."
    return Installation("removed", str(target), str(root), version, step)


def _is_source(target: Path) -> bool:
    """Return whether ``target`` is, or links to, this package's folder."""
    try:
        return target.resolve() == source() and target.exists()
    except OSError:
        return False


def _is_ours(target: Path) -> bool:
    """Return whether ``target`` is a link to a Carom checkout (also a broken link), or a folder copied by
    this command.
    """
    if is_link(target):
        return not target.exists() or _is_carom(target)
    return is_marked(target)


def _is_carom(folder: Path) -> bool:
    """Return whether ``folder`` is a Carom checkout."""
    return (folder / "nodes" / "extension.py").is_file() and (folder / "core").is_dir()


def _link_or_copy(path: Path, copy: bool) -> str:
    """Create ``path`` as a link, or as a copy where ``copy`` or a link fails; return "linked" or "copied"."""
    if not copy:
        try:
            link_folder(source(), path)
            return "linked"
        except (OSError, NotImplementedError):  # a file system without links
            pass
    copy_folder(source(), path, _LEFT_OUT)
    return "copied"
