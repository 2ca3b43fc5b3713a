"""Defines `Backing` and `RunnerState`. A `Backing` represents the stored bytes of one streamed unit, and copies them
to device memory.

A unit is a group of tensors that are copied together. A slot is the device memory that holds a streamed unit
while the unit is used. The link is the connection between host and device (PCIe, for instance). Packed bytes
are weights that a codec has compressed. The wire bytes of a unit are the bytes that are copied over the link
to fetch the unit, packed or not.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..model.home import ManagedUnit
from ..stores.transfer import Transfer
from .peer_memory import PeerCopy


class RunnerState(Protocol):
    """What a tier asks of the runner that fetches its units.

    ``lock``: held while bytes are fetched.
    """

    lock: threading.RLock

    @property
    def idle(self) -> bool:
        """Whether no forward or backward pass is running."""


class Backing(ManagedUnit, ABC):
    """The bytes of one streamed unit in its tier (its store), and the copy of these bytes to a slot.

    ``on_device``: whether the packed bytes stay in device memory, so that a fetch copies nothing over the
    link.
    ``peer``: the bytes in the memory of another device, from which they are fetched; None if there are none.
    """

    on_device = False
    peer: PeerCopy | None = None

    @property
    def packed(self) -> bool:
        """Whether a fetch copies packed bytes and decodes them on the device."""
        return False

    @property
    def wire_bytes(self) -> int:
        """Bytes that one fetch of the unit copies over the link."""
        return self.nbytes

    @abstractmethod
    def fetch(self, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Enqueue the copy (and decoding) of the unit's bytes into ``target``, a uint8 tensor on the device.

        The copy begins after the events ``after``. Returns the event after which ``target`` holds the bytes.
        Every copy is counted in ``transfer.meter``.
        """

    def wait_on(self, copy: PeerCopy) -> None:
        """Copy the unit's bytes to ``copy`` in the memory of another device, and fetch them from there."""
        raise NotImplementedError

    def leave_peer(self) -> None:
        """Drop the unit's bytes in the memory of another device."""
        if self.peer is not None:
            self.peer.free()
        self.peer = None
