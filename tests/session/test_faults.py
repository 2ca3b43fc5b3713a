"""Failure leaves a working model: errors, interrupts, refused memory and hostile modules, wherever they strike."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import signal
import weakref
from unittest import mock

import carom
import pytest
import torch
from carom.core.device import cpu_engine, pool, simulated
from carom.core.host import arena
from carom.core.model import interpose
from carom.core.placement import block_fill, pinned_tier, placement, resident_placer, residents
from carom.core.session import carving_cache, device_weights, layout_manager, session
from carom.core.session import rule_planner as planner
from carom.core.streaming import backward, gradients, run, streamer, unit
from carom.core.streaming.runner import NextLayout
from tests_inside import inside
from tests_pairwise import pairwise
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(60)
WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.n(x))))


class Model(nn.Module):
    """``kind``: None, or use_reentrant of the checkpoint around each block."""

    def __init__(self, block=Block, count: int = 6, kind: bool | None = None) -> None:
        super().__init__()
        self.e, self.h, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), kind
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x):
        x = self.e(x)
        for block in self.blocks:
            x = block(x) if self.kind is None else checkpoint(block, x, use_reentrant=self.kind)
        return self.h(x)


class Boom(Exception):
    pass


FAULTS = {
    "exception": Boom("injected"),
    "interrupt": KeyboardInterrupt(),
    "oom": torch.OutOfMemoryError("CUDA out of memory (injected)"),
    "runtime": RuntimeError("injected"),
}
KINDS: dict[str, bool | None] = {"plain": None, "non-reentrant": False, "reentrant": True}
TRAINING = {"adapters": False, "full": True}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
training = pytest.mark.parametrize("full", TRAINING.values(), ids=TRAINING.keys())


@pytest.fixture(params=["cpu", "late"])
def device(request):
    return "cpu" if request.param == "cpu" else carom.SimulatedDevice(timing=request.param)


def pair(make=Model, trainable: bool = False, **settings):
    """A model and its twin that is never streamed."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make(**settings).requires_grad_(trainable))
    return made


def part(model: nn.Module, fraction: float) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return int(fraction * sum(t.numel() * t.element_size() for t in tensors))


