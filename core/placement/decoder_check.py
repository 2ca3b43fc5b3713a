"""Defines `DecoderCheck`: while the session is created, decodes packed units on the device, compares the
bytes, and measures the decoding rate.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..codec.unit_decoder import LosslessEntry
from ..device.engine import Engine
from ..host.arena import host_bytes
from ..model.units import Entry

if TYPE_CHECKING:
    from .packed_backing import PackedBacking

logger = logging.getLogger("carom")
_LONGER = 2.0  # the device is held back for this multiple of the seconds that a launch took


class DecoderCheck:
    """The check of a device's decoders. One unit of each packed format is decoded and compared with the
    original bytes.

    ``broken``: the reason why the device cannot decode, "" while it can. Once it is set, no more weights are
    packed.
    ``decode_bytes_per_second``: the measured rate, in bytes of output.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checked_kinds: set[tuple[str, int, int]] = set()
        self.broken = ""
        self.decode_bytes_per_second: float | None = None
        self._timed_bytes = 0  # bytes of the unit that the rate was measured on

    def check(self, backing: PackedBacking, entries: Sequence[Entry]) -> bool:
        """Decode the unit if its packed format has not been checked before, and return whether the bytes are
        correct.

        ``entries``: the packed tensors of the unit that still have their plain bytes, with which the decoded
        bytes are compared. On failure, `broken` is set to the reason.
        """
        assert backing.decoder is not None
        kinds = {
            (e.header.kind.name, e.header.k, e.header.lanes)
            for e in backing.decoder.entries
            if isinstance(e, LosslessEntry)
        }
        if self._engine.device.type == "cpu":
            return True
        if kinds <= self._checked_kinds:
            # The decoding time of a small unit is mostly launch overhead, so measure again on any unit of
            # more than twice the bytes. The rate then comes from a unit of at least half the bytes of the
            # largest unit so far.
            if backing.nbytes > 2 * self._timed_bytes:
                # This format was checked before, so if the measurement fails, only the previous rate is kept.
                with contextlib.suppress(Exception):
                    self._time_decoding(backing)
            return True
        try:
            out = self._time_decoding(backing)
            for entry in entries:
                decoded = out[entry.offset : entry.offset + entry.nbytes]
                if not torch.equal(decoded.cpu(), host_bytes(entry.tensor)):
                    raise RuntimeError("what was decoded is not what was encoded")
        except Exception as error:
            self.broken = f"packed weights cannot be decoded here ({error}): they cross as they are"
            logger.warning("carom: %s", self.broken)
            return False
        self._checked_kinds |= kinds
        return True

    def _time_decoding(self, backing: PackedBacking) -> torch.Tensor:
        """Decode the unit on the device three times, set the rate from the fastest run, and return the
        decoded bytes.

        In the third run the device is held back until the host has launched the kernels, whose launch may take longer
        than the decoding.
        """
        assert backing.decoder is not None
        wire = backing.block.data.to(self._engine.device)
        out = torch.empty(backing.nbytes, dtype=torch.uint8, device=self._engine.device)
        best = math.inf
        launch = 0.0  # host seconds
        for run in range(3):
            if run == 2:
                self._engine.hold(_LONGER * launch)
            began = time.perf_counter()
            before = self._engine.mark()
            backing.decoder(wire, out)
            after = self._engine.mark()
            launch = time.perf_counter() - began
            self._engine.synchronize()
            best = min(best, self._engine.elapsed(before, after))
        if best > 0 and backing.nbytes > self._timed_bytes:
            self._timed_bytes, self.decode_bytes_per_second = backing.nbytes, backing.nbytes / best
        return out
