"""Under ComfyUI: patches that a weight's own class applies (GGUF) are prepared, and patches without room are pinned."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tests_comfy_stand_in as stand_in
import torch
from carom.benchmarks.hosts.comfy_patches import HostReads
from carom.core.host.arena import Pinner
from carom.core.host.pin_limit import PinLimit
from carom.core.streaming.pass_retry import OutOfMemory
from carom.nodes import pinned_tensors
from carom.nodes.node_settings import Settings
from carom.nodes.patcher import wear
from carom.nodes.prepared_patches import PreparedPatches
from carom.nodes.streaming import streaming_of
from tests_comfy_layers import BLOCKS, LAYER, WIDTH, load, step, stock
from tests_comfy_stand_in import installed
from torch import nn
from torch.nn import functional

CPU = torch.device("cpu")
RANK = 4
FACTORS = 2 * RANK * WIDTH * 4  # bytes of one adapter, a multiple of the allocator's grain
PAGE = 4096
NAMES = [f"diffusion_model.{number}.weight" for number in range(BLOCKS)]


class Adapter:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        up = torch.randn(WIDTH, RANK, generator=generator) * 0.1
        self.weights = (up, torch.randn(RANK, WIDTH, generator=generator) * 0.1, 2.0, None)

    def calculate_weight(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        up, down, alpha, _ = self.weights
        return weight + strength * alpha * (up @ down)


def patched(patches: list, weight: torch.Tensor) -> torch.Tensor:
    for strength, patch, *_ in patches:
        if isinstance(patch, list):  # the weight of another model, and its patches
            weight = weight + strength * patched(patch[1:], patch[0][0])
        else:
            weight = patch.calculate_weight(weight, strength)
    return weight


def lora(seed: int) -> dict[str, Adapter]:
    return {name: Adapter(100 * seed + number) for number, name in enumerate(NAMES)}


def tensors(*files: dict[str, Adapter]) -> list[torch.Tensor]:
    return [tensor for file in files for adapter in file.values() for tensor in adapter.weights[:2]]


class Blocks(torch.Tensor):
    """A weight that carries its patches, as those of ComfyUI-GGUF. It may be the bytes of its values."""

    def detach(self) -> torch.Tensor:
        return self


class SelfPatched(stand_in.Linear):
    """A layer whose weight is patched by the layer itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        with torch._C.DisableTorchFunctionSubclass():
            values = weight.as_subclass(torch.Tensor).view(torch.float32)
        for entry in getattr(weight, "patches", []):
            values = patched(entry[0] if isinstance(entry[0], list) else [entry], values)
        return functional.linear(input, values, self.bias)


def model(layer: type = stand_in.Linear) -> Any:
    made = nn.Module()
    made.manual_cast_dtype = None  # type: ignore[assignment]
    made.diffusion_model = nn.Sequential(*(layer(WIDTH, WIDTH) for _ in range(BLOCKS)))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.requires_grad_(False)
    return made


@pytest.fixture(autouse=True)
def comfy(tmp_path, monkeypatch) -> Iterator[Any]:
    monkeypatch.setattr(stand_in, "_patched", patched)
    with installed(tmp_path) as state:
        yield state


@pytest.fixture
def pins(monkeypatch) -> Any:
    """Memory of this machine can be pinned, as far as ComfyUI counts."""
    monkeypatch.setattr(pinned_tensors, "pinner_of", lambda device: Pinner(lambda a, n: None, lambda a: None))
    return sys.modules["comfy.model_management"]


@pytest.fixture
def full_device(monkeypatch) -> None:
    def short(self: PreparedPatches, tensor: torch.Tensor) -> torch.Tensor:
        raise OutOfMemory("as if")

    monkeypatch.setattr(PreparedPatches, "_copy", short)


def make(made: Any = None, kind: Any = None) -> Any:
    kind = kind or sys.modules["comfy.model_patcher"].ModelPatcher
    return wear(kind(made or model(), CPU, CPU), Settings(mode="stream", codec="raw"))