def step(model: nn.Module, x=X) -> list:
    """Output, input gradient and parameter gradients of one training step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def infer(model: nn.Module, x=X):
    with torch.no_grad():
        return model(x)


def assert_equal(got: list, want: list) -> None:
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"item {index}: {'missing' if a is None else 'unexpected'}"
        assert a is None or torch.equal(a, b), f"item {index} differs"


def identities(model: nn.Module) -> list:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(t), type(t), t.dtype, t.device, t.shape, t.stride()) for name, t in tensors]


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def assert_working(model: nn.Module, twin: nn.Module, live) -> None:
    """Right results on the next steps; nothing in use, swapped in, pushed or over budget afterwards."""
    for _ in range(2):
        assert_equal(step(model), step(twin))
        assert torch.equal(infer(model), infer(twin))
    model.zero_grad(), twin.zero_grad()
    found = inside(live)
    found.end_finished_uses()
    assert not [slot for slot in found.slots if slot.users], "slots still in use"
    assert not found.units_in_modules, "slot views still stand"
    assert not found.computing, "the thread counts as in a step"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "saved-tensor hooks leaked"
    assert inside(live).held_bytes <= inside(live).capacity


def assert_restored(model: nn.Module, twin: nn.Module, before: list, live=None) -> None:
    assert identities(model) == before
    assert_same_state(model, twin)
    for module in model.modules():
        assert "forward" not in module.__dict__ and "_apply" not in module.__dict__
    assert torch.equal(infer(model), infer(twin))
    if live is not None:
        assert inside(live).pinned_bytes == 0


@contextlib.contextmanager
def failing(owner, name: str, call: int, fault: BaseException):
    """``owner.name`` raises ``fault`` at its ``call``-th call."""
    original, count = getattr(owner, name), [0]

    def wrapper(*args, **kwargs):
        count[0] += 1
        if count[0] == call:
            raise fault
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, wrapper):
        yield count


# -- the model's own code fails


def once(fault: BaseException):
    """A hook that raises when armed, once."""

    def hook(*_):
        if hook.armed:
            hook.armed = False
            raise fault

    hook.armed = False
    return hook


@pairwise(fault=FAULTS, kind=KINDS, place=["in a unit", "between units", "in the root"])
def test_a_failing_forward_leaves_a_working_session(fault, kind, place):
    device = carom.SimulatedDevice(timing="late")
    model, twin = pair(kind=kind)
    before, hook = identities(model), once(fault)
    if place == "in a unit":
        model.blocks[3].a.register_forward_pre_hook(hook)
    elif place == "between units":
        model.blocks[3].register_forward_pre_hook(hook)
    else:
        model.h.register_forward_pre_hook(hook)
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        for run in (infer, step):
            hook.armed = True
            with pytest.raises(type(fault)):
                run(model)
            assert_working(model, twin, live)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    assert_restored(model, twin, before, live)


class Bomb(torch.autograd.Function):
    fault: BaseException | None = None

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if Bomb.fault is not None:
            fault, Bomb.fault = Bomb.fault, None
            raise fault
        return gradient


@pairwise(
    fault=FAULTS,
    kind=KINDS,
    full=TRAINING,
    place=["custom function", "tensor hook", "recomputation"],
    but=lambda kind, place, **_: place == "recomputation" and kind == "plain",  # nothing is computed again
)
def test_a_failing_backward_leaves_a_working_session(fault, kind, full, place):
    device = carom.SimulatedDevice(timing="late")
    model, twin = pair(kind=kind, trainable=full)
    before, hook = identities(model), once(fault)

    def forward_hook(module, inputs, output):
        if place == "custom function":
            return Bomb.apply(output)
        if place == "tensor hook" and output.requires_grad:
            output.register_hook(hook)
        if place == "recomputation" and torch._C._current_graph_task_id() != -1:
            hook()
        return None

    handle = model.blocks[3].a.register_forward_hook(forward_hook)
    with carom.stream(
        model, device=device, vram=part(model, 0.5), training="stream" if full else None
    ) as live:
        for _ in range(2):
            hook.armed = True
            Bomb.fault = fault if place == "custom function" else None
            with pytest.raises(type(fault)):
                step(model)
            hook.armed, Bomb.fault = False, None
            assert_working(model, twin, live)
        model.zero_grad(), twin.zero_grad()
    handle.remove()
    assert_restored(model, twin, before, live)


def test_a_backward_after_a_failed_one_delivers_its_gradients(device):
    """No forward lies between: the second graph exists already when the first backward fails."""
    model, twin = pair(trainable=True)
    hook = once(Boom())
    with carom.stream(model, device=device, vram=part(model, 0.6), training="stream"):
        first, second = model(X), model(2 * X)
        first.register_hook(hook)
        hook.armed = True
        with pytest.raises(Boom):
            first.sum().backward()
        model.zero_grad()
        second.sum().backward()
        twin(2 * X).sum().backward()
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_a_failed_backward_leaves_no_gradients_for_the_next_one(device):
    model, twin = pair(trainable=True)
    hook = once(Boom())
    with carom.stream(model, device=device, vram=part(model, 0.6), training="stream") as live:
        model.blocks[0].register_forward_hook(
            lambda m, i, output: output.requires_grad and (output.register_hook(hook), None)[1] or None
        )
        hook.armed = True
        with pytest.raises(Boom):  # the gradients of the later blocks are on their way by now
            model(X).square().sum().backward()
        hook.armed = False
        assert_working(model, twin, live)


def test_an_inference_that_fails_within_a_backward_loses_no_gradient(device):
    model, twin = pair(trainable=True)
    twin(X).sum().backward()

    def hook(gradient):
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            model(torch.zeros(3, WIDTH + 1))

    with carom.stream(model, device=device, vram=part(model, 0.6), training="stream"):
        y = model.e(X)
        for index, block in enumerate(model.blocks):
            y = block(y)
            if index == 3:
                y.register_hook(hook)
        model.h(y).sum().backward()
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


# -- the engine's own parts fail


ENGINE_FAULTS = [
    ("engine", "copy_in"), ("engine", "copy_out"), ("engine", "alias"), ("engine", "record"), ("engine", "wait"),
    ("engine", "freed"), ("engine", "stream"), (run.Run, "copy_unit"), (run.Run, "issue_due"),
    (unit.StreamedUnit, "show"), (run.Run, "acquire_anew"), (run.Run, "end_finished_uses"), (backward.Backward, "take_finished_uses"),
    (pool.Pool, "enter"), (pool.Pool, "leave"), (pool.Pool, "issue"), (pool.Pool, "complete"), (pool.Pool, "fault"),
    (streamer.AccessOrder, "access"), (gradients, "accumulate"),
]  # fmt: skip


def named(parts: list[tuple]) -> dict[str, tuple]:
    return {f"{name}, again" if any(name == n for _, n in parts[:i]) else name: (owner, name)
            for i, (owner, name) in enumerate(parts)}  # fmt: skip


def engine_class(device) -> type:
    return cpu_engine.PlainEngine if device == "cpu" else simulated.SimulatedEngine


@pairwise(part_=named(ENGINE_FAULTS), call=[1, 8], kind=KINDS, full=TRAINING)
def test_an_engine_fault_during_a_step_leaks_nothing(part_, call, kind, full):
    device, (owner, name) = carom.SimulatedDevice(timing="late"), part_
    owner = engine_class(device) if owner == "engine" else owner
    model, twin = pair(kind=kind, trainable=full)
    before = identities(model)
    live = carom.stream(model, device=device, vram=part(model, 0.6), training="stream" if full else None)
    try:
        step(model)
        fault = torch.OutOfMemoryError("injected")
        with failing(owner, name, call, fault), contextlib.suppress(torch.OutOfMemoryError):
            step(model)
        del fault
        model.zero_grad()
        assert_working(model, twin, live)
    finally:
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        live.close()
    model.zero_grad(), twin.zero_grad()
    assert_restored(model, twin, before, live)


# -- attach and detach fail


ATTACH = [
    (carving_cache, "carve"), (planner, "plan_residency"), (arena.HostArena, "allocate"), (block_fill, "fill"),
    (arena.HostArena, "pin"), ("engine", "allocate"), ("engine", "alias"), ("engine", "synchronize"),
    (resident_placer.ResidentPlacer, "keep"), (resident_placer.ResidentPlacer, "adapt"), (residents, "relocate"), (residents, "replace"),
    (block_fill.BlockFill, "begin"), (pinned_tier.PinnedTier, "_finish_fill"), (streamer.Streamer, "start"), (interpose.Wrapped, "forward"),
    (interpose.Wrapped, "attribute"), (layout_manager, "Tree"), (device_weights.DeviceWeights, "account"), (layout_manager, "describe"),
]  # fmt: skip


def odd(model: nn.Module, twin: nn.Module) -> None:
    """One trainable layer with a gradient, and a parameter that cannot be streamed."""
    for one in (model, twin):
        one.h.requires_grad_(True)
        torch.manual_seed(2)
        one.blocks[0].gaps = nn.Parameter(torch.randn(64, 64)[::2, ::2], requires_grad=False)
    model.h.weight.grad = torch.ones(WIDTH, WIDTH)


@pairwise(
    part_=named(ATTACH),
    call=[1, 4],
    fault={"memory": MemoryError("injected"), "interrupt": KeyboardInterrupt()},
)
def test_a_fault_while_attaching_leaves_the_module_as_it_was(part_, call, fault):
    device, (owner, name) = carom.SimulatedDevice(), part_
    owner = engine_class(device) if owner == "engine" else owner
    model, twin = pair()
    odd(model, twin)
    before, arenas, live = identities(model), [], None
    original = arena.HostArena.__init__

    def remember(self, *args):
        arenas.append(self)
        original(self, *args)

    with mock.patch.object(arena.HostArena, "__init__", remember), failing(owner, name, call, fault) as count:
        with contextlib.suppress(MemoryError, KeyboardInterrupt):
            live = carom.stream(model, device=device, vram=part(model, 0.6))
        assert (live is None) == (count[0] >= call)
    if live is not None:
        live.close()
    assert_restored(model, twin, before)
    assert all(one.pinned_bytes == 0 for one in arenas)
    assert torch.equal(model.h.weight.grad, torch.ones(WIDTH, WIDTH))
    with carom.stream(model, device=device, vram=part(model, 0.6)):
        assert torch.equal(infer(model), infer(twin))


DETACH = [
    (session.Session, "_report"), (interpose.Wrapped, "undo"), (streamer.Streamer, "close"), ("engine", "synchronize"),
    (placement.Placement, "undo"), (residents, "relocate"), (residents, "replace"), (arena.Block, "unpin"),
]  # fmt: skip


@pairwise(
    part_=named(DETACH), call=[1, 3], fault={"exception": Boom("injected"), "interrupt": KeyboardInterrupt()}
)
def test_a_close_that_failed_can_be_finished(part_, call, fault):
    device, (owner, name) = carom.SimulatedDevice(), part_
    owner = engine_class(device) if owner == "engine" else owner
    model, twin = pair()
    odd(model, twin)
    before = identities(model)
    live = carom.stream(model, device=device, vram=part(model, 0.6))
    infer(model)
    with failing(owner, name, call, fault), contextlib.suppress(Boom, KeyboardInterrupt):
        live.close()
    live.close()
    assert_restored(model, twin, before, live)


def test_refused_pinning_is_noted_and_computes_the_same(caplog):
    model, twin = pair()
    device = carom.SimulatedDevice(refuse_pinning=True)
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        assert_working(model, twin, live)
        report = live.report()
        assert report.pinned_bytes == 0 and report.pageable_bytes > 0
    assert sum("pinning was refused" in record.message for record in caplog.records) == 1


def test_a_ram_budget_bounds_pinned_bytes():
    model, twin = pair()
    with carom.stream(model, device=carom.SimulatedDevice(), vram=part(model, 0.3), ram=40960) as live:
        assert_working(model, twin, live)
        assert 0 < live.report().pinned_peak_bytes <= 40960


# -- budgets


def test_a_new_budget_keeps_values_and_its_promise(device):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        for fraction in (0.7, 0.4, 2.0, 0.5):
            live.set_budget(vram=part(model, fraction))
            assert inside(live).held_bytes <= part(model, fraction)
            assert_working(model, twin, live)
        with pytest.raises(carom.BudgetError) as error:
            live.set_budget(vram=10)
        assert error.value.least_bytes is not None
        assert_working(model, twin, live)


def test_unstreamable_weights_over_the_budget_raise_a_budget_error(device):
    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64)[::2, ::2], requires_grad=False)

        def forward(self, x):
            return x @ self.w

    with pytest.raises(carom.BudgetError) as error:
        carom.stream(Gaps(), device=device, vram=100)
    assert error.value.least_bytes is not None


@training
def test_backward_of_a_graph_older_than_the_session_is_a_clear_error(device, full):
    model, twin = pair(trainable=full)
    before = identities(model)
    live = carom.stream(model, device=device, vram=part(model, 0.6), training="stream" if full else None)
    loss = model(X.clone().requires_grad_()).sum()
    live.close()
    with pytest.raises(carom.CaromError, match="closed"):
        loss.backward()
    model.zero_grad()
    assert_restored(model, twin, before, live)


# -- forwards that write, replace, keep or return weights


class Scales(Block):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.mul_(0.9)
        return super().forward(x)


class Caches(Block):
    """Writes into a buffer that is large enough to be streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(80 << 10))
        self.calls = 0

    def forward(self, x):
        self.cache[self.calls] = x.sum()
        self.calls += 1
        return super().forward(x) + self.cache.sum()


