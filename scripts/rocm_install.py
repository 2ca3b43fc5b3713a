"""Build, stage, prove, and only then install: whatever fails before the last step changes nothing.

Wheels are built and fetched into a temporary folder, unpacked into another, and the probe runs on
those. Libraries copied by hand are renamed for the probe and get their names back if it fails.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rocm_checks import AIMDO_SPEC, MIN_AIMDO, Survey
from rocm_env import digest, normal, numbers
from rocm_findings import BAD, OK, Finding
from rocm_host import Runner, describe
from rocm_packages import (
    ASIDE,
    COPY_MARK,
    EXTENSION_TEXT,
    check_aimdo,
    comfyui_folder,
    extension_state,
    node_state,
)
from rocm_proof import run_probe
from rocm_wheels import (
    PIP_LIMIT,
    InstallError,
    build_wheel,
    copy_checkout,
    failure,
    fetch_aimdo,
    pip,
    same_as_installed,
)


@dataclass
class Work:
    """What an install run has to do, found out before anything is done."""

    aimdo: str  # "" | requirement | path of a wheel
    missing: list[str]
    stale: list[Path]
    node: Path | None = None
    toolkit: Path | None = None  # that lacks the extension, or has an older one


def plan(s: Survey, fix: bool) -> Work:
    aimdo = "" if all(f.level == OK for f in check_aimdo(s)) else AIMDO_SPEC
    if aimdo and s.comfyui:
        aimdo = host_pin(s.comfyui) or aimdo
    if s.wheel:
        aimdo = str(s.wheel)
    node = None
    folder = comfyui_folder(s.comfyui)[0] if s.comfyui else None
    if folder and node_state(folder, s.host.root)[0] in ("absent", "copied"):
        node = folder
    toolkit = s.ai_toolkit if s.ai_toolkit and extension_state(s.ai_toolkit)[0] in ("absent", "old") else None
    return Work(aimdo, missing_requirements(s), s.stale if fix else [], node, toolkit)


def host_pin(folder: Path) -> str:
    """The comfy-aimdo release that ComfyUI's own requirements.txt asks for, if it holds a ROCm library."""
    try:
        text = (folder / "requirements.txt").read_text("utf-8", "replace")[: 1 << 16]
    except OSError:
        return ""
    match = re.search(r"^\s*comfy[-_]aimdo\s*==\s*([0-9][0-9.]*)\s*(?:#.*)?$", text, re.M)
    return "comfy-aimdo==" + match[1] if match and numbers(match[1]) >= MIN_AIMDO else ""


def missing_requirements(s: Survey) -> list[str]:
    """Lines of requirements.txt that no installed distribution meets. torch is never among them."""
    wanted = []
    try:
        lines = (s.host.root / "requirements.txt").read_text("utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?", line.split("#")[0])
        if not match or normal(match[1]) == "torch":
            continue
        have = s.dists.get(normal(match[1]), [])
        if not have or (match[2] and numbers(have[0].version) < numbers(match[2])):
            wanted.append(line.split("#")[0].strip())
    return wanted