def test_patches_without_room_on_the_device_are_pinned_once(pins, full_device):
    first, second = lora(1), lora(2)
    patcher = loaded = make()
    chains = ([(first, 1.0)], [(first, 0.3)], [(first, 0.3), (second, 0.7)], [])
    reads, pinned = [], []
    for chain in chains:
        with HostReads(tensors(first, second)) as mode:
            loaded = load(patcher, list(chain), loaded=loaded)
            reads.append(mode.count)
            steps = [step(loaded) for _ in range(2)]
        assert mode.count == reads[-1]  # no step reads a factor in pageable memory
        assert all(torch.equal(one, stock(list(chain))) for one in steps)
        pinned.append(streaming_of(loaded.model).patches.pinned.nbytes)
        assert pinned[-1] == pins.TOTAL_PINNED_MEMORY
    assert reads == [2 * BLOCKS, 0, 2 * BLOCKS, 0]
    assert pinned == [BLOCKS * FACTORS, BLOCKS * FACTORS, 2 * BLOCKS * FACTORS, 0]


@pytest.mark.parametrize("most", [-1, PAGE, 5 * PAGE])
def test_patches_are_pinned_within_comfyuis_limit(pins, full_device, most):
    pins.MAX_PINNED_MEMORY = most
    chain = [(lora(1), 1.0)]
    loaded = load(make(), chain)
    assert max(0, most) == pins.TOTAL_PINNED_MEMORY
    assert torch.equal(step(loaded), stock(chain))
    carom = streaming_of(loaded.model)
    carom.close()
    assert pins.TOTAL_PINNED_MEMORY == carom.patches.pinned.nbytes == 0
    assert all(part.weight_function[0].patches is loaded.patches for part in loaded.model.diffusion_model)


def test_no_patch_is_pinned_where_the_machines_memory_is_short(pins, full_device, monkeypatch):
    short = dataclasses.replace(pinned_tensors.host_memory(), usable=0)
    monkeypatch.setattr(pinned_tensors, "host_memory", lambda: short)
    chain = [(lora(1), 1.0)]
    loaded = load(make(), chain)
    assert pins.TOTAL_PINNED_MEMORY == 0 and torch.equal(step(loaded), stock(chain))


def test_no_patch_is_copied_for_a_pin_that_the_system_refuses(pins, full_device, monkeypatch):
    full = Pinner(lambda a, n: None, lambda a: None, lambda pinned: PinLimit(0, "the system's limit"))
    monkeypatch.setattr(pinned_tensors, "pinner_of", lambda device: full)

    class Arena(pinned_tensors.HostArena):
        def allocate(self, nbytes: int) -> Any:
            pytest.fail("memory was allocated")

    monkeypatch.setattr(pinned_tensors, "HostArena", Arena)
    chain = [(lora(1), 1.0)]
    loaded = load(make(), chain)
    assert pins.TOTAL_PINNED_MEMORY == 0 and torch.equal(step(loaded), stock(chain))


def test_patches_that_the_device_gave_up_are_pinned_and_come_back_from_there(pins):
    first = lora(1)
    patcher = load(make(), [(first, 1.0)])
    carom, expected = streaming_of(patcher.model), stock([(first, 1.0)])
    functions = [part.weight_function[0] for part in patcher.model.diffusion_model]
    assert carom.patches.nbytes == BLOCKS * FACTORS and not pins.TOTAL_PINNED_MEMORY
    patcher.partially_unload(CPU, 100 * LAYER)
    assert not carom.patches.nbytes and pins.TOTAL_PINNED_MEMORY == BLOCKS * FACTORS
    with HostReads(tensors(first)) as reads:
        outputs = [step(patcher)]
        patcher.partially_load(CPU, 9 * LAYER - patcher.loaded_size())
        assert carom.patches.nbytes == BLOCKS * FACTORS
        outputs.append(step(patcher))
        assert functions == [part.weight_function[0] for part in patcher.model.diffusion_model]
        patcher.detach()  # the switch to another model, and back
        again = load(patcher, [])
        assert carom.patches.nbytes == BLOCKS * FACTORS
        outputs.append(step(again))
    assert reads.count == 0 and all(torch.equal(one, expected) for one in outputs)


def test_a_model_that_waits_gives_up_the_pinned_memory_of_its_patches(pins):
    patcher = load(make(), [(lora(1), 1.0)])
    patcher.detach()
    assert pins.TOTAL_PINNED_MEMORY == BLOCKS * FACTORS
    streaming_of(patcher.model).give_up_pins()
    assert pins.TOTAL_PINNED_MEMORY == 0


