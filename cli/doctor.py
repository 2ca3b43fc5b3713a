"""`carom doctor`: measures this machine and says what to fix. The exit code is 0 whatever is found."""

from __future__ import annotations

import argparse
import json
import textwrap

from ..tools.doctor import amd, hardware, windows
from ..tools.doctor.diagnosis import Finding, diagnose

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carom doctor` to ``parser``."""
    parser.add_argument(
        "--folder",
        default=".",
        help="folder of the models, whose drive is measured (default: the current folder)",
    )
    parser.add_argument(
        "--no-disk", action="store_true", help="do not measure the drive (it writes a temporary 256 MiB)"
    )
    parser.add_argument(
        "--amd",
        action="store_true",
        help="check and prove torch for ROCm, also where neither it nor an AMD card is found",
    )


def run(args: argparse.Namespace) -> int:
    """Probe the machine, print the findings, and return exit code 0."""
    # The proof runs first and in a child process: a GPU that crashes the child is not used in this process.
    rocm = amd.examine() if args.amd or amd.has_amd() else None
    unsafe = None
    if rocm is not None and rocm.died:
        version = rocm.facts.get("torch")
        unsafe = hardware.TorchInstall(version, "rocm" if version else "none")
    found = hardware.probe(args.folder, disk=not args.no_disk, extras=rocm is None, unsafe=unsafe)
    findings = diagnose(found) + windows.examine(found.gpu)
    findings += list(rocm.findings) if rocm is not None else []
    if args.json:
        print(json.dumps({**to_dict(found, findings), "rocm": rocm and rocm.to_dict()}, indent=2))
    else:
        print(table(found, findings))
    return 0


def to_dict(found: hardware.Hardware, findings: list[Finding]) -> dict:
    """Return the JSON object that `carom doctor --json` prints, without the AMD report."""
    return {
        "schema": SCHEMA,
        "system": found.system,
        "torch": found.torch.version,
        "torch_build": found.torch.build,
        "gpu": found.gpu.name if found.gpu else None,
        "seconds": found.seconds,
        "findings": [
            {"topic": f.topic, "value": f.value, "verdict": f.verdict, "remedy": f.remedy, "data": f.data}
            for f in findings
        ],
    }


def table(found: hardware.Hardware, findings: list[Finding], width: int = 100) -> str:
    """Return the printed text: for each finding its verdict, topic and value, and below the remedy unless all
    is good.
    """
    lines = [f"carom doctor: {found.system} ({found.seconds:.1f} s)", ""]
    topic = max(len(finding.topic) for finding in findings)
    indent = " " * (9 + topic + 2)
    for f in findings:
        first = f"{f.verdict:<9}{f.topic:<{topic}}  "
        lines += textwrap.wrap(f.value, width, initial_indent=first, subsequent_indent=indent)
        if f.verdict != "good":
            lines += textwrap.wrap(
                "-> " + f.remedy, width, initial_indent=indent, subsequent_indent=indent + "   "
            )
    bad = sum(f.verdict == "poor" for f in findings)
    missing = [f.topic for f in findings if f.verdict == "missing"]
    lines += [
        "",
        f"{bad} finding{'s' * (bad != 1)} will slow Carom down; the arrows say what to do."
        if bad
        else f"Missing: {', '.join(missing)}; the arrows say what to do."
        if missing
        else "No problems found.",
    ]
    return "\n".join(lines)
