"""Functions of Windows' kernel32 that act on this system's files, with the rules that Microsoft documents."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass

import numpy as np
from carom.core.checkpoint import direct_io_windows, memory_maps_windows


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


@dataclass(frozen=True)
class _Area:
    """A line of /proc/self/maps. ``view``: where the mapping begins that the area continues."""

    start: int
    end: int
    flags: str
    offset: int
    path: str
    view: int


class FakeMemory:
    """VirtualQuery and the names of mapped files, as Windows would answer for the mappings of this process (on Linux).

    The mappings are looked up when VirtualQuery is called with address 0. Files are on volume 3, which is C:.
    """

    READONLY, READWRITE, WRITECOPY = 0x02, 0x04, 0x08
    PRIVATE, MAPPED, IMAGE = 0x20000, 0x40000, 0x1000000
    VOLUME = "\\Device\\HarddiskVolume3"

    def __init__(self) -> None:
        self._areas: list[_Area] = []

    def GetCurrentProcess(self):
        return -1

    def VirtualQuery(self, address, target, length):
        if not address:
            self._areas = _areas()
        found = memory_maps_windows._MemoryInformation.from_address(target)
        assert length == ctypes.sizeof(found)
        area = next((one for one in self._areas if one.end > address), None)
        if area is None:
            return 0
        code = {one.path for one in self._areas if "x" in one.flags}
        found.base, found.allocation = address, area.view
        if area.start > address:  # free
            found.size, found.type, found.protect, found.allocation = area.start - address, 0, 1, 0
            return length
        if not area.path.startswith("/") or area.path in code:
            kind = self.IMAGE if area.path in code else self.PRIVATE
            found.size, found.type, found.protect = area.end - address, kind, self.READWRITE
            return length
        first = (
            self.READONLY
            if "w" not in area.flags
            else self.WRITECOPY
            if "p" in area.flags
            else self.READWRITE
        )
        found.type, found.allocation_protect = self.MAPPED, first
        copied = _copied_pages(address, area.end) if first == self.WRITECOPY else [False]
        same = next((index for index, one in enumerate(copied) if one != copied[0]), None)
        found.size = area.end - address if same is None else same * mmap.PAGESIZE
        found.protect = self.READWRITE if copied[0] else first
        return length

    def K32GetMappedFileNameW(self, process, address, target, size):
        area = next((one for one in self._areas if one.start <= address < one.end), None)
        if area is None or not area.path.startswith("/"):
            return 0
        target.value = self.VOLUME + area.path.replace("/", "\\")
        return len(target.value)

    def QueryDosDeviceW(self, name, target, size):
        if name != "C:":
            return 0
        target.value = self.VOLUME
        return len(target.value) + 2


def posix_path(path: str | None) -> str | None:
    r"""Return the path of this system for one on C:, as `FakeMemory` names files."""
    return path and path.removeprefix("C:").replace("\\", "/")


def _areas() -> list[_Area]:
    found: list[_Area] = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, flags, offset, _, inode, *rest = line.rstrip("\n").split(maxsplit=5)
            start, end = (int(part, 16) for part in addresses.split("-"))
            path = rest[0] if rest and inode != "0" else ""
            last = found[-1] if found else None
            continues = (
                last and path and last.path == path and last.end == start
                and last.offset + last.end - last.start == int(offset, 16)
            )  # fmt: skip
            view = last.view if last and continues else start
            found.append(_Area(start, end, flags, int(offset, 16), path, view))
    return found


def _copied_pages(start: int, end: int) -> list[bool]:
    """Return for each page whether it is a private copy: in memory or swapped out, and not of a file."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(start // mmap.PAGESIZE * 8)
        told = np.frombuffer(pages.read((end - start) // mmap.PAGESIZE * 8), np.uint64)
    return (((told >> np.uint64(62)) != 0) & ((told >> np.uint64(61) & np.uint64(1)) == 0)).tolist()
