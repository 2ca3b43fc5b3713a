"""The order of the cases of a benchmark in a real host, the time limit of the run, and the spread of samples.

The module is pure. It is also loaded by its path, so it imports nothing of Carom.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case")
MARGIN = 1.15  # a case begins only if this multiple of the longest earlier duration of such a case is left


def interleaved(comparisons: Iterable[Sequence[Case]], rounds: int) -> list[Case]:
    """Return the cases of each comparison ``rounds`` times, in turns: a, b, a, b for the comparison (a, b).

    A change of the machine's speed then disturbs all cases of a comparison.
    """
    return [case for cases in comparisons for _ in range(rounds) for case in cases]


class TimeLimit:
    """The time limit of a run, in seconds since the construction."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._ends = clock, clock() + limit_s
        self._began = clock()
        self._longest: dict[str, float] = {}

    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def left_s(self, at_most: float = float("inf")) -> float:
        """Return the seconds left, at least 1 and at most ``at_most``: the timeout of what begins now."""
        return max(1.0, min(at_most, self._ends - self._clock()))

    def fits(self, kind: str) -> bool:
        """Return whether a case of ``kind`` is expected to end in time. One that has not run yet is expected to take
        as long as the longest case of any kind.
        """
        expected = self._longest.get(kind, max(self._longest.values(), default=0.0))
        return self._ends - self._clock() > max(5.0, MARGIN * expected)

    def took(self, kind: str, seconds: float) -> None:
        """Note the duration of a case of ``kind``."""
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))


def spread(samples_s: Sequence[float]) -> dict[str, Any]:
    """Return the samples in seconds, their median and their quartiles; without samples an empty dict."""
    if not samples_s:
        return {}
    cut = (
        statistics.quantiles(samples_s, n=4, method="inclusive") if len(samples_s) > 1 else [samples_s[0]] * 3
    )
    return {
        "samples_s": [round(value, 6) for value in samples_s],
        "median_s": cut[1],
        "quartiles_s": [cut[0], cut[2]],
    }


def pooled(groups: Iterable[tuple[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return the spread of the samples of all processes of each case, in the order of first appearance.

    ``groups``: (case, samples in seconds) for each process that ended well.
    """
    found: dict[str, list[Sequence[float]]] = {}
    for case, samples in groups:
        found.setdefault(case, []).append(samples)
    return [
        {
            "case": case,
            "processes": len(runs),
            "process_medians_s": [statistics.median(run) for run in runs if run],
            **spread([value for run in runs for value in run]),
        }
        for case, runs in found.items()
    ]
