"""Writes to packed weights of a session whose program writes again and again: over the old bytes where they fit."""

# mypy: disable-error-code="union-attr,arg-type,operator,index"

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from carom.core.codec import lossless
from carom.core.host.arena import HostArena
from carom.core.placement import packed_residents, packed_writes
from carom.core.session.planner import Planner
from carom.core.session.session import Session
from carom.core.session.stream_settings import StreamSettings
from tests_harness import EVERYWHERE, SIMULATED, place
from tests_inside import inside
from tests_models import WIDE, WideModel
from tests_models import wide_inputs as inputs

NAME = "blocks.1.up.weight"
NAMES = [f"blocks.{index}.{part}.weight" for index in range(8) for part in ("up", "down")]
BLOCK = 8 * WIDE * WIDE * 2 + 2048
VRAM = 6 * BLOCK
everywhere = pytest.mark.parametrize("device", EVERYWHERE.values(), ids=EVERYWHERE)
simulated = pytest.mark.parametrize("device", SIMULATED.values(), ids=SIMULATED)


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The sizes of blocks that were allocated."""
    sizes: list[int] = []
    allocate = HostArena.allocate

    def counted(self: HostArena, nbytes: int) -> Any:
        sizes.append(nbytes)
        return allocate(self, nbytes)

    monkeypatch.setattr(HostArena, "allocate", counted)
    return sizes


def streamed(device: Any, rewritten: bool = True) -> tuple[Session, WideModel, WideModel]:
    """Return a session after two passes, its module, and a copy of the module."""
    torch.manual_seed(0)
    model = WideModel(8).requires_grad_(False)
    plain = copy.deepcopy(model)
    settings = StreamSettings(
        device=device, vram=VRAM, codec="lossless", granularity="block", rewritten=rewritten
    )
    session = Session(model, settings)
    run(model, device)
    run(model, device)
    return session, model, plain


def run(model: WideModel, device: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs().to(place(device))).cpu()


def add(session: Session, plain: WideModel, factor: float) -> None:
    """Add a product of two factors to the weights of ``plain``, and write the sums, as a merge does."""
    up, down = torch.randn(4 * WIDE, 4), torch.randn(4, 4 * WIDE)
    for name in NAMES:
        weight = plain.get_parameter(name)
        rows, columns = weight.shape
        merged = weight.detach().float() + factor * 1e-3 * up[:rows] @ down[:, :columns]
        weight.data = merged.to(weight.dtype)
        session.write(name, weight.data.to(session.device))


@everywhere
def test_merges_are_written_over_the_old_bytes(device, made):
    session, model, plain = streamed(device)
    with session:
        assert inside(session).placement.tier.figures().packed_units == session.report().packed_units > 2
        made.clear()
        for _ in range(2):
            for factor in (1.0, -1.0):
                torch.manual_seed(1)
                add(session, plain, factor)
                assert torch.equal(run(model, device), run(plain, "cpu"))
        assert made == []
    assert all(torch.equal(p.cpu(), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_program_that_writes_once_gets_blocks_without_spare_room():
    blocks = []
    for rewritten in (False, True):
        session, model, _ = streamed("cpu", rewritten)
        with session:
            blocks.append(session.report().waiting_bytes)
    assert blocks[0] < blocks[1] <= blocks[0] * (1 + 1 / 256) + len(NAMES) * (512 + 128)


@everywhere
def test_a_value_that_packs_worse_moves_the_unit_to_a_new_block(device, made):
    session, model, plain = streamed(device)

    def write(name: str, value: torch.Tensor) -> None:
        session.write(name, value)
        plain.get_parameter(name).copy_(value)

    with session, torch.no_grad():
        noise = torch.randint(0, 255, (4 * WIDE, WIDE, 2), dtype=torch.uint8).view(torch.bfloat16)[..., 0]
        noise = torch.where(noise.isfinite(), noise, 0).clamp(-1, 1)
        down = plain.blocks[1].down.weight * 1.001
        larger = down.clone()
        larger[0, :300] *= 1e-6  # rare exponents take more bytes
        made.clear()
        write("blocks.1.down.weight", down)
        assert made == []
        write(NAME, noise)
        assert len(made) == 1
        write("blocks.1.down.weight", larger)  # while the unit waits to move
        write("blocks.3.up.weight", noise * 0.5)  # another unit that moves
        for name in (NAME, "blocks.1.down.weight", "blocks.3.up.weight"):
            assert torch.equal(session.read(name), plain.get_parameter(name))
        assert torch.equal(run(model, device), run(plain, "cpu"))
        made.clear()
        write(NAME, noise * 0.5)
        assert made == []
        assert torch.equal(run(model, device), run(plain, "cpu"))


def test_the_code_of_the_old_value_is_taken_again(monkeypatch):
    session, model, plain = streamed("cpu")
    chosen: list[int] = []
    choose = lossless.choose_code

    def counted(*args: Any) -> Any:
        chosen.append(1)
        return choose(*args)

    monkeypatch.setattr(lossless, "choose_code", counted)
    with session:
        add(session, plain, 1.0)
        assert not chosen
        packed = inside(session).shelf[id(model.get_parameter(NAME))]
        before = packed.blob.numel()
        session.write(NAME, torch.zeros(4 * WIDE, WIDE).bfloat16())
        assert chosen and packed.blob.numel() < 0.85 * before, "an old code that fits badly is not kept"
        session.write(NAME, plain.get_parameter(NAME).detach())
        assert torch.equal(run(model, "cpu"), run(plain, "cpu"))


@everywhere
def test_a_value_that_was_taken_before_a_write_stays(device):
    session, model, plain = streamed(device)
    with session, torch.no_grad():
        taken = model.get_parameter(NAME).to("cpu")
        old = plain.get_parameter(NAME).clone()
        add(session, plain, 1.0)
        assert torch.equal(taken, old)
        assert torch.equal(run(model, device), run(plain, "cpu"))


@everywhere
def test_a_write_to_a_parked_session_is_in_its_next_layout(device):
    session, model, plain = streamed(device)
    with session:
        add(session, plain, 1.0)
        session.park(keep=True)
        add(session, plain, 2.0)
        plain.get_parameter(NAME).data.zero_()
        session.write(NAME, plain.get_parameter(NAME).detach())  # packed by another code
        assert torch.equal(run(model, device), run(plain, "cpu"))
        add(session, plain, -2.0)
        session.set_budget(vram=2 * VRAM)
        assert torch.equal(run(model, device), run(plain, "cpu"))


@everywhere
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interrupt_in_a_write_leaves_the_new_value(device, where, monkeypatch):
    session, model, plain = streamed(device)
    copied = packed_writes._copy_to

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(packed_writes, "_copy_to", copied)
        if where == "after":
            args[0].data[args[1] : args[1] + 100].fill_(255)  # a part of the bytes
        raise KeyboardInterrupt

    new = plain.get_parameter(NAME).detach() * 1.01
    with session, torch.no_grad():
        monkeypatch.setattr(packed_writes, "_copy_to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.write(NAME, new)
        plain.get_parameter(NAME).copy_(new)
        assert torch.equal(session.read(NAME), new)
        for _ in range(2):
            assert torch.equal(run(model, device), run(plain, "cpu"))


@simulated
def test_bytes_are_written_after_the_copies_that_read_them(device):
    """The copies for the next pass have begun when a pass ends."""
    session, model, plain = streamed(device)
    waits: list[bool] = []
    engine = inside(session).engine
    synchronize = engine.synchronize

    def counted(*args: Any) -> None:
        waits.append(True)
        synchronize(*args)

    with session:
        engine.synchronize = counted
        for name in NAMES[:4]:  # two units
            session.write(name, plain.get_parameter(name).detach())
        assert len(waits) == 2
        assert torch.equal(run(model, device), run(plain, "cpu"))


@pytest.fixture
def packed_on_device(monkeypatch) -> Iterator[None]:
    """Units stay on the device packed, as after the first steps where the link binds."""
    settings = Planner.settings
    monkeypatch.setattr(packed_residents, "LEAST_UNIT", 1)

    def measured(self: Planner, wanted: Any) -> Any:
        packing = wanted.packing and dataclasses.replace(wanted.packing, residents=True)
        return settings(self, dataclasses.replace(wanted, packing=packing))

    monkeypatch.setattr(Planner, "settings", measured)
    yield


@simulated
def test_packed_bytes_on_the_device_follow_a_write(device, packed_on_device):
    device = dataclasses.replace(device, unpacks=True)
    session, model, plain = streamed(device)
    with session:
        assert session.report().resident_packed_units > 0
        kept = session.report().resident_packed_units
        for factor in (1.0, -1.0):
            add(session, plain, factor)
            for _ in range(2):
                assert torch.equal(run(model, device), run(plain, "cpu"))
        assert session.report().resident_packed_units == kept
