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

NAME = "carom"
LEAST = (0, 16)  # the first ComfyUI version with the node interface that Carom uses
MARK = ".carom-copied"  # name of a file in each folder that this command copied, and may therefore remove
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
    if _is_source(target) and not (copy and target.is_symlink()):
        return Installation("present", str(target), str(root), version, "")
    ours = _is_ours(target)
    if (target.exists() or target.is_symlink()) and not ours:
        raise CaromError(
            f"{target} is there already and is not from this command; move it away, then run this again"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    if ours:
        _remove(target)
    how = _link_or_copy(target, copy)
    step = (
        "Next, with the Python that runs ComfyUI: "
        f"{_python_of(root)} -m pip install -r {target / 'requirements.txt'}; then restart ComfyUI."
    )
    return Installation(how, str(target), str(root), version, step)


def uninstall(root: Path) -> Installation:
    """Remove the link or folder that `install` created.

    Raises CaromError for a folder that `install` did not create.
    """
    target = root / "custom_nodes" / NAME
    version = version_of(root)
    if not target.exists() and not target.is_symlink():
        return Installation("absent", str(target), str(root), version, "")
    if not _is_ours(target) and not _is_source(target):
        raise CaromError(f"{target} was not made by this command; remove it by hand if you are sure")
    _remove(target)
    return Installation("removed", str(target), str(root), version, "Restart ComfyUI.")


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
    if target.is_symlink():
        return not target.exists() or _is_carom(target)
    return (target / MARK).is_file()


def _is_carom(folder: Path) -> bool:
    """Return whether ``folder`` is a Carom checkout."""
    return (folder / "nodes" / "extension.py").is_file() and (folder / "core").is_dir()


def _link_or_copy(target: Path, copy: bool) -> str:
    """Create ``target`` as a link, or as a copy where ``copy`` or a link fails; return "linked" or "copied"."""
    if not copy:
        try:
            target.symlink_to(source(), target_is_directory=True)
            return "linked"
        except (OSError, NotImplementedError):  # Windows without developer mode, file systems without links
            pass
    temporary = target.with_name(f".{NAME}.{os.getpid()}.tmp")
    try:
        shutil.copytree(source(), temporary, ignore=_LEFT_OUT)
        (temporary / MARK).write_text(
            "Copied by carom install-comfyui, which may remove this folder.\n", "utf-8"
        )
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return "copied"


def _remove(target: Path) -> None:
    """Delete the link or folder ``target``. Raises CaromError for this package's own folder."""
    if target.is_symlink():
        target.unlink()
    elif target.resolve() == source():
        raise CaromError(
            f"{target} is this very checkout, not an installed copy; remove it by hand if you are sure"
        )
    else:
        shutil.rmtree(target)


def _python_of(root: Path) -> str:
    """Return the interpreter that runs this ComfyUI, as found in its folder, else "python3" ("python" on
    Windows).
    """
    for place in (
        root.parent / "python_embeded" / "python.exe",
        root / "venv" / "bin" / "python",
        root / ".venv" / "bin" / "python",
        root / "venv" / "Scripts" / "python.exe",
        root / ".venv" / "Scripts" / "python.exe",
    ):
        if place.is_file():
            return str(place)
    return "python" if sys.platform == "win32" else "python3"
