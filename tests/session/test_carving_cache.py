"""Carvings that are kept: found for the same module and the same arguments only, and never shared as lists."""

from __future__ import annotations

import gc
import weakref

import carom
import pytest
import torch
from carom.core.session import carving_cache
from carom.core.session.carving_cache import CarvingCache
from carom.core.session.session import Session
from carom.core.session.stream_settings import StreamSettings
from safetensors import safe_open
from safetensors.torch import save_file
from tests_residual import Residual
from tests_residual import size as bytes_of


@pytest.fixture
def carved(monkeypatch):
    made: list[dict] = []
    carve = carving_cache.carve
    monkeypatch.setattr(carving_cache, "carve", lambda *a, **k: (made.append(k), carve(*a, **k))[1])
    return made


def test_each_set_of_arguments_has_its_carving(carved):
    net = Residual()
    cache = CarvingCache(net)
    names = {}
    for _ in range(2):
        for granularity, limit in (("block", None), ("layer", None), ("auto", bytes_of(net) // 40)):
            found = [unit.name for unit in cache.carve(granularity=granularity, limit=limit).units]
            assert names.setdefault((granularity, limit), found) == found
    assert len(carved) == 3 and names["block", None] != names["layer", None]


def test_what_a_layout_adds_to_its_carving_is_not_in_the_next_one(carved):
    cache = CarvingCache(Residual())
    first = cache.carve(granularity="block")
    entry = first.units[0].entries[0]
    for found in (first, cache.carve(granularity="block")):
        found.resident.append((entry, "added"))
        found.adapters.append(entry)
        found.units.clear()
    again = cache.carve(granularity="block")
    assert len(carved) == 1 and again.units and not again.adapters
    assert "added" not in [reason for _, reason in again.resident]


def test_residents_of_a_file_are_freed_when_their_session_is_parked(tmp_path):
    """Weights of a file that stay on the device are tensors of their own there, which no carving may keep."""
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20))).requires_grad_(False)
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        names = file.keys()
        net.load_state_dict({name: file.get_tensor(name) for name in names}, assign=True)
    total = bytes_of(net)
    options = StreamSettings(
        device=carom.SimulatedDevice(), vram=total * 4 // 10, ram=total * 4 // 10, disk=tmp_path
    )
    x = torch.randn(2, 256)
    with Session(net, options) as session, torch.inference_mode():
        expected = net(x)
        for budget in (total // 2, total * 6 // 10):
            session.park(keep=True)
            session.set_budget(vram=budget)
            session.unpark()
            session.follow_room(total * 4 // 10, 0, total, lambda args, kwargs: (args, kwargs))
            assert all(torch.equal(net(x), expected) for _ in range(4))
            running = [(id(weight), weakref.ref(weight)) for weight in net.parameters()]
            session.park(keep=True)
            gc.collect()
            parked = {id(weight) for weight in net.parameters()}
            left = [ref() for number, ref in running if number not in parked]
            assert left, "no weight of the file stayed on the device: the test shows nothing"
            assert left == [None] * len(left)
