"""Positioned reads below the page cache: O_DIRECT where the file system takes it, plain reads where it does not.

`os.preadv` releases the GIL and reads into the caller's memory. O_DIRECT wants file offset, length and memory
address on block boundaries (open(2)); 4096 satisfies every drive in use.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Protocol

from .memory import fresh

ALIGN = 4096


class RawFile(Protocol):
    """What a reader needs of an open file."""

    direct: bool

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """One read at ``offset`` into ``buffer``; bytes read, 0 at the end of the file. Raises OSError."""

    def stat(self) -> os.stat_result: ...

    def close(self) -> None: ...


class PosixFile:
    """A file read by preadv. ``direct`` tells whether it is past the page cache; it turns False at the first refusal."""

    def __init__(self, path: str, direct: bool = True) -> None:
        self._path = path
        self._fd = -1
        self.direct = direct and hasattr(os, "O_DIRECT")
        if self.direct:
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)  # type: ignore[attr-defined,unused-ignore]
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self.direct = False
        # Opened besides the direct one: reads that cannot be aligned, and file systems that take the flag at open
        # and refuse the read (some FUSE and overlay mounts).
        try:
            self._plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            if self._fd >= 0:
                os.close(self._fd)
            raise
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self._plain, fcntl.F_NOCACHE, 1)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if self.direct:
            try:
                return os.preadv(self._fd, [buffer], offset)  # type: ignore[attr-defined,unused-ignore]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        got = os.preadv(self._plain, [buffer], offset)  # type: ignore[attr-defined,unused-ignore]
        if hasattr(os, "posix_fadvise") and got:
            # Read once, used once: left in the page cache it would only push other things out.
            os.posix_fadvise(self._plain, offset, got, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined,unused-ignore]
        return got

    def stat(self) -> os.stat_result:
        return os.fstat(self._plain)

    def close(self) -> None:
        for fd in (self._fd, self._plain):
            if fd >= 0:
                os.close(fd)
        self._fd = self._plain = -1

    def __del__(self) -> None:
        if hasattr(self, "_plain"):
            self.close()


def open_raw(path: str, direct: bool = True) -> RawFile:
    """``path`` open for reading by this platform's best means. Raises OSError."""
    if sys.platform == "win32":
        from .rawio_windows import WindowsFile

        return WindowsFile(path, direct)
    return PosixFile(path, direct)


def aligned_buffer(nbytes: int) -> memoryview:
    """A writable, page-aligned buffer of ``nbytes`` rounded up to whole pages; freed with its last reference."""
    return fresh(max(nbytes + -nbytes % ALIGN, ALIGN))
