"""DXGI as Microsoft documents it: COM objects with tables of functions, and adapters whose memory a test sets.

The places in the tables are those of dxgi.h and dxgi1_4.h: 3 methods of IUnknown, 4 of IDXGIObject, then those of each
interface after the ones that it extends.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

OBJECT = (
    "QueryInterface",
    "AddRef",
    "Release",
    "SetPrivateData",
    "SetPrivateDataInterface",
    "GetPrivateData",
    "GetParent",
)
ADAPTER = (*OBJECT, "EnumOutputs", "GetDesc", "CheckInterfaceSupport")
ADAPTER3 = (*ADAPTER, "GetDesc1", "GetDesc2", "RegisterHardwareContentProtectionTeardownStatusEvent",
            "UnregisterHardwareContentProtectionTeardownStatus", "QueryVideoMemoryInfo", "SetVideoMemoryReservation",
            "RegisterVideoMemoryBudgetChangeNotificationEvent", "UnregisterVideoMemoryBudgetChangeNotification")  # fmt: skip
FACTORY1 = (*OBJECT, "EnumAdapters", "MakeWindowAssociation", "GetWindowAssociation", "CreateSwapChain",
            "CreateSoftwareAdapter", "EnumAdapters1", "IsCurrent")  # fmt: skip
IID_FACTORY1 = uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387").bytes_le
IID_ADAPTER3 = uuid.UUID("645967a4-1392-4310-a798-8053ce3e93fd").bytes_le
NOT_FOUND, NO_INTERFACE, INVALID_CALL = -2005270526, -2147467262, -2005270527  # HRESULTs


@dataclass
class Card:
    """A GPU. ``local``, ``shared``: (budget, usage) in bytes; ``windows_10``: whether it has an IDXGIAdapter3."""

    name: str
    dedicated: int = 8 << 30
    local: tuple[int, int] = (7 << 30, 0)
    shared: tuple[int, int] = (16 << 30, 0)
    luid: bytes = bytes(8)
    windows_10: bool = True
    queries: list[int] = field(default_factory=list)


class FakeDxgi:
    """The library dxgi.dll (`library`) over ``cards``. ``references``: those that the caller has not released."""

    def __init__(self, cards: list[Card]) -> None:
        self.cards, self.references = cards, 0
        self._kept: list[Any] = []

    def _object(self, names: tuple[str, ...], **methods: Callable[..., int]) -> int:
        """Return the address of a new COM object that the caller refers to once."""

        def released(this: int) -> int:
            self.references -= 1
            return 0

        methods["Release"] = released
        table = (ctypes.c_void_p * len(names))()
        for place, name in enumerate(names):
            if name in methods:
                kinds = [ctypes.c_void_p] * methods[name].__code__.co_argcount
                function = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(methods[name])
                self._kept.append(function)
                table[place] = ctypes.cast(function, ctypes.c_void_p).value
        made = (ctypes.c_void_p * 1)(ctypes.addressof(table))
        self._kept += [table, made]
        self.references += 1
        return ctypes.addressof(made)

    def _adapter(self, card: Card) -> int:
        def QueryInterface(this: int, iid: int, result: int) -> int:
            if ctypes.string_at(iid, 16) != IID_ADAPTER3 or not card.windows_10:
                return NO_INTERFACE
            ctypes.c_void_p.from_address(result).value = self._object(ADAPTER3, QueryVideoMemoryInfo=query)
            return 0

        def query(this: int, node: int | None, group: int | None, result: int) -> int:
            if (node or 0) != 0 or (group or 0) not in (0, 1):
                return INVALID_CALL
            card.queries.append(group or 0)
            ctypes.memmove(result, (ctypes.c_uint64 * 4)(*(card.shared if group else card.local), 0, 0), 32)
            return 0

        def GetDesc(this: int, result: int) -> int:
            text = card.name.encode("utf-16-le").ljust(256, b"\0")
            numbers = (ctypes.c_uint32 * 4)(0x10DE, 0x2684, 0, 161)
            sizes = (ctypes.c_uint64 * 3)(card.dedicated, 0, 16 << 30)
            whole = text + bytes(numbers) + bytes(sizes) + card.luid
            ctypes.memmove(result, whole, len(whole))
            return 0

        return self._object(ADAPTER, QueryInterface=QueryInterface, GetDesc=GetDesc)

    def library(self, name: str = "dxgi", **_: Any) -> Any:
        """Stand for `ctypes.WinDLL`."""
        if name != "dxgi":
            raise FileNotFoundError(f"Could not find module {name!r} (or one of its dependencies).")

        def EnumAdapters1(this: int, index: int | None, result: int) -> int:
            if (index or 0) >= len(self.cards):
                return NOT_FOUND
            ctypes.c_void_p.from_address(result).value = self._adapter(self.cards[index or 0])
            return 0

        def CreateDXGIFactory1(iid: int, result: int) -> int:
            if ctypes.string_at(iid, 16) != IID_FACTORY1:
                return NO_INTERFACE
            ctypes.c_void_p.from_address(result).value = self._object(FACTORY1, EnumAdapters1=EnumAdapters1)
            return 0

        function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(CreateDXGIFactory1)
        self._kept.append(function)
        return SimpleNamespace(CreateDXGIFactory1=function)
