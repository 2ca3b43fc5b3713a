"""What a refused pin leaves behind: the runtime keeps an error for the thread, and torch would raise it from its next launch."""

from __future__ import annotations

import ctypes
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from carom.core.device import cuda_runtime, system_pinner
from carom.core.device.stream_engine import runtime_pinner
from carom.core.host.arena import HostArena
from carom.tools.doctor import hardware

ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered
NOT_REGISTERED = 713
DEVICE = torch.device("cuda", 0)


class Driver:
    """A runtime with the part of its state that matters here: what is registered, and each thread's last error."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.local = threading.local()

    def _gives(self, code: int) -> int:
        if code:
            self.local.error = code
        return code

    def last_error(self) -> int:
        found, self.local.error = getattr(self.local, "error", 0), 0
        return found

    def launch(self) -> None:
        """What torch does with each kernel."""
        if code := self.last_error():
            raise RuntimeError(f"CUDA error {code}")

    # as torch.cuda.cudart() has them
    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address in self.registered:
            return self._gives(ALREADY)
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return self._gives(0 if self.registered.pop(address, None) else NOT_REGISTERED)

    def loaded(self) -> types.SimpleNamespace:
        """The library as ctypes has it; no other call of it is made here."""
        names = ("EventCreateWithFlags", "MemcpyAsync", "EventRecord", "StreamWaitEvent", "EventQuery",
                 "EventSynchronize", "EventDestroy", "HostGetDevicePointer")  # fmt: skip
        calls = {"cuda" + name: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0) for name in names}
        return types.SimpleNamespace(cudaGetLastError=_Function(self.last_error), **calls)


class _Function:
    """A function that takes ctypes' declarations, and runs on the thread that calls it."""

    def __init__(self, call) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> int:
        return self._call()


@pytest.fixture(params=["found", "not found"])
def driver(request, monkeypatch):
    """In torch's place: with its library found among the loaded ones, and with only torch's own calls to be had."""
    driver = Driver()
    monkeypatch.setattr("carom.core.device.system_pinner.on_windows", lambda: False)  # its ways: test_wddm.py

    def zeros(*size: int, device: torch.device) -> None:
        assert device == DEVICE
        driver.launch()

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(system_pinner, "_ways", {})  # on Windows, what the driver of another test pinned
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = cuda_runtime.Runtime(driver.loaded(), "cuda") if request.param == "found" else None
    monkeypatch.setattr(cuda_runtime, "find", lambda: found)
    monkeypatch.setattr(cuda_runtime.torch, "zeros", zeros)
    return driver


def test_a_refused_pin_leaves_no_error_on_the_thread_that_pinned(driver):
    arena = HostArena(runtime_pinner(DEVICE), None)
    block = arena.allocate(4096)

    def pins() -> bool:
        done = arena.pin(block)
        driver.launch()
        return done

    driver.cudaHostRegister(block.data.data_ptr(), 4096, 0)  # somebody else's
    driver.local.error = 1  # this thread's error is not the pinning thread's to clear
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(pins).result() is False
    assert driver.last_error() == 1
    assert arena.pinned_bytes == 0 and any(str(ALREADY) in note for note in arena.notes)


def test_memory_that_is_no_longer_registered_leaves_no_error_when_it_is_given_back(driver):
    arena = HostArena(runtime_pinner(DEVICE), None)
    block = arena.allocate(4096)
    assert arena.pin(block)
    driver.registered.clear()
    block.unpin()
    driver.launch()


def test_a_probe_that_may_not_pin_leaves_no_error(driver, monkeypatch):
    touched = types.SimpleNamespace(pin_memory=lambda: None, data_ptr=lambda: 64)
    driver.registered[64] = 1
    module = types.SimpleNamespace(
        zeros=lambda *size, dtype: touched, uint8=torch.uint8, cuda=torch.cuda, device=torch.device
    )
    assert hardware._pin_rates(module, 1024)[1] is None
    driver.launch()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("found", [True, False], ids=["library found", "by torch alone"])
def test_on_a_gpu_an_address_registered_twice_disturbs_no_kernel(found, monkeypatch, tmp_path):
    if not found:
        monkeypatch.setattr(cuda_runtime, "find", lambda: None)
    # Other packages load copies of the runtime, whose errors are others.
    maps = Path("/proc/self/maps").read_text().splitlines()
    for number, path in enumerate({line.split(maxsplit=5)[-1] for line in maps if "libcudart" in line}):
        copy = tmp_path / str(number) / Path(path).name
        copy.parent.mkdir()
        shutil.copy(path, copy)
        ctypes.CDLL(str(copy)).cudaGetLastError()
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(8, device=device)
    arena, again = (HostArena(runtime_pinner(device), None) for _ in range(2))
    block = arena.allocate(1 << 20)
    twice = type(block)(block.data, False, 0)
    assert arena.pin(block)
    assert not again.pin(twice)
    assert float((x + 1).sum()) == 16
    block.unpin()
    again._pinner.unregister(block.data.data_ptr())  # registered no more
    assert float((x + 1).sum()) == 16
