"""`BackgroundThread`: a daemon thread that Python ends in order when it exits. `call_at_exit`: a function that runs then.

Python ends a daemon thread at exit at the moment when it next needs the interpreter. If the thread is in code of torch
then, which is C++, the C++ runtime aborts the process (SIGABRT). So the threads of open sessions are told to stop at
exit, and Python waits for them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

SECONDS = 10.0  # how long the exit waits for threads, for example if a drive does not answer


class BackgroundThread(threading.Thread):
    """A daemon thread that is stopped by ``stop`` when Python exits, and joined for at most `SECONDS`.

    ``stop`` returns at once. ``target`` should return soon after it was called.
    """

    def __init__(
        self, target: Callable[..., Any], name: str, stop: Callable[[], object], args: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self.stop = stop
        call_at_exit(_end_threads)


@functools.cache
def call_at_exit(function: Callable[[], object]) -> None:
    """Call ``function`` once when Python exits, after those that are registered later. Its exceptions are dropped.

    A second registration of an equal function has no effect. All threads but daemon threads have ended then. Finalizers
    (`weakref.finalize`) that were made before the call run after ``function``, if they run at exit.
    """

    def call() -> None:
        with contextlib.suppress(Exception):
            function()

    atexit.register(call)


def _end_threads() -> None:
    """Stop all threads first, so that they end at the same time."""
    until = time.monotonic() + SECONDS
    threads = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundThread)]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
