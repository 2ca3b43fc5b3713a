"""PURE. Whether a drive reads faster straight into the caller's memory or through small buffers that stay in a CPU's cache.

A real drive writes to memory by itself, and straight is right. A virtual drive's bytes may be copied there by the
hypervisor, which is faster where the destination is cached: the same few megabytes again and again, from which
a worker copies them on. No property of a machine tells which it is, so both ways are tried in turns while streaming,
and the faster one is kept until the next trial.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PacePolicy:
    """``window``: bytes that one way reads before the other has its turn; ``turns``: of each way in a trial;
    ``gain``: of straight's rate that the way aside must exceed; ``lasting``: bytes after which both are tried anew."""

    window: int = 128 << 20
    turns: int = 4
    gain: float = 1.05
    lasting: int = 64 << 30


@dataclass
class Tried:
    """What one way read, and the seconds it took."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.nbytes / self.seconds if self.seconds > 0 else None


@dataclass
class Pace:
    """Chooses for all workers that read from one drive; any thread may ask and tell.

    ``aside``: whether the next read goes through a worker's own buffer. ``rates``: bytes per second of the last whole
    trial, straight and aside; None before there was one.
    """

    policy: PacePolicy = field(default_factory=PacePolicy)
    aside: bool = False
    rates: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._last: float | None = None  # when the last read ended, if others were waiting for a worker then
        self._begin()

    def _begin(self) -> None:
        self._tried = {False: Tried(), True: Tried()}
        self._window = self._turn = self._since = 0
        self._trying = True

    def ended(self, now: float, nbytes: int, aside: bool, busy: bool) -> None:
        """A read of ``nbytes`` ended at ``now`` seconds; ``aside``: how it was done; ``busy``: more were waiting for a
        worker, so that the drive was given all that workers can give it.

        Only what lies between two ends of reads, with the drive busy all the time, is counted.
        """
        with self._lock:
            last, self._last = self._last, now if busy else None
            if not self._trying:
                self._since += nbytes
                if self._since >= self.policy.lasting:
                    self._begin()
                    self.aside = False
                return
            if last is None or aside != self.aside:  # of another window
                return
            tried = self._tried[aside]
            tried.nbytes += nbytes
            tried.seconds += max(0.0, now - last)
            self._window += nbytes
            if self._window >= self.policy.window:
                self._next()

    def _next(self) -> None:
        self._window = 0
        self._turn += 1
        if self._turn < 2 * self.policy.turns:
            # First, second, second, first: a drive that becomes faster or slower meanwhile favours neither.
            self.aside = self._turn % 4 in (1, 2)
            return
        straight, aside = self._tried[False].rate, self._tried[True].rate
        if straight and aside:
            self.rates = straight, aside
            self.aside = aside > self.policy.gain * straight
        self._trying, self._since = False, 0
