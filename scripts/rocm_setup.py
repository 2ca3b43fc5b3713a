#!/usr/bin/env python3
"""Install Carom on a machine with an AMD GPU: check Python, torch and pip; `pip install`; prove; link into the host.

Standard library only. The launchers beside this file find a Python and run it. Carom goes into the host program's own
Python, if it has one, else into the one that runs this file; CAROM_PYTHON decides otherwise. torch is never installed or changed. `carom doctor --amd`
does the proving. Exit codes: 0 done, 2 wrong use, 10 no Python, 11 Python or platform, 12 torch missing or of another
build, 20 installation failed, 30 proof failed, 130 interrupted. More: docs/amd.md.
"""

from __future__ import annotations  # the syntax is that of Python 3.7, so that an old Python gets a sentence

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

ROOT = Path(os.path.abspath(__file__)).parent.parent  # links stay: one in custom_nodes says where Carom lies
WINDOWS = os.name == "nt"
# MiB of addresses for HIP on Windows (docs/amd.md). ai-toolkit reads .env before torch starts HIP.
ADDRESSES = "OCL_SET_SVM_SIZE=4194304"
DOCTOR_SECONDS = 900  # more than the doctor's own limits together
# Indexes as of 24 November 2026. AMD's: ComfyUI's README and https://rocm.docs.amd.com; PyTorch's, for Linux only:
# https://pytorch.org/get-started/locally. docs/amd.md lists the cards.
TORCH_COMMANDS = {
    "AMD's wheels": "--index-url https://stable.repo.amd.com/rocm/whl-next/ torch[device-all] torchvision[device-all]"
    " torchaudio",
    "PyTorch's wheels": "--index-url https://download.pytorch.org/whl/rocm7.2 torch torchvision torchaudio",
}
# What pip's output holds: what it means, and what to do.
PIP_FAILURES = {
    r"NewConnection|ConnectTimeout|[Nn]ame ?[Rr]esolution|getaddrinfo|Max retries|unreachable|ProxyError":
        ("the package index cannot be reached", "connect to the network, or use --wheel (docs/amd.md)"),
    r"from versions: none": ("the index, or the folder of --wheel, does not have a package that Carom needs",
                             "connect to the network, or put the named package's wheel beside that of --wheel"),
    r"WinError (5|32)|Access is denied": ("a file is in use", "close every program that uses this Python"),
    r"Permission denied|externally-managed": ("this Python may not be changed", "make a venv, or set CAROM_PYTHON"),
    r"No space left": ("the disk is full", "make room on it"),
}  # fmt: skip


class Stop(Exception):
    """The end of a run that did not succeed: the exit code, what is wrong, and what to do."""

    def __init__(self, code: int, what: str, remedy: str) -> None:
        super().__init__(what)
        self.code, self.what, self.remedy = code, what, remedy


@dataclass(frozen=True)
class Host:
    """A program that can use Carom. ``loads_checkout``: ComfyUI finds this checkout in its custom_nodes."""

    kind: str  # "ComfyUI" or "ai-toolkit"
    folder: Path
    loads_checkout: bool = False


def quote(argv: list[str], shell: str) -> str:
    """Return a command as it is typed in ``shell``: "cmd", "powershell" or "sh"."""
    if shell == "sh":
        return " ".join(map(shlex.quote, argv))
    plain = re.compile(r"[\w./\\:=+-]+")
    if shell == "cmd":
        return " ".join(word if plain.fullmatch(word) else f'"{word}"' for word in argv)
    words = [word if plain.fullmatch(word) else "'" + word.replace("'", "''") + "'" for word in argv]
    return ("& " if words[0].startswith("'") else "") + " ".join(words)


def typed(argv: list[str], windows: bool = WINDOWS) -> str:
    """Return a command for this system's shells: for sh, or for cmd and, where it differs, for PowerShell."""
    if not windows:
        return quote(argv, "sh")
    cmd, powershell = quote(argv, "cmd"), quote(argv, "powershell")
    return cmd if cmd == powershell else f"{cmd}\n    in PowerShell: {powershell}"


def pip(*arguments: str) -> list[str]:
    """Return a command of this Python's pip."""
    return [sys.executable, "-m", "pip", *arguments]


def python_of(folder: Path, windows: bool = WINDOWS) -> Path | None:
    """Return the Python that the host program in ``folder`` has for itself, or None."""
    places = [
        folder / env / ("Scripts/python.exe" if windows else "bin/python") for env in (".venv", "venv", "env")
    ]
    # The folder of portable packages, whose name is spelt so, lies beside ComfyUI's.
    places += [parent / "python_embeded/python.exe" for parent in (folder, folder.parent) if windows]
    return next((place for place in places if place.is_file()), None)


