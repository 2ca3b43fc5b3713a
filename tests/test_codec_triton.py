"""The Triton decoders, run by Triton's interpreter on the CPU, write the same bits as everything else.

In a subprocess, because TRITON_INTERPRET must be set before triton is imported, and for good.
"""

from __future__ import annotations

import importlib.metadata
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
    for group in groups:
        group.table[:, 8] += 1
    return groups
unit.UnitDecoder._make_groups = shifted
some = list(script.hard_tensors(True))[:4]
script.hard_tensors = lambda small: some
wrong = script.differences(modules, "cpu", True)
print(sum(line.startswith("triton") for line in wrong), sum(line.startswith("torch") for line in wrong))
"""


def test_the_check_above_notices_a_kernel_that_decodes_one_exponent_wrong(root: Path):
    done = interpret("-c", DAMAGE, str(root / "benchmarks" / "codec_gpu.py"))
    assert done.returncode == 0, done.stderr
    triton, torch = map(int, done.stdout.split())
    assert triton >= 6 and torch == 0


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
import importlib, importlib.util
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.load_checkout()
kernels = importlib.import_module("carom.core.codec.lossless_triton")
for backend, arch in (("cuda", 90), ("hip", "gfx1100")):
    constants = {"ROWS": 8, "KIND": "bf16", "K": 3, "LANES": 128, "TILES": 1, "ASM": backend == "cuda"}
    signature = {"wire": "*u8", "out": "*u8", "table": "*i64", "tensors": "i32", **{name: "constexpr" for name in constants}}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(kernels._decode, signature=signature, constexprs=constants, attrs=aligned)
    built = compile(source, target=GPUTarget(backend, arch, 32), options={"num_warps": 4})
    text = built.asm.get("ptx") or built.asm["amdgcn"]
    print(text.count("st.global.v2.b64") + text.count("global_store_b128"))
"""


def test_the_kernel_compiles_for_nvidia_and_amd_and_writes_16_bytes_at_a_time(root: Path):
    """No GPU is needed to compile. Were the layouts to change, stores would be split and rates with them."""
    try:
        version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this triton is not the PyPI one")
    if version < (3, 4):
        pytest.skip(f"triton {version} takes other arguments for compiling without a GPU")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, str(root / "benchmarks" / "codec_gpu.py")],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "4"]
