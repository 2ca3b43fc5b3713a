"""A module that nobody uses any more gives its memory back at once, by reference counting, with its session."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import carom
import pytest
import torch
from carom.core.host.arena import Block as HostBlock
from carom.core.placement.packed_tensor import PackedTensor
from safetensors.torch import save_file
from tests_harness import least_vram
from tests_inside import inside
from tests_limits import pack_small_weights
from torch import nn

WIDTH = 64
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
LATE = carom.SimulatedDevice(seed=1, timing="late")
WAYS = ("raw", "packed", "file", "spilled", "training", "parked", "resident")
devices = pytest.mark.parametrize("device", ["cpu", LATE], ids=["cpu", "simulated"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A model with weights of its own beside its blocks."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors pack too."""
    pack_small_weights(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def imported():
    """torch's first import of its compiler leaves the frames that caused it in a reference cycle."""
    importlib.import_module("torch._dynamo")


OTHERS: weakref.WeakSet[Any] = weakref.WeakSet()  # host memory that sessions of other tests still hold


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    OTHERS.update(host_memory())
    try:
        yield
    finally:
        OTHERS.clear()
        gc.enable()


def attach(way: str, device: Any, folder: Any) -> tuple[Any, carom.Session]:
    """Return a model that has run a few steps, and its session."""
    model: Any = Net().bfloat16().requires_grad_(way == "training")
    options: dict[str, Any] = {"codec": "lossless" if way == "packed" else "raw"}
    vram = 1 << 20 if way == "resident" else 12 * WIDTH * WIDTH + 4096
    if way == "file":
        save_file(model.state_dict(), folder / "model.safetensors")
        options |= {"weights": folder / "model.safetensors", "ram": "16MiB"}
        model = model.to("meta")
    elif way == "spilled":
        options |= {"disk": folder, "ram": 4 * WIDTH * WIDTH}
    elif way == "training":
        options |= {"training": "stream"}
    session = carom.stream(model, device=device, vram=vram, **options)
    for _ in range(2):
        if way == "training":
            model(X).float().square().sum().backward()
        else:
            with torch.no_grad():
                model(X)
    assert (session.report().streamed_bytes > 0) is (way != "resident")
    if way == "parked":
        session.park(keep=True)
    return model, session


def host_memory() -> list[Any]:
    return [found for found in gc.get_objects() if type(found) in (HostBlock, PackedTensor)]


def references(model: Any) -> list[weakref.ref]:
    """Return weak references to the model's parts and to the host memory that Carom holds for it."""
    held = [found for found in host_memory() if found not in OTHERS]
    return [weakref.ref(part) for part in (*model.modules(), *model.parameters(), *model.buffers(), *held)]


@devices
@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_module_is_freed_at_once(way, device, tmp_path):
    with no_collector():
        model, session = attach(way, device, tmp_path)
        gone = [*references(model), weakref.ref(session)]
        del model, session
        assert [type(found()) for found in gone if found() is not None] == []


def test_a_dropped_compiled_module_is_freed_at_once():
    with no_collector(), torch.no_grad():
        torch._dynamo.reset()
        model = Net(2).bfloat16().requires_grad_(False)
        session = carom.stream(
            model, device="cpu", vram=12 * WIDTH * WIDTH + 4096, codec="raw", granularity="layer"
        )
        compiled = torch.compile(model, backend="eager")
        compiled(X)
        gone = [*references(model), weakref.ref(session)]
        del model, compiled, session
        assert [type(found()) for found in gone if found() is not None] == []


@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_freed_at_once_after_its_session_was_closed(way, discard, tmp_path):
    with no_collector():
        model, session = attach(way, LATE, tmp_path)
        gone = references(model)
        session.close(discard=discard)
        session.close()
        report = session.report()
        del model, session
        assert [type(found()) for found in gone if found() is not None] == []
        assert report.units > 0


@devices
@pytest.mark.parametrize("way", ["raw", "packed", "file", "spilled"])
def test_a_module_whose_session_was_dropped_goes_on_streaming(way, device, tmp_path):
    plain = Net().bfloat16()
    with no_collector(), torch.no_grad():
        model, session = attach(way, device, tmp_path)
        manager = weakref.ref(session._parts.manager)
        del session
        assert torch.equal(model(X), plain(X))
        assert manager().attached and manager().layout.runner.meter.steps > 2
        with pytest.raises(carom.UnsupportedError, match="streamed already"):
            carom.stream(model, device=device, vram="1MiB")
        with pytest.raises(carom.UnsupportedError, match="streamed module cannot become"):
            model.half()
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
        gone = references(model)
        del model
        assert [type(found()) for found in gone if found() is not None] == []


def test_a_session_keeps_its_module():
    with no_collector(), torch.no_grad():
        model, session = attach("raw", "cpu", None)
        gone = weakref.ref(model)
        del model
        assert gone() is session.module
        assert torch.equal(session.module(X), Net().bfloat16()(X))
        session.close()
        assert torch.equal(session.module(X), Net().bfloat16()(X))


@devices
@pytest.mark.parametrize("way", ["raw", "packed", "file", "spilled", "training"])
def test_what_is_kept_of_a_dropped_module_has_its_values(way, device, tmp_path):
    plain = Net().bfloat16()
    with no_collector():
        model, session = attach(way, device, tmp_path)
        blocks, scale, weights = list(model.blocks), model.scale, dict(model.blocks.named_parameters())
        del model, session
        if way == "file":
            # The weights of a module on meta are in its file only, as after `Session.close`.
            assert all(weight.is_meta and type(weight) is nn.Parameter for weight in weights.values())
            return
        with torch.no_grad():
            assert all(torch.equal(mine(X), own(X)) for mine, own in zip(blocks, plain.blocks, strict=True))
        assert torch.equal(scale, plain.scale)
        # Parameters of weights on disk were placeholders, as after `Session.close`.
        assert way == "spilled" or all(
            torch.equal(value, dict(plain.blocks.named_parameters())[name]) for name, value in weights.items()
        )


@devices
def test_a_backward_that_is_still_to_come_outlives_the_module(device):
    def gradients(model: Any) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        loss = model(x).float().square().sum()
        del model
        loss.backward()
        return [x.grad]

    expected = gradients(Net().bfloat16().requires_grad_(False))
    model = Net().bfloat16().requires_grad_(False)
    carom.stream(model, device=device, vram=12 * WIDTH * WIDTH + 4096, codec="raw")
    gone = weakref.ref(model)
    holder = [model]
    del model
    assert torch.equal(gradients(holder.pop())[0], expected[0])
    gc.collect()
    assert gone() is None


def test_a_forward_without_its_module_says_what_to_keep():
    model, session = attach("raw", "cpu", None)
    forward = model.forward
    del model, session
    with pytest.raises(carom.UnsupportedError, match="keep a reference to the module"):
        forward(X)


def test_a_class_with_a_finaliser_is_finalised_once():
    ended = []

    class Ends(Net):
        def __del__(self) -> None:
            ended.append(type(self).__name__)

    with no_collector():
        model = Ends().requires_grad_(False)
        session = carom.stream(model, device="cpu", vram=12 * WIDTH * WIDTH * 4, codec="raw")
        del model, session
        assert ended == ["Ends"]


def test_weights_of_the_module_itself_are_refreshed_with_it():
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x @ self.mix)
            return x

    model = Mixes().requires_grad_(False)
    vram = least_vram(model, LATE, "layer")
    with carom.stream(model, device=LATE, vram=vram, codec="raw", granularity="layer") as session:
        units = inside(session).placement.streamed
        before = {unit.name: unit.version() for unit in units}

        def refreshed() -> set[str]:
            return {unit.name for unit in units if unit.version() != before[unit.name]}

        session.refresh(model.blocks[0])
        assert refreshed() == {"blocks.0.up", "blocks.0.down"}
        session.refresh(model)
        assert "mix" in refreshed()
