"""`CodecChoice`: decides after the first steps whether weights are copied to the device packed (losslessly
compressed) or unpacked ("plain").
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

from ..common.errors import BudgetError
from ..placement.packer import Packing
from ..plan.predict import PackedTransfer, predict
from . import measured_planner
from .layout import Layout, Wanted
from .layout_manager import LayoutManager

logger = logging.getLogger("carom")
PLAIN_GAIN = 0.01  # a layout with unpacked weights must save at least this share of a step's seconds
# The share of a step's seconds by which unpacked weights may lengthen the device's work where the host is the
# bottleneck. They are still chosen then, because the host need not launch unpacking kernels.
HOST_LOSS = 0.005


@dataclass(frozen=True)
class Later:
    """The answer of `CodecChoice.choose` if the choice cannot be made yet.

    ``steps``: the number of steps after which a layout with unpacked weights has saved the time that the
    change takes; 0 if not known.
    """

    steps: float = 0.0


class CodecChoice:
    """Chooses once for each session with ``codec="auto"``: all weights are copied to the device packed, or
    all unpacked.
    """

    def __init__(self, manager: LayoutManager) -> None:
        self._manager = manager

    def choose(self, layout: Layout, wanted: Wanted, steps: float = math.inf) -> Wanted | Later | None:
        """Return the request for a layout with unpacked weights, `Later` if the choice has to wait, or None
        to keep the present layout.

        ``steps``: the number of steps so far. The change to unpacked weights is postponed until it would have
        saved the time that it takes within this number of steps.
        """
        manager, placement, policy = self._manager, layout.placement, wanted.packing
        planner = manager.planner
        if not placement.tier.packs:
            return None
        if placement.tier.decode_bytes_per_second and manager.engine.decode_bytes_per_second is None:
            planner.decode_rate = placement.tier.decode_bytes_per_second
        rate = planner.decode_rate
        if policy is None or not policy.auto or not rate:
            return None
        learnt = planner.profile(layout)
        if learnt is None or not layout.streamer.unreferenced:
            return Later()
        pieces = measured_planner.pieces(layout.carving)
        packed = {
            index: PackedTransfer(0 if unit.on_device else unit.wire_bytes, unit.nbytes / rate)
            for index, unit in zip(layout.streamed_indices(), placement.streamed, strict=True)
            if unit.packed
        }
        wire = learnt.link.bytes_per_second * placement.wire_bytes / placement.streamed_host_bytes
        link = dataclasses.replace(learnt.link, bytes_per_second=wire)
        work = learnt.workload(pieces, measured_planner.blocks(manager.module.root))
        sizes = [piece.nbytes for piece in pieces]
        plan = layout.plan
        # The measured times include the unpacking of units, so the prediction for the present layout must
        # include it too.
        present = predict(sizes, plan.resident, plan.region_bytes, work, link, packed=packed).seconds
        present = max(present, learnt.host_seconds(measured_planner.uses(work, plan)))
        unpacked = {name: nbytes for index in packed for name, nbytes in pieces[index].tensors.items()}
        plain = dataclasses.replace(
            wanted, profile=learnt.without_unpacking(rate, unpacked, link), residents_among=None
        )
        return self._plain(layout, plain, present, steps)

    def _plain(self, layout: Layout, wanted: Wanted, present: float, steps: float) -> Wanted | Later | None:
        """Return the request ``wanted`` with unpacked weights if that makes a step shorter than ``present``
        seconds.

        Otherwise returns `Later` or None, as `choose` does.
        ``steps``: the number of steps so far.
        """
        manager = self._manager
        learnt, policy = wanted.profile, wanted.packing
        assert learnt is not None and policy is not None
        settled = dataclasses.replace(policy, auto=False)
        chosen = dataclasses.replace(manager.planner.settings(wanted), packs=False)
        try:
            carving, plan = measured_planner.decide_with(
                manager.module.root, chosen, manager.engine.grain, learnt
            )
        except BudgetError:
            self._settle(settled)
            return None
        except Exception as error:  # the choice is optional: after an error the session goes on as before
            logger.warning("carom: a layout of plain bytes cannot be planned: %s", str(error))
            self._settle(settled)
            return None
        streamed = sum(unit.nbytes for index, unit in enumerate(carving.units) if index not in plan.resident)
        gain = present - (plan.predicted_seconds or present)
        least = -HOST_LOSS if learnt.host_bound else PLAIN_GAIN
        if gain < least * present or streamed > wanted.ram:
            self._settle(settled)
            return None
        # Where the host is the bottleneck, the predicted gain lacks the host time that is saved. So the
        # change is not postponed.
        move = 2 * sum(unit.nbytes for unit in carving.units) / learnt.link.bytes_per_second
        pays = 0.0 if learnt.host_bound else move / gain
        if steps < pays:
            return Later(pays)
        logger.info(
            "carom: all units cross as they are from now on: a step is predicted to be %.3g s faster", gain
        )
        placement = layout.placement
        if placement.tier.unpack(layout.streamer, placement.streamed):
            self._settle(settled)  # host memory has no room for all weights unpacked
            return None
        return dataclasses.replace(wanted, packing=dataclasses.replace(settled, plain=True))

    def _settle(self, policy: Packing) -> None:
        """Record that the choice has been made, and that weights are still copied packed. ``policy``: the
        packing settings.
        """
        manager = self._manager
        manager.wanted = dataclasses.replace(manager.wanted, packing=policy)
