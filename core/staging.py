"""Device scratch that packed bytes land in on their way to a slot: a ring, so that a copy runs while the last decodes.

A wire of which no two find room crosses in pieces of half the ring, so that the link is not idle while one is decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .codec.unit import Piece, UnitDecoder
from .transfer import Engine

STEP = 512  # bytes; every piece starts on this boundary
_VIEWS = 256  # views that are remembered


class Staging:
    """``nbytes`` of device memory given out in turn; each piece is overwritten only after its decoding."""

    def __init__(self, engine: Engine, nbytes: int) -> None:
        self.nbytes = nbytes
        self._engine = engine
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

    def pieces(self, decoder: UnitDecoder, nbytes: int) -> list[Piece]:
        """How a wire of ``nbytes`` crosses that finds room once, but not twice: in pieces; [] for any other."""
        pieces = decoder.pieces(self.nbytes // 2) if 2 * nbytes > self.nbytes else []
        return pieces if len(pieces) > 1 else []

    def bring(
        self, wire: torch.Tensor, decoder: UnitDecoder, target: torch.Tensor, after: list[Any], timed: bool
    ) -> Iterator[tuple[Any, Any, int, Any]]:
        """``wire`` (host) to the ring and from there decoded to ``target``, once ``after`` is reached. For each piece: its
        done event, what `Engine.copy_in` and `Engine.decode` measured, and its bytes."""
        pieces, done = self.pieces(decoder, wire.numel()), 0
        if not pieces:
            yield self._bring(wire, decoder, target, after, timed)
            return
        try:
            for start, end, low, high, part in pieces:
                yield self._bring(wire[start:end], part, target[low:high], after, timed)
                after = []  # the stream that decodes has waited for it
                done += 1
        except BaseException:
            # Nobody knows of the pieces before: they must not reach a slot that is another's by then.
            if done < len(pieces):
                with contextlib.suppress(Exception):
                    self._engine.synchronize()
            raise

    def _bring(
        self, wire: torch.Tensor, decoder: UnitDecoder, target: torch.Tensor, after: list[Any], timed: bool
    ) -> tuple[Any, Any, int, Any]:
        staged, free = self.take(wire.numel())
        copied, marks = self._engine.copy_in(staged, wire, free, timed)
        self.given(copied)
        event, times = self._engine.decode(decoder, staged, target, (copied, *after), timed)
        self.given(event)
        return event, marks, wire.numel(), times
