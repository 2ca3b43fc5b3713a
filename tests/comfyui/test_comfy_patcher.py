"""The adapter over a patcher: against a stand-in always, against ComfyUI's own where COMFYUI_PATH is set."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from carom.core.host import arena
from carom.core.placement.packed_tensor import PackedTensor
from carom.nodes import comfyui_api as nodes_host
from carom.nodes import node_settings, opening, streaming
from carom.nodes.node_settings import Settings
from carom.nodes.patcher import CaromPatcher, settings_of, strip, wear
from carom.nodes.shared_ram import suspended_models
from carom.nodes.streaming import known_streaming, streaming_of
from safetensors.torch import load_file, save_file
from tests_comfy_server import PATHS, PYTHON, REASON
from tests_comfy_stand_in import installed
from tests_inside import inside
from tests_limits import pack_small_weights, units_apart_from
from torch import nn

REAL = os.environ.get("CAROM_TEST_REAL_COMFYUI", "")
CPU = torch.device("cpu")
WIDTH, BLOCKS = 32, 6
UNLIMITED = 1e32  # what ComfyUI offers on a CPU
BLOCK = 2 * (WIDTH * WIDTH + WIDTH) * 4
stand_in_only = pytest.mark.skipif(bool(REAL), reason="the stand-in is needed here")


@pytest.fixture
def comfy(tmp_path):
    """``ModelPatcher``, ``Linear``, ``management`` of the stand-in or of a real ComfyUI."""
    if not REAL:
        with installed(tmp_path) as state:
            found = sys.modules
            yield types.SimpleNamespace(
                ModelPatcher=found["comfy.model_patcher"].ModelPatcher,
                Dynamic=found["comfy.model_patcher"].ModelPatcherDynamic,
                Linear=found["comfy.ops"].disable_weight_init.Linear, management=state.management, state=state,
            )  # fmt: skip
        return
    if REAL not in sys.path:
        sys.path.insert(0, REAL)
    from comfy.cli_args import args  # type: ignore[import-not-found]

    args.cpu = True
    import comfy.model_management  # type: ignore[import-not-found]
    import comfy.model_patcher  # type: ignore[import-not-found]
    import comfy.ops  # type: ignore[import-not-found]

    yield types.SimpleNamespace(
        ModelPatcher=comfy.model_patcher.ModelPatcher, Linear=comfy.ops.disable_weight_init.Linear,
        management=comfy.model_management,
    )  # fmt: skip


@pytest.fixture
def sessions(monkeypatch):
    """How often weights were laid out: each `carom.stream` and each change of a budget."""
    seen: list[str] = []
    make, change = opening.stream, carom.Session.set_budget
    monkeypatch.setattr(opening, "stream", lambda *a, **k: (seen.append("open"), make(*a, **k))[1])
    monkeypatch.setattr(
        carom.Session, "set_budget", lambda self, *a, **k: (seen.append("budget"), change(self, *a, **k))[1]
    )
    return seen


class Block(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Diffusion(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(linear) for _ in range(BLOCKS)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class Model(nn.Module):
    """As ComfyUI's BaseModel: the network is one of its members."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.diffusion_model = Diffusion(linear)
        self.factor = 1.0

    def apply_model(self, x: torch.Tensor) -> torch.Tensor:
        return self.diffusion_model(x) * self.factor


class TextEncoder(nn.Module):
    """As ComfyUI's text encoders: entered by a method of its own."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.transformer = Diffusion(linear)

    def encode_token_weights(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.transformer(tokens), None


def filled(model: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def make(comfy: Any, vram: str = "auto", mode: str = "stream", **options: Any) -> Any:
    plain = comfy.ModelPatcher(filled(Model(comfy.Linear)), load_device=CPU, offload_device=CPU)
    return wear(plain, Settings(mode=mode, vram=vram, **options))


def run(patcher: Any, extra: float = UNLIMITED, seed: int = 3) -> torch.Tensor:
    """What a sampler does: load, run, clean up; in inference mode, as all of ComfyUI."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        patcher.partially_load(CPU, extra)
        patcher.pre_run()
        y = patcher.model.apply_model(x)
        patcher.cleanup()
    return y.clone()


def plain_result(comfy: Any, patches: dict | None = None, strength: float = 1.0) -> torch.Tensor:
    """The same model run by ComfyUI alone, patches on the fly."""
    patcher = comfy.ModelPatcher(filled(Model(comfy.Linear)), load_device=CPU, offload_device=CPU)
    if patches:
        patcher.add_patches(patches, strength)
    return run(patcher, 1)


def difference(seed: int = 5, keys: tuple[str, ...] = ("0.up", "3.down", "5.up")) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"diffusion_model.blocks.{key}.weight": (
            "diff",
            (torch.randn(WIDTH, WIDTH, generator=generator) * 0.1,),
        )
        for key in keys
    }


LIMIT = str(3 * BLOCK)


def test_a_limited_model_streams_within_its_limit_and_computes_the_same(comfy):
    patcher = make(comfy, LIMIT)
    assert torch.equal(run(patcher), plain_result(comfy))
    session = streaming_of(patcher.model).session
    assert session is not None and session.report().streamed_bytes > 0
    assert 0 < patcher.loaded_size() <= 3 * BLOCK
    assert patcher.model_size() == patcher.loaded_size(), "ComfyUI frees no memory for it"


def test_without_a_limit_the_patcher_reports_its_true_size_and_loads_as_always(comfy, sessions):
    patcher = make(comfy, mode="auto")
    total = comfy.management.module_size(patcher.model)
    assert patcher.model_size() == 0, "ComfyUI frees no memory for it"
    assert torch.equal(run(patcher), plain_result(comfy))
    assert patcher.loaded_size() == patcher.model_size() == total and not sessions


def test_what_comfyui_offers_is_the_budget(comfy, sessions):
    patcher = make(comfy)
    assert torch.equal(run(patcher, 4 * BLOCK), plain_result(comfy))
    first = patcher.loaded_size()
    assert 0 < first <= 4 * BLOCK and sessions == ["open"]
    run(patcher, 8)  # a few bytes more than it has: nothing moves
    assert patcher.loaded_size() == first and sessions == ["open"]
    assert torch.equal(run(patcher, -BLOCK), plain_result(comfy))  # a larger latent needs room
    assert patcher.loaded_size() <= first - BLOCK


def test_mode_stream_streams_a_part_of_a_model_that_fits_too(comfy, sessions):
    patcher = make(comfy, mode="stream")
    total = comfy.management.module_size(patcher.model)
    assert torch.equal(run(patcher), plain_result(comfy)) and sessions == ["open"]
    report = streaming_of(patcher.model).session.report()
    assert report.streamed_bytes > 0 and report.wire_bytes_per_step > 0
    assert patcher.loaded_size() <= total - total // 8
    patcher.partially_load(CPU, UNLIMITED)  # all the room there is, once more
    assert streaming_of(patcher.model).streams


def test_room_for_everything_ends_the_streaming(comfy):
    patcher = make(comfy, mode="auto")
    run(patcher, 3 * BLOCK)
    assert torch.equal(run(patcher), plain_result(comfy))
    assert streaming_of(patcher.model).session is None
    assert patcher.loaded_size() == comfy.management.module_size(patcher.model)
    assert torch.equal(run(patcher, 3 * BLOCK - patcher.loaded_size()), plain_result(comfy))
    assert streaming_of(patcher.model).session is not None


def test_an_offer_too_small_to_run_at_all_gets_the_least_that_works(comfy):
    patcher = make(comfy)
    assert torch.equal(run(patcher, 1), plain_result(comfy))
    assert patcher.loaded_size() > 1


def test_a_limit_too_small_is_refused_with_the_least_that_works_and_the_model_still_works(comfy):
    patcher = make(comfy, "100")
    with pytest.raises(carom.BudgetError, match="least budget that works"):
        run(patcher)
    assert streaming_of(patcher.model).session is None
    assert torch.equal(run(wear(strip(patcher), Settings("stream", LIMIT))), plain_result(comfy))


def test_patches_are_applied_on_the_fly_and_another_strength_moves_no_weight(comfy, sessions):
    patcher = make(comfy, LIMIT)
    assert torch.equal(run(patcher), plain_result(comfy))
    for strength in (1.0, 0.5):
        patched = patcher.clone()
        patched.add_patches(difference(), strength)
        assert isinstance(patched, CaromPatcher)
        patcher.detach(unpatch_all=False)  # as ComfyUI does before a clone takes over
        assert torch.equal(run(patched), plain_result(comfy, difference(), strength))
        patched.detach(unpatch_all=False)
    assert torch.equal(run(patcher), plain_result(comfy))
    assert sessions == ["open", "budget"]  # the patches need a part of the user's limit


