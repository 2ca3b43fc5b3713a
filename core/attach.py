"""Put a plan into effect on a module, and take it back: where every tensor lives, and who is told.

`Placement` owns the changes to tensors (host blocks, device buffers, classes), `hooks` the changes to
modules. Both are undone in the reverse order, whatever failed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import nn

from . import on_device
from .deliver import call_as_usual, call_when_landed
from .errors import UnsupportedError
from .filling import Filling
from .host_copies import HostCopies, HostCopy, clear_of, fingerprint
from .on_device import Lot, Moved, OnDevice, is_plain, lots_of
from .ops import HostParameter, HostTensor
from .plan import Plan, round_up
from .progress import Progress
from .store.arena import Block, HostArena, return_freed_memory, workers
from .store.mapped import Mapped
from .streamed import Owner, Streamed
from .transfer import Engine
from .units import Carving, Entry, Unit


class Placement:
    """Moves a carving's tensors to where a plan wants them; `undo` brings every one back.

    ``copies``: units' host bytes that outlive placements (None: none do), so that a change of layout moves no more than
    it changes.
    """

    def __init__(self, engine: Engine, arena: HostArena, copies: HostCopies | None = None) -> None:
        self._engine, self._arena, self._copies = engine, arena, copies
        self.here = OnDevice(engine)
        self._put_off: list[Unit] = []  # residents that come in turn with what streams
        self._small: list[Entry] = []  # of these, and of what stays by need, what shares a buffer
        self._worn: list[tuple[torch.Tensor, type, torch.device]] = []
        self.streamed: list[Streamed] = []
        self.notes: list[str] = []
        self.resident_bytes = 0  # device bytes, as the allocator reserves them
        self.loaded_bytes = 0  # of these, what crossed to the device for this placement
        self.adapter_bytes = 0
        self.streamed_host_bytes = 0
        self.wire_bytes = 0  # of the streamed weights, as they wait to cross

    @property
    def came_on_device(self) -> bool:
        """Whether streamed weights were on a device when they were taken, and have to return there."""
        return any(home.type != "cpu" for _, _, home in self._worn)

    # -- residents

    def keep(self, units: list[Unit], entries: list[Entry], in_turn: bool = False) -> None:
        """Resident units and entries: large units in a buffer each, everything small in one.

        ``in_turn``: they come with `stream`, the large ones each in its turn and the small ones last: where they lie in a
        file that is just being read, nothing waits for the end of it but what lies there.
        """
        lots, alone = lots_of(units, entries)
        for entry in alone:
            tensor = entry.tensor
            if tensor.is_inference() and tensor.device != self._engine.device:
                raise UnsupportedError(
                    f"buffer {entry.name} was made under torch.inference_mode on {tensor.device}, and such a tensor cannot be "
                    f"moved to {self._engine.device}: replace it by its clone(), or move the module there before streaming"
                )
            size = self._move(tensor)
            self.resident_bytes += size if entry.counted else 0
        if in_turn:
            self._put_off, self._small = units, lots[-1]
            return
        for lot in lots:
            self._together(lot)

    def _keep_small(self) -> None:
        """Small residents, which share a buffer; they are copied to the host when they have to leave."""
        small, self._small = self._small, []
        units, self._put_off = self._put_off, []
        self._together(small)
        for unit in units:
            if self._copies is not None and unit.nbytes < on_device.SMALL_UNIT:
                self._copies.drop(unit)

    def _keep_in_turn(self, unit: Unit) -> None:
        """A resident unit, where it is large; its host copy, if there is one, is kept for when it has to stream."""
        if self.here.has_left:
            self.here.has_left = False
            self._engine.trim()  # what left the device gave up is whole again
        here = [self.here.holds(entry.tensor) for entry in unit.entries]
        copy = None if self._copies is None or all(here) else self._copies.find(unit)
        # What the budget for pinned memory does not hold waits for nothing.
        true = (
            copy is not None
            and self._holds(copy)
            and not any(here)
            and (copy.block.pinned or not self._arena.pins)
            and not self._engine.shares_host  # there the weight would lie in one memory twice
        )
        self._together(unit.entries)
        if copy is None or self._copies is None:
            return
        lot = self.here.moved[-1].lot
        if not true or lot is None or any(entry.trainable for entry in unit.entries):
            self._copies.discard(copy)
            return
        copy.seen = fingerprint([entry.tensor for entry in unit.entries])
        lot.copy = copy

    def _together(self, entries: list[Entry]) -> None:
        """One device buffer for several tensors; those already there stay where they are."""
        there = [entry for entry in entries if self.here.holds(entry.tensor)]
        self.resident_bytes += sum(
            entry.nbytes for entry in there if id(entry.tensor) not in self.here.received
        )
        entries = [entry for entry in entries if not self.here.holds(entry.tensor)]
        layout = Unit("", "", [])
        at = {}
        for entry in entries:
            at[id(entry)] = layout.nbytes
            layout.nbytes += -(-entry.nbytes // 512) * 512
        if not entries:
            return
        buffer = self._engine.allocate(layout.nbytes)
        self.resident_bytes += round_up(layout.nbytes, self._engine.grain)
        self.loaded_bytes += layout.nbytes
        lot = Lot(buffer.data_ptr(), layout.nbytes)
        for entry in entries:
            tensor, start = entry.tensor, at[id(entry)]
            with torch.inference_mode(False), torch.no_grad():
                piece = self._engine.alias(buffer, start, entry.nbytes).view(tensor.dtype)
                value = self._value(tensor)
                view = piece.as_strided(value.shape, value.stride(), piece.storage_offset())
                view.copy_(value)
                self._drop(value)
            del value
            self.here.moved.append(Moved(tensor, self._home(tensor), lot))
            tensor.data = view

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor holds, on whatever device."""
        return tensor.detach()

    def _home(self, tensor: torch.Tensor) -> torch.device:
        """Where it returns to."""
        return self._engine.locate(tensor)

    @cached_property
    def _mapped(self) -> Mapped:
        return Mapped()

    def _drop(self, read: torch.Tensor) -> None:
        """Where ``read`` is a mapped checkpoint's, its pages are not in memory because of us."""
        if read.device.type == "cpu" and is_plain(read):
            self._mapped.drop(read.data_ptr(), read.numel() * read.element_size())

    def adapt(self, entry: Entry) -> None:
        """A trainable tensor that stays on the device, gradient included."""
        self.adapter_bytes += self._move(entry.tensor)

    def _move(self, tensor: torch.Tensor) -> int:
        size = tensor.numel() * tensor.element_size()
        before = self.here.bring(tensor)
        if before is not None:
            self._drop(before)
            self.loaded_bytes += size
        return size

    def replaced(self, entries: dict[int, Entry]) -> None:
        """The model put others in the place of resident tensors: they go home in their stead. ``entries``: what they are
        now, by the id of what they were."""
        self.here.replaced(entries)

    def made_here(self, entry: Entry) -> None:
        """The model made a buffer: where that is on the device, it goes home with the rest."""
        homes = {moved.home for moved in self.here.moved} | {home for _, _, home in self._worn}
        if len(homes) == 1:
            self.here.made(entry, homes.pop())

    # -- streamed units

    def stream(self, units: list[Unit], make: Callable[[Unit, int, Any], Streamed]) -> list[Streamed]:
        """Copy units to blocks of their own in host memory, pin them, and let the tensors stand there.

        While one unit is copied the next is begun and the last is pinned; a unit's old memory is given back before
        the next but one is copied, so the host holds the weights once. Of a mapped checkpoint that is true too: a
        page is dropped when it was copied. A unit whose host copy still stands is copied no more.
        """
        with (
            ThreadPoolExecutor(workers(), thread_name_prefix="carom-fill") as pool,
            ThreadPoolExecutor(1, thread_name_prefix="carom-pin") as pinner,
        ):
            pins: list[Future[Any]] = []
            under_way: Filling | None = None
            progress = Progress(sum(unit.nbytes for unit in units))
            for unit, streamed in (*self._in_turn(units, make), (None, None)):
                filling = None
                if streamed is not None:
                    if self._stands_already(streamed):
                        progress.add(streamed.nbytes)
                    else:
                        filling = Filling.begin(streamed, self._arena, pool, self._mapped)
                if under_way is not None:
                    self._stand_there(under_way)
                    pins.append(pinner.submit(self._arena.pin, under_way.block))
                    progress.add(under_way.streamed.nbytes)
                under_way = filling
                if streamed is None and unit is not None:
                    self._keep_in_turn(unit)
            for pin in pins:
                pin.result()
        self._keep_small()
        return_freed_memory()
        return self.streamed

    def _in_turn(
        self, units: list[Unit], make: Callable[[Unit, int, Any], Streamed]
    ) -> list[tuple[Unit, Streamed | None]]:
        """All large units: what leaves the device first, then everything in the order in which it lies in memory, so that
        a mapped file is gone through once, behind whoever reads it ahead. None: a resident."""
        self.streamed += [
            make(unit, index, Block(torch.empty(0, dtype=torch.uint8), False, 0))
            for index, unit in enumerate(units)
        ]
        work: list[tuple[Unit, Streamed | None]] = [(streamed.unit, streamed) for streamed in self.streamed]
        work += [(unit, None) for unit in self._put_off if unit.nbytes >= on_device.SMALL_UNIT]
        work.sort(
            key=lambda item: (
                not self._leaves(item[0]),
                min((self._address(entry.tensor) for entry in item[0].entries), default=0),
            )
        )
        return work

    def _address(self, tensor: torch.Tensor) -> int:
        """Where a tensor's bytes lie."""
        return _address(tensor)

    def _leaves(self, unit: Unit) -> bool:
        return any(id(entry.tensor) in self.here.leaving for entry in unit.entries)

    def _stands_already(self, streamed: Streamed) -> bool:
        """Whether the unit's bytes are in a block from the layout before; then they stand there."""
        copy = None if self._copies is None else self._copies.find(streamed.unit)
        if copy is None or self._copies is None:
            return False
        if not self._holds(copy) or not self._serves(copy, streamed):
            self._copies.discard(copy)
            return False
        self._copies.take(streamed.unit)
        self._adopt(copy, streamed)
        self._arena.pin(streamed.block)
        return True

    def _holds(self, copy: HostCopy) -> bool:
        """Whether the copy is what its tensors are now."""
        return copy.seen is None and not any(copy.packed) and copy.stands()

    def _serves(self, copy: HostCopy, streamed: Streamed) -> bool:
        """Whether the unit can cross as the copy has it."""
        return True

    def _adopt(self, copy: HostCopy, streamed: Streamed) -> None:
        streamed.block = copy.block
        self._stand(streamed, [view for view in copy.views if view is not None])

    def _stand_there(self, filling: Filling) -> None:
        """The unit's bytes are in its block: its tensors stand there from here on."""
        filling.finish()
        filling.streamed.block = filling.block
        self._stand(filling.streamed, filling.views)

    def _stand(self, streamed: Streamed, views: list[torch.Tensor]) -> None:
        self.streamed_host_bytes += streamed.nbytes
        self.wire_bytes += streamed.nbytes
        for entry, view in zip(streamed.unit.entries, views, strict=True):
            tensor = entry.tensor
            self._worn.append((tensor, type(tensor), self.here.home_of(tensor)))
            self.here.leaving.pop(id(tensor), None)
            on_device.replace(tensor, view)
            owner = Owner(streamed.streamer, streamed, entry, tensor.detach())
            streamed.owners.append(owner)
            tensor._carom = owner  # type: ignore[attr-defined]
            tensor.__class__ = HostParameter if isinstance(tensor, nn.Parameter) else HostTensor
            if owner.trainable:
                call_when_landed(tensor)
        streamed.trainable = any(owner.trainable for owner in streamed.owners)

    # -- the way back

    def leave(self) -> None:
        """As `undo`, but what went to the device stays there, for the placement that follows to be given."""
        left = self.here.given()
        self.here.receive([moved for moved in left if moved.tensor.is_inference()])
        self.undo()
        self.here.receive([moved for moved in left if not moved.tensor.is_inference()])

    def keep_received(
        self, units: list[Unit], entries: list[Entry], adapters: list[Entry], streamed: Sequence[Unit] = ()
    ) -> None:
        """Of what was received, what is to be there stays; the rest leaves, before anything comes."""
        lots, alone = lots_of(units, entries)
        self.resident_bytes += self.here.keep(lots, [*alone, *adapters], streamed, self._copy_serves)

    def let_go(self, tensors: list[torch.Tensor], nbytes: int) -> list[Moved] | None:
        """A resident unit of ``nbytes`` goes to the host within a pass: what was known of its tensors is the caller's, until
        `take_back`. None where it has to return to a device."""
        moved = self.here.let_go(tensors)
        if moved is not None:
            self.resident_bytes -= round_up(nbytes, self._engine.grain)
        return moved

    def take_back(self, moved: list[Moved], lot: Lot, nbytes: int) -> None:
        """It is on the device again, in ``lot``."""
        for one in moved:
            one.lot = lot
        self.here.receive(moved)
        self.resident_bytes += round_up(nbytes, self._engine.grain)

    def _copy_serves(self, members: list[Moved], lot: Lot | None) -> bool:
        """Whether the host still has what these tensors are on the device; then they stand there, without a copy."""
        if lot is None or lot.copy is None or self._copies is None:
            return False
        copy, lot.copy = lot.copy, None
        # What came to be trained has a gradient on the device, and cannot wait packed.
        there = all(lot.holds(moved.tensor) and not moved.tensor.requires_grad for moved in members)
        if not there or not copy.true_of([moved.tensor for moved in members]):
            self._copies.discard(copy)
            return False
        copy.seen = None
        self._return_to(copy)
        return True

    def _return_to(self, copy: HostCopy) -> None:
        for tensor, view in zip(copy.tensors, copy.views, strict=True):
            assert view is not None
            on_device.replace(tensor, view)

    def settled(self) -> None:
        """All tensors are in their places."""
        self.here.received.clear()

    def undo(self) -> None:
        """Every tensor as it was: object, class, device; values as they are now. Pinned memory is given back."""
        with torch.inference_mode(False), torch.no_grad():
            self._undo()

    def _undo(self) -> None:
        for tensor, worn, home in reversed(self._worn):
            tensor.__class__ = worn
            tensor.__dict__.pop("_carom", None)
            call_as_usual(tensor)
            if home.type != "cpu":
                on_device.replace(tensor, self._engine.move(tensor.detach(), home))
        self._worn.clear()
        self.here.undo()
        for streamed in self.streamed:
            copy = self._copy_of(streamed)
            if copy is not None and self._copies is not None:
                self._copies.keep(streamed.unit, copy)
            elif streamed.owners:
                clear_of([owner.tensor for owner in streamed.owners], streamed.block, always=False)
            _let_go(streamed, unpin=copy is None)
        self.streamed = []
        self.resident_bytes = self.adapter_bytes = self.streamed_host_bytes = self.wire_bytes = 0

    def _copy_of(self, streamed: Streamed) -> HostCopy | None:
        """The unit's bytes, for the placement that follows; None where its tensors do not stand there."""
        if self._copies is None or len(streamed.owners) != len(streamed.unit.entries):
            return None
        tensors = [entry.tensor for entry in streamed.unit.entries]
        views: list[torch.Tensor | None] = [owner.host for owner in streamed.owners]
        copy = HostCopy(tensors, views, streamed.block, [None] * len(tensors))
        return copy if copy.stands() else None


def _let_go(streamed: Streamed, unpin: bool) -> None:
    """Only the model's tensors, and a host copy that was kept, have the unit's block from here on.

    What the session was made of dies in cycles, whenever the collector comes by: until then a module that is laid
    out anew would lie in memory twice.
    """
    if unpin:
        streamed.block.unpin()
    streamed.block = Block(torch.empty(0, dtype=torch.uint8), False, 0)
    for owner in streamed.owners:
        host = owner.host
        owner.host = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # no storage of its own
        return 0


def wanted_residents(carving: Carving, plan: Plan) -> tuple[list[Unit], list[Unit]]:
    """(resident units, streamed units) of a plan, in order."""
    resident = [unit for index, unit in enumerate(carving.units) if index in plan.resident]
    streamed = [unit for index, unit in enumerate(carving.units) if index not in plan.resident]
    return resident, streamed
