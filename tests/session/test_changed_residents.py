"""Weights and buffers that change while they stay on the device: no change is lost, whatever moves them off it.

Each case changes a half-resident model between two passes, then lets something move its weights (a park, another budget,
another session, `.to("cpu")`, a close), and compares the next pass and the state dict with those of the same model
without Carom.
"""

from __future__ import annotations

import carom
import torch
from safetensors.torch import save_file
from tests_harness import DEVICES
from tests_limits import pack_small_weights
from tests_pairwise import pairwise
from torch import nn

WIDTH, BLOCKS = 64, 12
SOME = {name: DEVICES[name] for name in ("cpu", "simulated-late", "simulated-random")}


class Block(nn.Module):
    """A block with weights, running statistics, and a buffer that its forward replaces by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x + self.down(torch.relu(self.norm(self.up(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).requires_grad_(False)


def inputs() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


# Each function changes the weights ``names`` of the model.
def add_to_data(net: nn.Module, names: list[str]) -> None:
    for name in names:
        net.get_parameter(name).data.add_(0.25)


def merge_adapters(net: nn.Module, names: list[str]) -> None:
    generator = torch.Generator().manual_seed(2)
    for name in names:
        weight = net.get_parameter(name)
        if weight.dim() == 2:
            a, b = (
                torch.randn(size, generator=generator)
                for size in ((4, weight.shape[1]), (weight.shape[0], 4))
            )
            with torch.no_grad():
                weight += b @ a


def copy_values(net: nn.Module, names: list[str]) -> None:
    with torch.no_grad():
        for name in names:
            net.get_parameter(name).copy_(net.get_parameter(name) * 0.5)


def assign_data(net: nn.Module, names: list[str]) -> None:
    for name in names:
        parameter = net.get_parameter(name)
        parameter.data = parameter.data * 2


def replace_weights(net: nn.Module, names: list[str]) -> None:
    for name in names:
        owner, leaf = net.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).detach() * 2, requires_grad=False))


def load_another_state(net: nn.Module, names: list[str]) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def run_more_passes(net: nn.Module, names: list[str]) -> None:
    """Change nothing but what a forward itself changes: running statistics and replaced buffers."""
    with torch.no_grad():
        net(inputs() + 1)


CHANGES = [
    add_to_data,
    merge_adapters,
    copy_values,
    assign_data,
    replace_weights,
    load_another_state,
    run_more_passes,
]


def whole(net: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in net.parameters())


def park(net, session, device):
    session.park()


def smaller_budget(net, session, device):
    session.set_budget(vram=int(0.4 * whole(net)))


def larger_budget_and_back(net, session, device):
    session.set_budget(vram=2 * whole(net))
    session.set_budget(vram=whole(net) // 2)


def another_session(net, session, device):
    """A park that a second session's turn asks for, and that session's passes."""
    other = model()
    session.park()
    with carom.stream(other, device=device, vram=whole(other) // 2), torch.no_grad():
        other(inputs())


def to_cpu(net, session, device):
    net.to("cpu")


def close(net, session, device):
    session.close()


EVENTS = [park, smaller_budget, larger_budget_and_back, another_session, to_cpu, close]


def stream(net: nn.Module, kind: str, device, folder) -> carom.Session:
    options = {}
    if kind == "file":
        path = folder / "weights.safetensors"
        save_file(dict(net.named_parameters()), path)
        options = {"weights": path, "ram": 4 * whole(net)}
    codec = "lossless" if kind == "lossless" else "raw"
    return carom.stream(net, device=device, vram=whole(net) // 2, codec=codec, **options)


@pairwise(
    strength=3,
    kind=["memory", "lossless", "file"],
    change={function.__name__: function for function in CHANGES},
    event={function.__name__: function for function in EVENTS},
    device=SOME,
)
def test_a_change_is_kept(kind, change, event, device, tmp_path, monkeypatch):
    pack_small_weights(monkeypatch, 1024, ratio=None)
    plain, net, x = model(), model(), inputs()
    with stream(net, kind, device, tmp_path) as session, torch.no_grad():
        for _ in range(2):
            expected, found = plain(x), net(x)
        assert torch.equal(expected, found.cpu())
        report = session.report()
        assert report.resident_bytes and report.streamed_bytes, "half of the model stays on the device"
        # Weights that stream from a file cannot be written in place; those that stay on the device can.
        names = [
            key for key, value in net.named_parameters() if kind != "file" or type(value) is nn.Parameter
        ]
        assert names
        change(plain, names)
        change(net, names)
        event(net, session, device)
        for _ in range(2):
            assert torch.equal(plain(x), net(x).cpu())
    for key, value in plain.state_dict().items():
        assert torch.equal(value, net.state_dict()[key].cpu()), key
