"""A file that another one replaced is noticed by its inode, also if size and times are those of the first."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import carom
import pytest
import torch
from carom.core.checkpoint import memory_maps
from carom.core.checkpoint.index import SourceFile
from carom.core.checkpoint.mapped_views import MappedViews
from safetensors.torch import load_file, save_file


def replace(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Put another file with ``state`` in the place of ``path``, with the times of the present one."""
    before, other = path.stat(), path.with_name("other")
    save_file(state, other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_size == before.st_size and path.stat().st_ino != before.st_ino


def source(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(str(path), status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/maps is Linux's")
def test_a_view_of_a_file_that_was_replaced_is_not_read_from_the_new_file(tmp_path):
    path, values = tmp_path / "w.safetensors", torch.arange(4096.0)
    save_file({"w": values}, path)
    mapped = load_file(path)["w"]
    found = MappedViews().find(mapped)
    assert found is not None and found.file == source(path)
    other = values.clone()
    other[2000] = -1  # the ends, which are compared, are equal
    replace(path, {"w": other})
    # Linux calls the file that was mapped "deleted". A file of that name is another one still.
    os.link(path, f"{path} (deleted)")
    assert MappedViews().find(mapped) is None
    assert torch.equal(mapped, values)


def test_neighbouring_mappings_of_one_path_are_joined_only_if_they_are_of_one_file(monkeypatch):
    maps = "".join(
        f"{at:x}000-{at + 1:x}000 r--p {at - 8:08x}000 08:01 {inode}  /w.safetensors (deleted)\n"
        for at, inode in ((8, 5), (9, 5), (10, 6))
    )
    monkeypatch.setattr(memory_maps.sys, "platform", "linux")
    monkeypatch.setattr(memory_maps, "open", lambda *_, **__: io.StringIO(maps), raising=False)
    found = [(one.start, one.end, one.inode) for one in memory_maps.mapped_files()]
    assert found == [(0x8000, 0xA000, 5), (0xA000, 0xB000, 6)]


def test_a_file_that_was_replaced_while_in_use_is_an_error(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(4096)}, path)
    file = source(path)
    file.check()
    replace(path, {"w": torch.ones(4096)})
    for found in (None, path.stat()):
        with pytest.raises(carom.WeightsError, match=r"w\.safetensors: was replaced by another file"):
            file.check(found)
