"""Priority pools: the known worked cases, and as a state machine: never over capacity, pins hold, signatures tell losses."""

from __future__ import annotations

import pytest
from carom.core.common.errors import CaromError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests_priority_pools import Device


def paged(**options):
    """32 pages, 8 of headroom; one page is lost as with 32 MiB pages."""
    return Device(32, 8, slack=1, **options)


def touch(pool, count=None):
    """Each page in turn, unpinned at once: how many were hits, how many had to be streamed."""
    hits = misses = 0
    for page in range(len(pool.sizes) if count is None else count):
        if pool.fault(page, page + 1) is None:
            misses += 1
        else:
            hits += 1
            pool.unpin(page, page + 1)
    return hits, misses


# -- the worked cases of what is known


def test_a_sequential_fill_keeps_the_first_and_streams_the_rest():
    pool = paged().pool("a", [1] * 32)
    assert touch(pool) == (23, 9)
    assert (sum(pool.resident), pool.watermark) == (23, 23)
    serials = list(pool.serials)
    assert touch(pool) == (23, 9)
    assert pool.serials == serials, "hits map nothing anew"


def test_a_late_page_on_an_empty_pool_fails_and_sets_the_watermark():
    pool = paged().pool("a", [1] * 32)
    assert pool.fault(30, 31) is None
    assert (pool.watermark, sum(pool.resident)) == (23, 0)


def test_a_newer_pool_takes_from_an_older_one_and_priority_takes_it_back():
    device = paged()
    a, b = device.pool("a", [1] * 20), None
    touch(a)
    b = device.pool("b", [1] * 10)
    touch(b)
    assert (sum(a.resident), sum(b.resident)) == (13, 10)
    a.prioritize()
    touch(a)
    assert (sum(a.resident), sum(b.resident)) == (20, 3)


def test_a_limit_is_a_floor_for_others():
    device = paged()
    a = device.pool("a", [1] * 20)
    touch(a)
    a.set_limit(12)
    b = device.pool("b", [1] * 24)
    touch(b)
    assert (sum(a.resident), sum(b.resident)) == (12, 11)


def test_two_faults_and_one_unpin_leave_a_page_pinned():
    device = paged()
    pool = device.pool("a", [1] * 4)
    first, second = pool.fault(0, 2), pool.fault(0, 2)
    assert first == second
    pool.unpin(0, 2)
    pool.set_watermark(0)
    assert pool.resident[:2] == [True, True]
    pool.unpin(0, 2)
    assert not any(pool.resident), "above the watermark it goes with its last pin"
    with pytest.raises(CaromError, match="stray"):
        pool.unpin(0, 2)


# -- what ours adds


def test_bytes_are_exact_where_nothing_is_lost_to_pages():
    device = Device(100, 10)
    pool = device.pool("a", [30, 40, 20, 15])
    assert touch(pool) == (3, 1)
    assert device.used == 90


def test_a_signature_changes_when_something_was_lost():
    device = Device(10)
    a = device.pool("a", [4, 4])
    before = a.fault(0, 2)
    a.unpin(0, 2)
    b = device.pool("b", [5])
    assert b.fault(0, 1) == (1,)
    assert a.fault(0, 1) == before[:1], "the first entry was never lost"
    assert a.fault(1, 2) is None
    b.close()
    a.prioritize()
    assert a.fault(1, 2) == (2,)


def test_the_caller_hears_what_to_free_and_headroom_can_grow():
    gone = []
    device = Device(10, freed=lambda pool, entry: gone.append((pool.name, entry)))
    a, b = device.pool("a", [2, 2]), device.pool("b", [2, 2])
    touch(a)
    touch(b)
    device.set_headroom(5)
    assert gone == [("a", 1), ("a", 0)] and device.used == 4
    assert b.free_memory(1) == 2
    assert gone[-1] == ("b", 1)


def test_bad_use_is_refused():
    device = Device(10)
    pool = device.pool("a", [2, 2])
    for first, end in ((-1, 1), (1, 1), (0, 3)):
        with pytest.raises(ValueError):
            pool.fault(first, end)
    with pytest.raises(ValueError):
        device.pool("b", [0])
    pool.close()
    pool.close()
    with pytest.raises(CaromError, match="closed"):
        pool.fault(0, 1)


