"""Prompts after what users and other programs do in between, in the real ComfyUI on the CPU.

A prompt is interrupted and queued again, a LoRA file does not fit the model, models leave and come back, ``/free`` is
called, another program fills the card. The prompt is right: its results equal stock's, which computes with the same
weights. Nothing is read twice.

All prompts run in two processes, one with Carom and one without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from carom.benchmarks.hosts.prompt_cases import TINY, Case, Prompt, Way, graph
from carom.benchmarks.hosts.prompts_on_cpu import COMFYUI, make_files, run
from safetensors.torch import load_file, save_file

pytestmark = [
    pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_PATH to a ComfyUI folder"),
    pytest.mark.timeout(600),
]

FILL = 60_000_000
MODEL, LORA, SMALL = 23_068_672, 1_720_320, 200_000  # bytes of a file's weights; of a model's small tensors
# Bytes over the link in a prompt of four steps, by the number of its models, and if the card is filled.
LINK, LINK_FILLED = {1: 97_900_000, 2: 108_600_000}, 130_600_000
FREE = None  # `/free` between two prompts
BOTH, A, B = ("a", "b"), ("a",), ("b",)
PARTS = ("load", "encode", "switch", "first step", "other steps")


@dataclass
class Row:
    """A sequence of prompts that begins without any model.

    ``models``: those of each prompt, or `FREE`; ``loads``: how often a model has to be read from its file, because
    ComfyUI dropped it or never had it; ``loras``: of the prompts, by their number; ``interrupts`` and ``fills``: as in
    `run`, by the number in the row.
    """

    models: list[tuple[str, ...] | None]
    loads: int
    loras: dict[int, tuple[str, ...]] = field(default_factory=dict)
    interrupts: dict[int, str] = field(default_factory=dict)
    fills: dict[int, tuple[str, int]] = field(default_factory=dict)

    def graphs(self, way: Way) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = []
        for number, models in enumerate(self.models):
            loras = tuple((name, 0.7) for name in self.loras.get(number, ()))
            prompt = Prompt(f"a pier, view {number % 2}", models or A, loras)
            found.append(None if models is FREE else graph(Case("", (prompt,)), 0, TINY, way))
        return found


ROWS = {
    **{f"first prompt interrupted in {part}": Row([BOTH, BOTH], 2, interrupts={0: part}) for part in PARTS},
    "LoRA of fewer layers": Row([A, A], 1, loras={0: ("fewer",)}),
    "LoRA that misses keys": Row([A, A, A], 1, loras={1: ("half",)}),  # ComfyUI's loader of LoRAs raises
    "LoRA of other shapes": Row([A, A], 1, loras={0: ("shapes",)}),
    "LoRA of another model": Row([A, A], 1, loras={0: ("foreign",), 1: ("first",)}),
    "a model leaves and comes back": Row([BOTH, B, BOTH], 3),
    "free": Row([BOTH, FREE, BOTH], 4),
    "other models queued": Row([A, B, A], 3),
    "card filled in the first step": Row([BOTH, BOTH, BOTH], 2, fills={1: ("first step", FILL)}),
    "card filled in the switch": Row([BOTH, BOTH, BOTH], 2, fills={1: ("switch", FILL)}),
}
CAROM = Way(True, "stream", "12MiB", "raw")
STOCK = Way(False, merges_little=True)


def write_loras(folder: Path) -> None:
    """Write LoRA files that do not fit: for a part of the layers, without half of the factors, with other shapes, for a model with other names."""
    good = load_file(folder / "loras/first.safetensors")
    downs = [name for name in sorted(good) if "lora_down" in name]
    fewer = {name: value for name, value in good.items() if "double" in name}
    half = {name: value for name, value in good.items() if name not in downs[::2]}
    shapes = {
        name: value[:, :-8].contiguous() if name in downs[::2] else value for name, value in good.items()
    }
    foreign = {name.replace("diffusion_model.", "other_model."): value for name, value in good.items()}
    for name, weights in {"fewer": fewer, "half": half, "shapes": shapes, "foreign": foreign}.items():
        save_file(weights, folder / f"loras/{name}.safetensors")


def run_carom(folder: Path) -> dict[str, dict[int, Any]]:
    """Run all rows in one process; return what it told, by row and number of the prompt in it."""
    graphs: list[Any] = []
    places, interrupts, fills = [], {}, {}
    for name, row in ROWS.items():
        interrupts |= {len(graphs) + number: part for number, part in row.interrupts.items()}
        fills |= {len(graphs) + number: fill for number, fill in row.fills.items()}
        graphs += [*row.graphs(CAROM), FREE]
        places += [(name, number) for number in range(len(row.models) + 1)]
    found: dict[str, dict[int, Any]] = {name: {} for name in ROWS}
    for told in run(folder, graphs, interrupts=interrupts, fills=fills, may_fail=True):
        name, number = places[told["prompt"]]
        found[name][number] = told
    return found


def run_stock(folder: Path) -> dict[str, Any]:
    """Run each graph once; return what the process told, by graph."""
    graphs = {str(one): one for row in ROWS.values() for one in row.graphs(STOCK) if one is not FREE}
    told = run(folder, list(graphs.values()), carom=False, may_fail=True)
    return dict(zip(graphs, told, strict=True))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("prompts")
    make_files(folder)
    write_loras(folder)
    return run_carom(folder), run_stock(folder)


@pytest.mark.parametrize("name", ROWS)
def test_results_equal_stocks(told: tuple[Any, Any], name: str) -> None:
    row = ROWS[name]
    for number, one in enumerate(row.graphs(STOCK)):
        if one is FREE:
            continue
        carom, stock = told[0][name][number], told[1][str(one)]
        if number in row.interrupts:
            assert "interrupted" in carom, number
        else:
            for key in ("results", "failed", "errors"):
                assert carom.get(key) == stock.get(key), (number, key)


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_read_or_copied_twice(told: tuple[Any, Any], name: str) -> None:
    row, carom = ROWS[name], told[0][name]
    files = len({file for files in row.loras.values() for file in files})
    assert sum(one["counts"]["read"] for one in carom.values()) <= row.loads * MODEL + files * LORA
    for number, one in carom.items():
        models = len(row.models[number] or ())
        # A LoRA's factors are copied when its file is read, and once more to the device.
        assert one["counts"]["copied"] <= models * (MODEL + SMALL) + files * 3 * LORA, number
        assert one["counts"]["link"] <= (LINK_FILLED if number in row.fills else LINK[models]), number
