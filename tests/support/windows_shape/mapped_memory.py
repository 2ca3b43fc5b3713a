"""Which files are mapped into a process of the Windows shape, from Linux's /proc."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

VOLUME = "\\Device\\HarddiskVolume9"
_OPENED = "\\\\?\\GLOBALROOT" + VOLUME


@dataclass(frozen=True)
class _Area:
    """A line of /proc/self/maps. ``view``: where the mapping begins that the area continues."""

    start: int
    end: int
    flags: str
    offset: int
    path: str
    view: int


class MemoryInformation(ctypes.Structure):
    """MEMORY_BASIC_INFORMATION ("MEMORY_BASIC_INFORMATION structure (winnt.h)")."""

    _fields_ = [
        ("base", ctypes.c_uint64), ("allocation", ctypes.c_uint64), ("allocation_protect", ctypes.c_uint32),
        ("partition", ctypes.c_uint16), ("size", ctypes.c_uint64), ("state", ctypes.c_uint32), ("protect", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
    ]  # fmt: skip


class MappedMemory:
    """VirtualQuery and the names of mapped files, as Windows would answer for the mappings of this process.

    - "VirtualQuery function": a region is a run of pages with the same state, protection and allocation.
    - "Memory Protection Constants", PAGE_WRITECOPY: a write makes a private copy of the page, which "is marked as
      PAGE_READWRITE"; the page stays MEM_MAPPED.
    - "GetMappedFileNameW function": the name begins with a device; memory of the paging file has none.

    The mappings are looked up when VirtualQuery is called with address 0. All files are on a volume without a letter.
    """

    READONLY, READWRITE, WRITECOPY = 0x02, 0x04, 0x08
    PRIVATE, MAPPED, IMAGE = 0x20000, 0x40000, 0x1000000

    def __init__(self) -> None:
        self._areas: list[_Area] = []
        self._ends: list[int] = []
        self._code: set[str] = set()  # the files that are mapped as programs and libraries

    def _area(self, address: int) -> _Area | None:
        """Return the first area that ends after ``address``."""
        index = bisect.bisect_right(self._ends, address)
        return self._areas[index] if index < len(self._areas) else None

    def GetCurrentProcess(self) -> int:
        return -1

    def VirtualQuery(self, address: int | None, target: int, length: int) -> int:
        address = address or 0
        if not address:
            self._areas = _areas()
            self._ends = [area.end for area in self._areas]
            self._code = {area.path for area in self._areas if "x" in area.flags}
        found = MemoryInformation.from_address(target)
        assert length == ctypes.sizeof(found)
        area = self._area(address)
        if area is None:
            return 0
        found.base, found.allocation = address, area.view
        if area.start > address:  # free
            found.size, found.type, found.protect, found.allocation = area.start - address, 0, 1, 0
            return length
        if not area.path.startswith("/") or area.path in self._code:
            kind = self.IMAGE if area.path in self._code else self.PRIVATE
            found.size, found.type, found.protect = area.end - address, kind, self.READWRITE
            return length
        writable = self.WRITECOPY if "p" in area.flags else self.READWRITE
        first = writable if "w" in area.flags else self.READONLY
        found.type, found.allocation_protect = self.MAPPED, first
        copied = _copied_pages(address, area.end) if first == self.WRITECOPY else [False]
        same = next((index for index, one in enumerate(copied) if one != copied[0]), None)
        found.size = area.end - address if same is None else same * mmap.PAGESIZE
        found.protect = self.READWRITE if copied[0] else first
        return length

    def K32GetMappedFileNameW(self, process: int, address: int, target: Any, size: int) -> int:
        area = self._area(address)
        if area is None or area.start > address or not area.path.startswith("/"):
            return 0
        return _write(target, VOLUME + area.path)

    def make_private(self, address: int, nbytes: int) -> bool:
        """Make the pages of a file's view copy-on-write. Returns False for other memory."""
        self._areas = _areas()
        self._ends = [area.end for area in self._areas]
        area = self._area(address)
        if (
            area is None
            or area.start > address
            or address + nbytes > area.end
            or not area.path.startswith("/")
        ):
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        size = -(-(address + nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
        with open(area.path, "rb") as file:
            how = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED
            made = libc.mmap(
                first, size, mmap.PROT_READ | mmap.PROT_WRITE, how, file.fileno(), area.offset + first - area.start
            )  # fmt: skip
        return bool(made == first)

    def QueryDosDeviceW(self, name: str, target: Any, size: int) -> int:
        """C: is volume 3. The strings that are returned end with an empty one, which counts."""
        return _write(target, "\\Device\\HarddiskVolume3") + 2 if name == "C:" else 0


def _write(target: Any, text: str) -> int:
    """Write ``text`` to a buffer, or to the address of one."""
    source = ctypes.create_unicode_buffer(text)
    ctypes.memmove(target, source, ctypes.sizeof(source))
    return len(text)


def posix_path(path: Any) -> Any:
    """Return the path of this system where ``path`` names a file by the volume of `MappedMemory`; else ``path``."""
    return path.removeprefix(_OPENED) if isinstance(path, str) else path


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
    import numpy as np

    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(start // mmap.PAGESIZE * 8)
        told = np.frombuffer(pages.read((end - start) // mmap.PAGESIZE * 8), np.uint64)
    return (((told >> np.uint64(62)) != 0) & ((told >> np.uint64(61) & np.uint64(1)) == 0)).tolist()
