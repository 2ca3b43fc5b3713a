"""What of a session waits, stays and crosses packed; and whether it had better cross as it is, once the first steps have
shown what binds.

A mixin of `Session`, under `Adapts`.
"""

from __future__ import annotations

import dataclasses
import logging
import math

from torch import nn

from . import decide, packing, replan
from .attach import Placement
from .errors import BudgetError, CaromError
from .host_copies import HostCopies
from .learn import Learnt
from .packed_here import wire_bytes
from .packed_placement import PackedPlacement
from .packed_tensors import PackedTensor
from .packing import Packing
from .plan import Plan, stay_packed
from .predict import Packed
from .simulated import SimulatedEngine
from .store.arena import HostArena
from .streamed import Streamed
from .streamer import Streamer
from .transfer import Engine
from .units import Carving, Unit

logger = logging.getLogger("carom")
_LEAST_PACKED = 0.9  # of what was to stay packed
PLAIN_GAIN = 0.01  # of a step that a layout of plain bytes must save


class NotPacked(CaromError):
    """Weights pack to less than a plan counts on."""


class Recodes:
    """Chooses what of a `Session` (which see for the fields) is packed, and goes on crossing so."""

    module: nn.Module
    plan: Plan
    _engine: Engine
    _streamer: Streamer
    _placement: Placement
    _packing: Packing | None
    _arena: HostArena
    _carving: Carving
    _copies: HostCopies
    _shelf: dict[int, PackedTensor]
    _learnt: Learnt | None
    _ram: int
    _unpacks_at: float | None = None  # bytes/s of output, as measured
    _recode_at = 0.0  # steps before which a layout of plain bytes would not have paid for itself

    def _learn(self) -> Learnt | None:
        raise NotImplementedError

    def _streamed(self) -> list[int]:
        raise NotImplementedError

    def _settings(self, known: bool = False) -> decide.Settings:
        raise NotImplementedError

    def _take(self, learnt: Learnt) -> None:
        raise NotImplementedError

    def _stays_packed(self) -> bool:
        """Whether units may stay on the device packed."""
        return self._learnt is not None

    def _wire_bytes(self, unit: Unit) -> int:
        """What ``unit`` packs to, 0 where it does not."""
        assert self._packing is not None
        return wire_bytes(unit, self._shelf, self._copies, self._packing, packing.EXPECTED, packing.LEAST)

    def _stay_packed(self) -> list[Streamed]:
        """The streamed units that stay on the device packed, now that it is known what they pack to. Raises NotPacked."""
        streamed = self._placement.streamed
        if not self.plan.packed:
            return []
        wires = [0] * len(self._carving.units)
        for index, unit in zip(self._streamed(), streamed, strict=True):
            if unit.decoder is not None and self._wire_bytes(unit.unit):
                wires[index] = unit.host.numel()
        packed = stay_packed(wires, self.plan.packed, self.plan.packed_bytes, self._engine.grain)
        sizes = [unit.nbytes for unit in self._carving.units]
        if sum(sizes[index] for index in packed) < _LEAST_PACKED * sum(
            sizes[index] for index in self.plan.packed
        ):
            raise NotPacked("less than expected packs")
        self.plan = dataclasses.replace(self.plan, packed=packed)
        return [unit for index, unit in zip(self._streamed(), streamed, strict=True) if index in packed]

    def _follow_packed(self) -> None:
        """The plan says what stays packed by now."""
        streamed = zip(self._streamed(), self._placement.streamed, strict=True)
        here = frozenset(index for index, unit in streamed if unit.wire is not None)
        self.plan = dataclasses.replace(
            self.plan, packed=here, packed_bytes=self._streamer.packed_here.nbytes
        )

    def _pack_anew(self) -> None:
        if isinstance(self._placement, PackedPlacement):
            self._placement.pack_anew()

    def _recode(self, steps: float = math.inf) -> bool | None:
        """Let units cross as they are where unpacking them costs more than it saves; once, with ``codec="auto"``.

        ``steps``: seen so far. A layout of plain bytes that would not have paid for itself in so many waits. Returns whether
        anything changed, None where it has to be tried again later.
        """
        placement, chosen = self._placement, self._packing
        rate = self._unpacking_rate()
        if not isinstance(placement, PackedPlacement) or chosen is None or not chosen.auto or not rate:
            return False
        learnt = self._learn()
        if learnt is None or not self._streamer.unreferenced:
            return None
        indices, pieces = self._streamed(), replan.pieces(self._carving)
        packed = {
            index: Packed(0 if unit.wire is not None else unit.host.numel(), unit.nbytes / rate)
            for index, unit in zip(indices, placement.streamed, strict=True)
            if unit.decoder is not None
        }
        wire = learnt.link.bytes_per_second * placement.wire_bytes / placement.streamed_host_bytes
        link = dataclasses.replace(learnt.link, bytes_per_second=wire)
        seconds, raw = replan.raw_share(
            [piece.nbytes for piece in pieces], indices, self.plan, learnt.workload(pieces, replan.blocks(self.module)),
            link, packed, learnt.host_bound,
        )  # fmt: skip
        unpacked = {name: nbytes for index in packed for name, nbytes in pieces[index].tensors.items()}
        turned = self._turn_plain(learnt.plainly(rate, unpacked, link), seconds, steps)
        if turned == 0:
            return True
        later = turned is not None
        self._recode_at = turned or 0.0
        self._packing = dataclasses.replace(self._packing or chosen, auto=later)
        units = [unit for index, unit in zip(indices, placement.streamed, strict=True) if index in set(raw)]
        more = sum(unit.nbytes - unit.host.numel() for unit in units)
        if units and more + self._arena.pinned_bytes <= self._ram:
            logger.info("carom: %d of %d units cross as they are from now on", len(units), len(packed))
            changed = self._cross_plain(placement, units)
            return None if later else changed
        return None if later else False

    def _cross_plain(self, placement: PackedPlacement, units: list[Streamed]) -> bool:
        """Let ``units`` cross as they are, as far as host memory allows; whether any do that did not."""
        before = [unit for unit in units if unit.decoder is not None]
        left = placement.unpack(self._streamer, before)
        done = [unit for unit in before if unit not in left]
        names = frozenset(entry.name for unit in done for entry in unit.unit.entries)
        assert self._packing is not None
        self._packing = dataclasses.replace(self._packing, raw=self._packing.raw | names)
        return bool(done)

    def _turn_plain(self, learnt: Learnt, seconds: float, steps: float) -> float | None:
        """Lay all out plain, where the room that packed bytes are unpacked in is worth more as residents.

        ``seconds``: of a step, as it is to be otherwise. Returns 0 where it was done, the steps in which it will have paid
        for itself where those are more than ``steps``, None where it does not pay.
        """
        chosen = dataclasses.replace(self._settings(), packs=False)
        try:
            carving, plan = replan.decide_with(self.module, chosen, self._engine.grain, learnt)
        except BudgetError:
            return None
        except Exception as error:  # as in `Tunes._tune_once`
            logger.warning("carom: a layout of plain bytes cannot be planned: %s", str(error))
            return None
        streamed = sum(unit.nbytes for index, unit in enumerate(carving.units) if index not in plan.resident)
        gain = seconds - (plan.predicted_seconds or seconds)
        if gain < PLAIN_GAIN * seconds or streamed > self._ram:
            return None
        pays = 2 * sum(unit.nbytes for unit in carving.units) / (gain * learnt.link.bytes_per_second)
        if steps < pays:
            return pays
        logger.info(
            "carom: all units cross as they are from now on: a step is predicted to be %.3g s faster", gain
        )
        placement = self._placement
        assert isinstance(placement, PackedPlacement) and self._packing is not None
        self._cross_plain(placement, placement.streamed)
        if any(unit.decoder is not None for unit in placement.streamed):
            return None  # there is no memory for all of them
        self._packing = dataclasses.replace(self._packing, auto=False, plain=True)
        self._take(learnt)
        return 0.0

    def _unpacking_rate(self) -> float | None:
        """Bytes of output that the device decodes per second, None where that was not measured."""
        if isinstance(self._engine, SimulatedEngine):
            return self._engine.config.decode_bytes_per_second
        if isinstance(self._placement, PackedPlacement) and self._placement.proof.decode_bytes_per_second:
            self._unpacks_at = self._placement.proof.decode_bytes_per_second
        return self._unpacks_at  # a layout of blocks that were packed before measures nothing
