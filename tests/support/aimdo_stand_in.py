"""A replacement for comfy-aimdo without a GPU: its Python interface over host memory, with the known semantics of the
library.

It has the functions of `comfy_aimdo.control` and `comfy_aimdo.model_vbar` 0.6 that Carom calls, in the CUDA and ROCm
forms. `priority_pools.py` decides on evictions, in whole pages (checked against the known worked cases). One page of
slack is lost, serials serve as signatures, and no view is valid after its unpin (freed pages are overwritten). The
ledger of a simulated device represents the card. Sessions' allocations there represent torch's allocator, which
evicts pages instead of failing.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
import weakref
from typing import Any

import torch
from carom.core.device import vbar
from carom.core.device.cpu_engine import PlainEngine
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from tests_priority_pools import Device, Pool

PAGE = 4096  # bytes; the real one has 32 MiB
GARBAGE = 0xFF


class Library:
    """The loaded library, `control.lib`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.contexts: list[int] = []


class Driver:
    """The card and the library's state. ``broken``: the names of functions that fail."""

    def __init__(
        self, card: SimulatedDevice | None = None, vendor: str = "cuda", *, broken: str = "", address_space: int = 1 << 40,
        devices: int = 1,
    ) -> None:  # fmt: skip
        self.card = card or SimulatedDevice()
        self.vendor, self.broken, self.address_space = vendor, broken, address_space
        self.devices = devices
        self.pages = Device(1 << 30, slack=1, freed=self._freed)
        self.engines: list[Any] = []
        self.bars: weakref.WeakValueDictionary[str, ModelVBAR] = weakref.WeakValueDictionary()
        self.reserved = 0
        self.calls: list[str] = []
        self.synchronized = 0
        self.fail_faults = 0  # so many end with ERROR
        self.before_fault = lambda: None  # another program moves

    # -- the card

    def fit(self) -> None:
        """Return the number of pages for which the card has room now."""
        ledger = self.card.ledger
        elsewhere = ledger.allocated - self.pages.used * PAGE + ledger.others
        self.pages.capacity = max(0, (self.card.memory_bytes - elsewhere) // PAGE)

    def count(self, pages: int) -> None:
        self.card.ledger.allocated += pages * PAGE

    def pressure(self, nbytes: int) -> None:
        """Simulate that torch's allocator, or another program, needs ``nbytes`` more than are free."""
        self.fit()
        free = self.pages.capacity - self.pages.used
        self.pages.set_headroom(free + -(-nbytes // PAGE))
        self.pages.headroom = 0

    def _freed(self, pool: Pool, entry: int) -> None:
        """Unmap a freed page, after waiting for the device as the library does."""
        self.synchronized += 1
        for engine in self.engines:
            engine.synchronize()
        self.count(-1)
        bar = self.bars.get(pool.name)
        if bar is not None:
            bar.spoil(entry)


class ModelVBAR:
    """A replacement for `comfy_aimdo.model_vbar.ModelVBAR`."""

    driver: Driver
    control: Any

    def __init__(self, size: int, device: int, pageout_callback: Any = None) -> None:
        self._devctx = self.control.get_devctx(device)
        driver = self.driver
        self._pool: Pool | None = None
        if driver.reserved + size > driver.address_space:
            raise MemoryError("VBAR allocation failed")
        driver.reserved += size
        self.device, self.max_size, self.offset = device, size, 0
        self._page = PAGE
        self._memory = torch.full((size + PAGE,), GARBAGE, dtype=torch.uint8, device="cpu")
        self.base_addr = -(-self._memory.data_ptr() // PAGE) * PAGE
        name = f"bar{id(self)}-{driver.reserved}"
        self._pool = driver.pages.pool(name, [1] * -(-size // PAGE))
        driver.bars[name] = self

    def spoil(self, page: int) -> None:
        ctypes.memset(self.base_addr + page * self._page, GARBAGE, self._page)

    def alloc(self, num_bytes: int) -> tuple:
        self.offset = -(-self.offset // 512) * 512
        if self.offset + num_bytes > self.max_size:
            raise MemoryError("VBAR OOM")
        self.offset += num_bytes
        return self, self.base_addr + self.offset - num_bytes, num_bytes

    def _range(self, alloc: int, size: int) -> tuple[int, int]:
        start = alloc - self.base_addr
        assert 0 <= start < start + size <= self.max_size, "the library does not check this"
        return start // PAGE, -(-(start + size) // PAGE)

    def fault(self, alloc: int, size: int) -> Any:
        driver = self.driver
        driver.calls.append("fault")
        driver.before_fault()
        if driver.fail_faults:
            driver.fail_faults -= 1
            raise RuntimeError("Fault failed: 2")
        first, end = self._range(alloc, size)
        driver.fit()
        before = list(self._pool.resident)
        serials = self._pool.fault(first, end)
        for page, (was, now) in enumerate(zip(before, self._pool.resident, strict=True)):
            if now and not was:
                driver.count(1)
                self.spoil(page)
        if serials is None:
            return None
        signature = (ctypes.c_uint32 * (size // PAGE + 2))()
        signature[: len(serials)] = serials
        return signature

    def unpin(self, alloc: int, size: int) -> None:
        try:
            self._pool.unpin(*self._range(alloc, size))
        except Exception as error:
            raise RuntimeError("VBAR unpin failed") from error

    def prioritize(self, malloc_async_clamp: Any = None) -> None:
        self.driver.calls.append("prioritize")
        self._pool.prioritize()

    def deprioritize(self) -> None:
        self._pool.deprioritize()

    def set_watermark(self, size_bytes: int) -> None:
        self._pool.set_watermark(size_bytes // PAGE)

    def set_watermark_limit(self, size_bytes: int) -> None:
        self._pool.set_limit(size_bytes // PAGE)

    def free_memory(self, size_bytes: int) -> int:
        return self._pool.free_memory(-(-size_bytes // PAGE)) * PAGE

    def get_nr_pages(self) -> int:
        return len(self._pool.sizes)

    def get_watermark(self) -> int:
        return self._pool.watermark

    def get_residency(self) -> list[int]:
        return [
            there + 2 * bool(pins) for there, pins in zip(self._pool.resident, self._pool.pins, strict=True)
        ]

    def loaded_size(self) -> int:
        return sum(self._pool.resident) * PAGE

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            self.driver.reserved -= self.max_size

    def __del__(self) -> None:
        self.close()


def _control(driver: Driver) -> dict[str, Any]:
    """Return the contents of `comfy_aimdo.control` by name."""
    space: dict[str, Any] = {"lib": None, "devctxs": []}

    def module() -> Any:
        return sys.modules["comfy_aimdo.control"]

    def init(implementation: str | None = None, **_: Any) -> bool:
        import logging

        driver.calls.append("init")
        if driver.broken == "init":
            logging.info("comfy-aimdo failed to load: no library for this driver")
            return False
        name = {"cuda": "aimdo.so", "rocm": "aimdo_rocm.so"}[implementation or driver.vendor]
        module().lib = module().lib or Library(name)
        return True

    def init_devices(device_ids: Any) -> bool:
        import logging

        driver.calls.append(f"init_devices {list(device_ids)}")
        if module().lib is None or module().devctxs:
            return False
        if driver.broken == "hooks":
            logging.error("funchook_prepare cuMemAlloc failed: 8")
            return False
        module().devctxs = [1000 + int(device) for device in device_ids]
        return True

    def get_devctx(device_id: int) -> int:
        if 1000 + device_id in module().devctxs:
            return 1000 + device_id
        raise RuntimeError(f"comfy-aimdo device {device_id} is not initialized")

    space.update(
        init=init, init_devices=init_devices, get_devctx=get_devctx,
        deinit=lambda: driver.calls.append("deinit"), set_log_critical=lambda: driver.calls.append("quiet"),
    )  # fmt: skip
    if driver.broken == "old":
        del space["get_devctx"]
    return space


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that creates the package only when it is imported."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "comfy_aimdo" or name in ("comfy_aimdo.control", "comfy_aimdo.model_vbar"):
            return importlib.machinery.ModuleSpec(name, self, is_package=name == "comfy_aimdo")
        return None

    def exec_module(self, module: Any) -> None:
        self.driver.calls.append(f"import {module.__name__}")
        if module.__name__ == "comfy_aimdo.control":
            vars(module).update(_control(self.driver))
        elif module.__name__ == "comfy_aimdo.model_vbar":
            from comfy_aimdo import control

            names = {
                name: value
                for name, value in vars(ModelVBAR).items()
                if name not in ("__dict__", "__weakref__")
            }
            names.update(driver=self.driver, control=control)
            if self.driver.broken == "narrow":
                del names["set_watermark"]
            module.lib = control.lib  # bound at import, as the real one does
            module.ModelVBAR = type("ModelVBAR", (), names)


def install(monkeypatch: Any, driver: Driver, *, supported: bool = True) -> Driver:
    """Make `import comfy_aimdo` use ``driver`` and return ``driver``.

    ``supported``: whether the simulated device and the CPU devices count as devices that comfy-aimdo supports.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "comfy_aimdo"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Finder(driver), *sys.meta_path])
    monkeypatch.setattr(vbar, "PAGE", PAGE)
    monkeypatch.setattr(vbar, "_state", vbar._State())
    for name in vbar._SETTINGS:
        monkeypatch.delenv(name, raising=False)

    def index(engine: Any) -> int | None:
        if not supported or not isinstance(engine, (SimulatedEngine, PlainEngine)):
            return None
        if engine not in driver.engines:
            driver.engines.append(engine)
        return 0

    need = SimulatedEngine._need

    def hooked(engine: SimulatedEngine, nbytes: int) -> None:
        short = nbytes - engine.free_bytes()
        if short > 0:
            driver.pressure(short)
        need(engine, nbytes)

    monkeypatch.setattr(vbar, "device_index", index)
    monkeypatch.setattr(SimulatedEngine, "_need", hooked)
    return driver
