"""Defines `PackedTier`: the store of streamed units whose large frozen weights are encoded losslessly while
the session is created.

A slot is the device memory that holds a streamed unit while it is used. The bytes of a packed unit are in one
pinned host block: packed tensors one after another, and tensors that are not packed (norms, other dtypes)
between them. A fetch copies the block to staging memory on the device, and one kernel launch decodes it into
the slot. The weight's own memory is released. The model's tensor object has no bytes meanwhile, and its value
is decoded when it is read (`model.elsewhere_tensor`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import nn

from ..codec.unit_decoder import AnyEntry, UnitDecoder, sizes
from ..common.progress import Progress
from ..device.engine import Engine
from ..host.arena import (
    Block,
    fill,
    host_bytes,
    prefault,
    return_freed_memory,
    storage_bytes,
    typed_view,
    workers,
)
from ..model import managed_tensor
from ..model.elsewhere_tensor import AwayParameter, AwayTensor
from ..model.home import Home, Runtime
from ..model.managed_tensor import HostParameter, HostTensor
from ..model.units import Unit
from ..stores.transfer import Transfer
from .attached_tensors import attach
from .backing import Backing, RunnerState
from .decoder_check import DecoderCheck
from .host_copies import HostCopy, HostStore
from .packed_backing import PackedBacking, prepare
from .packed_home import PackedHome
from .packed_residents import PackedResidents
from .packed_tensor import PackedLayout, give_back, lay_out_tensors, pack
from .packed_writes import PackedWrites, put_back
from .packer import Packer, Packing, packs
from .pinned_tier import BlockTier, PinnedBacking
from .resident_placer import ResidentPlacer
from .residents import DeviceTensors
from .tier import SlotReader, TierFigures
from .unpacked_copy import Unpacker

logger = logging.getLogger("carom")
_AT_ONCE = 4  # number of tensors that are encoded at the same time
# Bytes that a block leaves free after each packed weight if weights are rewritten: a share of the packed bytes, and the
# least number. Adding a product of adapters to a weight and taking it out again changes the packed bytes by less.
SPARE, LEAST_SPARE = 1 / 256, 512


class PackedTier(BlockTier):
    """A store of packed units in host memory.

    Packed weights (``store.shelf``) are kept beyond a layout, so that weights which stream before and after a
    change of layout are not encoded again.
    ``staging_bytes``: device memory into which packed units are copied before they are decoded.
    ``room``: bytes of device memory that encoding may use.
    ``largest``: bytes of the largest unit.
    """

    def __init__(
        self,
        engine: Engine,
        store: HostStore,
        policy: Packing,
        staging_bytes: int,
        room: int = 1 << 30,
        largest: int = 0,
    ) -> None:
        super().__init__(engine, store)
        self._policy, self._staging_bytes = policy, staging_bytes
        self._swapped_classes: list[tuple[torch.Tensor, type]] = []
        self._origins: dict[
            int, torch.device
        ] = {}  # original devices of unpacked tensors, until they are managed
        self._placer: ResidentPlacer | None = None  # set in `place`
        self.decoder_check = DecoderCheck(engine)
        self.packed_residents = PackedResidents(engine)
        self.packed_residents.on_unit_dropped = lambda: self.left_device()
        self._packer = Packer(engine, store.shelf, policy, self.decoder_check, room, largest)
        self._unpacker = Unpacker(engine, store.arena)
        self._writes = PackedWrites(
            engine, policy.rewritten, staging_bytes, self._new_block, self._rebuild, self._renew_decoder
        )

    @property
    def packed_units(self) -> list[PackedBacking]:
        """The tier's backings."""
        return cast("list[PackedBacking]", self.backings)

    @property
    def packs(self) -> bool:
        """Whether weights of this tier may be packed: always True."""
        return True

    @property
    def came_on_device(self) -> bool:
        """Whether streamed weights were on a device when the session was created. They have to return there
        at the end.
        """
        shelf = self.store.shelf.values()
        return super().came_on_device or any(packed.origin.type != "cpu" for packed in shelf)

    @property
    def staging_bytes(self) -> int:
        """Device memory in bytes that decoding packed units needs, 0 if no unit is packed."""
        return self._staging_bytes if any(backing.packed for backing in self.backings) else 0

    @property
    def decode_bytes_per_second(self) -> float | None:
        """Measured decoding rate of the device in bytes of output per second, None if it was not measured."""
        return self.decoder_check.decode_bytes_per_second

    @property
    def _residents(self) -> ResidentPlacer:
        """The object that places the layout's residents (tensors that stay on the device)."""
        assert self._placer is not None
        return self._placer

    @property
    def _device_tensors(self) -> DeviceTensors:
        """The record of the layout's tensors that are on the device."""
        return self._residents.device_tensors

    def start(self, transfer: Transfer, runner: RunnerState) -> None:
        """Copy the decoding tables of all units to the device."""
        if transfer.staging is not None:
            prepare(transfer.staging, self.packed_units, self.engine)

    # -- streamed units

    def place(self, units: Sequence[Unit], runtime: Runtime, residents: ResidentPlacer) -> list[Backing]:
        """Encode the units, copy each to a pinned block of its own, and release the memory of the weights
        themselves.
        """
        self._placer = residents
        packer = self._packer
        packer.to_device = residents.uploads.to_device
        backings = [
            PackedBacking(unit, runtime, index, self.packed_residents, self.settle)
            for index, unit in enumerate(units)
        ]
        self.backings = list(backings)
        with (
            ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="carom-pack") as packers,
            ThreadPoolExecutor(workers(), thread_name_prefix="carom-fill") as pool,
            ThreadPoolExecutor(1, thread_name_prefix="carom-pin") as pinner,
        ):
            pins: list[Future[Any]] = []
            progress = Progress(sum(unit.nbytes for unit in units))
            work = residents.placement_order(backings)
            turns = [None if turn is None else backings[turn.index] for _, turn in work]
            ready = self._start_moving(turns[0], packers) if turns and packer.moves_a_unit_ahead else []
            for (unit, _), backing, following in zip(
                work, turns, (*turns[1:], None)[: len(work)], strict=True
            ):
                values: Iterable[torch.Tensor | None] = [value.result() for value in ready]
                if packer.moves_a_unit_ahead:
                    ready = self._start_moving(following, packers)
                if backing is None:
                    residents.place_deferred(unit)
                    continue
                progress.add(unit.nbytes)
                if self._reuse_copy(backing):
                    continue
                if not packer.moves_a_unit_ahead:
                    values = packer.move_values_one_ahead(unit, packers)
                came_from = [residents.device_tensors.origin_of(entry.tensor) for entry in unit.entries]
                # Encoding on the device uses the whole device, so encode one tensor at a time there.
                in_order = map if self.engine.unpacks else packers.map
                backing.tensors = list(in_order(packer.pack, unit.entries, values, came_from))
                del values
                self._build(backing, pool)
                if not self._decodes_correctly(backing):
                    backing.tensors = [packer.unpacked(packed) for packed in backing.tensors]
                    self._build(backing, pool)
                self._attach_packed(backing)
                pins.append(pinner.submit(self.store.arena.pin, backing.block))
            for pin in pins:
                pin.result()
        if pins:
            self.engine.trim()  # release the temporary memory of encoding, so that the session's buffers fit
        return self.backings

    def _start_moving(
        self, backing: PackedBacking | None, pool: ThreadPoolExecutor
    ) -> list[Future[torch.Tensor | None]]:
        """Begin to move the weights of the unit that will be packed to the device that encodes them. Returns
        a future for each entry.
        """
        return (
            [] if backing is None else [pool.submit(self._packer.move_value, e) for e in backing.unit.entries]
        )

    # -- host copies of units from the previous layout

    def _reuse_copy(self, backing: PackedBacking) -> bool:
        """Use the unit's host copy from the previous layout, if there is a suitable one. Returns whether a
        copy was used.
        """
        # What was put aside unpacked is packed before it streams.
        packable = any(packs(entry) for entry in backing.unit.entries) and not self._policy.plain
        copy = self.store.reuse(
            backing.unit, lambda copy: not (copy.aside and packable) and self._can_reuse(copy)
        )
        if copy is None:
            return False
        backing.block, backing.tensors, backing.decoder = copy.block, copy.packed, copy.decoder
        self._attach_packed(backing)
        self.store.arena.pin(backing.block)
        return True

    def _can_reuse(self, copy: HostCopy) -> bool:
        """Return whether the unit can be fetched from ``copy`` under the present settings."""
        if copy.decoder is None:
            return True
        raw = self._policy.plain and any(
            packed is not None and packed.header is not None for packed in copy.packed
        )
        return not raw and not self.decoder_check.broken and self._fits_staging(copy.decoder.entries)

    def copy_of(self, backing: PinnedBacking) -> HostCopy | None:
        """Return the unit's block as a host copy for the next layout, or None if the unit's tensors do not
        use the block.
        """
        assert isinstance(backing, PackedBacking)
        entries = backing.unit.entries
        if self._policy.keep_raw or backing.adopted or len(backing.homes) != len(entries) or backing.outdated:
            return None
        views = [None if isinstance(home, PackedHome) else home.host for home in backing.homes]
        tensors = [entry.tensor for entry in entries]
        copy = HostCopy(tensors, views, backing.block, list(backing.tensors), backing.decoder)
        return copy if self.store.is_current(copy) else None

    def _attach_packed(self, backing: PackedBacking) -> None:
        """Turn the unit's tensors into managed tensors whose values are in the block. Release the memory of
        packed weights.
        """
        device_tensors = self._device_tensors
        for entry, packed in zip(backing.unit.entries, backing.tensors, strict=True):
            tensor = entry.tensor
            home: Home
            if packed is None or self._policy.keep_raw:
                self.attached.remember(
                    tensor, self._origins.pop(id(tensor), device_tensors.origin_of(tensor))
                )
                device_tensors.leaving.pop(id(tensor), None)
                if tensor.device.type != "cpu":
                    tensor.data = tensor.detach().cpu()
                home = Home(backing, entry, tensor.detach())
                classes: tuple[type, type] = HostParameter, HostTensor
            else:
                self._swapped_classes.append((tensor, type(tensor)))
                device_tensors.leaving.pop(id(tensor), None)
                self.store.shelf[id(tensor)] = packed
                before = managed_tensor.plain(torch.Tensor.detach, (tensor,), {})
                packed.refuse_kernels()
                self._residents.drop_pages(before)
                del before
                home = PackedHome(backing, entry, packed, self)
                classes = AwayParameter, AwayTensor
            backing.homes.append(home)
            attach(home, *classes)
        backing.note_trainable()
        backing.encoded = backing.version() if self._policy.keep_raw else None

    def _fits_staging(self, entries: Iterable[AnyEntry]) -> bool:
        """Return whether each entry fits in staging memory by itself. A unit that is larger as a whole is
        decoded in pieces.
        """
        return all(sizes(entry)[0] <= self._staging_bytes for entry in entries)

    def _lay_out(self, backing: PackedBacking) -> tuple[PackedLayout, int]:
        """Return the layout of the unit in a block, and the bytes of the block. Unpacks a unit that does not fit in
        staging memory.
        """
        unit = backing.unit
        laid = lay_out_tensors(unit.entries, backing.tensors, self._rooms(backing))
        if laid.packs and not self._fits_staging(laid.entries):
            for packed in backing.tensors:
                if packed is not None:
                    packed.unpack()
            laid = lay_out_tensors(unit.entries, backing.tensors)
        return laid, laid.nbytes if laid.packs else unit.nbytes

    def _rooms(self, backing: PackedBacking) -> list[int]:
        """Return the bytes of a new block that packed bytes of each tensor of the unit may take."""
        found = [
            0 if packed is None or packed.header is None else packed.header.total
            for packed in backing.tensors
        ]
        if not self._policy.rewritten:
            return found
        return [total and total + max(LEAST_SPARE, int(SPARE * total)) for total in found]

    def _build(
        self, backing: PackedBacking, pool: ThreadPoolExecutor | None = None, block: Block | None = None
    ) -> None:
        """Copy the unit's bytes to a new, unpinned block, and let the unit's tensors use the block.

        ``block``: a block of the right size, by default a new one.
        """
        unit = backing.unit
        laid, nbytes = self._lay_out(backing)
        rooms = self._rooms(backing)
        block = block or self.store.arena.allocate(nbytes)
        pieces = []
        for entry, packed, at in zip(unit.entries, backing.tensors, laid.places, strict=True):
            source = host_bytes(entry.tensor) if packed is None else packed.blob
            pieces.append((block.data[at : at + source.numel()], source))
        on_device = any(source.device.type != "cpu" for _, source in pieces)
        if pool is None:
            for target, source in pieces:
                target.copy_(source)
        else:
            # Copies from the device run at the link's full rate only into pinned memory. Pinning is fast once
            # the pages have been touched.
            if on_device:
                for job in prefault(block.data, pool):
                    job.result()
                self.store.arena.pin(block)
            for job in fill(
                [piece for piece in pieces if piece[1].device.type == "cpu"], pool, self._residents.mapped
            ):
                job.result()
            for target, source in pieces:
                if source.device.type != "cpu":
                    target.copy_(source)
        for index, (entry, packed) in enumerate(zip(unit.entries, backing.tensors, strict=True)):
            if packed is not None:
                packed.blob, packed.room = pieces[index][0], rooms[index]
            else:
                self._move_into_block(entry.tensor, pieces[index][0])
                if index < len(backing.homes):
                    backing.homes[index].moved(managed_tensor.plain(torch.Tensor.detach, (entry.tensor,), {}))
        backing.block = block
        self._set_decoder(backing, laid)

    def _set_decoder(self, backing: PackedBacking, laid: PackedLayout) -> None:
        """Let the unit be decoded as ``laid`` says."""
        backing.decoder = UnitDecoder(laid.entries) if laid.packs else None
        if backing.decoder is not None and self.engine.device.type != "cpu":
            backing.decoder.prepare(self.engine.device)

    def _decodes_correctly(self, backing: PackedBacking) -> bool:
        """Return whether the device decodes the unit correctly; add a note for the report if not."""
        fresh = [
            entry
            for entry, packed in zip(backing.unit.entries, backing.tensors, strict=True)
            if packed is not None and id(packed.tensor) not in self.store.shelf
        ]
        if backing.decoder is None or self.decoder_check.check(backing, fresh):
            return True
        self.notes.append(self.decoder_check.broken)
        return False

    def _move_into_block(self, tensor: torch.Tensor, piece: torch.Tensor) -> None:
        """Let an unpacked tensor use its bytes in ``piece`` of the unit's block."""
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._origins.setdefault(id(tensor), self._device_tensors.origin_of(tensor))
            tensor.data = typed_view(piece, tensor)

    # -- values that the program writes to weights

    def replace(self, home: PackedHome, value: torch.Tensor) -> None:
        """Store ``value`` as the value of a packed weight. Raises MemoryError; the weight then keeps its previous
        value.
        """
        self._writes.replace(home, value)

    def settle(self) -> None:
        """Make the units whose weights were written ready for use."""
        self._writes.settle()

    def _new_block(self, backing: PackedBacking) -> Block:
        return self.store.arena.allocate(self._lay_out(backing)[1])

    def _renew_decoder(self, backing: PackedBacking) -> None:
        """Let the unit be decoded from the present bytes in its block. No work may be pending on the device."""
        rooms = [0 if packed is None else packed.room for packed in backing.tensors]
        laid = lay_out_tensors(backing.unit.entries, backing.tensors, rooms)
        put_back(backing, laid.places)
        self._set_decoder(backing, laid)
        self.packed_residents.update(backing)

    def pack_anew(self) -> None:
        """Encode units again whose plain weights have changed since they were packed. Applies only if
        `Packing.keep_raw` is set.
        """
        if not self._policy.keep_raw:
            return
        for backing in self.packed_units:
            if backing.encoded is None or backing.version() == backing.encoded:
                continue
            for home, packed in zip(backing.homes, backing.tensors, strict=True):
                if packed is not None:
                    found = pack(home.host)
                    packed.header, packed.blob = found or (None, storage_bytes(home.host).clone())
            self._rebuild(backing)
            backing.encoded = backing.version()

    def _rebuild(self, backing: PackedBacking, block: Block | None = None) -> None:
        """Copy the unit to a new block, which is pinned if the old block was. Waits for copies that read the
        old block. ``block``: as in `_build`.
        """
        self.engine.synchronize()  # copies from the old block may be running
        pinned = backing.block.pinned
        self._build(backing, block=block)
        if pinned:
            self.store.arena.pin(backing.block)
        self.packed_residents.update(backing)

    def unpack(self, reader: SlotReader, backings: Sequence[Backing], pin: bool = True) -> Sequence[Backing]:
        """Decode the units ``backings`` on the host side, so that they are copied to the device unpacked.
        Returns the backings that failed, which stay unchanged.

        Called between passes. Units are unpacked one after another, so at most one unit is in host memory
        twice. Failures are mostly caused by lack of memory.
        ``reader``: copies a unit's decoded bytes back from the device.
        ``pin``: pin each new block whose old block was pinned.
        """
        self.settle()
        left: list[Backing] = []
        with ThreadPoolExecutor(workers(), thread_name_prefix="carom-fill") as pool:
            for backing in backings:
                if not isinstance(backing, PackedBacking) or not backing.packed or self._policy.keep_raw:
                    continue
                try:
                    self._unpack(reader, backing, pin and backing.block.pinned, pool)
                except Exception as error:
                    left.append(backing)
                    # Log only the error's text. A log record that holds the exception would keep its frames
                    # alive, and with them a slot.
                    logger.warning("carom: unit %r stays packed: %s", backing.name, str(error))
        return_freed_memory()
        return left

    def _unpack(
        self, reader: SlotReader, backing: PackedBacking, pin: bool, pool: ThreadPoolExecutor
    ) -> None:
        """Copy the unit's decoded bytes to a new block, and use the new block. A failure leaves the unit
        unchanged.
        """
        block = self._unpacker.block(reader, backing, pin, pool)
        for index, (entry, packed) in enumerate(zip(backing.unit.entries, backing.tensors, strict=True)):
            piece = block.data[entry.offset : entry.offset + entry.nbytes]
            if packed is None:
                self._move_into_block(entry.tensor, piece)
                backing.homes[index].moved(managed_tensor.plain(torch.Tensor.detach, (entry.tensor,), {}))
            else:
                packed.header, packed.blob = None, piece
        backing.block, backing.decoder = block, None
        self.packed_residents.update(backing)

    # -- packed bytes that stay on the device

    def stay_packed(self, backings: Sequence[Backing]) -> None:
        """Keep the packed bytes of the units ``backings`` on the device. Raises torch.OutOfMemoryError."""
        self.settle()
        if backings:
            self.packed_residents.keep(cast("Sequence[PackedBacking]", backings))

    @property
    def device_bytes(self) -> int:
        """Device memory in bytes of the units that stay on the device packed."""
        return self.packed_residents.nbytes

    def figures(self) -> TierFigures:
        """Return the figures for the report."""
        return self.packed_residents.figures(super().figures())

    # -- restoring the tensors

    def close(self) -> None:
        """Release the packed bytes on the device."""
        self.packed_residents.close()

    def dress(self) -> None:
        """Let the values of packed weights be read (decoded) while the session is parked, that is, while it
        uses no device memory.
        """
        shelf = self.store.shelf
        # A weight without a home was being packed when an error occurred. Give such weights their plain bytes
        # back.
        for key in [key for key, packed in shelf.items() if "_carom" not in packed.tensor.__dict__]:
            give_back({key: shelf.pop(key)}, self.engine.move)
        for packed in shelf.values():
            self._swapped_classes.append((packed.tensor, type(packed.tensor)))
            packed.refuse_kernels()
            is_parameter = isinstance(packed.tensor, nn.Parameter)
            packed.tensor.__class__ = AwayParameter if is_parameter else AwayTensor

    def forget(self) -> None:
        self._swapped_classes.clear()
        self.store.shelf.clear()

    def undo(self) -> None:
        """Restore the classes and values of all streamed tensors."""
        self._writes.forget()
        for tensor, before in reversed(self._swapped_classes):
            tensor.__class__ = before
            packed = self.store.shelf.get(id(tensor))
            if packed is not None:
                packed.give_up_memory()  # until the next layout, the dtype is the weight's own
        self._swapped_classes.clear()
        super().undo()
