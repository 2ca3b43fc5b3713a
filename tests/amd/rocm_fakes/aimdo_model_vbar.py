"""A comfy_aimdo.model_vbar over a Python list; see torch_init.py."""

import os
import signal

FAKE = os.environ.get("CAROM_FAKE", "")
reserved = 0


class ModelVBAR:
    def __init__(self, size, device):
        global reserved
        big = size > 1 << 30
        if big and (FAKE == "no_space" or (FAKE == "little_space" and reserved >= 2)):
            raise MemoryError("VBAR allocation failed")
        if big and FAKE == "space_crash" and reserved:
            os.kill(os.getpid(), signal.SIGSEGV)
        reserved += big
        self.pins = 0

    def alloc(self, n):
        return (self, 0, n)

    def fault(self, pointer, n):
        self.pins += 1
        return None if FAKE == "offloaded" else [1]

    def unpin(self, pointer, n):
        self.pins -= 1
        assert self.pins >= 0, "a stray unpin"

    def close(self):
        assert self.pins == 0 or FAKE, "closed while pinned"
