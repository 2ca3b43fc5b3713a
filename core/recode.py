"""Whether units that wait packed had better cross as they are, once the first steps have shown what binds.

A mixin of `Session`, under `Adapts`.
"""

from __future__ import annotations

import dataclasses
import logging

from torch import nn

from . import replan
from .attach import Placement
from .learn import Learnt
from .packing import PackedPlacement, Packing
from .plan import Plan
from .predict import Packed
from .simulated import SimulatedEngine
from .store.arena import HostArena
from .streamer import Streamer
from .transfer import Engine
from .units import Carving

logger = logging.getLogger("carom")


class Recodes:
    """Chooses what of a `Session` (which see for the fields) goes on crossing packed."""

    module: nn.Module
    plan: Plan
    _engine: Engine
    _streamer: Streamer
    _placement: Placement
    _packing: Packing | None
    _arena: HostArena
    _carving: Carving
    _ram: int

    def _learn(self) -> Learnt | None:
        raise NotImplementedError

    def _streamed(self) -> list[int]:
        raise NotImplementedError

    def _recode(self) -> bool:
        """Let units cross as they are where unpacking them costs more than it saves; once, with ``codec="auto"``."""
        placement, chosen = self._placement, self._packing
        rate = self._unpacking_rate()
        if not isinstance(placement, PackedPlacement) or chosen is None or not chosen.auto or not rate:
            return False
        learnt = self._learn()
        if learnt is None or not self._streamer.unreferenced:
            return False
        self._packing = dataclasses.replace(chosen, auto=False)
        indices, pieces = self._streamed(), replan.pieces(self._carving)
        packed = {
            index: Packed(unit.host.numel(), unit.nbytes / rate)
            for index, unit in zip(indices, placement.streamed, strict=True)
            if unit.decoder is not None
        }
        wire = learnt.link.bytes_per_second * placement.wire_bytes / placement.streamed_host_bytes
        raw = replan.raw_share(
            [piece.nbytes for piece in pieces], indices, self.plan, learnt.workload(pieces, replan.blocks(self.module)),
            dataclasses.replace(learnt.link, bytes_per_second=wire), packed, learnt.host_bound,
        )  # fmt: skip
        units = [unit for index, unit in zip(indices, placement.streamed, strict=True) if index in set(raw)]
        more = sum(unit.nbytes - unit.host.numel() for unit in units)
        if not units or more + self._arena.pinned_bytes > self._ram:
            return False
        logger.info("carom: %d of %d units cross as they are from now on", len(units), len(packed))
        names = frozenset(entry.name for unit in units for entry in unit.unit.entries)
        self._packing = dataclasses.replace(self._packing, raw=names)
        placement.unpack(self._streamer, units)
        return True

    def _unpacking_rate(self) -> float | None:
        """Bytes of output that the device decodes per second, None where that was not measured."""
        if isinstance(self._engine, SimulatedEngine):
            return self._engine.config.decode_bytes_per_second
        return (
            self._placement.decode_bytes_per_second if isinstance(self._placement, PackedPlacement) else None
        )
