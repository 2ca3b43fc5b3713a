"""Defines `PinnedTier`: each streamed unit is in one pinned block of host memory, unpacked, and is fetched by
one copy.

A unit is a group of tensors that are copied together. A slot is the device memory that holds a streamed unit
while it is used. A backing represents the stored bytes of one unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..common.progress import Progress
from ..device.engine import Engine
from ..host.arena import Block, storage_bytes, workers
from ..model.home import Home, Runtime
from ..model.managed_tensor import HostParameter, HostTensor, in_backward
from ..model.units import Unit
from ..stores.transfer import Transfer
from . import residents
from .attached_tensors import attach
from .backing import Backing
from .block_fill import BlockFill
from .host_copies import HostCopy, HostStore, move_small_tensors_out
from .peer_memory import PeerCopy
from .resident_placer import ResidentPlacer
from .tier import Tier


class PinnedBacking(Backing):
    """A unit whose bytes are in the host block ``block``, exactly as in a slot."""

    def __init__(self, unit: Unit, runtime: Runtime, index: int, block: Block | None = None) -> None:
        super().__init__(unit, runtime, index)
        self.block = block or empty_block()

    def forget(self) -> None:
        super().forget()
        self.block = empty_block()

    @property
    def wire_bytes(self) -> int:
        """Bytes that one fetch of the unit copies over the transfer."""
        return self.block.data.numel()

    def fetch(self, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Enqueue one copy of the block to ``target``, after the events ``after``. Returns the event of the
        copy.
        """
        engine, meter, unit, backward = transfer.engine, transfer.meter, self.unit, in_backward()
        source, copy = (self.block.data, engine.copy_in) if self.peer is None else self.source(engine)
        event, marks = copy(target, source, after, meter.timing)
        if engine.blocking and marks is not None:
            meter.waited(marks[0], marks[1], unit.name, backward)
        meter.copied(unit.name, marks, unit.nbytes, unit.raw_bytes, backward, from_peer=self.peer is not None)
        return self.copy_adopted(target, event, transfer) if self.adopted else event

    def copy_adopted(self, target: torch.Tensor, event: Any, transfer: Transfer) -> Any:
        """Copy the bytes of weights whose ``.data`` the program replaced to their places in ``target``, after the event
        of the other bytes. Returns the event of the last copy.
        """
        for home in self.adopted:
            start, nbytes = home.entry.offset, home.entry.nbytes
            place = target[start : start + nbytes]
            event, marks = transfer.engine.copy_in(
                place, storage_bytes(home.host.detach()), (event,), transfer.meter.timing
            )
            transfer.meter.copied(self.name, marks, nbytes, 0, in_backward(), 0)
        return event

    def source(self, engine: Engine) -> tuple[torch.Tensor, Callable[..., tuple[Any, Any]]]:
        """Return the bytes that a fetch copies, on the host or on another device, and the function that copies them
        (`Engine.copy_in` or `PeerCopy.copy`).
        """
        if self.peer is not None and (self.trainable or not self.peer.fill(self.block, self.version())):
            self.leave_peer()
        return (self.block.data, engine.copy_in) if self.peer is None else (self.peer.data, self.peer.copy)

    def wait_on(self, copy: PeerCopy) -> None:
        """Copy the block to the memory of another device, and fetch it from there."""
        copy.fill(self.block, self.version())
        self.peer = copy

    def release_block(self, unpin: bool) -> None:
        """Drop the reference to the block, and unpin the block if ``unpin``. The model's tensors, or a host
        copy, may keep the block's memory.

        This is done explicitly because the garbage collector frees sessions late. A reference kept until then
        would keep the weights in memory twice when the module is laid out again.
        """
        if unpin:
            self.block.unpin()
        self.block = empty_block()
        for home in self.homes:
            host = home.host
            home.host = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")


class BlockTier(Tier):
    """Base class of tiers in which each backing has a host block.

    The class guards the blocks, pins them within a limit, and keeps them as host copies for the next layout.
    """

    def __init__(self, engine: Engine, store: HostStore) -> None:
        super().__init__(engine)
        self.store = store

    @property
    def blocks(self) -> Sequence[PinnedBacking]:
        """The tier's backings that have a block."""
        return [backing for backing in self.backings if isinstance(backing, PinnedBacking)]

    def guard(self) -> None:
        """Let the engine report operators that read a block while its unit streams. Such operators would use
        host bytes by mistake.
        """
        for backing in self.blocks:
            self.engine.guard(backing.block.data, backing.name)

    @property
    def fast_ram_bytes(self) -> float:
        """Bytes of the pinned blocks; infinite if all are pinned."""
        pinned = [backing.block.pinned or not backing.block.data.numel() for backing in self.blocks]
        if all(pinned):
            return math.inf
        return sum(
            backing.block.data.numel()
            for backing, is_pinned in zip(self.blocks, pinned, strict=True)
            if is_pinned
        )

    def left_host(self) -> None:
        """Unpin the blocks of units in the memory of other devices, and pin others for which the RAM budget was too
        small.
        """
        for backing in self.blocks:
            if backing.peer is not None:
                backing.block.unpin()
        self.store.arena.pin_anew(backing.block for backing in self.blocks if backing.peer is None)

    def undo(self) -> None:
        """Restore the model's tensors. Keep each block as a host copy if the session keeps host copies."""
        blocks = self.blocks
        for backing in blocks:
            self.engine.unguard(backing.block.data)
        self.attached.undo()
        copies = self.store.copies
        for backing in blocks:
            copy = None if copies is None else self.copy_of(backing)
            if copy is not None and copies is not None:
                copies.keep(backing.unit, copy)
            elif backing.homes:
                move_small_tensors_out([home.tensor for home in backing.homes], backing.block, always=False)
            backing.release_block(unpin=copy is None)
        self.backings = []

    def copy_of(self, backing: PinnedBacking) -> HostCopy | None:
        """Return the unit's block as a host copy for the next layout, or None if the unit's tensors do not
        use the block.
        """
        raise NotImplementedError


