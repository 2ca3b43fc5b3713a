"""Probes of the host: memory limits, memory that can be pinned, drive speed. Bounded in time and memory;
without torch.

The limit on host memory is the least of several: physical memory, the cgroup of a container or a systemd
unit, and the memory that WSL was given. On Windows a process can allocate no more than the commit limit leaves.
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

from ..checkpoint.direct_io import RawFile, open_raw
from ..common.commit_memory import read_commit
from ..common.huge_pages import allocate_pages
from ..common.sizes import GIB, MIB

# Memory left to the operating system when weights are pinned: (bytes, share of the limit), whichever is more.
# Pinned memory can be neither swapped out nor reclaimed.
KEEP_LEAST, KEEP_SHARE = 2 * GIB, 0.10
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for "no limit" where v2 writes "max"


@dataclass(frozen=True)
class HostMemory:
    """Host memory sizes in bytes.

    `limit` and `limit_by`: the lowest limit that applies, and its name. `usable`: the bytes that weights may
    take now. `swap_used`: 0 on Windows. `commit_limit` and `commit_left`: on Windows, the bytes that all programs
    together can allocate, and those of them that this process can still allocate.
    """

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
    commit_limit: int | None = None
    commit_left: int | None = None

    @property
    def free(self) -> int:
        """The bytes that this process could allocate now, within the limits of its container and of Windows."""
        return free_memory(
            min(self.available, self.limit), self.cgroup_limit, self.cgroup_used, self.commit_left
        )

    @property
    def keep(self) -> int:
        """The bytes that are left to the operating system and to other programs."""
        return max(KEEP_LEAST, int(KEEP_SHARE * self.limit))


NOT_ASKED = "not asked for (--no-disk)"


class NotAvailable(RuntimeError):
    """The error for a device or folder that a probe finds missing; the message is shown as the whole
    reason.
    """


def call_with_timeout(probe: Callable[[], Any], seconds: float, name: str) -> tuple[Any, str | None]:
    """Call `probe` on a thread and return (result, None), or (None, reason) if it raised or took longer than
    `seconds`.

    The reason of a `NotAvailable` error is its message alone. A probe that hangs in a driver cannot be
    stopped; its daemon thread is left behind and ends with the process.
    """
    box: list = []

    def work() -> None:
        try:
            box.append((probe(), None))
        except NotAvailable as error:
            box.append((None, str(error)))
        except Exception as error:  # a failing probe must not stop `carom doctor`
            box.append((None, f"{name} failed: {type(error).__name__}: {str(error)[:200]}"))

    thread = threading.Thread(target=work, daemon=True, name=f"carom-probe-{name}")
    thread.start()
    thread.join(seconds)
    return box[0] if box else (None, f"{name} did not answer within {seconds:g} s")


def _read_number(path: Path) -> int | None:
    """Return the number in a small file; None if the file is missing or unreadable or has no number
    ("max").
    """
    try:
        text = path.read_text("ascii")[:64].strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def cgroup_memory(
    proc: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup"
) -> tuple[int | None, int | None]:
    """Return (limit, used) in bytes of the tightest memory cgroup (v1 or v2) around this process, or (None,
    None).

    The used bytes exclude the page cache of files, which the kernel reclaims (MemAvailable of the whole machine excludes
    it too). Files that were read twice are in active_file.
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
        # A container sees its own group as the root. Elsewhere, any ancestor may have the tightest limit.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            limits = [_read_number(folder / limit_name)] + (
                [] if v1 else [_read_number(folder / "memory.high")]
            )
            limit = min((n for n in limits if n is not None), default=None)
            if limit is not None and (found[0] is None or limit < found[0]):
                used = _read_number(folder / used_name)
                found = limit, used if used is None else max(0, used - _file_pages(folder, v1))
    return found


def _file_pages(folder: Path, v1: bool) -> int:
    """Return the bytes of the page cache of files in a cgroup."""
    names = ("total_inactive_file", "total_active_file") if v1 else ("inactive_file", "active_file")
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text("ascii")[:65536].splitlines():
            key, _, value = line.partition(" ")
            if key in names and value.strip().isdecimal():
                found += int(value)
    return found


def is_wsl(version: str | os.PathLike = "/proc/version") -> bool:
    """Return whether this is Linux under Windows (WSL)."""
    try:
        return "microsoft" in Path(version).read_text("utf-8", "replace")[:1000].lower()
    except OSError:
        return False


def _memlock() -> int | None:
    """Return the soft `ulimit -l` in bytes, or None if it is unlimited or does not exist."""
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]  # type: ignore[attr-defined,unused-ignore]
    return None if soft == resource.RLIM_INFINITY else soft  # type: ignore[attr-defined,unused-ignore]


def free_memory(
    available: int, cgroup_limit: int | None, cgroup_used: int | None, commit_left: int | None = None
) -> int:
    """Return how many of ``available`` bytes of physical memory this process can allocate now."""
    free = available if commit_left is None else min(available, commit_left)
    return free if cgroup_limit is None else min(free, max(0, cgroup_limit - (cgroup_used or 0)))


