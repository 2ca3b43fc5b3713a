"""The Triton encoder, run by Triton's interpreter on the CPU, writes the bytes of the encoder in torch operations.

In a subprocess, because TRITON_INTERPRET must be set before triton is imported, and for good.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CASES = """
import torch
from carom.core.codec import backends, lossless, lossless_device, lossless_encode_triton
from carom.core.codec.blob_metadata import raw_bytes
from carom.core.codec.lossless_format import KIND_BY_DTYPE, KINDS, Header

draw = torch.Generator().manual_seed(0)
wrong, escapes, wide = [], 0, 0

def encoded(tensor, **options):
    '''The result of `encode_device_blob` by Triton: the device of the test counts as a GPU.'''
    kind, limit = KIND_BY_DTYPE[tensor.dtype], tensor.nbytes
    flat = raw_bytes(tensor).numpy().view(f"u{kind.itemsize}")
    lanes = options.get("lanes", 128)
    code = options.get("code") or lossless.choose_code(lossless.count_exponents(kind, flat), kind, 32 * lanes)
    tail = flat[len(flat) // 8 * 8 :].tobytes().ljust(32, bytes(1))
    before = Header(kind, code.k, lanes, code.base, len(flat), 0, code.table, tail, 0)
    if before.total >= limit:
        return None
    split = lossless_encode_triton.split_triton(raw_bytes(tensor).view(-1), before, limit)
    return None if split.header.total >= limit else (split.header, split.encode_escapes())

def compare(label, tensor, **options):
    global escapes, wide
    want, got = lossless_device.encode_device_blob(tensor, **options), encoded(tensor, **options)
    if want is None or got is None:
        if want is not got:
            wrong.append(label)
        return
    if want[0] != got[0] or not torch.equal(want[1], got[1]):
        wrong.append(label)
    header, blob = want
    escapes += header.escape_bytes
    wide += int((blob[header.tiles_at : header.tiles_at + 8 * header.tiles].view(torch.int64) >> 40 & 1).sum())

for kind in KINDS:
    if kind.two_level:
        continue
    for numel in (8, 31, 4133):
        weights = torch.randn(numel, generator=draw)
        compare(f"{kind.name} {numel}", (0.02 * weights).to(kind.dtype))
    spread = (weights * torch.exp2(torch.randint(-30, 30, (numel,), generator=draw) * (weights > 1.5))).to(kind.dtype)
    compare(f"{kind.name} wide", spread)
    compare(f"{kind.name} noise", torch.randint(0, 256, (4096 * kind.itemsize,), generator=draw).to(torch.uint8).view(kind.dtype))
    compare(f"{kind.name} 64 lanes", (0.02 * weights).to(kind.dtype), lanes=64)
    for k in (1, kind.max_k):
        counts = lossless.count_exponents(kind, raw_bytes(spread).numpy().view(f"u{kind.itemsize}"))
        compare(f"{kind.name} k={k}", spread, code=lossless.choose_code(counts, kind, 4096, (k,)))
    if not backends._encodes_exactly(torch.device("cpu"), kind.dtype):
        wrong.append(f"{kind.name} trial")
print("wrong:", "; ".join(wrong) or "nothing", escapes > 500, wide > 2)
"""


def test_every_dtype_is_encoded_to_the_bytes_of_torch_operations(package):
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(package),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CASES], capture_output=True, text=True, timeout=240, env=environment
    )  # fmt: skip
    if "np." in done.stderr or "interpreter" in done.stderr.splitlines()[-1:]:
        pytest.skip(f"Triton's interpreter does not run here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "wrong: nothing True True"
