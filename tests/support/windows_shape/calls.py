"""Fakes of Windows' calls. Each behaves as the named page of Microsoft's documentation (learn.microsoft.com) says.

To add one: write a function with `fake(library, result, *arguments)`. Pointers arrive as addresses (int or None); write
through them with `store`, and report failure by `fail(code)`, which sets the last error and returns 0. `c_wchar` has
4 bytes here and 2 on Windows, so pass strings as `c_wchar_p`, and buffers made by
`ctypes.create_unicode_buffer`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from ctypes import c_int, c_uint32, c_uint64, c_void_p, c_wchar_p
from typing import Any

from . import files, handles, memory
from .libraries import fake, last_error, set_last_error
from .mapped_memory import MappedMemory, posix_path

FILE_NOT_FOUND, ACCESS_DENIED, INVALID_HANDLE, SHARING_VIOLATION = 2, 5, 6, 32
HANDLE_EOF, INVALID_PARAMETER, IO_PENDING, INSUFFICIENT_BUFFER, FILE_EXISTS = 38, 87, 997, 122, 80
GENERIC_READ, GENERIC_WRITE, DELETE = 0x80000000, 0x40000000, 0x10000
FILE_SHARE_DELETE = 0x4
NO_BUFFERING, OVERLAPPED, DELETE_ON_CLOSE = 0x20000000, 0x40000000, 0x04000000
# Sectors of 512 bytes satisfy most drives; 4096 is what "File Buffering" asks for on Advanced Format drives.
SECTOR = 4096
BOOL, DWORD, HANDLE, POINTER = c_int, c_uint32, c_void_p, c_void_p

_flags: dict[int, int] = {}  # descriptor: the flags of CreateFileW
_pending: dict[int, tuple[int, int]] = {}  # address of an OVERLAPPED: bytes, error
_lock = threading.Lock()


def register() -> None:
    """Do nothing: importing this module registers its calls."""


def fail(code: int, result: int = 0) -> int:
    set_last_error(code)
    return result


def store(address: int | None, kind: Any, value: int) -> None:
    """Write a number of a C type to an address that a caller passed."""
    if address:
        kind.from_address(address).value = value


# -- kernel32: files ("CreateFileW function", "File Buffering", "ReadFile function", "GetOverlappedResult function")


def _plain(path: str) -> str:
    path = posix_path(path)
    return path[4:] if path.startswith(("\\\\?\\", "\\\\.\\")) else path


@fake("kernel32", HANDLE, c_wchar_p, DWORD, DWORD, POINTER, DWORD, DWORD, HANDLE)
def CreateFileW(path, access, share, security, how, flags, template):
    """Creation dispositions: CREATE_NEW 1, CREATE_ALWAYS 2, OPEN_EXISTING 3, OPEN_ALWAYS 4, TRUNCATE_EXISTING 5."""
    wanted = {1: os.O_CREAT | os.O_EXCL, 2: os.O_CREAT | os.O_TRUNC, 3: 0, 4: os.O_CREAT, 5: os.O_TRUNC}.get(
        how
    )
    if wanted is None:
        return fail(INVALID_PARAMETER, handles.INVALID)
    write, read = bool(access & GENERIC_WRITE), bool(access & GENERIC_READ)
    mode = os.O_RDWR if write and read else os.O_WRONLY if write else os.O_RDONLY
    name = _plain(path)
    if flags & DELETE_ON_CLOSE and not access & DELETE:
        return fail(ACCESS_DENIED, handles.INVALID)
    try:
        fd = os.open(name, wanted | mode, 0o600)
    except FileNotFoundError:
        return fail(FILE_NOT_FOUND, handles.INVALID)
    except FileExistsError:
        return fail(FILE_EXISTS, handles.INVALID)
    except OSError as error:
        return fail(getattr(error, "winerror", ACCESS_DENIED), handles.INVALID)
    if share & FILE_SHARE_DELETE or flags & DELETE_ON_CLOSE:
        fd = files.share(fd, name if flags & DELETE_ON_CLOSE else None)
    with _lock:
        _flags[fd] = flags
    return handles.of_descriptor(fd)


class OverlappedStructure(ctypes.Structure):
    """OVERLAPPED ("OVERLAPPED structure (minwinbase.h)")."""

    _fields_ = [
        ("internal", c_uint64), ("internal_high", c_uint64), ("offset", c_uint32), ("offset_high", c_uint32), ("event", c_void_p),
    ]  # fmt: skip


def _transfer(
    handle: int, buffer: int, want: int, count: int | None, overlapped: int | None, write: bool
) -> int:
    fd = handles.descriptor(handle or 0)
    if fd < 0:
        return fail(INVALID_HANDLE)
    flags = _flags.get(fd, 0)
    if flags & OVERLAPPED and not overlapped:
        return fail(INVALID_PARAMETER)
    if overlapped:
        call = OverlappedStructure.from_address(overlapped)
        at = call.offset | call.offset_high << 32
    else:
        at = os.lseek(fd, 0, os.SEEK_CUR)
    # "File access sizes, including the optional file offset in the OVERLAPPED structure, must be for a number of bytes
    # that is an integer multiple of the volume sector size"; "buffer addresses ... should be physical sector-aligned".
    if flags & NO_BUFFERING and (at % SECTOR or want % SECTOR or buffer % SECTOR):
        return fail(INVALID_PARAMETER)
    try:
        memory_of = (ctypes.c_char * want).from_address(buffer) if want else bytearray()
        done = os.pwrite(fd, memory_of, at) if write else os.preadv(fd, [memory_of], at)
    except OSError:
        return fail(INVALID_HANDLE)
    if not overlapped:
        os.lseek(fd, at + done, os.SEEK_SET)
        store(count, c_uint32, done)
        return 1
    error = HANDLE_EOF if not write and not done and want else 0
    with _lock:
        _pending[overlapped] = done, error
    return fail(IO_PENDING)


@fake("kernel32", BOOL, HANDLE, POINTER, DWORD, POINTER, POINTER)
def ReadFile(handle, buffer, want, count, overlapped):
    """A read through an overlapped handle is pending; its result is GetOverlappedResult's."""
    return _transfer(handle, buffer, want, count, overlapped, False)


