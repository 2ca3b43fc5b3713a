"""The Triton decoders, run by Triton's interpreter on the CPU, write the same bits as everything else.

In subprocesses, because TRITON_INTERPRET must be set before triton is imported, and for good: two, for that import takes as
long as a check.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


LOOP = """
import torch, triton, triton.language as tl

@triton.jit
def count(x, n):
    for i in range(0, n):
        tl.store(x + i, i)

x = torch.zeros(4, dtype=torch.int32)
count[(1,)](x, 4)
assert x.tolist() == [0, 1, 2, 3]
print("runs")
"""


LAUNCHES = """
import importlib, importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
modules = script.load_checkout()
unit, get = modules["unit_decoder"], modules["registry"].get
kernels = importlib.import_module("carom.core.codec.kbit_triton")
inner, launched = kernels._dequantize, []

class Counted:
    def __getitem__(self, grid):
        launched.append(grid)
        return inner[grid]

kernels._dequantize = Counted()
found = []
for count in (1, 12):
    launched.clear()
    entries = []
    for number in range(count):
        for name in ("nf4", "nf2"):
            layout = get(name).layout(get(name).encode(torch.ones(512).bfloat16()))
            entries.append(unit.KbitEntry(layout, torch.bfloat16, 1024 * len(entries), 1024 * len(entries)))
    wire = torch.zeros(1024 * len(entries), dtype=torch.uint8)
    unit.UnitDecoder(entries, method="triton")(wire, torch.zeros_like(wire))
    found.append(len(launched))
print(*found)
"""


def test_launches_of_a_unit_do_not_grow_with_its_number_of_quantised_tensors(checks):
    assert (checks["launches"], checks["ended"]) == ("2 2", "well")


@functools.cache
def checked(folder: Path, root: Path) -> dict[str, str]:
    """What `LOOP`, `DAMAGE`, `HOSTILE` and `LAUNCHES` print in one process, and how it ended."""
    script = folder / "checks.py"
    script.write_text("\nprint('==', flush=True)\n".join((LOOP, DAMAGE, HOSTILE, LAUNCHES)), "utf-8")
    done = run(str(script), str(root / "benchmarks" / "tiers" / "codec_gpu.py"))
    loop, damage, hostile, launches, *_ = (*map(str.strip, done.stdout.split("==")), "", "", "")
    ended = f"exit code {done.returncode}: {done.stderr[-2000:]}" if done.returncode else "well"
    return {"loop": loop, "damage": damage, "hostile": hostile, "launches": launches, "ended": ended.strip()}


@pytest.fixture
def checks(tmp_path_factory, root: Path) -> dict[str, str]:
    """Kernels interpreted on the CPU: that of 3.6 runs no loop with NumPy 2.4 and newer."""
    found = checked(tmp_path_factory.getbasetemp(), root)
    if not found["loop"]:
        pytest.skip(f"Triton's interpreter runs no loop here: {found['ended'].splitlines()[-1]}")
    return found


def run(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )


@pytest.mark.usefixtures("checks")
def test_every_kind_of_tensor_is_decoded_bit_for_bit_in_one_launch_a_kind(root: Path):
    """Several tensors a launch, escapes of both widths, NaN, tails, two tile sizes; nothing is written beyond a tensor."""
    done = run(str(root / "benchmarks" / "tiers" / "codec_gpu.py"), "--mib", "1")  # the encoder is timed too
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("exact: yes")


DAMAGE = """
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
modules = script.load_checkout()
unit = modules["unit_decoder"]
make = unit.UnitDecoder._make_groups
def shifted(self, along):  # the exponent base one too high, as seen by the Triton kernel only
    groups = make(self, along)
    for group in groups:
        group.table[:, 8] += 1
    return groups
unit.UnitDecoder._make_groups = shifted
some = list(script.hard_tensors(True))[:4]
script.hard_tensors = lambda small: some
wrong = script.differences(modules, "cpu", True)
unit.UnitDecoder._make_groups = make
print(sum(line.startswith("triton") for line in wrong), sum(line.startswith("torch") for line in wrong))
"""


def test_the_check_above_notices_a_kernel_that_decodes_one_exponent_wrong(checks):
    assert checks["damage"], checks["ended"]
    triton, torch = map(int, checks["damage"].split())
    assert triton >= 6 and torch == 0


HOSTILE = """
import importlib, importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
modules = script.load_checkout()
unit, fmt, lossless = modules["unit_decoder"], modules["lossless_format"], modules["lossless"]
GUARD, wrong = 4096, []
generator = torch.Generator().manual_seed(1)

def noise(count):
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)

def hostile(blob, header, how):
    '''The blob with a whole header and a body that no encoder wrote.'''
    blob = blob.clone()
    table = blob[header.tiles_at : header.tiles_at + 8 * header.tiles].view(torch.int64)
    if how == "random":
        blob[128:] = noise(blob.numel() - 128)
        table &= (1 << 53) - 1  # 31 turns at most: the interpreter is slow
    else:  # every code an escape, in every lane, where the table says
        blob[header.bits_at : header.tiles_at] = 255
        offset = {"end": header.escape_bytes - 1, "far": (1 << 40) - 1, "wraps": (1 << 32) + 5, "begin": 0}[how]
        table[:] = offset | 33 << 48 | (how != "begin") << 40
        if header.kind.two_level:  # a group of second codes, or as many as the entry can hold; and literals
            offset = {"end": header.escape_bytes // 8 - 1, "far": (1 << 32) - 1, "wraps": 1 << 29, "begin": 0}[how]
            table[:] = offset | (1 if how == "begin" else 0xFFFF) << 32 | 0x7FFF << 48
    return blob

def decoded(blob, header, method, fill):
    wire = torch.full((GUARD + blob.numel() + GUARD,), fill, dtype=torch.uint8)
    wire[GUARD : GUARD + blob.numel()] = blob
    out = torch.full((2 * GUARD + -(-header.raw_nbytes // 16) * 16,), 0xA5, dtype=torch.uint8)
    unit.UnitDecoder([unit.LosslessEntry(header, GUARD, GUARD)], method=method)(wire, out)
    return out

for dtype in (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
    value = torch.randn(1024 + 13, generator=generator) * 0.02
    value[::97] = 1e-30
    blob = lossless.encode(value.to(dtype), lanes=32, limit=1 << 20)
    header = fmt.parse_header(blob.numpy().data[:128], "x", blob.numel())
    assert header.escape_bytes
    # The bounds are of the tile table and the planes, which are alike for e5m2 and bf16: for e5m2 some of it.
    for how in ("random",) if dtype is torch.float8_e5m2 else ("random", "end", "far", "wraps", "begin"):
        bad = hostile(blob, header, how)
        for method in ("triton", "torch"):
            one, other = decoded(bad, header, method, 0), decoded(bad, header, method, 0x5B)
            label = f"{method} {dtype} {how}"
            if not torch.equal(one, other):
                wrong.append(label + " read beside the blob")
            end = GUARD + header.raw_nbytes
            if not bool((one[:GUARD] == 0xA5).all() and (one[end:] == 0xA5).all()):
                wrong.append(label + " wrote beside the tensor")
print("; ".join(wrong) or "nothing")
"""


def test_no_bytes_lead_a_decoder_out_of_the_blob_or_the_tensor(checks):
    """What streams from a file is decoded with a checked header and a checksum that whoever made the file could write: the
    tile table and the planes may say anything. (Without bounds the interpreter reads at any address, and dies of it.)"""
    assert (checks["hostile"], checks["ended"]) == ("nothing", "well")
