"""Device scratch that packed bytes land in on their way to a slot: a ring, so that a copy runs while the last decodes."""

from __future__ import annotations

from typing import Any

import torch

from .transfer import Engine

STEP = 512  # bytes; every piece starts on this boundary
_VIEWS = 256  # views that are remembered


class Staging:
    """``nbytes`` of device memory given out in turn; each piece is overwritten only after its decoding."""

    def __init__(self, engine: Engine, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = engine.allocate(nbytes)
        self._head = 0
        self._taken: list[list[Any]] = []  # [start, end, event], oldest first
        # Told to the last taker, who may have failed before anything waited for them.
        self._owed: list[Any] = []
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, nbytes: int) -> tuple[torch.Tensor, list[Any]]:
        """The next ``nbytes`` (at most all), and the events that what is copied there has to wait for.

        Pairs with `given`; where that is never called, nobody has been given the bytes, and the next taker is told the same.
        """
        start = self._head if self._head + nbytes <= self.nbytes else 0
        end = start + nbytes
        after = self._owed + [
            event for low, high, event in self._taken if low < end and start < high and event is not None
        ]
        self._owed = after
        self._taken = [piece for piece in self._taken if not (piece[0] < end and start < piece[1])]
        self._taken.append([start, end, None])
        self._head = -(-end // STEP) * STEP
        view = self._views.get((start, end))
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[(start, end)] = self.memory[start:end]
        return view, after

    def given(self, event: Any) -> None:
        """What was taken last is free after ``event``, which is after all that the taker was told to wait for."""
        self._taken[-1][2] = event
        self._owed = []
