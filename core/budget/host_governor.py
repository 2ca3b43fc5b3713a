"""`HostGovernor`: follow the free host memory with the RAM budget of one session (``ram="auto"``).

The module imports no torch and has no side effects.
"""

from __future__ import annotations

LOW = 0.5  # the budget falls when the free memory is less than this share of the bytes to leave free
WORTH = 0.1  # the least rise, as a share of the first budget: after a rise a file's cache is filled again
LEAST_CACHE = 32 << 20  # bytes, see `least_cache`
QUIET, MOST_QUIET = 8, 1 << 10  # readings before a rise, at first and at most; doubled by every fall


def least_cache(nbytes: int) -> int:
    """Return the bytes of the smallest cache that is worth having for ``nbytes`` of weights that are read from disk.

    A cache is divided into about forty buffers. Smaller ones than these mean so many small reads that a pass takes many
    times as long, and descriptions of the pieces that take more memory than the smaller cache frees.
    """
    return max(nbytes // 128, min(LEAST_CACHE, nbytes // 32))


class HostGovernor:
    """The rule for the RAM budget of one session.

    ``first``: the first budget in bytes, which later budgets never exceed; ``keep``: bytes of host memory
    to leave free for other programs.
    """

    def __init__(self, first: int, keep: int) -> None:
        self.first, self.keep = first, keep
        self._quiet = 0
        self._patience = QUIET

    def short(self, free: int) -> bool:
        """Return whether ``free`` bytes of host memory are so few that the budget has to fall."""
        return free < LOW * self.keep

    def read(self, free: int, held: int, budget: int, least: int) -> int | None:
        """Return a new RAM budget in bytes, or None to keep ``budget``.

        ``free``: bytes of host memory that this process can have; ``held``: bytes that the session holds;
        ``least``: the smallest budget that works.
        """
        keep = self.keep
        if self.short(free):
            self._quiet = 0
            self._patience = min(MOST_QUIET, 2 * self._patience)
            target = max(least, held - (keep - free))
            return target if target < budget else None
        target = min(self.first, held + free - keep)
        if target - budget < WORTH * self.first:
            self._quiet = 0
            return None
        self._quiet += 1
        if self._quiet < self._patience:
            return None
        self._quiet = 0
        return target
