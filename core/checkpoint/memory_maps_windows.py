"""Windows' calls for mapped files: which address ranges of this process are files, and whether it wrote to them.

VirtualQuery lists ranges of pages with equal attributes, K32GetMappedFileNameW names the file of an address,
QueryDosDeviceW gives the drive letter of a device, and VirtualProtect allows writes. See https://learn.microsoft.com/windows/win32/api/memoryapi and
https://learn.microsoft.com/windows/win32/memory/memory-protection-constants.
"""

from __future__ import annotations

import ctypes
import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MEM_MAPPED = 0x40000
_READ_WRITE = 0x04 | 0x40  # PAGE_READWRITE, PAGE_EXECUTE_READWRITE
_PAGE_WRITECOPY = 0x08
_WRITE_COPY = _PAGE_WRITECOPY | 0x80  # or PAGE_EXECUTE_WRITECOPY
_NAME_CHARACTERS = 32768
_NETWORK = "\\Device\\Mup\\"


class _MemoryInformation(ctypes.Structure):
    """MEMORY_BASIC_INFORMATION"""

    _fields_ = [
        ("base", ctypes.c_size_t),
        ("allocation", ctypes.c_size_t),
        ("allocation_protect", ctypes.c_uint32),
        ("partition", ctypes.c_uint16),
        ("size", ctypes.c_size_t),
        ("state", ctypes.c_uint32),
        ("protect", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Region:
    """The addresses ``start`` to ``end``, whose pages have equal attributes, in a view of a file or of other memory.

    ``view``: the address at which the view begins; ``writable``: whether the process may write there; ``copied``:
    whether the pages are private copies, because the process wrote to a copy-on-write view. Such a page is marked
    as PAGE_READWRITE.
    """

    start: int
    end: int
    view: int
    writable: bool
    copied: bool


def load_kernel32() -> Any:
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    word, pointer, size = ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t
    kernel32.VirtualQuery.argtypes = [pointer, pointer, size]
    kernel32.VirtualQuery.restype = size
    kernel32.GetCurrentProcess.restype = pointer
    kernel32.K32GetMappedFileNameW.argtypes = [pointer, pointer, ctypes.c_wchar_p, word]
    kernel32.QueryDosDeviceW.argtypes = [ctypes.c_wchar_p, ctypes.c_wchar_p, word]
    kernel32.VirtualProtect.argtypes = [pointer, size, word, pointer]
    return kernel32


def mapped_regions(kernel32: Any) -> Iterator[Region]:
    """Yield the regions of mapped memory in order of addresses. Some are not of a file (see `file_at`)."""
    found, address = _MemoryInformation(), 0
    # VirtualQuery returns 0 beyond the last address of the process.
    while kernel32.VirtualQuery(address, ctypes.addressof(found), ctypes.sizeof(found)):
        start, address = found.base, found.base + found.size
        if found.type == _MEM_MAPPED:
            shared = bool(found.allocation_protect & _READ_WRITE)
            may_write = bool(found.protect & (_READ_WRITE | _WRITE_COPY))
            copied = bool(found.protect & _READ_WRITE) and not shared
            yield Region(start, address, found.allocation, may_write, copied)


def file_at(kernel32: Any, address: int, drives: dict[str, str]) -> str | None:
    """Return the path of the file that is mapped at ``address``, None for memory of the paging file.

    ``drives``: what `drive_letters` returned.
    """
    name = ctypes.create_unicode_buffer(_NAME_CHARACTERS)
    length = kernel32.K32GetMappedFileNameW(kernel32.GetCurrentProcess(), address, name, _NAME_CHARACTERS)
    if not length:
        return None
    path = name.value
    if path.startswith(_NETWORK):
        # The names of the redirector and of the drive may come first: ";LanmanRedirector\;Z:0000000000012345".
        parts = path[len(_NETWORK) :].split("\\")
        return "\\\\" + "\\".join(itertools.dropwhile(lambda part: part.startswith(";"), parts))
    for device, letter in drives.items():
        if path.startswith(device + "\\"):
            return letter + path[len(device) :]
    return "\\\\?\\GLOBALROOT" + path  # a volume without a letter


def drive_letters(kernel32: Any) -> dict[str, str]:
    r"""Return {device: drive letter}, for example {"\Device\HarddiskVolume3": "C:"}."""
    found = {}
    target = ctypes.create_unicode_buffer(_NAME_CHARACTERS)
    for letter in (f"{letter}:" for letter in string.ascii_uppercase):
        if kernel32.QueryDosDeviceW(letter, target, _NAME_CHARACTERS):
            found[target.value] = letter  # the first of several strings is the one in effect
    return found


def make_private(kernel32: Any, address: int, nbytes: int) -> bool:
    """Let the process write to the pages from ``address``, which are of a read-only view: a write copies the page.

    Windows charges all these pages to RAM and pagefile. Returns False if it refuses.
    """
    before = ctypes.c_uint32()
    return bool(kernel32.VirtualProtect(address, nbytes, _PAGE_WRITECOPY, ctypes.byref(before)))
