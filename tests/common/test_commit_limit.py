"""Windows' error 1455 (the commit limit is reached) is told in its own words, wherever it comes from."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import carom
import pytest
import torch
from carom.cli import main as cli
from carom.core.checkpoint import spill as spilling
from carom.core.checkpoint import spill_file
from carom.core.common import commit_memory, huge_pages
from carom.core.common.commit_memory import PAGEFILE_ADVICE, is_commit_limit, with_advice
from carom.nodes.loader_options import loaded

TEXT = "The paging file is too small for this operation to complete"


def refused() -> OSError:
    error = OSError(22, TEXT)
    error.winerror = 1455  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        refused(),
        RuntimeError(f"[WinError 1455] {TEXT}"),
        OSError(f"{TEXT}. (os error 1455)"),
        RuntimeError("Couldn't open file mapping: <torch>, error code: <1455>"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    ],
)  # fmt: skip
def test_the_error_is_recognised_as_each_library_writes_it(error):
    assert is_commit_limit(error)
    later = MemoryError("no memory")
    later.__cause__ = error
    assert with_advice("no memory", later) == f"no memory. {PAGEFILE_ADVICE}"
    assert with_advice(with_advice("no memory", later), later).count(PAGEFILE_ADVICE) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("1455 is too large")])
def test_other_errors_are_not(error):
    assert with_advice("failed", error) == "failed"


def test_on_windows_an_error_of_memory_without_a_number_is_one_too(monkeypatch):
    error = MemoryError("Unable to allocate 8.00 GiB for an array with shape (8589934592,)")
    monkeypatch.setattr(commit_memory.sys, "platform", "linux")
    assert with_advice("failed", error) == "failed"
    monkeypatch.setattr(commit_memory.sys, "platform", "win32")
    assert with_advice("failed", error) == f"failed. {PAGEFILE_ADVICE}"


def test_an_allocation_says_it(monkeypatch):
    def refuse(*_, **__):
        raise refused()

    monkeypatch.setattr(huge_pages, "mmap", SimpleNamespace(mmap=refuse, PAGESIZE=mmap.PAGESIZE))
    with pytest.raises(MemoryError, match="page file"):
        huge_pages.allocate_pages(1 << 20)


def test_a_mapping_of_a_spill_file_says_it_and_names_no_other_folder(tmp_path, monkeypatch):
    def refuse(file):
        raise refused()

    monkeypatch.setattr(spill_file.SpillFile, "map", refuse)
    with pytest.raises(carom.WeightsError, match="page file") as raised:
        spilling.spill([torch.zeros(5000)], tmp_path)
    assert "another folder" not in str(raised.value) and not list(tmp_path.iterdir())


def test_a_loader_of_comfyui_says_it_and_does_not_doubt_the_file():
    def load():
        raise refused()

    with pytest.raises(carom.WeightsError, match="page file") as raised:
        loaded("model.safetensors", load)
    assert "check that the file is complete" not in str(raised.value)


def test_a_command_says_it(monkeypatch, capsys):
    def refuse(*_, **__):
        raise refused()

    monkeypatch.setattr(cli, "build_parser", lambda name: SimpleNamespace(
        parse_args=lambda argv: SimpleNamespace(run=refuse, json=False, command="plan")
    ))  # fmt: skip
    assert cli.main(["plan"]) == 1
    assert commit_memory.PAGEFILE_ADVICE in capsys.readouterr().err