@pytest.mark.parametrize("unloaded", [False, True])
@pytest.mark.parametrize("loader", ["ComfyUI", "Carom"])
def test_patches_reach_a_model_that_was_loaded_whole_with_forced_casts(comfy, loader, unloaded):
    """As every text encoder is, and every model behind ModelComputeDtype."""
    patcher = make(comfy, mode="auto")
    patcher.force_cast_weights = True
    first = strip(patcher.clone()) if loader == "ComfyUI" else patcher
    assert torch.equal(run(first), plain_result(comfy))
    assert first.loaded_size() == comfy.management.module_size(first.model)
    patched = patcher.clone()
    patched.add_patches(difference(), 1.0)
    first.detach(unpatch_all=unloaded)
    offer = 3 * BLOCK - patched.loaded_size()
    assert torch.equal(run(patched, offer), plain_result(comfy, difference()))
    assert streaming_of(patched.model).streams
    patched.detach(unpatch_all=False)
    assert torch.equal(run(patcher, 0), plain_result(comfy))


def test_patches_reach_a_model_that_comfyui_loads_in_part_after_a_whole_load(comfy):
    patcher = make(comfy, mode="auto")
    patcher.force_cast_weights = True
    run(patcher)
    streaming_of(patcher.model).note = "ComfyUI keeps the weights"
    patched = patcher.clone()
    patched.add_patches(difference(), 1.0)
    patcher.detach()
    assert torch.equal(run(patched, 1), plain_result(comfy, difference()))


def test_patches_of_weights_that_cannot_be_cast_on_the_fly_are_merged(comfy):
    patches = {"diffusion_model.scale": ("diff", (torch.full((WIDTH,), 0.5),))}
    patcher = make(comfy, LIMIT)
    before = run(patcher)
    patched = patcher.clone()
    patched.add_patches(patches, 1.0)
    original = filled(Model(comfy.Linear)).diffusion_model.scale.detach()
    for _ in range(2):
        patcher.detach(unpatch_all=False)
        assert torch.allclose(run(patched), before / original * (original + 0.5), atol=1e-5)
        again = patched.clone()
        again.add_patches(patches, 1.0)
        patched.detach(unpatch_all=False)
        assert torch.allclose(run(again), before / original * (original + 1.0), atol=1e-5)
    assert torch.equal(run(patcher), before)


def test_vram_is_given_back_when_asked_for(comfy):
    patcher = make(comfy, str(5 * BLOCK))
    reference = run(patcher)
    before = patcher.loaded_size()
    freed = patcher.partially_unload(CPU, BLOCK)
    assert freed >= BLOCK and patcher.loaded_size() == before - freed
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        assert torch.equal(patcher.model.apply_model(x), reference)
    # More than there is to give: the truth is told, and ComfyUI unloads the model.
    assert patcher.partially_unload(CPU, 100 * BLOCK) < 100 * BLOCK


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_models_that_take_turns_are_copied_on_the_host_once(comfy, monkeypatch, codec):
    units_apart_from(monkeypatch)  # units lie apart, as those of real models do
    allocate, made = arena.HostArena.allocate, []
    monkeypatch.setattr(arena.HostArena, "allocate", lambda self, n: (made.append(n), allocate(self, n))[1])
    patchers = [
        wear(
            comfy.ModelPatcher(filled(Model(comfy.Linear)), CPU, CPU), Settings("stream", LIMIT, codec=codec)
        )
        for _ in range(2)
    ]
    results = [run(patcher) for patcher in patchers]
    patchers[0].detach()
    seen = len(made)
    for _ in range(2):
        for which in (1, 0, 1):
            patchers[which].detach()
            assert patchers[which].loaded_size() == 0
            assert torch.equal(run(patchers[1 - which]), results[1 - which])
    whole = sum(p.numel() * p.element_size() for p in patchers[0].model.parameters())
    assert sum(made[seen:]) <= whole  # the second's residents, once; nothing of the first
    seen = len(made)
    for which in (0, 1, 0, 1):
        patchers[which].detach()
        assert torch.equal(run(patchers[which]), results[which])
    assert len(made) == seen


def test_unloading_gives_everything_back_and_loading_again_works(comfy):
    patcher = make(comfy, LIMIT)
    plain = {name: type(p) for name, p in patcher.model.named_parameters()}
    reference = run(patcher)
    for _ in range(2):
        patcher.detach()
        assert patcher.loaded_size() == 0 and not streaming_of(patcher.model).streams
        assert {name: type(p) for name, p in patcher.model.named_parameters()} == plain
        assert not any("forward" in vars(m) or m._forward_pre_hooks for m in patcher.model.modules())
        assert not any(getattr(m, "comfy_cast_weights", False) for m in patcher.model.modules())
        assert torch.equal(run(patcher), reference)


def test_values_survive_unloading(comfy):
    patcher = make(comfy, LIMIT)
    before = {name: value.clone() for name, value in patcher.model.state_dict().items()}
    run(patcher)
    patcher.detach()
    after = patcher.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_models_loaded_in_inference_mode_stream(comfy):
    with torch.inference_mode():
        model = filled(Model(comfy.Linear))
        patcher = wear(comfy.ModelPatcher(model, CPU, CPU), Settings("stream", LIMIT))
    assert all(p.is_inference() for p in model.parameters())
    addresses = [p.data_ptr() for p in model.parameters()]
    assert torch.equal(run(patcher), plain_result(comfy))
    assert addresses  # the first wrapping copied nothing: see the next test


def test_wrapping_inference_tensors_copies_nothing_and_keeps_ties():
    from carom.nodes.inference_tensors import own_tensors

    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.float8_e5m2)
        model[1].weight = model[0].weight
        model[0].weight.marked = "yes"
    before = [p.data_ptr() for p in model.parameters()]
    assert own_tensors(model) == 3
    assert [p.data_ptr() for p in model.parameters()] == before
    assert model[1].weight is model[0].weight and model[0].weight.marked == "yes"
    assert not any(p.is_inference() or p.requires_grad for p in model.parameters())
    assert own_tensors(model) == 0
    ordinary = nn.Linear(4, 4)
    assert own_tensors(ordinary) == 0 and not any(p.requires_grad for p in ordinary.parameters())


def test_weights_that_a_checkpoint_lacks_are_zeros_as_in_a_full_load(comfy):
    model = filled(Model(comfy.Linear))
    layer = model.diffusion_model.blocks[4].up
    layer.bias = nn.Parameter(torch.empty(WIDTH, device="meta"), requires_grad=False)
    patcher = wear(comfy.ModelPatcher(model, CPU, CPU, size=2 * WIDTH), Settings("stream", LIMIT))
    streaming_of(model)._total = 13 * BLOCK
    reference = filled(Model(comfy.Linear))
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if not ours.is_meta:
                theirs.copy_(ours)
        reference.diffusion_model.blocks[4].up.bias.zero_()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    assert torch.equal(run(patcher), reference.apply_model(x).detach())


def test_clones_share_the_session_and_keep_their_settings(comfy, sessions):
    patcher = make(comfy, LIMIT, node="7")
    run(patcher)
    other = patcher.clone().clone()
    assert isinstance(other, CaromPatcher) and settings_of(other) == settings_of(patcher)
    assert other.model is patcher.model and other.model_size() == patcher.model_size()
    assert torch.equal(run(other), plain_result(comfy)) and sessions == ["open"]


def test_the_priority_is_kept_by_clones_and_reloads_and_another_patchers_takes_its_place(comfy, sessions):
    def rank(patcher: Any) -> int:
        run(patcher)
        return inside(known_streaming(patcher.model).session).ledger.priority

    patcher = make(comfy, LIMIT, priority="high")
    assert rank(patcher) == 1 and rank(patcher.clone().clone()) == 1
    patcher.detach()
    assert rank(patcher) == 1, "after it was unloaded"
    lower = wear(patcher.clone(), Settings("stream", LIMIT, priority="low"))
    assert rank(lower) == -1 and rank(patcher) == 1
    assert rank(wear(patcher.clone(), Settings("stream", LIMIT))) == 1, "normal leaves it"
    assert sessions.count("open") == 1


