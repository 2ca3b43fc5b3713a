#!/usr/bin/env python3
"""Set up Carom on AMD, Windows or Linux: look, build, prove, install; or say exactly what is missing.

Standard library only; runs where neither torch nor Carom imports. `carom doctor` loads this file and
calls `examine`. The logic lies in rocm_run.py and the files it imports; this one keeps to what every
Python can read, Python 2 too, so that the wrong one is answered with a sentence.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
if sys.version_info < (3, 7):  # noqa: UP036
    TEXT = "Python " + ".".join(map(str, sys.version_info[:2])) + " is too old: Carom needs 3.10 or newer. "
    TEXT += "Name the Python of ComfyUI or ai-toolkit: CAROM_PYTHON."
    if "--json" in sys.argv:
        TEXT = (
            '{"ok": false, "exit_code": 11, "exit_name": "platform", "missing": ["'
            + TEXT
            + '"], "changed": []}'
        )
    print(TEXT)
    sys.exit(11)
if __name__ == "__main__":
    sys.dont_write_bytecode = True  # --check leaves nothing behind, not even __pycache__
if HERE not in sys.path:  # a portable Python's ._pth leaves the script's own folder out
    sys.path.append(HERE)

from rocm_run import build_parser, examine, main  # noqa: E402

__all__ = ["build_parser", "examine", "main"]

if __name__ == "__main__":
    sys.exit(main())