def host_in(folder: Path) -> Host | None:
    """Return the host program in ``folder``; a portable package and Comfy Desktop's base folder count as ComfyUI."""
    if all((folder / name).exists() for name in ("run.py", "toolkit", "extensions")):
        return Host("ai-toolkit", folder)
    for place in (folder, folder / "ComfyUI"):
        nodes = place / "custom_nodes"
        if nodes.is_dir() and ((place / "main.py").is_file() or (place / "models").is_dir()):
            mine = any(node.is_dir() and node.samefile(ROOT) for node in nodes.iterdir())
            return Host("ComfyUI", place, mine)
    return None


def find_host(root: Path, comfyui: str | None, ai_toolkit: str | None) -> Host | None:
    """Return the host that an option names, else the one that the checkout ``root`` lies in or beside. Raises Stop."""
    for kind, path, file in (("ComfyUI", comfyui, "main.py"), ("ai-toolkit", ai_toolkit, "run.py")):
        if path:
            found = host_in(Path(os.path.abspath(path)))
            if found is None or found.kind != kind:
                raise Stop(2, f"{path} is no {kind}", f"name the folder that holds its {file}")
            return found
    around = root.parent.parent if root.parent.name in ("custom_nodes", "extensions") else root.parent
    hosts = [host for host in (host_in(around), host_in(around / "ai-toolkit")) if host]
    if len(hosts) == 2 and hosts[0].folder != around:
        both = f"both ComfyUI and ai-toolkit lie in {around}"
        raise Stop(2, both, "name one with --comfyui or --ai-toolkit")
    return hosts[0] if hosts else None


def check_python() -> str:
    """Return a line on this Python. Raises Stop where it cannot run Carom, or no torch for ROCm exists for it."""
    name = f"Python {platform.python_version()}, {sys.executable}"
    if sys.version_info < (3, 10) or sys.maxsize < 2**32:
        remedy = "set CAROM_PYTHON to a 64-bit Python 3.10 or newer"
        raise Stop(11, f"{name}: too old, or not of 64 bit", remedy)
    if platform.system() not in ("Windows", "Linux") or platform.machine().lower() not in ("amd64", "x86_64"):
        here = f"{platform.system()} on {platform.machine()}"
        raise Stop(11, f"torch for ROCm does not exist for {here}", "use Windows or Linux on x86-64")
    return name


def check_torch(version_file: Path | None) -> str:
    """Return a line on torch, read from its version.py without importing it. Raises Stop if it is no ROCm build."""
    text = version_file.read_text("utf-8", "replace") if version_file and version_file.is_file() else ""
    values = dict(re.findall(r"""^(\w+)(?:\s*:[^=\n]+)?\s*=\s*["']([^"'\n]+)["']""", text, re.M))
    version = values.get("__version__", "")
    if version and (values.get("hip") or "+rocm" in version):
        return f"torch {version}"
    what, lines = "torch is not installed in this Python", []
    if version:
        card = nvidia_card() if values.get("cuda") else ""
        if card:
            remedy = (
                "nothing is to be done for that card: docs/windows.md and docs/comfyui.md say how to use Carom with it. "
                "For an AMD card in the same machine, make a venv of its own and name its Python in CAROM_PYTHON"
            )
            raise Stop(12, f"torch {version} runs on {card} here, and this script is for AMD cards", remedy)
        build = "CUDA" if values.get("cuda") else "XPU" if values.get("xpu") else "CPU"
        what = f"torch {version} is a {build} build, which uses no AMD GPU"
        lines = ["  first:", "    " + typed(pip("uninstall", "-y", "torch", "torchvision", "torchaudio"))]
    for whose, arguments in list(TORCH_COMMANDS.items())[: 1 if WINDOWS else 2]:
        lines += [f"  {whose}:", "    " + typed(pip("install", *arguments.split()))]
    raise Stop(12, what, "\n".join(["install torch for ROCm, then run this again", *lines]))