def test_a_patcher_class_that_forgets_itself_when_cloned_keeps_streaming(comfy):
    class Forgetful(comfy.ModelPatcher):
        """As GGUF's patcher: its clones get a class by name."""

        def clone(self, *args: Any, **kwargs: Any) -> Any:
            own, self.__class__ = self.__class__, Forgetful
            made = super().clone(*args, **kwargs)
            made.__class__, self.__class__ = Forgetful, own
            return made

    patcher = wear(Forgetful(filled(Model(comfy.Linear)), CPU, CPU), Settings("stream", LIMIT))
    clone = patcher.clone()
    assert isinstance(clone, CaromPatcher) and isinstance(clone, Forgetful)
    assert type(strip(clone)) is Forgetful
    assert torch.equal(run(patcher), plain_result(comfy))


def test_a_stock_clone_of_the_same_model_takes_over_and_gives_back(comfy):
    stock = comfy.ModelPatcher(filled(Model(comfy.Linear)), CPU, CPU)
    ours = wear(stock.clone(), Settings("stream", LIMIT))
    stock_patched, ours_patched = stock.clone(), ours.clone()
    stock_patched.add_patches(difference(), 1.0)
    ours_patched.add_patches(difference(), 1.0)
    with_patch, without = plain_result(comfy, difference()), plain_result(comfy)
    order = [
        (ours, without),
        (stock, without),
        (ours_patched, with_patch),
        (stock_patched, with_patch),
        (ours, without),
    ]
    for patcher, expected in order:
        assert torch.allclose(run(patcher), expected, atol=1e-6)
        patcher.detach(unpatch_all=False)
    assert torch.equal(run(ours), without)


def test_an_exception_in_forward_leaves_the_next_run_right(comfy):
    patcher = make(comfy, LIMIT)
    reference = run(patcher)
    block = patcher.model.diffusion_model.blocks[3]

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = block.up.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(patcher)
    handle.remove()
    assert torch.equal(run(patcher), reference)


def test_object_patches_stand_also_where_weights_had_to_be_unloaded_first(comfy):
    patcher = make(comfy)
    run(patcher)  # everything loaded by ComfyUI
    other = patcher.clone()
    other.add_object_patch("factor", 2.0)
    patcher.detach(unpatch_all=False)
    assert torch.equal(run(other, 3 * BLOCK - other.loaded_size()), plain_result(comfy) * 2)
    assert streaming_of(other.model).session is not None
    other.detach()
    assert other.model.factor == 1.0


def test_text_encoders_stream_through_the_methods_they_are_entered_by(comfy):
    model = filled(TextEncoder(comfy.Linear))
    tokens = torch.randn(4, WIDTH)
    reference = model.encode_token_weights(tokens)[0].detach()
    patcher = wear(comfy.ModelPatcher(model, CPU, CPU), Settings("stream", LIMIT))
    with torch.inference_mode():
        patcher.partially_load(CPU, UNLIMITED)
        for _ in range(5):
            assert torch.equal(model.encode_token_weights(tokens)[0], reference)
    report = streaming_of(model).report()
    assert report is not None and report.steps == 3 and report.streamed_bytes > 0
    patcher.detach()
    list(model.modules())  # whoever loads it next looks through them: the model is itself again
    assert "encode_token_weights" not in vars(model)
    assert torch.equal(model.encode_token_weights(tokens)[0], reference)


@pytest.mark.parametrize("timing", ["late", "early", "random"])
def test_no_operator_computes_with_a_host_copy_or_too_early(comfy, monkeypatch, timing):
    make_session = opening.stream
    device = carom.SimulatedDevice(seed=1, timing=timing)
    monkeypatch.setattr(opening, "stream", lambda *a, **k: make_session(*a, **{**k, "device": device}))
    patcher = make(comfy, LIMIT)
    assert torch.equal(run(patcher), plain_result(comfy))
    patched = patcher.clone()
    patched.add_patches(difference(), 0.7)
    assert torch.equal(run(patched), plain_result(comfy, difference(), 0.7))
    assert torch.equal(run(patcher), plain_result(comfy))


def test_pinned_memory_is_counted_where_comfyui_counts_its_own(comfy, monkeypatch):
    make_session = opening.stream
    device = carom.SimulatedDevice()
    monkeypatch.setattr(opening, "stream", lambda *a, **k: make_session(*a, **{**k, "device": device}))
    monkeypatch.setattr(comfy.management, "MAX_PINNED_MEMORY", 1 << 30)
    monkeypatch.setattr(comfy.management, "TOTAL_PINNED_MEMORY", 1000)
    patcher = make(comfy, LIMIT)
    run(patcher)
    spares = inside(streaming_of(patcher.model).session).manager.host.spares
    while spares.busy:  # the memory for a later park is pinned in the background
        time.sleep(0.001)
    patcher.cleanup()
    report = streaming_of(patcher.model).report()
    assert report is not None and report.pinned_bytes > 0
    assert 1000 + report.pinned_bytes == comfy.management.TOTAL_PINNED_MEMORY
    assert not patcher.pinned  # ComfyUI pinned none of the same weights
    patcher.detach()
    waiting = comfy.management.TOTAL_PINNED_MEMORY - 1000
    assert waiting >= report.pinned_bytes  # what waits stays pinned, until somebody else needs the room
    monkeypatch.setattr(comfy.management, "MAX_PINNED_MEMORY", 1000 + waiting)
    other = make(comfy, LIMIT)
    run(other)
    assert not streaming_of(patcher.model).report().pinned_bytes
    assert 1000 + streaming_of(other.model).report().pinned_bytes == comfy.management.TOTAL_PINNED_MEMORY
    reference = run(other)
    other.detach()
    assert torch.equal(run(patcher), reference)
    for one in (patcher, other):
        streaming_of(one.model).close()
    assert comfy.management.TOTAL_PINNED_MEMORY == 1000


@pytest.mark.parametrize("most", [-1, 500])
def test_comfyuis_limit_of_pinned_memory_is_obeyed(comfy, monkeypatch, most):
    expected = plain_result(comfy)
    make_session = opening.stream
    device = carom.SimulatedDevice()
    monkeypatch.setattr(opening, "stream", lambda *a, **k: make_session(*a, **{**k, "device": device}))
    monkeypatch.setattr(comfy.management, "MAX_PINNED_MEMORY", most)
    monkeypatch.setattr(comfy.management, "TOTAL_PINNED_MEMORY", 0)
    patcher = make(comfy, LIMIT)
    assert torch.equal(run(patcher), expected)
    report = streaming_of(patcher.model).report()
    assert report is not None and report.pinned_bytes <= max(0, most)


class Scaled(torch.Tensor):
    """A quantised weight: whole numbers and a scale, told apart by torch's protocol."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: Any, shape: Any, stride: Any) -> Any:
        return Scaled(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].codes, args[0].scale)
        plain = torch.utils._pytree.tree_map(
            lambda a: a.codes * a.scale if isinstance(a, Scaled) else a, args
        )
        return func(*plain, **(kwargs or {}))


class Dressed(torch.Tensor):
    """A weight in a class of its own over plain memory, with attributes, as GGUF's are."""


@torch.inference_mode()
def wrapped_model(comfy: Any, kind: type) -> Any:
    model = filled(Model(comfy.Linear))
    for block in model.diffusion_model.blocks:
        for layer in (block.up, block.down):
            if kind is Scaled:
                codes = (layer.weight / 0.01).round().to(torch.int8)
                layer.weight = nn.Parameter(Scaled(codes, torch.tensor(0.01)), requires_grad=False)
            else:
                layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Dressed), requires_grad=False)
                layer.weight.kind = "Q8"
    return model


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


@pytest.mark.parametrize("kind", [Scaled, Dressed])
def test_wrapped_weights_stream_in_parts_and_come_back_whole(comfy, kind):
    stock = comfy.ModelPatcher(wrapped_model(comfy, kind), CPU, CPU)
    reference = plain(run(stock, 1))
    model = wrapped_model(comfy, kind)
    order = [name for name, _ in model.named_parameters()]
    patcher = wear(comfy.ModelPatcher(model, CPU, CPU), Settings("stream", str(2 * BLOCK)))
    for _ in range(2):
        assert torch.equal(plain(run(patcher)), reference)
        report = streaming_of(model).report()
        assert report is not None and report.streamed_bytes > 0 and not report.resident_by_need
        weight = model.diffusion_model.blocks[2].up.weight
        assert type(weight) is kind and getattr(weight, "kind", "Q8") == "Q8"
        patcher.detach()
        assert [name for name, _ in model.named_parameters()] == order
        assert type(model.diffusion_model.blocks[2].up) is comfy.Linear
        weight = model.diffusion_model.blocks[2].up.weight
        assert isinstance(weight, kind) and isinstance(weight, nn.Parameter)


