"""The machine a check runs on, and child processes that can neither hang nor flood the script."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OUTPUT_LIMIT = 1 << 20  # bytes kept of a child's output, counted from its end


@dataclass(frozen=True)
class Result:
    """How a child ended. ``code`` is None when it never started or had to be killed."""

    code: int | None
    out: str
    err: str
    timed_out: bool = False
    failed_to_start: str = ""

    @property
    def good(self) -> bool:
        return self.code == 0


@dataclass(frozen=True)
class Host:
    """Facts of the machine; tests put others in their place. ``build`` is Windows' build number."""

    system: str
    machine: str
    root: Path
    running: Path
    cwd: Path
    build: int = 0
    ram: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    dev: Path = Path("/dev")
    wsl: bool = False
    isolated: bool = False  # the running Python is a venv's or a portable one

    @property
    def windows(self) -> bool:
        return self.system == "Windows"

    def free_disk(self, path: Path) -> int | None:
        """Free bytes where ``path`` (or its nearest existing parent) lies."""
        for folder in [path, *path.parents]:
            try:
                return shutil.disk_usage(str(folder)).free
            except OSError:
                continue
        return None

    @staticmethod
    def here(root: Path) -> Host:
        return Host(
            system=platform.system(),
            machine=platform.machine(),
            root=root,
            running=Path(sys.executable or "python"),
            cwd=Path.cwd(),
            build=windows_build(),
            ram=total_ram(),
            env=dict(os.environ),
            wsl="microsoft" in platform.release().lower(),
            isolated=sys.prefix != sys.base_prefix or any(Path(sys.executable).parent.glob("python*._pth")),
        )


def windows_build() -> int:
    """Windows' build number, 0 elsewhere."""
    if sys.platform == "win32":
        return sys.getwindowsversion().build
    return 0


def total_ram() -> int | None:
    """Physical memory in bytes, None where the system does not say."""
    if sys.platform == "win32":
        import ctypes

        class Status(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
                (name, ctypes.c_ulonglong)
                for name in (
                    "total",
                    "free",
                    "page_total",
                    "page_free",
                    "virtual",
                    "virtual_free",
                    "extended",
                )
            ]

        status = Status(length=ctypes.sizeof(Status))
        if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            return int(status.total)
        return None
    if hasattr(os, "sysconf"):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (OSError, ValueError):
            return None
    return None


def _tail(stream) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - OUTPUT_LIMIT))
    return stream.read().decode("utf-8", "replace").replace("\r\n", "\n")


def _kill(child: subprocess.Popen) -> None:
    """Kill the child and what it started; give up on one that sits in a driver call for ever."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(child.pid, 9)
        else:
            subprocess.run(
                ["taskkill", "/F", "/T", "/PID", str(child.pid)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        child.kill()
        child.wait(10)
    except (OSError, subprocess.SubprocessError):
        pass


class Runner:
    """Starts children. Output goes to files, not pipes: a grandchild cannot hold the script up."""

    def run(self, argv: list[str], timeout: float, cwd: Path | None = None) -> Result:
        env = {
            **os.environ,
            "PYTHONUTF8": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # looking must not leave __pycache__ behind
            "PYTHONUNBUFFERED": "1",
        }
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env,
                    cwd=str(cwd) if cwd else None, start_new_session=os.name == "posix",
                )  # fmt: skip
            except (OSError, ValueError) as error:
                return Result(None, "", "", failed_to_start=str(error))
            try:
                code: int | None = child.wait(timeout)
                late = False
            except subprocess.TimeoutExpired:
                code, late = None, True
                _kill(child)
            except BaseException:
                _kill(child)
                raise
            return Result(code, _tail(out), _tail(err), timed_out=late)


def gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.1f} GiB"


def pinned_cap(host: Host) -> int | None:
    """Bytes that may be pinned: Windows' driver model locks at most about half, so 40 % there."""
    if host.ram is None:
        return None
    return int(host.ram * (0.4 if host.windows else 0.9))


def describe(argv: list[str]) -> str:
    """A command as a person would type it."""
    return " ".join(f'"{part}"' if " " in part else part for part in argv)