class Replaces(Block):
    def forward(self, x):
        self.a.weight = nn.Parameter(self.a.weight * 0.9, requires_grad=False)
        return super().forward(x)


class SetsData(Block):
    def forward(self, x):
        self.a.weight.data = self.a.weight.data * 0.9
        return super().forward(x)


class ReplacesBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(80 << 10))

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x) + self.seen[0]


@pytest.mark.parametrize("block", [Scales, Caches, Replaces, SetsData, ReplacesBuffer])
def test_what_a_forward_writes_stays_written(device, block):
    model, twin = pair(block=block)
    with carom.stream(model, device=device, vram=part(model, 0.8)):
        for _ in range(4):
            assert torch.equal(infer(model), infer(twin))
    assert_same_state(model, twin)
    assert torch.equal(infer(model), infer(twin))


@kinds
def test_a_plain_run_writes_nothing(device, kind):
    model, twin = pair(kind=kind)
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        arrangement, streamed = inside(live).arrangement, inside(live).streamed
        for _ in range(3):
            infer(model)
            step(model)
            assert inside(live).streamer.next_layout == NextLayout()
        assert inside(live).arrangement is arrangement and inside(live).streamed == streamed
    assert_same_state(model, twin)


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, None


class Custom(Block):
    def forward(self, x):
        return x + self.b(F.gelu(KeepsOnContext.apply(self.n(x), self.a.weight)))


