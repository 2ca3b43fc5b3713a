"""One run of rocm_setup.py: the options, the modes, and what is printed in the end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rocm_checks import Survey
from rocm_env import ask, find_python
from rocm_findings import BAD, EXITS, SKIP, Finding, Report, exits_help
from rocm_host import Host, Runner, pinned_cap
from rocm_install import install, plan, steps_of
from rocm_packages import comfyui_folder, survey
from rocm_proof import run_probe

HERE = Path(__file__).resolve().parent
DEFAULT_TIMEOUT = 180  # seconds: a first import of torch under a virus scanner takes a minute


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocm_setup.py",
        description="Sets up Carom and comfy-aimdo for an AMD GPU and proves the result. Without --check or "
        "--dry-run it builds Carom from this checkout and installs it; nothing is changed unless the proof "
        "passes, and torch is never installed.",
        epilog="exit codes (the first thing missing decides):\n" + exits_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="only look and prove; change nothing")
    mode.add_argument(
        "--dry-run", action="store_true", help="say what would be done; change and prove nothing"
    )
    parser.add_argument(
        "--fix", action="store_true", help="also rename libraries that older guides had copied"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--python", metavar="PATH", help="the Python (or its venv folder) to set up")
    parser.add_argument(
        "--wheel", metavar="FILE", help="install this comfy-aimdo wheel instead of fetching one"
    )
    parser.add_argument("--comfyui", metavar="DIR", help="put Carom's node into this ComfyUI")
    parser.add_argument(
        "--ai-toolkit", metavar="DIR", help="use the Python of this ai-toolkit, and put the extension into it"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="limit of the proof (%(default)s)",
    )
    return parser


def look(host: Host, runner: Runner, options: argparse.Namespace) -> tuple[Survey, list[Finding]]:
    """All checks that only look."""
    comfyui = Path(options.comfyui).absolute() if options.comfyui else None
    if comfyui:
        comfyui = comfyui_folder(comfyui)[0] or comfyui
    toolkit = Path(options.ai_toolkit).absolute() if options.ai_toolkit else None
    wheel = Path(options.wheel).absolute() if options.wheel else None
    path, how = find_python(host, options.python, [f for f in (comfyui, toolkit) if f])
    interp, problem = None, how
    if path is not None:
        interp, result = ask(path.absolute(), how, runner)
        if interp is None:
            lines = (result.failed_to_start or result.err or result.out).strip().splitlines()
            why = (
                "it did not answer in time"
                if result.timed_out
                else (lines[-1][:300] if lines else "no answer")
            )
            problem = f"{path} does not start: {why}"
    s = Survey(host, interp, problem, comfyui, toolkit, wheel)
    return s, survey(s)


def run(options: argparse.Namespace, host: Host, runner: Runner, say=lambda text: None) -> Report:
    """One run in the mode the options ask for."""
    mode = "check" if options.check else "dry-run" if options.dry_run else "fix" if options.fix else "install"
    report = Report(mode)
    s, found = look(host, runner, options)
    report.findings = found
    if s.interp is not None:
        report.python = {
            "executable": str(s.interp.executable),
            "version": ".".join(map(str, s.interp.version)),
            "found": s.interp.how,
            "portable": s.interp.portable,
        }
    bad = report.bad()
    if mode == "check":
        _prove(report, s, runner, options.timeout)
    elif mode == "dry-run":
        blocking = [f for f in bad if not (f.repairable or (f.needs_fix and options.fix))]
        report.findings = [f for f in found if f.level != BAD or f in blocking]
        if not blocking:
            report.planned = steps_of(s, plan(s, options.fix))
    else:
        blocking = [f for f in bad if not (f.repairable or (f.needs_fix and options.fix))]
        if blocking:
            # What an install run would have put right is not what stands in the way.
            report.findings = [f for f in found if f.level != BAD or f in blocking]
            return report
        kept = [f for f in found if f.level != BAD]
        proof, uses, changed = install(s, plan(s, options.fix), runner, options.timeout, say)
        failed = [f for f in proof if f.level == BAD]
        if not failed:
            _, after = look(host, runner, options)
            kept = after
        report.findings, report.changed, report.uses = kept + proof, changed, _limits(uses, s)
    return report


def _limits(uses: dict[str, Any], s: Survey) -> dict[str, Any]:
    return {**uses, "pinned_cap_bytes": pinned_cap(s.host)} if uses else {}


def _prove(report: Report, s: Survey, runner: Runner, timeout: float) -> None:
    stops = [f.check for f in report.bad() if f.check in ("python", "system", "torch", "runtime", "driver")]
    if stops:
        what = f"not run: it needs {stops[0]} first"
        report.findings.append(Finding("proof", SKIP, what))
        return
    proof, uses = run_probe(s, runner, timeout)
    # A package known to be missing is one finding, not two.
    known = {f.exit for f in report.bad()}
    report.findings += [
        f for f in proof if f.level != BAD or f.exit not in known or f.exit not in ("no_aimdo", "no_carom")
    ]
    report.uses = _limits(uses, s)


def examine(
    python: str | None = None, prove: bool = True, timeout: float = DEFAULT_TIMEOUT
) -> dict[str, Any]:
    """The --check report as a dict, for `carom doctor`. Changes nothing; raises nothing but KeyboardInterrupt.

    ``python``: interpreter to look at (default: the running one); ``prove``: also run the probe.
    """
    options = build_parser().parse_args(
        ["--check", "--timeout", str(timeout), "--python", python or sys.executable]
    )
    host, runner = Host.here(HERE.parent), Runner()
    try:
        if prove:
            return run(options, host, runner).to_dict()
        s, found = look(host, runner, options)
        return Report("check", found).to_dict()
    except Exception as error:  # a report must come, whatever the machine is like
        return internal(error).to_dict()


def internal(error: BaseException) -> Report:
    what = f"An error of this script: {type(error).__name__}: {error}."
    return Report(
        "failed",
        [
            Finding(
                "script", BAD, what, "Please report it with the output of --check --json.", exit="internal"
            )
        ],
    )


def main(argv: list[str] | None = None, host: Host | None = None, runner: Runner | None = None) -> int:
    """Run and print; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name outside the console's code page must not raise
            stream.reconfigure(errors="backslashreplace")
    options = build_parser().parse_args(argv)
    if options.timeout <= 0 or options.timeout != options.timeout or options.timeout > 86400:
        build_parser().error("--timeout must be between 0 and 86400 seconds")

    def say(text: str) -> None:
        print("... " + text, file=sys.stderr, flush=True)

    try:
        report = run(options, host or Host.here(HERE.parent), runner or Runner(), say)
    except KeyboardInterrupt:
        print("interrupted; nothing was left half done", file=sys.stderr)
        return EXITS["interrupted"].code
    except Exception as error:  # the promise: never a traceback
        report = internal(error)
    print(report.to_json() if options.json else report.to_text())
    return report.exit_code()
