"""Defines `PeerMemory`: streamed units wait in the memory of other devices, the *peers*, and are copied from there.

A unit on a peer keeps its tier: its tensors are read and written on the host or in the weights file as those of any
other unit. Only the bytes that a fetch copies (packed or not) are on the peer. What was in pinned host memory is not
pinned any more, and what comes from a file takes no room in the RAM cache. After the unit's values have changed on
the host, its next fetch first copies them to the peer again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..common.sizes import format_size
from ..device.engine import Engine
from ..device.peer_link import PeerLink
from ..host.arena import Block
from ..plan.peers import PeerRates, PeerRoom, assign
from ..plan.residency import round_up

if TYPE_CHECKING:
    from .tier import Tier

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


@dataclass(frozen=True, eq=False)
class Peer:
    """A device whose memory holds units: at most ``nbytes`` bytes of it, copied over ``link`` at ``rates``."""

    engine: Engine
    link: PeerLink
    nbytes: int
    rates: PeerRates


class PeerCopy:
    """The bytes of one unit in the memory of ``peer``. ``data``: uint8, on the peer, as many as a fetch copies."""

    def __init__(self, peer: Peer, data: torch.Tensor) -> None:
        self.peer, self.data = peer, data
        self._memory = data
        self._filled: tuple[Any, ...] = ()  # the events after which `data` holds the unit
        self._read: tuple[Any, ...] = ()  # the event of the last copy from `data`
        self._block: Block | None = None  # the host block whose bytes these are
        self._version: int | None = None  # the version of the unit's values

    def fill(self, block: Block, version: int) -> bool:
        """Enqueue the copy of ``block`` to the peer, unless it was copied already. Returns False if there is no room
        for it.

        ``version``: the present version of the unit's values.
        """
        if self._block is block and self._version == version:
            return True
        if block.data.numel() > self._memory.numel():
            return False
        self._block = None
        self.data = self._memory[: block.data.numel()]
        event, _ = self.peer.engine.copy_in(self.data, block.data, (*self._filled, *self._read), False)
        self._filled, self._block, self._version = (event,), block, version
        return True

    def free(self) -> None:
        """Drop the memory, whatever else refers to this object, once no copy reads it."""
        for event in self._read:
            self.peer.engine.synchronize(event)
        self.data = self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Copy ``source``, a part of `data`, to ``target`` on the session's device. As `Engine.copy_in`."""
        event, marks = self.peer.link.copy(target, source, (*self._filled, *after), timed)
        self._filled, self._read = (), (event,)
        return event, marks


class PeerMemory:
    """The memory of other devices that one session uses. It is filled for one layout at a time.

    ``peers``: the devices. ``told``: notes on them for the report. ``notes``: these, and notes on the present layout.
    """

    def __init__(self, peers: Sequence[Peer], told: Sequence[str]) -> None:
        self.peers, self._told = tuple(peers), tuple(told)
        self._tier: Tier | None = None
        self.nbytes = 0  # of units on all peers
        self.notes: list[str] = []

    @property
    def links(self) -> int:
        """The number of links that copy at the same time, that of host memory included."""
        return 1 + sum(peer.rates.worth for peer in self.peers)

    def place(self, tier: Tier, stay: Collection[int], slots: int) -> None:
        """Copy units of ``tier`` to the peers. Called once the tier has placed its units, and before it is started.

        ``stay``: ids of the `Unit` objects that will be on the session's device. ``slots``: units that fit into the
        streamed region. A peer that runs out of memory gets fewer units.
        """
        self._tier, self.notes = tier, list(self._told)
        grain = max((peer.engine.grain for peer in self.peers), default=1)
        backings = tier.backings
        movable = [
            not (backing.trainable or backing.on_device or id(backing.unit) in stay) for backing in backings
        ]
        sizes = [
            round_up(backing.wire_bytes, grain) if may else 0
            for backing, may in zip(backings, movable, strict=True)
        ]
        rooms = [PeerRoom(peer.nbytes, peer.rates) for peer in self.peers]
        staying = sum(backing.wire_bytes for backing, may in zip(backings, movable, strict=True) if not may)
        places = list(zip(backings, assign(sizes, rooms, tier.fast_ram_bytes - staying, slots), strict=True))
        found = []
        for which, peer in enumerate(self.peers):
            mine = [backing for backing, chosen in places if chosen == which]
            before = self.nbytes
            try:
                for backing in mine:
                    data = peer.engine.allocate(backing.wire_bytes)
                    found.append((backing, PeerCopy(peer, data)))
                    self.nbytes += data.numel()
            except OutOfMemory:
                peer.engine.trim()
                self.notes.append(
                    f"peers=: {peer.engine.name} had memory for {format_size(self.nbytes - before)} of "
                    f"{format_size(sum(backing.wire_bytes for backing in mine))}; the other units wait on the host"
                )
            peer.engine.synchronize()  # other streams may still use memory that the allocator reused
        for backing, copy in found:
            backing.wait_on(copy)
        for peer in self.peers:
            peer.engine.synchronize()
        if found:
            tier.left_host()
        trainable = sum(backing.wire_bytes for backing in backings if backing.trainable)
        if trainable:
            self.notes.append(
                f"peers=: {format_size(trainable)} of weights that require gradients wait on the host; if they are not "
                "trained, call requires_grad_(False) on the module first"
            )

    def release(self) -> None:
        """Give the memory of the peers back. Called after the last fetch, when no work is pending on the session's
        device.
        """
        if self._tier is None:
            return
        for peer in self.peers:
            peer.engine.synchronize()
        for backing in self._tier.backings:
            backing.leave_peer()
        self._tier, self.nbytes = None, 0
        for peer in self.peers:
            peer.engine.trim()
