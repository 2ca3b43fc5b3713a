"""Defines `Transfer`: what a store copies with, from its own memory to a slot on the device.

A unit is a group of weights that cross to the device together. A slot is the device memory that holds a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device.engine import Engine
from ..device.staging import Staging
from ..host.arena import storage_bytes
from ..metrics.meter import Meter
from ..model.home import ManagedUnit
from ..model.managed_tensor import in_backward


@dataclass(frozen=True, eq=False)
class Transfer:
    """The way of one runner from host memory to its slots.

    ``engine``: issues copies to the device. ``meter``: each copy is counted in it. ``staging``: device memory in which
    packed bytes arrive before they are decoded, None if no unit is packed.
    """

    engine: Engine
    meter: Meter
    staging: Staging | None = None

    def copy_weights(
        self, unit: ManagedUnit, values: Sequence[torch.Tensor], target: torch.Tensor, after: Sequence[Any]
    ) -> Any:
        """Enqueue the copies of the host tensors ``values``, one for each weight of ``unit``, to their places in
        ``target``, after the events ``after``. Returns the event of the last copy. The caller keeps the tensors until then.

        All copies together are counted as one transfer. Copies are in order among themselves.
        """
        engine, meter, backward, event = self.engine, self.meter, in_backward(), None
        transfers, raw_bytes = 1, unit.unit.raw_bytes
        for home, value in zip(unit.homes, values, strict=True):
            start, end = home.entry.offset, home.entry.offset + home.entry.nbytes
            event, marks = engine.copy_in(
                target[start:end], storage_bytes(value.detach()), after, meter.timing
            )
            if engine.blocking and marks is not None:
                meter.waited(marks[0], marks[1], unit.name, backward)
            meter.copied(unit.name, marks, end - start, raw_bytes, backward, transfers)
            after, transfers, raw_bytes = (), 0, 0
        return event
