"""On Windows, a weight that is a view of a mapped file streams from that file, as on Linux."""

from __future__ import annotations

import mmap
import sys

import carom
import pytest
import torch
from carom.core.checkpoint import mapped_views, memory_maps, memory_maps_windows
from carom.core.checkpoint.mapped_views import MappedViews
from carom.core.host import page_release
from carom.core.host.page_release import MappedFiles
from carom.core.session import settings
from safetensors.torch import load_file, save_file
from tests_mapped_memory import MappedMemory, posix_path

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the stand-in reads Linux's /proc"
)


@pytest.fixture(autouse=True)
def windows(monkeypatch) -> None:
    """Let `memory_maps` ask kernel32, as on Windows. Paths are of this system again."""
    file_at, files = memory_maps_windows.file_at, memory_maps.windows_files
    monkeypatch.setattr(memory_maps_windows, "file_at", lambda *known: posix_path(file_at(*known)))
    for module in (mapped_views, page_release):
        monkeypatch.setattr(module, "mapped_files", lambda: files(MappedMemory()))


@pytest.fixture
def mapped(tmp_path) -> torch.Tensor:
    """A weight of 4 MiB that is a view of a mapped safetensors file."""
    save_file(
        {"a": torch.zeros(3), "w": torch.arange(1 << 20, dtype=torch.float32)}, tmp_path / "w.safetensors"
    )
    return load_file(tmp_path / "w.safetensors")["w"]


def test_the_file_and_the_offset_of_a_mapped_weight_are_found(mapped, tmp_path):
    found = MappedViews().find(mapped)
    assert found is not None and found.file.path == str(tmp_path / "w.safetensors")
    with open(found.file.path, "rb") as file:
        file.seek(found.offset)
        assert file.read(found.nbytes) == mapped.numpy().tobytes()
    assert MappedFiles().supported and MappedFiles().contains(mapped.data_ptr(), mapped.nbytes)
    assert MappedViews().find(mapped.clone()) is None


def test_a_weight_with_a_page_that_was_written_to_is_not_read_from_the_file(mapped):
    mapped[500_000] = -1
    assert MappedViews().find(mapped) is None
    assert MappedViews().find(mapped[:100_000]) is not None, "its pages are still the file's"
    assert MappedFiles().contains(mapped.data_ptr(), mapped.nbytes)


def test_the_offset_of_a_view_that_is_shorter_than_its_file_is_not_known(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 1024)
    with path.open("r+b") as file:
        part = mmap.mmap(file.fileno(), 1 << 16, access=mmap.ACCESS_COPY, offset=1 << 16)
    tensor = torch.frombuffer(part, dtype=torch.uint8)
    assert MappedFiles().contains(tensor.data_ptr(), tensor.nbytes), "it is in a file, and is not spilled"
    assert MappedViews().find(tensor) is None


@pytest.mark.parametrize(("access", "writable"), [(mmap.ACCESS_READ, False), (mmap.ACCESS_COPY, True)])
def test_read_only_views_are_told_from_writable_ones(tmp_path, access, writable):
    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0, access=access)
    (found,) = [one for one in memory_maps.windows_files(MappedMemory()) if one.path == str(path)]
    assert found.read_only == (() if writable else ((found.start, found.end),)) and len(view) == 8192


def test_a_session_with_a_mapped_model_writes_nothing_to_the_folder(tmp_path):
    layers = [torch.nn.Linear(256, 256, bias=False) for _ in range(6)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    model.load_state_dict(load_file(tmp_path / "m.safetensors"), assign=True)
    x, folder = torch.randn(4, 256), tmp_path / "spill"
    folder.mkdir()
    expected = model(x)
    with carom.stream(model, device="cpu", vram="600KB", ram="400KB", disk=folder) as session:
        assert torch.equal(model(x), expected) and session.report().disk_bytes_per_step
        assert not list(folder.iterdir())


def test_weights_that_wait_in_memory_count_for_a_card_that_shares_it_and_mapped_ones_do_not(mapped):
    module = torch.nn.Module()
    module.register_buffer("mapped", mapped)
    module.register_buffer("own", torch.zeros(1000))
    assert settings.waiting_bytes(module) == 4000


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("\\Device\\HarddiskVolume3\\models\\m.safetensors", "C:\\models\\m.safetensors"),
        ("\\Device\\HarddiskVolume31\\m.safetensors", "\\\\?\\GLOBALROOT\\Device\\HarddiskVolume31\\m.safetensors"),
        ("\\Device\\Mup\\nas\\models\\m.safetensors", "\\\\nas\\models\\m.safetensors"),
        ("\\Device\\Mup\\;LanmanRedirector\\;Z:000000000003e7a1\\nas\\models\\m", "\\\\nas\\models\\m"),
        ("", None),
    ],
)  # fmt: skip
def test_device_paths_become_paths_that_can_be_opened(monkeypatch, name, path):
    monkeypatch.undo()  # the path of Windows itself
    kernel32 = MappedMemory()

    def named(process, address, target, size):
        target.value = name
        return len(name)

    monkeypatch.setattr(kernel32, "K32GetMappedFileNameW", named)
    drives = memory_maps_windows.drive_letters(kernel32)
    assert drives == {"\\Device\\HarddiskVolume3": "C:"}
    assert memory_maps_windows.file_at(kernel32, 1 << 16, drives) == path


IN_THE_SHAPE = """
import sys
import torch
from carom.core.checkpoint.mapped_views import MappedViews
from safetensors.torch import load_file, save_file

save_file({"w": torch.arange(5000.0)}, sys.argv[1])
tensor = load_file(sys.argv[1])["w"]
found = MappedViews().find(tensor)
assert found is not None and found.file.path.endswith(sys.argv[1]), found
tensor[1] = 0
assert MappedViews().find(tensor) is None
"""


def test_the_windows_shaped_python_has_the_calls(windows_python, tmp_path):
    done = windows_python("-c", IN_THE_SHAPE, str(tmp_path / "m.safetensors"))
    assert done.returncode == 0, done.stderr
