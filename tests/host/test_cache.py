"""Pieces and what stays: every byte has one place, the bound holds, and the policies keep what they say."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from pathlib import Path

import carom
import numpy as np
import pytest
import torch
from carom.core.checkpoint.direct_io import ALIGN
from carom.core.checkpoint.disk_reader import DiskReader, ReaderPolicy
from carom.core.checkpoint.index import SourceFile, TensorEntry, open_index
from carom.core.checkpoint.segments import Segment
from carom.core.host.arena import HostArena
from carom.core.host.cache_pieces import LEAST_BUFFERS, ROTATING, PlacedTensor, choose_buffers, cut
from carom.core.host.eviction import EvictionPolicy
from carom.core.host.host_cache import HostCache
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

FILE = SourceFile("m.safetensors", 1 << 40, 0, 0, 0)
GIB, MIB = 1 << 30, 1 << 20


def entry(name: str, offset: int, nbytes: int) -> TensorEntry:
    return TensorEntry(name, "U8", (nbytes,), FILE, offset, nbytes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 9000)), max_size=6), st.integers(1, 6))
def test_reads_of_all_pieces_bring_every_byte_to_its_place(tensors, pages):
    """Tensors of any size, with gaps in the file that are or are not those of the unit."""
    placed, at, offset, owed = [], 0, 100, {}
    for number, (nbytes, gap) in enumerate(tensors):
        half = nbytes // 2  # fused: two segments that do not follow one another
        one, two = entry(f"a{number}", offset, half), entry(f"b{number}", offset + half + gap, nbytes - half)
        placed.append(PlacedTensor(at, (Segment(one, 0, 0, half), Segment(two, 0, half, nbytes - half))))
        owed.update({at + i: offset + i for i in range(half)})
        owed.update({at + half + i: two.offset + i for i in range(nbytes - half)})
        offset = two.offset + nbytes - half
        padded = -(-nbytes // ALIGN) * ALIGN
        offset += padded - nbytes if gap % 2 else 0  # as packed files have it
        at += padded
    (pieces,) = cut([(at, placed)], pages * ALIGN)
    found: dict[int, int] = {}
    for before, piece in itertools.pairwise([None, *pieces]):
        assert piece.start == (0 if before is None else before.start + before.nbytes)
        assert piece.nbytes <= pages * ALIGN
        for read in piece.reads:
            assert read.at >= 0 and read.at + read.nbytes <= piece.nbytes
            found.update({piece.start + read.at + i: read.offset + i for i in range(read.nbytes)})
    assert sum(piece.nbytes for piece in pieces) == at
    assert all(found[byte] == source for byte, source in owed.items())


def test_a_packed_unit_is_one_read_a_piece():
    tensors, at = [], 0
    for number, nbytes in enumerate((5000, 4096, 100, 12288)):
        tensors.append(PlacedTensor(at, (Segment(entry(str(number), 8192 + at, nbytes), 0, 0, nbytes),)))
        at += -(-nbytes // ALIGN) * ALIGN
    (pieces,) = cut([(at, tensors)], 1 << 20)
    assert [len(piece.reads) for piece in pieces] == [1]
    assert pieces[0].reads[0].label == "'0' to '3'"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 400 * MIB), min_size=1, max_size=40), st.integers(2 * ALIGN, 8 * GIB))
def test_buffers_never_exceed_the_ram(sizes, ram):
    sizes = [-(-size // ALIGN) * ALIGN for size in sizes]
    buffers = choose_buffers(sizes, ram)
    if buffers.whole:
        assert sum(sizes) <= ram
        return
    assert buffers.nbytes % ALIGN == 0 and buffers.nbytes > 0
    assert buffers.count >= LEAST_BUFFERS and buffers.count * buffers.nbytes <= ram
    assert LEAST_BUFFERS <= buffers.rotating <= buffers.count
    if ram >= ROTATING * ALIGN:
        assert buffers.count >= min(ROTATING, sum(-(-size // buffers.nbytes) for size in sizes))


def test_equal_blocks_waste_next_to_nothing():
    sizes = [340 * MIB] * 20
    buffers = choose_buffers(sizes, 2 * GIB)
    used = sum(sizes)
    filled = sum(-(-size // buffers.nbytes) for size in sizes) * buffers.nbytes
    assert filled <= 1.001 * used and 16 * MIB <= buffers.nbytes <= 32 * MIB


def test_a_budget_below_two_pages_names_the_least():
    with pytest.raises(carom.BudgetError, match="8192") as refused:
        choose_buffers([1 << 20], 2 * ALIGN - 1)
    assert refused.value.least_bytes == 2 * ALIGN


def misses(eviction: str, order: list[int], room: int) -> int:
    """Misses of a cache with ``room`` kept pieces and one that rotates, over ``order``."""
    policy = EvictionPolicy(eviction, room, len(set(order)))
    missed = 0
    for now, rank in enumerate(order):
        missed += rank not in policy.kept

        def next_use(r: int, now: int = now) -> float:
            return next((i for i in range(now + 1, len(order)) if order[i] == r), float("inf"))

        policy.record_uses([rank], next_use)
        assert len(policy.kept) <= room
    return missed


@pytest.mark.parametrize("room", [1, 4, 9])
def test_kept_pieces_are_hit_in_every_round_and_spread_over_it(room):
    policy = EvictionPolicy("belady", room, 10)
    for now in range(50):
        policy.record_uses([now % 10], lambda r, now=now: (r - now - 1) % 10 + 1)
        if now == 20:
            settled = set(policy.kept)
    assert policy.kept == settled and len(settled) == room
    gaps = [b - a for a, b in itertools.pairwise(sorted(settled))]
    assert not gaps or max(gaps) - min(gaps) <= 1


def optimum(order: list[int], room: int) -> int:
    """Misses of Belady's algorithm: on a miss, the piece whose next use is farthest makes room."""
    held: set[int] = set()
    missed = 0
    for now, rank in enumerate(order):
        if rank in held:
            continue
        missed += 1
        if len(held) == room:
            rest = order[now + 1 :]
            held.remove(max(held, key=lambda r: rest.index(r) if r in rest else len(rest)))
        held.add(rank)
    return missed


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("sizes", [[32 * MIB] * 60, [340 * MIB, 20 * MIB] * 10, [4 * MIB] * 200], ids=str)
def test_no_more_than_a_twentieth_is_read_beyond_beladys_bound(sizes, share):
    """Pieces that are used in turn, pass after pass: the buffers for reading ahead cost this much."""
    buffers = choose_buffers(sizes, int(share * sum(sizes)))
    count = sum(-(-size // buffers.nbytes) for size in sizes)
    warm, passes = 2, 6
    order = list(range(count)) * passes
    policy = EvictionPolicy("belady", buffers.count - buffers.rotating, count)
    missed = []
    for now, rank in enumerate(order):
        missed.append(rank not in policy.kept)
        policy.record_uses([rank], lambda r, now=now: (r - now - 1) % count + 1)
    least = optimum(order, buffers.count) - optimum(order[: warm * count], buffers.count)
    assert sum(missed[warm * count :]) <= 1.05 * least


def test_belady_misses_no_more_than_the_others():
    random = np.random.default_rng(0)
    total = dict.fromkeys(("belady", "priority", "fifo"), 0)
    for _ in range(30):
        order = list(map(int, random.zipf(1.4, 120) % 12))
        for name in total:
            total[name] += misses(name, order, 4)
    assert total["belady"] < total["priority"] and total["belady"] < total["fifo"]


def cache_of(
    tmp_path: Path, count: int, ram: int, eviction: str = "belady"
) -> tuple[HostCache, list, list[torch.Tensor]]:
    """A cache over ``count`` units of two pages each, its pieces, and their bytes."""
    data = [torch.from_numpy(np.random.default_rng(i).integers(0, 256, 8192, np.uint8)) for i in range(count)]
    save_file({f"t{i:03d}": d for i, d in enumerate(data)}, tmp_path / "m.safetensors")
    index = open_index(tmp_path / "m.safetensors")
    units = [(8192, [PlacedTensor(0, (Segment(index[f"t{i:03d}"], 0, 0, 8192),))]) for i in range(count)]
    buffers = choose_buffers([8192] * count, ram)
    pieces = cut(units, buffers.nbytes)
    copies: set[int] = set()
    cache = HostCache(
        pieces, buffers, HostArena(None, ram), DiskReader(ReaderPolicy(backoff=0.001)),
        lambda event: event not in copies, copies.discard, eviction,
    )  # fmt: skip
    cache.copies = copies  # type: ignore[attr-defined]
    return cache, pieces, data


def test_a_buffer_is_not_overwritten_while_a_copy_reads_it(tmp_path):
    cache, pieces, data = cache_of(tmp_path, 12, 6 * 8192)
    try:
        cache.expect(range(12))
        views = {}
        for unit in range(12):
            for piece in pieces[unit]:
                cache.copies.add(piece.rank)  # under way until somebody waits for it
                ((view, _),) = cache.acquire([piece])
                views[piece.rank] = (view, data[unit][piece.start : piece.start + piece.nbytes])
                cache.release([piece], [piece.rank])
            for rank in cache.copies:
                assert torch.equal(*views[rank]), f"piece {rank} was overwritten under its copy"
        assert len(cache.copies) < 24  # it had to wait for some
    finally:
        cache.close()


def test_bytes_that_were_acquired_stay_until_they_are_released(tmp_path):
    """Also while other units are used, whose reads need all other buffers."""
    cache, pieces, data = cache_of(tmp_path, 12, 6 * 8192)
    try:
        (first, *_) = pieces[0]
        ((view, _),) = cache.acquire([first])
        cache.expect(range(1, 12))  # the first unit is needed no more
        for piece in (piece for unit in pieces[1:] for piece in unit):
            cache.acquire([piece])
            cache.release([piece], [None])
        assert torch.equal(view, data[0][: first.nbytes])
        cache.release([first], [None])
    finally:
        cache.close()


def test_the_pieces_of_a_unit_that_are_in_ram_come_together_and_the_unused_ones_stay(tmp_path):
    cache, pieces, data = cache_of(tmp_path, 12, 4 * ALIGN)
    first, second = pieces[0]
    reads, read = [], cache._read
    cache._read = lambda piece, *more, **how: (reads.append(piece.rank), read(piece, *more, **how))  # type: ignore[method-assign]
    try:
        for found in (cache.acquire(pieces[0]), cache.acquire(pieces[0])):  # nothing is expected
            assert len(found) == 1 and torch.equal(found[0][0], data[0][:ALIGN])
            cache.release([first], [])
        cache.release([first], [])
        assert len(cache.acquire([second])) == 1
        cache.release([second], [])
        found = cache.acquire(pieces[0])
        assert torch.equal(torch.cat([part for part, _ in found]), data[0])
        cache.release(pieces[0], [None])  # the second one was not used
        assert len(cache.acquire([second])) == 1
        assert reads == [first.rank, second.rank]
    finally:
        cache.close()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 13), st.sampled_from(["belady", "fifo", "priority"]),
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=7), st.booleans()), max_size=12),
)  # fmt: skip
def test_any_uses_in_any_expected_order_get_the_bytes_of_the_file(pages, eviction, uses):
    """Each use: a unit, the order that is expected before it, and whether its copies end at once or late."""
    with tempfile.TemporaryDirectory() as folder:
        cache, pieces, data = cache_of(Path(folder), 6, pages * ALIGN, eviction)
        reading: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of copies that have not ended
        try:
            for unit, order, late in uses:
                if order:
                    cache.expect(order)
                rest = pieces[unit]
                while rest:
                    copies: list[int | None] = []
                    for piece, (view, _) in zip(rest, cache.acquire(rest), strict=False):
                        part = data[unit][piece.start : piece.start + piece.nbytes]
                        assert torch.equal(view, part)
                        copies.append(len(reading) if late else None)
                        if late:
                            cache.copies.add(len(reading))
                            reading[len(reading)] = view, part
                    cache.release(rest[: len(copies)], copies)
                    rest = rest[len(copies) :]
                ended = max(reading.keys() - cache.copies, default=-1)  # copies end in order
                for copy in range(ended + 1, len(reading)):
                    assert torch.equal(*reading[copy]), "overwritten under its copy"
                held = sum(buffer.block.data.numel() for buffer in cache.pool.buffers)
                assert held <= pages * ALIGN
        finally:
            cache.close()


