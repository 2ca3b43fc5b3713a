"""Weights that come from a mapped checkpoint lie in memory once, and what was written to them stays."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import carom
import numpy as np
import pytest
import torch
from carom.core.host import page_release
from carom.core.host.page_release import MappedFiles
from safetensors.torch import load_file, save_file

MIB = 1 << 20
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not Path("/proc/self/pagemap").exists(),
    reason="only Linux tells whose pages are whose",
)

STREAM = """
import sys
import torch
from torch import nn
sys.path.insert(0, sys.argv[1])
import carom
from safetensors.torch import load_file

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(24)])
model.requires_grad_(False)
model.load_state_dict(load_file(sys.argv[2]), assign=True)
before = status("VmRSS")
session = carom.stream(model, device="cpu", vram=sys.argv[3], codec=sys.argv[4])
print(status("VmHWM") - before, session.report().packed_units)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """24 layers of 8 MiB."""
    path = tmp_path_factory.mktemp("mapped") / "model.safetensors"
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(1)) * 0.02
    save_file({f"{i}.weight": weight.to(torch.bfloat16) for i in range(24)}, path)
    return path


@pytest.mark.parametrize(
    ("vram", "codec"), [("20MiB", "raw"), ("100MiB", "raw"), ("40MiB", "lossless")], ids=str
)
def test_while_it_is_laid_out_a_mapped_checkpoint_lies_in_memory_once(checkpoint, package, vram, codec):
    """Otherwise file pages and blocks are there together at the end: 384 MiB raw."""
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(package), str(checkpoint), vram, codec],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, packed = map(int, done.stdout.split())
    assert bool(packed) == (codec == "lossless")
    assert grown <= 1.3 * 192 * MIB, f"{grown / MIB:.0f} MiB more for 192 MiB of weights"


def resident(memory: mmap.mmap) -> int:
    """Pages of ``memory`` that count as this process's."""
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // mmap.PAGESIZE * 8)
        told = np.frombuffer(pages.read(len(memory) // mmap.PAGESIZE * 8), np.uint64)
    return int(np.count_nonzero(told >> np.uint64(63)))


def mapping(tmp_path: Path) -> tuple[mmap.mmap, int]:
    """(256 KiB of a file, mapped privately and read, its address)."""
    file = tmp_path / "file"
    file.write_bytes(bytes([7]) * (256 << 10))
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), 256 << 10, flags=mmap.MAP_PRIVATE)
    view = np.frombuffer(memory, np.uint8)
    assert int(view.sum()) == 7 * len(memory)
    return memory, view.__array_interface__["data"][0]


def test_pages_of_a_file_no_longer_count_and_come_back_when_read(tmp_path):
    memory, address = mapping(tmp_path)
    assert resident(memory) == 64
    MappedFiles().release(address, len(memory))
    assert resident(memory) == 0
    assert memory[:] == bytes([7]) * len(memory)


def test_a_page_that_was_written_to_keeps_what_was_written(tmp_path):
    memory, address = mapping(tmp_path)
    memory[100_000] = 9
    MappedFiles().release(address, len(memory))
    assert memory[100_000] == 9


def test_bytes_beside_the_range_stay_where_they_are(tmp_path):
    memory, address = mapping(tmp_path)
    MappedFiles().release(address + 1, len(memory) - 2)
    assert resident(memory) == 2  # the first and the last page are only partly the range's


def test_memory_that_is_no_files_is_left_alone():
    memory = mmap.mmap(-1, 256 << 10)
    memory[:] = bytes([7]) * len(memory)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    assert not MappedFiles().contains(address, len(memory))
    MappedFiles().release(address, len(memory))
    assert memory[:] == bytes([7]) * len(memory)


def test_a_weight_written_before_it_streams_streams_as_written(checkpoint):
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(3)])
    model.requires_grad_(False)
    weights = load_file(checkpoint)
    model.load_state_dict({k: weights[k] for k in ("0.weight", "1.weight", "2.weight")}, assign=True)
    with torch.no_grad():
        model[1].weight[17, 3] = 5.0
    kept, alias = weights["2.weight"].clone(), weights["1.weight"]
    with carom.stream(model, device="cpu", vram="20MiB", codec="raw") as session:
        assert session.read("1.weight")[17, 3] == 5.0
        assert alias[17, 3] == 5.0, "others who hold the checkpoint's tensor lost what was written to it"
        assert torch.equal(session.read("2.weight"), kept)
    assert model[1].weight[17, 3] == 5.0


def test_elsewhere_than_on_linux_nothing_is_dropped(tmp_path, monkeypatch):
    memory, address = mapping(tmp_path)
    monkeypatch.setattr(page_release.sys, "platform", "darwin")
    page_release._madvise.cache_clear()
    try:
        MappedFiles().release(address, len(memory))
    finally:
        page_release._madvise.cache_clear()
    assert resident(memory) == 64


def test_a_system_that_does_not_tell_whose_pages_they_are_keeps_them(tmp_path, monkeypatch):
    memory, address = mapping(tmp_path)
    found = MappedFiles()

    def refused(*args, **kwargs):
        raise PermissionError("pagemap")

    monkeypatch.setattr("builtins.open", refused)
    found.release(address, len(memory))
    monkeypatch.undo()
    assert resident(memory) == 64
