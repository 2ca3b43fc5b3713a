"""`HostGovernor`: the RAM budget of one session, by what the host has left. Pure."""

from __future__ import annotations

LOW = 0.5  # of the bytes to be left free: below it the budget falls
WORTH = 0.1  # of the first budget that a rise must be: a file's cache is filled anew for it
QUIET, MOST_QUIET = 8, 1 << 10  # readings before a rise; doubled by every fall


class HostGovernor:
    """The RAM budget of one session. ``first``: the bytes it began with and never exceeds; ``keep``: bytes left to others."""

    def __init__(self, first: int, keep: int) -> None:
        self.first, self.keep = first, keep
        self._quiet = 0
        self._patience = QUIET

    def read(self, free: int, held: int, budget: int, least: int) -> int | None:
        """Return a new budget in bytes, None to keep ``budget``.

        ``free``: bytes of host memory that this process can have; ``held``: bytes that the session holds; ``least``: the
        smallest budget that works.
        """
        keep = self.keep
        if free < LOW * keep:
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
