"""Probes of the host: memory limits, what can be pinned, drive speed. Imports no torch; each is bounded in time and memory.

What counts is the least of several limits: physical memory, the cgroup of a container or a systemd unit, what Windows
lets a GPU share, what WSL was given.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .sizes import GIB, MIB
from .store.memory import fresh

# Left to the system when weights are pinned: what is pinned can neither be swapped nor reclaimed.
KEEP_LEAST, KEEP_SHARE = 2 * GIB, 0.10
# WDDM lets a GPU use half of the physical memory as shared memory, pinned buffers included; ComfyUI pins no more than this.
WDDM_SHARE = 0.4
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number where v2 writes "max"


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes; `limit` and `limit_by` are the least that applies, `usable` what weights may take of it now."""

    total: int
    available: int
    limit: int
    limit_by: str
    usable: int
    cgroup_limit: int | None
    cgroup_used: int | None
    memlock: int | None
    swap_total: int
    swap_used: int
    wsl: bool
    windows: bool

    @property
    def free(self) -> int:
        """What this process could have now, in its container too."""
        free = min(self.available, self.limit)
        return (
            free
            if self.cgroup_limit is None
            else min(free, max(0, self.cgroup_limit - (self.cgroup_used or 0)))
        )

    @property
    def keep(self) -> int:
        """What is left to the system and to other programs."""
        return max(KEEP_LEAST, int(KEEP_SHARE * self.limit))


NOT_ASKED = "not asked for (--no-disk)"


class Absent(RuntimeError):
    """What was to be probed is not there; an ordinary answer, whose words are the whole reason."""


def bounded(probe: Callable[[], Any], seconds: float, what: str) -> tuple[Any, str | None]:
    """(result, None), or (None, reason) where `probe` raised or did not answer in time; `Absent` is told in its own words.

    A probe that hangs in a driver cannot be stopped; its daemon thread is left behind and ends with the process.
    """
    box: list = []

    def work() -> None:
        try:
            box.append((probe(), None))
        except Absent as error:
            box.append((None, str(error)))
        except Exception as error:  # a probe must never take the doctor down
            box.append((None, f"{what} failed: {type(error).__name__}: {str(error)[:200]}"))

    thread = threading.Thread(target=work, daemon=True, name=f"carom-probe-{what}")
    thread.start()
    thread.join(seconds)
    return box[0] if box else (None, f"{what} did not answer within {seconds:g} s")


def _read_number(path: Path) -> int | None:
    """The number in a small file; None where there is none ("max", absent, not readable)."""
    try:
        text = path.read_text("ascii")[:64].strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def cgroup_memory(
    proc: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup"
) -> tuple[int | None, int | None]:
    """(limit, used) in bytes of the tightest memory cgroup above this process, v1 or v2; (None, None) without one.

    Used leaves out page cache that the kernel gives back at once (inactive_file).
    """
    try:
        lines = Path(proc).read_text("utf-8")[:65536].splitlines()
    except (OSError, ValueError):
        return None, None
    found: tuple[int | None, int | None] = (None, None)
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", "", ""])[:3]
        v1 = "memory" in controllers.split(",")
        if not v1 and controllers:
            continue
        base = Path(root) / "memory" if v1 else Path(root)
        limit_name = "memory.limit_in_bytes" if v1 else "memory.max"
        used_name = "memory.usage_in_bytes" if v1 else "memory.current"
        # A container sees its own group as the root; elsewhere any ancestor may be the tight one.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            limits = [_read_number(folder / limit_name)] + (
                [] if v1 else [_read_number(folder / "memory.high")]
            )
            limit = min((n for n in limits if n is not None), default=None)
            if limit is not None and (found[0] is None or limit < found[0]):
                used = _read_number(folder / used_name)
                found = limit, used if used is None else max(0, used - _inactive_file(folder, v1))
    return found


def _inactive_file(folder: Path, v1: bool) -> int:
    name = "total_inactive_file" if v1 else "inactive_file"
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text("ascii")[:65536].splitlines():
            key, _, value = line.partition(" ")
            if key == name and value.strip().isdecimal():
                return int(value)
    return 0


def is_wsl(version: str | os.PathLike = "/proc/version") -> bool:
    """Whether this is Linux under Windows (WSL)."""
    try:
        return "microsoft" in Path(version).read_text("utf-8", "replace")[:1000].lower()
    except OSError:
        return False


def _memlock() -> int | None:
    """The soft `ulimit -l` in bytes; None where there is none or it is unlimited."""
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]  # type: ignore[attr-defined,unused-ignore]
    return None if soft == resource.RLIM_INFINITY else soft  # type: ignore[attr-defined,unused-ignore]