class Undo:
    """Steps back, run last to first when something fails. ``stays``: what cannot be taken back."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.finish: list[Callable[[], object]] = []
        self.stays: list[str] = []

    def back(self) -> None:
        while self.steps:
            try:
                self.steps.pop()()
            except OSError:
                continue


def set_aside(paths: list[Path], undo: Undo) -> list[str]:
    told = []
    for path in paths:
        target = path.with_name(path.name + ASIDE)
        number = 1
        while os.path.lexists(str(target)):
            number += 1
            target = path.with_name(f"{path.name}{ASIDE}{number}")
        try:
            os.replace(str(path), str(target))
        except OSError as error:
            what = f"{path} could not be renamed: {error.strerror or error}."
            remedy = "Close the programs that use it, or rename it by hand."
            raise InstallError(Finding("copies", BAD, what, remedy, exit="stale_dlls")) from error
        undo.steps.append(partial(os.replace, str(target), str(path)))
        told.append(f"renamed {path} to {target.name}")
    return told


def place_node(folder: Path, root: Path, undo: Undo) -> str:
    """Link the checkout into ComfyUI's custom_nodes; where links are not allowed, copy it."""
    target = folder / "custom_nodes" / "carom"
    state, _ = node_state(folder, root)
    if state not in ("absent", "copied"):
        return ""
    try:
        if state == "absent":
            if sys.platform == "win32":
                import _winapi

                _winapi.CreateJunction(str(root), str(target))  # needs no privilege, unlike a link
            else:
                os.symlink(str(root), str(target), target_is_directory=True)
            undo.steps.append(lambda: (os.rmdir if os.name == "nt" else os.unlink)(str(target)))
            return f"linked {target} to this checkout"
    except (OSError, NotImplementedError, AttributeError):
        pass
    fresh = target.with_name(".carom-new")
    old = target.with_name(".carom-old")
    try:
        for left in (fresh, old):
            shutil.rmtree(str(left), ignore_errors=True)
        copy_checkout(root, fresh)
        (fresh / COPY_MARK).write_text(str(root), "utf-8")
        if state == "copied" and _same_tree(fresh, target):
            shutil.rmtree(str(fresh), ignore_errors=True)
            return ""
        if state == "copied":
            os.replace(str(target), str(old))
            undo.steps.append(lambda: os.replace(str(old), str(target)))
            undo.finish.append(lambda: shutil.rmtree(str(old), ignore_errors=True))
        os.replace(str(fresh), str(target))
        undo.steps.append(lambda: shutil.rmtree(str(target), ignore_errors=True))
    except OSError as error:
        shutil.rmtree(str(fresh), ignore_errors=True)
        what = f"Carom's node could not be put into {target.parent}: {error.strerror or error}."
        raise InstallError(
            Finding("comfyui", BAD, what, "Check who may write there.", exit="bad_folder")
        ) from error
    return f"copied this checkout to {target}"


def place_extension(folder: Path, undo: Undo) -> str:
    """Carom's extension in ai-toolkit: a few lines, guarded, so that every job runs as without it if it fails."""
    state, place = extension_state(folder)
    if state not in ("absent", "old"):
        return ""
    target, fresh = place / "__init__.py", place / "__init__.py.new"
    try:
        if state == "absent":
            place.mkdir()
            undo.steps.append(lambda: shutil.rmtree(str(place), ignore_errors=True))
        else:
            before = target.read_text("utf-8")
            undo.steps.append(lambda: target.write_text(before, "utf-8"))
        fresh.write_text(EXTENSION_TEXT, "utf-8")
        os.replace(str(fresh), str(target))
    except OSError as error:
        what = f"Carom's extension could not be put into {place.parent}: {error.strerror or error}."
        raise InstallError(
            Finding("ai-toolkit", BAD, what, "Check who may write there.", exit="bad_folder")
        ) from error
    return f"put Carom's extension into {place}"


def _same_tree(fresh: Path, old: Path) -> bool:
    """Whether every file of ``fresh`` lies unchanged in ``old``, and nothing that was deleted since."""

    def files(folder: Path) -> dict[str, Path]:
        every = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {str(p.relative_to(folder)): p for p in every}

    left, right = files(fresh), files(old)
    return left.keys() == right.keys() and all(digest(left[n]) == digest(right[n]) for n in left)


