"""Which units wait in the memory of other devices."""

from __future__ import annotations

import math

import pytest
from carom.core.plan.peers import PeerRates, PeerRoom, assign
from hypothesis import given
from hypothesis import strategies as st

EQUAL = PeerRates(host=50, peer=50, both=100)
STAGED = PeerRates(host=50, peer=50, both=50)  # both copies use one link
UNITS = [10] * 100
SLOTS = 20
ALL = math.inf  # the host holds all units


def held(places, sizes=UNITS):
    """Bytes on each peer and, by the key None, on the host."""
    found: dict = {}
    for place, size in zip(places, sizes, strict=True):
        found[place] = found.get(place, 0) + size
    return found


def test_links_of_equal_rates_get_equal_bytes_in_turn():
    places = assign(UNITS, [PeerRoom(10**6, EQUAL)], ALL, SLOTS)
    assert held(places) == {0: 500, None: 500}
    assert all(first != second for first, second in zip(places, places[1:], strict=False))


@pytest.mark.parametrize("peer, share", [(50, 0.5), (150, 0.75), (450, 0.9)])
def test_each_link_gets_bytes_in_proportion_to_its_rate(peer, share):
    places = assign(UNITS, [PeerRoom(10**6, PeerRates(50, peer, 100))], ALL, SLOTS)
    assert held(places)[0] == pytest.approx(share * 1000, abs=10)


def test_a_peer_is_never_given_more_than_its_memory_and_its_units_are_spread():
    places = assign(UNITS, [PeerRoom(109, EQUAL)], ALL, SLOTS)
    assert held(places) == {0: 100, None: 900}
    mine = [index for index, place in enumerate(places) if place == 0]
    assert max(b - a for a, b in zip(mine, mine[1:], strict=False)) <= 12
    assert min(b - a for a, b in zip(mine, mine[1:], strict=False)) >= 8


def test_two_peers_share_with_the_host():
    places = assign(UNITS, [PeerRoom(10**6, EQUAL), PeerRoom(10**6, EQUAL)], ALL, SLOTS)
    assert all(bytes_ == pytest.approx(333, abs=10) for bytes_ in held(places).values())
    places = assign(UNITS, [PeerRoom(100, EQUAL), PeerRoom(10**6, EQUAL)], ALL, SLOTS)
    assert held(places) == {0: 100, 1: 450, None: 450}


def test_a_peer_whose_copies_take_the_hosts_link_gets_nothing():
    assert not STAGED.worth and EQUAL.worth
    # copies of 1 and 3 seconds take 3 seconds together, or 4 if they use one link
    slow = [PeerRates(host=60, peer=20, both=2 * 60 / seconds) for seconds in (3, 4)]
    assert [rates.overlap for rates in slow] == [pytest.approx(1), pytest.approx(0)]
    assert [rates.worth for rates in slow] == [True, False]
    assert held(assign(UNITS, [PeerRoom(10**6, STAGED)], ALL, SLOTS)) == {None: 1000}
    both = [PeerRoom(10**6, STAGED), PeerRoom(10**6, EQUAL)]
    assert held(assign(UNITS, both, ALL, SLOTS)) == {1: 500, None: 500}


def test_the_peers_take_what_the_host_does_not_hold():
    assert held(assign(UNITS, [PeerRoom(700, STAGED)], 0, SLOTS)) == {0: 700, None: 300}
    assert held(assign(UNITS, [PeerRoom(10**6, EQUAL)], 0, SLOTS)) == {0: 1000}
    assert held(assign(UNITS, [PeerRoom(10**6, STAGED)], 800, SLOTS)) == {0: 200, None: 800}
    assert held(assign(UNITS, [PeerRoom(10**6, EQUAL)], 800, SLOTS)) == {0: 500, None: 500}
    assert held(assign(UNITS, [PeerRoom(10**6, EQUAL)], 300, SLOTS)) == {0: 700, None: 300}


@given(
    st.lists(st.integers(1, 50), max_size=40), st.integers(0, 900), st.lists(st.integers(0, 600), max_size=3)
)
def test_the_host_gets_more_than_it_holds_only_if_the_peers_are_full(sizes, host_bytes, rooms):
    found = held(assign(sizes, [PeerRoom(room, EQUAL) for room in rooms], host_bytes, SLOTS), sizes)
    largest = max(sizes, default=0)
    full = all(found.get(peer, 0) + largest > room for peer, room in enumerate(rooms))
    assert found.get(None, 0) <= host_bytes or full


@pytest.mark.parametrize("slots, share", [(4, 1.0), (5, 0.8), (8, 0.8)])
def test_a_peer_that_brings_all_slots_while_the_host_brings_one_unit_gets_everything(slots, share):
    """Units are used in order, so a unit of the host holds up those behind it."""
    rates = PeerRates(host=50, peer=200, both=100)
    places = assign(UNITS, [PeerRoom(10**6, rates)], ALL, slots)
    assert held(places)[0] == pytest.approx(share * 1000, abs=10)
    assert held(assign(UNITS, [PeerRoom(300, rates)], ALL, slots)) == {0: 300, None: 700}


def test_units_of_no_bytes_stay_on_the_host():
    sizes = [0, 10, 0, 10]
    assert assign(sizes, [PeerRoom(10**6, EQUAL)], 0, SLOTS) == [None, 0, None, 0]
    assert assign([], [PeerRoom(10**6, EQUAL)], ALL, SLOTS) == []


def test_units_of_differing_sizes_fill_no_peer_beyond_its_memory():
    sizes = [7, 90, 3, 40, 40, 1, 60, 25] * 5
    for room in (0, 5, 50, 333, 10**6):
        places = assign(sizes, [PeerRoom(room, EQUAL), PeerRoom(room // 2, EQUAL)], ALL, SLOTS)
        found = held(places, sizes)
        assert found.get(0, 0) <= room and found.get(1, 0) <= room // 2
