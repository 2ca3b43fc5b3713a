"""Functions of Windows' kernel32 that act on this system's files, with the rules that Microsoft documents."""

from __future__ import annotations

import ctypes
import os
import threading

from carom.core.checkpoint import direct_io_windows


class FakeKernel32:
    """The calls that `WindowsFile` makes, on ordinary files. Unbuffered handles take only aligned reads.

    ``refuse``: "open" and "read" refuse an unbuffered handle and its reads; a number is the error of every opening.
    """

    def __init__(self, refuse: str | int = "") -> None:
        self.refuse, self.error, self.handles, self.next = refuse, 0, {}, 100
        self.pending: dict[int, int] = {}
        self.lock = threading.Lock()

    def CreateFileW(self, path, access, share, security, how, flags, template):
        if self.refuse == "open" and flags & 0x20000000:
            self.error = direct_io_windows.ERROR_INVALID_PARAMETER
            return ctypes.c_void_p(-1).value
        real = path.replace("\\\\?\\", "")
        if isinstance(self.refuse, int) or not os.path.exists(real):
            self.error = self.refuse or 2
            return ctypes.c_void_p(-1).value
        assert flags & 0x40000000, "positioned reads need an overlapped handle"
        self.next += 1
        self.handles[self.next] = (
            os.open(real, os.O_RDONLY | getattr(os, "O_BINARY", 0)),
            bool(flags & 0x20000000),
        )
        return self.next

    def CreateEventW(self, *_):
        self.next += 1
        self.handles[self.next] = (None, False)
        return self.next

    def ReadFile(self, handle, target, want, count, overlapped):
        fd, unbuffered = self.handles[handle]
        call = overlapped._obj
        offset = call.offset | call.offset_high << 32
        if unbuffered and (self.refuse == "read" or offset % 512 or want % 512 or target % 512):
            self.error = direct_io_windows.ERROR_INVALID_PARAMETER
            return 0
        with self.lock:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, want)
        if not data:
            self.error = direct_io_windows.ERROR_HANDLE_EOF
            return 0
        ctypes.memmove(target, data, len(data))
        self.pending[ctypes.addressof(call)] = len(data)
        self.error = direct_io_windows.ERROR_IO_PENDING
        return 0

    def GetOverlappedResult(self, handle, overlapped, count, wait):
        count._obj.value = self.pending.pop(ctypes.addressof(overlapped._obj))
        return 1

    def CloseHandle(self, handle):
        fd, _ = self.handles.pop(handle)
        if fd is not None:
            os.close(fd)

    def get_last_error(self):
        return self.error
