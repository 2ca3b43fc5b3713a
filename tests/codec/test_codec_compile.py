"""The Triton decoders and the encoder compile for NVIDIA and AMD GPUs with the launch arguments of the product. No GPU is needed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def unusable() -> str:
    """Why nothing can be compiled here, or ""."""
    try:
        version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed, or is not the PyPI one"
    return f"triton {version} takes other arguments for compiling without a GPU" if version < (3, 4) else ""


pytestmark = pytest.mark.skipif(bool(unusable()), reason=unusable())

# 16-byte stores of each kernel. Were the layouts to change, Triton would split them, and the decoder would be slower.
# Lossless kinds of one byte an element write 8 bytes a lane.
STORES = {
    "bf16 128": 4,
    "fp16 128": 4,
    "fp32 128": 8,
    "e4m3 128 k=1": 0,
    "e4m3 128 k=2": 0,
    "e4m3 128 k=3": 0,
    "e5m2 128": 0,
    "bf16 64": 4,
    "bf16 256": 4,
}
STORES |= {f"nf{bits} {dtype}": 1 for bits in (2, 3, 4) for dtype in ("bfloat16", "float16")}
STORES |= {f"nf{bits} float32": 2 for bits in (2, 3, 4)}
STORES |= {"encode_split bf16": 0, "encode_escapes bf16": 0}


@pytest.mark.parametrize(
    ("backend", "arch", "warp"),
    [
        ("cuda", "90", 32),
        ("hip", "gfx1100", 32),  # RDNA 3
        ("hip", "gfx1151", 32),  # RDNA 3.5, integrated
        ("hip", "gfx1201", 32),  # RDNA 4
        ("hip", "gfx942", 64),  # CDNA 3
    ],
)
def test_every_kernel_compiles_and_decoders_write_16_bytes_at_a_time(
    package: Path, root: Path, backend: str, arch: str, warp: int
):
    name = {"cuda": "nvidia", "hip": "amd"}[backend]
    if importlib.util.find_spec(f"triton.backends.{name}") is None:
        pytest.skip(f"the installed triton has no backend for {name}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(root / "tests" / "support" / "compile_kernels.py"), backend, arch, str(warp)],
        capture_output=True, text=True, timeout=240,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(package)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {kernel: (stores, spilled) for kernel, stores, spilled in json.loads(done.stdout)}
    assert found == {kernel: (stores, 0) for kernel, stores in STORES.items()}
