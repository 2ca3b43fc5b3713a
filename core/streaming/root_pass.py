"""Defines `RootPass`: a pass of the session's module, from its beginning to its end.

A pass is one forward of the root module, or of a module below it that is called outside the root's forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .streamer import Streamer


class RootPass:
    """The `RunningPass` of a `Streamer`."""

    __slots__ = ("runner",)

    def __init__(self, streamer: Streamer) -> None:
        self.runner = streamer

    def end(self, failed: bool) -> None:
        """End the pass. ``failed``: whether an error ended its forward."""
        streamer = self.runner
        streamer.runs.root_ends(failed)
        if not failed:
            streamer.tier.end_pass()
            if streamer.first_uses is not None:
                streamer.end_first_pass()

    def begin_backward(self) -> None:
        """Register the backward whose gradient has reached a result of the pass."""
        self.runner.backward.begins()

    def no_backward(self) -> None:
        """Record that no backward of the pass is possible."""
        self.runner.runs.no_backward()