@kinds
def test_a_weight_kept_on_an_autograd_context_is_right_or_refused(device, kind):
    """Without save_for_backward nothing can be fetched again: the slot stays, or BudgetError says why not."""
    model, twin = pair(block=Custom, kind=kind)
    with carom.stream(model, device=device, vram=part(model, 0.7)):
        want = step(twin)
        for _ in range(3):
            try:
                got = step(model)
            except carom.BudgetError:
                continue
            assert_equal(got, want)


class Returns(Block):
    kept: torch.Tensor | None = None

    def forward(self, x):
        Returns.kept = self.take()
        return super().forward(x)


class ReturnsWeight(Returns):
    def take(self):
        return self.a.weight


class ReturnsSlice(Returns):
    def take(self):
        return self.a.weight.t()[:3]


class ReturnsExpanded(Returns):
    def take(self):
        return self.b.bias.expand(4, WIDTH)


@pytest.mark.parametrize("block", [ReturnsWeight, ReturnsSlice, ReturnsExpanded])
def test_a_view_of_a_weight_kept_across_steps_keeps_its_bytes(device, block):
    model, twin = pair(block=block)
    with carom.stream(model, device=device, vram=part(model, 0.7)):
        infer(twin)
        want = Returns.kept.clone()
        kept = []
        for _ in range(3):
            infer(model)
            kept.append(Returns.kept)
            assert all(torch.equal(view, want) for view in kept)
        # The host's copy changes: what was handed out is not given to another unit meanwhile.
        model.blocks[-1].a.weight.data.zero_()
        model.blocks[-1].b.bias.data.zero_()
        infer(model)
        for view in kept:
            assert torch.equal(view, want) or not view.any()
    Returns.kept = None


