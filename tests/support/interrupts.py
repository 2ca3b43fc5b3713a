"""`Interrupts`: raises KeyboardInterrupt before a line of carom.core, or counts the lines that run. `InterruptAt`: raises it
before one execution of a given line.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import carom

CORE = str(Path(carom.__file__).parent / "core")


class Interrupts:
    """A context in which the present thread is interrupted before line number ``at`` of carom.core, and which suppresses
    that KeyboardInterrupt.

    Lines that begin with ``with`` or ``try:`` are left out: Python handles no signal there, and does not run the enclosing
    handlers for an error that a trace function raises there. override_queries.py is left out too: torch's argument
    parser calls it, and turns an error in there into a failed assertion of its own.
    ``files``: the parts of ``core`` whose lines count, as the begins of their paths; by default all.
    ``count``: number of lines so far.
    ``place``: where the interrupt came; "" if it did not come. ``places``: the lines so far.
    ``error``: None, see `InterruptAt`.
    """

    def __init__(self, at: int = 0, files: tuple[str, ...] = ("",)) -> None:
        self.at, self.count, self.place = at, 0, ""
        self.places: list[str] = []
        self.error: BaseException | None = None
        self._keeps = False
        self._paths = tuple(str(Path(CORE) / file) for file in files)
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        sys.settrace(self._before)
        self.error = error if self._keeps else None
        return kind is KeyboardInterrupt

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        counts = path.startswith(self._paths) and not path.endswith("override_queries.py")
        return self._line if counts and not self.place else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not linecache.getline(path, line).strip().startswith(("with ", "try:")):
            self.count += 1
            place = f"{path[len(CORE) + 1 :]}:{line}"
            self.places.append(place)
            if self.count == self.at:
                self.place = place
                raise KeyboardInterrupt
        return self._line


class InterruptAt(Interrupts):
    """A context in which the present thread is interrupted before the ``nth`` execution of the line ``place``, one of
    `Interrupts.places`. Only the file of this line is traced. ``keeps``: whether ``error`` is the interrupt afterwards.
    """

    def __init__(self, place: str, nth: int = 1, keeps: bool = False) -> None:
        file, self._number = place.rsplit(":", 1)
        super().__init__(nth, (file,))
        self._keeps = keeps

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        return super()._line(frame, event, argument) if frame.f_lineno == int(self._number) else self._line