def dress_biases(model: Any) -> Any:
    """Give the biases of the first block the class of the weights, as GGUF loaders give every tensor theirs."""
    with torch.inference_mode():
        for layer in (model.diffusion_model.blocks[0].up, model.diffusion_model.blocks[0].down):
            layer.bias = nn.Parameter(layer.bias.detach().as_subclass(Dressed), requires_grad=False)
    return model


@pytest.mark.parametrize("kind", [Scaled, Dressed])
def test_the_state_dict_of_streamed_wrapped_weights_has_their_own_names_and_values(comfy, kind):
    """ComfyUI finds the weights of a LoRA or a merge by these names."""
    model = dress_biases(wrapped_model(comfy, kind))
    before = {name: plain(value.clone()) for name, value in model.state_dict().items()}
    parameters = [name for name, _ in model.named_parameters()]
    patcher = wear(comfy.ModelPatcher(model, CPU, CPU), Settings("stream", str(2 * BLOCK)))
    with torch.inference_mode():
        for _ in range(2):
            run(patcher)
            now = model.state_dict()
            assert list(now) == list(before)
            assert type(now["diffusion_model.blocks.3.up.weight"]) is kind
            assert all(torch.equal(plain(now[name].clone()), before[name]) for name in before)
        patcher.detach()
        assert [name for name, _ in model.named_parameters()] == parameters


def test_a_state_dict_is_loaded_into_streamed_wrapped_weights(comfy):
    with torch.inference_mode():
        other = dress_biases(wrapped_model(comfy, Dressed))
        for value in other.state_dict().values():
            value.mul_(-0.5)
        new = {name: value.clone() for name, value in other.state_dict().items()}
        reference = plain(run(comfy.ModelPatcher(other, CPU, CPU), 1))
        model = dress_biases(wrapped_model(comfy, Dressed))
        patcher = wear(comfy.ModelPatcher(model, CPU, CPU), Settings("stream", str(2 * BLOCK)))
        run(patcher)
        model.load_state_dict(new)
        for _ in range(2):
            assert torch.equal(plain(run(patcher)), reference)
            found = model.state_dict()
            assert list(found) == list(new)
            assert all(torch.equal(plain(found[name].clone()), plain(new[name])) for name in new)
            patcher.detach()


def test_patches_of_wrapped_weights_stand_while_the_model_streams(comfy):
    patcher = wear(
        comfy.ModelPatcher(wrapped_model(comfy, Dressed), CPU, CPU), Settings("stream", str(2 * BLOCK))
    )
    unpatched = plain(run(patcher))
    patched, stock = patcher.clone(), comfy.ModelPatcher(wrapped_model(comfy, Dressed), CPU, CPU)
    assert sorted(patched.add_patches(difference())) == sorted(difference())
    stock.add_patches(difference())
    patcher.detach(unpatch_all=False)
    assert torch.equal(plain(run(patched)), plain(run(stock, 1)))
    patched.detach(unpatch_all=False)
    assert torch.equal(plain(run(patcher)), unpatched)


@pytest.mark.parametrize("timing", ["late", "random"])
def test_wrapped_weights_are_put_together_of_slots_that_have_arrived(comfy, monkeypatch, timing):
    reference = plain(run(comfy.ModelPatcher(wrapped_model(comfy, Scaled), CPU, CPU), 1))
    make_session = opening.stream
    device = carom.SimulatedDevice(seed=2, timing=timing)
    monkeypatch.setattr(opening, "stream", lambda *a, **k: make_session(*a, **{**k, "device": device}))
    patcher = wear(
        comfy.ModelPatcher(wrapped_model(comfy, Scaled), CPU, CPU),
        Settings("stream", str(BLOCK), granularity="layer"),
    )
    assert torch.equal(plain(run(patcher)), reference)


def test_a_model_whose_weights_wait_on_another_gpu_computes_the_same(comfy, monkeypatch):
    first, second = carom.SimulatedDevice(seed=1, timing="random"), carom.SimulatedDevice(seed=2)
    make_session = opening.stream

    def on_simulated_devices(root, device, peers=(), **options):
        named = [(second, size) for name, size in peers if name == "cuda:1"]
        return make_session(root, device=first, peers=named, **options)

    monkeypatch.setattr(opening, "stream", on_simulated_devices)
    patcher = make(comfy, LIMIT, peers="cuda:1=1GiB")
    for seed in (3, 4):
        plain_patcher = comfy.ModelPatcher(filled(Model(comfy.Linear)), CPU, CPU)
        assert torch.equal(run(patcher, seed=seed), run(plain_patcher, 1, seed=seed))
    report = streaming_of(patcher.model).report()
    # All of them, if this machine lets Carom pin no host memory at the moment.
    assert 0 < report.peer_bytes <= report.streamed_bytes
    assert second.ledger.allocated == report.peer_bytes
    patcher.detach()
    assert second.ledger.allocated == 0


def test_a_weight_put_in_the_place_of_a_wrapped_one_stands(comfy):
    patcher = wear(
        comfy.ModelPatcher(wrapped_model(comfy, Scaled), CPU, CPU), Settings("stream", str(3 * BLOCK))
    )
    before = plain(run(patcher))
    layer = patcher.model.diffusion_model.blocks[2].up
    with torch.inference_mode():
        layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
    assert type(layer.weight) is nn.Parameter
    assert not torch.equal(plain(run(patcher)), before)
    patcher.detach()
    assert torch.equal(plain(layer.weight), torch.zeros(WIDTH, WIDTH))


def test_weights_that_cannot_be_taken_apart_stay_comfyuis_and_the_reason_is_said(comfy, monkeypatch):
    monkeypatch.delattr(Scaled, "__tensor_flatten__")
    reference = plain(run(comfy.ModelPatcher(wrapped_model(comfy, Scaled), CPU, CPU), 1))
    patcher = wear(comfy.ModelPatcher(wrapped_model(comfy, Scaled), CPU, CPU), Settings("auto", LIMIT))
    assert torch.equal(plain(run(patcher)), reference)
    assert "Scaled" in streaming_of(patcher.model).line(0)
    forced = wear(comfy.ModelPatcher(wrapped_model(comfy, Scaled), CPU, CPU), Settings("stream", LIMIT))
    with pytest.raises(carom.UnsupportedError, match="Scaled"):
        run(forced)


def test_a_model_that_is_dropped_takes_its_session_with_it(comfy):
    patcher = make(comfy, LIMIT)
    run(patcher)
    gone = weakref.ref(patcher.model), weakref.ref(patcher.model.diffusion_model)
    del patcher
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_model_that_dies_in_a_collection_closes_its_session(comfy):
    """The collector clears weak references to all that it frees, before it calls finalizers."""
    patcher = make(comfy, LIMIT)
    run(patcher)
    session = streaming_of(patcher.model).session
    patcher.model.itself = [patcher.model]  # a cycle, as ComfyUI leaves some
    patcher.detach()
    del patcher
    gc.collect()
    assert session.closed


def test_a_dropped_model_gives_the_device_back_before_anybody_collects_cycles(comfy, monkeypatch):
    """ComfyUI offers the next model what is free; a model that lingers in a cycle would leave it nothing."""
    counted = []
    monkeypatch.setattr(nodes_host, "count_pinned", counted.append)
    patcher = make(comfy, LIMIT)
    run(patcher)
    session = streaming_of(patcher.model).session
    ended, close = [], session.close
    monkeypatch.setattr(session, "close", lambda **how: (ended.append(how), close(**how)))
    gc.disable()
    try:
        del patcher
        assert ended == [{"discard": True}]
    finally:
        gc.enable()
    assert inside(session).region_memory.numel() == 0
    assert sum(counted) == 0
    assert session.closed


def host_memory() -> list[Any]:
    return [found for found in gc.get_objects() if type(found) in (arena.Block, PackedTensor)]


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("state", ["loaded", "patched", "unloaded", "whole"])
@pytest.mark.parametrize("kind", [Model, TextEncoder, Diffusion, "Scaled", "Dressed"])
def test_a_dropped_model_is_freed_at_once_with_its_ram(comfy, monkeypatch, kind, state, codec):
    """Diffusion models are entered by their network's forward, text encoders by a method, ControlNets by their own."""
    pack_small_weights(monkeypatch, 1, ratio=2.0)
    if isinstance(kind, str):
        model = wrapped_model(comfy, {"Scaled": Scaled, "Dressed": Dressed}[kind])
    else:
        model = filled(kind(comfy.Linear))
    gc.collect()  # what earlier tests left
    others = weakref.WeakSet(host_memory())
    patcher = wear(
        comfy.ModelPatcher(model, load_device=CPU, offload_device=CPU), Settings("stream", LIMIT, codec=codec)
    )
    call = next(name for name in ("apply_model", "encode_token_weights", "forward") if hasattr(model, name))
    del model
    if state == "patched" and kind is Model:
        patcher.add_patches(difference(), 0.5)
    with torch.inference_mode():
        patcher.partially_load(CPU, UNLIMITED)
        for _ in range(2):
            getattr(patcher.model, call)(torch.ones(4, WIDTH))
        if state == "unloaded":
            patcher.detach()
        elif state == "whole":
            streaming_of(patcher.model).close()
    gc.collect()  # what ended sessions left
    held = [found for found in host_memory() if found not in others]
    model = patcher.model
    parts = (*model.modules(), *model.parameters(), *model.buffers(), *held)
    gone = [weakref.ref(part) for part in parts]
    del model, parts, held
    gc.disable()
    try:
        del patcher
        assert [type(found()) for found in gone if found() is not None] == []
    finally:
        gc.enable()


