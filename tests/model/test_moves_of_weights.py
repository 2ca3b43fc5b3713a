"""Moves of weights to where they wait already: `nn.Module.to` below the root, and ``p.data = p.data.to(...)``."""

from __future__ import annotations

import copy

import carom
import pytest
import safetensors.torch
import torch
from carom.core.placement.bound_checkpoint import Checkpoint
from carom.core.placement.packed_tensor import PackedTensor
from torch import nn

WIDTH = 192
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).to(torch.bfloat16)


class Net(nn.Module):
    def __init__(self, table: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        for block in self.blocks if table else ():
            block.register_buffer("table", torch.randn(1024, WIDTH))
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
            x = x + block.table[:2] if hasattr(block, "table") else x
        return x


@pytest.fixture
def reads(monkeypatch):
    """The values that were decoded or read from the file."""
    found: list[object] = []
    for owner, name in ((PackedTensor, "value"), (Checkpoint, "read_file")):
        read = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, read=read, **k: (found.append(a), read(*a, **k))[1])
    return found


def budget(net):
    """Return the bytes of two slots."""
    return 2 * max(sum(t.nbytes for t in block.state_dict().values()) for block in net.blocks) + (16 << 10)


def packed(net, tmp_path):
    return carom.stream(net, device=carom.SimulatedDevice(), vram=3 * budget(net) // 2, codec="lossless")


def on_disk(net, tmp_path):
    safetensors.torch.save_file(net.state_dict(), tmp_path / "w.safetensors")
    return carom.stream(
        net, device=carom.SimulatedDevice(), vram=budget(net), codec="raw", ram=1 << 20,
        weights=tmp_path / "w.safetensors",
    )  # fmt: skip


def children(net):
    for block in net.blocks:
        block.to("cpu")


def data(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.to("cpu")


def parameters(net):
    for parameter in net.parameters():
        parameter.data = parameter.to("cpu", torch.bfloat16, True)
        parameter.data = parameter.cpu()


@pytest.mark.parametrize("move", [children, data, parameters])
@pytest.mark.parametrize("stream", [packed, on_disk])
def test_a_move_to_where_weights_wait_reads_nothing(stream, move, reads, tmp_path):
    net = Net(table=True)
    buffers = dict(net.named_buffers())
    expected = net(X)
    with stream(net, tmp_path) as session:
        assert torch.equal(net(X), expected)
        reads.clear()
        move(net)
        assert not reads, "attached"
        assert torch.equal(net(X), expected)
        if stream is on_disk:
            return  # parked weights of a file are plain meta tensors
        session.park(keep=True)
        tensors = dict((*net.named_parameters(), *net.named_buffers()))
        reads.clear()
        move(net)
        assert not reads, "parked"
        now = dict((*net.named_parameters(), *net.named_buffers()))
        assert all(now[name] is tensor for name, tensor in tensors.items()), "no tensor was replaced"
        assert torch.equal(net(X), expected)
    assert torch.equal(net(X), expected) and all(torch.equal(b, buffers[n]) for n, b in net.named_buffers())


@pytest.mark.parametrize("stream", [packed, on_disk])
def test_a_moved_weight_has_the_value_of_the_move_wherever_it_is_used(stream, reads, tmp_path):
    net, plain = Net(), Net()
    weight = plain.blocks[1][0].weight
    session = stream(net, tmp_path)
    moved = [net.blocks[1][0].weight.to("cpu") for _ in range(8)]
    assert moved[0].device.type == "cpu" and not moved[0].is_meta and moved[0].dtype is torch.bfloat16
    assert (
        moved[0].shape == weight.shape and moved[0].stride() == weight.stride() and not moved[0].requires_grad
    )
    assert moved[0].to("cpu") is moved[0] and len(moved[0]) == len(weight)
    reads.clear()
    assert torch.equal(moved[0], weight) and torch.equal(weight, moved[0]) and len(reads) == 1
    assert type(moved[0]) is torch.Tensor and moved[0].data_ptr() != 0
    parameter = nn.Parameter(moved[1], requires_grad=False)
    assert type(parameter) is nn.Parameter and torch.equal(parameter, weight)
    assert torch.equal(copy.deepcopy(moved[2]), weight)
    assert torch.equal(
        torch.frombuffer(moved[3].view(torch.uint8).numpy(), dtype=torch.bfloat16), weight.flatten()
    )
    safetensors.torch.save_file({"w": moved[4]}, tmp_path / "saved.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "saved.safetensors")["w"], weight)
    net.blocks[0][2].weight.data = net.blocks[0][2].weight.to("cpu")
    session.write("blocks.1.0.weight", torch.zeros_like(weight))
    assert torch.equal(net.blocks[1][0].weight.to("cpu"), torch.zeros_like(weight))
    assert torch.equal(moved[5], weight), "a later write does not change it"
    net.blocks[1][0].weight.data = moved[6]
    assert torch.equal(net(X), plain(X)), "and it can be assigned again"
    session.write("blocks.1.0.weight", torch.zeros_like(weight))
    session.close()
    (tmp_path / "w.safetensors").unlink(missing_ok=True)
    assert torch.equal(moved[7], weight), "nor does the end of the session"


@pytest.mark.parametrize("stream", [packed, on_disk])
def test_conversions_and_demanded_copies_are_read_at_once(stream, reads, tmp_path):
    net = Net()
    with stream(net, tmp_path):
        weight = net.blocks[0][0].weight
        reads.clear()
        for value in (weight.to(torch.float32), weight.to("cpu", copy=True), weight.data.clone()):
            assert type(value) is torch.Tensor
        assert len(reads) == 3
