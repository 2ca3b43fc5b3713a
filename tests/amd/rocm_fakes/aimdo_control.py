"""A comfy_aimdo.control that fails on demand; see torch_init.py."""

import ctypes
import logging
import os
import signal
import sys

FAKE = os.environ.get("CAROM_FAKE", "")


def init():
    if FAKE == "init_false":
        logging.info("comfy-aimdo failed to load: no HIP runtime")
    assert "torch" not in sys.modules, "init comes before torch"
    return FAKE != "init_false"


def init_devices(devices):
    if FAKE == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if FAKE == "access_violation":
        raise OSError("exception: access violation reading 0x00000000000000E0")
    if FAKE == "exit":
        os._exit(3)
    return FAKE != "device_false"


assert ctypes
