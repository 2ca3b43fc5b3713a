"""Unbuffered positioned reads on Windows: CreateFileW with FILE_FLAG_NO_BUFFERING, ReadFile with OVERLAPPED.

The file is opened for overlapped reads because the kernel serialises the reads on a synchronous handle. See
https://learn.microsoft.com/windows/win32/fileio/file-buffering for the alignment rules (sector size, 4096
bytes at most).
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Any

_GENERIC_READ = 0x80000000
_SHARE_ALL = 0x1 | 0x2 | 0x4
_OPEN_EXISTING = 3
_NO_BUFFERING, _OVERLAPPED, _RANDOM = 0x20000000, 0x40000000, 0x10000000
_INVALID_HANDLE = ctypes.c_void_p(-1).value
ERROR_HANDLE_EOF, ERROR_INVALID_PARAMETER, ERROR_IO_PENDING = 38, 87, 997
# {Windows error: (errno, text)}. The errno decides the class of the exception, and the class decides whether the reader
# tries again: a missing file stays missing, and another program closes a file that it has open.
_KNOWN_ERRORS = {
    2: (errno.ENOENT, "the file does not exist"),
    3: (errno.ENOENT, "the folder does not exist"),
    5: (errno.EACCES, "access is denied"),
    32: (errno.EBUSY, "the file is in use by another program"),
}


class _Overlapped(ctypes.Structure):
    _fields_ = [
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    ]


def _load_kernel32() -> Any:
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    handle, word, pointer = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p
    kernel32.CreateFileW.restype = handle
    kernel32.CreateFileW.argtypes = [ctypes.c_wchar_p, word, word, pointer, word, word, handle]
    kernel32.ReadFile.argtypes = [handle, pointer, word, pointer, pointer]
    kernel32.GetOverlappedResult.argtypes = [handle, pointer, pointer, ctypes.c_int]
    kernel32.CreateEventW.restype = handle
    kernel32.CreateEventW.argtypes = [pointer, ctypes.c_int, ctypes.c_int, ctypes.c_wchar_p]
    kernel32.CloseHandle.argtypes = [handle]
    kernel32.get_last_error = ctypes.get_last_error  # type: ignore[attr-defined]
    return kernel32


def long_path(path: str) -> str:
    r"""Return ``path`` in the ``\\?\`` form, which lifts the limit of 260 characters."""
    if path.startswith("\\\\?\\"):
        return path
    full = os.path.abspath(path)
    return "\\\\?\\UNC\\" + full[2:] if full.startswith("\\\\") else "\\\\?\\" + full


class WindowsFile:
    """A file read by ReadFile. ``direct`` turns False where Windows refuses to open or read the file
    unbuffered.
    """

    def __init__(self, path: str, direct: bool = True, kernel32: Any = None) -> None:
        self._kernel32 = kernel32 or _load_kernel32()
        self._path = path
        self._events = threading.local()
        self._all_events: list[int] = []
        self._lock = threading.Lock()
        self._handles: dict[bool, int] = {}
        self.direct = direct
        if direct:
            try:
                self._handles[True] = self._open(_NO_BUFFERING)
            except OSError as error:
                if getattr(error, "winerror", None) != ERROR_INVALID_PARAMETER:
                    raise
                self.direct = False
        if not self.direct:
            self._handles[False] = self._open(_RANDOM)

    def _open(self, flags: int) -> int:
        handle = self._kernel32.CreateFileW(
            long_path(self._path), _GENERIC_READ, _SHARE_ALL, None, _OPEN_EXISTING, flags | _OVERLAPPED, None
        )
        if handle in (None, _INVALID_HANDLE):
            raise self._error("cannot be opened")
        return handle

    def _error(self, message: str) -> OSError:
        code = self._kernel32.get_last_error()
        number, reason = _KNOWN_ERRORS.get(code, (0, message))
        error = OSError(number, f"{reason} (Windows error {code})", self._path)
        error.winerror = code  # type: ignore[attr-defined]
        return error

    def _event(self) -> int:
        # Each thread has an event of its own: two reads that share an event could wake each other's thread.
        if not hasattr(self._events, "handle"):
            self._events.handle = self._kernel32.CreateEventW(None, 1, 0, None)
            with self._lock:
                self._all_events.append(self._events.handle)
        return self._events.handle

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if self.direct:
            try:
                return self._read(self._handles[True], buffer, offset)
            except OSError as error:
                if getattr(error, "winerror", None) != ERROR_INVALID_PARAMETER:
                    raise
                self.direct = False
        with self._lock:
            if False not in self._handles:
                self._handles[False] = self._open(_RANDOM)
        return self._read(self._handles[False], buffer, offset)

    def _read(self, handle: int, buffer: memoryview, offset: int) -> int:
        """Read once at ``offset`` into ``buffer`` and return the number of bytes read, 0 at the end of the
        file.
        """
        want = min(len(buffer), 0x7FFFF000)
        target = (ctypes.c_char * want).from_buffer(buffer)
        call = _Overlapped(0, 0, offset & 0xFFFFFFFF, offset >> 32, self._event())
        count = ctypes.c_uint32(0)
        done = self._kernel32.ReadFile(handle, ctypes.addressof(target), want, None, ctypes.byref(call))
        if not done and self._kernel32.get_last_error() != ERROR_IO_PENDING:
            return self._end_of_file_or_raise("cannot be read")
        if not self._kernel32.GetOverlappedResult(handle, ctypes.byref(call), ctypes.byref(count), 1):
            return self._end_of_file_or_raise("cannot be read")
        return count.value

    def _end_of_file_or_raise(self, message: str) -> int:
        """Return 0 if the last Windows error is the end of the file; raise the error otherwise."""
        if self._kernel32.get_last_error() == ERROR_HANDLE_EOF:
            return 0
        raise self._error(message)

    def stat(self) -> os.stat_result:
        return os.stat(self._path)

    def close(self) -> None:
        handles = [*self._handles.values(), *self._all_events]
        self._handles, self._all_events = {}, []  # before the handles are closed: none is closed twice
        for handle in handles:
            self._kernel32.CloseHandle(handle)
