"""Law 1 for whoever uses autograd's own interface with streamed trainable weights: the same gradients, or a typed refusal."""

from __future__ import annotations

import contextlib
import os

import carom
import pytest
import torch
from carom.core.common.errors import UnsupportedError
from carom.core.device.simulated import SimulatedEngine
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

WIDTH = 16
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
devices = pytest.mark.parametrize(
    "device", ["cpu", carom.SimulatedDevice(timing="late"), carom.SimulatedDevice(seed=2, timing="random")]
)


def layers(depth: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])


def attach(model: nn.Module, device="cpu", share: float = 0.4, **options) -> carom.Session:
    total = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    options = {"training": "stream", "granularity": "layer", **options}
    session = carom.stream(model, device=device, vram=int(share * total), **options)
    assert session.report().slot_bytes > 0, "nothing streams: the test shows nothing"
    return session


def gradients(model: nn.Module) -> list:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(one: list, other: list) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@devices
def test_backward_with_inputs_gives_gradients_to_these_parameters_alone(device):
    plain, model = layers(), layers()

    def run(model: nn.Module) -> None:
        chosen = [model[1].weight, model[3].bias]
        for _ in range(2):
            model(X).square().sum().backward(inputs=chosen)

    run(plain)
    with attach(model, device):
        run(model)
        same(gradients(plain), gradients(model))
        assert sum(g is not None for g in gradients(model)) == 2


def test_grad_with_respect_to_a_streamed_parameter_is_refused_and_says_what_to_do():
    model = layers()
    with attach(model):
        loss = model(X).sum()
        for allow_unused in (False, True):
            with pytest.raises(carom.UnsupportedError, match=r"training='resident'"):
                torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
        with pytest.raises(carom.UnsupportedError, match="0.weight"):
            torch.autograd.grad(loss, model[0].weight)


def test_grad_within_a_forward_is_refused_too():
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layers(x)
            return y + torch.autograd.grad(y.sum(), self.layers[2].weight)[0].sum()

    model = Penalty()
    with attach(model), pytest.raises(carom.UnsupportedError, match="layers.2.weight"):
        model(X)


TRANSFORMS = {
    "grad": lambda layer, x: torch.func.grad(lambda y: layer(y).sum())(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x)[1](x)[0],
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,))[1],
    "make_fx": lambda layer, x: make_fx(layer)(x)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_a_unit_within_a_forward_is_refused_and_says_what_to_do(name):
    class Transforming(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, x):
            for layer in self.layers:
                x = TRANSFORMS[name](layer, x)
            return x

    model = Transforming().requires_grad_(False)
    with attach(model):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="or close the session|Close the session"):
                model(X)


@pytest.mark.parametrize("find_unused", [False, True])
def test_data_parallel_over_streamed_trainable_weights_is_refused(find_unused):
    distributed = pytest.importorskip("torch.distributed")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getpid() % 400))
    distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        model = layers()
        with attach(model) as session:
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused)
            with pytest.raises(carom.UnsupportedError, match="DistributedDataParallel"):
                wrapped(X)
            session.report()
            model(X).sum().backward()  # the module itself goes on working
        del wrapped
    finally:
        distributed.destroy_process_group()


class Twice(nn.Module):
    """Each weight is used twice in a run of its block, and each block runs twice (as in diffusers' AutoencoderKLMagvit)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.tanh(x @ self.weight) @ self.weight)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


@devices
def test_gradients_of_a_weight_that_is_used_often_are_summed_in_the_same_order(device):
    plain, model = Twice(), Twice()
    with attach(model, device):
        for step in range(3):
            for one in (plain, model):
                (one(X) + one(X * 2)).square().sum().backward()
            same(gradients(plain), gradients(model))
            if step == 1:
                for parameter in (*plain.parameters(), *model.parameters()):
                    parameter.grad = None


def test_gradients_that_somebody_keeps_are_theirs():
    """Methods for several tasks keep each task's gradients."""
    plain, model = layers(), layers()

    def run(model: nn.Module) -> list:
        kept = []
        for task in range(4):
            model(X * (task + 1)).square().sum().backward()
            kept += [p.grad if task % 2 else p.grad.view(-1) for p in model.parameters()]
            for p in model.parameters():
                p.grad = None
        return kept

    with attach(model):
        same(run(plain), run(model))


@devices
def test_hooks_of_parameters_run_once_a_backward_with_the_gradient(device):
    def run(model: nn.Module, around=None) -> list:
        seen: list = []
        model[0].weight.register_hook(lambda g: seen.append(("before", g.clone())) or g * 2)
        gone = model[1].weight.register_hook(lambda g: seen.append(("removed", g.clone())))
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad.clone())))
        session = attach(model, device) if around else None
        model[3].weight.register_hook(lambda g: seen.append(("while", g.clone())))
        kept = model[4].weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(("there", p.grad.clone()))
        )
        for step in range(3):
            model(X).square().sum().backward()
            if step == 0:
                gone.remove()
                kept.remove()
        if session is not None:
            session.close()
        model(X).square().sum().backward()  # after the session they are called by autograd again
        return sorted(((name, g.sum().item()) for name, g in seen), key=str) + gradients(model)

    expected, found = run(layers()), run(layers(), around=True)
    assert [e for e in expected if isinstance(e, tuple)] == [f for f in found if isinstance(f, tuple)]
    same(expected[-10:], found[-10:])


