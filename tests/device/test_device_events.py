"""The device's events are given back to the driver when nobody has them and their runtime is gone."""

from __future__ import annotations

import ctypes
import gc
import sys

import pytest
from carom.core.device import cuda_runtime


class Library:
    """Counts events: those made, those destroyed. ``code``: what destroying one answers."""

    def __init__(self, code: int = 0) -> None:
        self.made, self.destroyed, self.cleared = 0, [], 0

        def create(pointer, flags):
            self.made += 1
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = self.made
            return 0

        def destroy(handle):
            self.destroyed.append(handle)
            return code

        def last_error():
            self.cleared += 1
            return code

        names = (
            "MemcpyAsync",
            "EventRecord",
            "StreamWaitEvent",
            "EventQuery",
            "EventSynchronize",
            "HostGetDevicePointer",
        )
        for name in names:
            setattr(self, "cuda" + name, lambda *arguments: 0)
        self.cudaEventCreateWithFlags = create
        self.cudaEventDestroy = destroy
        self.cudaGetLastError = last_error


def test_events_are_destroyed_with_the_last_of_them_and_their_runtime():
    library = Library()
    calls = cuda_runtime.Runtime(library, "cuda")
    kept, dropped = calls.event(), calls.event()
    del dropped
    gc.collect()
    assert library.destroyed == [], "a handle that nobody has is used again"
    del calls
    gc.collect()
    assert library.destroyed == []
    kept.handle, kept._free  # still to be recorded and waited for  # noqa: B018
    del kept
    gc.collect()
    assert sorted(library.destroyed) == [1, 2] and library.made == 2


def test_events_that_die_with_their_runtime_in_one_cycle_are_destroyed_too():
    """As a session's do: whatever the collector finalizes first."""
    library = Library()
    for _ in range(20):
        calls = cuda_runtime.Runtime(library, "cuda")
        cycle = {"events": [calls.event() for _ in range(3)], "runtime": calls}
        cycle["itself"] = cycle
        calls.keeps = cycle
    del calls, cycle
    gc.collect()
    assert library.made == 60
    assert sorted(library.destroyed) == list(range(1, 61))


def test_an_event_that_cannot_be_destroyed_leaves_no_error_behind():
    library = Library(code=4)
    calls = cuda_runtime.Runtime(library, "cuda")
    calls.event()
    del calls
    gc.collect()
    assert library.destroyed == [1] and library.cleared == 1


def test_nothing_is_destroyed_while_the_interpreter_exits(monkeypatch):
    """The runtime's library may be unloaded by then."""
    exiting = False
    monkeypatch.setattr(sys, "is_finalizing", lambda: exiting)
    library = Library()
    calls = cuda_runtime.Runtime(library, "cuda")
    kept, _ = calls.event(), calls.event()
    exiting = True
    del calls, kept, _
    gc.collect()
    assert library.made == 2 and library.destroyed == []


def test_a_call_that_fails_leaves_no_error_behind():
    """Where proving an engine fails, torch goes on instead: it must not find the error of the try."""
    library = Library()
    library.cudaMemcpyAsync = lambda *arguments: 1
    with pytest.raises(RuntimeError, match="MemcpyAsync failed with error 1"):
        cuda_runtime.Runtime(library, "cuda").copy(0, 0, 1, 0)
    assert library.cleared == 1