def test_a_state_dict_taken_inside_a_forward_has_true_values(device):
    model, twin = pair()
    taken = []
    model.blocks[2].a.register_forward_hook(
        lambda *_: taken.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    )
    with carom.stream(model, device=device, vram=part(model, 0.5)):
        for _ in range(3):
            infer(model)
    for state in taken:
        for name, tensor in twin.state_dict().items():
            assert torch.equal(state[name], tensor), name


def test_weights_loaded_between_steps_race_with_nothing(device):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, 0.5)):
        for scale in (1.0, 0.5, 2.0):
            state = {name: tensor * scale for name, tensor in twin.state_dict().items()}
            model.load_state_dict(state), twin.load_state_dict(state)
            assert_equal(step(model), step(twin))
            assert torch.equal(infer(model), infer(twin))


# -- parameters of every kind


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


ODD = {
    "empty": (lambda: torch.randn(0, 32), lambda w, x: w.sum()),
    "scalar": (lambda: torch.tensor(3.0), lambda w, x: x * w),
    "transposed": (lambda: torch.randn(32, 8).t(), lambda w, x: F.linear(x, w.t() @ w)),
    "expanded": (lambda: torch.randn(32, 1).expand(32, 32), lambda w, x: x @ w),
    "gaps": (lambda: torch.randn(64, 64)[::2, ::2], lambda w, x: x @ w),
    "channels last": (
        lambda: torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last),
        lambda w, x: F.conv2d(x.view(4, 4, 2, 4), w, padding=1).sum(),
    ),
    "complex": (lambda: torch.randn(32, 32, dtype=torch.complex64), lambda w, x: (x.to(w.dtype) @ w).real),
    "conjugate": (
        lambda: torch.randn(32, 32, dtype=torch.complex64).conj(),
        lambda w, x: (x.to(w.dtype) @ w).imag,
    ),
    "negated view": (lambda: torch._neg_view(torch.randn(32, 32)), lambda w, x: x @ w),
    "int8": (lambda: torch.randint(-9, 9, (32, 32), dtype=torch.int8), lambda w, x: x @ w.float()),
    "bool": (lambda: torch.rand(32, 32) > 0.5, lambda w, x: x.masked_fill(w[:4], 0.0)),
    "float8": (lambda: torch.randn(32, 32).to(torch.float8_e4m3fn), lambda w, x: x @ w.float()),
    "bfloat16": (lambda: torch.randn(32, 32).bfloat16(), lambda w, x: x @ w.float()),
}


@pytest.mark.parametrize(("make", "use"), ODD.values(), ids=ODD.keys())
def test_parameters_of_every_kind_compute_the_same(device, make, use):
    class Odd(Block):
        def __init__(self) -> None:
            super().__init__()
            self.w = frozen(make())

        def forward(self, x):
            return super().forward(x) + use(self.w, x)

    model, twin = pair(block=Odd)
    before = identities(model)
    with carom.stream(model, device=device, vram=part(model, 0.6)):
        for _ in range(2):
            assert_equal(step(model), step(twin))
            assert torch.equal(infer(model), infer(twin))
    assert identities(model) == before
    assert torch.equal(infer(model), infer(twin))


def test_parameters_that_share_memory_share_it_again_after_close(device):
    model, twin = pair()
    bases = []
    for one in (model, twin):
        torch.manual_seed(3)
        bases.append(torch.randn(6, 64, WIDTH))
        for index, block in enumerate(one.blocks):
            block.a.weight = frozen(bases[-1][index])
    with carom.stream(model, device=device, vram=part(model, 0.5)):
        assert torch.equal(infer(model), infer(twin))
    for base in bases:
        base[2].zero_()
    assert torch.equal(infer(model), infer(twin))


NORMS = {
    "weight norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral norm": torch.nn.utils.parametrizations.spectral_norm,
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
}


@training
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_parametrized_weights_compute_and_train_the_same(device, norm, full):
    model, twin = pair()
    for one in (model, twin):
        torch.manual_seed(4)
        for block in one.blocks:
            norm(block.a)
        one.requires_grad_(full)
    with carom.stream(model, device=device, vram=part(model, 0.8), training="stream" if full else None):
        for _ in range(3):
            assert_equal(step(model), step(twin))
            assert torch.equal(infer(model), infer(twin))
    assert_same_state(model, twin)


