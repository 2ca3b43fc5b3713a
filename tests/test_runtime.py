"""The device's runtime called directly: failures raise, handles of events come back, what is not loaded is not loaded."""

from __future__ import annotations

import ctypes
import gc
import sys

import pytest
import torch
from carom.core import runtime
from carom.core.transfer import make_engine


class StandIn:
    """A runtime library of Python functions; ``fails`` names one that returns an error."""

    def __init__(self, prefix: str, fails: str = "", code: int = 1) -> None:
        self.made = 0
        self.cleared = 0

        def answer(name):
            def call(*arguments):
                if name == "GetLastError":
                    self.cleared += 1
                if name == "EventCreateWithFlags" and name != fails:
                    self.made += 1
                    ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = self.made
                return code if name == fails else 0

            return call

        for name in ("EventCreateWithFlags", "MemcpyAsync", "EventRecord", "StreamWaitEvent", "EventQuery",
                     "EventSynchronize", "GetLastError"):  # fmt: skip
            setattr(self, prefix + name, answer(name))


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_an_events_handle_is_used_again_only_when_nobody_has_the_event(prefix):
    library = StandIn(prefix)
    calls = runtime.Runtime(library, prefix)
    first, second = calls.event(), calls.event()
    assert {first.handle, second.handle} == {1, 2} and library.made == 2
    kept = first.handle
    del first
    gc.collect()
    assert calls.event().handle == kept and library.made == 2
    assert second.handle == 2


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("MemcpyAsync", lambda calls, event: calls.copy(0, 0, 1, 0)),
        ("EventRecord", lambda calls, event: calls.record(event, 0)),
        ("StreamWaitEvent", lambda calls, event: calls.wait(0, event)),
        ("EventQuery", lambda calls, event: calls.reached(event)),
        ("EventSynchronize", lambda calls, event: calls.synchronize(event)),
    ],
)
def test_a_call_that_fails_raises_its_name_and_code(name, use):
    calls = runtime.Runtime(StandIn("cuda", fails=name, code=719), "cuda")
    event = calls.event()
    with pytest.raises(RuntimeError, match=rf"{name} failed with error 719"):
        use(calls, event)


def test_an_event_that_is_not_reached_is_no_failure_and_leaves_no_error_behind():
    library = StandIn("cuda", fails="EventQuery", code=600)
    calls = runtime.Runtime(library, "cuda")
    assert calls.reached(calls.event()) is False
    assert library.cleared == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's maps as Linux has them")
def test_only_a_library_that_is_loaded_is_found():
    assert runtime._loaded("c") is not None
    assert runtime._loaded("surelynotloaded") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_no_runtime_is_looked_for():
    assert runtime.runtime_engine(torch.device("cpu")) is None
    assert make_engine("cpu").name == "cpu"