def test_a_dropped_model_no_longer_counts_the_pinned_memory_of_its_patches(pins, full_device):
    patcher = load(make(), [(lora(1), 1.0)])
    assert pins.TOTAL_PINNED_MEMORY
    del patcher
    assert pins.TOTAL_PINNED_MEMORY == 0


def blocks(layers: Any, dtype: torch.dtype) -> None:
    """Let the weights of ``layers`` carry their patches. ``dtype``: uint8 for weights that are bytes of their values."""
    with torch.inference_mode():
        for layer in layers:
            weight = layer.weight.detach().view(dtype).as_subclass(Blocks)
            weight.patches = []
            layer.weight = nn.Parameter(weight, requires_grad=False)


def self_patching(nested: bool) -> Any:
    class Patcher(sys.modules["comfy.model_patcher"].ModelPatcher):  # type: ignore[misc]
        """Writes patches to the weights. ComfyUI-GGUF writes them with the weight's name."""

        def load(self, *args: Any, **kwargs: Any) -> None:
            super().load(*args, **kwargs)
            for key, found in self.patches.items():
                layer = self.model.get_submodule(key.removesuffix(".weight"))
                weight = layer.weight.to(None)
                weight.patches = [(found, key)] if nested else found
                layer.weight, layer.weight_function = nn.Parameter(weight, requires_grad=False), []

        def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
            for weight in self.model.parameters() if unpatch_weights else ():
                if isinstance(weight, Blocks):
                    weight.patches = []
            return super().unpatch_model(device_to, unpatch_weights)

    return Patcher


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("nested", [False, True], ids=["entries", "entries and name"])
def test_patches_that_a_weights_own_class_applies_are_prepared(nested, dtype):
    made, first, second = model(SelfPatched), lora(1), lora(2)
    blocks(made.diffusion_model, dtype)
    patcher = loaded = make(made, self_patching(nested))
    for chain in ([(first, 1.0)], [(first, 0.3)], [(first, 0.3), (second, 0.7)], [], [(second, 1.0)]):
        loaded = load(patcher, chain, loaded=loaded)
        carom = streaming_of(made)
        assert carom.streams and carom.streamed
        assert carom.patches.nbytes == len(chain) * BLOCKS * FACTORS
        with HostReads(tensors(first, second)) as reads:
            outputs = [step(loaded) for _ in range(2)]
        assert reads.count == 0 and all(torch.equal(one, stock(chain)) for one in outputs)
    loaded.detach()
    assert not carom.patches.nbytes
    assert made.diffusion_model[0].weight.patches == []


def test_other_patches_of_quantised_weights_move_no_weight():
    """Neither a changed LoRA, nor the switch to another model and back, closes the session of a GGUF model."""
    made, first, second = model(SelfPatched), lora(1), lora(2)
    blocks(made.diffusion_model, torch.uint8)
    patcher = make(made, self_patching(nested=True))
    loaded = load(patcher, [(first, 1.0)])
    carom = streaming_of(made)
    session = carom.session
    chains: list[list] = [[(first, 0.3)], [(first, 0.3), (second, 0.7)], [], [(second, 1.0)]]
    for chain in chains:
        loaded = load(patcher, chain, loaded=loaded)
        assert carom.session is session and torch.equal(step(loaded), stock(chain))
    for chain in chains:
        loaded.detach()  # another model takes the device
        loaded = load(patcher, chain)
        assert carom.session is session and torch.equal(step(loaded), stock(chain))


def test_the_lora_of_a_merged_model_is_prepared_and_the_models_weights_are_not():
    other, first = torch.full((WIDTH, WIDTH), 0.25), lora(1)
    merged: dict[str, Any] = {name: [(other, None), (0.7, first[name], 1.0)] for name in NAMES}
    loaded = load(make(), [(merged, 0.5)])
    assert streaming_of(loaded.model).patches.nbytes == BLOCKS * FACTORS
    expected = stock([(merged, 0.5)])
    with HostReads(tensors(first)) as reads:
        assert torch.equal(step(loaded), expected)
    assert reads.count == 0
    functions = [part.weight_function[0] for part in loaded.model.diffusion_model]
    assert all(function.patches[function.key][0][1][0][0] is other for function in functions)
