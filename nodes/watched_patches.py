"""Raises the OutOfMemory that ComfyUI's weight adapters catch.

An adapter (LoRA, LoHa and others) catches every exception, logs it as an error and returns the weight without its
patch. If memory is short for one weight, the image is wrong. The adapter logs while it handles the exception, so a
filter of the root logger finds the exception there. The filter raises it again if a watched object applies the patch.
The pass then runs again with fewer weights on the device. Passes without an error run none of this code.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ..core.streaming.pass_retry import OutOfMemory

_MARK = "_carom_watched"  # attribute of a watched object
_owners: dict[int, weakref.ref[Any]] = {}  # the watched objects, by id


def watch(owner: Any) -> Callable[[], Any]:
    """Let an OutOfMemory that is caught and logged in a method of ``owner`` be raised; return an undo function.

    ``owner``: a patch function of a weight, a module that patches its own weight (GGUF), or a patcher.
    """
    key = id(owner)
    owner.__dict__[_MARK] = True
    _owners[key] = weakref.ref(owner, lambda _: _forget(key))
    logging.getLogger().addFilter(_raise_caught)  # does nothing from the second time on

    def undo() -> None:
        owner.__dict__.pop(_MARK, None)
        _forget(key)

    return undo


@contextlib.contextmanager
def watching(owner: Any) -> Iterator[None]:
    """Context in which ``owner`` is watched (see `watch`)."""
    undo = watch(owner)
    try:
        yield
    finally:
        undo()


def _forget(key: int) -> None:
    """Note that an object is watched no more, or was freed. The filter goes with the last one."""
    _owners.pop(key, None)
    if not _owners:
        logging.getLogger().removeFilter(_raise_caught)


def _raise_caught(record: logging.LogRecord) -> bool:
    """Raise the exception that the code which logs ``record`` handles, if it is an OutOfMemory of a watched object."""
    error = sys.exc_info()[1]
    try:
        if isinstance(error, OutOfMemory) and _watched(sys._getframe(1)):
            raise error
    finally:
        del error  # the error refers to this frame
    return True


def _watched(frame: FrameType | None) -> bool:
    """Return whether ``frame`` or one of its callers runs a method of a watched object."""
    while frame is not None:
        if _MARK in getattr(frame.f_locals.get("self"), "__dict__", ()):
            return True
        frame = frame.f_back
    return False
