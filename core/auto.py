"""PURE. ``vram="auto"``: how many bytes of weights a session may hold, from what the device has left between steps.

What a step needs beside the weights is read off the allocator: it keeps what activations took, so what is still
free on the device after the first steps can be spared. The budget falls at once when that runs short (another
program, another model, larger inputs) or a step ran out of memory, and rises slowly: only after a number of quiet
readings, which doubles with every fall, so that a load that comes and goes makes a session settle instead of
reloading again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import GIB

HEADROOM, MOST_HEADROOM = 0.025, GIB // 2  # of the device, left free; at most so many bytes
LOW = 0.5  # of the headroom: below it the budget falls
WORTH = 0.02  # of the device: a rise below it is not worth a new layout
QUIET, MOST_QUIET = 3, 1 << 10  # readings before a rise; doubled by every fall
GIVEN_UP = 0.25  # of what is held, when a step ran out of memory


@dataclass(frozen=True)
class Memory:
    """Bytes of a device between two steps: ``total`` but for what other programs hold, free for everybody, kept unused by this process's allocator
    (``cached``: what its last steps took and gave back). ``ooms``: allocations that failed so far. ``weights_only``:
    a budget for weights, of which nothing else wants any."""

    total: int
    free: int
    cached: int = 0
    ooms: int = 0
    weights_only: bool = False


class Governor:
    """The budget of one session."""

    def __init__(self, ooms: int = 0) -> None:
        self._quiet = 0
        self._patience = QUIET
        self._ooms = ooms

    @staticmethod
    def headroom(memory: Memory) -> int:
        """Bytes to be left free."""
        return 0 if memory.weights_only else min(MOST_HEADROOM, int(HEADROOM * memory.total))

    def read(
        self, memory: Memory, held: int, least: int, everything: int, budget: int | None = None
    ) -> int | None:
        """A new budget after a step, None to keep the present one.

        ``budget``: the present one (default: ``held``), of which not all need be held; ``held``: bytes of weights on the device; ``least``: the smallest budget that works; ``everything``: what all
        weights take.
        """
        if memory.ooms > self._ooms:
            self._ooms = memory.ooms
            return self.short(memory, held, least)
        headroom = self.headroom(memory)
        if memory.free < LOW * headroom:
            return self._fall(held - (headroom - memory.free), held, least)
        spare = memory.free - headroom
        target = min(everything, held + spare)
        most = max(held, budget or 0)  # what is not held of it holds no unit more
        if target - most < min(WORTH * memory.total, max(1, everything - most)):
            self._quiet = 0
            return None
        self._quiet += 1
        if self._quiet < self._patience:
            return None
        self._quiet = 0
        return target

    def short(self, memory: Memory, held: int, least: int) -> int | None:
        """A new budget after a step that ran out of memory."""
        self._ooms = max(self._ooms, memory.ooms)
        more = max(int(GIVEN_UP * held), self.headroom(memory) - memory.free)
        return self._fall(held - more, held, least)

    def gave(self) -> None:
        """Another session was given some of the budget: rise again later than sooner."""
        self._quiet = 0
        self._patience = min(MOST_QUIET, 2 * self._patience)

    def _fall(self, target: int, held: int, least: int) -> int | None:
        self.gave()
        target = max(least, target)
        return target if target < held else None


class Regrowth:
    """When weights that pressure took out of a pool may come back: after quiet readings, twice as many with every loss."""

    def __init__(self) -> None:
        self._quiet = 0
        self._patience = QUIET

    def lost(self) -> None:
        """Pressure took some."""
        self._quiet = 0
        self._patience = min(MOST_QUIET, 2 * self._patience)

    def read(self, memory: Memory, held: int, most: int) -> int | None:
        """How many bytes may be held from now on, None to wait; ``held``: now, ``most``: the budget."""
        target = min(most, held + memory.free - Governor.headroom(memory))
        if target - held < min(WORTH * memory.total, max(1, most - held)):
            self._quiet = 0
            return None
        self._quiet += 1
        if self._quiet < self._patience:
            return None
        self._quiet = 0
        return target
