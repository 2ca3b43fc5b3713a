"""Device memory that models take from each other at a load, with ComfyUI's own `load_models_gpu` and `free_memory`.

The card is imagined: ComfyUI's figures of free memory are those of the fixture. The text encoder is a patcher of
ComfyUI's dynamic VRAM whose VBAR and pinned memory are counters.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from carom.nodes import device_room, node_settings
from carom.nodes.node_settings import Settings, gives_whole
from carom.nodes.patcher import wear
from carom.nodes.streaming import streaming_of
from tests_comfy_server import PATHS, PYTHON, REASON
from torch import nn

REAL = os.environ.get("CAROM_TEST_REAL_COMFYUI", "")
real_only = pytest.mark.skipif(not REAL, reason="ComfyUI's own functions are needed here")
CARD = torch.device("cpu", 0)  # not equal to torch.device("cpu"), for which ComfyUI frees no memory
WIDTH, BLOCKS = 64, 12
LAYER = (WIDTH * WIDTH + WIDTH) * 4
MODEL = BLOCKS * LAYER


class Diffusion(nn.Module):
    def __init__(self, linear: Any, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList([linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Model(nn.Module):
    def __init__(self, linear: Any, seed: int = 0) -> None:
        super().__init__()
        self.diffusion_model = Diffusion(linear, seed)


class HostBuffer:
    def __init__(self, *sizes: int) -> None:
        self.size = 0

    def truncate(self, offset: int, do_unregister: bool = False) -> None:
        self.size = offset


class Vbar:
    """The address range of one model's weights: bytes on the device."""

    def __init__(self, size: int, device: Any) -> None:
        self.nbytes = 0

    def prioritize(self) -> None:
        return None

    def alloc(self, size: int) -> tuple[int, int, int]:
        return (0, 0, size)

    def loaded_size(self) -> int:
        return self.nbytes

    def free_memory(self, nbytes: float) -> int:
        freed = int(min(nbytes, self.nbytes))
        self.nbytes -= freed
        return freed


class Card:
    """A card of ``nbytes`` bytes, as ComfyUI sees it, with the patchers that hold memory of it."""

    def __init__(self, monkeypatch: Any, nbytes: int) -> None:
        if REAL not in sys.path:
            sys.path.insert(0, REAL)
        from comfy.cli_args import args  # type: ignore[import-not-found]

        args.cpu = True
        import comfy.model_management as management  # type: ignore[import-not-found]
        import comfy.model_patcher  # type: ignore[import-not-found]
        import comfy.ops  # type: ignore[import-not-found]

        self.management, self.patchers = management, comfy.model_patcher
        self.linear = comfy.ops.manual_cast.Linear
        self.nbytes, self.held = nbytes, []
        self.detached: list[Any] = []
        own = management.is_device_cpu
        for name, value in {
            "get_free_memory": self.free, "is_device_cpu": lambda device: device != CARD and own(device),
            "vram_state": management.VRAMState.NORMAL_VRAM, "minimum_inference_memory": lambda: LAYER // 2,
            "extra_reserved_memory": lambda: LAYER // 4, "current_loaded_models": [], "MIN_WEIGHT_MEMORY_RATIO": 0.0,
            "TOTAL_PINNED_MEMORY": 0, "MAX_PINNED_MEMORY": 1 << 40,
        }.items():  # fmt: skip
            monkeypatch.setattr(management, name, value)
        monkeypatch.setattr(sys.modules["comfy_aimdo.model_vbar"], "ModelVBAR", Vbar)
        monkeypatch.setattr(sys.modules["comfy_aimdo.host_buffer"], "HostBuffer", HostBuffer)
        detach = comfy.model_patcher.ModelPatcher.detach
        monkeypatch.setattr(
            comfy.model_patcher.ModelPatcher,
            "detach",
            lambda patcher, unpatch_all=True: (
                self.detached.append(patcher) if unpatch_all else None,
                detach(patcher, unpatch_all),
            )[1],
        )

    def free(self, device: Any = None, torch_free_too: bool = False) -> Any:
        free = self.nbytes - sum(patcher.loaded_size() for patcher in self.held)
        return (free, 0) if torch_free_too else free

    def model(self, seed: int) -> Any:
        plain = self.patchers.ModelPatcher(
            Model(self.linear, seed), load_device=CARD, offload_device=torch.device("cpu")
        )
        self.held.append(wear(plain, Settings(mode="stream", codec="raw")))
        return self.held[-1]

    def encoder(self) -> Any:
        patcher = self.patchers.ModelPatcherDynamic(
            Model(self.linear), load_device=CARD, offload_device=torch.device("cpu")
        )
        self.held.append(patcher)
        return patcher

    def load(self, patcher: Any, for_passes: int = LAYER) -> None:
        with torch.inference_mode():
            self.management.load_models_gpu([patcher], memory_required=for_passes)

    def encode(self, encoder: Any) -> int:
        """Use ``encoder`` as a prompt does; return the bytes that were read from its file."""
        self.load(encoder)
        vbar = encoder._vbar_get()
        vbar.nbytes += max(0, min(MODEL - vbar.nbytes, self.free() - LAYER))
        pins = encoder.model.dynamic_pins[CARD]["weights"][0]
        read, pins.size = MODEL - pins.size, MODEL
        return read

    def sample(self, patcher: Any) -> torch.Tensor:
        self.load(patcher)
        with torch.inference_mode():
            patcher.pre_run()
            for _ in range(3):
                y = patcher.model.diffusion_model(torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH))
            patcher.cleanup()
        return y.clone()