def test_weights_unfrozen_after_stream_get_their_gradients(device):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, 0.5)):
        infer(model)
        for one in (model, twin):
            one.blocks[2].a.weight.requires_grad_(True)
            one.h.bias.requires_grad = True
        for _ in range(2):
            assert_equal(step(model), step(twin))
        model.requires_grad_(True), twin.requires_grad_(True)
        assert_equal(step(model), step(twin))
        model.requires_grad_(False), twin.requires_grad_(False)
        assert_equal(step(model), step(twin))


def test_an_optimizer_survives_sessions_that_come_and_go(device):
    model, twin = pair(trainable=True)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin)]

    def both() -> None:
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            step(one)
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
        assert_same_state(model, twin)

    for fraction, mode in ((0.6, "stream"), (0.4, None), (1.5, None), (0.6, "stream")):
        with carom.stream(model, device=device, vram=part(model, fraction), training=mode):
            both()
            both()
        both()


# -- life of sessions and copies of modules


def test_a_module_dropped_with_its_session_is_freed(device):
    model, _ = pair()
    live = carom.stream(model, device=device, vram=part(model, 0.5))
    infer(model)
    memory, module = inside(live).arena, weakref.ref(model)
    del live, model
    gc.collect()
    assert module() is None
    assert memory.pinned_bytes == 0


def test_a_module_works_on_when_its_session_is_dropped(device):
    model, twin = pair()
    carom.stream(model, device=device, vram=part(model, 0.5))
    gc.collect()
    assert_equal(step(model), step(twin))


def test_a_closed_session_keeps_no_memory(device):
    model, _ = pair(trainable=True)
    live = carom.stream(model, device=device, vram=part(model, 0.6), training="stream")
    step(model)
    memory, region, inner = (
        inside(live).arena,
        weakref.ref(inside(live).region_memory),
        weakref.ref(inside(live).streamer),
    )
    live.close()
    assert region() is None
    model.zero_grad()
    del live
    gc.collect()
    assert inner() is None and memory.pinned_bytes == 0


def test_copies_of_an_attached_module_are_plain_and_independent(device):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, 0.5)):
        infer(model)
        whole, block = copy.deepcopy(model), copy.deepcopy(model.blocks[3])
        assert all(type(p) is nn.Parameter for p in [*whole.parameters(), *block.parameters()])
        assert torch.equal(infer(whole), infer(twin)) and torch.equal(infer(block), infer(twin.blocks[3]))
        with carom.stream(whole, device=device, vram=part(model, 0.5)):
            assert torch.equal(infer(whole), infer(twin)) and torch.equal(infer(model), infer(twin))
    assert torch.equal(infer(whole), infer(twin))


def test_saving_an_attached_module_keeps_true_values_or_says_what_to_do(device):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, 0.5)):
        infer(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        assert file.tell() < 2 * part(model, 1)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for name, tensor in twin.state_dict().items():
            assert type(loaded[name]) is torch.Tensor and torch.equal(loaded[name], tensor)
        with pytest.raises(carom.UnsupportedError, match="state_dict"):
            torch.save(model, io.BytesIO())
        assert type(pickle.loads(pickle.dumps(model.blocks[0].a.weight))) is nn.Parameter


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_may_run_and_close_the_module(device):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own pool does not survive a fork
    try:
        model, twin = pair()
        live = carom.stream(model, device=device, vram=part(model, 0.5))
        want = infer(twin)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            right = False
            with contextlib.suppress(BaseException):
                right = torch.equal(infer(model), want)
                live.close()
                right = right and torch.equal(infer(model), want)
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert_working(model, twin, live)
        live.close()
    finally:
        torch.set_num_threads(threads)


# -- two sessions, parts and wholes


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = Model(), Model()

    def forward(self, x):
        return self.y(self.x(x))


@training
def test_two_sessions_in_one_model_work_side_by_side(device, full):
    model, twin = pair(make=Two, trainable=full)
    before, mode = identities(model), "stream" if full else None
    first = carom.stream(model.x, device=device, vram=part(model.x, 0.6), training=mode)
    second = carom.stream(model.y, device=device, vram=part(model.y, 0.5), training=mode)
    for _ in range(2):
        assert_equal(step(model), step(twin))
        assert torch.equal(infer(model), infer(twin))
    first.close()
    assert_equal(step(model), step(twin))
    second.close()
    model.zero_grad()
    assert_restored(model, twin, before, first)


@pytest.mark.parametrize("fraction", [0.5, 3.0], ids=["streamed", "all resident"])
def test_a_session_inside_a_session_is_refused(device, fraction):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, fraction)):
        for inner in (model, model.blocks, model.blocks[1]):
            with pytest.raises(carom.UnsupportedError, match="close that session first"):
                carom.stream(inner, device=device, vram=1 << 20)
        assert torch.equal(infer(model), infer(twin))
    live = carom.stream(model.blocks[1], device=device, vram=1 << 20)
    with pytest.raises(carom.UnsupportedError, match="close that session first"):
        carom.stream(model, device=device, vram=1 << 20)
    live.close()


