"""Choose the bytes of weights of a session with ``vram="auto"`` from the free device memory between steps.

A pass is one forward of the module. A step is one pass or, when training, the passes and the backward that
belong together. A reading is a measurement of the device's memory after a step, and a quiet reading shows
enough free memory for the budget to rise. Weights are laid out anew whenever the budget changes.

The allocator keeps the memory that activations took. So the memory that is still free after the first
steps is not needed by steps, and weights may take it. The budget falls at once when free memory runs
short (because of another program, another model, or larger inputs) or when a step ran out of memory. The
budget rises slowly: only after a number of quiet readings, which doubles with every fall. With a load
that comes and goes, a session therefore settles and does not reload its weights again and again.

The memory left free (the headroom) is for needs that were not seen yet: other programs, larger inputs,
and memory that the allocator cannot use because of fragmentation. After a number of readings without
change (`CALM`) a smaller headroom is enough. The first headroom is restored at the first sign that the
smaller one is not enough: free memory below half of the headroom, or an allocation that failed or had to
be retried.

An integrated device computes in the host's memory. The device and the host then share one budget, and
weights on the device come first, because those are not copied. The weights of a loaded module take that
memory wherever they wait. So streamed weights can move to the device without taking more memory, and
moving weights back to the host frees no memory. The module imports no torch and has no side effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..common.memory_snapshot import Memory
from ..common.sizes import GIB, MIB

# The first headroom: a share of the device's memory, and at most so many bytes.
HEADROOM, MOST_HEADROOM = 0.025, GIB // 2
LOW = 0.5  # the budget falls when the free memory is less than this share of the headroom
WORTH = 0.02  # the least rise that is worth a new layout, as a share of the device's memory
STILL = 0.002  # smaller differences between two readings do not count, as a share of the device's memory
# A session has settled after readings in a row without change: this many times the readings before a rise.
CALM = 2
CAREFUL = 1.5  # a session that trains needs this many times as many readings, because a failed step is lost
SETTLED_WORTH = 0.005  # like `WORTH`, for a settled session, which rises only once
QUIET, MOST_QUIET = 3, 1 << 10  # readings before a rise, at first and at most; doubled by every fall
GIVEN_UP = 0.25  # share of the held weights to give up when a pass without gradients ran out of memory
# The host gets at least 1/8 of a budget shared with the device, because files are read through host memory.
HOSTS_LEAST = 8


@dataclass(frozen=True)
class Left:
    """The headroom of a settled session: ``share`` of the device's memory, from ``least`` to ``most`` bytes."""

    share: float
    least: int
    most: int

    def of(self, total: int) -> int:
        return max(self.least, min(self.most, int(self.share * total)))


# A unit of a model takes 50 to 130 MB, so these values decide whether one more unit fits.
INFERENCE = Left(0.01, 96 * MIB, 256 * MIB)
TRAINING = Left(0.0175, 160 * MIB, 448 * MIB)


class Governor:
    """The rule for the VRAM budget of one session.

    ``ooms`` and ``retries``: failed and retried allocations so far, as in `Memory`. ``settled``: whether
    readings have not changed for a while, so that a smaller headroom is left free.
    """

    def __init__(self, ooms: int = 0, retries: int = 0) -> None:
        self._quiet = 0
        self._patience = QUIET
        self._ooms, self._retries = ooms, retries
        self._calm = 0
        self._last: Memory | None = None
        self.settled = False

    @staticmethod
    def headroom(memory: Memory) -> int:
        """Return the bytes to leave free before a session has settled."""
        return 0 if memory.weights_only else min(MOST_HEADROOM, int(HEADROOM * memory.total))

    def leaves(self, memory: Memory, training: bool = False) -> int:
        """Return the bytes to leave free now; ``training``: whether the session trains."""
        first = self.headroom(memory)
        return min(first, (TRAINING if training else INFERENCE).of(memory.total)) if self.settled else first

    def read(
        self, memory: Memory, held: int, least: int, everything: int, budget: int | None = None, *,
        training: bool = False, alone: bool = True, recording: bool = True,
    ) -> int | None:  # fmt: skip
        """Return a new budget in bytes after a step, or None to keep the present budget.

        ``held``: bytes of weights on the device; ``least``: the smallest budget that works;
        ``everything``: bytes of all weights; ``budget``: the present budget (default: ``held``), which
        weights need not fill. ``training``: whether the session trains, so that a failed step is lost;
        ``recording``: whether the step recorded gradients (False for sampling, whose failed passes are
        not lost); ``alone``: whether no other session's budget follows the same device.
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
        most = max(held, budget or 0)  # bytes of the budget that are not held are too few for another unit
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
        """Count the readings in a row without change, and settle the session after enough of them.

        ``steady``: False if the reading counts as a change whatever it shows.
        """
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
            self._quiet = self._patience - 1  # so that a rise needs no further wait

    def unsettle(self) -> None:
        """Restart the count of readings without change, because a pass with new inputs is about to run.

        A session that has settled stays settled, with its smaller headroom.
        """
        self._calm = 0

    def short(self, memory: Memory, held: int, least: int, training: bool = False) -> int | None:
        """Return a new budget in bytes after a step that ran out of memory, or None if no smaller budget works.

        For ``training``, go to ``least`` at once: every further attempt is a lost step, and host
        applications give up after a few.
        """
        self._ooms = max(self._ooms, memory.ooms)
        more = held - least if training else max(int(GIVEN_UP * held), self.headroom(memory) - memory.free)
        return self._fall(held - more, held, least)

    def gave(self) -> None:
        """Wait twice as long before the next rise, because the session gave up a part of its budget."""
        self._quiet = self._calm = 0
        self.settled = False
        self._patience = min(MOST_QUIET, 2 * self._patience)

    def _fall(self, target: int, held: int, least: int) -> int | None:
        # Return ``target``, at least ``least``, as the new budget; None if that is not below ``held``.
        self.gave()
        target = max(least, target)
        return target if target < held else None


# -- devices that compute in the host's memory


def beside(whole: int, on_device: int) -> int:
    """Return the host's part of ``whole`` bytes, the budget for weights in memory that host and device share.

    ``on_device``: bytes of weights that the device takes.
    """
    return max(whole // HOSTS_LEAST, whole - on_device)


def wherever(memory: Memory, waiting: int) -> Memory:
    """Return ``memory``, which device and host share, with ``waiting`` more bytes free.

    ``waiting``: bytes of a loaded module's weights that wait on the host. These weights can move to the
    device without taking more memory. At least the headroom counts as free, because the session would
    free no memory by moving weights back to the host.
    """
    return replace(memory, free=max(memory.free + waiting, Governor.headroom(memory)))


class Regrowth:
    """The rule for when weights may return to a VBAR after other programs' needs took memory out of the VBAR.

    A VBAR is a range of device addresses whose memory comfy-aimdo takes away when an allocation needs memory.
    The weights return after a number of quiet readings, which doubles with every loss.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._patience = QUIET

    def lost(self) -> None:
        """Wait twice as long before the next return, because other programs' needs took memory."""
        self._quiet = 0
        self._patience = min(MOST_QUIET, 2 * self._patience)

    def read(self, memory: Memory, held: int, most: int) -> int | None:
        """Return the bytes that may be held from now on, or None to wait.

        ``held``: bytes held now; ``most``: the budget in bytes.
        """
        target = min(most, held + memory.free - Governor.headroom(memory))
        if target - held < min(WORTH * memory.total, max(1, most - held)):
            self._quiet = 0
            return None
        self._quiet += 1
        if self._quiet < self._patience:
            return None
        self._quiet = 0
        return target
