"""Ctrl-C ends a wait on Windows. `_thread.interrupt_main` does what Ctrl-C does there: it wakes no thread that waits for a lock."""

from __future__ import annotations

import _thread
import queue
import sys
import threading
import time
from concurrent.futures import Future

import pytest
from carom.core.checkpoint import read_handle
from carom.core.checkpoint.file_read import ReadTarget
from carom.core.common import interruptible


@pytest.fixture
def ctrl_c():
    """Interrupts the main thread in 0.1 s, while it waits."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread is interrupted")
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.start()
    yield
    timer.cancel()


def endless_thread() -> tuple[threading.Thread, queue.SimpleQueue]:
    """A thread that runs until something is put into the queue."""
    box: queue.SimpleQueue = queue.SimpleQueue()
    thread = threading.Thread(target=box.get, daemon=True)
    thread.start()
    return thread, box


@pytest.mark.parametrize("what", ["event", "future", "thread"])
def test_a_wait_without_end_is_interrupted(ctrl_c, what):
    thread, box = endless_thread()
    waits = {
        "event": interruptible.PolledEvent().wait,
        "future": lambda: interruptible.polled_result(Future()),
        "thread": lambda: interruptible.polled_join(thread),
    }
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        waits[what]()
    box.put(None)
    assert time.monotonic() - began < 5


def test_what_is_waited_for_arrives():
    event, future = interruptible.PolledEvent(), Future()
    thread, box = endless_thread()
    for act in (event.set, lambda: future.set_result(7), lambda: box.put(None)):
        threading.Timer(0.02, act).start()
    assert event.wait() and interruptible.polled_result(future) == 7
    interruptible.polled_join(thread)
    assert not interruptible.PolledEvent().wait(0.01)
    failed: Future = Future()
    failed.set_exception(TimeoutError("the work's own"))
    with pytest.raises(TimeoutError, match="own"):
        interruptible.polled_result(failed)


@pytest.mark.skipif(sys.platform == "win32", reason="the waits of other systems")
def test_elsewhere_the_waits_are_pythons_own():
    assert interruptible.Event is threading.Event and interruptible.result is Future.result
    assert interruptible.join is threading.Thread.join


def test_reads_from_a_drive_wait_so(monkeypatch):
    monkeypatch.setattr(read_handle.interruptible, "Event", interruptible.PolledEvent)
    read = read_handle.SubmittedRead((), (), ReadTarget.of(bytearray(1)), 0.0)
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        read.result()
