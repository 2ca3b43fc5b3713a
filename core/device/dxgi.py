"""DXGI, through ctypes: what Windows says of the memory of a GPU, for this process and at this moment.

`IDXGIAdapter3::QueryVideoMemoryInfo` reports a budget and the usage of two kinds of memory: local (the card's own) and
non-local (*shared*: host memory that the GPU uses). The interfaces are COM objects. A method is called through the
table of function pointers at the start of its object, by its place in the table (dxgi.h, dxgi1_4.h).
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .wddm import Segment

_FACTORY = uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387")  # IDXGIFactory1
_ADAPTER3 = uuid.UUID("645967a4-1392-4310-a798-8053ce3e93fd")  # IDXGIAdapter3
_QUERY_INTERFACE, _RELEASE = 0, 2  # of IUnknown
_GET_DESC = 8  # of IDXGIAdapter
_ENUM_ADAPTERS1 = 12  # of IDXGIFactory1
_QUERY_VIDEO_MEMORY_INFO = 14  # of IDXGIAdapter3
_LOCAL, _NON_LOCAL = 0, 1  # DXGI_MEMORY_SEGMENT_GROUP
_MOST_ADAPTERS = 64


class _Description(ctypes.Structure):
    """DXGI_ADAPTER_DESC. Its strings have 16 bits for each character."""

    _fields_ = [
        ("Description", ctypes.c_uint16 * 128),
        ("VendorId", ctypes.c_uint32),
        ("DeviceId", ctypes.c_uint32),
        ("SubSysId", ctypes.c_uint32),
        ("Revision", ctypes.c_uint32),
        ("DedicatedVideoMemory", ctypes.c_size_t),
        ("DedicatedSystemMemory", ctypes.c_size_t),
        ("SharedSystemMemory", ctypes.c_size_t),
        ("AdapterLuid", ctypes.c_ubyte * 8),
    ]


class _VideoMemoryInfo(ctypes.Structure):
    """DXGI_QUERY_VIDEO_MEMORY_INFO."""

    _fields_ = [
        ("Budget", ctypes.c_uint64),
        ("CurrentUsage", ctypes.c_uint64),
        ("AvailableForReservation", ctypes.c_uint64),
        ("CurrentReservation", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Adapter:
    """A GPU as DXGI sees it. ``luid``: the eight bytes by which Windows names it; ``dedicated``: bytes of its own
    memory; ``pointer``: its IDXGIAdapter3, which is kept as long as the process runs.
    """

    name: str
    luid: bytes
    dedicated: int
    pointer: int

    def local(self) -> Segment | None:
        """Return what this process may use and uses of the card's own memory; None if Windows does not say."""
        return self._query(_LOCAL)

    def shared(self) -> Segment | None:
        """Return what this process may use and uses of shared memory; None if Windows does not say."""
        return self._query(_NON_LOCAL)

    def _query(self, group: int) -> Segment | None:
        found = _VideoMemoryInfo()
        kinds = (ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p)
        if _call(self.pointer, _QUERY_VIDEO_MEMORY_INFO, kinds, 0, group, ctypes.addressof(found)) < 0:
            return None
        return Segment(found.Budget, found.CurrentUsage)


def adapters() -> list[Adapter]:
    """Return the GPUs of this machine, none on systems without DXGI."""
    try:
        library: Any = ctypes.WinDLL("dxgi")  # type: ignore[attr-defined,unused-ignore]
        create = library.CreateDXGIFactory1
    except (AttributeError, OSError):
        return []
    create.argtypes, create.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int32
    factory = ctypes.c_void_p()
    if create(_FACTORY.bytes_le, ctypes.addressof(factory)) < 0 or not factory.value:
        return []
    found = []
    try:
        for index in range(_MOST_ADAPTERS):
            adapter = ctypes.c_void_p()
            kinds = (ctypes.c_uint32, ctypes.c_void_p)
            if _call(factory.value, _ENUM_ADAPTERS1, kinds, index, ctypes.addressof(adapter)) < 0:
                break
            assert adapter.value
            found.append(_described(adapter.value))
            _call(adapter.value, _RELEASE, ())
    finally:
        _call(factory.value, _RELEASE, ())
    return [adapter for adapter in found if adapter is not None]


def matching(found: Iterable[Adapter], name: str, luid: bytes | None) -> Adapter | None:
    """Return the adapter that is the device called ``name`` with ``luid`` (None: unknown), None if there is none."""
    fitting = [one for one in found if (one.name == name if luid is None else one.luid == luid)]
    return fitting[0] if fitting else None


def _described(pointer: int) -> Adapter | None:
    """Return the adapter at ``pointer``; None if it has no IDXGIAdapter3, which Windows has since version 10."""
    newer, description = ctypes.c_void_p(), _Description()
    kinds = (ctypes.c_char_p, ctypes.c_void_p)
    if _call(pointer, _QUERY_INTERFACE, kinds, _ADAPTER3.bytes_le, ctypes.addressof(newer)) < 0:
        return None
    assert newer.value
    if _call(pointer, _GET_DESC, (ctypes.c_void_p,), ctypes.addressof(description)) < 0:
        _call(newer.value, _RELEASE, ())
        return None
    name = bytes(description.Description).decode("utf-16-le", "replace").split("\0")[0]
    return Adapter(name, bytes(description.AdapterLuid), description.DedicatedVideoMemory, newer.value)


def _call(pointer: int, index: int, kinds: tuple[Any, ...], *arguments: Any) -> int:
    """Call the method with place ``index`` of the COM object at ``pointer``; return its HRESULT, negative if it failed."""
    table = ctypes.c_void_p.from_address(pointer).value
    assert table
    function = ctypes.c_void_p.from_address(table + index * ctypes.sizeof(ctypes.c_void_p)).value
    assert function
    # 64-bit Windows has a single calling convention.
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds)(function)(pointer, *arguments)
