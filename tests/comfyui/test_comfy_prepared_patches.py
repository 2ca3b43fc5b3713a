"""Under ComfyUI: the tensors of patches are copied to the device once for a layout, and their bytes count."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import tests_comfy_stand_in as stand_in
import torch
from carom.benchmarks.hosts.comfy_patches import HostReads
from carom.core.streaming.pass_retry import OutOfMemory
from carom.nodes.node_settings import Settings
from carom.nodes.patcher import wear
from carom.nodes.prepared_patches import PreparedPatches
from carom.nodes.streaming import streaming_of
from tests_comfy_layers import BLOCKS, LAYER, WIDTH, Model, load, step, stock
from tests_comfy_server import PATHS, PYTHON, REASON
from tests_comfy_stand_in import installed

CPU = torch.device("cpu")
RANK = 4
FACTORS = 2 * RANK * WIDTH * 4  # bytes of one adapter, a multiple of the allocator's grain
NAMES = [f"diffusion_model.{number}.weight" for number in range(BLOCKS)]


class Adapter:
    """An adapter in ComfyUI's form: a tuple of tensors and other values, and a method that applies it."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        up = torch.randn(WIDTH, RANK, generator=generator) * 0.1
        self.weights = (up, torch.randn(RANK, WIDTH, generator=generator) * 0.1, 2.0, None)

    def calculate_weight(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        up, down, alpha, _ = self.weights
        return weight + strength * alpha * (up @ down)


def lora(seed: int) -> dict[str, Adapter]:
    return {name: Adapter(100 * seed + number) for number, name in enumerate(NAMES)}


def tensors(patches: dict[str, Adapter]) -> list[torch.Tensor]:
    return [tensor for adapter in patches.values() for tensor in adapter.weights[:2]]


@pytest.fixture(autouse=True)
def comfy(tmp_path, monkeypatch) -> Iterator[Any]:
    def patched(patches: list, weight: torch.Tensor) -> torch.Tensor:
        for strength, patch, *_ in patches:
            if isinstance(patch, list):
                weight = weight + strength * patch[0][0]
            elif isinstance(patch, tuple):
                weight = weight + strength * patch[1][0]
            else:
                weight = patch.calculate_weight(weight, strength)
        return weight

    monkeypatch.setattr(stand_in, "_patched", patched)
    with installed(tmp_path) as state:
        yield state


def make(**settings: Any) -> Any:
    patcher_class = sys.modules["comfy.model_patcher"].ModelPatcher
    options = {"mode": "stream", "codec": "raw", **settings}
    return wear(patcher_class(Model(), CPU, CPU), Settings(**options))


def copies(monkeypatch) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    own = PreparedPatches._copy
    monkeypatch.setattr(PreparedPatches, "_copy", lambda self, t: (made.append(t), own(self, t))[1])
    return made


def test_no_step_reads_what_a_lora_needs_on_the_host():
    first, second = lora(1), lora(2)
    patcher = load(make(), [(first, 0.5), (second, 1.0)])
    with HostReads(tensors(first) + tensors(second)) as reads:
        steps = [step(patcher) for _ in range(2)]
    assert reads.count == 0
    assert all(torch.equal(one, stock([(first, 0.5), (second, 1.0)])) for one in steps)


def test_another_strength_copies_nothing_and_a_second_lora_only_its_own(monkeypatch):
    made, first, second = copies(monkeypatch), lora(1), lora(2)
    patcher = loaded = make()
    chains = ([(first, 1.0)], [(first, 0.3)], [(first, 0.3), (second, 0.7)], [(second, 0.7)], [])
    counts, held = [], []
    for chain in chains:
        loaded = load(patcher, list(chain), loaded=loaded)
        assert torch.equal(step(loaded), stock(list(chain)))
        counts.append(len(made))
        held.append(streaming_of(patcher.model).patches.nbytes)
    assert counts == [2 * BLOCKS, 2 * BLOCKS, 4 * BLOCKS, 4 * BLOCKS, 4 * BLOCKS]
    assert held == [BLOCKS * FACTORS, BLOCKS * FACTORS, 2 * BLOCKS * FACTORS, BLOCKS * FACTORS, 0]


def test_adapters_and_patches_of_the_loader_do_not_change():
    patches = lora(1)
    before = {name: (adapter, adapter.weights) for name, adapter in patches.items()}
    patcher = load(make(), [(patches, 1.0)])
    assert streaming_of(patcher.model).patches.nbytes == BLOCKS * FACTORS
    for name, (adapter, weights) in before.items():
        assert patches[name] is adapter and adapter.weights is weights
        assert patcher.patches[name] == [(1.0, adapter, 1.0)]
    functions = [part.weight_function[0] for part in patcher.model.diffusion_model]
    streaming_of(patcher.model).close()
    assert all(function.patches is patcher.patches for function in functions)


def test_whole_differences_are_prepared_and_weights_of_merged_models_are_not():
    other = torch.full((WIDTH, WIDTH), 0.25)
    patches = {NAMES[0]: ("diff", (torch.full((WIDTH, WIDTH), 0.5),)), NAMES[1]: [(other, None)]}
    patcher = load(make(), [(patches, 1.0)])
    assert streaming_of(patcher.model).patches.nbytes == WIDTH * WIDTH * 4
    assert torch.equal(step(patcher), stock([(patches, 1.0)]))
    assert patcher.model.diffusion_model[1].weight_function[0].patches[NAMES[1]][0][1][0][0] is other


@pytest.mark.parametrize("vram", ["auto", str(5 * LAYER)])
def test_patches_take_their_bytes_off_the_offer_and_off_the_users_limit(vram):
    patcher = make(vram=vram)
    load(patcher, [])
    carom = streaming_of(patcher.model)
    before, limit = carom.held, 9 * LAYER if vram == "auto" else 5 * LAYER
    patched = load(patcher, [(lora(1), 1.0)])
    assert carom.patches.nbytes == BLOCKS * FACTORS
    assert patched.loaded_size() == carom.held + BLOCKS * FACTORS <= limit and carom.held < before
    assert torch.equal(step(patched), stock([(lora(1), 1.0)]))
    held = carom.held
    patched.partially_load(CPU, 9 * LAYER - patched.loaded_size())  # the next prompt
    assert carom.held == held and carom.patches.nbytes == BLOCKS * FACTORS


@pytest.mark.parametrize("bound", ["limit", "offer"])
def test_patches_without_room_beside_the_least_budget_stay_on_the_host(bound):
    chain = [(lora(seed), 0.5) for seed in range(3)]  # together more than the offer
    patcher = make()
    load(patcher, [], 1)
    carom = streaming_of(patcher.model)
    least = carom.held
    patcher.detach()
    carom.close()
    room = least + 9 * FACTORS
    if bound == "limit":
        patched = load(make(vram=str(room)), chain)
    else:  # what ComfyUI offers includes what it takes to patch a weight
        room += 3 * WIDTH * WIDTH * 4 + FACTORS
        patched = load(make(), chain, room)
    carom = streaming_of(patched.model)
    assert least < carom.patches.wanted == 3 * BLOCKS * FACTORS
    for _ in range(2):
        assert carom.held == least and carom.patches.nbytes == 9 * FACTORS
        assert torch.equal(step(patched), stock(chain))
        patched.partially_load(CPU, room - patched.loaded_size())  # the next prompt
    patched.partially_load(CPU, 14 * LAYER - patched.loaded_size())
    assert (carom.patches.nbytes == 3 * BLOCKS * FACTORS) is (bound == "offer")


def test_patches_for_which_the_device_has_no_memory_stay_on_the_host(monkeypatch):
    def short(self: PreparedPatches, tensor: torch.Tensor) -> torch.Tensor:
        raise OutOfMemory("as if")

    patches = lora(1)
    monkeypatch.setattr(PreparedPatches, "_copy", short)
    patcher = load(make(), [(patches, 1.0)])
    assert streaming_of(patcher.model).patches.nbytes == 0
    with HostReads(tensors(patches)) as reads:
        assert torch.equal(step(patcher), stock([(patches, 1.0)]))
    assert reads.count


def test_memory_that_comfyui_asks_for_is_taken_from_patches_last_and_given_back_at_the_next_load():
    patcher = load(make(), [(lora(1), 1.0)])
    carom = streaming_of(patcher.model)
    loaded, nbytes = patcher.loaded_size(), carom.patches.nbytes
    freed = patcher.partially_unload(CPU, LAYER)
    assert LAYER <= freed == loaded - patcher.loaded_size() and carom.patches.nbytes == nbytes
    loaded = patcher.loaded_size()
    freed = patcher.partially_unload(CPU, 100 * LAYER)
    assert freed == loaded - patcher.loaded_size() and carom.patches.nbytes == 0
    assert torch.equal(step(patcher), stock([(lora(1), 1.0)]))
    patcher.partially_load(CPU, 9 * LAYER - patcher.loaded_size())
    assert carom.patches.nbytes == nbytes and torch.equal(step(patcher), stock([(lora(1), 1.0)]))


@pytest.mark.parametrize("end", ["unloaded", "dropped"])
def test_the_copies_end_with_the_layout(end):
    patches = lora(1)
    patcher = load(make(), [(patches, 1.0)])
    carom = streaming_of(patcher.model)
    copied = weakref.ref(
        patcher.model.diffusion_model[0].weight_function[0].patches[NAMES[0]][0][1].weights[0]
    )
    assert carom.patches.nbytes and copied() is not None
    if end == "dropped":
        del patcher
    else:
        patcher.detach()
        assert patcher.loaded_size() == 0
    gc.collect()
    assert carom.patches.nbytes == 0 and copied() is None
    if end == "unloaded":
        again = load(patcher, [])  # a model that returns
        assert carom.patches.nbytes == BLOCKS * FACTORS
        assert torch.equal(step(again), stock([(patches, 1.0)]))


@pytest.mark.skipif(not PATHS, reason=REASON)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: os.path.basename(path))
def test_every_kind_of_adapter_is_copied_once_and_computes_the_bits_of_comfyui(path, root, tmp_path):
    script, record = root / "benchmarks" / "hosts" / "comfy_patches.py", tmp_path / "record.json"
    done = subprocess.run(
        [PYTHON, str(script), "--json", str(record)],
        env={**os.environ, "COMFYUI_PATH": path}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stdout[-4000:] + done.stderr[-2000:]
    for loads in json.loads(record.read_text("utf-8"))["kinds"].values():
        for name, told in loads.items():
            assert told["host_reads"] == [0, 0, 0] and told["calls"] == told["stock_calls"] and told["equal"]
            assert bool(told["prepared_bytes"]) is (name not in ("plain", "removed"))
        assert loads["first"]["prepared_bytes"] == loads["strength"]["prepared_bytes"]
        assert loads["second"]["prepared_bytes"] == 2 * loads["first"]["prepared_bytes"]
