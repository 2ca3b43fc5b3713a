"""Observation of another process: its memory, sampled while it runs, and its reads; and removal of a file from the
page cache.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class watched:
    """A context manager that samples a process's memory every ``every_s`` seconds; outside Linux only the resident
    set.
    """

    def __init__(self, pid: int, every_s: float = 0.05) -> None:
        self.pid, self.every_s = pid, every_s
        self.peaks: dict[str, int] = {}
        self.before = dict(memory_of(pid))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._used = _used()

    def __enter__(self) -> watched:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.every_s):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(OSError):
            for key, value in [*memory_of(self.pid), ("machine_used_bytes", _used() - self._used)]:
                self.peaks[key] = max(self.peaks.get(key, 0), value)

    def summary(self) -> dict[str, Any]:
        """Return the bytes before entering, the peaks so far, and the bytes now."""
        self._sample()
        return {"before": self.before, "peak": dict(self.peaks), "now": dict(memory_of(self.pid))}


def memory_of(pid: int) -> Iterator[tuple[str, int]]:
    """Yield (kind, bytes) of the process's memory, as the system counts them."""
    names = {
        "RssAnon": "anonymous_bytes",
        "VmRSS": "resident_bytes",
        "RssShmem": "shared_bytes",
        "VmPin": "pinned_bytes",
    }
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        import psutil

        yield "resident_bytes", psutil.Process(pid).memory_info().rss
        return
    for line in status.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key in names:
            yield names[key], int(value.split()[0]) * 1024


def _used() -> int:
    import psutil

    found = psutil.virtual_memory()
    return found.total - found.available


def io_of(pid: int) -> dict[str, int]:
    """Return the bytes that the process read from storage, and the bytes that it requested by read calls; {} if
    unknown.
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return {"storage": found["read_bytes"], "calls": found["rchar"]}


def checkout_commit(root: Path) -> str:
    """Return the commit of a host program's checkout, from its file COMMIT or from git; "unknown" without both."""
    from ..results import provenance

    file = root / "COMMIT"
    named = file.read_text("utf-8").strip() if file.is_file() else provenance.checkout_commit(root)
    return named or "unknown"


def evict(path: Path) -> None:
    """Remove a file from the page cache, if the system allows that."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
