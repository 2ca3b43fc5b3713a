"""Contexts that pause the garbage collector leave it as it was, whatever happens in them."""

from __future__ import annotations

import gc
import sys

import pytest
from carom.core.common import garbage_collection
from carom.core.common.garbage_collection import fewer_collections, no_collections


@pytest.fixture(autouse=True)
def enabled():
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.parametrize("context", [fewer_collections, no_collections])
def test_collections_are_paused_and_go_on(context):
    with context():
        assert not gc.isenabled()
        with context():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with context():
        pass
    assert not gc.isenabled(), "they were not enabled before"


@pytest.mark.parametrize("context", [fewer_collections, no_collections])
def test_an_interrupt_at_any_line_leaves_them_enabled(context):
    path, stop, interrupted = garbage_collection.__file__, 0, True
    while interrupted:
        stop, seen, interrupted = stop + 1, 0, False

        def trace(frame, event, _, stop=stop):
            nonlocal seen, interrupted
            if frame.f_code.co_filename == path and event == "line":
                seen += 1
                if seen == stop:
                    interrupted = True
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with context():
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        gc.collect()
        assert gc.isenabled(), f"line {stop} of the context"
    assert stop > 8
