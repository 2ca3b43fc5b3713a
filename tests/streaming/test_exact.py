"""Laws 1 and 7: streaming changes where weights wait, never what is computed, for any module as it is."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import carom
import pytest
import tests_harness as harness
import tests_models as models
import torch
import torch.nn.functional as F
from tests_harness import (
    EVERYWHERE,
    SOME,
    assert_same,
    infer,
    on_some_devices,
    place,
    streamed,
    train,
)
from tests_inside import inside
from tests_pairwise import each, pairwise
from torch import nn

CASES = models.CASES
SOME_MODELS = ["stack", "heterogeneous", "tied", "nested", "outside"]
CHECKPOINTS = ["none", "non-reentrant", "reentrant"]


def compare(name: str, device: Any, run: Any, *, checkpoint: str = "none", share: float = 0.35) -> Any:
    """``run`` on a resident model and on a streamed one; returns the report."""
    case = CASES[name]
    where = place(device)
    model = models.freeze(case.build(checkpoint))
    expected = run(copy.deepcopy(model).to(where), case, where)
    vram = harness.some_vram(model, device, share, case.slots)
    with streamed(model, device, vram, training="resident") as session:
        assert_same(expected, run(model, case, where))
        return session.report()


# -- inference


@pairwise(name=list(CASES), device=SOME)
def test_inference_is_exact(name, device):
    compare(name, device, infer)


@each(name=list(CASES), device=EVERYWHERE)
def test_inference_in_evaluation_mode_is_exact(name, device):
    compare(name, device, lambda model, case, where: infer(model.eval(), case, where, passes=2))


@each(name=list(CASES), device=dict(reversed(EVERYWHERE.items())))
def test_inference_mode_is_exact(name, device):
    compare(name, device, lambda m, c, d: infer(m, c, d, mode=torch.inference_mode, passes=2))


@pairwise(
    name=["stack", "heterogeneous", "conv2d", "attention", "tied", "nested"],
    granularity=["block", "phase", "layer"],
    device=SOME,
)
def test_every_granularity_is_exact(name, granularity, device):
    def run(model, case, where):
        return infer(model, case, where, passes=2) + train(model, case, where, steps=2)

    case = CASES[name]
    where = place(device)
    model = models.freeze(case.build("non-reentrant"))
    expected = run(copy.deepcopy(model).to(where), case, where)
    vram = harness.some_vram(model, device, 0.3, 2, granularity)
    with streamed(model, device, vram, granularity=granularity, training="resident"):
        assert_same(expected, run(model, case, where))


@pairwise(name=[name for name in SOME_MODELS if CASES[name].slots == 1], device=EVERYWHERE)
def test_one_slot_is_exact(name, device):
    """The least budget: nothing overlaps, everything must still be right."""
    run = lambda m, c, d: infer(m, c, d, passes=2) + train(m, c, d, steps=2)  # noqa: E731
    compare(name, device, run, checkpoint="non-reentrant", share=0.0)


def test_tensor_subclasses_stay_resident_and_exact():
    from torch.testing._internal.two_tensor import TwoTensor

    case = CASES["stack"]
    model = case.build().requires_grad_(False)
    for block in model.blocks:
        data = block.up.weight.detach()
        block.up.weight = nn.Parameter(TwoTensor(data, data.clone()), requires_grad=False)
    x = case.inputs()
    with torch.no_grad():
        expected = model(x)
        with streamed(model, "cpu", harness.some_vram(model, "cpu", 0.2)) as session:
            for _ in range(3):
                found = model(x)
                assert torch.equal(getattr(found, "a", found), getattr(expected, "a", expected))
            reasons = {place.name: place.reason for place in session.report().resident_by_need}
    assert all("TwoTensor" in reasons[f"blocks.{i}.up.weight"] for i in range(6))


# -- training of adapters


@pairwise(
    name=list(CASES),
    checkpoint=CHECKPOINTS,
    device=EVERYWHERE,
    but=lambda name, checkpoint, device: checkpoint != "none" and name in ("lstm", "buffers", "encoder"),
)
def test_training_is_exact(name, checkpoint, device):
    compare(name, device, lambda m, c, d: train(m, c, d, steps=2), checkpoint=checkpoint)


@each(name=SOME_MODELS, device=EVERYWHERE)
def test_accumulation_is_exact(name, device):
    compare(name, device, lambda m, c, d: train(m, c, d, steps=2, accumulate=3), checkpoint="non-reentrant")


@pairwise(name=SOME_MODELS, forwards=[2, 3], checkpoint=["none", "non-reentrant"], device=EVERYWHERE)
def test_several_forwards_before_a_backward_are_exact(name, forwards, checkpoint, device):
    compare(name, device, lambda m, c, d: train(m, c, d, steps=2, forwards=forwards), checkpoint=checkpoint)


@pairwise(name=SOME_MODELS, checkpoint=CHECKPOINTS, device=SOME)
def test_autocast_is_exact(name, checkpoint, device):
    compare(name, device, lambda m, c, d: train(m, c, d, steps=2, autocast=True), checkpoint=checkpoint)


@each(name=SOME_MODELS, device=EVERYWHERE)
def test_sampling_between_training_steps_is_exact(name, device):
    compare(name, device, lambda m, c, d: train(m, c, d, sample=True), checkpoint="non-reentrant")


@each(name=[case.name for case in CASES.values() if case.smooth], device=SOME)
def test_double_backward_is_exact(name, device):
    def run(model, case, where):
        seen = []
        for index in range(2):
            x = case.inputs(index, where)
            first = (
                [x.requires_grad_()]
                if x.is_floating_point()
                else [p for p in model.parameters() if p.requires_grad]
            )
            torch.manual_seed(index)
            grads = torch.autograd.grad(
                harness.loss_of(model(x)), first, create_graph=True, allow_unused=True
            )
            penalty = torch.stack([g.pow(2).sum() for g in grads if g is not None]).sum()
            model.zero_grad()
            penalty.backward()
            seen += [g.detach() for g in grads if g is not None] + [p.grad for p in model.parameters()]
        return seen

    # For a second backward, a checkpoint within a unit keeps the weights that it recomputed with.
    keeps = name == "inner checkpoint"
    with pytest.raises(carom.BudgetError, match="kept by the program") if keeps else nullcontext():
        compare(name, device, run, share=0.5)


@on_some_devices
def test_retained_graph_used_twice_is_exact(device):
    def run(model, case, where):
        x = case.inputs(0, where).requires_grad_()
        loss = harness.loss_of(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]

    compare("stack", device, run)


@on_some_devices
def test_gradients_of_chosen_inputs_are_exact(device):
    def run(model, case, where):
        x = case.inputs(0, where).requires_grad_()
        return list(torch.autograd.grad(harness.loss_of(model(x)), [x, model.norm.weight])) + infer(
            model, case, where
        )

    compare("stack", device, run)


@on_some_devices
def test_passes_after_a_forward_whose_graph_is_thrown_away_are_exact(device):
    def run(model, case, where):
        for index in range(3):
            model(case.inputs(index, where).requires_grad_())
        return train(model, case, where)

    compare("stack", device, run)


# -- full fine-tuning: trainable weights stream, gradients arrive on the host


@pairwise(
    name=["stack", "heterogeneous", "conv2d", "attention", "tied", "nested", "lstm"],
    checkpoint=CHECKPOINTS,
    device=SOME,
    but=lambda name, checkpoint, device: checkpoint != "none" and name == "lstm",  # it checkpoints nothing
)
def test_full_fine_tuning_is_exact(name, checkpoint, device):
    if place(device).type != "cpu":
        pytest.skip("the host's optimizer is not the device's: tests/device/test_gpu.py compares gradients")
    case = CASES[name]
    model = case.build(checkpoint)

    def run(model):
        return train(
            model,
            case,
            place(device),
            steps=2,
            accumulate=2,
            clip=0.5,
            optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        )

    expected = run(copy.deepcopy(model))
    vram = harness.some_vram(model, device, 0.3, training="stream")
    with streamed(model, device, vram, training="stream") as session:
        assert any(unit.trainable for unit in inside(session).streamed)
        assert_same(expected, run(model))


@on_some_devices
def test_gradient_hooks_of_streamed_weights_run(device):
    case = CASES["stack"]
    model = case.build("non-reentrant")
    where = place(device)

    def run(model):
        calls = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g: g * 2)
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
        harness.loss_of(model(case.inputs(0, where))).backward()
        return [p.grad.cpu() for p in model.parameters()], sorted(calls)

    expected, names = run(copy.deepcopy(model).to(where))
    with streamed(model, device, harness.some_vram(model, device, 0.3, training="stream"), training="stream"):
        found, called = run(model)
    assert_same(expected, found)
    assert called == names


# -- adapters of other libraries and by hand


def _peft(kind: str):
    peft = pytest.importorskip("peft")
    targets = ["up", "down"]
    return peft, {
        "lora": peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False),
        "dora": peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, use_dora=True),
        "lokr": peft.LoKrConfig(r=2, target_modules=targets, init_weights=False),
    }[kind]


def _wrap(kind: str, model: nn.Module) -> nn.Module:
    peft, config = _peft(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)


@pairwise(
    kind=["lora", "dora", "lokr"],
    when=["before", "after"],
    checkpoint=["none", "non-reentrant"],
    device=SOME,
)
def test_peft_training_is_exact(kind, when, checkpoint, device):
    case, where = CASES["stack"], place(device)

    def run(model, wrapped):
        model(case.inputs(0, where))  # what appeared is adopted here, before an optimizer takes it
        return train(wrapped, case, where, steps=2, sample=True)

    plain = case.build(checkpoint).requires_grad_(False)
    # DoRA computes its magnitudes where the weights are when it wraps them.
    wrapped = _wrap(kind, plain.to(where) if when == "after" else plain).to(where)
    expected = run(plain, wrapped)
    model = case.build(checkpoint).requires_grad_(False)
    vram = harness.some_vram(model, device, 0.4)
    if when == "before":
        wrapped = _wrap(kind, model)
        with streamed(wrapped, device, vram):
            assert_same(expected, run(wrapped, wrapped))
    else:
        with streamed(model, device, vram):
            wrapped = _wrap(kind, model)
            assert_same(expected, run(model, wrapped))


@on_some_devices
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_merged_adapters_are_seen_and_unmerged_ones_too(kind, device):
    case, where = CASES["stack"], place(device)
    if where.type != "cpu":
        pytest.skip(
            "PEFT adds what is on the device to `.data`, which is on the host outside a step (docs/limits.md)"
        )

    def run(model):
        seen = infer(model, case, where)
        model.merge_adapter()
        seen += infer(model, case, where)
        model.unmerge_adapter()
        return seen + infer(model, case, where)

    expected = run(_wrap(kind, case.build().requires_grad_(False)).to(where))
    model = _wrap(kind, case.build().requires_grad_(False))
    with streamed(model, device, harness.some_vram(model, device, 0.3)):
        found = run(model)
    if where.type == "cpu":
        assert_same(expected, found)
    else:  # the host merges streamed weights: its kernels round differently
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)


class _HandMade(nn.Module):
    """A wrapper as trainers write them: holds the original, whose weight it also reads."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.original = original
        self.a = nn.Parameter(torch.full((2, original.in_features), 0.01))
        self.b = nn.Parameter(torch.full((original.out_features, 2), 0.02))

    def forward(self, x):
        return F.linear(x, self.original.weight + self.b @ self.a, self.original.bias)


