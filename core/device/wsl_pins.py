"""How much host memory can be pinned under WSL2, found by a trial: its driver refuses pins after about 1 GiB, and no
call tells the limit.
"""

from __future__ import annotations

import numpy as np

from ..common.huge_pages import allocate_pages
from ..common.sizes import MIB, format_size
from ..host.arena import Pinner
from ..host.pin_limit import PinLimit

STEP = 256 * MIB
STEPS = 6  # more than the limits that were reported, 0.75 to 1 GiB


def find_pin_limit(pinner: Pinner, room: int) -> PinLimit | None:
    """Pin blocks of `STEP` bytes until one is refused, and unpin them; return the limit, None if none was met.

    ``room``: the bytes of free memory; no more are pinned. One step less than what was pinned is the limit, so that
    other libraries can pin memory too.
    """
    blocks: list[tuple[int, memoryview]] = []
    refused = False
    try:
        while len(blocks) < min(STEPS, room // STEP) and not refused:
            memory = allocate_pages(STEP)
            address = np.frombuffer(memory, np.uint8).ctypes.data
            refused = pinner.register(address, STEP) is not None
            if not refused:
                blocks.append((address, memory))
    except MemoryError:
        return None
    finally:
        for address, _ in blocks:
            pinner.unregister(address)
    if not refused:
        return None
    most = max(0, len(blocks) - 1) * STEP
    return PinLimit(most, f"WSL lets a process pin about {format_size(len(blocks) * STEP)}")
