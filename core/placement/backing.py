"""Defines `Backing` and `Link`. A `Backing` represents the stored bytes of one streamed unit, and copies them
to device memory.

A unit is a group of tensors that are copied together. A slot is the device memory that holds a streamed unit
while the unit is used. The link is the connection between host and device (PCIe, for instance). Packed bytes
are weights that a codec has compressed. The wire bytes of a unit are the bytes that are copied over the link
to fetch the unit, packed or not. A `Link` holds the objects of the streamer that such a copy uses.
"""

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
from .peer_memory import PeerCopy


@dataclass(frozen=True, eq=False)
class Link:
    """The objects with which one streamer copies units from host to device.

    ``lock``: held while bytes are fetched.
    ``staging``: device memory into which packed bytes are copied before they are decoded, None if no unit is
    packed.
    ``upcoming``: returns the indexes of units in the order in which they are expected to be used.
    ``foresee``: calls `Tier.expect` with the units that are needed from now on.
    ``idle``: returns whether no forward or backward pass is running.
    ``mapped_bytes``: returns the bytes of host memory that hold copies which kernels read directly, without a
    slot.
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
    """The bytes of one streamed unit in its tier (its store), and the copy of these bytes to a slot.

    ``index``: the unit's position among the tier's backings.
    ``on_device``: whether the packed bytes stay in device memory, so that a fetch copies nothing over the
    link.
    ``peer``: the bytes in the memory of another device, from which they are fetched; None if there are none.
    """

    on_device = False
    peer: PeerCopy | None = None

    def __init__(self, unit: Unit, runtime: Runtime, index: int) -> None:
        super().__init__(unit, runtime)
        self.index = index

    @property
    def packed(self) -> bool:
        """Whether a fetch copies packed bytes and decodes them on the device."""
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

        The copy begins after the events ``after``. Returns the event after which ``target`` holds the bytes.
        Every copy is counted in ``link.meter``.
        """

    def wait_on(self, copy: PeerCopy) -> None:
        """Copy the unit's bytes to ``copy`` in the memory of another device, and fetch them from there."""
        raise NotImplementedError

    def leave_peer(self) -> None:
        """Drop the unit's bytes in the memory of another device."""
        if self.peer is not None:
            self.peer.free()
        self.peer = None

    def plain_block(self) -> Block | None:
        """Return the host block whose bytes are exactly those of the unit in a slot, or None if there is no
        such block.
        """
        return None
