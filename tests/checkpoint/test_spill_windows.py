"""Spill files on Windows: written once, not charged to RAM and pagefile, and gone after the process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the shape is made on Linux")

SPILL = """
import gc, json, logging, mmap, os, sys, warnings
from pathlib import Path

import carom
import torch
from carom.core.checkpoint.memory_maps import mapped_files
from carom.core.checkpoint.spill import spill

warnings.simplefilter("error")
folder, seen = Path(sys.argv[1]), {}
written, write = [], os.write


def counted(handle, data):
    written.append(len(data))
    return write(handle, data)


os.write = counted
# 64 MiB; what the commit limit leaves is less. The memory is charged, and never touched.
other = mmap.mmap(-1, 2008 << 20)
tensors = [torch.full((1 << 22,), float(number)) for number in range(4)]
kept = spill(tensors, folder)
seen["written"] = sum(written) / sum(tensor.nbytes for tensor in tensors)
seen["equal"] = all(torch.equal(one.view, tensor) for one, tensor in zip(kept, tensors))
seen["files"] = len(list(folder.iterdir()))
kept += spill(tensors, folder)
seen["again"] = [sum(written) / sum(tensor.nbytes for tensor in tensors), len(list(folder.iterdir()))]
kept += spill([torch.zeros(5000)], folder)
seen["in use"] = len(list(folder.iterdir()))
del kept
gc.collect()
seen["freed"] = len(list(folder.iterdir()))

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("carom").addHandler(handler)


def streamed(size, layers):
    '''Spill a model, stream it, close the session and merge into its first weight, if that may be written to.'''
    parts = [torch.nn.Linear(size, size, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(*parts).requires_grad_(False)
    x = torch.ones(2, size)
    expected, lines[:] = model(x), []
    layer = 4 * size * size
    with carom.stream(model, device="cpu", vram=2.2 * layer, ram=2 * layer, disk=folder) as session:
        same = torch.equal(model(x), expected) and session.report().disk_bytes_per_step > 0
    told = any("must not be written to" in line for line in lines)
    if not told:
        before = model[0].weight.clone()
        address = model[0].weight.data_ptr()
        parts = [part for file in mapped_files() for part in file.read_only]
        same = same and not any(start <= address < end for start, end in parts)
        model[0].weight.data.add_(1)
        same = same and torch.equal(model[0].weight, before + 1)
        (path,) = folder.glob("carom-spill-*")
        with carom.stream(model, device="cpu", vram=2.2 * layer, ram=2 * layer, disk=folder):
            same = same and not torch.equal(model(x), expected)
    return [same, told]


seen["large"] = streamed(1024, 8)
gc.collect()
other.close()
seen["small"] = streamed(256, 8)
gc.collect()
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(windows_python, tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("spill")
    (folder / "carom-spill-1-0.bin").write_bytes(b"what a power failure left")
    done = windows_python("-c", SPILL, str(folder), memory="4096,2048,4096,2048")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


def test_spilled_bytes_are_written_once(seen):
    found, _ = seen
    assert found["written"] == 1 and found["equal"] and found["files"] == 1
    assert found["again"] == [1, 1], "the file has the bytes already"


def test_a_model_beyond_ram_and_pagefile_is_spilled_and_streams(seen):
    found, _ = seen
    assert found["large"] == [True, True], "its weights stay read-only after close(), which a warning says"


def test_spilled_weights_can_be_written_to_after_close(seen):
    found, _ = seen
    assert found["small"] == [True, False]


def test_a_spill_file_goes_with_its_last_use_or_when_another_one_is_written(seen):
    found, folder = seen
    assert found["files"] == 1, "what was left is deleted"
    assert found["in use"] == 2, "a file of this process is not taken for one that a process left"
    assert found["freed"] == 0 and not list(folder.iterdir())
