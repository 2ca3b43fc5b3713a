"""Defines `SpillFile`: a file of Carom's own, which is mapped into memory and deleted after its last use.

On Linux and macOS the name is removed when the last mapping is freed, at the latest at the end of the process, and a
lock tells other processes whether a file that they find is in use. Windows deletes the file itself when its last
handle is closed (FILE_FLAG_DELETE_ON_CLOSE, which Python calls O_TEMPORARY), so also after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import shutil
import sys
import weakref
from pathlib import Path

from ..common.errors import BudgetError
from ..common.sizes import format_size

PREFIX, SUFFIX = "carom-spill-", ".bin"
# Windows charges a private mapping whole to RAM and pagefile, although nothing was written to it. A read-only mapping
# costs nothing there. `spill.allow_writes` makes parts of it private when they may be written to.
_ACCESS = mmap.ACCESS_READ if sys.platform == "win32" else mmap.ACCESS_COPY

_number = itertools.count()


class SpillFile:
    """The spill file ``path``, open as ``handle``. It is deleted when the last mapping of it is freed.

    ``checksums``: {offset: (bytes, CRC-32)} of the tensors in the file.
    ``identity``: device and inode, which the system's list of mapped files leads to by whatever path.
    ``discard``: closes and deletes the file. Idempotent.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self.handle = str(path.absolute()), handle
        self.checksums: dict[int, tuple[int, int]] = {}
        status = os.stat(path)
        self.identity = status.st_dev, status.st_ino
        self.discard = weakref.finalize(self, _discard, handle, path, os.getpid())

    @classmethod
    def create(cls, folder: Path) -> SpillFile:
        """Create an empty file in ``folder`` that `delete_abandoned` leaves alone. Raises OSError and ValueError."""
        flags = (
            os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
        )
        while True:
            # A process in another container may have the same number and write to the same folder.
            path = folder / f"{PREFIX}{os.getpid()}-{next(_number)}{SUFFIX}"
            with contextlib.suppress(FileExistsError):
                handle = os.open(path, flags, 0o600)
                _keep_write_time(handle)
                _lock_file(handle)
                if path.exists():
                    return cls(path, handle)
                os.close(handle)  # another process deleted the file before it was locked

    def reserve(self, nbytes: int) -> None:
        """Give the file its length and its room on the drive, where the system can. Raises BudgetError and OSError."""
        folder = Path(self.path).parent
        if shutil.disk_usage(folder).free < nbytes:
            raise no_room(folder, nbytes)
        if sys.platform == "win32":
            return  # the C runtime makes a file longer by writing zeros, so that all bytes would be written twice
        os.ftruncate(self.handle, nbytes)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.handle, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise

    def write(self, data: memoryview) -> None:
        """Write all of ``data`` at the file's position."""
        while data:
            data = data[os.write(self.handle, data) :]

    def flush(self) -> None:
        """Wait until the drive has what was written, and release its pages in the page cache."""
        os.fsync(self.handle)
        if sys.platform == "linux":
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def map(self) -> Mapping:
        """Return a new mapping of the whole file. Raises OSError."""
        mapping = Mapping(self.handle, os.fstat(self.handle).st_size, access=_ACCESS)
        mapping.file = self
        return mapping


class Mapping(mmap.mmap):
    """A private mapping of ``file``, on Windows a read-only one. Tensors that are views of it keep it and the file alive.

    Writes to the views stay in this mapping, so two tensors must never be views of the same bytes of one mapping.
    """

    file: SpillFile


def no_room(folder: Path, nbytes: int) -> BudgetError:
    """Return the error for a drive without room for ``nbytes`` bytes. It names no least budget, because the bytes of
    the drive are not a budget of Carom's.
    """
    free = shutil.disk_usage(folder).free
    return BudgetError(
        f"disk={str(folder)!r}: the weights take {format_size(nbytes)} and the drive has {format_size(free)} free; make "
        "room, name a folder on another drive, or raise ram"
    )


def delete_abandoned(folder: Path) -> None:
    """Delete the spill files of processes that ended without deleting them. Process numbers do not tell whose a
    file is, because a container gives the same ones again.
    """
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):
            # Windows refuses this for a file that a process has open for deletion.
            handle = os.open(path, os.O_RDWR)
            try:
                _lock_file(handle, wait=False)
                _delete(path)
            finally:
                os.close(handle)
            if sys.platform == "win32":
                _delete(path)  # Windows does not delete a file that is open


def _keep_write_time(handle: int) -> None:
    """On Windows, let writes through ``handle`` not change the time of the file's last write. Elsewhere do nothing.

    Windows sets that time when it likes, at the latest when the handle is closed. Here the handle stays open as long as the
    file is used, and a file whose time has changed counts as written to by another program. See
    https://learn.microsoft.com/windows/win32/api/fileapi/nf-fileapi-setfiletime.
    """
    if sys.platform != "win32":
        return
    import msvcrt

    set_time = ctypes.WinDLL("kernel32").SetFileTime
    set_time.argtypes = [ctypes.c_void_p] * 4
    unchanged = ctypes.c_uint64(0xFFFFFFFFFFFFFFFF)
    # A file system that refuses this keeps the usual rules.
    set_time(msvcrt.get_osfhandle(handle), None, None, ctypes.byref(unchanged))


def _lock_file(handle: int, wait: bool = True) -> None:
    """Lock the file, so that other processes see that it is in use. The system unlocks it when this process
    ends, however that happens.

    ``wait``: wait for a process that is about to delete the file, and go on where the file system has no locks. Otherwise
    an OSError is raised. On Windows nothing is done, because `delete_abandoned` cannot open a file that is in use.
    """
    try:
        import fcntl
    except ImportError:
        return
    with contextlib.suppress(OSError) if wait else contextlib.nullcontext():
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined,unused-ignore]


def _discard(handle: int, path: Path, owner: int) -> None:
    """Close a spill file that nothing uses any more, and delete it in the process that made it, ``owner``. A forked
    process has a copy of the mapping, and the file is not its own.
    """
    with contextlib.suppress(OSError):
        os.close(handle)
    if os.getpid() == owner:
        _delete(path)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