def test_a_model_that_is_dropped_while_it_waits_is_asked_for_nothing_more(comfy):
    patcher = make(comfy, LIMIT)
    run(patcher)
    waits = streaming_of(patcher.model)
    patcher.unpatch_model(CPU)
    assert waits.suspended and waits in suspended_models
    del patcher
    assert waits.session is None and waits not in suspended_models
    run(make(comfy, LIMIT))  # looks for pinned memory that others could give up


def test_a_deep_copy_of_a_streaming_model_is_a_plain_model(comfy):
    patcher = make(comfy, LIMIT)
    reference = run(patcher)
    network = copy.deepcopy(patcher.model.diffusion_model)
    assert {type(p) for p in network.parameters()} == {nn.Parameter}
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    patcher.detach()
    assert torch.equal(network(x).detach(), reference)


@stand_in_only
def test_progress_text_says_policy_residency_and_stall(comfy):
    patcher = make(comfy, LIMIT, node="42")
    run(patcher)
    run(patcher)
    said = [text for node, text in comfy.state.server.texts if node == "42"]
    assert any("streams" in text and "on the device of" in text for text in said)
    assert "waited for weights" in said[-1]


@stand_in_only
def test_leaving_dynamic_vram_builds_no_second_model(comfy, tmp_path):
    from carom.nodes.convert_patchers import offload

    comfy.state.dynamic, comfy.state.make = True, lambda path: filled(Model(comfy.Linear))

    dynamic = sys.modules["comfy.sd"].load_diffusion_model("a file")
    assert dynamic.is_dynamic()
    results, sessions = [], []
    for strength in (0.5, 1.0):
        patched = dynamic.clone()
        patched.add_patches(difference(), strength)
        ours, way = offload(patched, Settings("stream", LIMIT))
        assert way.streams and not ours.is_dynamic() and isinstance(ours, CaromPatcher)
        results.append(run(ours))
        sessions.append(streaming_of(ours.model).session)
        ours.detach(unpatch_all=False)
    assert len(comfy.state.loads) == 1, "the user's"
    assert sessions[0] is sessions[1] is not None, "a changed LoRA before the node lays nothing out anew"
    theirs = dict(dynamic.model.named_parameters())
    for name, tensor in streaming_of(ours.model).model.state_dict().items():
        assert tensor.shape == theirs[name].shape
    assert torch.equal(results[1], plain_result(types.SimpleNamespace(**vars(comfy)), difference()))
    assert known_streaming(dynamic.model) is None
    # ComfyUI goes to a dropped patcher's parent: that one has the same model and can unload it.
    assert (
        ours.parent.model is ours.model
        and isinstance(ours.parent, CaromPatcher)
        and ours.parent.parent is None
    )
    run(ours)
    ours.parent.detach()
    assert not streaming_of(ours.model).streams


@stand_in_only
def test_a_dynamic_model_that_cannot_be_copied_stays_comfyuis(comfy, monkeypatch):
    from carom.nodes import convert_patchers
    from carom.nodes.convert_patchers import offload

    monkeypatch.setattr(
        convert_patchers, "choose_way", lambda mode, device: node_settings.Way(True, "asked for")
    )
    dynamic = comfy.Dynamic(filled(Model(comfy.Linear)), CPU, CPU)
    streams, way = offload(dynamic, Settings("stream", LIMIT))
    assert way.streams and torch.equal(run(streams), plain_result(comfy)), "no loader is recorded"
    dynamic = comfy.Dynamic(filled(Model(comfy.Linear)), CPU, CPU)
    dynamic.model.handle = sys.stdout.buffer  # cannot be copied
    with pytest.raises(carom.UnsupportedError, match="cannot be copied.*TypeError"):
        offload(dynamic, Settings("stream", LIMIT))
    kept, way = offload(dynamic, Settings("auto", LIMIT))
    assert not way.streams and kept.is_dynamic() and "cannot be copied" in settings_of(kept).reason
    with pytest.raises(carom.UnsupportedError, match="disable_dynamic"):
        wear(dynamic, Settings())


@stand_in_only
@pytest.mark.parametrize(
    ("free", "options", "streams"),
    [
        (2 << 30, {}, False),  # the memory that ComfyUI keeps for passes is 1.2 GiB
        (1 << 30, {}, True),
        (3 << 30, {"vram": "1GiB"}, True),
        (3 << 30, {"ram": "1GiB"}, True),
        (3 << 30, {"mode": "stream"}, True),
    ],
)
def test_a_dynamic_model_that_fits_stays_comfyuis_and_the_reason_is_told(
    comfy, monkeypatch, free, options, streams
):
    from carom.nodes import convert_patchers
    from carom.nodes.report_node import figures

    as_on_a_gpu = node_settings.Way(True, "streams what does not fit")
    monkeypatch.setattr(convert_patchers, "choose_way", lambda mode, device: as_on_a_gpu)
    encoder = comfy.Dynamic(filled(TextEncoder(comfy.Linear)), CPU, CPU)
    encoder.model.model_loaded_weight_memory = 1 << 29  # what it holds can become free
    loaded = types.SimpleNamespace(device=CPU, model=encoder)
    monkeypatch.setattr(comfy.management, "current_loaded_models", [loaded])
    monkeypatch.setattr(comfy.management, "get_free_memory", lambda device: free - (1 << 29))
    dynamic = comfy.Dynamic(filled(Model(comfy.Linear)), CPU, CPU)
    found, way = convert_patchers.offload(dynamic, Settings(**options), fresh=True)
    assert way.streams is streams is isinstance(found, CaromPatcher) is not found.is_dynamic()
    if not streams:
        assert found.model is dynamic.model and known_streaming(found.model) is None
        assert "the whole model fits" in figures(found)[0]


