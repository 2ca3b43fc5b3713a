"""PURE. ``vram="auto"``: how many bytes of weights a session may hold, from what the device has left between steps.

What a step needs beside the weights is read off the allocator: it keeps what activations took, so what is still
free on the device after the first steps can be spared. The budget falls at once when that runs short (another
program, another model, larger inputs) or a step ran out of memory, and rises slowly: only after a number of quiet
readings, which doubles with every fall, so that a load that comes and goes makes a session settle instead of
reloading again and again.

What is left free (the headroom) is for what has not been seen yet: other programs, larger inputs, memory that the
allocator cannot use because it lies in pieces. Once nothing has moved for a while (`CALM`), less of it is enough; the
first sign that it is not (free memory below half of it, an allocation that failed or had to be tried twice) brings the
first headroom back.

An integrated device computes in the host's memory: one budget for both, of which the device's weights come first, because
what is there need not be copied. A loaded module's weights lie in that memory wherever they wait: what streams of them can
move to the device, and nothing is free because one moves back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..common.memory import Memory
from ..common.sizes import GIB, MIB

HEADROOM, MOST_HEADROOM = 0.025, GIB // 2  # of the device, left free at first; at most so many bytes
LOW = 0.5  # of the headroom: below it the budget falls
WORTH = 0.02  # of the device: a rise below it is not worth a new layout
STILL = 0.002  # of the device: what moves less between two readings has not moved
CALM = 2  # times the readings before a rise, in a row, in which nothing moved: settled
CAREFUL = 1.5  # times as many where the session trains: a step that fails there is lost
SETTLED_WORTH = 0.005  # of the device: the one rise of a settled session is worth a new layout from here on
QUIET, MOST_QUIET = 3, 1 << 10  # readings before a rise; doubled by every fall
GIVEN_UP = 0.25  # of what is held, when a pass without gradients ran out of memory
HOSTS_LEAST = 8  # the part of a shared budget that is the host's at least: files are read through it


@dataclass(frozen=True)
class Left:
    """What a settled session leaves free: ``share`` of the device, within bytes."""

    share: float
    least: int
    most: int

    def of(self, total: int) -> int:
        return max(self.least, min(self.most, int(self.share * total)))


# One part of a model is 50 to 130 MB, so the last of them is what this is about: at 8 GB 3 % of a step (measured).
INFERENCE = Left(0.01, 96 * MIB, 256 * MIB)
TRAINING = Left(0.0175, 160 * MIB, 448 * MIB)


class Governor:
    """The budget of one session."""

    def __init__(self, ooms: int = 0, retries: int = 0) -> None:
        self._quiet = 0
        self._patience = QUIET
        self._ooms, self._retries = ooms, retries
        self._calm = 0
        self._last: Memory | None = None
        self.settled = False  # nothing has moved for a while: less is left free

    @staticmethod
    def headroom(memory: Memory) -> int:
        """Bytes to be left free before a session has settled."""
        return 0 if memory.weights_only else min(MOST_HEADROOM, int(HEADROOM * memory.total))

    def leaves(self, memory: Memory, training: bool = False) -> int:
        """Bytes to be left free now."""
        first = self.headroom(memory)
        return min(first, (TRAINING if training else INFERENCE).of(memory.total)) if self.settled else first

    def read(
        self, memory: Memory, held: int, least: int, everything: int, budget: int | None = None, *,
        training: bool = False, alone: bool = True, recording: bool = True,
    ) -> int | None:  # fmt: skip
        """A new budget after a step, None to keep the present one.

        ``budget``: the present one (default: ``held``), of which not all need be held; ``held``: bytes of weights on the
        device; ``least``: the smallest budget that works; ``everything``: what all weights take. ``training``: a step
        that fails is lost, but for those that were not ``recording`` for a backward (sampling); ``alone``: no other
        session's budget follows the same device.
        """
        retried, self._retries = memory.retries > self._retries, max(self._retries, memory.retries)
        if memory.ooms > self._ooms:
            self._ooms = memory.ooms
            return self.short(memory, held, least, training and recording)
        if self.settled and (retried or not alone):
            return self._fall(held - (self.headroom(memory) - memory.free), held, least)
        self._settle(memory, training, alone and not retried)
        headroom = self.leaves(memory, training)
        if memory.free < LOW * headroom:
            return self._fall(held - (self.headroom(memory) - memory.free), held, least)
        spare = memory.free - headroom
        target = min(everything, held + spare)
        most = max(held, budget or 0)  # what is not held of it holds no unit more
        worth = SETTLED_WORTH if self.settled else WORTH
        if target - most < min(worth * memory.total, max(1, everything - most)):
            self._quiet = 0
            return None
        self._quiet += 1
        if self._quiet < self._patience:
            return None
        self._quiet = 0
        return target

    def _settle(self, memory: Memory, training: bool, steady: bool) -> None:
        """Note whether anything moved since the reading before."""
        last, self._last = self._last, memory
        still = STILL * memory.total
        moved = (
            last is None
            or abs(memory.free - last.free) > still
            or abs(memory.cached - last.cached) > still
            or abs(memory.total - last.total) > still
        )
        self._calm = 0 if moved or not steady or memory.spills else self._calm + 1
        if not self.settled and self._calm >= CALM * self._patience * (CAREFUL if training else 1):
            self.settled = True
            self._quiet = self._patience - 1  # it has waited already

    def unsettle(self) -> None:
        """Something new is about to run: begin to wait anew. What a settled session leaves free still counts."""
        self._calm = 0

    def short(self, memory: Memory, held: int, least: int, training: bool = False) -> int | None:
        """A new budget after a step that ran out of memory: of one that trains the least at once, because every try is a
        lost step, and hosts give up after a few."""
        self._ooms = max(self._ooms, memory.ooms)
        more = held - least if training else max(int(GIVEN_UP * held), self.headroom(memory) - memory.free)
        return self._fall(held - more, held, least)

    def gave(self) -> None:
        """Another session was given some of the budget: rise again later than sooner."""
        self._quiet = self._calm = 0
        self.settled = False
        self._patience = min(MOST_QUIET, 2 * self._patience)

    def _fall(self, target: int, held: int, least: int) -> int | None:
        self.gave()
        target = max(least, target)
        return target if target < held else None


# -- devices that compute in the host's memory


def beside(whole: int, on_device: int) -> int:
    """Of ``whole`` bytes for weights in a shared memory, those for the host beside ``on_device`` for the device."""
    return max(whole // HOSTS_LEAST, whole - on_device)


def wherever(memory: Memory, waiting: int) -> Memory:
    """``memory``, shared, as a session of a loaded module reads it, of whose weights ``waiting`` bytes are on the host: it can
    have them on the device instead, and would free nothing by giving way."""
    return replace(memory, free=max(memory.free + waiting, Governor.headroom(memory)))


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
