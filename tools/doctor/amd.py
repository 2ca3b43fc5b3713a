"""The checks of AMD GPUs and ROCm for `carom doctor`: runs scripts/rocm_setup.py and converts its report to
findings.

The script is loaded by its file path and not imported as part of Carom, because the script must also run
where Carom cannot be imported. The checks change nothing on the machine.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from .diagnosis import NOTHING, Finding

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "rocm_setup.py"
VENDOR = "0x1002"  # AMD's PCI vendor id
_VERDICTS = {"ok": "good", "warn": "fair", "bad": "missing", "skip": "info"}


def has_amd(build: str, drm: str = "/sys/class/drm", kfd: str = "/dev/kfd") -> bool:
    """Return whether the AMD checks apply here: torch is a ROCm ``build``, or Linux shows an AMD GPU.

    ``drm`` and ``kfd``: the paths under which Linux lists graphics cards, and AMD's compute device.
    """
    if build.startswith("rocm") or Path(kfd).exists():
        return True
    try:
        vendors = [path.read_text("ascii")[:16].strip() for path in Path(drm).glob("card*/device/vendor")]
    except (OSError, ValueError):
        return False
    return VENDOR in vendors


def run_checks(prove: bool, script: Path = SCRIPT) -> dict[str, Any]:
    """Run the checks of ``script`` and return its report, the same as `--check --json` prints.

    ``prove``: also try comfy-aimdo's ROCm library in a child process. Never raises: a failure becomes a
    finding.
    """
    if not script.is_file():
        return _unavailable(f"{script.name} is missing: this installation of Carom came without its scripts")
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
    except Exception as error:  # `carom doctor` must report on any machine, also where the checks fail
        return _unavailable(f"the checks stopped: {type(error).__name__}: {error}")
    return report


def _unavailable(why: str) -> dict[str, Any]:
    """Return a report with one finding, which says why the checks did not run."""
    remedy = "reinstall Carom, or run scripts/rocm_setup.py from a checkout"
    return {
        "ok": False,
        "findings": [{"check": "scripts", "level": "skip", "what": why, "remedy": remedy, "link": ""}],
    }


def findings(report: dict[str, Any]) -> list[Finding]:
    """Convert the findings in the script's ``report`` to `Finding` objects."""
    found = []
    for item in report.get("findings", ()):
        remedy = " ".join(part for part in (item.get("remedy", ""), item.get("link", "")) if part)
        verdict = _VERDICTS.get(item.get("level", ""), "info")
        found.append(Finding(f"AMD: {item['check']}", item["what"], verdict, remedy or NOTHING, dict(item)))
    return found
