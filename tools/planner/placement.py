"""The planner's choice of layers that stay on the card, either raw (unpacked) or packed and unpacked at each
use.

Layers of the same size are interchangeable, so a placement only counts layers in each group. estimate.py
computes the step time of a placement. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.common.sizes import MIB
from ...core.plan.residency import SMALL_UNIT
from . import presets
from .shapes import Group, Shape

if TYPE_CHECKING:
    from .estimate import Job

SLOTS = 2  # device slots for what streams: one is computed with while the other is filled
# Bytes: a session divides a larger layer into parts of at most this size, each of which streams by itself
# (core/session/rule_planner.py, PART; a test compares the two).
PART = 128 * MIB


@dataclass(frozen=True)
class Placement:
    """The numbers of layers that stay on the card, and the resulting bytes.

    `resident`: number of resident layers in each group of the shape; `packed`: how many of them stay packed
    (empty: none). `resident_bytes`: bytes on the card; `packed_bytes`: the part of them that is packed;
    `packed_raw`: bytes of those layers when unpacked. `slot_bytes`: bytes of the slots. `streamed_wire`:
    bytes copied in one pass; `streamed_raw`: unpacked bytes of the layers that are copied packed.
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
        """The number of layers that stay packed."""
        return sum(self.packed)

    @property
    def host_bytes(self) -> int:
        """The bytes of weights in host memory: of the streamed layers, and of those that stay packed, which
        keep a copy.
        """
        return self.streamed_wire + self.packed_bytes


def wire_bytes(group: Group, job: Job) -> int:
    """Return the bytes copied for one layer: raw, or losslessly compressed where the job asks for it and
    weights are 16-bit.
    """
    raw = group.bytes_in(job.quant)
    is_16bit = group.params and abs(raw * 8 / group.params - 16) < 0.1
    return int(raw * presets.LOSSLESS_RATIO) if job.codec == "lossless" and is_16bit else raw


def part_bytes(group: Group, job: Job) -> int:
    """Return the unpacked bytes of the largest part in which a layer streams.

    A matrix is not divided, so a part has the size of the layer's largest matrix where that exceeds `PART`. The whole
    layer is one part where its matrices are not known.
    """
    raw = group.bytes_in(job.quant)
    if not group.largest or not group.params:
        return raw
    return min(raw, max(PART, raw * group.largest // group.params))


def part_wire_bytes(group: Group, job: Job) -> int:
    """Return the bytes copied for the largest part in which a layer streams."""
    raw, part = group.bytes_in(job.quant), part_bytes(group, job)
    return wire_bytes(group, job) * part // raw if raw else 0


def _slot_bytes(group: Group, job: Job) -> int:
    """Return the bytes of a slot for one part of a layer, with the staging buffer that packed bytes are copied to
    first.
    """
    part, wire = part_bytes(group, job), part_wire_bytes(group, job)
    return part if wire == part else part + wire


def _cuts(shape: Shape, job: Job) -> list[tuple[list[int], list[int], int]]:
    """List (groups that must stay, groups that may stream, slot bytes) for each choice of the largest slot.

    Groups are given by index; all groups whose slots would be larger than the chosen one must stay. The groups that
    may stream are in the order in which layers are kept: the largest first.
    """
    slot = [_slot_bytes(group, job) for group in shape.groups]
    size = [group.bytes_in(job.quant) for group in shape.groups]
    order = sorted(range(len(slot)), key=lambda i: (-slot[i], -size[i], i))
    return [
        (order[:i], sorted(order[i:], key=lambda i: (-size[i], i)), SLOTS * slot[order[i]])
        for i in range(len(order))
    ]


def least_weight_budget(shape: Shape, job: Job) -> int:
    """Return the smallest budget for weights and slots, in bytes, that works."""
    size = [group.count * group.bytes_in(job.quant) for group in shape.groups]
    return min(sum(size), *(sum(size[i] for i in stay) + slots for stay, _, slots in _cuts(shape, job)))


def place(shape: Shape, job: Job, budget: int) -> Placement | None:
    """Return the placement of raw layers with the most resident bytes; None where none fits.

    `budget`: bytes for weights and slots. For each choice of the largest streamed layer, which determines the
    size of the slots, layers are kept largest first. Resident bytes never fall as the budget grows.
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


def packed_placements(shape: Shape, job: Job, budget: int) -> Iterator[Placement]:
    """Yield placements in which all resident layers that can be packed stay packed, as in a session's layout
    (`Planner.advise` in core/session/planner.py).
    """
    if job.codec != "lossless" or shape.bytes_in(job.quant) <= budget:
        return
    groups = shape.groups
    for stay, may, slots in _cuts(shape, job):
        packs = [i for i in may if wire_bytes(groups[i], job) < groups[i].bytes_in(job.quant) >= SMALL_UNIT]
        may_pack = [group.count if i in packs else 0 for i, group in enumerate(groups)]
        room = budget - slots - sum(groups[i].count * groups[i].bytes_in(job.quant) for i in stay)
        counts = [0] * len(groups)
        for i in packs:  # as many as fit, the largest first
            wire = wire_bytes(groups[i], job)
            counts[i] = max(0, min(may_pack[i], room // wire))
            room -= counts[i] * wire
        found = _fill(shape, job, budget, stay, may, slots, counts, may_pack)
        if any(counts) and found is not None:
            yield found


def _fill(
    shape: Shape, job: Job, budget: int, stay: Sequence[int], may: Sequence[int], slots: int, packed: Sequence[int],
    only_packed: Sequence[int],
) -> Placement | None:  # fmt: skip
    """Return the placement with ``packed`` layers of each group kept packed; None where that does not fit.

    The remaining budget keeps further layers raw, the largest first. ``stay``: groups of which every layer
    must stay; ``may``: groups that may stream; ``only_packed``: for each group, the number of layers that are
    never kept raw.
    """
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
    coded = [packed_size != each for packed_size, each in zip(wire, size, strict=True)]
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