@fake("kernel32", BOOL, HANDLE, POINTER, DWORD, POINTER, POINTER)
def WriteFile(handle, buffer, want, count, overlapped):
    return _transfer(handle, buffer, want, count, overlapped, True)


@fake("kernel32", BOOL, HANDLE, POINTER, POINTER, BOOL)
def GetOverlappedResult(handle, overlapped, count, wait):
    with _lock:
        done, error = _pending.pop(overlapped, (0, INVALID_PARAMETER))
    store(count, c_uint32, done)
    return fail(error) if error else 1


@fake("kernel32", HANDLE, POINTER, BOOL, BOOL, c_wchar_p)
def CreateEventW(security, manual, initial, name):
    return handles.add(threading.Event())


@fake("kernel32", BOOL, HANDLE)
def CloseHandle(handle):
    with _lock:
        _flags.pop(handles.descriptor(handle or 0), None)
    return 1 if handles.close(handle or 0) else fail(INVALID_HANDLE)


@fake("kernel32", BOOL, HANDLE)
def FlushFileBuffers(handle):
    os.fsync(handles.descriptor(handle))
    return 1


@fake("kernel32", BOOL, HANDLE, POINTER)
def GetFileSizeEx(handle, size):
    store(size, ctypes.c_int64, os.fstat(handles.descriptor(handle)).st_size)
    return 1


@fake("kernel32", BOOL, HANDLE, ctypes.c_int64, POINTER, DWORD)
def SetFilePointerEx(handle, distance, new, how):
    at = os.lseek(handles.descriptor(handle), distance, how)
    store(new, ctypes.c_int64, at)
    return 1


@fake("kernel32", BOOL, HANDLE, POINTER, POINTER, POINTER)
def SetFileTime(handle, created, accessed, written):
    """Only the value is known that lets operations through the handle not change the time of the last write."""
    if not written or c_uint64.from_address(written).value != (1 << 64) - 1:
        return fail(INVALID_PARAMETER)
    files.keep_write_time(handles.descriptor(handle or 0))
    return 1


@fake("kernel32", BOOL, HANDLE)
def SetEndOfFile(handle):
    """Sets the length without writing: the bytes up to it are zero when read (valid data length)."""
    fd = handles.descriptor(handle)
    files._ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))
    return 1


