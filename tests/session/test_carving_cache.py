"""Carvings that are kept: found for the same module and the same arguments only, and never shared as lists."""

from __future__ import annotations

import pytest
from carom.core.session import carving_cache
from carom.core.session.carving_cache import CarvingCache
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
