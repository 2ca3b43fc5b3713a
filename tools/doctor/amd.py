"""The AMD part of `carom doctor`: which torch and HIP runtime are here, and a proof that Carom works with them.

Nothing is installed or changed. What touches the GPU runs in child processes with time limits (amd_proof.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.common.sizes import format_size
from ...core.host.probe import is_wsl
from .amd_proof import MARK
from .diagnosis import NOTHING, Finding
from .extras import OptionalBackend, probe_aimdo

VENDOR = "0x1002"  # AMD's PCI vendor id
ROOT = Path(__file__).resolve().parents[2]
# Seconds for the proof and for the trial of Triton. The first import of torch under a virus scanner, and the
# first compilation, each take up to a minute.
PROOF_SECONDS, TRITON_SECONDS = 180.0, 120.0
REINSTALL = "install torch for ROCm anew: docs/amd.md has the commands"
# Ends without unloading native libraries: a crash of theirs at that point proves nothing.
PROOF = "importlib.import_module('carom.tools.doctor.amd_proof').main()\nimport os; os._exit(0)"
TRITON = "importlib.import_module('carom.tools.doctor.amd_proof').try_triton()"
# Step of the proof -> what it does, and the remedy where it fails.
STEPS = {
    "torch": ("import torch", REINSTALL),
    "gpu": ("compute on the GPU", ""),  # see `_driver_remedy`
    "runtime": ("find the HIP runtime", REINSTALL),
    "pin": (
        "pin host memory",
        "Carom copies from pageable memory instead, which is slower; raise the limit (ulimit -l, a container's "
        "memlock), or close programs that hold RAM",
    ),
    "train": ("stream and train a model", "update AMD's driver and torch; then report it with carom doctor --amd --json"),
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a child process ended. ``code``: None where it exceeded its time limit; ``error``: the end of stderr."""

    code: int | None
    events: tuple[dict[str, Any], ...]
    error: str = ""


@dataclass(frozen=True)
class Report:
    """What was found. ``died``: a child process crashed or hung, so torch must not be used in this process."""

    findings: tuple[Finding, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    died: bool = False

    @property
    def ok(self) -> bool:
        """Whether Carom is proven to work: slowness and missing options do not count."""
        return not any(finding.verdict == "missing" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `carom doctor --json` prints under "rocm"."""
        findings = [
            {"check": f.topic, "level": f.verdict, "what": f.value, "remedy": f.remedy} for f in self.findings
        ]
        return {"ok": self.ok, **self.facts, "findings": findings}


def has_amd(drm: str = "/sys/class/drm", kfd: str = "/dev/kfd", torch: str = "torch") -> bool:
    """Return whether an AMD GPU is likely here: torch is built for ROCm, or Linux lists such a card.

    ``drm`` and ``kfd``: the paths under which Linux lists graphics cards, and AMD's compute device; ``torch``: the
    name of torch's package, whose version.py is read and not imported.
    """
    spec = importlib.util.find_spec(torch)
    if spec is not None and spec.origin:
        with contextlib.suppress(OSError):
            text = Path(spec.origin).with_name("version.py").read_text("utf-8", "replace")
            if "+rocm" in text or re.search(r"""^hip\b[^=\n]*=\s*["']""", text, re.M):
                return True
    if Path(kfd).exists():
        return True
    try:
        vendors = [path.read_text("ascii")[:16].strip() for path in Path(drm).glob("card*/device/vendor")]
    except (OSError, ValueError):
        return False
    return VENDOR in vendors


def rocm_version(torch_version: str, hip: str) -> str:
    """Return ROCm's version as torch's local version names it, else the first two numbers of HIP's.

    AMD's builds may name a date ("2.9.1+rocmsdk20260116") and builds of distributions nothing; HIP's version begins
    as ROCm's does.
    """
    named = re.search(r"\+rocm(\d+(?:\.\d+)+)", torch_version)
    return named[1] if named else ".".join(re.findall(r"\d+", hip)[:2])


def run_child(statements: str, seconds: float) -> Ended:
    """Run ``statements`` in a new Python that has this Carom as `carom`, and return the events that it printed.

    Output goes to files: a process that the child started cannot hold this one up by keeping a pipe open.
    """
    load = (
        "import importlib, importlib.util as u, sys\n"
        f"spec = u.spec_from_file_location('carom', {str(ROOT / '__init__.py')!r}, submodule_search_locations=[{str(ROOT)!r}])\n"
        "sys.modules['carom'] = package = u.module_from_spec(spec)\nspec.loader.exec_module(package)\n"
    )
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", load + statements],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=os.name == "posix",
            )  # fmt: skip
        except OSError as error:
            return Ended(1, (), str(error))
        code: int | None = None
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if child.returncode is None:
                _kill(child)
        for file in (out, err):
            file.seek(0)
        lines = out.read().decode("utf-8", "replace").splitlines()
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that a crash cut off
                if line.startswith(MARK):
                    events.append(json.loads(line[len(MARK) :]))
        last = (err.read().decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return Ended(code, tuple(events), last[:300])


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill ``child`` and its children, and give up on one that the driver does not let go."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "win32":
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(child.pid)], capture_output=True, timeout=30)
        else:
            os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        child.kill()
        child.wait(10)


