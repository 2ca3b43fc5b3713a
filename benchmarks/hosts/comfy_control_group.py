"""A Linux control group that limits the memory of a ComfyUI server, page cache included (which the kernel takes back)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

# (folder of the memory controller, file of the limit), cgroup v1 and v2
PLACES = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
END_S = 5.0  # seconds to wait until the processes of a group have ended


class ControlGroup:
    """A group of processes with a limit of memory. Its folder is ``path``, and its limit is in the file ``limit``."""

    def __init__(self, path: Path, limit: str) -> None:
        self.path, self._limit = path, limit

    def set_limit(self, nbytes: int) -> None:
        """Limit the memory of the group's processes to ``nbytes`` bytes from now on."""
        (self.path / self._limit).write_text(str(nbytes), "ascii")

    @property
    def prefix(self) -> list[str]:
        """The words to put before a command, so that its process starts in the group."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.path)]

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of the processes without page cache: what cannot be taken back."""
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text("ascii").splitlines())
        return int(stat["total_rss"] if "total_rss" in stat else stat["anon"])


@contextlib.contextmanager
def control_group(nbytes: int) -> Iterator[ControlGroup]:
    """Context with a group whose processes get at most ``nbytes`` bytes and no swap. Beyond it the kernel kills them.

    Raises OSError if no group can be made here, which needs root and a writable /sys/fs/cgroup.
    """
    for base, limit in PLACES:
        path = Path(base, f"carom-{os.getpid()}")
        if not Path(base).is_dir():
            continue
        with contextlib.suppress(OSError):
            path.mkdir()
        if not (path / limit).exists():
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        try:
            (path / limit).write_text(str(nbytes), "ascii")
            with contextlib.suppress(OSError):
                (path / "memory.swap.max").write_text("0", "ascii")
            yield ControlGroup(path, limit)
        finally:
            _remove(path)
        return
    raise OSError("no control group of memory can be made: needs root and a writable /sys/fs/cgroup")


def _remove(path: Path) -> None:
    give_up = time.monotonic() + END_S
    while True:
        try:
            path.rmdir()
            return
        except OSError:
            if time.monotonic() > give_up:
                return
            time.sleep(0.1)
