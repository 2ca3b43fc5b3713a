"""A torch of a few lines: what scripts/rocm_probe.py touches, without a GPU. Copied into fake environments.

CAROM_FAKE in the environment names what goes wrong. A HIP runtime is "loaded" by mapping its file.
"""

import contextlib
import mmap
import os
import time
from pathlib import Path

from . import cuda, nn
from .version import __version__

FAKE = os.environ.get("CAROM_FAKE", "")
int32, uint8 = "int32", "uint8"
_maps = []
for _file in Path(__file__).parent.parent.glob("**/libamdhip64.so*"):
    if _file.parent.parent.name in ("torch", "_rocm_sdk_core") or FAKE == "two_runtimes":
        with open(_file, "rb") as _open:
            _maps.append(mmap.mmap(_open.fileno(), 0, access=mmap.ACCESS_READ))


class Tensor:
    def __init__(self, data):
        self.data = list(data)
        self.shape = (len(self.data),)

    def _map(self, action):
        return Tensor(action(v) for v in self.data)

    def __add__(self, n):
        return self._map(lambda v: v + n)

    def __mul__(self, n):
        return self._map(lambda v: v * n + (FAKE == "wrong_tensor"))

    def __mod__(self, n):
        return self._map(lambda v: v % n)

    def __truediv__(self, n):
        return self._map(lambda v: v / n)

    def to(self, *where, **how):
        return Tensor(self.data)

    cpu = pin_memory = to

    def copy_(self, other, non_blocking=False):
        self.data[:] = other.data
        if FAKE == "wrong_pinned" and non_blocking:
            self.data[0] += 1
        return self


class Generator:
    def manual_seed(self, seed):
        return self


def device(name, index=None):
    return name


def arange(n, dtype=None):
    return Tensor(range(n))


def randn(*shape, generator=None):
    return Tensor([0.5])


def empty_like(other, pin_memory=False):
    return Tensor(other.data)


def equal(a, b):
    return a.data == b.data


no_grad = contextlib.nullcontext
if FAKE == "hang":
    time.sleep(600)
