"""Positioned file reads that bypass the page cache: O_DIRECT where the file system supports it, buffered
reads elsewhere.

`os.preadv` releases the GIL and reads into the caller's memory. O_DIRECT requires file offset, length and
memory address on block boundaries (open(2)); 4096 bytes satisfies every drive in use.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Protocol

from ..common.huge_pages import allocate_pages

ALIGN = 4096


class RawFile(Protocol):
    """The interface of an open file that `DiskReader` reads from; ``direct`` says whether reads bypass the
    page cache.
    """

    direct: bool

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read once at ``offset`` into ``buffer`` and return the number of bytes read, 0 at the end of the
        file. Raises OSError.
        """

    def stat(self) -> os.stat_result: ...

    def close(self) -> None: ...


class PosixFile:
    """A file read by preadv. ``direct`` says whether reads bypass the page cache, and turns False when the
    file system first refuses a direct read.
    """

    def __init__(self, path: str, direct: bool = True) -> None:
        self._path = path
        self._direct_fd = -1
        self.direct = direct and hasattr(os, "O_DIRECT")
        if self.direct:
            try:
                self._direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)  # type: ignore[attr-defined,unused-ignore]
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self.direct = False
        # Open a second, buffered descriptor: for reads that cannot be aligned, and for file systems that
        # accept O_DIRECT at open and then refuse the read (some FUSE and overlay mounts).
        try:
            self._buffered_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            if self._direct_fd >= 0:
                os.close(self._direct_fd)
            raise
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self._buffered_fd, fcntl.F_NOCACHE, 1)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if self.direct:
            try:
                return os.preadv(self._direct_fd, [buffer], offset)  # type: ignore[attr-defined,unused-ignore]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        got = os.preadv(self._buffered_fd, [buffer], offset)  # type: ignore[attr-defined,unused-ignore]
        if hasattr(os, "posix_fadvise") and got:
            # Carom reads these bytes once and keeps its own copy; in the page cache they would only evict
            # other data.
            os.posix_fadvise(self._buffered_fd, offset, got, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined,unused-ignore]
        return got

    def stat(self) -> os.stat_result:
        return os.fstat(self._buffered_fd)

    def close(self) -> None:
        # An interrupt between two lines may leave a descriptor open; it never lets one be closed twice, which could
        # close a file that another thread has opened meanwhile.
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)
        fd, self._buffered_fd = self._buffered_fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_buffered_fd"):
            self.close()


def open_raw(path: str, direct: bool = True) -> RawFile:
    """Open ``path`` for reading in the fastest way of this operating system. Raises OSError."""
    if sys.platform == "win32":
        from .direct_io_windows import WindowsFile

        return WindowsFile(path, direct)
    return PosixFile(path, direct)


def aligned_buffer(nbytes: int) -> memoryview:
    """Return a writable, page-aligned buffer of ``nbytes`` rounded up to whole pages; freed with its last
    reference.
    """
    return allocate_pages(max(nbytes + -nbytes % ALIGN, ALIGN))
