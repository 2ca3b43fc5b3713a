"""A tuner that chooses whether a drive is read directly into the caller's memory or through a small bounce
buffer.

A physical drive writes to memory by DMA, so reading directly into the caller's memory is fastest. The bytes
of a virtual drive may be copied by the hypervisor, which is faster if the destination is in a CPU's cache. A
bounce buffer of a few megabytes, reused for every read, stays in the cache; a worker thread then copies the
bytes to the caller's memory. No property of a machine tells which case applies. So both paths are tried in
turn while weights are streamed, and the faster one is kept until the next trial. This file is plain Python
without I/O.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReadPathPolicy:
    """The parameters of a `ReadPathTuner`.

    ``paths``: the paths to try, each given as the bytes of one read through a worker's bounce buffer (whole
    pages); 0 stands for reading directly and comes first. ``window``: bytes that a path reads before the next
    path has its turn. ``rounds``: windows of each path in a trial. ``gain``: factor over the direct path's rate
    that another path must exceed. ``retrial_bytes``: (first, last) bytes after which all paths are tried again.
    The first trial may be distorted by memory that was never touched before, so its result holds only for
    ``first`` bytes. Each later result holds for four times as many bytes as the one before, up to ``last``.
    """

    paths: tuple[int, ...] = (0, 4 << 20, 2 << 20)
    window: int = 64 << 20
    rounds: int = 4
    gain: float = 1.05
    retrial_bytes: tuple[int, int] = (4 << 30, 64 << 30)


@dataclass
class _PathTotals:
    """The bytes and seconds of one path in a trial."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class ReadPathTuner:
    """A tuner that measures and chooses how a drive is read: directly, or through a bounce buffer.

    All workers that read from the drive share it; any thread may call the methods. ``bounce_bytes``: the
    choice for the next read; 0 is directly into the caller's memory, another number is the bytes at a time
    through a worker's bounce buffer. ``rates``: bytes per second of each choice in the last complete trial;
    empty before that.
    """

    policy: ReadPathPolicy = field(default_factory=ReadPathPolicy)
    bounce_bytes: int = 0
    rates: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._lasting = self.policy.retrial_bytes[0]
        self._last: float | None = None  # when the last read ended (seconds); None if a worker was idle since
        self._begin()

    def _begin(self) -> None:
        """Begin a trial of all paths."""
        self._totals = {path: _PathTotals() for path in self.policy.paths}
        self._window = self._turn = self._since = 0
        self._trying = True
        self.bounce_bytes = self.policy.paths[0]

    def idle(self) -> None:
        """Exclude the time until the next read from the measurement, because a worker has nothing to read.

        A drive that is not kept busy does not show its rate.
        """
        with self._lock:
            self._last = None

    def ended(self, now: float, nbytes: int, bounce_bytes: int) -> None:
        """Record that a read of ``nbytes`` on the path ``bounce_bytes`` ended at ``now`` (seconds).

        Only the time between the ends of two reads is counted, while all workers are busy.
        """
        with self._lock:
            last, self._last = self._last, now
            if not self._trying:
                self._since += nbytes
                if self._since >= self._lasting:
                    self._lasting = min(4 * self._lasting, self.policy.retrial_bytes[1])
                    self._begin()
                return
            if last is None or bounce_bytes != self.bounce_bytes:  # the read began in another path's window
                return
            tried = self._totals[bounce_bytes]
            tried.nbytes += nbytes
            tried.seconds += max(0.0, now - last)
            self._window += nbytes
            if self._window >= self.policy.window:
                self._next()

    def _next(self) -> None:
        """Begin the next window of the trial, or choose the path after the last window."""
        paths = self.policy.paths
        self._window = 0
        self._turn += 1
        rounds, place = divmod(self._turn, len(paths))
        if rounds < self.policy.rounds:
            # Alternate the order of the paths from round to round, so that a drive that becomes faster or
            # slower meanwhile favours none.
            self.bounce_bytes = paths[place if rounds % 2 == 0 else -1 - place]
            return
        self.rates = {path: t.nbytes / max(t.seconds, 1e-9) for path, t in self._totals.items()}
        fastest = max(paths, key=lambda path: self.rates[path])
        direct = paths[0]
        self.bounce_bytes = fastest if self.rates[fastest] > self.policy.gain * self.rates[direct] else direct
        self._trying, self._since = False, 0
