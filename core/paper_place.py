"""Which layers stay on the card, on paper: raw, or packed and unpacked at each use. Pure.

Layers of one size are interchangeable, so only counts matter. paper.py says what a step takes with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import presets
from .plan import SMALL_UNIT
from .shapes import Group, Shape

if TYPE_CHECKING:
    from .paper import Job

SLOTS = 2  # device slots a streamed layer lands in: one computes while the other fills


@dataclass(frozen=True)
class Placement:
    """Which units stay. `resident`: count by group, in the shape's order, of which `packed` stay packed; bytes of one pass.

    `resident_bytes` are of the card, `packed_bytes` of them what stays packed and `packed_raw` what that unpacks to;
    `streamed_raw`: what the layers that stream packed unpack to.
    """

    resident: tuple[int, ...]
    resident_bytes: int
    slot_bytes: int
    streamed_wire: int
    streamed_raw: int
    packed: tuple[int, ...] = ()
    packed_bytes: int = 0
    packed_raw: int = 0

    @property
    def packed_units(self) -> int:
        """Layers that stay packed."""
        return sum(self.packed)

    @property
    def host_bytes(self) -> int:
        """Bytes of weights in host memory: of what streams, and of what stays packed, which keeps its copy there."""
        return self.streamed_wire + self.packed_bytes


def wire_bytes(group: Group, job: Job) -> int:
    """Bytes of one layer on the wire: raw, or re-coded without loss where they are 16-bit."""
    raw = group.bytes_in(job.quant)
    is_16bit = group.params and abs(raw * 8 / group.params - 16) < 0.1
    return int(raw * presets.LOSSLESS_RATIO) if job.codec == "lossless" and is_16bit else raw


def _slot_bytes(group: Group, job: Job) -> int:
    """A slot, with the staging buffer that a coded layer lands in first."""
    raw, wire = group.bytes_in(job.quant), wire_bytes(group, job)
    return raw if wire == raw else raw + wire


def _cuts(shape: Shape, job: Job) -> list[tuple[list[int], list[int], int]]:
    """(groups that must stay, groups that may stream, slot bytes) for each choice of the largest layer that streams."""
    order = sorted(range(len(shape.groups)), key=lambda i: (-shape.groups[i].bytes_in(job.quant), i))
    return [
        (order[:i], order[i:], SLOTS * _slot_bytes(shape.groups[order[i]], job)) for i in range(len(order))
    ]


def least_weights(shape: Shape, job: Job) -> int:
    """The smallest weight budget in bytes that works."""
    size = [group.count * group.bytes_in(job.quant) for group in shape.groups]
    return min(sum(size), *(sum(size[i] for i in stay) + slots for stay, _, slots in _cuts(shape, job)))


def place(shape: Shape, job: Job, budget: int) -> Placement | None:
    """The placement with most resident bytes within `budget` bytes of weights and slots, all of them raw; None where none
    fits.

    For each choice of the largest streamed layer (which sets the slots' size) the rest is filled largest first. Resident
    bytes never fall as the budget grows.
    """
    total = shape.bytes_in(job.quant)
    if total <= budget:
        return Placement(tuple(group.count for group in shape.groups), total, 0, 0, 0)
    none = [0] * len(shape.groups)
    best: Placement | None = None
    for stay, may, slots in _cuts(shape, job):
        found = _fill(shape, job, budget, stay, may, slots, none, none)
        if found is not None and (
            best is None
            or (found.resident_bytes, -found.slot_bytes) > (best.resident_bytes, -best.slot_bytes)
        ):
            best = found
    return best


def places_packed(shape: Shape, job: Job, budget: int) -> Iterator[Placement]:
    """Placements of which layers stay packed, in the ways that a session's search tries beside the raw one
    (plan_search.py): all that stays does, or of every second layer what pays, while the others stay raw."""
    if job.codec != "lossless" or shape.bytes_in(job.quant) <= budget:
        return
    groups = shape.groups
    for stay, may, slots in _cuts(shape, job):
        packs = [i for i in may if wire_bytes(groups[i], job) < groups[i].bytes_in(job.quant) >= SMALL_UNIT]
        for share in (1, 2):
            may_pack = [-(-group.count // share) if i in packs else 0 for i, group in enumerate(groups)]
            room = budget - slots - sum(groups[i].count * groups[i].bytes_in(job.quant) for i in stay)
            counts, ways = [0] * len(groups), []
            for i in packs:  # one more at a time, the largest first
                wire = wire_bytes(groups[i], job)
                while counts[i] < may_pack[i] and wire <= room:
                    counts[i] += 1
                    room -= wire
                    ways.append(tuple(counts))
            # Where all that stays is packed, fewer never pay: as much is unpacked, and more crosses.
            for packed in ways[-1:] if share == 1 else ways:
                found = _fill(shape, job, budget, stay, may, slots, packed, may_pack)
                if found is not None:
                    yield found


def _fill(
    shape: Shape, job: Job, budget: int, stay: Sequence[int], may: Sequence[int], slots: int, packed: Sequence[int],
    only_packed: Sequence[int],
) -> Placement | None:  # fmt: skip
    """The placement in which ``packed`` layers of each group stay so, and the room left keeps others raw, the largest
    first, but for the ``only_packed`` ones; None where it does not fit."""
    groups = shape.groups
    size = [group.bytes_in(job.quant) for group in groups]
    wire = [wire_bytes(group, job) for group in groups]
    raw = [0] * len(groups)
    packed_bytes = sum(n * each for n, each in zip(packed, wire, strict=True))
    left = budget - slots - packed_bytes
    for i in stay:
        raw[i] = groups[i].count
        left -= raw[i] * size[i]
    if left < 0:
        return None
    for i in may:
        room = groups[i].count - only_packed[i]
        raw[i] = min(room, left // size[i]) if size[i] else room
        left -= raw[i] * size[i]
    kept = [a + b for a, b in zip(raw, packed, strict=True)]
    streams = [group.count - n for group, n in zip(groups, kept, strict=True)]
    coded = [_slot_bytes(group, job) != each for group, each in zip(groups, size, strict=True)]
    return Placement(
        tuple(kept),
        budget - slots - left,
        slots,
        sum(n * each for n, each in zip(streams, wire, strict=True)),
        sum(n * each for n, each, is_coded in zip(streams, size, coded, strict=True) if is_coded),
        tuple(packed) if packed_bytes else (),
        packed_bytes,
        sum(n * each for n, each in zip(packed, size, strict=True)),
    )
