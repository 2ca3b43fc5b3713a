"""A session that releases its device for a while: its module stays attached, and returns at its next forward.

A mixin of `Session`.
"""

from __future__ import annotations

import logging

from .host_copies import HostCopies
from .in_front import InFront
from .packed_placement import PackedPlacement
from .together import Together
from .units import Carving

logger = logging.getLogger("carom")


class Parks(Together):
    """Parks a `Session` (which see for the fields)."""

    _copies: HostCopies
    _carving: Carving
    _front: InFront
    _aside: bool  # parked to ``keep``

    @property
    def _simple(self) -> bool:
        raise NotImplementedError

    def _need_open(self) -> None:
        raise NotImplementedError

    def _detach(self, leave: bool = False, keep: bool = False) -> None:
        raise NotImplementedError

    def _lay_out(self) -> None:
        raise NotImplementedError

    @property
    def parked(self) -> bool:
        """Whether the device was released; the next forward brings the module back."""
        return self._parked

    @property
    def put_aside(self) -> bool:
        """Whether it was parked to ``keep``: a module that is sent to the CPU is there already."""
        return self._parked and self._aside

    def park(self, keep: bool = False) -> None:
        """Release the device; the module stays attached and returns at its next forward.

        ``keep``: what streams is left pinned in host memory, and residents join it there (packed, where they are), so
        that the way back costs what has to cross to the device and no more.
        """
        with self._lock:
            self._need_open()
            if not self._parked:
                self._leaves_for_a_while()
                self._detach_for_parking(keep)
                self._engine.trim()  # what it held is the device's again, not this process's

    def _detach_for_parking(self, keep: bool = False) -> None:
        with self._laying_out():
            self._keeps = 0 if self._shared is None else self._least()
            self._leave_the_device(keep)

    def _leave_the_device(self, keep: bool) -> None:
        self._aside = keep
        keep = keep and self._simple and not self._placement.came_on_device
        try:
            self._detach(leave=keep, keep=keep)
        except BaseException:
            self._rest_parked()
            raise
        interrupted: BaseException | None = None
        if keep:
            try:
                self._to_the_host()
            except BaseException as error:  # all is on the host: only copies for the way back are wanting
                self._copies.clear()
                logger.warning("carom: parked without pinned copies: %s", str(error))
                interrupted = None if isinstance(error, Exception) else error
        self._is_parked()
        if interrupted is not None:
            raise interrupted

    def _is_parked(self) -> None:
        """All is on the host, or in its file."""
        if isinstance(self._placement, PackedPlacement):
            self._placement.wear()
        self._front.at_the_root()  # alone while parked: its next forward brings everything back
        self._closed, self._parked = False, True

    def _rest_parked(self, keep: bool = False) -> None:
        """A change of layout failed half way: take back what was done of it, and try again at the next forward.

        ``keep``: host copies are kept. What cannot be taken back now is, by the next layout or by `close`.
        """
        self._aside = False
        try:
            self._detach(keep=keep)
            self._keeps = 0 if self._shared is None else self._least()
        finally:
            self._is_parked()

    def unpin(self) -> None:
        """While parked: give pinned memory back; the bytes wait on in ordinary memory."""
        with self._lock:
            self._need_open()
            if self._parked:
                self._copies.unpin()

    def _to_the_host(self) -> None:
        """All units stream for a moment, so that each has its host copy; what else was on the device goes home."""
        placement = self._placement
        try:
            placement.keep_received([], [], [], self._carving.units)
            placement.stream(self._carving.units, self._streamer.add)
        finally:
            placement.undo()
        self._engine.trim()

    def unpark(self) -> None:
        """Bring a parked module back to the device."""
        with self._lock:
            if self._parked:
                try:
                    self._returns()
                    self._lay_out()
                finally:
                    self._laying = 0
