"""`Session.close` restores the module although its report, the device or a KeyboardInterrupt gets in the way."""

from __future__ import annotations

import copy
import random
from typing import Any

import carom
import pytest
import torch
from safetensors.torch import save_file
from tests_inside import inside
from tests_interrupts import Interrupts
from tests_limits import pack_small_weights
from torch import nn

WIDTH = 128
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))


class Refused(Exception):
    pass


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refused("injected")


@pytest.fixture(autouse=True)
def small_tensors_pack(monkeypatch):
    pack_small_weights(monkeypatch)


def make(trains: bool = False, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(*blocks).to(dtype).requires_grad_(trains)


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X.to(next(model.parameters()).dtype))


KINDS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "half resident": {"share": 0.5},
    "trained": {"training": "stream"},
    "packed": {"codec": "lossless", "share": 0.7},
    "spilled": {"ram": 400 << 10},
    "from a file": {"ram": 400 << 10},
}


class Case:
    """A module that streams, and what it has to be after `close`."""

    def __init__(self, kind: str, folder: Any, device: Any = "cpu") -> None:
        settings = {"codec": "raw", "granularity": "block", "device": device, **KINDS[kind]}
        share = settings.pop("share", 0.3)
        dtype = torch.bfloat16 if kind == "packed" else torch.float32
        self.model = make("training" in settings, dtype)
        self.twin = copy.deepcopy(self.model)
        nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        if kind == "spilled":
            settings["disk"] = folder
        if kind == "from a file":
            settings["weights"] = folder / "weights.safetensors"
            save_file(dict(self.model.state_dict()), settings["weights"])
            self.model.to("meta")
        self.before = [(id(p), type(p), p.device, p.stride()) for p in self.model.parameters()]
        if kind == "trained":
            self.model(X).sum().backward()
            self.twin(X).sum().backward()
            self.grads = [p.grad for p in self.model.parameters()]
        self.session = carom.stream(self.model, vram=int(share * nbytes), **settings)
        run(self.model)
        assert self.session.report().streamed_bytes

    def check(self) -> None:
        assert self.session.closed
        assert [(id(p), type(p), p.device, p.stride()) for p in self.model.parameters()] == self.before
        assert not any({"forward", "_apply"} & vars(module).keys() for module in self.model.modules())
        assert inside(self.session).pinned_bytes == 0
        if self.before[0][2].type != "meta":
            assert all(map(torch.equal, self.model.parameters(), self.twin.parameters()))
            assert torch.equal(run(self.model), run(self.twin))
        for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
        carom.stream(self.model.to_empty(device="cpu"), device="cpu", vram="1GiB").close()


@pytest.mark.parametrize("kind", KINDS)
def test_close_restores_the_module_although_its_report_fails(kind, tmp_path, monkeypatch):
    case = Case(kind, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(carom.Session, "_report", refuse)
        with pytest.raises(Refused):
            case.session.close()
    with pytest.raises(carom.CaromError, match="no report"):
        case.session.report()
    case.session.close()
    case.check()


def test_the_end_of_a_with_block_restores_the_module_although_the_report_fails(tmp_path, monkeypatch):
    case = Case("streamed", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(carom.Session, "_report", refuse)
        with pytest.raises(Refused), case.session:
            run(case.model)
    case.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("simulated", [False, True])
def test_close_restores_the_module_although_waiting_for_the_device_fails(kind, simulated, tmp_path):
    case = Case(kind, tmp_path, carom.SimulatedDevice() if simulated else "cpu")
    engine = inside(case.session).engine
    engine.synchronize = refuse
    with pytest.raises(Refused):
        case.session.close()
    del engine.synchronize
    case.session.close()
    case.check()


@pytest.mark.parametrize("call", [1, 2])
def test_close_tells_of_an_error_of_the_device_that_comes_only_once(call, tmp_path):
    case = Case("streamed", tmp_path)
    engine, calls = inside(case.session).engine, [0]

    def synchronize(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise Refused("injected")
        return type(engine).synchronize(engine, *args)

    engine.synchronize = synchronize
    with pytest.raises(Refused):
        case.session.close()
    del engine.synchronize
    case.session.close()
    case.check()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_close_that_is_interrupted_at_any_line_restores_the_module(kind, tmp_path):
    counted = Interrupts()
    case = Case(kind, tmp_path)
    with counted:
        case.session.close()
    seeded = random.Random(39)
    for _ in range(8):
        case = Case(kind, tmp_path)
        interrupt = Interrupts(seeded.randint(1, counted.count))
        with interrupt:
            case.session.close()
        try:
            if not case.session.closed:  # the interrupt came before closing began
                case.session.close()
            case.check()
        except Exception as error:
            raise AssertionError(f"interrupted at {interrupt.place}") from error
