"""The contract that a replacement of ai-toolkit's memory manager keeps: one test or more for each of its twelve points.

Against a stand-in for ai-toolkit (`aitoolkit_stand_in`), on the CPU and on the simulated device, which raises when an
operator uses a streamed weight's host copy within a step and makes a missing wait visible.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import sys
import weakref

import numpy as np
import pytest
import tests_aitoolkit_stand_in as standin
import torch
from tests_harness import DEVICES, assert_same
from tests_inside import inside, open_sessions
from tests_pairwise import each, pairwise
from torch import nn

VRAM = 120_000  # bytes: about a sixth of the stand-in's transformer
BOTH = 400_000  # about a third of it and its text encoder


@pytest.fixture
def on(monkeypatch):
    """Makes the engine compute on a device of the tests."""

    def choose(name):
        monkeypatch.setattr("carom.toolkit_ext.devices.engine_device", lambda device: DEVICES[name])

    return choose


@pytest.fixture(autouse=True)
def toolkit():
    before = open_sessions()  # of other files' tests
    with standin.installed():
        yield
    gc.collect()
    assert all(found in before for found in open_sessions()), "a session was left open"


def run(tmp_path, model_class=standin.Attaching, offload="bouncing", config=None, vram=BOTH, **train):
    """A whole job; returns its process. ``offload`` None: as without Carom."""
    model = dict(config or {})
    if offload is not None:
        model |= {"offload": offload, "offload_kwargs": {"vram": vram}}
    process = standin.BaseSDTrainProcess(model, tmp_path, **train)
    process.model_class = model_class
    process.run()
    return process


def same(tmp_path, model_class=standin.Attaching, config=None, vram=BOTH, **train):
    """Plain and bouncing: equal bit for bit, and the bouncing one really streamed."""
    plain = run(tmp_path, model_class, None, config, **train)
    standin.SAID.clear()
    bouncing = run(tmp_path, model_class, config=config, vram=vram, **train)
    assert any("stream through" in line for line in standin.SAID), standin.SAID
    assert_same(plain.result, bouncing.result)
    return bouncing


@pytest.fixture
def job():
    """An attached transformer, as a model class leaves it; `attach` for more."""
    from carom.toolkit_ext import toolkit_patches
    from carom.toolkit_ext.job import JobOffload
    from carom.toolkit_ext.options import Policy

    toolkit_patches._current = JobOffload(Policy("bouncing", VRAM), "cpu", standin.SAID.append)
    torch.manual_seed(1)
    model = standin.Transformer().requires_grad_(False)
    yield toolkit_patches._current, model
    toolkit_patches._current.close()
    toolkit_patches._current = None


def inputs():
    return torch.randn(2, 6, standin.D), torch.randn(2, 6, standin.D)


CPU = torch.device("cpu")


def attach(*args, **kwargs):
    standin.MemoryManager.attach(*args, **kwargs)


# 1. the class's methods


def test_1_a_second_attach_does_nothing_and_parameters_may_be_ignored(job):
    offload, model = job
    x, text = inputs()
    expected = model(x, text)
    attach(model, CPU, ignore_modules=[model.pad])
    first = model._memory_manager
    attach(model, CPU, 0.5)
    assert model._memory_manager is first and len(offload.attachments) == 1 and not standin.STOCK
    assert torch.equal(model(x, text), expected)


def test_1_detach_gives_the_module_back_and_works_on_what_was_never_attached(job):
    _, model = job
    before = {name: (p, p.dtype, p.clone()) for name, p in model.named_parameters()}
    attributes = {id(m): set(m.__dict__) for m in model.modules()}
    attach(model, CPU)
    x, text = inputs()
    expected = model(x, text)
    standin.MemoryManager.detach(model)
    assert {id(m): set(m.__dict__) for m in model.modules()} == attributes
    for name, p in model.named_parameters():
        assert p is before[name][0] and type(p) is nn.Parameter and torch.equal(p, before[name][2])
    assert torch.equal(model(x, text), expected)
    standin.MemoryManager.detach(model)
    assert standin.STOCK == ["detach Transformer"], "the original has the word on what is not ours"


@pytest.mark.parametrize("ran", [True, False])
def test_1_free_drops_the_weights(job, ran):
    offload, model = job
    attach(model, CPU)
    if ran:
        model(*inputs())
    standin.MemoryManager.free(model)
    standin.MemoryManager.release_cached_memory()
    assert all(p.is_meta for p in model.parameters()) and not offload.attachments
    assert standin.STOCK == ["free Transformer", "release_cached_memory"]


def test_1_without_a_policy_the_originals_run():
    model = standin.Transformer()
    attach(model, CPU, 0.7)
    assert standin.STOCK == ["attach Transformer 0.7"] and "_memory_manager" not in model.__dict__


# 2. marks


def test_2_root_and_leaves_wear_the_marks(job):
    _, model = job
    attach(model, CPU)
    for _ in range(2):
        assert model._memory_manager.module is model and callable(model._mm_to)
        for leaf in (model.out, model.blocks[0].up, model.conv3):
            assert leaf._memory_management_device == CPU
            assert callable(leaf._layer_memory_manager._original_forward)
        model(*inputs())


def test_2_layers_that_came_after_attach_wear_the_marks_when_they_stream(job):
    _, model = job
    attach(model, CPU)
    model.out = nn.Linear(standin.D, standin.D)  # as quanto puts its own in a linear's place
    model(*inputs())
    assert model.out._memory_management_device == CPU and model.out._layer_memory_manager.module is model.out


# 3. identity


def test_3_modules_and_parameters_stay_the_same_objects(job):
    _, model = job
    modules = [(m, type(m)) for m in model.modules()]
    parameters = list(model.parameters())
    references = [weakref.ref(p) for p in parameters]
    attach(model, CPU)
    for _ in range(2):
        model(*inputs())
        assert [(m, type(m)) for m in model.modules()] == modules
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(
            r() is p and isinstance(p, nn.Parameter) for r, p in zip(references, parameters, strict=True)
        )


# 4. a readable weight


def test_4_weights_are_readable_true_and_of_their_shape_and_dtype(job):
    _, model = job
    model.bfloat16()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, CPU)
    for _ in range(2):
        for name, value in expected.items():
            module, _, leaf = name.rpartition(".")
            weight = getattr(model.get_submodule(module), leaf)
            assert weight.shape == value.shape and weight.dtype == value.dtype
            assert torch.equal(weight.detach().float(), value.float()), name
        assert all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), expected.values(), strict=True)
        )
        model(*(t.bfloat16() for t in inputs()))


# 5. weights are read live


@pytest.mark.parametrize("device", ["cpu", "simulated-late"])
def test_5_an_encoder_quantised_after_attach_streams_its_quantised_weights(on, tmp_path, device):
    on(device)
    process = same(tmp_path, config={"quantize_te": True})
    assert sum(isinstance(m, standin.Quantised) for m in process.sd.text_encoder[0].modules()) == 6


def test_5_a_layer_whose_parameter_is_swapped_for_a_call_uses_the_swapped_one(on, job):
    on("simulated-late")
    _, model = job
    layer = model.blocks[2].up
    delta = torch.randn_like(layer.weight)
    plain = layer.forward

    def full_rank(x):
        weight = layer._parameters["weight"]
        layer._parameters["weight"] = weight + delta
        try:
            return plain(x)
        finally:
            layer._parameters["weight"] = weight

    x, text = inputs()
    layer.forward = full_rank
    expected = model(x, text)
    attach(model, CPU)
    for _ in range(3):
        assert torch.equal(model(x, text), expected)


@pytest.mark.parametrize("vram", [BOTH, 10_000_000])
def test_5_a_merge_is_seen_by_the_next_forward(tmp_path, vram):
    plain = run(tmp_path, offload=None, merge=True)
    assert_same(plain.result, run(tmp_path, vram=vram, merge=True).result)


def test_5_a_merge_through_aliases_taken_before_is_seen(on, job):
    on("simulated-early")  # what was fetched ahead holds the old bytes
    offload, model = job
    offload.policy = dataclasses.replace(offload.policy, vram=500_000)  # room to keep and to fetch ahead
    attach(model, CPU)
    x, text = inputs()
    model(x, text)
    aliases = [parameter.data for parameter in model.parameters()]
    model(x, text)

    class Merging(standin.Network):
        def get_all_modules(self):
            for alias in aliases:
                alias.mul_(2)
            return []

    Merging(nn.Module()).merge_in()
    seen = model(x, text)
    standin.MemoryManager.detach(model)
    assert torch.equal(seen, model(x, text))


def test_5_wrapped_weights_that_a_merge_replaced_are_taken_up_anew(job):
    def wrapped(value):
        return nn.Parameter(
            standin.Wrapped(value.to(torch.float8_e4m3fn), torch.float32), requires_grad=False
        )

    _, model = job
    model.out.weight = wrapped(torch.randn(standin.D, standin.D))
    attach(model, CPU)
    x, text = inputs()
    model(x, text)
    first = model._memory_manager.session

    class Merging(standin.Network):
        def get_all_modules(self):
            model.out.weight = wrapped(torch.ones(standin.D, standin.D))
            return []

    Merging(nn.Module()).merge_in()
    seen = model(x, text)
    assert model._memory_manager.session is not first
    standin.MemoryManager.detach(model)
    assert isinstance(model.out.weight, standin.Wrapped) and torch.equal(
        model.out.weight.codes.float(), torch.ones(standin.D, standin.D)
    )
    assert torch.equal(seen, model(x, text))


def test_5_load_state_dict_is_seen_by_the_next_forward(job):
    _, model = job
    attach(model, CPU)
    x, text = inputs()
    model(x, text)
    other = standin.Transformer().requires_grad_(False)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x, text), other(x, text))


@pytest.mark.parametrize("device", ["cpu", "simulated-late"])
def test_5_a_part_called_past_the_root_streams_too(on, job, device):
    on(device)
    _, model = job
    x = standin._noise(3)
    expected = [block(x) for block in model.blocks] + [model.out(x)]
    attach(model, CPU)
    for _ in range(2):
        assert_same(expected, [block(x) for block in model.blocks] + [model.out(x)])
    assert model._memory_manager.session is not None


# 6. .to


@pytest.mark.parametrize("ran", [True, False])
def test_6_to_takes_every_form_returns_the_module_and_moves_nothing(job, ran):
    _, model = job
    attach(model, CPU)
    x, text = inputs()
    expected = model(x, text) if ran else None
    session = model._memory_manager.session
    for form in ((CPU, None), ("cpu",), (CPU, torch.float32), (torch.float32,), (torch.empty(0),)):
        assert model.to(*form) is model
    assert model.to(device="cpu", dtype=torch.float32) is model
    assert model._memory_manager.session is session, "a .to that changes nothing may cost nothing"
    if ran:
        assert torch.equal(model(x, text), expected)


def test_6_a_waiting_model_stays_on_the_cpu_when_it_or_its_parent_is_moved(job):
    _, model = job
    attach(model, CPU)
    pipeline = nn.ModuleList([model])
    for move in (model.to, pipeline.to):
        # The meta device stands for any other here; only ai-toolkit's `free` means it, and it goes past `.to`.
        seen = []
        model._memory_manager.module.__dict__["_apply"](lambda t, seen=seen: seen.append(t) or _Elsewhere(t))
        assert len(seen) <= 2, "only probes may be moved"
        move(torch.float32)
    assert all(p.device == CPU for p in model.parameters())


class _Elsewhere:
    """A tensor on a device that this machine lacks."""

    def __init__(self, tensor):
        self.device, self.dtype = torch.device("cuda:1"), tensor.dtype


def test_6_a_change_of_dtype_is_done_as_without_carom(job):
    _, model = job
    x, text = (t.bfloat16() for t in inputs())
    expected = copy.deepcopy(model).bfloat16()(x, text)
    attach(model, CPU)
    model(x.float(), text.float())
    model.to(CPU, dtype=torch.bfloat16)
    assert torch.equal(model(x, text), expected)


def test_6_to_cpu_releases_the_device_and_the_next_forward_takes_it_again(on, job, monkeypatch):
    on("simulated-late")
    _, model = job
    attach(model, CPU)
    x, text = inputs()
    expected = model(x, text)
    session = model._memory_manager.session
    session.park()  # what `.to("cpu")` is where the device is another one
    assert session.report().slot_bytes == 0 and session.report().resident_bytes == 0
    assert torch.equal(model(x, text), expected) and session.report().slot_bytes > 0


# 7. wrappers


@pytest.mark.parametrize(
    "first", [True, False], ids=["wrapped-before-it-streams", "wrapped-while-it-streams"]
)
def test_7_a_lora_wrapped_after_attach_works_and_survives_detach(on, job, first):
    on("simulated-random")
    _, model = job
    x, text = inputs()
    plain = copy.deepcopy(model)
    attach(model, CPU)
    if not first:
        model(x, text)
    networks = [standin.Network(plain), standin.Network(model)]
    for network in networks:
        for lora in network.loras:
            nn.init.ones_(lora.up)
        network.apply_to()
    for model_ in (plain, model):
        model_(x, text).sum().backward()
    assert_same([p.grad for p in networks[0].parameters()], [p.grad for p in networks[1].parameters()])
    standin.MemoryManager.detach(model)
    assert all(lora.org_module[0].forward == lora.forward for lora in networks[1].loras)
    assert torch.equal(model(x, text), plain(x, text))


def test_7_the_original_forward_of_a_recovery_adapter_is_its_adapters(job):
    _, model = job
    adapter = standin.Lora(model.out, 0)
    adapter.apply_to()
    model.out.ara_lora_ref = weakref.ref(adapter)
    x, text = inputs()
    expected = model(x, text)
    attach(model, CPU)
    assert model.out._layer_memory_manager._original_forward == adapter.org_forward
    assert torch.equal(model(x, text), expected)


# 8. quantised layers


@each(device=["cpu", "simulated-late", "simulated-random"], checkpointing=[True, False])
def test_8_custom_quantised_layers_stream_their_buffers_exactly(on, job, device, checkpointing, monkeypatch):
    monkeypatch.setattr("carom.core.model.units.SMALL_BUFFER", 1024)  # the stand-in's are small
    on(device)
    _, model = job
    standin.quantise(model)
    model.gradient_checkpointing = checkpointing
    plain = copy.deepcopy(model)
    attach(model, CPU)
    for step in range(3):
        grads = []
        for model_ in (plain, model):
            x, text = (t.requires_grad_() for t in (standin._noise(step), standin._noise(50 + step)))
            model_(x, text).sum().backward()
            grads.append([x.grad, text.grad])
        assert_same(*grads)
    streamed = inside(model._memory_manager.session).streamed
    assert any(name.endswith("codes") for unit in streamed for name in unit.weights)


@each(device=["simulated-random", "cpu", "simulated-late"], checkpointing=[True, False])
def test_8_wrapped_tensors_stream_what_they_hold_exactly(on, job, device, checkpointing, monkeypatch):
    from carom.toolkit_ext.attachment import weight_bytes

    monkeypatch.setattr("carom.core.model.units.SMALL_BUFFER", 1024)
    on(device)
    _, model = job
    for block in model.blocks:
        codes = block.up.weight.detach().to(torch.float8_e4m3fn)
        block.up.weight = nn.Parameter(standin.Wrapped(codes, torch.float32), requires_grad=False)
        assert weight_bytes(block.up) == codes.nbytes + block.up.bias.nbytes
    model.gradient_checkpointing = checkpointing
    plain = model.state_dict().keys()
    expected = _gradients(model)
    attach(model, CPU)
    assert_same(expected, _gradients(model))
    session = model._memory_manager.session
    assert model.state_dict().keys() == plain and isinstance(model.blocks[0].up.weight, standin.Wrapped)
    assert any("up.weight" in name for unit in inside(session).streamed for name in unit.weights)
    model.to(CPU, dtype=torch.float32)
    assert model._memory_manager.session is session, "the float8 inside is no reason to convert"


def _gradients(model):
    seen = []
    for step in range(3):
        x, text = (t.requires_grad_() for t in (standin._noise(step), standin._noise(50 + step)))
        model(x, text).sum().backward()
        seen += [x.grad, text.grad]
    return seen


# 9. trainable weights


@pairwise(vram={"host-gradients": BOTH, "resident": 10_000_000}, device=["cpu", "simulated-late"])
def test_9_full_fine_tuning_is_exact_with_gradients_where_the_weights_are(on, tmp_path, device, vram):
    on(device)
    plain = run(tmp_path, offload=None, full=True)
    assert_same(plain.result, run(tmp_path, vram=vram, full=True).result)


def test_9_host_gradients_are_there_when_backward_returns(on, job):
    on("simulated-late")
    _, model = job
    model.requires_grad_(True)
    plain = copy.deepcopy(model)
    attach(model, CPU)
    x, text = inputs()
    for model_ in (plain, model):
        model_(x, text).pow(2).mean().backward()
        # what the optimizer and the clipping read, at once
        assert_same([p.grad for p in plain.parameters()], [p.grad for p in model_.parameters()])


# 10. checkpointing


@pairwise(
    device=list(DEVICES),
    checkpointing=[True, False],
    model_class={"Attaching": standin.Attaching, "Legacy": standin.Legacy},
)
def test_10_training_is_exact_with_and_without_checkpointing(
    on, tmp_path, device, checkpointing, model_class
):
    on(device)
    same(tmp_path, model_class, checkpointing=checkpointing, steps=2)


@pytest.mark.parametrize("model_class", [standin.Attaching, standin.Legacy])
def test_10_the_transformer_has_slots_for_the_turns_of_a_step_though_its_adapters_are_the_networks(
    tmp_path, model_class, monkeypatch
):
    """An encoder, which no backward goes through, has not."""
    from carom.core.session.session import Session
    from carom.toolkit_ext import job_sessions

    told: dict[str, set[bool]] = {}

    def session(module, asked):
        told.setdefault(type(module).__name__, set()).add(asked.backward)
        return Session(module, asked)

    monkeypatch.setattr(job_sessions, "Session", session)
    run(tmp_path, model_class)
    assert told == {"Transformer": {True}, "TextEncoder": {False}}


def test_10_accumulation_preservation_and_sampling_are_exact(on, tmp_path):
    on("simulated-random")
    same(tmp_path, accumulate=3, preserve=True, steps=2)
    same(tmp_path, sample_every=1, steps=2)
    same(tmp_path, cache_text=True, sample_every=2)


# 11. out of memory


@each(where=["oom", "oom_inside"], device=["cpu", "simulated-late"])
def test_11_a_skipped_step_leaves_the_others_exact(on, tmp_path, where, device):
    on(device)
    process = same(tmp_path, steps=3, **{where: 1})
    assert process.skipped == 1


def test_11_running_out_while_the_model_is_attached_leaves_it_waiting(job, monkeypatch):
    _, model = job
    attach(model, CPU)
    x, text = inputs()

    def full(*args, **kwargs):
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("carom.toolkit_ext.job_sessions.Session", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(x, text)
    standin.MemoryManager.detach(model)
    expected = model(x, text)
    attach(model, CPU)
    assert torch.equal(model(x, text), expected)


# 12. quiet


def test_12_no_random_number_is_drawn(tmp_path):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    def drawn(offload):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        run(tmp_path, offload=offload, sample_every=1, config={"quantize_te": True})
        return states()

    assert drawn(None) == drawn("bouncing") == drawn("auto")


def test_12_no_global_setting_is_changed(tmp_path):
    before = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    modules = set(sys.modules)
    run(tmp_path)
    assert before == (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    assert "triton" not in set(sys.modules) - modules
    assert nn.Module.to.__module__ == "torch.nn.modules.module"
