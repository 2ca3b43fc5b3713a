"""The device's runtime called directly: failures raise, handles of events come back, what is not loaded is not loaded."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch
from carom.core.device import cuda_runtime
from carom.core.device.make_engine import make_engine
from carom.core.device.stream_engine import StreamEngine


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
                     "EventSynchronize", "EventDestroy", "HostGetDevicePointer", "GetLastError", "StreamQuery"):  # fmt: skip
            setattr(self, prefix + name, answer(name))


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_an_events_handle_is_used_again_only_when_nobody_has_the_event(prefix):
    library = StandIn(prefix)
    calls = cuda_runtime.Runtime(library, prefix)
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
    calls = cuda_runtime.Runtime(StandIn("cuda", fails=name, code=719), "cuda")
    event = calls.event()
    with pytest.raises(RuntimeError, match=rf"{name} failed with error 719"):
        use(calls, event)


def test_an_event_that_is_not_reached_is_no_failure_and_leaves_no_error_behind():
    library = StandIn("cuda", fails="EventQuery", code=600)
    calls = cuda_runtime.Runtime(library, "cuda")
    assert calls.reached(calls.event()) is False
    assert library.cleared == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_no_runtime_is_looked_for():
    assert cuda_runtime.runtime_engine(torch.device("cpu")) is None
    assert make_engine("cpu").name == "cpu"


class Calls:
    """Stands for a `Runtime`: notes what it is asked, and whether the operators it replaces would have run."""

    def __init__(self) -> None:
        self.made: list[tuple] = []

    def __getattr__(self, name):
        return lambda *arguments: self.made.append((name, *arguments)) or cuda_runtime.Event(7, [])


class Unpacks:
    """A decoder with one packed tensor and one that travels as it is."""

    raw_copies = [(16, 64, 128)]

    def __init__(self, ready: bool) -> None:
        self.ready, self.launched = ready, []

    def cached_launches(self, wire, target):
        return (
            [lambda source, out, stream=None: self.launched.append((source, out, stream))]
            if self.ready
            else None
        )

    def __call__(self, wire, target):
        self.launched.append("whole")


def engine_over(calls: Calls, kind=cuda_runtime.RuntimeEngine) -> cuda_runtime.RuntimeEngine:
    """A `RuntimeEngine` without its device."""
    engine = object.__new__(kind)
    engine.device = torch.device("cuda", 0)
    engine._runtime, engine._current_device = calls, lambda: 0
    engine._raw_stream = lambda index: 30
    engine._in_raw, engine._out_raw, engine._decode_raw = 10, 20, 40
    engine._decode, engine._direct_peers = None, set()
    engine._device_context = contextlib.nullcontext
    engine._on_stream = lambda stream, call, *arguments: call(*arguments)
    return engine


def test_a_copy_waits_on_the_copy_stream_for_all_it_comes_after():
    calls, after = Calls(), [cuda_runtime.Event(1, []), cuda_runtime.Event(2, [])]
    source, target = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    event, marks = engine_over(calls).copy_in(target, source, after, False)
    names = [call[0] for call in calls.made]
    assert names == ["wait", "wait", "copy", "event", "record"] and marks is None
    assert [call[1:] for call in calls.made[:2]] == [(10, after[0]), (10, after[1])]
    assert calls.made[2][1:] == (target.data_ptr(), source.data_ptr(), 8, 10)
    assert calls.made[4][1:] == (event, 10)


def test_on_windows_each_copy_and_each_decoding_is_handed_to_the_device_at_once():
    calls, after = Calls(), [cuda_runtime.Event(1, [])]
    engine = engine_over(calls, cuda_runtime.FlushingEngine)
    source, target = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    event, _ = engine.copy_in(target, source, after, False)
    assert calls.made[-2:] == [("record", event, 10), ("flush", 10)]
    event, _ = engine.decode(Unpacks(True), source, target, after, False)
    assert calls.made[-2:] == [("record", event, 40), ("flush", 40)]


@pytest.mark.parametrize("code", [0, 600, 719])
def test_a_flush_leaves_no_error_behind(code):
    library = StandIn("cuda", fails="StreamQuery", code=code)
    calls = cuda_runtime.Runtime(library, "cuda")
    calls.flush(7)
    assert library.cleared == bool(code)


@pytest.mark.parametrize("windows", [False, True])
def test_only_on_windows_copies_are_flushed(monkeypatch, windows):
    made = []
    for name in ("RuntimeEngine", "FlushingEngine"):
        monkeypatch.setattr(
            cuda_runtime, name, lambda *_, name=name: made.append(name) or SimpleNamespace(prove=lambda: None)
        )
    monkeypatch.setattr(cuda_runtime, "find", lambda: object())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    monkeypatch.setattr(cuda_runtime, "on_windows", lambda: windows)
    assert cuda_runtime.runtime_engine(torch.device("cuda", 0)) is not None
    assert made == ["FlushingEngine" if windows else "RuntimeEngine"]


@pytest.mark.parametrize("direct", [True, False])
def test_a_copy_from_a_peer_is_made_by_the_runtime_where_there_is_p2p_and_by_torch_elsewhere(
    direct, monkeypatch
):
    calls, after = Calls(), [cuda_runtime.Event(1, []), cuda_runtime.Event(2, [])]
    source, target = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    engine, stream = engine_over(calls), SimpleNamespace(cuda_stream=50)
    if direct:
        engine._direct_peers.add(source.get_device())
    monkeypatch.setattr(
        StreamEngine, "_copy_between", lambda self, *given: calls.made.append(("torch", *given))
    )
    event, marks = engine.copy_from_peer(stream, "the peer's", target, source, after, False)
    assert calls.made[:2] == [("wait", 50, after[0]), ("wait", 50, after[1])] and marks is None
    copied = ("copy", target.data_ptr(), source.data_ptr(), 8, 50)
    assert calls.made[2] == (copied if direct else ("torch", stream, "the peer's", target, source))
    assert calls.made[-1] == ("record", event, 50)


@pytest.mark.parametrize("ready", [True, False])
def test_unpacking_is_launched_on_its_own_stream_after_what_it_waits_for(ready):
    calls, decoder, after = Calls(), Unpacks(ready), [cuda_runtime.Event(1, [])]
    wire, target = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    engine_over(calls).decode(decoder, wire, target, after, False)
    assert calls.made[0] == ("wait", 40, after[0])
    if ready:
        assert calls.made[1] == ("copy", target.data_ptr() + 128, wire.data_ptr() + 64, 16, 40)
        assert decoder.launched == [(wire.data_ptr(), target.data_ptr(), 40)]
    else:
        assert decoder.launched == ["whole"]
    assert calls.made[-1][0] == "record" and calls.made[-1][2] == 40
