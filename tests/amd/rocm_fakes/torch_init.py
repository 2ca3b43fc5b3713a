"""A torch of a few lines: what scripts/rocm_probe.py touches, without a GPU. Copied into fake environments.

CAROM_FAKE in the environment names what goes wrong. A HIP runtime is "loaded" by mapping its file.
"""

import contextlib
import mmap
import os
import time
from pathlib import Path

import numpy as np

from . import cuda as cuda
from . import nn as nn
from .version import __version__ as __version__

FAKE = os.environ.get("CAROM_FAKE", "")
int32, uint8 = "int32", "uint8"
_maps = []
for _file in Path(__file__).parent.parent.glob("**/libamdhip64.so*"):
    if _file.parent.parent.name in ("torch", "_rocm_sdk_core") or FAKE == "two_runtimes":
        with open(_file, "rb") as _open:
            _maps.append(mmap.mmap(_open.fileno(), 0, access=mmap.ACCESS_READ))


class Tensor:
    """numpy with torch's names. A copy "to the device" is where wrong_tensor strikes."""

    def __init__(self, data):
        self.data = np.array(data)
        self.shape = self.data.shape

    def __add__(self, n):
        return Tensor(self.data + n)

    def __mul__(self, n):
        return Tensor(self.data * n)

    def __mod__(self, n):
        return Tensor(self.data % n)

    def __truediv__(self, n):
        return Tensor(self.data / n)

    def to(self, *where, **how):
        return Tensor(self.data + (FAKE == "wrong_tensor" and where == ("cuda",)))

    def cpu(self):
        return Tensor(self.data)

    pin_memory = cpu

    def copy_(self, other, non_blocking=False):
        self.data = other.data.copy()
        self.data[0] += FAKE == "wrong_pinned" and non_blocking
        return self


class Generator:
    def manual_seed(self, seed):
        return self


def device(name, index=None):  # "cuda" stands for the GPU
    return name


def arange(n, dtype=None):
    return Tensor(np.arange(n))


def randn(*shape, generator=None):
    return Tensor([0.5])


def empty_like(other, pin_memory=False):
    return Tensor(other.data)


def equal(a, b):
    return np.array_equal(a.data, b.data)


no_grad = contextlib.nullcontext
if FAKE == "hang":
    time.sleep(600)
