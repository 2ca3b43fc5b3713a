"""A snapshot of a device's memory, as a device engine measures it and the budget rules use it. Plain Python,
without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

# An integrated GPU whose memory exceeds the system's by this factor must have memory of its own (a carve-out
# set by the firmware), which the operating system does not count as system memory.
_CARVE_OUT_RATIO = 9 / 8


@dataclass(frozen=True)
class Memory:
    """A snapshot of a device's memory between two steps (passes of the model). All sizes are in bytes.

    ``total``: the device's memory less the bytes held by other programs. ``free``: the bytes that any program
    could allocate now. ``cached``: the bytes that this process's caching allocator keeps but does not use,
    mostly because activations of earlier steps took them and gave them back. ``ooms``: the number of
    allocations that have failed. ``retries``: the number of allocations that succeeded only after the allocator
    had emptied its cache. ``weights_only``: True where these bytes are a budget for weights alone and nothing
    else allocates from them. ``spills``: True where a full device becomes slow instead of refusing an
    allocation (Windows). ``in_host_memory``: the bytes of this process's device memory that the driver has put in
    host memory instead, because the device was full.
    """

    total: int
    free: int
    cached: int = 0
    ooms: int = 0
    weights_only: bool = False
    retries: int = 0
    spills: bool = False
    in_host_memory: int = 0


def shares_host(total: int, host_total: int) -> bool:
    """Return whether an integrated GPU that reports ``total`` bytes uses the same memory as the host, which
    has ``host_total``.

    An integrated NVIDIA GPU reports the host's total. The firmware of an AMD APU may reserve a part of the
    physical memory for the GPU; the operating system does not count that part as its own. So a GPU that
    reports clearly more than the system has such a reserved part, and its memory is separate from the host's.
    """
    return total <= _CARVE_OUT_RATIO * host_total
