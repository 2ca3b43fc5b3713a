"""Units that wait packed: their large frozen weights are encoded when the session attaches, and decoded into slots.

A packed unit's bytes lie in one pinned host block, its wire: packed tensors one after another, what does not pack
(norms, other dtypes) as it is between them. One copy brings the block to a staging buffer on the device, one launch
decodes it into the slot. The weight itself gives its memory back: meanwhile it is the model's own object without
bytes, whose value is decoded when somebody reads it (`away`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import ops
from .attach import Placement
from .away import AwayParameter, AwayTensor
from .codec.unit import AnyEntry, UnitDecoder, sizes
from .decoder_proof import Proof
from .host_copies import HostCopies, HostCopy
from .ops import HostParameter, HostTensor
from .packed_owner import PackedOwner
from .packed_tensors import PackedTensor, give_back, lay_out, pack
from .packing import Packer, Packing
from .progress import Progress
from .store.arena import (
    HostArena,
    fill,
    host_bytes,
    own_view,
    return_freed_memory,
    storage_bytes,
    touch,
    workers,
)
from .streamed import Owner, Streamed
from .transfer import Engine
from .units import Unit
from .unpacking import Unpacker

if TYPE_CHECKING:
    from .streamer import Streamer

logger = logging.getLogger("carom")
_AT_ONCE = 4  # tensors that are encoded at a time


class PackedPlacement(Placement):
    """Places a carving whose streamed weights are packed. ``shelf``: packed tensors by their object's id; it outlives
    placements, so that a change of layout neither decodes nor encodes what streams before and after.

    ``policy.raw`` names tensors whose units are not packed; ``staging_bytes``: room that wires are decoded in;
    ``room``: bytes of the device that may be used while attaching, ``largest``: of a unit.
    """

    def __init__(
        self,
        engine: Engine,
        arena: HostArena,
        shelf: dict[int, PackedTensor],
        policy: Packing,
        staging_bytes: int,
        room: int = 1 << 30,
        largest: int = 0,
        copies: HostCopies | None = None,
    ) -> None:
        super().__init__(engine, arena, copies)
        self._shelf, self._policy, self._staging_bytes = shelf, policy, staging_bytes
        self._dressed: list[tuple[torch.Tensor, type]] = []
        self._homes: dict[int, torch.device] = {}  # of tensors that keep their bytes, until they stand
        self._decoders: dict[int, UnitDecoder | None] = {}  # by streamed unit; streamers let go of theirs
        self.proof = Proof(engine)
        self._packer = Packer(engine, shelf, policy, self.proof, room, largest)
        self._unpacker = Unpacker(engine, arena)

    @property
    def came_on_device(self) -> bool:
        return super().came_on_device or any(packed.home.type != "cpu" for packed in self._shelf.values())

    # -- residents

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        packed = self._shelf.get(id(tensor))
        return super()._value(tensor) if packed is None else packed.value(self._engine.device)

    def _home(self, tensor: torch.Tensor) -> torch.device:
        packed = self._shelf.pop(id(tensor), None)
        tensor.__dict__.pop("_carom", None)
        return super()._home(tensor) if packed is None else packed.home

    def _move(self, tensor: torch.Tensor) -> int:
        if id(tensor) in self._shelf:
            tensor.data = self._value(tensor).cpu()
            self._home(tensor)
        return super()._move(tensor)

    # -- streamed units

    def _address(self, tensor: torch.Tensor) -> int:
        packed = self._shelf.get(id(tensor))
        return super()._address(tensor if packed is None else packed.blob)

    def stream(self, units: list[Unit], make: Callable[[Unit, int, Any], Streamed]) -> list[Streamed]:
        """Encode units, put each in a block of its own, pin it, and let the weights give their memory back."""
        packer = self._packer
        with (
            ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="carom-pack") as packers,
            ThreadPoolExecutor(workers(), thread_name_prefix="carom-fill") as pool,
            ThreadPoolExecutor(1, thread_name_prefix="carom-pin") as pinner,
        ):
            pins: list[Future[Any]] = []
            progress = Progress(sum(unit.nbytes for unit in units))
            work = self._in_turn(units, make)
            turns = [streamed for _, streamed in work]
            ready = self._there(turns[0], packers) if turns and packer.ahead else []
            for (unit, streamed), following in zip(work, (*turns[1:], None)[: len(work)], strict=True):
                values: Iterable[torch.Tensor | None] = [value.result() for value in ready]
                if packer.ahead:
                    ready = self._there(following, packers)
                if streamed is None:
                    self._keep_in_turn(unit)
                    continue
                progress.add(unit.nbytes)
                if self._stands_already(streamed):
                    continue
                if not packer.ahead:
                    values = packer.bring_in_turn(unit, packers)
                homes = [self.here.home_of(entry.tensor) for entry in unit.entries]
                # The device packs one after another.
                in_order = map if self._engine.unpacks else packers.map
                streamed.packed = list(in_order(packer.pack, unit.entries, values, homes))
                del values
                self._build(streamed, pool)
                if not self._decodes(streamed):
                    streamed.packed = [packer.unpacked(packed) for packed in streamed.packed]
                    self._build(streamed, pool)
                self._stand_packed(streamed)
                pins.append(pinner.submit(self._arena.pin, streamed.block))
            for pin in pins:
                pin.result()
        self._keep_small()
        return_freed_memory()
        self._engine.trim()  # what packing took of the device is the session's again
        return self.streamed

    def _there(
        self, streamed: Streamed | None, pool: ThreadPoolExecutor
    ) -> list[Future[torch.Tensor | None]]:
        """The values of what is to be packed of the unit, on their way to where they are packed."""
        return [] if streamed is None else [pool.submit(self._packer.bring, e) for e in streamed.unit.entries]

    # -- copies from the layout before

    def _holds(self, copy: HostCopy) -> bool:
        mine = all(
            packed is None or (self._shelf.get(id(tensor)) is packed and copy.has(packed.blob))
            for tensor, packed in zip(copy.tensors, copy.packed, strict=True)
        )
        return copy.seen is None and mine and copy.stands()

    def _serves(self, copy: HostCopy, streamed: Streamed) -> bool:
        if copy.decoder is None:
            return True
        raw = any(
            packed is not None and packed.header is not None and self._policy.leaves(entry.name)
            for entry, packed in zip(streamed.unit.entries, copy.packed, strict=True)
        )
        return not raw and not self.proof.broken and self._crosses(copy.decoder.entries)

    def _adopt(self, copy: HostCopy, streamed: Streamed) -> None:
        streamed.block, streamed.packed, streamed.decoder = copy.block, copy.packed, copy.decoder
        self._decoders[id(streamed)] = copy.decoder
        self._stand_packed(streamed)

    def _copy_of(self, streamed: Streamed) -> HostCopy | None:
        if (
            self._copies is None
            or self._policy.keep_raw
            or len(streamed.owners) != len(streamed.unit.entries)
        ):
            return None
        copy = HostCopy(
            [entry.tensor for entry in streamed.unit.entries],
            [
                None if isinstance(owner, PackedOwner) else owner.host
                for owner in streamed.owners
            ],
            streamed.block,
            list(streamed.packed),
            self._decoders.get(id(streamed)),
        )  # fmt: skip
        return copy if self._holds(copy) else None

    def _return_to(self, copy: HostCopy) -> None:
        for tensor, view, packed in zip(copy.tensors, copy.views, copy.packed, strict=True):
            if packed is None:
                assert view is not None
                tensor.data = view
            else:
                self._shelf[id(tensor)] = packed
                packed.give_up_memory()

    def _stand_packed(self, streamed: Streamed) -> None:
        """From here on the unit's tensors lead to the streamer."""
        for entry, packed in zip(streamed.unit.entries, streamed.packed, strict=True):
            tensor = entry.tensor
            is_parameter = isinstance(tensor, nn.Parameter)
            wear: Any
            if packed is None or self._policy.keep_raw:
                self._worn.append(
                    (tensor, type(tensor), self._homes.pop(id(tensor), self.here.home_of(tensor)))
                )
                self.here.leaving.pop(id(tensor), None)
                if tensor.device.type != "cpu":
                    tensor.data = tensor.detach().cpu()
                owner = Owner(streamed.streamer, streamed, entry, tensor.detach())
                wear = HostParameter if is_parameter else HostTensor
            else:
                self._dressed.append((tensor, type(tensor)))
                self.here.leaving.pop(id(tensor), None)
                self._shelf[id(tensor)] = packed
                before = ops.plain(torch.Tensor.detach, (tensor,), {})
                packed.give_up_memory()
                self._drop(before)
                del before
                owner = PackedOwner(streamed.streamer, streamed, entry, packed, self)
                wear = AwayParameter if is_parameter else AwayTensor
            streamed.owners.append(owner)
            tensor._carom = owner  # type: ignore[attr-defined]
            tensor.__class__ = wear
        streamed.trainable = any(owner.trainable for owner in streamed.owners)
        streamed.encoded = streamed.version() if self._policy.keep_raw else None
        self.streamed_host_bytes += streamed.nbytes
        self.wire_bytes += streamed.block.data.numel()

    def _crosses(self, entries: Iterable[AnyEntry]) -> bool:
        """Whether a wire of these can be decoded in the room there is: in pieces, where they are no larger than it."""
        return all(sizes(entry)[0] <= self._staging_bytes for entry in entries)

    def _build(self, streamed: Streamed, pool: ThreadPoolExecutor | None = None) -> None:
        """A new block, unpinned, with the unit's bytes; packed tensors and those that keep their bytes lead there."""
        unit = streamed.unit
        laid = lay_out(unit.entries, streamed.packed)
        if laid.packs and not self._crosses(laid.entries):
            for packed in streamed.packed:
                if packed is not None:
                    packed.unpack()
            laid = lay_out(unit.entries, streamed.packed)
        block = self._arena.allocate(laid.nbytes if laid.packs else unit.nbytes)
        pieces = []
        for entry, packed, at in zip(unit.entries, streamed.packed, laid.places, strict=True):
            source = host_bytes(entry.tensor) if packed is None else packed.blob
            pieces.append((block.data[at : at + source.numel()], source))
        on_device = any(source.device.type != "cpu" for _, source in pieces)
        if pool is None:
            for target, source in pieces:
                target.copy_(source)
        else:
            if (
                on_device
            ):  # copied at the link's rate where the memory is pinned, which is fast once it was touched
                for job in touch(block.data, pool):
                    job.result()
                self._arena.pin(block)
            for job in fill([piece for piece in pieces if piece[1].device.type == "cpu"], pool, self._mapped):
                job.result()
            for target, source in pieces:
                if source.device.type != "cpu":
                    target.copy_(source)
        for index, (entry, packed) in enumerate(zip(unit.entries, streamed.packed, strict=True)):
            if packed is not None:
                packed.blob = pieces[index][0]
            else:
                self._move_to(entry.tensor, pieces[index][0])
                if index < len(streamed.owners):
                    streamed.owners[index].host = ops.plain(torch.Tensor.detach, (entry.tensor,), {})
        streamed.block = block
        streamed.decoder = UnitDecoder(laid.entries) if laid.packs else None
        self._decoders[id(streamed)] = streamed.decoder
        if streamed.decoder is not None and self._engine.device.type != "cpu":
            streamed.decoder.prepare(self._engine.device)

    def _decodes(self, streamed: Streamed) -> bool:
        """Whether the unit may cross as it is packed."""
        fresh = [
            entry
            for entry, packed in zip(streamed.unit.entries, streamed.packed, strict=True)
            if packed is not None and id(packed.tensor) not in self._shelf
        ]
        if streamed.decoder is None or self.proof.holds(streamed, fresh):
            return True
        self.notes.append(self.proof.broken)
        return False

    def _move_to(self, tensor: torch.Tensor, piece: torch.Tensor) -> None:
        """Let a tensor that keeps its bytes have them in its unit's block."""
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._homes.setdefault(id(tensor), self.here.home_of(tensor))
            tensor.data = own_view(piece, tensor)

    # -- values

    def replace(self, owner: PackedOwner, value: torch.Tensor) -> None:
        """A packed weight gets another value: its unit's block is made anew."""
        packed, streamer = owner.packed, owner.streamer
        with streamer.lock, torch.inference_mode(False), torch.no_grad():
            fresh = torch.empty_strided(
                packed.layout.shape, packed.layout.stride(), dtype=packed.layout.dtype
            )
            fresh.copy_(value)
            found = pack(fresh) if packed.header is not None else None
            before = packed.header, packed.blob
            packed.header, packed.blob = found or (None, storage_bytes(fresh))
            if streamer.closed:
                return
            owner.unit.epoch += 1
            try:
                self._rebuild(owner.unit)
            except BaseException:  # no memory for the block: what crosses is the last value
                packed.header, packed.blob = before
                raise

    def pack_anew(self) -> None:
        """Between passes: units whose plain bytes were written, or may have been, are packed again."""
        for unit in self.streamed:
            if unit.encoded is None or unit.version() == unit.encoded:
                continue
            for owner, packed in zip(unit.owners, unit.packed, strict=True):
                if packed is not None:
                    found = pack(owner.host)
                    packed.header, packed.blob = found or (None, storage_bytes(owner.host).clone())
            self._rebuild(unit)
            unit.encoded = unit.version()

    def _rebuild(self, unit: Streamed) -> None:
        self._engine.synchronize()  # copies of the old block may be under way
        pinned = unit.block.pinned
        self._build(unit)
        if pinned:
            self._arena.pin(unit.block)
        unit.streamer.packed_here.follow(unit)

    def unpack(self, streamer: Streamer, units: list[Streamed], pin: bool = True) -> list[Streamed]:
        """Between passes: from now on these units wait and cross as they are. One after another, so that no more than one
        unit's bytes lie in host memory both ways. ``pin``: their blocks, where those they leave are pinned.

        Returns those that could not be, for want of memory mostly: they are as they were.
        """
        left = []
        with ThreadPoolExecutor(workers(), thread_name_prefix="carom-fill") as pool:
            for unit in units:
                if unit.decoder is None or self._policy.keep_raw:
                    continue
                try:
                    self._unpack(streamer, unit, pin and unit.block.pinned, pool)
                except Exception as error:
                    left.append(unit)
                    # As text: who keeps the record would keep the error's frames, and with them a slot.
                    logger.warning("carom: unit %r stays packed: %s", unit.name, str(error))
        return_freed_memory()
        return left

    def _unpack(self, streamer: Streamer, unit: Streamed, pin: bool, pool: ThreadPoolExecutor) -> None:
        """Its bytes return as they are to a block of their own. Where that fails, nothing was changed."""
        block = self._unpacker.block(streamer, unit, pin, pool)
        before = unit.block.data.numel()
        for index, (entry, packed) in enumerate(zip(unit.unit.entries, unit.packed, strict=True)):
            piece = block.data[entry.offset : entry.offset + entry.nbytes]
            if packed is None:
                self._move_to(entry.tensor, piece)
                unit.owners[index].host = ops.plain(torch.Tensor.detach, (entry.tensor,), {})
            else:
                packed.header, packed.blob = None, piece
        unit.block, unit.decoder = block, None
        self._decoders[id(unit)] = None
        self.wire_bytes += block.data.numel() - before
        unit.streamer.packed_here.follow(unit)

    # -- the way back

    def wear(self) -> None:
        """While parked, packed weights still give their values to who asks."""
        # What was on its way from the device when something failed has no owner yet: it has its bytes back.
        for key in [key for key, packed in self._shelf.items() if "_carom" not in packed.tensor.__dict__]:
            give_back({key: self._shelf.pop(key)}, self._engine.move)
        for packed in self._shelf.values():
            self._dressed.append((packed.tensor, type(packed.tensor)))
            is_parameter = isinstance(packed.tensor, nn.Parameter)
            packed.tensor.__class__ = AwayParameter if is_parameter else AwayTensor

    def _undo(self) -> None:
        for tensor, worn in reversed(self._dressed):
            tensor.__class__ = worn
        self._dressed.clear()
        super()._undo()
        self._decoders.clear()  # their tables lie on the device
