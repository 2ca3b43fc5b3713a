"""The Triton decoders, run by Triton's interpreter on the CPU, write the same bits as everything else.

In a subprocess, because TRITON_INTERPRET must be set before triton is imported, and for good.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def interpret(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )


def test_every_kind_of_tensor_is_decoded_bit_for_bit_in_one_launch_a_kind(root: Path):
    """Several tensors a launch, escapes of both widths, NaN, tails, two tile sizes; nothing is written beyond a tensor."""
    done = interpret(str(root / "benchmarks" / "codec_gpu.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("exact: yes")


DAMAGE = """
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
modules = script.load_checkout()
unit = modules["unit"]
make = unit.UnitDecoder._make_groups
def shifted(self):  # the exponent base one too high, as seen by the Triton kernel only
    groups = make(self)
    for _, table, _ in groups:
        table[:, 8] += 1
    return groups
unit.UnitDecoder._make_groups = shifted
wrong = script.differences(modules, "cpu", True)
print(sum(line.startswith("triton") for line in wrong), sum(line.startswith("torch") for line in wrong))
"""


def test_the_check_above_notices_a_kernel_that_decodes_one_exponent_wrong(root: Path):
    done = interpret("-c", DAMAGE, str(root / "benchmarks" / "codec_gpu.py"))
    assert done.returncode == 0, done.stderr
    triton, torch = map(int, done.stdout.split())
    assert triton > 20 and torch == 0
