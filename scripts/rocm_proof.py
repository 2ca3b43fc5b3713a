"""Runs the probe in a child and turns what it told, or how it died, into findings."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from rocm_checks import AIMDO, GUIDE, Survey, runtimes
from rocm_env import MARK
from rocm_findings import BAD, OK, WARN, Finding
from rocm_host import Result, Runner, gib

PROBE = Path(__file__).resolve().parent / "rocm_probe.py"
STEPS = {
    "aimdo_init": "comfy-aimdo's library loads",
    "torch": "torch imports",
    "gpu": "torch sees the GPU",
    "tensor": "one tensor computes",
    "hip_runtime": "the right HIP runtime is loaded",
    "pinned": "a pinned copy there and back",
    "carom": "Carom imports",
    "stream": "a streamed layer, bit for bit",
    "aimdo_device": "comfy-aimdo takes the device",
    "vbar": "one VBAR write and read back",
    "address_space": "address space for several models",
}
PORTABLE = "Carom works without it, with its portable pool: docs/amd.md tells how."
REMEDIES = {
    "no_aimdo": ("Run an install run (without --check).", ""),
    "init_false": ("Usually a missing or wrong HIP runtime: reinstall rocm-sdk-core with torch. " + PORTABLE, ""),
    "device_false": ("In a container hooks may be refused (seccomp); RDNA1 and vGPUs are unsupported. " + PORTABLE, AIMDO + "74"),
    "access_violation": ("Update the driver and ROCm; a known fault of ROCm on Windows. " + PORTABLE, AIMDO + "45"),
    "wrong_runtime": ("Remove copied DLLs (--fix) and take other ROCm folders out of PATH.", ""),
    "hang": ("Close programs that use the GPU, restart, try again; --timeout gives more time.", ""),
    "wrong_result": ("Do not use this installation; update driver and ROCm and run again.", ""),
    "no_gpu": ("Check the driver (AMD Adrenalin 26 or newer) and that this torch was built for your card. " + GUIDE, ""),
    "no_carom": ("Install Carom, or update the checkout.", ""),
    "address_space": ("Restart; a known limit of ROCm on Windows. " + PORTABLE, AIMDO + "83"),
    "probe_failed": ("The message above is the library's own.", ""),
}  # fmt: skip


def run_probe(
    s: Survey, runner: Runner, timeout: float, staged: Path | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """(findings, what Carom will use) of one run of the probe; ``staged`` holds packages not yet installed."""
    assert s.interp is not None
    argv = [str(s.interp.executable), "-B", "-X", "faulthandler", str(PROBE), "--carom", str(s.host.root)]
    if staged:
        argv += ["--path", str(staged)]
    if s.torch:
        argv += ["--torch", s.torch.version]
    scratch = tempfile.mkdtemp(prefix="carom-proof-")  # where a crash may leave its core file
    try:
        return judge(s, runner.run(argv, timeout, cwd=Path(scratch)), timeout)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                event = json.loads(line[len(MARK) :])
            except ValueError:
                continue
            if isinstance(event, dict) and "step" in event and "state" in event:
                events.append(event)
    return events


def judge(s: Survey, result: Result, timeout: float) -> tuple[list[Finding], dict[str, Any]]:
    """Findings in the order of the steps; the step that never came back last."""
    events = read_events(result.out)
    found: list[Finding] = []
    done = {}
    for event in events:
        name = event["step"]
        if event["state"] == "ok" and name in STEPS:
            done[name] = event
            found += _passed(s, name, event)
        elif event["state"] == "fail":
            done[name] = event
            found.append(_failed(name, str(event.get("kind")), str(event.get("message"))))
    started = [e["step"] for e in events if e["state"] == "start"]
    stuck = next((n for n in reversed(started) if n not in done), None)
    ended = any(e["step"] == "end" for e in events)
    if result.failed_to_start:
        found.append(_failed("torch", "probe_failed", "the probe did not start: " + result.failed_to_start))
    elif result.timed_out:
        what = f"no answer within {timeout:g} s"
        found.append(_failed(stuck or "torch", "hang", what))
    elif stuck is not None:
        found.append(_died(stuck, result, events))
    elif not ended and not any(f.level == BAD for f in found):
        last = (result.err.strip().splitlines() or ["no message"])[-1]
        found.append(_failed("torch", "probe_failed", "the probe ended early: " + last[:300]))
    return found, _uses(s, done)


def _failed(step: str, kind: str, message: str) -> Finding:
    kind = kind if kind in REMEDIES else "probe_failed"
    remedy, link = REMEDIES[kind]
    what = "{}: no. {}".format(STEPS.get(step, step), message.rstrip(".") + ".")
    return Finding("proof: " + step, BAD, what, remedy, link, kind)


def death(code: int | None) -> str:
    """What an exit status says of a process that died in native code; empty for an ordinary exit."""
    if code is None:
        return ""
    status = code & 0xFFFFFFFF
    if status == 0xC0000005:
        return "access violation (0xC0000005)"
    if code < 0 and code > -65:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"native failure 0x{status:08X}" if status >= 0xC0000000 else ""


def _died(step: str, result: Result, events: list[dict[str, Any]]) -> Finding:
    how = death(result.code)
    if not how:
        last = (result.err.strip().splitlines() or ["no message"])[-1]
        return _failed(step, "probe_failed", f"the process ended (exit code {result.code}): {last[:300]}")
    if step == "address_space":
        got = max([e.get("reserved_bytes", 0) for e in events if e["state"] == "progress"] + [0])
        what = f"{how} after {gib(got)} were reserved"
        return _failed(step, "address_space", what)
    return _failed(step, "access_violation", how)


def _passed(s: Survey, step: str, event: dict[str, Any]) -> list[Finding]:
    check = "proof: " + step
    if step == "hip_runtime":
        return [_runtime(s, [str(p) for p in event.get("loaded", [])])]
    if step == "gpu":
        name = "{} {}, {}".format(event.get("name"), event.get("arch", ""), gib(event.get("vram_bytes")))
        return [Finding(check, OK, name)]
    if step == "vbar" and not event.get("kept", True):
        return [Finding(check, WARN, "VBAR works, but pages do not stay: VRAM is nearly full.")]
    if step == "address_space" and int(event.get("reservations", 4)) < 3:
        what = "Address space for {} models of the card's size only.".format(event["reservations"])
        return [Finding(check, WARN, what, "Carom reserves no more than it needs.", AIMDO + "83")]
    return [Finding(check, OK, STEPS[step])]


def _runtime(s: Survey, loaded: list[str]) -> Finding:
    """One HIP runtime, and that of torch's own wheels where they bring one."""
    check = "proof: hip_runtime"
    folders = {_canonical(p) for p in loaded}
    mine = {_canonical(str(p)) for p in runtimes(s)}
    if len(folders) > 1:
        what = "two HIP runtimes in one process: {}".format(", ".join(loaded))
        return _failed("hip_runtime", "wrong_runtime", what)
    if mine and folders and not folders & mine:
        return _failed("hip_runtime", "wrong_runtime", f"{loaded[0]} was loaded, not {runtimes(s)[0]}")
    if not loaded:
        return Finding(check, WARN, "Which HIP runtime is loaded could not be told.")
    return Finding(check, OK, f"the right HIP runtime: {loaded[0]}")


def _canonical(path: str) -> str:
    """The folder of a library, comparable: links resolved, one kind of slash, no case on Windows."""
    plain = path.replace("\\", "/")
    if len(plain) > 1 and plain[1] == ":":
        return plain.rsplit("/", 1)[0].lower()
    try:
        return str(Path(plain).resolve().parent)
    except (OSError, RuntimeError):
        return plain.rsplit("/", 1)[0]


def _uses(s: Survey, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ok = {name for name, event in done.items() if event["state"] == "ok"}
    if "tensor" not in ok:
        return {}
    native = "vbar" in ok
    return {
        "device": done["gpu"].get("name"),
        "vram_bytes": done["gpu"].get("vram_bytes"),
        "pool": "aimdo (comfy-aimdo's VBAR)" if native else "torch (Carom's portable pool)",
        "streaming": "proven bit-exact" if "stream" in ok else "not proven",
        "pinned_copies": "pinned" in ok,
    }
