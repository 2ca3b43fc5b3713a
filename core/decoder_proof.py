"""Whether this device decodes what was packed for it, found out while attaching, and how fast it does."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import torch

from .codec.unit import Entry as WireEntry
from .store.arena import host_bytes
from .streamed import Streamed
from .transfer import Engine
from .units import Entry

logger = logging.getLogger("carom")


class Proof:
    """What is known of a device's decoders: each kind is tried once, on a unit that is there anyway."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._proven: set[tuple[str, int, int]] = set()
        self.broken = ""  # why nothing more is packed
        self.decode_bytes_per_second: float | None = None  # measured, of output
        self._timed_bytes = 0  # of the unit that it was measured on

    def holds(self, streamed: Streamed, entries: Sequence[Entry]) -> bool:
        """Decode a unit of a new kind once, and compare: a decoder that does not work here is found out now.

        ``entries``: those of the unit that are packed and have their plain bytes still. Where it does not hold,
        `broken` says why.
        """
        assert streamed.decoder is not None
        kinds = {
            (e.header.kind.name, e.header.k, e.header.lanes)
            for e in streamed.decoder.entries
            if isinstance(e, WireEntry)
        }
        if self._engine.device.type == "cpu":
            return True
        if kinds <= self._proven:
            # A small unit's time is the launch's: the rate is that of the largest, to within a half.
            if streamed.nbytes > 2 * self._timed_bytes:
                with contextlib.suppress(Exception):  # its kind works; without a time the last one stands
                    self._decode_timed(streamed)
            return True
        try:
            out = self._decode_timed(streamed)
            for entry in entries:
                there = out[entry.offset : entry.offset + entry.nbytes]
                if not torch.equal(there.cpu(), host_bytes(entry.tensor)):
                    raise RuntimeError("what was decoded is not what was encoded")
        except Exception as error:
            self.broken = f"packed weights cannot be decoded here ({error}): they cross as they are"
            logger.warning("carom: %s", self.broken)
            return False
        self._proven |= kinds
        return True

    def _decode_timed(self, streamed: Streamed) -> torch.Tensor:
        """The unit's bytes, decoded on the device three times; the best tells the rate."""
        assert streamed.decoder is not None
        wire = streamed.block.data.to(self._engine.device)
        out = torch.empty(streamed.nbytes, dtype=torch.uint8, device=self._engine.device)
        best = math.inf
        for _ in range(3):
            before = self._engine.mark()
            streamed.decoder(wire, out)
            after = self._engine.mark()
            self._engine.synchronize()
            best = min(best, self._engine.elapsed(before, after))
        if best > 0 and streamed.nbytes > self._timed_bytes:
            self._timed_bytes, self.decode_bytes_per_second = streamed.nbytes, streamed.nbytes / best
        return out
