"""PURE. Whether a drive reads faster straight into the caller's memory or through small buffers that stay in a CPU's cache.

A real drive writes to memory by itself, and straight is right. A virtual drive's bytes may be copied there by the
hypervisor, which is faster where the destination is cached: the same few megabytes again and again, from which
a worker copies them on. No property of a machine tells which it is, so the ways are tried in turns while streaming,
and the fastest one is kept until the next trial.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PacePolicy:
    """``ways``: bytes of one read through a worker's own buffer (whole pages), 0 for straight, which is first; ``window``: bytes that one
    way reads before the next has its turn; ``turns``: of each way in a trial; ``gain``: of straight's rate that another
    way must exceed; ``lasting``: bytes after which all are tried anew: the first trial's verdict, which memory that was
    never touched before may have marred, holds for the first of these, each one after it for four times as long, up
    to the last."""

    ways: tuple[int, ...] = (0, 4 << 20, 2 << 20)
    window: int = 64 << 20
    turns: int = 4
    gain: float = 1.05
    lasting: tuple[int, int] = (4 << 30, 64 << 30)


@dataclass
class _Tried:
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class Pace:
    """Chooses for all workers that read from one drive; any thread may ask and tell.

    ``aside``: 0: the next read goes straight to its memory; else the bytes at a time in which it goes through a worker's
    buffer. ``rates``: bytes per second of each way in the last whole trial; empty before there was one.
    """

    policy: PacePolicy = field(default_factory=PacePolicy)
    aside: int = 0
    rates: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._lasting = self.policy.lasting[0]
        self._last: float | None = None  # when the last read ended, if no worker was idle since
        self._begin()

    def _begin(self) -> None:
        self._tried = {way: _Tried() for way in self.policy.ways}
        self._window = self._turn = self._since = 0
        self._trying = True
        self.aside = self.policy.ways[0]

    def idle(self) -> None:
        """A worker found nothing to read: what follows does not tell what the drive can give."""
        with self._lock:
            self._last = None

    def ended(self, now: float, nbytes: int, aside: int) -> None:
        """A read of ``nbytes`` ended at ``now`` seconds; ``aside``: how it was done.

        Only what lies between two ends of reads, with all workers busy all the time, is counted.
        """
        with self._lock:
            last, self._last = self._last, now
            if not self._trying:
                self._since += nbytes
                if self._since >= self._lasting:
                    self._lasting = min(4 * self._lasting, self.policy.lasting[1])
                    self._begin()
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
        ways = self.policy.ways
        self._window = 0
        self._turn += 1
        rounds, place = divmod(self._turn, len(ways))
        if rounds < self.policy.turns:
            # There and back: a drive that becomes faster or slower meanwhile favours none.
            self.aside = ways[place if rounds % 2 == 0 else -1 - place]
            return
        self.rates = {way: t.nbytes / max(t.seconds, 1e-9) for way, t in self._tried.items()}
        fastest = max(ways, key=lambda way: self.rates[way])
        straight = ways[0]
        self.aside = fastest if self.rates[fastest] > self.policy.gain * self.rates[straight] else straight
        self._trying, self._since = False, 0
