"""Lines whose mutation no other test noticed: the link's share under GPUDirect, values that are not finite, a file left open."""

from __future__ import annotations

import os

import pytest
import torch
from carom.core.checkpoint import index
from carom.core.codec import kbit
from carom.core.common.errors import WeightsError
from carom.tools.planner import cost_model
from safetensors.torch import save_file


@pytest.mark.parametrize(
    ("gds", "mode", "link", "disk"),
    [
        # 100 bytes stream; host memory holds 30 of them. In training the slots keep 20 at the turn.
        (False, "infer", 100 / 10, 70 / 5),
        (False, "train", 80 / 10, 50 / 5),
        (True, "infer", 30 / 10, 70 / 5),  # what comes straight from the drive crosses no link
        (True, "train", 30 / 10, 50 / 5),
    ],
)
def test_the_link_carries_all_that_does_not_go_from_the_drive_to_the_device(gds, mode, link, disk):
    work = cost_model.Work(active_params=1, streamed_bytes=100, cached_bytes=30, kept_bytes=20)
    rates = cost_model.Rates(compute=1, link=10, disk=5, gds=gds)
    assert cost_model.wire_times(work, rates, mode) == (link, disk)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 70, 129], ids=["first block", "second", "in a block that is not full"])
@pytest.mark.parametrize("book", kbit.CODEBOOKS.values(), ids=list(kbit.CODEBOOKS))
def test_the_device_quantises_nothing_that_is_not_finite(book, at, value, monkeypatch):
    monkeypatch.setattr(kbit, "CHUNK", 128)  # the last block is in a chunk of its own
    flat = torch.linspace(-1, 1, 130)
    layout = kbit.Layout(book, flat.numel(), 64)
    assert kbit.quantize_torch(flat, layout, torch.zeros(layout.total, dtype=torch.uint8))
    flat[at] = value
    assert not kbit.quantize_torch(flat, layout, torch.zeros(layout.total, dtype=torch.uint8))


@pytest.mark.parametrize("damage", [None, b"short", b"\xff" * 64], ids=["whole", "cut", "no header"])
def test_a_header_that_was_read_leaves_no_file_open(tmp_path, monkeypatch, damage):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    if damage is not None:
        path.write_bytes(damage)
    opened: list[int] = []

    def noted(*arguments: object) -> int:
        opened.append(os.open(*arguments))  # type: ignore[arg-type]
        return opened[-1]

    class System:
        """`os`, whose `open` is noted."""

        def __getattr__(self, name: str) -> object:
            return noted if name == "open" else getattr(os, name)

    monkeypatch.setattr(index, "os", System())
    if damage is None:
        index.read_header(str(path))
    else:
        with pytest.raises(WeightsError):
            index.read_header(str(path))
    assert len(opened) == 1
    with pytest.raises(OSError, match="(?i)bad file"):
        os.fstat(opened[0])
