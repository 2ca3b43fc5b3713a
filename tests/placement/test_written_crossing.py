"""A value that was written to a weight of a file crosses in the place of the file's bytes: once, and the report counts it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.device.simulated import SimulatedDevice
from carom.core.placement.file_backing import FileBacking
from carom.tools.pack.writer import pack
from safetensors.torch import save_file
from tests_inside import inside
from torch import nn

SIDE = 256
MATRIX = SIDE * SIDE * 2


class Block(nn.Module):
    """One unit of three tensors, of which the norm is never packed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIDE)
        self.up = nn.Linear(SIDE, SIDE, bias=False)
        self.down = nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


def build() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(6))).bfloat16().requires_grad_(False)


def pair(folder: Path, packed: bool) -> tuple[nn.Sequential, nn.Sequential, Path]:
    """A module, the same on meta, and a file of its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded = build()
        for parameter in loaded.parameters():
            parameter.normal_().mul_(0.02)
    with torch.device("meta"):
        empty = build()
    path = folder / "m.safetensors"
    save_file(loaded.state_dict(), path)
    if packed:
        assert pack(path, folder / "p.safetensors", codec="lossless").codecs["lossless"]
        path = folder / "p.safetensors"
    return loaded, empty, path


WRITES = {
    "a matrix": ("up.weight",),
    "a small tensor": ("norm.bias",),
    "what is packed": ("up.weight", "down.weight"),
    "what is not": ("norm.weight", "norm.bias"),
    "all of a unit": ("norm.weight", "norm.bias", "up.weight", "down.weight"),
}


TIMINGS, RAMS = ("late", "early", "random"), (1 << 22, 10 * MATRIX)
CASES = [
    pytest.param(
        packed, written, TIMINGS[at % 3], RAMS[at % 2], id=f"{'packed' if packed else 'raw'}: {name}"
    )
    for at, (packed, name, written) in enumerate(
        (packed, name, written) for packed in (False, True) for name, written in WRITES.items()
    )
]


@pytest.fixture
def fetches(monkeypatch) -> list[tuple[str, int]]:
    """(name, bytes that crossed) of each fetch of a unit.

    Whether a unit is fetched before or after the end of a pass depends on when its disk read ends, so the bytes
    of a pass are not the same in each pass. Those of a fetch are.
    """
    found: list[tuple[str, int]] = []
    fetch = FileBacking.fetch

    def counted(self: FileBacking, target: Any, after: Any, link: Any) -> Any:
        before = link.engine.bytes_in
        event = fetch(self, target, after, link)
        found.append((self.name, link.engine.bytes_in - before))
        return event

    monkeypatch.setattr(FileBacking, "fetch", counted)
    return found


@pytest.mark.parametrize(("packed", "written", "timing", "ram"), CASES)
def test_what_was_written_crosses_once_and_the_report_says_what_crossed(
    tmp_path, fetches, packed, written, timing, ram
):
    loaded, empty, path = pair(tmp_path, packed)
    x = torch.ones(2, SIDE, dtype=torch.bfloat16)
    device = SimulatedDevice(timing=timing, seed=3)
    settings = {"device": device, "vram": 9 * MATRIX, "ram": ram, "granularity": "block"}
    with torch.no_grad(), carom.stream(empty, weights=path, **settings) as session:
        assert bool(session.report().packed_units) == packed
        engine = inside(session).engine

        def crossed(passes: int) -> tuple[list[int], dict[str, int]]:
            """The bytes of each pass, and the bytes of a fetch of each unit."""
            passed, first = [], len(fetches)
            for _ in range(passes):
                before = engine.bytes_in
                assert torch.equal(empty(x), loaded(x))
                passed.append(engine.bytes_in - before)
            sizes = {
                name: {n for other, n in fetches[first:] if other == name} for name, _ in fetches[first:]
            }
            assert all(len(each) == 1 for each in sizes.values())
            return passed, {name: each.pop() for name, each in sizes.items()}

        _, before = crossed(3)
        streamed = [str(i) for i, block in enumerate(empty) if block.up.weight.is_meta]
        assert len(streamed) >= 3 and set(before) >= set(streamed)
        for name in [f"{streamed[1]}.{each}" for each in written]:
            value = loaded.get_parameter(name) * 1.5
            session.write(name, value)
            loaded.get_parameter(name).copy_(value)
        crossed(1)
        session.set_budget(vram=9 * MATRIX)  # another layout: the report's medians begin anew
        passed, after = crossed(5)
        report = session.report()
        assert report.wire_bytes_per_step == statistics.median(passed[2:])
        mine = streamed[1]
        assert {name: n for name, n in after.items() if name != mine} == {
            name: before[name] for name in after if name != mine
        }
        changed = sum(loaded.get_parameter(f"{mine}.{each}").nbytes for each in written)
        if not packed:
            padding = 4096 * len(written)  # of what was written need not cross
            assert before[mine] - padding < after[mine] <= before[mine]
        elif len(written) == len(WRITES["all of a unit"]):
            assert after[mine] == changed, "nothing of the file crosses beside the values"
        else:
            assert changed < after[mine] <= before[mine] + changed