def test_the_bytes_of_a_model_are_those_that_it_has_on_the_device():
    from carom.nodes.meant_dtypes import meant_bytes

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = nn.Parameter(model[1].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model[1].weight_comfy_model_dtype = torch.float16
    assert meant_bytes(model) == 4 * (64 + 8) + 2 * 64


@stand_in_only
def test_sizes_that_the_nodes_ask_comfyui_for(comfy):
    assert nodes_host.pin_room() == 1 << 30
    nodes_host.count_pinned(10)
    assert nodes_host.pin_room() == (1 << 30) - 10
    assert nodes_host.device_bytes(CPU) == 1 << 30
    nodes_host.say("nobody listens", "")


@pytest.mark.parametrize(
    ("now", "held", "streamed", "bound", "expected"),
    [
        (None, 0, 0, 100, 100),
        (1 << 30, 1 << 30, 8 << 30, (1 << 30) + 5, None),
        (1 << 30, 1 << 30, 8 << 30, 3 << 30, 3 << 30),
        (1 << 30, 1 << 30, 8 << 30, 1 << 29, 1 << 29),
        (2 << 30, 1 << 30, 8 << 30, 3 << 29, None),
        (1 << 30, 1 << 30, 0, 9 << 30, None),
        (1 << 30, 1 << 30, 8 << 30, (1 << 30) - (128 << 20), None),
        (1 << 30, 1 << 30, 8 << 30, (1 << 30) - (129 << 20), (1 << 30) - (129 << 20)),
        (9 << 30, 8 << 30, 8 << 30, (8 << 30) - (385 << 20), (8 << 30) - (385 << 20)),
    ],
)
def test_budgets_shrink_when_they_must_and_grow_when_it_pays(now, held, streamed, bound, expected):
    assert node_settings.next_budget(now, held, streamed, bound) == expected


@pytest.mark.parametrize("unloaded", [False, True])
@pytest.mark.parametrize(
    "changed",
    [{"vram": str(4 * BLOCK)}, {"ram": "12KiB"}, {"codec": "lossless"}, {"granularity": "layer"}],
    ids=lambda changed: next(iter(changed)),
)
def test_settings_that_change_over_a_cached_model_take_effect(
    comfy, monkeypatch, tmp_path, changed, unloaded
):
    pack_small_weights(monkeypatch, 1, ratio=2.0)
    monkeypatch.setattr(nodes_host, "spill_folder", lambda nbytes: str(tmp_path))
    usual = Settings("stream", LIMIT, codec="raw")
    plain = comfy.ModelPatcher(filled(Model(comfy.Linear)), load_device=CPU, offload_device=CPU)

    def figures(settings: Settings) -> tuple:
        """What the sampler's run is like; the loader's node is cached, Carom's node runs again."""
        patcher = wear(plain.clone(), settings)
        assert torch.equal(run(patcher), plain_result(comfy))
        report = streaming_of(patcher.model).report()
        if unloaded:
            patcher.detach()
        units = [unit.name for unit in inside(streaming_of(patcher.model).session).units]
        return report.vram_budget_bytes, report.ram_budget_bytes, streaming_of(patcher.model).packs, units

    before = figures(usual)
    assert figures(usual) == before
    after = figures(replace(usual, **changed))
    assert after != before and figures(replace(usual, **changed)) == after
    assert (after[0] != before[0]) is ("vram" in changed)
    assert figures(usual) == before


@pytest.mark.parametrize(
    ("kind", "name"), [(Model, "model"), (TextEncoder, "text encoder"), (Diffusion, "ControlNet")]
)
def test_a_budget_too_small_for_a_part_of_a_checkpoint_names_the_part(comfy, kind, name):
    model = filled(kind(comfy.Linear))
    with pytest.raises(carom.BudgetError, match=f"vram=1KiB is too small for this {name}: set vram"):
        streaming_of(model).check(CPU, Settings("stream", "1KiB"))


def test_a_users_own_limit_is_followed_to_the_byte():
    assert node_settings.next_budget(100, 100, 50, 99, limit=99) == 99


def test_offers_that_differ_by_little_are_the_same_budget():
    for offer in (1, 100, 257, 4_330_000_000, 4_332_393_018):
        assert 0.996 * offer <= node_settings.rounded(offer) <= offer
    assert node_settings.rounded(4_330_000_000) == node_settings.rounded(4_330_000_000 + 500_000)
    assert node_settings.rounded(8 << 30) == 8 << 30


def test_the_share_that_streams_counts_slots_once():
    text = node_settings.describe("stream", 60, 50, None, size=100)  # 50 resident, 10 in slots, 50 streamed
    assert text.startswith("Carom: 50 % of 100 ")


@stand_in_only
def test_small_changes_of_what_comfyui_offers_lay_nothing_out_anew(comfy, sessions):
    patcher = make(comfy)
    total = comfy.management.module_size(patcher.model)
    run(patcher, total // 2)
    held = patcher.loaded_size()
    assert 0 < held <= total // 2 and sessions == ["open"]
    for less in (1, held // 10, 0):
        with torch.inference_mode():
            patcher.partially_load(CPU, total // 2 - held - less)
    assert sessions == ["open"] and patcher.loaded_size() == held
    with torch.inference_mode():
        patcher.partially_load(CPU, -held // 2)
    assert sessions == ["open", "budget"] and patcher.loaded_size() <= held // 2


@stand_in_only
def test_operators_that_need_no_cast_take_the_short_way_and_others_do_not(comfy):
    calls: list[Any] = []
    casting = comfy.Linear.forward_comfy_cast_weights
    patcher = make(comfy, LIMIT)
    patcher.model.diffusion_model.blocks[1].up.forward_comfy_cast_weights = lambda x: (
        calls.append("own"), casting(patcher.model.diffusion_model.blocks[1].up, x),
    )[1]  # fmt: skip
    reference = run(patcher, seed=8)
    assert calls == ["own"]  # who stands in front of a forward goes on doing so
    linear = patcher.model.diffusion_model.blocks[2].up
    short = linear.__dict__["forward_comfy_cast_weights"]
    assert short.__func__ is not casting
    x = torch.randn(2, WIDTH)
    for made in (x, x.double()):
        assert torch.equal(short(made), casting(linear, made))
    linear.weight_function = [lambda weight: weight * 2]
    assert torch.equal(short(x), casting(linear, x))
    linear.weight_function = []
    patcher.detach()
    list(patcher.model.modules())
    assert "forward_comfy_cast_weights" not in linear.__dict__
    assert torch.equal(run(patcher, seed=8), reference)


@stand_in_only
def test_compiled_models_keep_comfyuis_own_forwards(comfy):
    patcher = make(comfy, LIMIT)
    run(patcher)
    linear = patcher.model.diffusion_model.blocks[2].up
    assert "forward_comfy_cast_weights" in linear.__dict__
    clone = patcher.clone()
    clone.wrappers = {"apply_model": {"torch.compile": [None]}}
    with torch.inference_mode():
        clone.partially_load(CPU, UNLIMITED)
    assert "forward_comfy_cast_weights" not in linear.__dict__


def test_weights_get_the_dtype_that_comfyui_means_them_to_have():
    from carom.nodes.meant_dtypes import settle_dtypes

    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(4, 4), nn.Linear(128, 128)).requires_grad_(False)
    for part in model:
        part.comfy_cast_weights = True
        part.weight_comfy_model_dtype = part.bias_comfy_model_dtype = torch.bfloat16
    model[2].weight_comfy_model_dtype = None
    settle_dtypes(model)
    assert model[0].weight.dtype == model[0].bias.dtype == torch.bfloat16
    assert model[1].weight.dtype == torch.float32  # small: cast in every use, as dynamic VRAM does
    assert model[2].weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_weights_that_are_cast_at_each_use_stay_float8_with_the_same_bits(comfy, dtype):
    from carom.nodes.meant_dtypes import settle_dtypes

    def encoder(casts: bool) -> Any:
        model = TextEncoder(comfy.Linear).requires_grad_(False)
        for part in filled(model).modules():
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(part.weight.to(dtype), requires_grad=False)
                part.weight_comfy_model_dtype = torch.float16
        settle_dtypes(model, None, casts)
        return model

    monkey = pytest.MonkeyPatch()
    monkey.setattr("carom.nodes.meant_dtypes.SMALL", 0)
    narrow, wide = encoder(True), encoder(False)
    monkey.undo()
    assert narrow.transformer.blocks[0].up.weight.dtype == dtype
    assert wide.transformer.blocks[0].up.weight.dtype == torch.float16
    results, held = [], []
    for model in (narrow, wide):
        patcher = comfy.ModelPatcher(model, load_device=CPU, offload_device=CPU)
        patcher.force_cast_weights = True
        ours = wear(patcher, Settings(mode="stream", vram=LIMIT))
        with torch.inference_mode():
            ours.partially_load(CPU, UNLIMITED)
            results.append(model.encode_token_weights(torch.ones(2, WIDTH))[0].clone())
        held.append(streaming_of(model).session.report().weight_bytes)
    assert torch.equal(*results) and held[1] - held[0] == 2 * BLOCKS * WIDTH * WIDTH, "a byte a weight less"


def test_a_lora_is_merged_into_weights_of_the_dtype_that_comfyui_means_them_to_have(comfy, monkeypatch):
    monkeypatch.setattr("carom.nodes.meant_dtypes.SMALL", 0)
    model = filled(Model(comfy.Linear)).requires_grad_(False)
    layer = model.diffusion_model.blocks[0].up
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_comfy_model_dtype = torch.float32
    patcher = comfy.ModelPatcher(model, load_device=CPU, offload_device=CPU)
    patcher.force_cast_weights = True
    ours = wear(patcher, Settings(mode="auto"))
    ours.add_patches(difference(keys=("0.up",)), 1.0)
    expected = layer.weight.float() + difference(keys=("0.up",))["diffusion_model.blocks.0.up.weight"][1][0]
    with torch.inference_mode():
        ours.partially_load(CPU, UNLIMITED)
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight, expected)


@stand_in_only
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_an_encoder_that_comfyui_unloads_and_loads_again_is_neither_read_nor_packed_again(
    comfy, monkeypatch, codec
):
    from carom.core.codec import lossless_torch
    from carom.core.placement import packer

    model = TextEncoder(comfy.Linear)
    model.transformer = nn.Sequential(*(comfy.Linear(256, 256) for _ in range(12)))
    filled(model).half()  # layers of 128 KiB: smaller ones are not packed
    patcher = wear(comfy.ModelPatcher(model, CPU, CPU), Settings("stream", "1MiB", codec=codec))
    tokens = torch.ones(2, 256).half()

    def encode() -> torch.Tensor:
        with torch.inference_mode():
            patcher.partially_load(CPU, UNLIMITED)
            return model.encode_token_weights(tokens)[0].clone()

    expected = encode()
    patcher.detach()
    encode()
    decoded: list[int] = []
    decode = lossless_torch.decode_torch
    for module in list(sys.modules.values()):
        if getattr(module, "decode_torch", None) is decode:
            monkeypatch.setattr(
                module, "decode_torch", lambda *a, **k: (decoded.append(1), decode(*a, **k))[1]
            )
    packed: list[int] = []
    pack = packer.pack
    monkeypatch.setattr(packer, "pack", lambda *a, **k: (packed.append(1), pack(*a, **k))[1])
    patcher.detach()
    assert not decoded, "unloading reads no packed weight"
    assert torch.equal(encode(), expected) and not packed
    assert (codec == "lossless") == bool(streaming_of(model).session.report().packed_units)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux lists mappings")
def test_weights_of_a_read_only_mapping_get_memory_of_their_own_once(tmp_path):
    from carom.nodes.inference_tensors import MAPPED, own_memory

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].weight = model[0].weight
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not writable
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        model[0].weight.data = torch.frombuffer(mapping, dtype=torch.float32, count=16).view(4, 4)
    before, other = model[0].weight.data_ptr(), model[2].weight.data_ptr()
    own_memory(model)
    assert model[0].weight.data_ptr() == before  # nothing says that it is mapped
    model.__dict__[MAPPED] = True
    own_memory(model)
    after = model[0].weight.data_ptr()
    assert after != before and model[1].weight is model[0].weight
    assert model[2].weight.data_ptr() == other
    own_memory(model)
    assert model[0].weight.data_ptr() == after


class SlowFile:
    """A file of which each piece is noted: (path, thread). Pieces are read when ``gate`` lets them."""

    def __init__(self, path: str, seen: list, gate: threading.Semaphore | None) -> None:
        self.path, self.seen, self.gate = path, seen, gate
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def __enter__(self) -> SlowFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def seek(self, at: int) -> None:
        self.file.seek(at)

    def readinto(self, room: bytearray) -> None:
        if self.gate is not None:
            self.gate.acquire()
        nbytes = self.file.readinto(room)
        self.seen.append((Path(self.path).name, threading.get_ident(), nbytes))


def test_a_file_is_read_ahead_whole_and_what_is_no_file_is_left_to_the_loader(tmp_path, monkeypatch):
    from carom.nodes import read_ahead as module

    monkeypatch.setattr(module, "PIECE", 1000)
    seen: list[tuple] = []
    monkeypatch.setattr(module, "open", lambda path, *a, **k: SlowFile(path, seen, None), raising=False)
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 10_500)
    for thread in module.read_ahead(str(path)):
        thread.join()
    assert sum(nbytes for *_, nbytes in seen) == 10_500
    assert module.read_ahead(str(tmp_path / "none")) == [] == module.hurry(str(path)), "it was read"
    monkeypatch.setattr(module, "SHARE", 1 << 60)
    assert module.read_ahead(str(path)) == []


def test_files_are_read_one_after_the_other_by_one_thread_until_a_model_waits_for_one(tmp_path, monkeypatch):
    from carom.nodes import read_ahead as module

    monkeypatch.setattr(module, "PIECE", 1000)
    seen: list[tuple] = []
    gate = threading.Semaphore(0)
    begun: list[str] = []  # the files in the order in which their pieces are begun; they end in any order

    def opened(path, *args, **options):
        begun.append(path)
        return SlowFile(path, seen, gate)

    monkeypatch.setattr(module, "open", opened, raising=False)
    paths = [str(tmp_path / name) for name in ("first", "second", "third")]
    for path in paths:
        Path(path).write_bytes(b"x" * 20_000)
        threads = module.read_ahead(path)
    assert len(threads) == 1, "one thread for all"
    for _ in range(3):
        gate.release()
    deadline = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert {name for name, *_ in seen} == {"first"}
    threads = module.hurry(paths[2])
    assert len(threads) == module.THREADS
    for _ in range(42):
        gate.release()
    while len(seen) < 45 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(module.read_ahead(paths[1])) == module.THREADS, "the encoder has been read: all threads go on"
    for _ in range(20):
        gate.release()
    for thread in threads:
        thread.join(10)
    order = [Path(path).name for path in begun]
    third = [at for at, name in enumerate(order) if name == "third"]
    assert max(third) - min(third) < 20 + module.THREADS, (
        "the file that a model waits for is not mixed with others"
    )
    assert [order.count(name) for name in ("first", "second", "third")] == [20, 20, 20]
    late = order[max(third) + module.THREADS :]
    assert late.index("second") >= late.count("first") - module.THREADS, "one file after the other"


@pytest.mark.parametrize(
    ("limit", "used", "reads"), [(None, None, True), (30_000, 5_000, True), (30_000, 20_000, False), (15_000, None, False)]
)  # fmt: skip
def test_a_file_is_read_ahead_only_if_its_container_has_memory_for_it(
    tmp_path, monkeypatch, limit, used, reads
):
    from carom.nodes import read_ahead as module

    memory = replace(module.host_memory(), cgroup_limit=limit, cgroup_used=used)
    monkeypatch.setattr(module, "host_memory", lambda: memory)
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 10_500)
    threads = module.read_ahead(str(path))
    assert bool(threads) is reads
    for thread in threads:
        thread.join()


