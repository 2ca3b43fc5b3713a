"""Helpers for tests of weights from disk: checkpoints, modules on meta, budgets, and drives with faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.checkpoint.direct_io import PosixFile
from carom.core.checkpoint.direct_io_windows import WindowsFile
from carom.tools.pack.writer import pack
from safetensors.torch import save_file
from torch import nn

# The class of files that `open_raw` opens on this system.
NativeFile: Any = WindowsFile if sys.platform == "win32" else PosixFile


def save(model: nn.Module, folder: Path, packed: bool = False) -> Path:
    """Write the model's state to a file, with tied tensors once, and return the path; ``packed``: pack the file."""
    seen: dict[int, str] = {}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if seen.setdefault(id(tensor), name) == name:
            state[name] = tensor.detach().contiguous().clone()
    path = folder / "model.safetensors"
    save_file(state, path)
    if packed:
        pack(path, folder / "packed.safetensors")
        path = folder / "packed.safetensors"
    return path


def on_meta(case: Any, checkpoint: str = "none") -> nn.Module:
    with torch.device("meta"):
        return case.build(checkpoint)


def some_vram(model: nn.Module, weights: Any, share: float = 0.3, slots: int = 1, **settings: Any) -> int:
    """Return a budget in bytes between the least budget, which a BudgetError names, and the bytes of all weights, by
    ``share``.
    """
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device="cpu", vram=0, weights=weights, **settings)
    assert refused.value.least_bytes is not None
    least = refused.value.least_bytes * slots
    pages = sum(-(-t.nbytes // 4096) * 4096 for t in {id(t): t for t in model.parameters()}.values())
    return least + int(max(0, pages - least) * share)


def least_on_disk(model: nn.Module, device: Any, disk: Path, ram: int) -> int:
    """Return the least VRAM budget in bytes with which a module in memory streams from disk."""
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(model, device=device, vram=0, ram=ram, disk=disk)
    assert refused.value.least_bytes is not None
    return refused.value.least_bytes


def some_ram(model: nn.Module, share: float) -> int:
    return max(8192, int(share * sum(-(-t.nbytes // 4096) * 4096 for t in model.parameters())))


def within_ram(session: Any) -> None:
    report = session.report()
    assert 0 < report.ram_peak_bytes <= report.ram_budget_bytes
    assert report.vram_peak_bytes <= report.vram_budget_bytes


def uniform(tmp_path: Path) -> tuple[nn.Module, nn.Module, Path, int]:
    """Return (loaded module, module on meta, file, bytes) of a model with twenty blocks of two equal matrices."""

    class Uniform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)) for _ in range(20)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded = Uniform()
    with torch.device("meta"):
        empty = Uniform()
    return loaded, empty, save(loaded, tmp_path), sum(p.nbytes for p in loaded.parameters())


class Drive:
    """The bytes that were read from files since the last call of `fresh`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        read_into = NativeFile.read_into

        def counted(file: Any, buffer: memoryview, offset: int) -> int:
            got = read_into(file, buffer, offset)
            self.nbytes += got
            return got

        monkeypatch.setattr(NativeFile, "read_into", counted)

    def fresh(self) -> int:
        found, self.nbytes = self.nbytes, 0
        return found


class Faults:
    """A patch of the file reads that injects faults: ``play(offset)`` returns an OSError, a length, or None for no
    fault.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, play: Any) -> None:
        from carom.core.checkpoint.disk_reader import DiskReader, ReaderPolicy
        from carom.core.placement import file_source

        class File(NativeFile):
            def read_into(self, buffer: memoryview, offset: int) -> int:
                verdict = play(offset)
                if isinstance(verdict, Exception):
                    raise verdict
                got = super().read_into(buffer, offset)
                return got if verdict is None else min(got, verdict)

        def reader(policy: ReaderPolicy, **settings: Any) -> DiskReader:
            quick = ReaderPolicy(workers=policy.workers, chunk=policy.chunk, retries=2, backoff=0.001)
            return DiskReader(quick, opener=File, **settings)

        monkeypatch.setattr(file_source, "DiskReader", reader)
