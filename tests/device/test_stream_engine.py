"""What the engine for real accelerators asks of their streams and events, against a stand-in for torch's device module."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from carom.core.device import make_engine, stream_engine
from carom.core.session.settings import device_note


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.log = name, []

    def wait_event(self, event) -> None:
        self.log.append(("wait", event))

    def query(self) -> bool:
        self.log.append(("query",))
        return False


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timing, self.reached, self.waited = enable_timing, False, 0

    def record(self, stream: Stream) -> None:
        stream.log.append(("record", self))

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, other) -> float:
        return 5.0


class Bytes:
    """A tensor that says on which stream it is copied to, and who uses it."""

    def __init__(self, api) -> None:
        self._api, self.users = api, []

    def copy_(self, source, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait"
        self._api.current.log.append(("copy", self, source))

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream)

    def untyped_storage(self) -> Bytes:
        return self


@pytest.fixture(params=["set_stream", "context"])
def api(request, monkeypatch):
    found = SimpleNamespace(current=Stream("compute"), made=[], synchronized=0)

    def make(device, priority=0):
        found.made.append(Stream(f"side {len(found.made)}"))
        return found.made[-1]

    @contextlib.contextmanager
    def on(stream):
        before, found.current = found.current, stream
        yield
        found.current = before

    def everything(device) -> None:
        found.synchronized += 1

    found.Stream, found.Event, found.stream = make, Event, on
    found.device = lambda device: contextlib.nullcontext()
    found.current_device = lambda: 0
    found.current_stream = lambda device: found.current
    found.synchronize = everything
    if request.param == "set_stream":
        found.set_stream = lambda stream: setattr(found, "current", stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


@pytest.fixture
def engine(api):
    return stream_engine.StreamEngine(torch.device("cpu", 0))


def test_on_xpu_nothing_is_pinned_or_decoded_by_triton_and_the_session_says_so(api):
    engine = stream_engine.StreamEngine(torch.device("xpu", 0))
    assert engine.pinner is None and not engine.unpacks and not engine.blocking
    assert engine.decodes_files and not engine.decodes_lossless_files
    assert "pageable memory" in device_note(engine) and "xpu:0" in device_note(engine)


def test_a_copy_to_the_device_waits_for_all_it_is_told_of_on_a_stream_of_its_own(api, engine):
    target, source, after, compute = Bytes(api), Bytes(api), [Event(), Event()], api.current
    done, marks = engine.copy_in(target, source, after, False)
    (stream,) = [one for one in api.made if one.log]
    assert stream.log == [("wait", after[0]), ("wait", after[1]), ("copy", target, source), ("record", done)]
    assert marks is None and api.current is compute and not compute.log


def test_on_windows_each_copy_is_handed_to_the_device_at_once(api, monkeypatch):
    monkeypatch.setattr(make_engine, "on_windows", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    engine = make_engine.make_engine("xpu:0")
    done, _ = engine.copy_in(Bytes(api), Bytes(api), [], False)
    (stream,) = [one for one in api.made if one.log]
    assert stream.log[-2:] == [("record", done), ("query",)]
    done, _ = engine.decode(lambda wire, target: None, Bytes(api), Bytes(api), [], False)
    assert any(one.log[-2:] == [("record", done), ("query",)] for one in api.made)


def test_a_timed_copy_has_a_mark_on_either_side(api, engine):
    target, source, after = Bytes(api), Bytes(api), [Event()]
    done, (began, ended) = engine.copy_in(target, source, after, True)
    (stream,) = [one for one in api.made if one.log]
    expected = [
        ("wait", after[0]),
        ("record", began),
        ("copy", target, source),
        ("record", ended),
        ("record", done),
    ]
    assert stream.log == expected and began.timing and ended.timing


def test_unpacking_waits_for_the_copy_and_for_the_slot_on_another_stream(api, engine):
    wire, target, after, compute = Bytes(api), Bytes(api), [Event(), Event()], api.current
    engine.copy_in(Bytes(api), Bytes(api), (), False)
    copies = next(one for one in api.made if one.log)
    ran = []
    done, _ = engine.decode(lambda *args: ran.append((api.current, args)), wire, target, after, False)
    ((stream, given),) = ran
    assert stream not in (copies, compute) and given == (wire, target)
    assert stream.log == [("wait", after[0]), ("wait", after[1]), ("record", done)]
    assert api.current is compute


def test_a_failed_unpacking_leaves_the_current_stream(api, engine):
    compute = api.current

    def fails(*_):
        raise RuntimeError("no luck")

    if hasattr(api, "set_stream"):
        with pytest.raises(RuntimeError, match="no luck"):
            engine.decode(fails, Bytes(api), Bytes(api), (), False)
        assert api.current is compute


def test_a_copy_to_the_host_comes_after_what_was_computed_and_keeps_its_source(api, engine):
    target, source, compute = Bytes(api), Bytes(api), api.current
    done = engine.copy_out(target, source)
    (stream,) = [one for one in api.made if one.log]
    ((_, computed),) = compute.log
    assert stream.log == [("wait", computed), ("copy", target, source), ("record", done)]
    assert source.users == [stream], "the allocator must not hand its memory out before the copy is over"
    assert api.current is compute


def test_the_allocator_is_told_nothing_of_memory_that_is_not_its_own(api, engine):
    """cudaMallocAsync, the allocator of ComfyUI, fails where it is."""
    source = Bytes(api)
    source._carom_not_the_allocators = True
    engine.copy_out(Bytes(api), source)
    assert source.users == []


def test_the_current_stream_waits_not_the_host(api, engine):
    event = Event()
    engine.wait(event)
    assert api.current.log == [("wait", event)] and not event.waited


def test_the_host_waits_for_an_event_or_for_everything(api, engine):
    event = Event()
    engine.synchronize(event)
    assert (event.waited, api.synchronized) == (1, 0)
    engine.synchronize()
    assert (event.waited, api.synchronized) == (1, 1)


def test_a_copy_has_landed_when_its_event_was_reached(api, engine):
    event = Event()
    assert not engine.landed(event) and not engine.done(event)
    event.reached = True
    assert engine.landed(event) and engine.done(event)


def test_events_are_recorded_anew_where_one_is_given(api, engine):
    event = Event()
    assert engine.record(api.current, event) is event
    fresh = engine.record(api.current)
    assert fresh is not event and api.current.log == [("record", event), ("record", fresh)]


def test_the_device_is_held_on_the_sessions_own_device_for_a_quarter_of_a_second_at_most(
    api, engine, monkeypatch
):
    seen: list = []

    @contextlib.contextmanager
    def device(which):
        seen.append(which)
        yield
        seen.append("left")

    engine.hold(1e-3)  # a device module without such a kernel
    monkeypatch.setattr(api, "device", device, raising=False)
    monkeypatch.setattr(api, "_sleep", seen.append, raising=False)
    engine.hold(1e-3)
    engine.hold(10.0)
    assert seen == [engine.device, 2_000_000, "left", engine.device, 500_000_000, "left"]
