"""Renames and deletions of files that another program holds open for a moment, which Windows refuses.

A virus scanner, a search index or a backup opens each new file for about a second. On other systems these calls succeed,
and their errors carry no ``winerror``, so nothing here waits there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_SECONDS = 3.0  # longer than a virus scanner takes for a file, and short for a person who waits
# ERROR_SHARING_VIOLATION and ERROR_LOCK_VIOLATION: another program has the file open, or a part of it locked.
_IN_USE = (32, 33)


def is_in_use(error: BaseException) -> bool:
    """Return whether Windows refused the call because another program uses the file."""
    return getattr(error, "winerror", None) in _IN_USE


def may_be_in_use(error: BaseException) -> bool:
    """Return whether the call may succeed once another program lets go of a file.

    ERROR_ACCESS_DENIED (5) is Windows' answer to the renaming of a folder in which a file is open, to a rename onto an
    open file, and to the use of a file that is deleted but still open; also where a permission is missing. `open` gives
    errno's number alone, the same one for all of these.
    """
    if is_in_use(error) or getattr(error, "winerror", None) == 5:
        return True
    return sys.platform == "win32" and isinstance(error, PermissionError)


def why_denied(error: BaseException) -> str | None:
    """Return words for an error that another program may have caused by holding a file; None for every other error."""
    if is_in_use(error):
        return "in use by another program; close that program"
    if may_be_in_use(error):
        return "access is denied: close programs that may have it open, or change its permissions"
    return None


def retry_while_in_use(action: Callable[[], T], seconds: float | None = None) -> T:
    """Call ``action`` and return its result; repeat it for ``seconds`` while another program may use a file of it.

    ``seconds``: default WAIT_SECONDS. The last error is raised.
    """
    deadline = time.monotonic() + (WAIT_SECONDS if seconds is None else seconds)
    pause = 0.02
    while True:
        try:
            return action()
        except OSError as error:
            if not may_be_in_use(error) or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Do as os.replace does, and wait while another program uses one of the two."""
    retry_while_in_use(lambda: os.replace(source, target))


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Do as os.rename does, and wait while another program uses the file, or a file in the folder."""
    retry_while_in_use(lambda: os.rename(source, target))


def unlink(path: str | os.PathLike[str]) -> None:
    """Delete a file, and wait while another program uses it. Does nothing where the file is not there."""

    def delete() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    retry_while_in_use(delete)


def write_atomically(target: Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` with a temporary path of the same suffix in the folder of ``target``, then rename the file to
    ``target``.

    Other programs thus never see a partly written file.
    """
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        write(temporary)
        replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
