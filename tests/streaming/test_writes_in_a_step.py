"""Law 1: what a model writes to a streamed weight within a step, from wherever it writes, is what a plain run writes."""

from __future__ import annotations

from collections.abc import Callable

import carom
import pytest
import torch
from torch import nn

WIDTH = 16
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Parent(nn.Module):
    """Calls ``write(model, index)`` before each block runs."""

    def __init__(self, write: Callable, train: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.targets = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.requires_grad_(train)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            self.write(self, index)
            x = torch.tanh(block(x)) + self.targets[index](x)
        return x


def in_place(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable:
    def write_both(model: Parent, index: int) -> None:
        with torch.no_grad():
            for one, other in zip(
                model.targets[index].parameters(), model.blocks[index].parameters(), strict=True
            ):
                write(one, other)

    return write_both


def reset(model: Parent, index: int) -> None:
    torch.manual_seed(index)
    model.targets[index].reset_parameters()


def load(model: Parent, index: int) -> None:
    fresh = {"weight": torch.full((WIDTH, WIDTH), 0.1 * index), "bias": torch.zeros(WIDTH)}
    model.targets[index].load_state_dict(fresh)


def load_other(model: Parent, index: int) -> None:
    model.targets[index].load_state_dict(model.blocks[index].state_dict())


def all_at_once(model: Parent, index: int) -> None:
    """BYOL's target network."""
    with torch.no_grad():
        torch._foreach_mul_(list(model.targets.parameters()), 0.9)
        torch._foreach_add_(list(model.targets.parameters()), list(model.blocks.parameters()), alpha=0.1)


def replace_data(model: Parent, index: int) -> None:
    """MoCo's key encoder."""
    for one, other in zip(model.targets[index].parameters(), model.blocks[index].parameters(), strict=True):
        one.data = one.data * 0.9 + other.data * 0.1


def row(model: Parent, index: int) -> None:
    with torch.no_grad():
        model.targets[index].weight[index] = 1.0


def kept_view(model: Parent, index: int) -> None:
    view = model.targets[index].weight.detach()
    view.mul_(0.5)
    view[0].add_(1.0)


def through_out(model: Parent, index: int) -> None:
    with torch.no_grad():
        weight = model.targets[index].weight
        torch.mul(weight, 0.5, out=weight)


WRITES = {
    "mul_": in_place(lambda one, other: one.mul_(0.5)),
    "add_": in_place(lambda one, other: one.add_(other, alpha=0.5)),
    "copy_": in_place(lambda one, other: one.copy_(other)),
    "lerp_": in_place(lambda one, other: one.lerp_(other, 0.25)),
    "clamp_": in_place(lambda one, other: one.clamp_(-0.1, 0.1)),
    "zero_": in_place(lambda one, other: one.zero_()),
    "operator": in_place(lambda one, other: one.__imul__(0.5)),
    ".data.mul_": in_place(lambda one, other: one.data.mul_(0.5)),
    ".data.add_": in_place(lambda one, other: one.data.add_(other.data)),
    ".data.copy_": in_place(lambda one, other: one.data.copy_(other.data)),
    ".data[0]": in_place(lambda one, other: one.data[0].fill_(1.0)),
    "reset_parameters": reset,
    "load_state_dict": load,
    "load_state_dict of another": load_other,
    "_foreach": all_at_once,
    ".data =": replace_data,
    "a row": row,
    "a kept view": kept_view,
    "out=": through_out,
}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def outputs(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(7)
    with torch.no_grad():
        return [model(X).clone() for _ in range(steps)]


def compare(make: Callable[[], nn.Module], run: Callable = outputs, share: float = 0.4, **options) -> None:
    """``run`` gives the same with a model plain and streamed; so are its values, while attached and after."""
    plain, model = make(), make()
    expected, after = run(plain), values(plain)
    total = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    with carom.stream(model, vram=int(share * total), **options) as session:
        assert session.report().slot_bytes > 0, "nothing streams: the test shows nothing"
        found = run(model)
        same(after, {name: session.read(name).clone() for name in after})
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    same(after, values(model))


@pytest.mark.parametrize("write", WRITES)
def test_what_the_parent_writes_within_its_forward_lasts(write):
    compare(lambda: Parent(WRITES[write]), device=carom.SimulatedDevice(timing="late"), granularity="layer")


@pytest.mark.parametrize("write", ["mul_", ".data.mul_", "_foreach", "load_state_dict"])
def test_what_the_parent_writes_on_the_cpu_lasts(write):
    compare(lambda: Parent(WRITES[write]), device="cpu")


def test_what_is_written_to_packed_weights_lasts():
    compare(lambda: Parent(WRITES["mul_"]).bfloat16(), run=lambda m: [m(X.bfloat16()) for _ in range(2)],
            device=carom.SimulatedDevice(timing="random", seed=3), codec="lossless", granularity="layer")  # fmt: skip


@pytest.mark.parametrize("write", ["mul_", ".data.mul_", "copy_"])
def test_what_hooks_write_before_and_after_a_forward_lasts(write):
    def make() -> nn.Module:
        model = Parent(lambda model, index: None)
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, index=index: WRITES[write](model, index))
            block.register_forward_hook(lambda *_, index=index: WRITES[write](model, index))
        return model

    compare(make, device=carom.SimulatedDevice(timing="random", seed=1), granularity="layer")


@pytest.mark.parametrize("write", ["mul_", "add_", ".data.mul_"])
def test_what_hooks_write_within_a_backward_lasts(write):
    def make() -> nn.Module:
        model = Parent(lambda model, index: None)
        for index, block in enumerate(model.blocks[:-1]):
            # The target after this one: its backward is over, so no gradient needs what is written.
            block.register_full_backward_hook(lambda *_, index=index: WRITES[write](model, index + 1))
        return model

    def run(model: nn.Module) -> list[torch.Tensor]:
        gradients = []
        for _ in range(3):
            x = X.clone().requires_grad_(True)
            model(x).sum().backward()
            gradients.append(x.grad)
        return gradients

    compare(make, run, device=carom.SimulatedDevice(timing="late"), granularity="layer")


def test_a_view_that_outlives_the_step_is_written_back_too():
    kept = []

    def keep(model: Parent, index: int) -> None:
        if index == 0:
            kept[:] = [model.targets[3].weight.detach()]
            kept[0].mul_(0.5)

    def run(model: nn.Module) -> list[torch.Tensor]:
        found = outputs(model, 2)
        kept.clear()
        return found

    compare(lambda: Parent(keep), run, device=carom.SimulatedDevice(), granularity="layer", share=0.5)


def test_weights_from_a_file_that_are_written_are_refused(tmp_path):
    from safetensors.torch import save_file

    model = Parent(WRITES["mul_"])
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    with torch.device("meta"):
        empty = Parent(WRITES["mul_"])
    with carom.stream(
        empty, vram="8KiB", weights=tmp_path / "w.safetensors", device=carom.SimulatedDevice(),
        granularity="layer",
    ) as session, torch.no_grad():  # fmt: skip
        with pytest.raises(carom.UnsupportedError, match="stream the module from RAM"):
            empty(X)
        empty.write = lambda model, index: None
        model.write = empty.write
        assert torch.equal(empty(X), model(X))
        assert torch.equal(session.read("targets.0.weight"), model.targets[0].weight)