def cause_of_death(code: int) -> str:
    """Return what an exit code says of a process that died in native code, "" for an ordinary exit."""
    status = code & 0xFFFFFFFF
    if -64 <= code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    if status == 0xC0000005:
        return "access violation (0xC0000005)"
    return f"native failure 0x{status:08X}" if status >= 0xC0000000 else ""


def examine(
    child: Callable[[str, float], Ended] = run_child,
    aimdo: Callable[[str], OptionalBackend] = probe_aimdo,
    seconds: float = PROOF_SECONDS,
) -> Report:
    """Run the proof, then the trials of Triton and comfy-aimdo, and return what was found.

    ``child`` and ``aimdo`` run a child process and probe comfy-aimdo; ``seconds``: time limit of the proof.
    """
    ended = child(PROOF, seconds)
    passed = {event["step"]: event for event in ended.events if event["state"] == "ok"}
    findings = [*_torch(passed.get("torch")), *judge(ended, seconds)]
    died = "end" not in passed and (ended.code is None or bool(cause_of_death(ended.code)))
    gpu = passed.get("gpu", {})
    facts = {
        "torch": passed.get("torch", {}).get("version"), "hip": passed.get("torch", {}).get("hip"),
        "gpu": gpu.get("name"), "arch": gpu.get("arch"), "vram_bytes": gpu.get("vram_bytes"),
        "runtimes": passed.get("runtime", {}).get("loaded", []),
    }  # fmt: skip
    if is_wsl():
        findings.append(Finding("AMD: WSL", "under WSL less memory can be pinned, and comfy-aimdo is known to fail", "fair",
                                "use Windows or Linux itself where that matters"))  # fmt: skip
    if "train" in passed:
        findings += [_triton(gpu.get("arch", ""), child), _aimdo(aimdo)]
    return Report(tuple(findings), facts, died)


def _torch(event: dict[str, Any] | None) -> list[Finding]:
    """Return the finding on torch's build; none where torch did not import."""
    if event is None:
        return []
    version, hip = str(event["version"]), event["hip"]
    if not hip:
        return [Finding("AMD: torch", f"torch {version} is not built for ROCm", "missing", REINSTALL)]
    return [Finding("AMD: torch", f"torch {version}, ROCm {rocm_version(version, hip)}", "good", NOTHING)]


def judge(ended: Ended, seconds: float) -> list[Finding]:
    """Return the findings on the proof's steps. A child that died or hung is a finding on the step it was in."""
    found, state = [], {event["step"]: event for event in ended.events}
    built = state.get("torch", {}).get("hip")
    for step, event in state.items():
        if step == "gpu" and event["state"] == "failed" and not built:
            continue  # another build of torch is the reason, and a finding of its own
        what, remedy = STEPS.get(step, ("", ""))
        if event["state"] == "failed":
            verdict = "poor" if step == "pin" else "missing"
            found.append(
                Finding(f"AMD: {step}", f"cannot {what}: {event['why']}", verdict, remedy or _driver_remedy())
            )
        elif event["state"] == "start":
            found.append(_stuck(what, ended, seconds))
    passed = {step: event for step, event in state.items() if event["state"] == "ok"}
    if "runtime" in passed:
        found.append(_runtime(passed["runtime"]["loaded"], passed["runtime"]["brought"]))
    if "train" in passed:
        gpu = passed["gpu"]
        result = "bit for bit" if passed["train"]["exact"] else "as exactly as resident runs repeat"
        found.append(Finding("AMD: proof", f"{gpu['name']} ({gpu['arch']}, {format_size(gpu['vram_bytes'])}) streams and "
                             f"trains {result}", "good", NOTHING))  # fmt: skip
        if gpu["integrated"]:
            found.append(Finding("AMD: memory", "integrated GPU: its memory is the system's RAM", "info",
                                 "budgets of VRAM and RAM share that memory, and Carom counts it once"))  # fmt: skip
    elif state and not any(finding.verdict == "missing" for finding in found) and built:
        found.append(_stuck("run the proof to its end", ended, seconds))
    if not state:
        found.append(Finding("AMD: proof", f"Carom does not start: {ended.error or ended.code}", "missing",
                             "install what Carom needs: pip install -r requirements.txt"))  # fmt: skip
    return found


