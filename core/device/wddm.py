"""The rules for memory under WDDM, the driver model by which Windows manages the memory of GPUs. Pure functions.

WDDM lends host memory to a GPU as *shared* memory, about half of the physical memory. Pinned host memory counts as
shared memory. If programs allocate more device memory than the card has, WDDM does not refuse the allocation: it uses
shared memory, which the card reads at the rate of its link.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.sizes import MIB, format_size
from ..host.pin_limit import PinLimit

# Bytes of a card's memory that are left to the desktop, whose programs take and give back memory at any time.
# ComfyUI leaves as much on Windows.
DESKTOP = 600 * MIB
# Share of a card's free memory that weights may take.
CARD_SHARE = 0.95
# ComfyUI pins no more than this share of the physical memory on Windows.
PINNED_SHARE = 0.4
# Bytes of the shared memory that are left to allocations of other libraries in this process, and to the rounding of
# registered sizes.
SHARED_LEFT = 256 * MIB


@dataclass(frozen=True)
class Segment:
    """What DXGI reports of one kind of memory for this process, in bytes. ``budget``: what the process should use at
    most now, beside the other programs; ``usage``: what it uses.
    """

    budget: int
    usage: int


def pin_limit(shared: Segment | None, pinned: int, physical: int) -> PinLimit:
    """Return the limit of pinned memory. ``shared``: the shared memory, None if DXGI does not report it; ``pinned``: the
    bytes that are pinned now; ``physical``: the machine's physical memory in bytes.
    """
    if shared is None or shared.budget == 0:
        most = int(PINNED_SHARE * physical)
        return PinLimit(most, f"40 % of the RAM ({format_size(most)}) may be pinned on Windows")
    # Pinned bytes are a part of the usage. The second term holds if a driver does not count them there.
    most = min(pinned + shared.budget - shared.usage, shared.budget) - SHARED_LEFT
    # The reason has no figures, because they change with each pin and a report states each reason once.
    return PinLimit(max(0, most), "Windows lends no more shared GPU memory to this process at present")


def room(free: int, local: Segment | None) -> int:
    """Return the bytes of the card's own memory that this process can still allocate. ``free``: what the driver reports;
    ``local``: the card's own memory, None if DXGI does not report it.
    """
    return free if local is None else min(free, max(0, local.budget - local.usage))


def together(local: Segment | None, shared: Segment | None) -> Segment | None:
    """Return both kinds of memory as one, for an integrated GPU, which computes in either; None if one is unknown."""
    if local is None or shared is None:
        return None
    return Segment(local.budget + shared.budget, local.usage + shared.usage)


def weights_room(free: int) -> int:
    """Return how many of ``free`` bytes of the card's own memory weights may take beside the desktop."""
    return min(int(CARD_SHARE * free), max(free // 2, free - DESKTOP))


def in_host_memory(reserved: int, local: Segment | None) -> int:
    """Return how many of the ``reserved`` device bytes of torch's allocator lie in host memory.

    The usage of the card's own memory contains all of these bytes, and the driver's own, as long as they lie there.
    Returns 0 if DXGI does not report the usage.
    """
    return 0 if local is None or local.usage == 0 else max(0, reserved - local.usage)
