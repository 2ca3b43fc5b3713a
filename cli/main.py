"""Entry point of `carom` and `python -m carom`: runs a subcommand and converts errors to exit codes."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys

from ..core.common.commit_memory import with_advice
from ..core.common.errors import CaromError

# Command -> help line. The module of a command is imported only when that command runs.
COMMANDS: dict[str, str] = {
    "demo": "stream and train a model through a quarter of its size, and prove that nothing was lost",
    "bench": "Carom against no offloading, the roofline and installed peers, in one run",
    "doctor": "what this machine can do, and what to fix",
    "plan": "what a model would do on a card: what stays, what streams, how fast and why",
    "pack": "rewrite a checkpoint in streaming order, page-aligned and checksummed",
    "install-comfyui": "put Carom's nodes into a ComfyUI, or take them out again",
    "install-ai-toolkit": "let ai-toolkit's jobs use Carom: `offload: bouncing` in their YAML",
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser.

    With ``only``, the other commands get their help line but not their options.
    """
    package = sys.modules[(__package__ or "").rpartition(".")[0]]
    parser = argparse.ArgumentParser(
        prog="carom",
        description="Run and train models larger than the VRAM they run on.",
        epilog="Exit codes: 0 done, 1 failed, 2 bad use. Every command takes --json and --help.",
    )
    parser.add_argument("--version", action="version", version=f"carom {package.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        sub = commands.add_parser(name, help=help_line, description=help_line)
        if only in (None, name):
            module = importlib.import_module(f".{name.replace('-', '_')}", __package__)
            module.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
            sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code (0 done, 1 failed, 2 bad use)."""
    for stream in (sys.stdout, sys.stderr):
        # The code page of a pipe on Windows lacks most letters of the world: a path with one of them is printed escaped.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    asked = next((a for a in argv if not a.startswith("-")), None)
    args = build_parser(asked if asked in COMMANDS else None).parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt as error:
        message = str(error) or "nothing was left half done"
        if args.json:
            print(json.dumps({"error": "KeyboardInterrupt", "message": f"interrupted; {message}"}))
        else:
            print(f"carom: interrupted; {message}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has closed the pipe, as in `carom ... | head`
        # Redirect stdout, so that flushing the rest of the output at exit does not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CaromError, OSError, ValueError) as error:
        message = with_advice(str(error), error)
        if args.json:
            print(json.dumps({"error": type(error).__name__, "message": message}))
        else:
            print(f"carom {args.command}: {type(error).__name__}: {message}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    sys.exit(main())
