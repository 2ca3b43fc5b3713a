"""What `carom doctor` says of AMD: the checks of scripts/rocm_setup.py, as findings.

The script is loaded from its file, because it must also run where Carom does not import; it changes nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from .diagnosis import NOTHING, Finding

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "rocm_setup.py"
VENDOR = "0x1002"  # AMD's PCI vendor id
_VERDICTS = {"ok": "good", "warn": "fair", "bad": "missing", "skip": "info"}


def present(build: str, drm: str = "/sys/class/drm", kfd: str = "/dev/kfd") -> bool:
    """Whether AMD's checks concern this machine: a ROCm build of torch, or an AMD card that Linux shows."""
    if build.startswith("rocm") or Path(kfd).exists():
        return True
    try:
        vendors = [path.read_text("ascii")[:16].strip() for path in Path(drm).glob("card*/device/vendor")]
    except (OSError, ValueError):
        return False
    return VENDOR in vendors


def examine(prove: bool, script: Path = SCRIPT) -> dict[str, Any]:
    """The script's report (`--check --json`); ``prove``: also try comfy-aimdo's ROCm library in a child process."""
    if not script.is_file():
        return _unavailable(
            f"{script.name} is not there: this installation of Carom came without its scripts"
        )
    try:
        spec = importlib.util.spec_from_file_location("rocm_setup", script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        before = list(sys.path)
        try:
            spec.loader.exec_module(module)
            report: dict[str, Any] = module.examine(sys.executable, prove=prove)
        finally:
            sys.path[:] = before
    except Exception as error:  # the doctor answers whatever the machine is like
        return _unavailable(f"the checks stopped: {type(error).__name__}: {error}")
    return report


def _unavailable(why: str) -> dict[str, Any]:
    remedy = "reinstall Carom, or run scripts/rocm_setup.py from a checkout"
    return {
        "ok": False,
        "findings": [{"check": "scripts", "level": "skip", "what": why, "remedy": remedy, "link": ""}],
    }


def findings(report: dict[str, Any]) -> list[Finding]:
    """A report's findings in the doctor's words."""
    found = []
    for item in report.get("findings", ()):
        remedy = " ".join(part for part in (item.get("remedy", ""), item.get("link", "")) if part)
        verdict = _VERDICTS.get(item.get("level", ""), "info")
        found.append(Finding(f"AMD: {item['check']}", item["what"], verdict, remedy or NOTHING, dict(item)))
    return found