@on_some_devices
@pytest.mark.parametrize("when", ["before", "after"])
def test_hand_made_wrappers_are_exact(when, device):
    case, where = CASES["stack"], place(device)

    def wrap(model):
        for block in model.blocks:
            block.down = _HandMade(block.down)

    def build():
        return case.build("non-reentrant").requires_grad_(False)

    plain = build()
    wrap(plain)
    expected = train(plain.to(where), case, where)
    model = build()
    vram = harness.some_vram(model, device, 0.4)
    if when == "before":
        wrap(model)
    with streamed(model, device, vram):
        if when == "after":
            wrap(model)
            with torch.no_grad():
                model(case.inputs(0, where))
        assert_same(expected, train(model, case, where))


@on_some_devices
def test_a_forward_that_was_replaced_by_hand_is_exact(device):
    """ai-toolkit's networks put their own forward in front of a Linear's, before or after streaming."""
    case, where = CASES["stack"], place(device)

    def replace(model):
        for block in model.blocks:
            inner = block.up.forward
            adapter = nn.Linear(models.D, 4 * models.D, bias=False, device=where)
            nn.init.constant_(adapter.weight, 0.01)
            block.up.forward = lambda x, inner=inner, adapter=adapter: inner(x) + adapter(x)

    for when in ("before", "after"):
        plain = case.build().requires_grad_(False).to(where)
        replace(plain)
        expected = infer(plain, case, where)
        model = case.build().requires_grad_(False)
        vram = harness.some_vram(model, device, 0.3)
        if when == "before":
            replace(model)
        with streamed(model, device, vram):
            if when == "after":
                replace(model)
            assert_same(expected, infer(model, case, where))
        assert_same(expected, infer(model.to(where), case, where))


@pytest.mark.parametrize("how", ["no_grad", "reentrant"])
@on_some_devices
def test_streamed_trainable_weights_leave_their_slots_under_autocast(how, device):
    """Autocast keeps its casts of leaves that require gradients: slots are not shown to it as such."""
    case = CASES["stack"]
    plain, model = case.build("reentrant"), case.build("reentrant")
    plain = plain.to(place(device))

    def run(net):
        x = case.inputs(0, place(device))
        with torch.autocast(place(device).type, torch.bfloat16):
            if how == "no_grad":
                with torch.no_grad():
                    return [net(x), net(x)]
            y = net(x.requires_grad_())
        y.float().pow(2).mean().backward()
        return [y.detach(), x.grad]

    expected = run(plain)
    with streamed(
        model, device, harness.some_vram(model, device, 0.0, 2, training="stream"), training="stream"
    ):
        assert_same(expected, run(model))
