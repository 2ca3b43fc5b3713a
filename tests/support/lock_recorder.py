"""Records in which order the locks of `core/` are acquired.

tests/conftest.py calls `install` before it imports carom where CAROM_RECORD_LOCKS names a folder. The locks that files of `core/`
create are recorded from then on. At the end of the process a file in that folder holds a line for each pair of a lock that was held
and a lock that a thread then waited for, as ``OUTER INNER GATE[,GATE...]``. A gate was taken before OUTER whenever the pair occurred;
``-`` where there is none. A line with one name: that lock exists.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

_REAL = {name: getattr(threading, name) for name in ("Lock", "RLock", "Condition")}
CREATION = re.compile(
    r"=\s*threading\.(?:R?Lock|Condition)\b(?!\(lock\))"
)  # but no `Condition` of an existing lock
_TARGET = re.compile(r"\s*(?:self\.)?(\w+)(?:, [\w.]+)*(?:\s*:[^=]*)?\s*=[^=]")
_held = threading.local()
_edges: dict[tuple[str, str], set[str]] = {}  # a pair of locks, and its gates
_names: set[str] = set()


class RecordedLock:
    """A lock that notes which locks its thread held when the thread asked for it."""

    def __init__(self, lock: Any, name: str) -> None:
        self._lock, self._name = lock, name

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock. A non-blocking attempt records no edge, because it cannot wait for another thread."""
        stack = _held.__dict__.setdefault("stack", [])
        if blocking and not any(lock is self for lock in stack):
            for at, lock in enumerate(stack):
                gates = {each._name for each in stack[:at]}
                _edges.setdefault((lock._name, self._name), gates).intersection_update(gates)
        done = self._lock.acquire(blocking, timeout)
        if done:
            stack.append(self)
        return done

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()
        stack = _held.__dict__.setdefault("stack", [])
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is self:
                del stack[at]
                return

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()

    # What `threading.Condition` asks of its lock. A thread that waits counts as holding the lock: it takes no other.
    def _is_owned(self) -> bool:
        return self._lock._is_owned()

    def _release_save(self) -> Any:
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""
        return self._lock.locked()


def assigned_name(line: str) -> str:
    """Return the name that a line of code gives to the lock that it creates. Raises ValueError if the line gives it none."""
    if target := _TARGET.match(line):
        return target[1]
    raise ValueError(f"assign the lock to a name of its own: {line.strip()}")


def locks_of(core: Path) -> set[str]:
    """Return the names of all locks that files under ``core`` create, as `install` records them."""
    return {
        f"{path.relative_to(core).as_posix()}:{assigned_name(line)}"
        for path in core.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if CREATION.search(line)
    }


def _name(kind: Any, core: Path) -> str | None:
    """Return the name of a lock that is being created, ``FILE:ATTRIBUTE``; None for locks that no file of `core/` creates."""
    frame, name = sys._getframe(3), None
    if frame.f_code.co_filename.startswith("<") and dataclasses.is_dataclass(
        owner := frame.f_locals.get("self")
    ):
        name = next(f.name for f in dataclasses.fields(owner) if f.default_factory is kind)
        file = Path(sys.modules[type(owner).__module__].__file__ or "")
    else:
        file = Path(frame.f_code.co_filename)
    try:
        file = file.resolve().relative_to(core)
    except ValueError:
        return None
    if name is None:
        name = assigned_name((core / file).read_text("utf-8").splitlines()[frame.f_lineno - 1])
    return f"{file.as_posix()}:{name}"


def install(core: Path, to: str) -> None:
    """Record the locks that files under ``core`` create from now on. Write what was seen to a file in ``to`` at the end."""
    core = core.resolve()

    def wrapped(kind: Any, make: Any) -> Any:
        name = _name(wrapped_by_kind[kind], core)
        if name is None:
            return None
        _names.add(name)
        return RecordedLock(make(), name)

    def new_lock() -> Any:
        return wrapped("Lock", _REAL["Lock"]) or _REAL["Lock"]()

    def new_rlock() -> Any:
        return wrapped("RLock", _REAL["RLock"]) or _REAL["RLock"]()

    def new_condition(lock: Any = None) -> Any:
        if lock is None:
            lock = wrapped("Condition", _REAL["RLock"])
        return _REAL["Condition"](lock)

    wrapped_by_kind = {"Lock": new_lock, "RLock": new_rlock, "Condition": new_condition}
    threading.Lock, threading.RLock, threading.Condition = new_lock, new_rlock, new_condition  # type: ignore

    @atexit.register
    def write() -> None:
        pairs = {
            f"{outer} {inner} {','.join(sorted(gates)) or '-'}" for (outer, inner), gates in _edges.items()
        }
        Path(to, f"{os.getpid()}.txt").write_text("".join(f"{line}\n" for line in sorted({*_names, *pairs})))