def test_a_part_shared_by_two_models_works_from_both(device):
    class Holder(nn.Module):
        def __init__(self, shared) -> None:
            super().__init__()
            self.shared, self.o = shared, nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.o(self.shared(x))

    shared = pair()[0]
    one, other = Holder(shared).requires_grad_(False), Holder(shared).requires_grad_(False)
    twins = copy.deepcopy(one), copy.deepcopy(other)
    with carom.stream(one, device=device, vram=part(one, 0.5)):
        for _ in range(2):
            for model, twin in zip((one, other), twins, strict=True):
                assert torch.equal(infer(model), infer(twin))
                assert_equal(step(model), step(twin))
        with pytest.raises(carom.UnsupportedError, match="close that session first"):
            carom.stream(other, device=device, vram=part(one, 0.5))
    with carom.stream(other, device=device, vram=part(one, 0.5)):
        assert torch.equal(infer(one), infer(twins[0])) and torch.equal(infer(other), infer(twins[1]))


# -- re-entrant calls and generators


class CallsItself(Block):
    depth = 0

    def forward(self, x):
        self.depth += 1
        try:
            y = super().forward(x)
            return y + self(y) * 0.1 if self.depth < 3 else y
        finally:
            self.depth -= 1


class CallsRoot(Block):
    root: tuple = ()
    depth = 0

    def forward(self, x):
        y = super().forward(x)
        if self.root and CallsRoot.depth < 2:
            CallsRoot.depth += 1
            try:
                y = y + self.root[0](y) * 0.1
            finally:
                CallsRoot.depth -= 1
        return y


def test_a_block_that_calls_itself_computes_the_same(device):
    model, twin = pair(block=CallsItself)
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        assert_working(model, twin, live)


def test_a_block_that_calls_the_root_computes_the_same(device):
    model, twin = pair(block=CallsRoot, count=4)
    for one in (model, twin):
        one.blocks[1].root = (one,)
    with carom.stream(model, device=device, vram=part(model, 0.9)) as live:
        arrangement = inside(live).arrangement
        assert_working(model, twin, live)
        assert inside(live).arrangement is arrangement, "laid out anew for nothing"


def test_generators_abandoned_half_way_leave_a_working_session(device):
    class Steps(Block):
        def forward(self, x):
            yield self.n(x)
            yield Block.forward(self, x)

    class Walk(Model):
        def forward(self, x):
            x = self.e(x)
            for block in self.blocks:
                *_, x = block(x)
            return self.h(x)

    model, twin = pair(make=Walk, block=Steps)
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        for _ in range(2):
            half_way = model.blocks[1](X)
            next(half_way)
            del half_way
            assert_working(model, twin, live)


# -- other machinery of torch


@pairwise(
    device={"cpu": "cpu", "late": carom.SimulatedDevice(timing="late")},
    full=TRAINING,
    inner={"inner non-reentrant": False, "inner reentrant": True},
    kind=KINDS,
)
def test_checkpointing_inside_a_block_computes_the_same(device, kind, inner, full):
    class Inside(Block):
        def forward(self, x):
            return x + self.b(checkpoint(lambda y: F.gelu(self.a(self.n(y))), x, use_reentrant=inner))

    model, twin = pair(block=Inside, kind=kind, trainable=full)
    with carom.stream(
        model, device=device, vram=part(model, 0.6), training="stream" if full else None
    ) as live:
        assert_working(model, twin, live)


def test_hooks_of_every_kind_see_what_they_would_see(device):
    model, twin = pair()
    logs: list[list] = []
    for one in (model, twin):
        log: list = []
        logs.append(log)
        for name, module in one.named_modules():
            module.register_forward_pre_hook(lambda m, i, n=name, log=log: log.append(("pre", n)))
            module.register_forward_hook(
                lambda m, i, o, n=name, log=log: log.append((n, o.detach().sum().item()))
            )
            module.register_full_backward_hook(
                lambda m, i, o, n=name, log=log: log.append(("back", n, o[0].sum().item()))
            )
            module.register_full_backward_pre_hook(lambda m, o, n=name, log=log: log.append(("before", n)))
            module.register_state_dict_pre_hook(lambda m, p, k, n=name, log=log: log.append(("state", n)))
            module.register_load_state_dict_post_hook(lambda m, k, n=name, log=log: log.append(("load", n)))
        for block in one.blocks:
            block.register_forward_pre_hook(lambda m, i: (i[0] + m.a.weight.sum(),))
            block.a.register_full_backward_hook(lambda m, i, o: (i[0] * m.weight.mean(),))
    with carom.stream(model, device=device, vram=part(model, 0.5)):
        for _ in range(3):
            assert_equal(step(model), step(twin))
            model.load_state_dict(model.state_dict()), twin.load_state_dict(twin.state_dict())
            assert logs[0] == logs[1]