class Decoder(nn.Module):
    """As ComfyUI's first stage models: entered by ``decode``."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.decoder = Diffusion(linear)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z)


@stand_in_only
def test_a_vae_streams_through_the_same_adapter(comfy):
    from carom.nodes.convert_patchers import offload_vae

    model = filled(Decoder(comfy.Linear))
    z = torch.randn(3, WIDTH)
    expected = model.decode(z)
    vae = types.SimpleNamespace(patcher=comfy.ModelPatcher(model, CPU, CPU), first_stage_model=model, tiles=7)
    ours, way = offload_vae(vae, Settings("stream", LIMIT))
    assert way.streams and ours is not vae and ours.tiles == 7 and not isinstance(vae.patcher, CaromPatcher)
    with torch.inference_mode():
        ours.patcher.partially_load(CPU, UNLIMITED)
        assert torch.equal(ours.first_stage_model.decode(z), expected)
    assert 0 < ours.patcher.loaded_size() <= int(LIMIT)
    assert streaming_of(model).session.report().wire_bytes_per_step > 0


@stand_in_only
def test_a_fresh_dynamic_model_is_taken_over_as_it_lies(comfy):
    from carom.nodes.convert_patchers import offload

    comfy.state.dynamic, comfy.state.make = True, lambda path: filled(Model(comfy.Linear))
    dynamic = sys.modules["comfy.sd"].load_diffusion_model("a file")
    weight = dynamic.model.diffusion_model.blocks[0].up.weight
    ours, way = offload(dynamic, Settings("stream", LIMIT), fresh=True)
    assert way.streams and ours.model is dynamic.model and ours.parent is None
    assert ours.model.diffusion_model.blocks[0].up.weight is weight and len(comfy.state.loads) == 1
    assert torch.equal(run(ours), plain_result(comfy))


@stand_in_only
def test_a_dynamic_model_that_just_fits_keeps_its_session_and_streams_nothing(comfy, sessions, monkeypatch):
    from carom.nodes import convert_patchers

    as_on_a_gpu = node_settings.Way(True, "streams what does not fit")
    monkeypatch.setattr(convert_patchers, "choose_way", lambda mode, device: as_on_a_gpu)
    monkeypatch.setattr(comfy.management, "get_free_memory", lambda device: 1 << 30)
    dynamic = comfy.Dynamic(filled(Model(comfy.Linear)), CPU, CPU)
    ours, _ = convert_patchers.offload(dynamic, Settings(), fresh=True)
    total = comfy.management.module_size(ours.model)
    for patches in ({}, {}, difference()):
        if patches:
            ours.add_patches(patches)
        assert torch.equal(run(ours), plain_result(comfy, patches))
        streaming = streaming_of(ours.model)
        assert streaming.session is not None and streaming.streamed == 0
        assert total <= ours.loaded_size() and "nothing streams" in streaming.line(total)
        ours.detach()
        assert streaming.suspended and ours.loaded_size() == 0
    assert sessions.count("open") == 1
    run(ours, 3 * BLOCK)
    assert streaming.streamed > 0, "a smaller offer is followed"


@pytest.mark.parametrize(
    ("mode", "device", "streams"),
    [
        ("auto", "cuda", True), ("auto", "cpu", False), ("auto", "mps", False), ("stream", "cpu", True),
        ("native", "cuda", False),
    ],
)  # fmt: skip
def test_the_way_a_model_goes_is_chosen_with_a_reason(mode, device, streams):
    way = node_settings.choose_way(mode, device)
    assert way.streams is streams and way.reason


@pytest.mark.skipif(not PATHS or bool(REAL), reason=REASON)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: Path(path).name)
def test_the_same_holds_for_comfyuis_own_patcher(path, root):
    environment = {**os.environ, "CAROM_TEST_REAL_COMFYUI": path}
    probe = subprocess.run([PYTHON, "-c", "import pytest, pytest_timeout, hypothesis"], capture_output=True)
    if probe.returncode:
        pytest.skip("the Python of COMFYUI_PYTHON has no pytest (pip install -e '.[test]' there)")
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "tests/comfyui/test_comfy_patcher.py", "-q", "-p", "no:cacheprovider"],
        cwd=root, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


class Interrupted(Exception):
    """ComfyUI's own, by its name."""


