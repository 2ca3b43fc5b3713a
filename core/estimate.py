"""PURE. About what a step will take under a plan, many times as fast as `predict` says it: for a search among many.

`predict` replays where slots lie and which unit gives way. Here the region is a ring of bytes: what was used longest ago gives
way first, wherever it lies, and a copy starts when the link is free and the ring has room. Units used again while
they are still in the ring do not cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Crossing(NamedTuple):
    """What bringing a unit into the ring takes: bytes there (0: it stays, and is not brought), seconds on the link (0: it
    comes from the device), seconds of unpacking."""

    nbytes: int
    link: float
    unpacking: float = 0.0


def estimate(
    uses: Sequence[tuple[int, float]],
    crossings: Sequence[Crossing],
    region: int,
    *,
    pause: float = 0.0,
    blocking: bool = False,
    cycles: int = 3,
) -> float:
    """Seconds of the last of ``cycles`` steps.

    ``uses``: (unit, seconds of computing) in their order; ``crossings``: by unit; ``region``: bytes of the ring; ``pause``:
    seconds between two steps in which copies go on; ``blocking``: the host waits for each copy. No unit may be larger than ``region``.
    """
    ring: list[list[float]] = []  # bytes, when they are there, when they were read
    last: dict[int, int] = {}  # unit -> where in the ring
    head = used = 0
    free = link = unpacked = compute = begin = 0.0
    staged = (0.0, 0.0)  # when the last but one and the last that crossed packed were unpacked
    for _ in range(cycles):
        compute += pause
        begin = compute
        for unit, seconds in uses:
            nbytes, wire, unpacking = crossings[unit]
            if not nbytes:
                compute += seconds
                continue
            known = last.get(unit, -1)
            hit = known >= head
            there = 0.0
            if hit:
                there = ring[known][1]
                used -= nbytes
                ring[known][0] = 0
            used += nbytes
            while used > region:
                gone = ring[head]
                used -= int(gone[0])
                free = gone[2]
                head += 1
            if not hit:
                if blocking:
                    compute += wire + unpacking
                elif not unpacking:
                    there = link = max(link, free) + wire
                elif wire:
                    link = max(link, staged[0]) + wire
                    there = unpacked = max(link, free, unpacked) + unpacking
                    staged = staged[1], there
                else:
                    there = unpacked = max(free, unpacked) + unpacking
            compute = max(compute, there) + seconds
            last[unit] = len(ring)
            ring.append([nbytes, there, compute])
    return compute - begin
