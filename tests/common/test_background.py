"""What runs when Python exits, and in which order."""

from __future__ import annotations

import subprocess
import sys

from carom.core.common import background

# The file is loaded alone, because the import of torch takes seconds.
PROGRAM = """
import importlib.util, sys, threading, time, weakref
spec = importlib.util.spec_from_file_location("background", sys.argv[1])
background = importlib.util.module_from_spec(spec)
spec.loader.exec_module(background)

class Memory: pass
memory, told = Memory(), threading.Event()
weakref.finalize(memory, print, "freed")

def work():
    told.wait()
    time.sleep(0.1)
    print("thread ended")

def waits():
    print("device idle")
    raise RuntimeError("the device is lost")

background.BackgroundThread(work, "carom-test", told.set).start()
background.call_at_exit(waits)
background.call_at_exit(waits)
print("main ended")
"""


def test_memory_is_freed_after_threads_ended_and_the_device_was_waited_for():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, background.__file__], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n") == ["main ended", "device idle", "thread ended", "freed", ""]
    assert not done.stderr and done.returncode == 0