Interrupted.__name__ = "InterruptProcessingException"


@stand_in_only
def test_a_bar_shows_how_far_laying_out_is_and_a_cancel_there_leaves_a_working_model(comfy, monkeypatch):
    shown, cancel = [], []

    class ProgressBar:
        def __init__(self, total: int) -> None:
            self.total = total

        def update_absolute(self, value: int, total: int) -> None:
            shown.append((value, total))
            if cancel:
                raise Interrupted("cancelled")

    monkeypatch.setitem(sys.modules, "comfy.utils", types.SimpleNamespace(ProgressBar=ProgressBar))
    monkeypatch.setattr(sys.modules["comfy"], "utils", sys.modules["comfy.utils"], raising=False)
    patcher = make(comfy, LIMIT)
    cancel.append(True)
    with pytest.raises(Interrupted), torch.inference_mode():
        patcher.partially_load(CPU, UNLIMITED)
    assert len(shown) == 1 and patcher.loaded_size() == 0 and streaming_of(patcher.model).session is None
    cancel.clear()
    assert torch.equal(run(patcher), plain_result(comfy))
    values = [value for value, _ in shown[1:]]
    assert values == sorted(values) and len(values) > 2 and shown[-1][0] == shown[-1][1]


@stand_in_only
def test_words_come_while_it_runs_not_too_often(comfy, monkeypatch):
    patcher = make(comfy, LIMIT)
    patcher.attachments["carom"] = Settings(mode="stream", vram=LIMIT, node="7")
    with torch.inference_mode():
        patcher.partially_load(CPU, UNLIMITED)
        x = torch.zeros(4, WIDTH)
        for _ in range(3):
            patcher.model.apply_model(x)
        texts = comfy.state.server.texts
        before = len(texts)
        patcher.model.apply_model(x)
        assert len(texts) == before
        monkeypatch.setattr(streaming, "TELL_EVERY_S", 0.0)
        patcher.model.apply_model(x)
    assert len(texts) == before + 1 and texts[-1][0] == "7"
    assert "streams" in texts[-1][1] and "waited for weights" in texts[-1][1]


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_packed_weights_take_patches_and_survive_unloading(comfy, monkeypatch, codec):
    pack_small_weights(monkeypatch, 1, ratio=2.0)
    patcher = make(comfy, LIMIT, codec=codec)
    assert torch.equal(run(patcher), plain_result(comfy))
    copy = patcher.clone()
    copy.add_patches(difference(), 0.5)
    assert torch.equal(run(copy), plain_result(comfy, difference(), 0.5))
    packed = [p for p in patcher.model.parameters() if p.is_meta]
    assert bool(packed) == (codec == "lossless")
    with torch.inference_mode():
        copy.detach()
    assert not any(p.is_meta for p in patcher.model.parameters())
    fresh = filled(Model(comfy.Linear))
    for name, value in patcher.model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    assert torch.equal(run(patcher), plain_result(comfy))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("patched", [False, True])
def test_a_streaming_model_is_saved_with_the_values_and_patches_of_comfyuis_own(
    comfy, monkeypatch, tmp_path, codec, patched
):
    pack_small_weights(monkeypatch, 1, ratio=2.0)
    read, value = [], PackedTensor.value
    monkeypatch.setattr(PackedTensor, "value", lambda self, *a: (read.append(self), value(self, *a))[1])
    saved = []
    own = comfy.ModelPatcher(filled(Model(comfy.Linear)), load_device=CPU, offload_device=CPU)
    for patcher, offer in ((own, UNLIMITED), (make(comfy, LIMIT, codec=codec), UNLIMITED)):
        if patched:
            patcher.add_patches(difference(), 0.5)
        run(patcher, offer)
        read.clear()
        found = patcher.model_state_dict_for_saving(patcher.model.diffusion_model, "diffusion_model.")
        assert not read, "weights that wait packed were read before they are written"
        save_file(found, tmp_path / "model.safetensors")
        saved.append(load_file(tmp_path / "model.safetensors"))
    assert saved[0].keys() == saved[1].keys() and bool(read) == (codec == "lossless")
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_who_takes_the_model_over_finds_weights_of_its_own_kind(comfy, sessions, monkeypatch, codec):
    """ComfyUI lets go of a clone's weights without unloading them when another clone of the model comes."""
    pack_small_weights(monkeypatch, 1, ratio=2.0)
    patcher = make(comfy, LIMIT, codec=codec)
    mine, stock = patcher.clone(), strip(patcher.clone())
    reference = run(patcher)
    with torch.inference_mode():
        patcher.detach(unpatch_all=False)
    assert torch.equal(run(mine), reference) and sessions == ["open"]
    with torch.inference_mode():
        mine.detach(unpatch_all=False)
        stock.partially_load(CPU, UNLIMITED)
    assert streaming_of(patcher.model).session is None
    assert all(type(p) is nn.Parameter and not p.is_meta for p in patcher.model.parameters())
    assert "named_modules" not in patcher.model.__dict__
    assert torch.equal(run(stock), reference)
    with torch.inference_mode():
        stock.detach(unpatch_all=False)
    assert torch.equal(run(patcher), reference) and sessions == ["open", "open"]


def test_the_kernels_for_a_file_are_compiled_while_it_is_read(tmp_path, monkeypatch):
    from carom.nodes import file_preparation as module

    path, asked = str(tmp_path / "model.safetensors"), []
    half = torch.zeros(64, 512, dtype=torch.float16)
    save_file({"large": half, "norm": torch.zeros(8), "bias": torch.zeros(8, dtype=torch.bfloat16)}, path)
    monkeypatch.setattr(module, "warm_up", lambda *args: asked.append(args))
    monkeypatch.setattr(nodes_host, "room_on", lambda device: os.path.getsize(path) + 1000)
    monkeypatch.setattr(nodes_host, "least_for_passes", lambda: passes)
    gpu, passes = torch.device("cuda", 1), 1001
    module.prepare_kernels(path, Settings(), gpu)
    assert asked == [(gpu, {torch.float16})]
    module.prepare_kernels(path, Settings(codec="raw"), gpu)
    module.prepare_kernels(path, Settings(), torch.device("cpu"))
    module.prepare_kernels(str(tmp_path / "none"), Settings(), gpu)
    passes = 1000
    module.prepare_kernels(path, Settings(), gpu)  # the model fits: ComfyUI keeps it
    assert len(asked) == 1
    module.prepare_kernels(path, Settings(mode="stream"), gpu)
    assert asked == [(gpu, {torch.float16})] * 2


@pytest.mark.parametrize(
    ("dynamic", "passes", "read"), [(True, 1000, False), (True, 1001, True), (False, 1000, True)]
)
def test_a_file_that_comfyui_reads_itself_is_not_read_ahead(tmp_path, monkeypatch, dynamic, passes, read):
    from carom.nodes import file_preparation as module

    path, asked = tmp_path / "model.safetensors", []
    path.write_bytes(bytes(5000))
    monkeypatch.setattr(module, "read_ahead", asked.append)
    monkeypatch.setattr(nodes_host, "room_on", lambda device: 6000)
    monkeypatch.setattr(nodes_host, "least_for_passes", lambda: passes)
    monkeypatch.setattr(nodes_host, "has_dynamic_vram", lambda: dynamic)
    module.prepare_file(str(path), Settings(), torch.device("cuda", 1))
    assert asked == ([str(path)] if read else [])
    module.prepare_file(str(path), Settings(mode="native"), torch.device("cuda", 1))
    assert len(asked) == read
