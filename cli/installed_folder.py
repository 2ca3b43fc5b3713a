"""A link to a folder, or a copy of one, that takes the place of an earlier one, and nothing is lost on the way.

The new one is made under another name, and the earlier one is renamed before it is deleted. If a program has a file of
the earlier one open, which on Windows forbids both, the earlier one stays as it is. What an interrupted run left over is
deleted by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.common.errors import CaromError
from ..core.common.held_files import may_be_in_use, rename, retry_while_in_use, unlink

# A file in each folder that was copied, which may therefore be deleted. It is deleted last.
MARK = ".carom-copied"
_JUNCTION = 0xA0000003  # IO_REPARSE_TAG_MOUNT_POINT


def is_link(path: Path) -> bool:
    """Return whether ``path`` is a symbolic link or a junction (Windows), also a broken one."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", 0) == _JUNCTION


def is_marked(path: Path) -> bool:
    """Return whether ``path`` is a folder that `copy_folder` made."""
    return not is_link(path) and (path / MARK).is_file()


def link_folder(source: Path, target: Path) -> None:
    """Make ``target`` lead to the folder ``source``: a junction on Windows, which needs no privilege, or else a symbolic
    link.

    Raises OSError or NotImplementedError where neither is possible.
    """
    if sys.platform == "win32":
        import _winapi

        with contextlib.suppress(OSError):
            _winapi.CreateJunction(str(source), str(target))
            # A junction to a network drive is made without an error, and leads nowhere. One that is on a network drive
            # is followed by the server, whose folder it would lead to.
            if os.path.samefile(source, target):
                return
        if os.path.lexists(target):
            target.rmdir()
    target.symlink_to(source, target_is_directory=True)


def copy_folder(source: Path, target: Path, ignore: Callable[[Any, list[str]], set[str]]) -> None:
    """Copy the folder ``source`` to ``target``, and mark the copy; ``ignore``: as shutil.copytree takes it."""
    shutil.copytree(source, target, ignore=ignore)
    (target / MARK).write_text("Copied by carom install-comfyui, which may remove this folder.\n", "utf-8")


def put(target: Path, make: Callable[[Path], Any]) -> Any:
    """Put what ``make(path)`` makes at ``path`` to ``target``, in place of the link or the copy there; return its result.

    Raises CaromError where a program has a file of the earlier one open. Nothing has changed then.
    """
    new = _beside(target, "new")
    _delete(new)
    try:
        result = make(new)
        aside = _move_aside(target)
        try:
            rename(new, target)
        except OSError:
            if aside is not None:
                rename(aside, target)
            raise
    except BaseException:
        _delete(new)
        raise
    delete_leftovers(target)
    return result


def take(target: Path) -> bool:
    """Remove the link or the copy ``target``, if it is there; return whether all of it is deleted.

    Raises CaromError where a program has a file of it open. Nothing has changed then.
    """
    _move_aside(target)
    return delete_leftovers(target)


def delete_leftovers(target: Path) -> bool:
    """Delete what earlier runs renamed, as far as it is not in use; return whether all of it is deleted."""
    for path in target.parent.glob(_beside(target, "old-*").name):
        if is_link(path) or is_marked(path):
            _delete(path)
    return not any(target.parent.glob(_beside(target, "old-*").name))


def _beside(target: Path, which: str) -> Path:
    """Return a path beside ``target``. ComfyUI loads no folder whose name ends like this."""
    return target.with_name(f"{target.name}-{which}.disabled")


def _move_aside(target: Path) -> Path | None:
    """Rename what is at ``target``, if anything, and return the new path. Raises CaromError where it is in use."""
    if not os.path.lexists(target):
        return None
    paths = (_beside(target, f"old-{number}") for number in itertools.count())
    aside = next(path for path in paths if not os.path.lexists(path))
    try:
        rename(target, aside)
    except OSError as error:
        if not may_be_in_use(error):
            raise
        raise CaromError(
            f"{target} cannot be moved, a program may have a file of it open ({error}); nothing was changed. Close "
            "ComfyUI, and editors and terminals that are in this folder, then run this again"
        ) from error
    return aside


def _delete(path: Path) -> None:
    """Delete a link or a folder, its mark last, so that the next run knows what is left if a file is in use."""

    def delete() -> None:
        for entry in [entry for entry in path.iterdir() if entry.name != MARK]:
            if entry.is_dir() and not is_link(entry):
                shutil.rmtree(entry)
            else:
                entry.unlink()
        unlink(path / MARK)
        path.rmdir()

    try:
        if is_link(path):
            unlink(path)
        elif path.is_dir():
            retry_while_in_use(delete)
    except OSError:
        pass
