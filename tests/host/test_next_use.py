"""When each piece of the host cache is used next, as the order of units and the uses so far tell."""

from __future__ import annotations

from carom.core.host.cache_pieces import CachePiece
from carom.core.host.next_use import NEVER, NOW, UseOrder
from hypothesis import given, settings
from hypothesis import strategies as st


def units_of(*counts: int) -> list[list[CachePiece]]:
    """One list of pieces a unit, with consecutive ranks."""
    pieces: list[list[CachePiece]] = []
    for unit, count in enumerate(counts):
        rank = sum(counts[:unit])
        pieces.append([CachePiece(unit, n, rank + n, n, 1, ()) for n in range(count)])
    return pieces


def missing(order: UseOrder, present=(), failed=(), most=100) -> list[int]:
    return [piece.rank for _, piece in order.missing(present, failed, most)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 4), max_size=6, unique=True))
def test_a_piece_is_next_used_at_its_first_place_then_at_its_second_or_in_the_next_round(uses, used):
    units = units_of(2, 1, 3, 1, 2)
    order = UseOrder(units)
    order.set_order(uses)
    for unit in used:
        order.end_uses(units[unit])
    sequence = [piece.rank for unit in uses for piece in units[unit]]
    for piece in (piece for pieces in units for piece in pieces):
        places = [place for place, rank in enumerate(sequence) if rank == piece.rank]
        round_after = [len(sequence) + place for place in places]
        expected = [*places, *round_after, NEVER, NEVER][piece.unit in used]
        assert order.distances[piece.rank] == expected
    ahead = [rank for place, rank in enumerate(sequence) if order.distances[rank] == place]
    assert missing(order) == ahead


def test_pieces_that_are_present_or_failed_are_not_missing():
    order = UseOrder(units_of(2, 2))
    order.set_order([1, 0])
    assert missing(order) == [2, 3, 0, 1]
    assert missing(order, present={3}, failed={0}) == [2, 1]
    assert missing(order, present={2}, most=2) == [3, 0]


def test_what_a_thread_waits_for_comes_first_whatever_order_is_set_meanwhile():
    units = units_of(1, 1, 1)
    order = UseOrder(units)
    order.set_order([0, 1, 2])
    order.wait_for(units[2][0])
    assert missing(order) == [2, 0, 1] and order.distances[2] == NOW
    order.set_order([1, 2, 0])
    assert missing(order) == [2, 1, 0] and order.distances[2] == NOW
    order.wait_for(None)
    assert missing(order) == [1, 2, 0] and order.distances[2] == 1