class PinnedTier(BlockTier):
    """The store of unpacked units in pinned host memory."""

    def place(self, units: Sequence[Unit], runtime: Runtime, residents: ResidentPlacer) -> list[Backing]:
        """Copy each unit to a block of its own in host memory, pin the block, and let the unit's tensors use
        it.

        While one unit is copied, the copy of the next unit has begun, and the previous block is being pinned.
        Before the copy of a unit begins, the old memory of the unit two before it has been released, so the
        host holds the weights about once. Pages of a memory-mapped checkpoint are released after they have
        been copied. A unit with a valid host copy from the previous layout is not copied again.
        """
        arena = self.store.arena
        backings = [PinnedBacking(unit, runtime, index) for index, unit in enumerate(units)]
        self.backings = list(backings)
        with (
            ThreadPoolExecutor(workers(), thread_name_prefix="carom-fill") as pool,
            ThreadPoolExecutor(1, thread_name_prefix="carom-pin") as pinner,
        ):
            pins: list[Future[Any]] = []
            under_way: BlockFill | None = None
            progress = Progress(sum(unit.nbytes for unit in units))
            for unit, turn in (*residents.placement_order(backings), (None, None)):
                backing = None if turn is None else backings[turn.index]
                filling = None
                if backing is not None:
                    if self._reuse_copy(backing, residents):
                        progress.add(backing.nbytes)
                    else:
                        filling = BlockFill.begin(backing, self.engine, arena, pool, residents.mapped)
                if under_way is not None:
                    self._finish_fill(under_way, residents)
                    pins.append(pinner.submit(arena.pin, under_way.block))
                    progress.add(under_way.backing.nbytes)
                under_way = filling
                if backing is None and unit is not None:
                    residents.place_deferred(unit)
            for pin in pins:
                pin.result()
        return self.backings

    def _reuse_copy(self, backing: PinnedBacking, residents: ResidentPlacer) -> bool:
        """Use the unit's host copy from the previous layout, if it is valid. Returns whether it was used."""
        copy = self.store.reuse(backing.unit)
        if copy is None:
            return False
        backing.block = copy.block
        self._attach_homes(backing, [view for view in copy.views if view is not None], residents)
        self.store.arena.pin(backing.block)
        return True

    def _finish_fill(self, filling: BlockFill, residents: ResidentPlacer) -> None:
        """Wait for the copy to the block, and let the unit's tensors use the block."""
        filling.finish()
        filling.backing.block = filling.block
        self._attach_homes(filling.backing, filling.views, residents)

    def _attach_homes(
        self, backing: PinnedBacking, views: list[torch.Tensor], placer: ResidentPlacer
    ) -> None:
        """Turn the unit's tensors into managed tensors whose values are ``views`` of the block."""
        for entry, view in zip(backing.unit.entries, views, strict=True):
            tensor = entry.tensor
            self.attached.remember(tensor, placer.device_tensors.origin_of(tensor))
            placer.device_tensors.leaving.pop(id(tensor), None)
            residents.replace(tensor, view)
            home = Home(backing, entry, tensor.detach())
            backing.homes.append(home)
            attach(home, HostParameter, HostTensor)
        backing.note_trainable()

    def copy_of(self, backing: PinnedBacking) -> HostCopy | None:
        """Return the unit's block as a host copy for the next layout, or None if the unit's tensors do not
        use the block.
        """
        if backing.adopted or len(backing.homes) != len(backing.unit.entries):
            return None
        tensors = [entry.tensor for entry in backing.unit.entries]
        views: list[torch.Tensor | None] = [home.host for home in backing.homes]
        copy = HostCopy(tensors, views, backing.block, [None] * len(tensors))
        return copy if copy.lies_in_block() else None


def empty_block() -> Block:
    """Return a block of zero bytes."""
    return Block(torch.empty(0, dtype=torch.uint8), False, 0)
