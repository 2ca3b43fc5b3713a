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
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rocm_checks import AIMDO_SPEC, MIN_AIMDO, Survey
from rocm_env import digest, normal, numbers, record_rows
from rocm_findings import BAD, OK, Finding
from rocm_host import Result, Runner, describe
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

PIP_LIMIT = 1800  # seconds; a slow line fetches some 20 MB of dependencies
BIG = 64 << 20
LEFT_OUT = {
    ".git", ".venv", "venv", "env", "__pycache__", "build", "dist", "tests",
    "carom-demo", "carom-bench", "node_modules",
}  # fmt: skip
OFFLINE = (
    "NewConnectionError", "Temporary failure in name resolution", "getaddrinfo failed", "Name or service not known",
    "Network is unreachable", "ConnectTimeoutError", "Failed to establish a new connection", "ProxyError",
    "NameResolutionError", "Max retries exceeded", "Connection refused",
)  # fmt: skip


class InstallError(Exception):
    """A step failed; ``finding`` says which and why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


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


def pip(s: Survey, *args: str) -> list[str]:
    assert s.interp is not None
    return [str(s.interp.executable), "-m", "pip", "--disable-pip-version-check", "--no-input", *args]


def failure(result: Result, what: str, exit_name: str = "pip_failed") -> Finding:
    """Why pip failed, told apart by what it wrote."""
    text = result.err + "\n" + result.out
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    told = next((x for x in lines if x.startswith("ERROR")), lines[-1] if lines else "no message")[:300]
    if result.failed_to_start:
        return Finding("install", BAD, f"{what}: {result.failed_to_start}", exit=exit_name)
    if result.timed_out:
        return Finding("install", BAD, what + ": no end within the time limit.", "Try again.", exit="hang")
    if any(sign in text for sign in OFFLINE):
        remedy = "Connect, or pass a comfy-aimdo wheel with --wheel and install the rest beforehand."
        return Finding(
            "install", BAD, what + ": the package index cannot be reached.", remedy, exit="offline"
        )
    remedy = ""
    if "No module named pip" in text:
        remedy = "Run: python -m ensurepip (in a uv environment: uv pip install pip)."
    elif "externally-managed-environment" in text:
        remedy = "Make a virtual environment, or name the right Python with --python."
    elif "WinError 5" in text or "WinError 32" in text or "Access is denied" in text:
        remedy = "Close ComfyUI and every other program that uses this Python."
    elif "Permission denied" in text:
        remedy = "This folder belongs to another user; use your own virtual environment."
    elif "No space left" in text:
        return Finding("install", BAD, what + ": the disk is full.", "Make room.", exit="no_space")
    return Finding("install", BAD, f"{what}: {told}", remedy, exit=exit_name)


def copy_checkout(root: Path, target: Path) -> None:
    """The checkout's own files, without links, environments, build leftovers and big files."""

    def skip(folder: str, names: list[str]) -> list[str]:
        out = []
        for name in names:
            path = Path(folder) / name
            hidden = name.startswith(".")
            if (
                hidden
                or name in LEFT_OUT
                or name.endswith(".egg-info")
                or path.is_symlink()
                or path.is_file()
                and path.stat().st_size > BIG
            ):
                out.append(name)
        return out

    shutil.copytree(str(root), str(target), ignore=skip)


def build_wheel(s: Survey, runner: Runner, work: Path) -> Path:
    """Carom's wheel, built from a copy so that the checkout stays as it is."""
    if not (s.host.root / "pyproject.toml").is_file():
        what = f"{s.host.root} is not a checkout of Carom (no pyproject.toml)."
        raise InstallError(
            Finding("install", BAD, what, "Run the script of a checkout.", exit="build_failed")
        )
    source, target = work / "source", work / "wheels"
    copy_checkout(s.host.root, source)
    command = pip(s, "wheel", "--no-deps", "-w", str(target), str(source))
    tools = s.dists.get("setuptools", [])
    if tools and numbers(tools[0].version) >= (70, 1):  # the first that builds wheels without `wheel`
        command.insert(-1, "--no-build-isolation")  # nothing to download
    result = runner.run(command, PIP_LIMIT)
    built = sorted(target.glob("carom-*.whl")) if result.good else []
    if not built:
        raise InstallError(failure(result, "Carom's wheel could not be built", "build_failed"))
    return built[0]


def same_as_installed(s: Survey, wheel: Path) -> bool:
    """Whether the installed Carom has exactly the files of this wheel."""
    found = s.dists.get("carom", [])
    if not found:
        return False
    have = {name: hashed for name, hashed, _ in record_rows(found[0])}
    with zipfile.ZipFile(str(wheel)) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".dist-info/RECORD")), None)
        rows = archive.read(name).decode("utf-8").splitlines() if name else []
    wanted: dict[str, str] = {}
    for row in rows:
        path, _, rest = row.rpartition(",")[0].rpartition(",")
        if ".dist-info/" not in path:
            wanted[path.strip('"')] = rest
    mine = {n: h for n, h in have.items() if ".dist-info/" not in n and n in wanted}
    return bool(wanted) and mine == wanted


def fetch_aimdo(s: Survey, runner: Runner, spec: str, work: Path) -> Path:
    if s.wheel:
        return s.wheel
    target = work / "aimdo"
    result = runner.run(
        pip(s, "download", "--no-deps", "--only-binary", ":all:", "-d", str(target), spec), PIP_LIMIT
    )
    wheels = sorted(target.glob("comfy_aimdo-*.whl")) if result.good else []
    if not wheels:
        raise InstallError(failure(result, "comfy-aimdo could not be fetched"))
    with zipfile.ZipFile(str(wheels[0])) as archive:
        if "comfy_aimdo/" + s.library not in archive.namelist():
            what = f"The index gave {wheels[0].name}, which holds no {s.library}."
            remedy = "Use a 64-bit Python, or pass the right wheel with --wheel."
            raise InstallError(Finding("install", BAD, what, remedy, exit="aimdo_no_library"))
    return wheels[0]


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
