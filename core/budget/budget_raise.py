"""Raise a budget that a host application set before any pass had run, by the memory that passes leave free.

A pass is one forward of a session's module. A host application such as ComfyUI estimates how much device memory
a pass needs in addition to the weights, and adds reserves. Once passes have run, the bytes that they left free
are known. Weights may take these bytes except for a headroom. The same pass can need more memory another time,
because allocators do not always use memory equally well. If a pass runs out of memory while weights take extra
bytes, half as many extra bytes are tried once more, and none after the next failure. The module imports no
torch and has no side effects.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from ..common.memory_snapshot import Memory
from ..common.sizes import MIB
from .device_governor import STILL, Left

# The headroom: device memory left free for other programs, for passes that need more than those seen so
# far, and for fragmentation after weights were moved. With 192 MiB, passes ran out of memory under two of
# three layouts on a card with 6 GiB (records comfyui-11 and -12): up to 0.2 GB more was fragmented after
# weights had moved.
LEAVES = Left(0.05, 320 * MIB, 640 * MIB)
READINGS = 3  # consecutive readings of free memory that must agree before the budget may rise
SIZES = 64  # number of input sizes that are remembered


class BudgetRaise:
    """The bytes by which a session's budget may exceed the budget that its host application set.

    ``keep``: the least device bytes to leave free; ``most``: the largest budget in bytes. ``none``: whether
    the budget must stay at the host application's value. ``beyond``: the most bytes by which the budget may
    exceed that value, infinite before the first failure.
    """

    def __init__(self, keep: int = 0, most: float = math.inf) -> None:
        self.keep, self.most = keep, most
        self.none = False
        self.beyond = math.inf
        # Input sizes of passes -> bytes that weights and the memory left free took together in the last pass of these
        # sizes. Kept when weights are laid out again.
        self._rooms: dict[Hashable, int] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all readings, because the weights were laid out again."""
        self._last: Memory | None = None
        self._alike = 0
        self._asked: set[Hashable] = set()

    def forget_other_sizes(self) -> None:
        """Forget the sizes of inputs with which no pass has run since the weights were laid out."""
        self._rooms = {asked: room for asked, room in self._rooms.items() if asked in self._asked}

    def passed(self, memory: Memory, asked: Hashable, held: int = 0) -> None:
        """Record the device's ``memory`` as a pass left it, for inputs of the sizes ``asked``. ``held``: bytes of weights
        on the device.

        The allocator keeps the memory that the pass used, so the bytes that are free now were free
        throughout the pass. A pass with inputs of other sizes may need more, so new sizes start the count
        of readings again.
        """
        last, self._last = self._last, memory
        still = STILL * memory.total
        moved = asked not in self._asked or last is None or abs(memory.free - last.free) > still
        self._alike = 1 if moved else self._alike + 1
        if len(self._asked) >= SIZES:
            self._asked.clear()
        self._asked.add(asked)
        if len(self._rooms) >= SIZES:
            self._rooms.clear()
        self._rooms[asked] = memory.free + held

    def failed(self, beyond: int) -> None:
        """Record that a pass ran out of memory.

        ``beyond``: bytes by which the budget exceeded the host application's. Allow half as many bytes
        after the first failure, and none after the second.
        """
        self.none = self.none or self.beyond < math.inf
        self.beyond = beyond // 2

    def spare(self, budget: int, base: int, unused: int = 0, held: int = 0) -> int:
        """Return the bytes by which ``budget`` (in bytes) may rise now.

        ``base``: the host application's budget in bytes. ``unused``: bytes of ``budget`` that no weight
        takes; the device reports these as free although they are already promised to weights. ``held``: bytes of
        weights on the device.
        """
        if self.none or self._last is None or self._alike < READINGS:
            return 0
        left = (
            min(self._rooms.values(), default=0) - held - unused - max(self.keep, LEAVES.of(self._last.total))
        )
        return int(max(0, min(left, base + self.beyond - budget, self.most - budget)))