@pytest.fixture
def card(monkeypatch):
    if not REAL:
        pytest.skip("ComfyUI's own functions are needed here")
    monkeypatch.setattr(node_settings, "GROW_LEAST", LAYER)
    return Card(monkeypatch, 8 * LAYER)


@real_only
def test_the_text_encoder_of_the_stock_loader_is_read_once_while_models_take_turns(card, monkeypatch):
    first, second, encoder = card.model(1), card.model(2), card.encoder()
    freed: list[float] = []
    unload_ram = type(encoder).partially_unload_ram

    def counted(patcher: Any, nbytes: float, *args: Any) -> int:
        freed.append(nbytes)
        patcher.model.dynamic_pins[CARD]["weights"][0].size = 0
        return unload_ram(patcher, nbytes, *args)

    monkeypatch.setattr(type(encoder), "partially_unload_ram", counted)
    read, latents, sessions = [], [], []
    for _ in range(4):
        read.append(card.encode(encoder))
        latents.append([card.sample(first), card.sample(second)])
        assert all(patcher.loaded_size() <= card.nbytes for patcher in card.held)
        sessions.append([streaming_of(patcher.model).session for patcher in (first, second)])
    assert read == [MODEL, 0, 0, 0] and not freed
    assert encoder not in card.detached
    assert all(
        same is session for later in sessions for same, session in zip(later, sessions[0], strict=True)
    )
    for seed, which in ((1, 0), (2, 1)):
        with torch.inference_mode():
            x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
            expected = Model(card.linear, seed).diffusion_model(x)
        assert all(torch.equal(one[which], expected) for one in latents)


@real_only
def test_a_model_takes_only_the_device_memory_that_is_missing(card):
    card.nbytes = MODEL + 30 * LAYER
    model, encoder = card.model(1), card.encoder()
    card.encode(encoder)
    card.sample(model)
    assert encoder._vbar_get().nbytes == MODEL, "both fit"
    card.nbytes = MODEL + 10 * LAYER
    other = card.model(2)
    card.sample(other)
    assert model not in card.management.current_loaded_models and model.loaded_size() == 0
    assert 0 < encoder._vbar_get().nbytes <= MODEL and encoder not in card.detached


@real_only
def test_a_model_that_gives_way_to_another_one_is_parked_with_its_patches(card):
    card.nbytes = 14 * LAYER
    model = card.model(1)
    model.add_patches(
        {"diffusion_model.layers.3.weight": ("diff", (torch.full((WIDTH, WIDTH), 0.1),))}, strength_patch=1.0
    )
    expected = card.sample(model)
    session, uuid = streaming_of(model.model).session, model.model.current_weight_patches_uuid
    held = model.loaded_size()
    assert model.partially_unload(model.offload_device, 3 * LAYER) == held
    assert session.parked and model.loaded_size() == 0 and model.model.current_weight_patches_uuid == uuid
    with torch.inference_mode():  # as a node that loads a model between two steps lets it
        x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
        assert torch.equal(model.model.diffusion_model(x), expected)
    assert not session.parked and model.loaded_size() == held
    model.partially_unload(model.offload_device, 3 * LAYER)
    assert torch.equal(card.sample(model), expected) and streaming_of(model.model).session is session


@real_only
def test_a_model_that_is_loaded_within_a_forward_leaves_the_running_models_weights(card):
    model, encoder = card.model(1), card.encoder()
    expected = card.sample(model)
    held, encoded = model.loaded_size(), []

    def load(*_: Any) -> None:  # as nodes of ComfyUI do that encode an image in the first step
        if not encoded:
            loaded = card.management.loaded_models(only_currently_used=True)
            encoded.append(card.encode(encoder))
            card.management.load_models_gpu(loaded)

    hook = model.model.diffusion_model.layers[3].register_forward_pre_hook(load)
    assert torch.equal(card.sample(model), expected) and encoded
    hook.remove()
    assert model.loaded_size() == held and model in card.management.loaded_models()
    assert card.encode(encoder) == 0 and torch.equal(card.sample(model), expected)


def test_requests_that_the_next_load_takes_back_park_a_model():
    assert gives_whole(1e32, 0) and gives_whole(3 << 30, 5 << 30)
    assert not gives_whole(100 << 20, 5 << 30) and not gives_whole(300 << 20, 5 << 30)


def test_enough_free_memory_asks_nobody(monkeypatch):
    asked: list[Any] = []
    management = types.SimpleNamespace(
        get_free_memory=lambda device: 100,
        current_loaded_models=[],
        free_memory=lambda *a, **k: asked.append(a),
    )
    monkeypatch.setattr(device_room.comfyui_api, "management", lambda: management)
    device_room.make_room(CARD, 100)
    device_room.make_room(torch.device("cpu"), 1000)
    assert not asked
    device_room.make_room(CARD, 101)
    assert asked == [(101, CARD)]


@pytest.mark.skipif(not PATHS or bool(REAL), reason=REASON)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: Path(path).name)
def test_with_comfyuis_own_functions(path, root):
    probe = subprocess.run([PYTHON, "-c", "import pytest, pytest_timeout, hypothesis"], capture_output=True)
    if probe.returncode:
        pytest.skip("the Python of COMFYUI_PYTHON has no pytest (pip install -e '.[test]' there)")
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "tests/comfyui/test_comfy_device_room.py", "-q", "-p", "no:cacheprovider"],
        cwd=root, env={**os.environ, "CAROM_TEST_REAL_COMFYUI": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