def test_pieces_that_were_not_used_leave_their_buffers_to_others(tmp_path):
    cache, pieces, _ = cache_of(tmp_path, 12, LEAST_BUFFERS * ALIGN)
    done = []

    def acquire_each() -> None:
        for unit in pieces:
            cache.acquire(unit[:1])
            cache.release(unit[:1], [])
            done.append(unit)

    try:
        thread = threading.Thread(target=acquire_each, daemon=True)
        thread.start()
        thread.join(5)
        assert len(done) == len(pieces)
    finally:
        cache.close()


def test_reads_ahead_go_on_in_the_buffers_that_exist_when_fewer_may_exist(tmp_path):
    cache, pieces, _ = cache_of(tmp_path, 12, 6 * 8192)
    try:
        cache.expect(range(12))
        for piece in itertools.chain(*pieces):
            cache.acquire([piece])
            cache.release([piece], [None])
        cache.hold_back(5 * 8192)
        missing = next(unit for unit in range(12) if not cache.has(unit))
        cache.expect([missing])
        until = time.monotonic() + 5
        while not cache.has(missing) and time.monotonic() < until:
            time.sleep(0.001)
        assert cache.has(missing)
    finally:
        cache.close()


def test_units_that_are_here_are_known(tmp_path):
    cache, pieces, data = cache_of(tmp_path, 4, 1 << 20)
    try:
        cache.expect(range(4))
        for unit in (2, 0):
            for piece in pieces[unit]:
                ((found, _),) = cache.acquire([piece])
                assert torch.equal(found, data[unit][piece.start : piece.start + piece.nbytes])
                cache.release([piece], [None])
            assert cache.has(unit)
    finally:
        cache.close()
    with pytest.raises(carom.CaromError, match="closed"):
        cache.acquire(pieces[1])


def test_what_is_waited_for_is_read_once_whatever_is_expected(tmp_path):
    """Reads ahead must not overwrite it before the thread that waits for it has seen it."""
    cache, pieces, data = cache_of(tmp_path, 12, LEAST_BUFFERS * ALIGN)
    reads, read, found = [], cache._read, []
    cache._read = lambda piece, *more, **how: (reads.append(piece.rank), read(piece, *more, **how))  # type: ignore[method-assign]
    try:
        cache.expect(range(1, 12))
        waiting = threading.Thread(
            target=lambda: found.append(cache.acquire(pieces[0][:1])[0][0]), daemon=True
        )
        waiting.start()
        waiting.join(5)
        assert reads.count(pieces[0][0].rank) == 1
        assert torch.equal(found[0], data[0][: pieces[0][0].nbytes])
    finally:
        cache.close()
