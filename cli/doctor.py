"""`carom doctor`: what this machine can do, and what to fix. Exit code 0 whatever the verdicts."""

from __future__ import annotations

import argparse
import json
import textwrap

from ..core import amd, hardware
from ..core.diagnosis import Finding, diagnose

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", default=".", help="where models lie; its drive is measured (default: here)"
    )
    parser.add_argument(
        "--no-disk", action="store_true", help="do not measure the drive (it writes a temporary 256 MiB)"
    )
    parser.add_argument(
        "--amd", action="store_true", help="AMD's checks too where no AMD card or ROCm build of torch is seen"
    )


def run(args: argparse.Namespace) -> int:
    found = hardware.probe(args.folder, disk=not args.no_disk)
    findings = diagnose(found)
    rocm = None
    if args.amd or amd.present(found.torch.build):
        # The proof starts a child process with torch: only where ROCm can be there at all.
        rocm = amd.examine(prove=found.torch.build.startswith("rocm"))
        findings += amd.findings(rocm)
    if args.json:
        print(json.dumps({**to_dict(found, findings), "rocm": rocm}, indent=2))
    else:
        print(table(found, findings))
    return 0


def to_dict(found: hardware.Hardware, findings: list[Finding]) -> dict:
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
    """One block a finding: verdict, topic and value; below it the remedy where there is something to do."""
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
        f"{bad} thing{'s' * (bad != 1)} will be felt; the arrows say what to do."
        if bad
        else f"Missing: {', '.join(missing)}; the arrows say what to do."
        if missing
        else "Nothing stands in the way.",
    ]
    return "\n".join(lines)
