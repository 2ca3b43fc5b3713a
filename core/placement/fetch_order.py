"""Defines `FetchOrder`: compares which units several ranks have fetched, while they gather weights.

An all-gather brings the parts of whatever unit each rank fetches. If the ranks fetch different units of the same size,
nothing fails, and the weights are wrong. So the ranks compare their fetches at the end of each forward and of each
backward, before the caller gets outputs or gradients.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence

from ..common.errors import GroupError

WHOLE = "CAROM_GATHER"  # the environment variable with which ranks copy whole units, if it is 0
# A rank may be ahead of another one by fewer fetches than this at the end of a pass, because slots become free at
# different times.
_AHEAD = 32
_PASSES = ("a forward with gradients", "a forward without gradients", "a backward")

Exchange = Callable[[Sequence[int], str], list[list[int]]]


class FetchOrder:
    """The fetches of one rank, and their comparison with those of the others.

    ``exchange``: `NodeGroup.exchange_numbers`. ``rank``: the position of this process in its answers.
    """

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self._count = 0
        self._hashes = deque(
            [0] * _AHEAD, maxlen=_AHEAD
        )  # of all fetches until each of the last ones, newest first

    def add(self, name: str) -> None:
        """Record a fetch of the unit ``name``."""
        self._count += 1
        self._hashes.appendleft(zlib.crc32(name.encode(), self._hashes[0]))

    def compare(self, passed: str) -> None:
        """Compare the fetches of all ranks so far. ``passed``: what this rank has just done, one of `_PASSES`.

        Raises GroupError if the ranks did different things or fetched different units, or if another rank does not
        take part within the group's time-out.
        """
        mine = [_PASSES.index(passed), self._count, *self._hashes]
        ranks = self._exchange(
            mine, f"comparing the ranks after {passed}: ranks that gather run the same passes"
        )
        for rank, (kind, *_) in enumerate(ranks):
            if kind != mine[0]:
                raise GroupError(
                    f"rank {self._rank} has run {passed}, and rank {rank} {_PASSES[kind]}: ranks that gather weights run "
                    f"the same passes. Run validation on all ranks, or set the environment variable {WHOLE}=0, so that "
                    "each rank copies whole units"
                )
        least = min(count for _, count, *_ in ranks)
        behind = [count - least for _, count, *_ in ranks]
        if (
            max(behind) >= _AHEAD
            or len({row[2 + ahead] for row, ahead in zip(ranks, behind, strict=True)}) > 1
        ):
            raise GroupError(
                f"{passed}: the ranks gather weights, and fetched different units, so its results are wrong; discard "
                "them and close the session. The model takes other paths on each rank, or a weight was written on one "
                f"rank only. Set the environment variable {WHOLE}=0, so that each rank copies whole units"
            )
