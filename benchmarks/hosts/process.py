"""Another process seen from outside: its memory, sampled while it runs, what it has read, and a page cache without a file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class watched:
    """Samples a process's memory while it is entered; Linux (elsewhere the resident set alone)."""

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
        """Peaks so far, and what is held now."""
        self._sample()
        return {"before": self.before, "peak": dict(self.peaks), "now": dict(memory_of(self.pid))}


def memory_of(pid: int) -> Iterator[tuple[str, int]]:
    """Bytes of the process by kind, as its system counts them."""
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
    """Bytes the process had fetched from storage, and bytes it asked for by read calls."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return {"storage": found["read_bytes"], "calls": found["rchar"]}


def evict(path: Path) -> None:
    """Throw a file out of the page cache, where the system lets us."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