def nvidia_card() -> str:
    """Return the name of the first NVIDIA card that the driver lists, "" where there is no driver or no card."""
    tool = shutil.which("nvidia-smi")
    try:
        done = (
            subprocess.run([tool, "-L"], stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, timeout=20)
            if tool
            else None
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    found = (
        re.search(r"^GPU \d+: (.+?)(?: \(UUID|\r?$)", done.stdout.decode("utf-8", "replace"), re.M)
        if done
        else None
    )
    return found.group(1) if found else ""


def torch_file() -> Path | None:
    """Return the path of this Python's torch/version.py, None without torch."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).with_name("version.py") if spec and spec.origin else None


def pip_steps(wheels: list[Path], source: Path) -> list[list[str]]:
    """Return the pip commands: one for what Carom needs, one for Carom from ``source`` and for the ``wheels``.

    torch stays as it is: requirements.txt leaves it out, and the second command installs no dependencies. With
    ``wheels`` pip uses no network, looks for packages in their folders, and builds with the setuptools that is there.
    """
    folders = sorted({str(wheel.parent) for wheel in wheels})
    carom = [] if any(wheel.name.startswith("carom-") for wheel in wheels) else [str(source)]
    forced = ["--no-deps", "--force-reinstall", *(["--no-build-isolation"] if carom and wheels else [])]
    extra = ["--no-index", *(f"--find-links={folder}" for folder in folders)] if wheels else []
    return [
        pip("install", *extra, "-r", str(ROOT / "requirements.txt")),
        pip("install", *extra, *forced, *carom, *map(str, wheels)),
    ]


def run_pip(command: list[str], say: Callable[[str], None]) -> None:
    """Run pip and pass its lines to ``say``. Raises Stop with the meaning of what it printed."""
    lines: list[str] = []
    settings = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off"}
    env = {**os.environ, **settings}
    with subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=env) as child:
        for line in child.stdout or ():
            lines.append(line.decode("utf-8", "replace").rstrip())
            say("  " + lines[-1])
    if child.returncode:
        last = next(filter(None, reversed(lines)), "no message")
        what = next((line for line in lines if line.startswith("ERROR")), last)
        found = (pair for words, pair in PIP_FAILURES.items() if re.search(words, "\n".join(lines)))
        meaning, remedy = next(found, (what, "put that right"))
        raise Stop(20, f"pip failed: {meaning}", f"{remedy}, then run this again")


def copy_checkout(folder: str) -> Path:
    """Copy the checkout into ``folder`` and return the copy: building in place would leave files in the checkout."""
    skip = (".*", "__pycache__", "tests", "records", "build", "dist", "*.egg-info", "venv", "env", "carom-*")
    target = os.path.join(folder, "carom")
    return Path(shutil.copytree(str(ROOT), target, ignore=shutil.ignore_patterns(*skip)))


def doctor(start: list[str], folder: str) -> list[dict]:
    """Return the findings of `carom doctor --amd`; ``start`` is what makes Python run Carom. Raises Stop."""
    command = [sys.executable, *start, "doctor", "--amd", "--no-disk", "--json"]
    try:
        done = subprocess.run(command, stdin=DEVNULL, capture_output=True, cwd=folder, timeout=DOCTOR_SECONDS)
    except subprocess.TimeoutExpired:
        what = f"`carom doctor --amd` gave no answer within {DOCTOR_SECONDS} s"
        raise Stop(30, what, "restart the machine and run this again") from None
    out, error = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    try:
        report = json.loads(out[out.index("{") :])["rocm"]
    except (ValueError, KeyError):
        last = (error.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        remedy = "run this without --check, which installs what Carom needs"
        raise Stop(30, f"Carom does not start: {last[:300]}", remedy) from None
    if not report["ok"]:
        bad = next(finding for finding in report["findings"] if finding["level"] == "missing")
        raise Stop(30, f"{bad['check']}: {bad['what']}", bad["remedy"])
    return report["findings"]


def link(command: list[str], folder: str) -> str:
    """Run ``command``, which lets a host use the installed Carom, and return what it did. Raises Stop."""
    done = subprocess.run(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, cwd=folder)
    text = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode:
        what = f"Carom is installed, but the host does not use it: {text[-300:]}"
        raise Stop(20, what, "put that right, then repeat: " + typed(command))
    return text.splitlines()[0]


def set_addresses(host: Host, windows: bool = WINDOWS) -> str:
    """Let ai-toolkit set OCL_SET_SVM_SIZE on Windows: add it to .env, unless it stands there. Return what was done."""
    file = host.folder / ".env"
    name = ADDRESSES.partition("=")[0]
    text = file.read_text("utf-8", "surrogateescape") if file.is_file() else ""
    if not windows or host.kind != "ai-toolkit" or re.search(rf"^\s*(export\s+)?{name}\s*=", text, re.M):
        return ""
    new = file.with_name(".env.carom")
    line = ("\n" if text and not text.endswith("\n") else "") + ADDRESSES + "\n"
    try:
        new.write_text(text + line, "utf-8", "surrogateescape")
        os.replace(str(new), str(file))
    finally:
        if new.exists():  # it may hold secrets of .env
            new.unlink()
    return f"wrote {ADDRESSES} to {file}"


def run(options: argparse.Namespace, report: dict, say: Callable[[str], None]) -> str:
    """Do what the options ask for, note it in ``report``, and return the last sentence. Raises Stop."""
    wheels = [Path(os.path.abspath(wheel)) for wheel in options.wheel]
    for wheel in wheels:
        if not wheel.is_file() or wheel.suffix != ".whl":
            raise Stop(2, f"--wheel {wheel} is no wheel", "name a .whl file that exists")
    host = find_host(ROOT, options.comfyui, options.ai_toolkit)
    report["host"] = (
        f"{host.kind}, {host.folder}" if host else "no ComfyUI, no ai-toolkit around this checkout"
    )
    say(report["host"])
    report["python"] = check_python()
    say(report["python"])
    report["torch"] = check_torch(torch_file())
    say(report["torch"])
    linking = []
    if host and not host.loads_checkout:
        linking = [sys.executable, "-m", "carom", f"install-{host.kind.lower()}", str(host.folder)]
    with tempfile.TemporaryDirectory(prefix="carom-") as folder:
        if options.check:
            report["findings"] = doctor([str(ROOT)], folder)
            return "The proof passed. Nothing was changed."
        if importlib.util.find_spec("pip") is None:
            ensure = typed([sys.executable, "-m", "ensurepip", "--upgrade"])
            raise Stop(20, "this Python has no pip", f"get it, then run this again:\n    {ensure}")
        if options.dry_run:
            steps = [*pip_steps(wheels, ROOT), [sys.executable, "-m", "carom", "doctor", "--amd"], linking]
            report["planned"] = [typed(step) for step in steps if step]
            return "\n    ".join(["Would run:", *report["planned"]])
        for step in pip_steps(wheels, copy_checkout(folder)):
            run_pip(step, say)
        report["changed"].append(f"installed Carom into {sys.executable}")
        say("carom doctor --amd: the first start of torch may take minutes")
        report["findings"] = doctor(["-m", "carom"], folder)
        if linking:
            report["changed"].append(link(linking, folder))
            report["changed"] += filter(None, [set_addresses(host)] if host else [])
    if host is None:
        return "Carom is installed. Name a host with --comfyui or --ai-toolkit to let it use Carom."
    if host.kind == "ComfyUI":
        return "Carom is installed. Restart ComfyUI; the nodes are named Carom (docs/comfyui.md)."
    return "Carom is installed. Write `offload: bouncing` under `model:` in a job (docs/ai-toolkit.md)."


def run_in(python: Path, words: list[str]) -> int:
    """Run this file with another Python and return its exit code. Raises Stop where that does not start."""
    command = [str(python), os.path.abspath(__file__), *words]
    try:
        return subprocess.run(command, env={**os.environ, "CAROM_PYTHON": str(python)}).returncode
    except OSError as error:
        raise Stop(10, f"{python} does not start: {error}", "repair it, or set CAROM_PYTHON") from None


def main(argv: list[str] | None = None) -> int:
    """Run, print the result, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("rocm_setup.py", description=__doc__, allow_abbrev=False)
    mode, host = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="check and prove; change nothing")
    mode.add_argument("--dry-run", action="store_true", help="check, and print the commands that would run")
    host.add_argument("--comfyui", metavar="PATH", help="install into this ComfyUI and its Python")
    host.add_argument("--ai-toolkit", metavar="PATH", help="install into this ai-toolkit and its Python")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    wheel_help = "install this wheel too, without the network; may be repeated"
    parser.add_argument("--wheel", metavar="FILE", action="append", default=[], help=wheel_help)
    options = parser.parse_args(words)
    report: dict = dict.fromkeys(("message", "remedy", "host", "python", "torch"), "")
    report.update(exit_code=0, planned=[], changed=[], findings=[])

    def say(line: str) -> None:
        stream = sys.stderr if options.json else sys.stdout
        stream.buffer.write((line + "\n").encode(stream.encoding or "ascii", "backslashreplace"))
        stream.flush()

    try:
        python = None
        if not os.environ.get("CAROM_PYTHON"):
            target = find_host(ROOT, options.comfyui, options.ai_toolkit)
            python = python_of(target.folder) if target else None
        if python:
            return run_in(python, words)
        report["message"] = run(options, report, say)
    except Stop as stop:
        report.update(exit_code=stop.code, message=stop.what, remedy=stop.remedy)
    except KeyboardInterrupt:
        report.update(exit_code=130, message="interrupted", remedy="run this again")
    except OSError as error:
        report.update(exit_code=20, message=str(error), remedy="put that right, then run this again")
    for finding in report["findings"]:
        say(f"{finding['level']:<8}{finding['check']}: {finding['what']}")
        if finding["level"] in ("fair", "poor"):
            say(f"        -> {finding['remedy']}")
    if report["exit_code"]:
        say(f"NOT READY (exit code {report['exit_code']}): {report['message']}.\n-> {report['remedy']}")
        if report["changed"] or report["exit_code"] in (2, 10, 11, 12):
            say(f"Changed: {'; '.join(report['changed']) or 'nothing'}.")
    else:
        say(report["message"])
    if options.json:
        print(json.dumps(report))
    return report["exit_code"]


if __name__ == "__main__":
    sys.exit(main())