# -- kernel32: the process and its memory


@fake("kernel32", DWORD)
def GetLastError():
    return last_error()


@fake("kernel32", HANDLE)
def GetCurrentProcess():
    return handles.INVALID  # the pseudo handle -1


_mapped = MappedMemory()


@fake("kernel32", ctypes.c_size_t, POINTER, POINTER, ctypes.c_size_t)
def VirtualQuery(address, information, length):
    return _mapped.VirtualQuery(address, information, length)


@fake("kernel32", DWORD, HANDLE, POINTER, POINTER, DWORD)
def K32GetMappedFileNameW(process, address, name, size):
    return _mapped.K32GetMappedFileNameW(process, address, name, size)


@fake("kernel32", DWORD, c_wchar_p, POINTER, DWORD)
def QueryDosDeviceW(name, target, size):
    return _mapped.QueryDosDeviceW(name, target, size)


@fake("kernel32", BOOL, POINTER, ctypes.c_size_t, DWORD, POINTER)
def VirtualProtect(address, nbytes, protection, before):
    """Read-only views of files become copy-on-write, which charges them to the commit limit. Nothing else is done."""
    if protection != MappedMemory.WRITECOPY:
        return fail(INVALID_PARAMETER)
    try:
        memory.charge(nbytes)
    except OSError:
        return fail(memory.ERROR_COMMITMENT_LIMIT)
    if not _mapped.make_private(address, nbytes):
        memory.uncharge(nbytes)
        return fail(INVALID_PARAMETER)
    store(before, c_uint32, MappedMemory.READONLY)
    return 1


class MemoryStatusEx(ctypes.Structure):
    """MEMORYSTATUSEX ("MEMORYSTATUSEX structure (sysinfoapi.h)")."""

    _fields_ = [
        ("length", c_uint32), ("load", c_uint32), ("total_phys", c_uint64), ("avail_phys", c_uint64), ("total_page_file", c_uint64),
        ("avail_page_file", c_uint64), ("total_virtual", c_uint64), ("avail_virtual", c_uint64), ("avail_extended", c_uint64),
    ]  # fmt: skip


@fake("kernel32", BOOL, POINTER)
def GlobalMemoryStatusEx(address):
    """dwLength must be set before the call. ullTotalPageFile is the commit limit, ullAvailPageFile what it leaves."""
    if not address or c_uint32.from_address(address).value != ctypes.sizeof(MemoryStatusEx):
        return fail(INVALID_PARAMETER)
    now, found = memory.status(), MemoryStatusEx.from_address(address)
    found.load = 100 * (now.total - now.available) // now.total
    found.total_phys, found.avail_phys = now.total, now.available
    found.total_page_file, found.avail_page_file = now.commit_limit, now.commit_available
    found.total_virtual = found.avail_virtual = (1 << 47) - 131072
    found.avail_extended = 0
    return 1


def _modules() -> dict[int, str]:
    """Return the program and the loaded libraries by their addresses."""
    found: dict[str, int] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and (".so" in fields[5] or fields[5] == os.path.realpath(sys.executable)):
                found.setdefault(fields[5], int(fields[0].partition("-")[0], 16))
    return {address: path for path, address in found.items()}


@fake("kernel32", BOOL, HANDLE, POINTER, DWORD, POINTER)
def K32EnumProcessModules(process, modules, nbytes, needed):
    """lpcbNeeded is the size of all handles, also where the array is too small ("EnumProcessModules function (psapi.h)")."""
    found, size = list(_modules()), ctypes.sizeof(c_void_p)
    store(needed, c_uint32, size * len(found))
    for index, module in enumerate(found[: nbytes // size]):
        store(modules + index * size, ctypes.c_uint64, module)
    return 1


@fake("kernel32", DWORD, HANDLE, POINTER, DWORD)
def GetModuleFileNameW(module, buffer, length):
    text = _modules().get(module or 0, sys.executable)
    if len(text) >= length:
        return fail(INSUFFICIENT_BUFFER, length)
    ctypes.memmove(
        buffer, ctypes.create_unicode_buffer(text), ctypes.sizeof(ctypes.c_wchar) * (len(text) + 1)
    )
    return len(text)
