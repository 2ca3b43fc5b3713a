"""`Staging`: a ring buffer in device memory in which packed bytes arrive before they are decoded into a slot
(a range of device memory for the decoded weights of a unit, that is, of a module).

A ring lets one copy run while the previous one is decoded. A unit's packed bytes (its wire) that do not fit
into the ring twice are copied in pieces of at most half the ring, so that the link is not idle while a piece
is decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..codec.unit_decoder import UnitDecoder, WirePiece
from .engine import Engine

STEP = 512  # bytes; every part of the ring starts on this boundary
_VIEWS = 256  # views that are cached
Copy = Callable[[torch.Tensor, torch.Tensor, Sequence[Any], bool], tuple[Any, Any]]


class Staging:
    """A ring of ``nbytes`` of device memory; each part is overwritten only after its bytes are decoded."""

    def __init__(self, engine: Engine, nbytes: int) -> None:
        self.nbytes = nbytes
        self._engine = engine
        self.memory = engine.allocate(nbytes)
        self._head = 0
        # (start, end, events after which these bytes may be overwritten), oldest first
        self._taken: list[tuple[int, int, list[Any]]] = []
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Let all of the ring be overwritten at once. Called while the device is idle."""
        self._head = 0
        self._taken = []

    def take(self, nbytes: int, in_halves: bool = False) -> tuple[torch.Tensor, list[Any]]:
        """Return the next ``nbytes`` of the ring (at most all of it), and the events that a copy into them
        has to wait for.

        ``in_halves``: let the bytes begin where a half of the ring begins, if they fit into half of it. A piece that is
        a few bytes larger than the one that lay there before then does not wait for the piece behind that one.
        The caller then calls `release_after`. If the caller fails before that call, the next caller that takes these
        bytes gets the same events.
        """
        start = self._head if self._head + nbytes <= self.nbytes else 0
        half = self.nbytes // 2 // STEP * STEP
        if in_halves and nbytes <= half:
            start = half if 0 < self._head <= half else 0
        end = start + nbytes
        after: list[Any] = []
        left = []
        for low, high, events in self._taken:
            if low < end and start < high:
                after += [event for event in events if all(event is not known for known in after)]
            # The parts of an earlier piece outside of the new one keep their events: the next copy into them may run
            # on another stream than the one that waits now.
            left += [(a, b, events) for a, b in ((low, min(high, start)), (max(low, end), high)) if a < b]
        # If the caller fails before `release_after`, perhaps no stream has waited for the events.
        self._taken = [*left, (start, end, after)]
        self._head = -(-end // STEP) * STEP
        view = self._views.get((start, end))
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[(start, end)] = self.memory[start:end]
        return view, after

    def release_after(self, event: Any) -> None:
        """Let the part that was taken last be overwritten after ``event``.

        ``event`` must come after all events that `take` returned.
        """
        start, end, _ = self._taken[-1]
        self._taken[-1] = start, end, [event]

    def pieces(self, decoder: UnitDecoder, nbytes: int) -> list[WirePiece]:
        """Return the pieces in which a wire of ``nbytes`` is copied if it does not fit into the ring twice; []
        if the wire is copied as a whole.
        """
        pieces = decoder.pieces(self.nbytes // 2) if 2 * nbytes > self.nbytes else []
        return pieces if len(pieces) > 1 else []

    def bring(
        self,
        wire: torch.Tensor,
        decoder: UnitDecoder,
        target: torch.Tensor,
        after: Sequence[Any],
        timed: bool,
        copy: Copy | None = None,
    ) -> Iterator[tuple[Any, Any, int, Any]]:
        """Copy ``wire`` to the ring and decode it into ``target``, after the events ``after``.

        ``copy``: copies the bytes, by default `Engine.copy_in`, from the host.

        Yields for each piece: the event of its end, the marks that `Engine.copy_in` returned, its bytes, and
        the marks that `Engine.decode` returned.
        """
        pieces, done = self.pieces(decoder, wire.numel()), 0
        copy = copy or self._engine.copy_in
        if not pieces:
            yield self._copy_and_decode(wire, decoder, target, after, timed, copy)
            return
        try:
            for start, end, low, high, part in pieces:
                piece = wire[start:end], part, target[low:high]
                yield self._copy_and_decode(*piece, after, timed, copy, in_halves=True)
                after = []  # the decode stream has waited for these events with the first piece
                done += 1
        except BaseException:
            # After an error, the caller does not know of the pieces that were issued already. Wait for them,
            # so that none of them is decoded into the slot after another unit has got the slot.
            if done < len(pieces):
                with contextlib.suppress(Exception):
                    self._engine.synchronize()
            raise

    def _copy_and_decode(
        self,
        wire: torch.Tensor,
        decoder: UnitDecoder,
        target: torch.Tensor,
        after: Sequence[Any],
        timed: bool,
        copy: Copy,
        in_halves: bool = False,
    ) -> tuple[Any, Any, int, Any]:
        """Copy one piece to the ring and decode it; return as `bring` yields."""
        staged, free = self.take(wire.numel(), in_halves)
        copied, marks = copy(staged, wire, free, timed)
        self.release_after(copied)
        event, times = self._engine.decode(decoder, staged, target, (copied, *after), timed)
        self.release_after(event)
        return event, marks, wire.numel(), times
