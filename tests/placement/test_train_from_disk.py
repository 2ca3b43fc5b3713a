"""Training layer by layer: adapters stepped as their gradients come, on weights that stay in their file."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import carom
import pytest
import tests_models as models
import torch
import torch.utils.checkpoint
from carom.core.host import cache_pieces
from tests_disk_harness import on_meta, save, some_ram, some_vram, uniform, within_ram
from tests_harness import SOME, assert_same, loss_of, on_some_devices, place, train
from tests_inside import inside
from tests_pairwise import pairwise
from torch import nn

CASES = models.CASES
FACTORIES: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adam, amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


def small(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


def steps(model: nn.Module, optimizer: Any, count: int, schedule: Any = None, first: int = 0) -> None:
    for step in range(first, first + count):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
        loss_of(model(x)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# -- the optimizer


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_stepping_in_backward_gives_the_plain_optimizers_values(factory):
    plain, fused = small(), small()
    groups = [
        lambda m: {"params": m[0].parameters()},
        lambda m: {"params": [*m[2].parameters(), *m[4].parameters()], "lr": 1e-3},
    ]
    run = []
    for model, make in ((plain, factory), (fused, lambda p: carom.OptimizerInBackward(p, factory))):
        optimizer = make([group(model) for group in groups])
        steps(model, optimizer, 6, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        run.append(optimizer.state_dict())
    assert_same(values(plain), values(fused))
    assert run[0]["param_groups"] == run[1]["param_groups"]
    assert str(sorted(run[0]["state"].items())) == str(sorted(run[1]["state"].items()))


@pytest.mark.parametrize("first", ["plain", "fused"])
def test_states_are_those_of_the_plain_optimizer(first):
    """Saved by either and resumed by the other, the values are those of one uninterrupted run."""
    makers = {
        "plain": FACTORIES["adamw"],
        "fused": lambda p: carom.OptimizerInBackward(p, FACTORIES["adamw"]),
    }
    whole, halves = small(), small()
    steps(whole, FACTORIES["adamw"](whole.parameters()), 6)
    optimizer = makers[first](halves.parameters())
    steps(halves, optimizer, 3)
    again = small(seed=1)
    again.load_state_dict(halves.state_dict())
    resumed = makers["fused" if first == "plain" else "plain"](again.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if first == "fused":
        optimizer.remove()
    steps(again, resumed, 3, first=3)
    assert_same(values(whole), values(again))


def test_one_gradient_exists_at_a_time():
    model, most = small(), []
    for parameter in model.parameters():  # called before the optimizer's own
        parameter.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(p.grad is not None for p in model.parameters()))
        )
    optimizer = carom.OptimizerInBackward(model.parameters(), FACTORIES["adamw"])
    steps(model, optimizer, 2)
    assert most == [1] * 12
    assert all(p.grad is None for p in model.parameters())
    optimizer.remove()
    before = values(model)
    loss_of(model(torch.ones(1, 6))).backward()
    assert_same(before, values(model))
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_that_would_accumulate_are_refused():
    model = small()
    optimizer = carom.OptimizerInBackward(model.parameters(), FACTORIES["sgd"])
    x = torch.ones(2, 6)
    loss_of(model(x)).backward()
    with pytest.raises(carom.UnsupportedError, match="accumulat"):
        loss_of(model(x)).backward()
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()
    with pytest.raises(carom.UnsupportedError, match="requires_grad"):
        carom.OptimizerInBackward([torch.zeros(3)], FACTORIES["sgd"])
    with pytest.raises(carom.UnsupportedError, match="when"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    loss = optimizer.step(lambda: _closed(model, x))
    assert loss is not None and all(p.grad is None for p in model.parameters())


def _closed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(x))
    loss.backward()
    return loss


@on_some_devices
def test_streamed_weights_that_train_are_stepped_when_their_gradients_land(device):
    case, where = CASES["stack"], place(device)
    model = case.build("non-reentrant")
    plain = copy.deepcopy(model).to(where)
    factory = FACTORIES["sgd"]
    expected = train(plain, case, where, optimizer=factory)
    x = case.inputs(0, where)
    everything = sum(p.nbytes for p in model.parameters())
    with carom.stream(model, device=device, vram=everything // 2, training="stream") as session:
        assert inside(session).streamed
        found = train(model, case, where, optimizer=lambda p: carom.OptimizerInBackward(p, factory))
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(model(x), plain(x))
    assert_same(_without_gradients(expected, model), _without_gradients(found, model))


def _without_gradients(seen: list, model: nn.Module) -> list:
    """Outputs, gradients of inputs, trained values: gradients of parameters are gone by design."""
    count, step = len(list(model.parameters())), len(list(model.parameters())) + 2
    outputs = [item for start in range(0, 3 * step, step) for item in seen[start : start + 2]]
    return outputs + seen[len(seen) - count :]


# -- layer-wise training from a file


@pairwise(device=SOME, kept=["on the device", "on the host"], ram={"all in RAM": 1.5, "little RAM": 0.15})
def test_layer_wise_training_from_a_file_is_the_resident_runs(tmp_path, device, kept, ram):
    """Boundary activations kept or offloaded, blocks run again in reverse, adapters stepped in backward; stopped and resumed."""
    peft = pytest.importorskip("peft")
    case, where = CASES["stack"], place(device)
    factory = FACTORIES["adamw"]
    offload = torch.autograd.graph.save_on_cpu if kept == "on the host" else contextlib.nullcontext

    def adapted(model: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            lora = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
            model = peft.get_peft_model(model, lora)
        model(case.inputs(0, where))
        return model

    def run(model: nn.Module, optimizer: Any, first: int, count: int) -> list:
        seen = []
        for step in range(first, first + count):
            with offload():
                loss = loss_of(model(case.inputs(step, where)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    def trained(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    model = case.build("non-reentrant")
    path = save(model, tmp_path)
    resident = adapted(model.to(where))
    expected = run(resident, factory(trained(resident)), 0, 5) + [p.detach() for p in trained(resident)]

    found: list = []
    for first, count in ((0, 2), (2, 3)):
        empty = on_meta(case, "non-reentrant")
        vram = some_vram(empty, path, 0.3)
        with carom.stream(empty, device=device, vram=vram, weights=path, ram=some_ram(empty, ram)) as session:
            wrapped = adapted(empty)
            optimizer = carom.OptimizerInBackward(trained(wrapped), factory)
            if first:
                state = torch.load(tmp_path / "state.pt", weights_only=True)
                peft.set_peft_model_state_dict(wrapped, state["adapters"])
                optimizer.load_state_dict(state["optimizer"])
            found += run(wrapped, optimizer, first, count)
            assert all(p.grad is None for p in trained(wrapped))
            torch.save(
                {
                    "adapters": peft.get_peft_model_state_dict(wrapped),
                    "optimizer": optimizer.state_dict(),
                },
                tmp_path / "state.pt",
            )
            within_ram(session)
            report = session.report()
            assert report.kind == "train" and report.transfers_per_weight <= 2
            final = [p.detach().clone() for p in trained(wrapped)]
    assert_same(expected, found + final)


def test_the_trainer_steps_in_backward_saves_and_resumes(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    rows = [torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    def fit(model: nn.Module, folder: Path, fused: bool, resume: Any = None) -> dict:
        torch.manual_seed(5)
        targets = carom.dense_modules(model)
        assert len(targets) == 3 * 7 and all(".layers." in name for name in targets)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        )
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=4, per_device_train_batch_size=2, use_cpu=True, save_steps=2, report_to=[],
            disable_tqdm=True, gradient_checkpointing=True, max_grad_norm=0,
        )  # fmt: skip
        trained = [p for p in model.parameters() if p.requires_grad]
        factory = functools.partial(torch.optim.AdamW, lr=1e-3)
        optimizer = carom.OptimizerInBackward(trained, factory) if fused else factory(trained)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        return {n: p.detach().clone() for n, p in model.named_parameters() if "lora" in n}

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / "model")
        expected = fit(model, tmp_path / "resident", fused=False)
        for resume in (None, tmp_path / "streamed" / "checkpoint-2"):
            with torch.device("meta"):
                empty = transformers.LlamaForCausalLM(config)
            with carom.stream(
                empty, device="cpu", vram=60_000, weights=tmp_path / "model", ram=40_000
            ) as session:
                assert inside(session).streamed
                found = fit(empty, tmp_path / "streamed", True, resume)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- mixtures of experts


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Routed(nn.Module):
    """A block with attention's projections, a shared expert, a gate for it, and routed experts under any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mlp = nn.Module()
        self.mlp.router = nn.Linear(8, 4, bias=False)
        setattr(self.mlp, name, nn.ModuleList(Expert() for _ in range(4)))
        self.mlp.shared = Expert()
        self.mlp.shared_gate = nn.Linear(8, 1)