def usable_memory(
    total: int, available: int, cgroup_limit: int | None, cgroup_used: int | None, windows: bool
) -> tuple[int, str, int]:
    """(limit, limited by, usable now) in bytes for pinned weights. Pure."""
    limit, by = total, "physical memory"
    if windows and total * WDDM_SHARE < limit:
        limit, by = (
            int(total * WDDM_SHARE),
            "Windows (WDDM shares half of the memory with the GPU; 40 % may be pinned)",
        )
    if cgroup_limit is not None and cgroup_limit < limit:
        limit, by = cgroup_limit, "the cgroup (container or service) memory limit"
    free = min(available, limit)
    if cgroup_limit is not None:
        free = min(free, max(0, cgroup_limit - (cgroup_used or 0)))
    return limit, by, max(0, free - max(KEEP_LEAST, int(KEEP_SHARE * limit)))


def on_windows() -> bool:
    """Whether WDDM manages the card's memory."""
    return sys.platform == "win32"


def pin_limit(ram: int) -> int:
    """Of a budget of ``ram`` bytes what may be pinned."""
    return min(ram, int(psutil.virtual_memory().total * WDDM_SHARE)) if on_windows() else ram


def host_memory() -> HostMemory:
    """What host memory there is and what bounds it."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    windows = on_windows()
    group_limit, group_used = cgroup_memory() if sys.platform == "linux" else (None, None)
    wsl = sys.platform == "linux" and is_wsl()
    limit, by, usable = usable_memory(memory.total, memory.available, group_limit, group_used, windows)
    return HostMemory(
        memory.total, memory.available, limit, by, usable, group_limit, group_used, _memlock(),
        swap.total, swap.used, wsl, windows,
    )  # fmt: skip


def system_name() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


@dataclass(frozen=True)
class DiskRate:
    """Sequential reads, bytes/s, of one thread and of several; `direct` False: the page cache may have helped."""

    folder: str
    one: float
    several: float
    threads: int
    direct: bool
    bytes_read: int


def disk_rate(
    folder: str | os.PathLike,
    *,
    size: int = 256 * MIB,
    block: int = 8 * MIB,
    threads: int = 4,
    seconds: float = 1.0,
) -> DiskRate:
    """Reads a temporary file in `folder` with direct I/O, by one thread and by several, for about `seconds` each.

    The file is removed whatever happens (on POSIX it has no name any more when it is read). It takes at most a tenth
    of the free space. Raises `Absent` where there is no such folder or nothing may be written, OSError for all else.
    """
    if not os.path.isdir(folder):
        raise Absent(f"there is no folder {os.fspath(folder)}")
    free = psutil.disk_usage(str(folder)).free
    size = min(size, free // 10 // block * block)
    if size < block * threads:
        raise OSError(
            f"only {free // MIB} MiB free in {folder}; the probe needs {block * threads * 10 // MIB}"
        )
    try:
        handle, name = tempfile.mkstemp(prefix="carom-probe-", dir=folder)
    except PermissionError as error:
        raise Absent(f"nothing may be written in {os.fspath(folder)}") from error
    try:
        deadline = time.monotonic() + 5 * seconds
        written = 0
        # Random bytes: drives and file systems may compress anything else.
        noise = os.urandom(block)
        while written < size and (time.monotonic() < deadline or written < block * threads):
            written += os.write(handle, noise[: size - written])
        os.fsync(handle)
        size = written // (block * threads) * block * threads
        reader, direct = _open_direct(name)
        try:
            if os.name == "posix":
                os.unlink(name)  # gone even if the process is killed while reading
            one = _read_for(reader, size, block, 1, seconds)
            several = _read_for(reader, size, block, threads, seconds)
        finally:
            os.close(reader)
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(name)
    return DiskRate(str(folder), one, several, threads, direct, size)


def _open_direct(name: str) -> tuple[int, bool]:
    """(descriptor, whether it bypasses the page cache)."""
    binary = getattr(os, "O_BINARY", 0)
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # tmpfs and some network file systems have no direct I/O
            return os.open(name, os.O_RDONLY | os.O_DIRECT), True
    handle = os.open(name, os.O_RDONLY | binary)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined,unused-ignore]
    return handle, False


def _read_for(handle: int, size: int, block: int, threads: int, seconds: float) -> float:
    """Bytes/s over `seconds`, going round the file as often as they allow; each thread reads every `threads`-th block."""
    done = [0] * threads
    errors: list[OSError] = []
    start = time.monotonic()
    lock = threading.Lock()

    def read(which: int) -> None:
        buffer = fresh(block)  # as the reader's: its pages decide the rate
        offset = which * block
        while not done[which] or time.monotonic() - start < seconds:
            try:
                if hasattr(os, "preadv"):
                    got = os.preadv(handle, [buffer], offset)
                else:
                    with lock:
                        os.lseek(handle, offset, os.SEEK_SET)
                        got = len(os.read(handle, block))
            except OSError as error:
                errors.append(error)
                return
            if got == 0:
                errors.append(OSError("the probe's file was cut short while it was read"))
                return
            done[which] += got
            offset = (offset + threads * block) % size

    workers = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(done) / max(time.monotonic() - start, 1e-9)
