"""PURE. How much more of a device weights may take where a host set the budget before it had seen a pass.

A host such as ComfyUI estimates what a pass needs beside the weights, and adds reserves. Once passes have run, what they
left free is known: all but a headroom of it is room. Allocators use memory now better, now worse: where a pass ran out of it
with some of that room taken, half as much is tried once more, then none.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from ..common.memory import Memory
from ..common.sizes import MIB
from .device_governor import STILL, Left

# Of the device, for other programs, for what was not seen yet, and for what moving weights about costs an allocator: with 192 MiB
# two of three layouts did not hold on a card with 6 GiB (records comfyui-11 and -12), where up to 0.2 GB more lay in pieces afterwards.
LEAVES = Left(0.05, 320 * MIB, 640 * MIB)
READINGS = 3  # in a row that agree
SIZES = 64  # of inputs that are remembered


class Room:
    """``keep``: bytes that stay free at least; ``most``: bytes that the budget never exceeds."""

    def __init__(self, keep: int = 0, most: float = math.inf) -> None:
        self.keep, self.most = keep, most
        self.none = False  # the host's estimate holds
        self.beyond = math.inf  # bytes beyond the host's budget that may be tried at most
        self.begin_anew()

    def begin_anew(self) -> None:
        """Weights were laid out anew."""
        self._last: Memory | None = None
        self._alike = 0
        self._asked: set[Hashable] = set()

    @property
    def unsure(self) -> bool:
        """Whether passes ran whose readings do not agree yet."""
        return not self.none and self._last is not None and self._alike < READINGS

    def passed(self, memory: Memory, asked: Hashable) -> None:
        """A pass ended with ``memory`` left; ``asked``: sizes of its inputs, which others may need more for.

        What the pass took is the allocator's still, so that what is free was free throughout.
        """
        last, self._last = self._last, memory
        still = STILL * memory.total
        moved = asked not in self._asked or last is None or abs(memory.free - last.free) > still
        self._alike = 1 if moved else self._alike + 1
        if len(self._asked) >= SIZES:
            self._asked.clear()
        self._asked.add(asked)

    def failed(self, beyond: int) -> None:
        """A pass ran out of memory with ``beyond`` bytes more than the host's budget."""
        self.none = self.none or self.beyond < math.inf
        self.beyond = beyond // 2

    def spare(self, budget: int, base: int, unused: int = 0) -> int:
        """Bytes that ``budget`` may rise by now, ``base`` being the host's own; ``unused``: bytes of it that no weight
        holds, which are free and spoken for."""
        if self.none or self._last is None or self._alike < READINGS:
            return 0
        left = self._last.free - unused - max(self.keep, LEAVES.of(self._last.total))
        return int(max(0, min(left, base + self.beyond - budget, self.most - budget)))