class Machine(RuleBasedStateMachine):
    """Random owners against a plain account of what they may rely on."""

    @initialize(capacity=st.integers(5, 60), headroom=st.integers(0, 10), slack=st.integers(0, 3))
    def start(self, capacity, headroom, slack):
        self.device = Device(capacity, headroom, slack=slack, freed=self.freed)
        self.pools = []
        self.held = []  # (pool, first, end, signature): pins we have
        self.lost = {}

    def freed(self, pool, entry):
        assert not pool.pins[entry]
        self.lost[pool.name, entry] = self.lost.get((pool.name, entry), 0) + 1

    @precondition(lambda self: len(self.pools) < 4)
    @rule(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
    def add(self, sizes):
        self.pools.append(self.device.pool(f"p{len(self.lost)}-{len(self.pools)}", sizes))
        assert self.device.pools[-1] is self.pools[-1]

    @precondition(lambda self: self.pools)
    @rule(data=st.data())
    def fault(self, data):
        pool = data.draw(st.sampled_from(self.pools))
        first = data.draw(st.integers(0, len(pool.sizes) - 1))
        end = data.draw(st.integers(first + 1, len(pool.sizes)))
        pins = [list(p.pins) for p in self.pools]
        higher = [(p, list(p.resident)) for p in self.device.pools[self.device.pools.index(pool) + 1 :]]
        signature = pool.fault(first, end)
        assert all(p.resident == there for p, there in higher), "a higher pool gives way to nobody below"
        if signature is None:
            assert [p.pins for p in self.pools] == pins, "a refused range pins nothing"
        else:
            assert all(pool.resident[first:end]) and end <= pool.watermark
            self.held.append((pool, first, end, signature))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data):
        pool, first, end, signature = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert tuple(pool.serials[first:end]) == signature, "what is pinned is not mapped anew"
        pool.unpin(first, end)

    @precondition(lambda self: self.pools)
    @rule(data=st.data(), what=st.sampled_from(["prioritize", "deprioritize", "watermark", "limit", "free"]))
    def change(self, data, what):
        pool = data.draw(st.sampled_from(self.pools))
        count = data.draw(st.integers(0, len(pool.sizes)))
        if what == "prioritize":
            pool.prioritize()
            assert pool.watermark == len(pool.sizes)
        elif what == "deprioritize":
            before = pool.watermark
            pool.deprioritize()
            assert pool.watermark == before and self.device.pools[0] is pool
        elif what == "watermark":
            pool.set_watermark(count)
        elif what == "limit":
            pool.set_limit(count)
        else:
            before = pool.loaded_bytes
            assert pool.free_memory(count) == before - pool.loaded_bytes

    @precondition(lambda self: self.pools)
    @rule(data=st.data())
    def close(self, data):
        pool = data.draw(st.sampled_from(self.pools))
        pool.close()
        self.pools.remove(pool)
        self.held = [pin for pin in self.held if pin[0] is not pool]

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "device"):
            return
        device = self.device
        assert device.used == sum(pool.loaded_bytes for pool in self.pools)
        pinned = sum(
            size for pool in self.pools for size, pins in zip(pool.sizes, pool.pins, strict=True) if pins
        )
        room = device.capacity - device.headroom - device.slack
        assert device.used <= max(room, pinned), "over capacity with something to give up"
        for pool in self.pools:
            assert 0 <= pool.watermark <= len(pool.sizes) and 0 <= pool.limit <= len(pool.sizes)
            for entry in range(pool.watermark, len(pool.sizes)):
                assert not pool.resident[entry] or pool.pins[entry], "above the watermark only what is pinned"
            count = [0] * len(pool.sizes)
            for held, first, end, _ in self.held:
                if held is pool:
                    count[first:end] = [n + 1 for n in count[first:end]]
            assert count == pool.pins
            assert all(pool.resident[entry] for entry, pins in enumerate(pool.pins) if pins)


Machine.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
test_pools_keep_their_promises_whatever_their_owners_do = Machine.TestCase
