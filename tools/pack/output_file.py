"""A writer for one packed file: writes data from front to back and the header last, without filling the page
cache.
"""

from __future__ import annotations

import os
import struct

from ...core.common.held_files import retry_while_in_use

# Number of written bytes after which the file is synced. This limits dirty pages in the page cache, and the
# finished work that is lost if the process is killed.
SYNC_BYTES = 64 << 20


class OutputFile:
    """A file that is written from front to back, dropped from the page cache, and gets its header last.

    `at`: offset of the next byte; `unsynced`: bytes written since the last sync; `uncommitted`: bytes written
    since the caller last recorded its progress.
    """

    def __init__(self, path: str) -> None:
        mode = "r+b" if os.path.exists(path) else "w+b"
        self._file = retry_while_in_use(lambda: open(path, mode, buffering=0))  # noqa: SIM115
        self.at = self.unsynced = self.uncommitted = 0

    def resume(self, at: int) -> None:
        """Truncate the file to ``at`` bytes and continue writing there; later bytes belong to an unfinished
        tensor.
        """
        self._file.truncate(at)
        self._file.seek(at)
        self.at = at

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data``, and sync the file after every SYNC_BYTES bytes."""
        view = memoryview(data)
        while len(view):
            count = self._file.write(view)
            view = view[count:]
            self.at += count
            self.unsynced += count
            self.uncommitted += count
            if self.unsynced >= SYNC_BYTES:
                self.sync()

    def sync(self) -> None:
        """Write the data to the drive (fsync) and drop it from the page cache."""
        fd = self._file.fileno()
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined,unused-ignore]
        self.unsynced = 0

    def finish(self, header: bytes, room: int) -> None:
        """Write ``header`` at the start of the file, filled up with spaces to ``room`` bytes, and sync the
        file.

        Raises RuntimeError where the header does not fit.
        """
        if len(header) > room:
            raise RuntimeError(f"the header needs {len(header)} bytes, {room} were kept")
        filled = struct.pack("<Q", room - 8) + header[8:].ljust(room - 8)
        self._file.seek(0)
        view = memoryview(filled)
        while len(view):
            view = view[self._file.write(view) :]
        self.sync()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def sync_folder(folder: str) -> None:
    """Sync the folder's directory entries to the drive (fsync); does nothing on Windows."""
    if os.name != "nt":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
