"""What a check found, the exit code it leads to, and how a report is printed.

Standard library only, and no syntax newer than Python 3.8: these files must start on whatever
interpreter a user happens to have, in order to say what is wrong with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

OK, WARN, BAD, SKIP = "ok", "warn", "bad", "skip"


class Exit(NamedTuple):
    code: int
    meaning: str


# Name -> exit code. 0 to 2 are the CLI's; 10-29 the environment, 30-39 installing, 40-49 the proof.
EXITS: dict[str, Exit] = {
    "ready": Exit(0, "everything asked for is there and proven"),
    "bad_use": Exit(2, "unknown option, or options that contradict each other"),
    "no_python": Exit(10, "no usable Python: none found, or it does not start"),
    "platform": Exit(11, "this system, processor or Python version cannot run ROCm's torch"),
    "no_torch": Exit(12, "torch is not installed in that Python"),
    "torch_cpu": Exit(13, "torch is a build without GPU support"),
    "torch_cuda": Exit(14, "torch is a build for another vendor's GPUs"),
    "torch_old": Exit(15, "torch is older than 2.8 or was built for ROCm older than 7"),
    "no_sdk": Exit(16, "the HIP runtime torch needs is missing (rocm_sdk_core)"),
    "driver": Exit(17, "the kernel driver cannot be reached (Linux: /dev/kfd)"),
    "no_space": Exit(18, "too little disk space"),
    "no_aimdo": Exit(20, "comfy-aimdo is not installed"),
    "aimdo_no_library": Exit(21, "comfy-aimdo is installed without its ROCm library"),
    "aimdo_damaged": Exit(22, "comfy-aimdo's files are not those its wheel brought"),
    "stale_dlls": Exit(23, "HIP or aimdo libraries copied by hand shadow the real ones"),
    "no_carom": Exit(24, "Carom is not installed in that Python, or is incomplete"),
    "bad_folder": Exit(25, "the ComfyUI or ai-toolkit folder is not one, or holds another carom"),
    "no_extension": Exit(26, "Carom's extension is not in that ai-toolkit"),
    "bad_wheel": Exit(27, "the file given with --wheel is not a comfy-aimdo wheel for this system"),
    "pip_failed": Exit(30, "pip is missing or failed"),
    "offline": Exit(31, "pip could not reach the package index"),
    "build_failed": Exit(32, "Carom's own wheel could not be built"),
    "init_false": Exit(40, "proof: comfy-aimdo did not load (its init returned False)"),
    "device_false": Exit(41, "proof: comfy-aimdo refused the device (its init_devices returned False)"),
    "access_violation": Exit(42, "proof: the process died in native code (access violation or signal)"),
    "wrong_runtime": Exit(43, "proof: a HIP runtime other than torch's was loaded, or two of them"),
    "hang": Exit(44, "proof: no answer within the time limit"),
    "wrong_result": Exit(45, "proof: bytes or results were not exactly right"),
    "no_gpu": Exit(46, "proof: torch sees no GPU"),
    "probe_failed": Exit(47, "proof: it stopped with an ordinary error"),
    "address_space": Exit(48, "proof: no GPU address space could be reserved"),
    "internal": Exit(70, "an error of this script itself"),
    "interrupted": Exit(130, "interrupted; what had been started was undone"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``exit`` names the entry of EXITS that a BAD finding leads to.

    ``repairable``: an install run puts it right by itself. ``needs_fix``: only with --fix.
    """

    check: str
    level: str
    what: str
    remedy: str = ""
    link: str = ""
    exit: str = "ready"
    repairable: bool = False
    needs_fix: bool = False


@dataclass
class Report:
    """All findings in the order of the checks, what was changed, and what Carom will use."""

    mode: str
    findings: list[Finding] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    python: dict[str, object] = field(default_factory=dict)
    uses: dict[str, object] = field(default_factory=dict)

    def bad(self) -> list[Finding]:
        return [f for f in self.findings if f.level == BAD]

    def exit_name(self) -> str:
        """The first thing that is missing decides."""
        bad = self.bad()
        return bad[0].exit if bad else "ready"

    def exit_code(self) -> int:
        return EXITS[self.exit_name()].code

    def to_dict(self) -> dict[str, object]:
        return {
            "ok": not self.bad(),
            "exit_code": self.exit_code(),
            "exit_name": self.exit_name(),
            "exit_meaning": EXITS[self.exit_name()].meaning,
            "mode": self.mode,
            "python": self.python,
            "findings": [
                {
                    "check": f.check,
                    "level": f.level,
                    "what": f.what,
                    "remedy": f.remedy,
                    "link": f.link,
                    "exit_name": f.exit if f.level == BAD else "",
                    "exit_code": EXITS[f.exit].code if f.level == BAD else 0,
                    "repairable": f.repairable,
                }
                for f in self.findings
            ],
            "missing": [f.what for f in self.bad()],
            "planned": self.planned,
            "changed": self.changed,
            "carom_will_use": self.uses,
        }

    def to_json(self) -> str:
        """ASCII only: no console code page can spoil it."""
        return json.dumps(self.to_dict(), indent=1, default=str)

    def to_text(self) -> str:
        width = max([len(f.check) for f in self.findings] + [5])
        lines = []
        for f in self.findings:
            mark = {OK: "ok  ", WARN: "warn", BAD: "MISS", SKIP: "-   "}[f.level]
            lines.append(f"{mark}  {f.check:{width}}  {f.what}")
            pad = " " * (width + 8)
            if f.remedy:
                lines.append(pad + "-> " + f.remedy)
            if f.link and f.level in (WARN, BAD):
                lines.append(pad + "   " + f.link)
        for title, items in (("Would do:", self.planned), ("Changed:", self.changed)):
            if items:
                lines += ["", title] + ["  " + item for item in items]
        if self.uses:
            lines += ["", "Carom will use:"]
            for key, value in self.uses.items():
                if key.endswith("_bytes") and isinstance(value, int):
                    key, value = key[: -len("_bytes")], f"{value / (1 << 30):.1f} GiB"
                lines.append(f"  {key:13} {value}")
        name = self.exit_name()
        verdict = (
            "NOT READY"
            if name != "ready"
            else "NOTHING STANDS IN THE WAY"
            if self.mode == "dry-run"
            else "READY"
        )
        lines += ["", f"{verdict} (exit code {EXITS[name].code}: {name})"]
        bad = self.bad()
        if bad:
            lines.append(bad[0].what + (" " + bad[0].remedy if bad[0].remedy else ""))
        if not self.changed:
            lines.append("Nothing was changed.")
        return "\n".join(lines)


def exits_help() -> str:
    """The exit codes, one a line, for --help and docs/amd.md."""
    return "\n".join(f"  {e.code:3}  {name:17} {e.meaning}" for name, e in EXITS.items())