def steps_of(s: Survey, todo: Work) -> list[str]:
    """What --dry-run prints."""
    lines = [f"rename {p} (older guides had it copied there)" for p in todo.stale]
    lines.append(f"build Carom's wheel from {s.host.root} in a temporary folder")
    if todo.aimdo and not s.wheel:
        lines.append("fetch " + todo.aimdo)
    lines.append("prove the result in a child process, on a staged copy")
    if todo.missing:
        lines.append(describe(pip(s, "install", "--constraint", "<torch as it is>", *todo.missing)))
    wheels = ["carom (if it differs)"] + ([todo.aimdo] if todo.aimdo else [])
    lines.append(describe(pip(s, "install", "--no-deps", "--force-reinstall", *wheels)))
    if todo.node:
        lines.append(f"link this checkout into {todo.node / 'custom_nodes'}")
    if todo.toolkit:
        lines.append(f"put Carom's extension into {todo.toolkit / 'extensions'}")
    return lines


def install(s: Survey, todo: Work, runner: Runner, timeout: float, say: Callable[[str], None]):
    """Do it. Returns (findings, what Carom uses, what changed); undoes what it can when a step fails."""
    undo = Undo()
    work = Path(tempfile.mkdtemp(prefix="carom-"))
    try:
        result = runner.run(pip(s, "--version"), 120)
        if not result.good:
            raise InstallError(failure(result, "pip does not run in that Python"))
        say("building Carom's wheel")
        wheel = build_wheel(s, runner, work)
        wheels = [] if same_as_installed(s, wheel) else [wheel]
        if todo.aimdo:
            say("fetching comfy-aimdo")
            wheels.append(fetch_aimdo(s, runner, todo.aimdo, work))
        changed = set_aside(todo.stale, undo)
        stage = None
        if wheels or todo.missing:
            stage = work / "stage"
            argv = pip(s, "install", "--no-deps", "--target", str(stage), *map(str, wheels), *todo.missing)
            result = runner.run(argv, PIP_LIMIT)
            if not result.good:
                raise InstallError(failure(result, "The packages could not be staged"))
        say(f"proving the result (up to {timeout:.0f} s)")
        found, uses = run_probe(s, runner, timeout, stage)
        bad = [f for f in found if f.level == BAD]
        if bad:
            undo.back()
            return found, uses, []
        told = place_node(todo.node, s.host.root, undo) if todo.node else ""
        changed += [told] if told else []
        told = place_extension(todo.toolkit, undo) if todo.toolkit else ""
        changed += [told] if told else []
        changed += _commit(s, todo, runner, work, wheels, undo, say)  # last: pip has no way back
        for finish in undo.finish:
            finish()
        return found, uses, changed
    except InstallError as error:
        undo.back()
        return [error.finding], {}, undo.stays
    except BaseException:
        undo.back()
        raise
    finally:
        shutil.rmtree(str(work), ignore_errors=True)


def _commit(s, todo, runner, work, wheels, undo, say) -> list[str]:
    """The one step that writes into the environment. torch is pinned to what is there."""
    changed: list[str] = []
    if todo.missing:
        say("installing " + ", ".join(todo.missing))
        constraint = work / "torch.txt"
        constraint.write_text(f"torch=={s.torch.version}\n", "utf-8")
        result = runner.run(pip(s, "install", "--constraint", str(constraint), *todo.missing), PIP_LIMIT)
        if not result.good:
            raise InstallError(failure(result, "Carom's dependencies could not be installed"))
        names = [re.split(r"[<>=!~ ]", line)[0] for line in todo.missing]
        new = [n for n in names if normal(n) not in s.dists]
        if new:
            undo.steps.append(lambda: runner.run(pip(s, "uninstall", "-y", *new), PIP_LIMIT))
        undo.stays += ["updated " + n for n in names if n not in new]
        changed.append("installed " + ", ".join(todo.missing))
    if wheels:
        say("installing " + ", ".join(w.name for w in wheels))
        argv = pip(s, "install", "--no-deps", "--force-reinstall", *map(str, wheels))
        result = runner.run(argv, PIP_LIMIT)  # pip itself rolls back a broken install
        if not result.good:
            raise InstallError(failure(result, "The packages could not be installed"))
        changed += ["installed " + w.name for w in wheels]
    return changed