def usable_memory(
    total: int,
    available: int,
    cgroup_limit: int | None,
    cgroup_used: int | None,
    commit_left: int | None = None,
) -> tuple[int, str, int]:
    """Return (limit, name of the limit, usable now) in bytes for weights, computed from the arguments alone.

    ``commit_left``: the bytes that Windows' commit limit leaves to this process, None on other systems.
    """
    limit, by = total, "physical memory"
    if cgroup_limit is not None and cgroup_limit < limit:
        limit, by = cgroup_limit, "the cgroup (container or service) memory limit"
    free = free_memory(min(available, limit), cgroup_limit, cgroup_used, commit_left)
    return limit, by, max(0, free - max(KEEP_LEAST, int(KEEP_SHARE * limit)))


def on_windows() -> bool:
    """Return whether this is Windows, where WDDM manages the GPU's memory."""
    return sys.platform == "win32"


def _swap() -> tuple[int, int]:
    """Return the bytes of swap, and those in use. Not for Windows: psutil reads performance counters there, which takes
    long, and raises RuntimeError where they are disabled (psutil's issue 2681).
    """
    found = psutil.swap_memory()
    return found.total, found.used


def host_memory() -> HostMemory:
    """Return the sizes and limits of host memory."""
    memory, windows = psutil.virtual_memory(), on_windows()
    group_limit, group_used = cgroup_memory() if sys.platform == "linux" else (None, None)
    wsl = sys.platform == "linux" and is_wsl()
    commit = read_commit() if windows else None
    # Both from one call on Windows, so that the two agree.
    available = memory.available if commit is None else commit.available_physical
    commit_limit, commit_left = (None, None) if commit is None else (commit.limit, commit.left)
    swap_total, swap_used = _swap() if not windows else (max(0, (commit_limit or 0) - memory.total), 0)
    limit, by, usable = usable_memory(memory.total, available, group_limit, group_used, commit_left)
    return HostMemory(
        memory.total, available, limit, by, usable, group_limit, group_used, _memlock(),
        swap_total, swap_used, wsl, windows, commit_limit, commit_left,
    )  # fmt: skip


def system_name() -> str:
    """Return the operating system's name, its release and the CPU architecture."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


@dataclass(frozen=True)
class DiskRate:
    """Sequential read rates of the drive of `folder` in bytes/s: `one` with one thread, `several` with
    `threads` threads.

    `direct`: whether the reads bypassed the page cache; if False, the rates may be those of the page cache.
    """

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
    """Measure reads of a temporary file in `folder` with direct I/O, by one thread and by several, `seconds`
    each.

    The file is removed in all cases (before it is read, except on Windows, which does not delete an open file). It
    takes at most a tenth of the free space. Raises `NotAvailable` if the folder is missing or not writable, OSError for
    all other failures.
    """
    if not os.path.isdir(folder):
        raise NotAvailable(f"there is no folder {os.fspath(folder)}")
    free = psutil.disk_usage(str(folder)).free
    size = min(size, free // 10 // block * block)
    if size < block * threads:
        raise OSError(
            f"only {free // MIB} MiB free in {folder}; the probe needs {block * threads * 10 // MIB}"
        )
    try:
        handle, name = tempfile.mkstemp(prefix="carom-probe-", dir=folder)
    except PermissionError as error:
        raise NotAvailable(f"nothing may be written in {os.fspath(folder)}") from error
    try:
        deadline = time.monotonic() + 5 * seconds
        written = 0
        # Write random bytes, because drives and file systems may compress anything else.
        noise = os.urandom(block)
        while written < size and (time.monotonic() < deadline or written < block * threads):
            written += os.write(handle, noise[: size - written])
        os.fsync(handle)
        size = written // (block * threads) * block * threads
        reader = open_raw(name)
        try:
            if not on_windows():
                os.unlink(name)  # so that the file is removed even if the process is killed while reading
            one = _read_for(reader, size, block, 1, seconds)
            several = _read_for(reader, size, block, threads, seconds)
            direct = reader.direct
        finally:
            reader.close()
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(name)
    return DiskRate(str(folder), one, several, threads, direct, size)


def _read_for(file: RawFile, size: int, block: int, threads: int, seconds: float) -> float:
    """Return the bytes/s of `threads` threads that read the file for `seconds`, over and over again if time
    allows.

    Each thread reads every `threads`-th block.
    """
    bytes_read = [0] * threads
    errors: list[OSError] = []
    start = time.monotonic()

    def read(thread_number: int) -> None:
        # This is the kind of memory that `DiskReader` reads into; its pages affect the rate.
        buffer = allocate_pages(block)
        offset = thread_number * block
        while not bytes_read[thread_number] or time.monotonic() - start < seconds:
            try:
                got = file.read_into(buffer, offset)
            except OSError as error:
                errors.append(error)
                return
            if got == 0:
                errors.append(OSError("the probe's file became shorter while it was read"))
                return
            bytes_read[thread_number] += got
            offset = (offset + threads * block) % size

    workers = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(bytes_read) / max(time.monotonic() - start, 1e-9)
