"""What the C allocator keeps of freed tensors in a job with `disk`."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

MIB = 1 << 20
# Blocks of 1 MiB between small ones that stay, after a large block whose release raises glibc's threshold.
PROGRAM = """
import sys, torch
from pathlib import Path
from carom.toolkit_ext.freed_memory import return_freed_tensors

def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

if sys.argv[1] == "returned":
    return_freed_tensors()
large = torch.ones(24 << 20, dtype=torch.uint8)
del large
before = memory()
pairs = [(torch.ones(1 << 20, dtype=torch.uint8), torch.ones(65536, dtype=torch.uint8)) for _ in range(128)]
kept = [small for _, small in pairs]
del pairs
print(memory() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_memory_of_freed_tensors_goes_back_to_the_system():
    held = {}
    for mode in ("kept", "returned"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        held[mode] = int(done.stdout)
    assert held["kept"] > 100 * MIB, "glibc no longer keeps freed blocks: the setting may go"
    assert held["returned"] < 32 * MIB
