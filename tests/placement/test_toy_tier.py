"""A further tier is one class: frozen weights that nobody stores, made by a function of their name whenever they are needed."""

from __future__ import annotations

import carom
import pytest
import torch
from carom.core.common.errors import UnsupportedError
from carom.core.host.arena import storage_bytes
from carom.core.model.elsewhere_tensor import AwayParameter, AwayTensor, ElsewhereHome
from carom.core.model.home import Home
from carom.core.model.managed_tensor import HostParameter, HostTensor, in_backward
from carom.core.placement import make_tier
from carom.core.placement.attached_tensors import attach
from carom.core.placement.backing import Backing
from carom.core.placement.tier import Tier
from torch import nn

WIDTH, DEPTH, RANK = 96, 6, 4
DEVICES = {"cpu": "cpu"} | {t: carom.SimulatedDevice(timing=t) for t in ("late", "early", "random")}


def weight(name: str, shape: torch.Size) -> torch.Tensor:
    """The weight called ``name``."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % (1 << 31))
    return torch.randn(shape, generator=generator) / WIDTH**0.5


# -- the tier


class GeneratedHome(ElsewhereHome):
    """The home of a weight that is made when it is read."""

    __slots__ = ()
    keeps_writes = False

    def read(self) -> torch.Tensor:
        return weight(self.entry.name, self.host.shape)

    def replace(self, value: torch.Tensor) -> None:
        raise UnsupportedError(f"{self.entry.name} is a function of its name")


class GeneratedBacking(Backing):
    """A unit whose frozen weights are made anew for each fetch; those that train wait on the host."""

    sent: tuple = ()  # what is on its way, which must not be given up before

    def fetch(self, target, after, link):
        host = torch.zeros(self.nbytes, dtype=torch.uint8)
        for home in self.homes:
            at, nbytes = home.entry.offset, home.entry.nbytes
            host[at : at + nbytes] = storage_bytes(home.read().detach())
        event, marks = link.engine.copy_in(target, host, after, link.meter.timing)
        link.meter.copied(self.name, marks, self.nbytes, self.unit.raw_bytes, in_backward())
        self.sent = (*(sent for sent in self.sent if not link.engine.landed(sent[0])), (event, host))
        return event


class GeneratedTier(Tier):
    """Streams weights that take no memory while they wait."""

    def place(self, units, runtime, residents):
        for index, unit in enumerate(units):
            backing = GeneratedBacking(unit, runtime, index)
            self.backings.append(backing)
            for entry in unit.entries:
                tensor = entry.tensor
                self.attached.remember(tensor, torch.device("cpu"))
                if entry.trainable:
                    backing.homes.append(Home(backing, entry, tensor.detach()))
                    attach(backing.homes[-1], HostParameter, HostTensor)
                else:
                    backing.homes.append(GeneratedHome(backing, entry, tensor.detach().to("meta")))
                    tensor.data = torch.full((), float("nan")).expand(tensor.shape)  # its memory goes
                    attach(backing.homes[-1], AwayParameter, AwayTensor)
            backing.note_trainable()
        return self.backings

    def undo(self):
        made = [(h.tensor, h) for b in self.backings for h in b.homes if isinstance(h, GeneratedHome)]
        super().undo()
        for tensor, home in made:
            tensor.data = home.read()


# -- the model


class Block(nn.Module):
    """Two layers around a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x) + self.b(self.a(x))))


def model(trains: str) -> nn.Module:
    net = nn.Sequential(*(Block() for _ in range(DEPTH)))
    for name, parameter in net.named_parameters():
        parameter.data = weight(name, parameter.shape)
        adapter = ".a." in name or ".b." in name
        parameter.requires_grad_(trains == "all" or (trains == "adapters" and adapter))
    return net


def run(net: nn.Module, device: torch.device, trains: str) -> list[torch.Tensor]:
    """Outputs of four steps, and the parameters after them."""
    torch.manual_seed(0)
    found = []
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if trained else None
    for _ in range(4):
        x = torch.randn(5, WIDTH).to(device)
        with torch.set_grad_enabled(optimizer is not None):
            y = net(x)
        if optimizer is not None:
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(y.detach().cpu())
    return found


@pytest.mark.parametrize("trains", ["nothing", "adapters", "all"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_tier_of_another_kind_streams_exactly(device, trains, monkeypatch):
    monkeypatch.setattr(make_tier, "make_tier", lambda wish: GeneratedTier(wish.engine))
    net, twin = model(trains), model(trains)
    expected = run(twin, torch.device("cpu"), trains)
    size = sum(parameter.numel() * 4 for parameter in net.parameters())
    training = "stream" if trains == "all" else None
    with carom.stream(net, device=DEVICES[device], vram=size // 2, training=training) as session:
        report = session.report()
        assert report.streamed_bytes > 0
        frozen = [p for p in net.parameters() if isinstance(p, AwayParameter)]
        assert bool(frozen) == (trains != "all") and all(p.untyped_storage().nbytes() == 4 for p in frozen)
        found = run(net, session.device, trains)
        assert session.report().transfers_per_weight > 0
        x = torch.ones(3, WIDTH)
        for budget in (2 * size, size // 2):  # laid out again, all of it resident, and back
            session.set_budget(vram=budget)
            with torch.no_grad():
                assert torch.equal(net(x.to(session.device)).cpu(), twin(x))
        name, last = list(twin.state_dict().items())[-1]
        assert torch.equal(session.read(name), last)
        torch.testing.assert_close(net.state_dict()[name].cpu() + 0, last, rtol=0, atol=0)
    assert all(map(torch.equal, found, expected))
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
