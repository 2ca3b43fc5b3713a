"""Wheels built and fetched by pip, in a temporary folder, and why pip failed where it did."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from rocm_checks import Survey
from rocm_env import numbers, record_rows
from rocm_findings import BAD, Finding
from rocm_host import Result, Runner

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
