"""Commands as text that can be pasted into a shell of the platform."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

_PLAIN = re.compile(r"[\w./\\:=+-]+")  # means the same with and without quotes in cmd and PowerShell


def typed(argv: Sequence[str], *, windows: bool = os.name == "nt", indent: str = "    ") -> str:
    """Return the command ``argv`` as indented lines: one for sh; on Windows one for cmd, and one for PowerShell where
    cmd's would not be understood there.

    PowerShell takes a quoted program for a text to print, unless ``&`` stands before it.
    """
    if not windows:
        return indent + " ".join(map(shlex.quote, argv))
    cmd = " ".join(word if _PLAIN.fullmatch(word) else f'"{word}"' for word in argv)
    if not cmd.startswith('"') and not re.search(r"[$`]", cmd):
        return indent + cmd
    powershell = " ".join(
        word if _PLAIN.fullmatch(word) else "'" + word.replace("'", "''") + "'" for word in argv
    )
    call = "& " if powershell.startswith("'") else ""
    return f"{indent}in cmd:        {cmd}\n{indent}in PowerShell: {call}{powershell}"