def test_saved_tensors_moved_to_the_host_compute_the_same(device):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            y, z = model(a), twin(b)
        y.sum().backward(), z.sum().backward()
        assert torch.equal(a.grad, b.grad)
        assert_working(model, twin, live)


def test_disabled_saved_tensor_hooks_are_a_clear_error_and_leak_nothing(device):
    model, twin = pair()
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        for module in (model, model.blocks[1]):
            disabled = torch.autograd.graph.disable_saved_tensors_hooks("not here")
            with pytest.raises((RuntimeError, carom.CaromError)), disabled:
                module(X.clone().requires_grad_())
            assert_working(model, twin, live)


def clear_or_right(run, want) -> None:
    """``run()`` gives ``want``, or says in Carom's words that it cannot."""
    with contextlib.suppress(carom.UnsupportedError):
        got = run()
        assert torch.equal(got, want)


def test_functorch_is_right_or_refused(device):
    model, twin = pair()
    batch = torch.randn(3, *X.shape)
    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        with torch.no_grad():
            clear_or_right(lambda: torch.vmap(model)(batch), torch.vmap(twin)(batch))
        values = {name: p.detach() * 2 for name, p in twin.named_parameters()}
        for some in (values, {"blocks.3.a.weight": values["blocks.3.a.weight"]}):
            clear_or_right(
                lambda some=some: torch.func.functional_call(model, some, (X,)),
                torch.func.functional_call(twin, some, (X,)),
            )
        gradient = torch.func.grad(lambda x: twin(x).sum())(X)
        clear_or_right(lambda: torch.func.grad(lambda x: model(x).sum())(X), gradient)
        tangent = torch.func.jvp(twin, (X,), (X,))[1]
        clear_or_right(lambda: torch.func.jvp(model, (X,), (X,))[1], tangent)
        assert_working(model, twin, live)


def test_device_contexts_and_default_dtypes_change_nothing(device):
    model, twin = pair(trainable=True)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            live = carom.stream(model, device=device, vram=part(model, 0.6), training="stream")
            step(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_working(model, twin, live)
    live.close()


def test_inference_mode_around_everything_makes_no_inference_weights(device):
    model, twin = pair()
    with torch.inference_mode():
        live = carom.stream(model, device=device, vram=part(model, 0.5))
        assert torch.equal(model(X), twin(X))
    assert_working(model, twin, live)
    with torch.inference_mode():
        live.close()
    assert not any(p.is_inference() for p in model.parameters())
    model.requires_grad_(True), twin.requires_grad_(True)
    assert_equal(step(model), step(twin))


def test_inference_weights_are_refused_by_name(device):
    with torch.inference_mode():
        model, twin = pair()
    with pytest.raises(carom.UnsupportedError, match=r"e\.weight"):
        carom.stream(model, device=device, vram=part(model, 0.5))
    with torch.inference_mode():
        assert torch.equal(model(X), twin(X))


@pairwise(device={"cpu": "cpu", "late": carom.SimulatedDevice(timing="late")}, full=TRAINING, kind=KINDS)
def test_autocast_with_its_cache_computes_the_same(device, kind, full):
    model, twin = pair(kind=kind, trainable=full)
    with carom.stream(
        model, device=device, vram=part(model, 0.6), training="stream" if full else None
    ) as live:
        for cache in (True, False):
            results = []
            for one in (model, twin):
                one.zero_grad()
                x = X.clone().requires_grad_()
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                    with torch.no_grad():
                        first = one(x)
                    second = one(x)
                second.float().square().sum().backward()
                results.append([first, second.detach(), x.grad, *[p.grad for p in one.parameters()]])
            assert_equal(*results)
        assert_working(model, twin, live)


def test_replicas_as_data_parallel_makes_them_compute_the_same(device):
    model, twin = pair()

    def replicate(module):
        replica = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            replica._modules[name] = replicate(child)
        replica._parameters = dict(module._parameters)
        return replica

    with carom.stream(model, device=device, vram=part(model, 0.5)) as live:
        assert torch.equal(infer(replicate(model)), infer(twin))
        assert torch.equal(infer(nn.DataParallel(model)), infer(twin))
        assert_working(model, twin, live)
