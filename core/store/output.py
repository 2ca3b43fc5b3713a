"""Writes one file from front to back, its header last, without filling the page cache."""

from __future__ import annotations

import os
import struct

# Written bytes after which they are brought to the drive: bounds dirty pages, and the work that a kill loses
# beyond the tensor under way.
SYNC_BYTES = 64 << 20


class OutputFile:
    """A file written from front to back, its pages not left in the page cache, its header put in last."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "r+b" if os.path.exists(path) else "w+b", buffering=0)  # noqa: SIM115
        self.at = self.unsynced = self.uncommitted = 0

    def resume(self, at: int) -> None:
        """Go on at byte ``at``; what stands after it was not finished."""
        self._file.truncate(at)
        self._file.seek(at)
        self.at = at

    def write(self, data: memoryview | bytes) -> None:
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
        """Bring what was written to the drive, and drop it from the page cache."""
        fd = self._file.fileno()
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # type: ignore[attr-defined,unused-ignore]
        self.unsynced = 0

    def finish(self, header: bytes, room: int) -> None:
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
    """Bring a folder's names to the drive, where the system has such a thing."""
    if os.name != "nt":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