def test_functional_call_uses_the_weights_that_it_is_given():
    plain, model = layers(), layers()
    other = torch.full((WIDTH, WIDTH), 0.1, requires_grad=True)

    def run(model: nn.Module) -> list:
        y = torch.func.functional_call(model, {"1.weight": other}, (X,)).square().sum()
        return [y, *torch.autograd.grad(y, other), model(X)]

    with attach(model):
        same(run(plain), run(model))
        assert type(other) is torch.Tensor


def test_attributes_of_a_parameter_are_seen_within_its_modules_forward():
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.weight, nn.Parameter)
            return nn.functional.linear(x, self.weight * getattr(self.weight, "scale", 1.0), self.bias)

    def make(train: bool) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*[Scaled(WIDTH, WIDTH) for _ in range(4)]).requires_grad_(train)
        for layer in model:
            layer.weight.scale = 3.0
        return model

    for train in (False, True):
        model = make(train)
        with attach(model, training="stream" if train else None):
            assert torch.equal(model(X), make(train)(X))


def test_what_replaces_a_weights_memory_between_steps_is_seen_or_refused():
    plain, model = layers(), layers()
    with torch.no_grad(), attach(model) as session:
        for one in (plain, model):
            one(X)
            one[1].weight.set_(torch.full((WIDTH, WIDTH), 0.1))  # as parametrize assigns
            one[2].weight.detach().numpy()[:] = 0.2
            one[3].weight.data.fill_(0.3)
            one[0].bias.data = torch.ones(WIDTH)
        assert torch.equal(plain(X), model(X))
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(model[1].weight, nn.Parameter(torch.zeros(WIDTH, WIDTH)))
        assert torch.equal(session.read("1.weight"), plain[1].weight)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_data_that_a_graph_still_needs_is_not_replaced(codec):
    plain = layers().bfloat16().requires_grad_(False)
    model = layers().bfloat16().requires_grad_(False)
    x = X.bfloat16().requires_grad_(True)
    new = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    with attach(model, carom.SimulatedDevice(), training=None, codec=codec, share=0.6):
        loss = model(x).float().square().sum()
        with pytest.raises(carom.UnsupportedError, match="backward"):
            model[1].weight.data = new
        loss.backward()
        found, x.grad = x.grad, None
        plain(x).float().square().sum().backward()
        assert torch.equal(found, x.grad)
        del loss
        plain[1].weight.data = new
        model[1].weight.data = new
        assert torch.equal(plain(x), model(x))


def test_storage_of_a_slot_that_is_kept_is_not_overwritten():
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__dict__["storage"] = self.weight.untyped_storage()
            self.__dict__["offset"] = self.weight.data_ptr() - self.storage.data_ptr()
            return super().forward(x)

    torch.manual_seed(0)
    kinds = [nn.Linear, nn.Linear, Keeps, nn.Linear, nn.Linear, nn.Linear]
    model = nn.Sequential(*[kind(WIDTH, WIDTH) for kind in kinds]).requires_grad_(False)
    layer, weight = model[2], model[2].weight.detach().clone()
    with attach(model, carom.SimulatedDevice(timing="early"), share=0.6, training=None), torch.no_grad():
        for _ in range(2):
            model(X)
            found = torch.empty(0).set_(layer.storage, layer.offset // 4, (WIDTH, WIDTH))
            assert torch.equal(found, weight)


@pytest.mark.parametrize("failed", [False, True])
def test_gradients_leave_the_device_as_they_come_in_every_step(failed, monkeypatch):
    """Autograd runs newer nodes first: one that is kept from step to step would run last, and all gradients wait for it."""
    model, sent, seen = layers(), [], []
    copy_out = SimulatedEngine.copy_out

    def noted(self, *args, **more):
        sent.append(1)
        return copy_out(self, *args, **more)

    def last(gradient):
        seen.append(len(sent))
        if failed:
            raise RuntimeError("failed")

    monkeypatch.setattr(SimulatedEngine, "copy_out", noted)
    with attach(model, carom.SimulatedDevice()):
        for _ in range(4):
            sent.clear()
            x = X.clone().requires_grad_()
            x.register_hook(last)  # of the backward's last node
            with pytest.raises(RuntimeError, match="failed") if failed else contextlib.nullcontext():
                model(x).square().sum().backward()
    assert min(seen) >= 2 * (len(model) - 1), (
        f"gradients that had left when the backward was at its end: {seen}"
    )
