"""Defines `Backing`, the stored bytes of one streamed unit and their copy to device memory, and `Link`, the
streamer's objects that such a copy uses."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device.engine import Engine
from ..device.staging import Staging
from ..host.arena import Block
from ..metrics.meter import Meter
from ..model.home import ManagedUnit, Runtime
from ..model.units import Unit


@dataclass(frozen=True, eq=False)
class Link:
    """The copy path from host to device of one streamer.

    ``lock``: held while bytes are fetched. ``staging``: device memory in which packed bytes arrive, None
    where no unit is packed. ``upcoming``: returns the indexes of units in the order in which uses are
    expected. ``foresee``: calls `Tier.expect` with the units needed from now on. ``idle``: returns whether no
    forward or backward pass is running. ``mapped_bytes``: returns the bytes of host memory that hold copies
    which kernels read directly, without a slot.
    """

    engine: Engine
    meter: Meter
    lock: threading.RLock
    staging: Staging | None
    upcoming: Callable[[], Iterable[int]]
    foresee: Callable[[], None]
    idle: Callable[[], bool]
    mapped_bytes: Callable[[], int]


class Backing(ManagedUnit, ABC):
    """The bytes of one streamed unit in its tier, and their copy to a slot.

    ``index``: the unit's position among the tier's backings. ``on_device``: whether the packed bytes stay in
    device memory, so that a fetch copies nothing over the link.
    """

    on_device = False

    def __init__(self, unit: Unit, runtime: Runtime, index: int) -> None:
        super().__init__(unit, runtime)
        self.index = index

    @property
    def packed(self) -> bool:
        """Whether a fetch decodes packed bytes on the device."""
        return False

    @property
    def wire_bytes(self) -> int:
        """Bytes that one fetch of the unit copies over the link."""
        return self.nbytes

    def ready(self) -> bool:
        """Return whether `fetch` can run without blocking the host thread on a disk read."""
        return True

    @abstractmethod
    def fetch(self, target: torch.Tensor, after: Sequence[Any], link: Link) -> Any:
        """Enqueue the copy (and decoding) of the unit's bytes into ``target``, a uint8 tensor on the device.

        The copy begins once the events ``after`` are reached. Return the event after which ``target`` holds
        the bytes. Every copy is counted in ``link.meter``.
        """

    def plain_block(self) -> Block | None:
        """Return the host block that holds the unit's bytes exactly as in a slot, or None if there is no such
        block."""
        return None
