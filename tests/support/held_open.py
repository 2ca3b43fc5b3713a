"""Files that another program holds open, as Windows has them: they cannot be renamed or deleted, nor can their folders.

The errors are those that Microsoft documents: ERROR_SHARING_VIOLATION (32) for the file itself, ERROR_ACCESS_DENIED (5) for
the renaming of a folder above it. On Linux, Python gives no OSError a `winerror`, so it is set here.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def windows_error(number: int, path: object) -> PermissionError:
    """Return the PermissionError of a call on ``path`` that Windows refused with ``number``."""
    error = PermissionError(errno.EACCES, f"[WinError {number}]", str(path))
    error.winerror = number  # type: ignore[attr-defined,unused-ignore]
    return error


class HeldOpen:
    """Makes os.rename, os.replace, os.link, os.unlink and os.rmdir refuse what Windows would refuse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: dict[str, int | None] = {}
        self.refused = 0
        for name, renames in (
            ("rename", 1),
            ("replace", 2),
            ("link", 1),
            ("unlink", 0),
            ("remove", 0),
            ("rmdir", 0),
        ):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name), renames))

    def hold(self, path: str | os.PathLike[str], times: int | None = None) -> None:
        """Refuse calls on the file ``path`` and renames of folders above it, ``times`` times (None: until `release`)."""
        self._held[os.path.realpath(path)] = times

    def release(self) -> None:
        """Close all files again."""
        self._held.clear()

    def _refusing(self, call, renames: int):
        def checked(*paths, dir_fd=None, **options):
            for number, path in enumerate(paths[: max(renames, 1)]):
                self._check(_full(path, dir_fd), folders=renames > 0 and number == 0)
            return call(*paths, **options, **({} if dir_fd is None else {"dir_fd": dir_fd}))

        return checked

    def _check(self, path: str, folders: bool) -> None:
        for held, times in list(self._held.items()):
            if times == 0 or not (held == path or (folders and Path(path) in Path(held).parents)):
                continue
            if times is not None:
                self._held[held] = times - 1
            self.refused += 1
            raise windows_error(32 if held == path else 5, path)


def _full(path: str | os.PathLike[str], dir_fd: int | None) -> str:
    """Return the full path, of which the last part may be a link."""
    folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
    full = os.path.join(folder, os.fspath(path))
    return os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