def _stuck(what: str, ended: Ended, seconds: float) -> Finding:
    """Return the finding on a step that neither succeeded nor failed."""
    if ended.code is None:
        return Finding("AMD: proof", f"no answer within {seconds:g} s from the attempt to {what}", "missing",
                       "close programs that use the GPU, restart the machine, and run this again")  # fmt: skip
    how = cause_of_death(ended.code) or f"exit code {ended.code}: {ended.error}"
    return Finding("AMD: proof", f"the attempt to {what} crashed: {how}", "missing",
                   "update AMD's driver and torch for ROCm; docs/amd.md lists known crashes")  # fmt: skip


def _runtime(loaded: Sequence[str], brought: Sequence[str]) -> Finding:
    """Return the finding on the HIP runtimes: one may be loaded, and that of torch's packages if they brought one."""
    folders = {_folder(path) for path in loaded}
    foreign = [path for path in loaded if _folder(path) not in {_folder(mine) for mine in brought}]
    if len(folders) > 1 or (brought and foreign):
        return Finding("AMD: runtime", f"not only torch's own HIP runtime is loaded: {', '.join(foreign or loaded)}", "missing",
                       "remove copied amdhip64 libraries and take other ROCm folders out of PATH or LD_LIBRARY_PATH")  # fmt: skip
    if not loaded:
        return Finding(
            "AMD: runtime", "the system does not tell which HIP runtime is loaded", "info", NOTHING
        )
    return Finding("AMD: runtime", loaded[0], "good", NOTHING)


def _folder(path: str) -> str:
    """Return a library's folder in a form that compares: without links, and without case on Windows."""
    if re.match(r"[A-Za-z]:[\\/]", path):
        return path.replace("\\", "/").rpartition("/")[0].lower()
    return str(Path(path).resolve().parent)


def _driver_remedy(kfd: str = "/dev/kfd") -> str:
    """Return what to do where torch sees no GPU: the driver, the user's rights, or the card is the reason."""
    if sys.platform != "win32" and not is_wsl():
        if not os.path.exists(kfd):
            return "load the amdgpu driver; in a container pass --device=/dev/kfd --device=/dev/dri"
        if not os.access(kfd, os.R_OK | os.W_OK):
            return "let your user open the GPU: sudo usermod -aG render,video $USER; then log in again"
    return "update AMD's driver, unset HIP_VISIBLE_DEVICES, and see docs/amd.md for the cards that torch supports"


def _triton(arch: str, child: Callable[[str, float], Ended]) -> Finding:
    """Return the finding on Triton, tried in a process of its own where it supports ``arch``."""
    from ...core.codec.backends import triton_supports

    without = "weights are sent unpacked, with equal results; docs/amd.md says how to install Triton"
    if importlib.util.find_spec("triton") is None:
        return Finding("AMD: Triton", "not installed", "info", without)
    if not triton_supports(arch):
        return Finding("AMD: Triton", f"not tried: it does not support {arch}", "info", NOTHING)
    reason, crashed = try_triton(child)
    if not reason:
        return Finding("AMD: Triton", "decodes packed weights bit for bit", "good", NOTHING)
    if not crashed:
        return Finding("AMD: Triton", f"does not work: {reason}", "fair", without)
    return Finding("AMD: Triton", f"does not work: {reason}", "poor", "uninstall Triton, or set codec: raw")


def try_triton(child: Callable[[str, float], Ended] = run_child) -> tuple[str, bool]:
    """Return why Triton cannot decode packed weights on this GPU ("" if it can), and whether the trial crashed or hung."""
    ended = child(TRITON, TRITON_SECONDS)
    if ended.events:
        return ended.events[-1]["reason"], False
    if ended.code is None:
        return f"no answer within {TRITON_SECONDS:g} s", True
    return cause_of_death(ended.code) or ended.error, True


def _aimdo(probe: Callable[[str], OptionalBackend]) -> Finding:
    """Return the finding on comfy-aimdo, which is optional: inside ComfyUI it belongs to ComfyUI."""
    if comfyui_beside(Path(sys.prefix), ROOT):
        return Finding("comfy-aimdo", "ComfyUI owns comfy-aimdo in its process: Carom uses torch's allocator there", "info", NOTHING)  # fmt: skip
    found = probe("rocm")
    if found.usable:
        return Finding("comfy-aimdo", found.reason, "good", NOTHING)
    return Finding("comfy-aimdo", found.reason, "info" if found.reason == "not installed" else "fair",
                   "Carom uses torch's allocator instead, with equal results")  # fmt: skip


def comfyui_beside(prefix: Path, root: Path) -> bool:
    """Return whether the Python in ``prefix`` or the checkout ``root`` belongs to a ComfyUI."""
    near = (prefix.parent, prefix.parent / "ComfyUI")
    return root.parent.name == "custom_nodes" or any((folder / "custom_nodes").is_dir() for folder in near)
