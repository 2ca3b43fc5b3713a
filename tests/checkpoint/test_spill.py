"""Tensors that `spill` writes to a file: no two share memory, and only bytes that are in the file are reused."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from carom.core.checkpoint import spill as spilling
from carom.core.checkpoint.spill import allow_writes, spill


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("carom-spill-*"))


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(seed))


def test_equal_tensors_of_two_calls_share_the_file_and_no_memory(tmp_path):
    (first,) = spill([values()], tmp_path)
    (second,) = spill([values()], tmp_path)
    assert first.range == second.range and len(files(tmp_path)) == 1
    allow_writes([first.view, second.view])
    first.view.add_(1)
    assert torch.equal(second.view, values())
    second.view.zero_()
    assert torch.equal(first.view, values() + 1)


def test_equal_tensors_of_one_call_share_no_memory(tmp_path):
    kept = spill([values()], tmp_path)
    kept += spill([values(), values(1), values()], tmp_path)
    kept += spill([values(), values(), values(), values(1)], tmp_path)
    expected = [values(1 if index in (2, 7) else 0) for index in range(8)]
    assert len({one.view.data_ptr() for one in kept}) == 8
    allow_writes(one.view for one in kept)
    for index, one in enumerate(kept):
        one.view.fill_(index)
        expected[index].fill_(index)
        assert all(torch.equal(a.view, b) for a, b in zip(kept, expected, strict=True))


def test_a_written_view_does_not_change_what_is_spilled_later(tmp_path):
    (merged,) = spill([values()], tmp_path)
    allow_writes([merged.view])
    merged.view.mul_(3)
    (fresh,) = spill([values()], tmp_path)
    assert torch.equal(fresh.view, values()) and torch.equal(merged.view, values() * 3)
    assert len(files(tmp_path)) == 1, "the file has the bytes still"


def test_the_file_lives_as_long_as_one_of_its_mappings(tmp_path):
    (first,) = spill([values()], tmp_path)
    (second,) = spill([values()], tmp_path)
    del first
    gc.collect()
    assert len(files(tmp_path)) == 1 and torch.equal(second.view, values())
    del second
    gc.collect()
    assert not files(tmp_path)


@pytest.mark.parametrize("at", [0, 7000, 16383])
def test_bytes_are_compared_with_all_of_the_file_at_the_right_offset(tmp_path, monkeypatch, at):
    """The file is compared in chunks; here each holds a sixteenth of the tensor."""
    monkeypatch.setattr(spilling, "_CHUNK", 4096)
    first, second = torch.zeros(16384), torch.arange(16384.0)
    kept = spill([first, second], tmp_path)
    assert [one.range for one in spill([second], tmp_path)] == [kept[1].range]
    other = second.clone()
    other[at] = -1
    (again,) = spill([other], tmp_path)
    assert torch.equal(again.view, other) and again.range.file != kept[1].range.file


@pytest.mark.parametrize("damage", ["deleted", "cut off", "written to"])
def test_a_file_that_lost_its_bytes_is_not_reused(tmp_path, damage):
    if sys.platform == "win32":
        pytest.skip(
            "Windows deletes no mapped file, and no other program can open a spill file to write to it"
        )
    (kept,) = spill([torch.arange(16384.0)], tmp_path)
    path = Path(kept.range.file.path)
    if damage == "deleted":
        path.unlink()
    elif damage == "cut off":
        with path.open("r+b") as file:
            file.truncate(16384)
    else:
        with path.open("r+b") as file:
            file.seek(16000)
            file.write(b"\xff" * 64)
    (again,) = spill([torch.arange(16384.0)], tmp_path)
    assert torch.equal(again.view, torch.arange(16384.0)) and again.range.file.path != str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="os.fork is POSIX")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_file_of_its_parent(tmp_path):
    kept = spill([values()], tmp_path)
    child = os.fork()
    if not child:
        try:
            kept.clear()  # the file's last use in this process
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(files(tmp_path)) == 1 and torch.equal(kept[0].view, values())
    kept.clear()
    assert not files(tmp_path)