@pytest.mark.parametrize("name", ["experts", "specialists"])
def test_dense_modules_leave_routed_experts_and_their_router_out(name):
    model = nn.Module()
    model.embed, model.head = nn.Embedding(10, 8), nn.Linear(8, 10)
    model.layers = nn.ModuleList(Routed(name) for _ in range(2))
    wanted = ["q_proj", "o_proj", "mlp.shared.up", "mlp.shared.down"]
    assert carom.dense_modules(model) == [f"layers.{n}.{part}" for n in range(2) for part in wanted]
    with pytest.raises(carom.UnsupportedError, match="target_modules"):
        carom.dense_modules(nn.Sequential(nn.ReLU()))


MOES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 24, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MOES)
def test_published_mixtures_get_adapters_on_dense_parts_only_and_train_from_disk(tmp_path, kind):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this transformers has no {kind}")
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **MOES[kind],
        }
    )  # fmt: skip
    make = getattr(transformers, f"{kind}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = make(config)
    names = carom.dense_modules(empty)
    assert any("attn" in name for name in names)
    assert any("shared_expert" in name for name in names) == (kind != "Mixtral")
    assert not any(".experts" in name or name.endswith((".gate", ".router", "lm_head")) for name in names)
    tokens = torch.arange(12).view(2, 6)
    factory = FACTORIES["adamw"]
    weights: Any = tmp_path

    def run(model: nn.Module, fused: bool) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            lora = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
            model = peft.get_peft_model(model, lora)
        model(tokens)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = carom.OptimizerInBackward(trained, factory) if fused else factory(trained)
        for _ in range(2):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in trained]

    with torch.random.fork_rng(devices=[]):
        expected = run(model, False)
        vram, ram = some_vram(empty, weights, 0.2), some_ram(empty, 0.2)
        with carom.stream(empty, device="cpu", vram=vram, weights=weights, ram=ram) as session:
            assert inside(session).streamed
            assert_same(expected, run(empty, True))


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward, behind a trainable scale where one was put."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def test_what_slots_hold_at_a_turn_is_not_kept_in_ram_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cache_pieces, "STREAMED_PIECE", 4096
    )  # small beside `ram`, as pieces of 32 MiB are beside gigabytes
    monkeypatch.setattr(cache_pieces, "READ_AHEAD_BYTES", 4 * 4096)
    loaded, empty, _, nbytes = uniform(tmp_path)
    loaded, empty = Checkpointed(loaded.blocks.requires_grad_(False)), Checkpointed(empty.blocks)
    path, block = save(loaded, tmp_path), nbytes // 20

    def step(model: Checkpointed) -> torch.Tensor:
        model.scale.grad = None
        model(torch.ones(2, 64)).sum().backward()
        return model.scale.grad.clone()

    loaded.scale = nn.Parameter(torch.ones(64))
    expected = step(loaded)
    with carom.stream(empty, device="cpu", vram=8 * block, ram=6 * block, weights=path) as session:
        empty.scale = nn.Parameter(torch.ones(64))
        read = [0]
        for _ in range(5):
            assert torch.equal(step(empty), expected)
            read.append(inside(session).placement.tier.reads.cache.total_read())
        units, slots = len(inside(session).streamed), session.plan.region_bytes // block
        buffers = inside(session).placement.tier.reads._buffers
    kept = (buffers.count - buffers.rotating) * buffers.nbytes / block
    assert 0 < kept < units - slots
    # There and back: neither turn needs what the slots and the cache hold then, each something else. That is the least.
    assert (read[-1] - read[2]) / 3 / block == pytest.approx(2 * (units - slots - kept), abs=0.3)
