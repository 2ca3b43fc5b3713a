"""Defines `ResidentPlacer`: moves the residents of one layout (the units and tensors that stay on the device)
to the device, and back at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..common.errors import UnsupportedError
from ..device.engine import Engine
from ..host.arena import Block, prefault, typed_view, workers
from ..host.page_release import MappedFiles
from ..model.units import Entry, Unit
from ..plan.residency import round_up
from . import residents
from .backing import Backing
from .host_copies import HostCopy, HostStore, fingerprint
from .packer import host_bytes
from .residents import DeviceTensors, Moved, SharedBuffer, group_by_buffer, is_plain
from .tier import Tier
from .uploads import CHUNK, THREADS, Uploads


class ResidentPlacer:
    """The residents of one layout. Each large unit has a device buffer of its own, and all small units share
    one buffer.

    ``resident_bytes``: device memory, as the allocator reserves it.
    ``loaded_bytes``: bytes that were copied to the device for this layout.
    ``adapter_bytes``: bytes of trainable tensors.
    ``uploads``: copies tensors of host memory to the device, also those that a tier encodes there.
    """

    def __init__(self, engine: Engine, store: HostStore, tier: Tier) -> None:
        self._engine, self._store, self._tier = engine, store, tier
        self.device_tensors = DeviceTensors(engine)
        self.uploads = Uploads(engine, store.arena)
        # Resident units that are moved while streamed units are being stored in the tier.
        self._deferred: list[Unit] = []
        self._small: list[Entry] = []  # the small tensors of the deferred units, which share one buffer
        self._buffer_bytes = 0
        self._copying: Any = None  # the event of the last copy to the device
        # Buffers that are filled from host copies, while the copies may run.
        self._copied: list[tuple[SharedBuffer, HostCopy]] = []
        self._prefaulting: ThreadPoolExecutor | None = None  # set while residents are put aside
        self.loaded_bytes = 0
        self.adapter_bytes = 0
        self.left_host = False

    @property
    def resident_bytes(self) -> int:
        """Device bytes of residents, as the allocator reserves them."""
        return self._buffer_bytes + self._tier.loading_bytes

    # -- moving tensors to the device

    def keep(self, units: list[Unit], entries: list[Entry], defer: bool = False) -> None:
        """Move resident units and entries to the device. Raises UnsupportedError for an inference-mode buffer
        on another device.

        ``defer``: move units later, while streamed units are stored in the tier: large units in
        `placement_order`, small units last. A memory-mapped file is then read once from start to end, and
        each unit waits only for its own part of the file.
        """
        self._tier.keep_left([entries, *group_by_buffer(units, [])[0]])
        entries = self._tier.load(entries, "weights that stay by need", [])
        groups, alone = group_by_buffer(units, entries)
        for entry in alone:
            tensor = entry.tensor
            if tensor.is_inference() and tensor.device != self._engine.device:
                raise UnsupportedError(
                    f"buffer {entry.name} was made under torch.inference_mode on {tensor.device}, and such a tensor cannot be "
                    f"moved to {self._engine.device}: replace it by its clone(), or move the module there before streaming"
                )
            size = self._move(tensor)
            self._buffer_bytes += size if entry.counted else 0
        if defer:
            self._deferred, self._small = units, groups[-1]
            return
        small = [unit for unit in units if unit.nbytes < residents.SMALL_UNIT]
        modules = [unit.modules for unit in units if unit.nbytes >= residents.SMALL_UNIT]
        for shared_buffer, needed_by in zip(
            groups, [*modules, small[0].modules if len(small) == 1 else []], strict=True
        ):
            self._move_into_shared_buffer(shared_buffer, needed_by)

    def placement_order(self, backings: Sequence[Backing]) -> list[tuple[Unit, Backing | None]]:
        """Return all streamed units and large resident units, in the order in which they are to be moved.

        Units that leave the device come first. The others follow in the order of their addresses in memory,
        so that a mapped file is read in one direction and the system's read-ahead is effective. The second
        item of a pair is the unit's backing (its store in the tier), or None for a resident unit, which
        `place_deferred` moves.
        """
        work: list[tuple[Unit, Backing | None]] = [(backing.unit, backing) for backing in backings]
        work += [(unit, None) for unit in self._deferred if unit.nbytes >= residents.SMALL_UNIT]
        work.sort(
            key=lambda item: (
                not self._leaves(item[0]),
                min((self._address(entry.tensor) for entry in item[0].entries), default=0),
            )
        )
        return work

    @contextlib.contextmanager
    def uploading(self, units: Sequence[Unit]) -> Iterator[None]:
        """Context in which the streamed ``units`` are stored in the tier, and deferred residents are moved.

        In the first layout of a module all weights are copied from its own memory, by several threads. In later layouts
        most of them are pinned, packed, or on the device already.
        """
        store = self._store
        on_device = self.device_tensors.received or self.device_tensors.leaving
        known = store.copies is None or len(store.copies) or store.shelf or on_device
        nbytes = sum(unit.nbytes for unit in (*units, *self._deferred))
        with contextlib.ExitStack() as stack:
            if not known and nbytes > 2 * THREADS * CHUNK:
                room = sum(host_bytes(unit, self._tier.packs) for unit in units)
                stack.enter_context(self.uploads.running(room))
            yield

    def place_deferred(self, unit: Unit) -> None:
        """Move a large resident unit to the device. If the unit has a host copy, keep it for the time when
        the unit is streamed again.
        """
        self._deferred = [other for other in self._deferred if other is not unit]
        if self.device_tensors.left_since_trim:
            self.device_tensors.left_since_trim = False
            # Merge the free memory that tensors left behind on the device, so that a large buffer fits.
            self._engine.trim()
        self._place_group(unit.entries, unit.modules)

    def _place_group(self, entries: list[Entry], modules: list[nn.Module]) -> None:
        """Move tensors that share a buffer to the device. If they have a host copy, keep it for the time when they leave
        the device again.
        """
        on_device = [self.device_tensors.holds(entry.tensor) for entry in entries]
        copies, arena = self._store.copies, self._store.arena
        copy = None if all(on_device) else self._store.find(_laid_out(entries))
        # Keep a host copy only if it is pinned. An unpinned copy shows that the budget for pinned memory is
        # exceeded.
        copy_is_current = (
            copy is not None
            and self._store.is_current(copy)
            and not any(on_device)
            and (copy.block.pinned or not arena.can_pin)
            # On a device that shares host memory, the copy would hold the weight a second time in the same
            # memory.
            and not self._engine.shares_host
        )
        self._move_into_shared_buffer(entries, modules)
        if copy is None or copies is None:
            return
        shared_buffer = self.device_tensors.moved[-1].shared_buffer
        if not copy_is_current or shared_buffer is None or any(entry.trainable for entry in entries):
            self._finish_copies()
            copies.discard(copy)
            return
        if copy.known_fingerprint is None or not copy.plain:
            self._finish_copies()
            copy.known_fingerprint = fingerprint([self._bytes_of(shared_buffer)])
        # While the copy to the device runs, no other thread may unpin the block.
        self._copied.append((shared_buffer, copy))

    def _bytes_of(self, buffer: SharedBuffer) -> torch.Tensor:
        """Return the bytes of a buffer on the device as a uint8 tensor."""
        return self._engine.at(buffer.start, buffer.nbytes, [entry.tensor for entry in buffer.unit.entries])

    def _finish_copies(self) -> None:
        """Wait for the copies to the device that `_move_into_shared_buffer` has enqueued. Their host copies count as
        those of residents from then on.
        """
        if self._copying is not None:
            self._engine.synchronize(self._copying)
            self._copying = None
        for shared_buffer, copy in self._copied:
            copy.device_fingerprint = copy.known_fingerprint
            shared_buffer.copy = copy
        self._copied = []

    def place_remaining(self) -> None:
        """Move the deferred units that are not on the device yet: large units first, then all small units
        into one buffer.
        """
        for unit in [unit for unit in self._deferred if unit.nbytes >= residents.SMALL_UNIT]:
            self.place_deferred(unit)
        small, self._small = self._small, []
        units, self._deferred = self._deferred, []
        self._place_group(small, [])
        self._finish_copies()
        for unit in units:
            if self._store.copies is not None:
                self._store.copies.drop(unit)

    def _move_into_shared_buffer(self, entries: list[Entry], modules: list[nn.Module]) -> None:
        """Copy tensors to one new device buffer. Tensors that are already on the device stay where they are."""
        if not entries:
            return
        entries = self._tier.load(entries, entries[0].name, modules)
        present = [entry for entry in entries if self.device_tensors.holds(entry.tensor)]
        self._buffer_bytes += sum(
            entry.nbytes for entry in present if id(entry.tensor) not in self.device_tensors.received
        )
        entries = [entry for entry in entries if not self.device_tensors.holds(entry.tensor)]
        if not entries:
            return
        layout = _laid_out(entries)
        buffer = self._engine.allocate(layout.nbytes)
        self._buffer_bytes += round_up(layout.nbytes, self._engine.grain)
        self.loaded_bytes += layout.nbytes
        shared_buffer = SharedBuffer(buffer.data_ptr(), layout)
        filled = self._fill(buffer, self._store.find(layout))
        for entry, laid in zip(entries, layout.entries, strict=True):
            tensor = entry.tensor
            with torch.inference_mode(False), torch.no_grad():
                packed = self._store.shelf.get(id(tensor)) if filled else None
                value = tensor.detach() if filled else self._store.value(tensor, self._engine.device)
                like = value if packed is None else packed.layout
                piece = self._engine.alias(buffer, laid.offset, entry.nbytes).view(like.dtype)
                view = piece.as_strided(like.shape, like.stride(), piece.storage_offset())
                if not filled:
                    self.uploads.copy(view, value)
                    self.drop_pages(value)
                    self.left_host = True
            del value, like
            self.device_tensors.moved.append(Moved(tensor, self._take_origin(tensor), shared_buffer))
            tensor.data = view

    def _fill(self, buffer: torch.Tensor, copy: HostCopy | None) -> bool:
        """Copy the tensors of a host copy to ``buffer`` on the device at once. Returns False if this is not possible."""
        engine = self._engine
        if copy is None or not self._store.is_current(copy):
            return False
        before = engine.record(
            engine.stream()
        )  # kernels that read the memory of ``buffer`` before it was freed
        if copy.plain:
            self._copying, _ = engine.copy_in(buffer, copy.block.data, (before,), False)
            return True
        # The packed bytes take a part of the memory in which slots will be.
        if copy.decoder is None or copy.nbytes > max(
            (unit.nbytes for unit in self._tier.backings), default=0
        ):
            return False
        wire = engine.allocate(copy.nbytes)
        copied, _ = engine.copy_in(wire, copy.block.data, (before,), False)
        event, _ = engine.decode(copy.decoder, wire, buffer, (copied,), False)
        engine.synchronize(event)
        return True

    def _take_origin(self, tensor: torch.Tensor) -> torch.device:
        """Return the device to which ``tensor`` returns at the end, and remove the tensor from the packed
        weights.
        """
        packed = self._store.take(tensor)
        return self._engine.locate(tensor) if packed is None else packed.origin

    def _address(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor's bytes, 0 if the tensor has no storage."""
        packed = self._store.shelf.get(id(tensor))
        try:
            return (tensor if packed is None else packed.blob).data_ptr()
        except RuntimeError:  # tensor subclasses without storage
            return 0

    def _leaves(self, unit: Unit) -> bool:
        """Return whether a tensor of the unit is on the device and has to leave it, because the unit streams."""
        return any(id(entry.tensor) in self.device_tensors.leaving for entry in unit.entries)

    @cached_property
    def mapped(self) -> MappedFiles:
        """The table of memory-mapped files, which is used to release their pages."""
        return MappedFiles()

    def drop_pages(self, read: torch.Tensor) -> None:
        """Release the page-cache pages of ``read``, whose bytes were copied, if the tensor is in a
        memory-mapped file.
        """
        if read.device.type == "cpu" and is_plain(read):
            self.mapped.release(read.data_ptr(), read.numel() * read.element_size())

    def adapt(self, entry: Entry) -> None:
        """Move a trainable tensor and its gradient to the device."""
        self.adapter_bytes += self._move(entry.tensor)

    def _move(self, tensor: torch.Tensor) -> int:
        """Move a single tensor to the device, and return its bytes."""
        if id(tensor) in self._store.shelf:
            tensor.data = self._store.value(tensor, self._engine.device).cpu()
            self._store.take(tensor)
        size = tensor.numel() * tensor.element_size()
        before = self.device_tensors.move_in(tensor)
        if before is not None:
            self.drop_pages(before)
            self.loaded_bytes += size
            self.left_host = True
        return size

    # -- changes by the model

    def replaced(self, entries: dict[int, Entry]) -> None:
        """Update the records of tensors that the model replaced. At the end, the new tensors are moved back
        instead of the previous ones.

        ``entries``: the new tensors, by the id of the tensor that each replaces.
        """
        self._tier.replaced(entries)
        self.device_tensors.replaced(entries)

    def made_here(self, entry: Entry) -> None:
        """Record a buffer that the model created. If the buffer is on the device, `undo` moves it to the
        device of the others.
        """
        homes = {moved.origin for moved in self.device_tensors.moved} | self._tier.attached.came_from
        if len(homes) == 1:
            self.device_tensors.adopt_buffer(entry, homes.pop())

    # -- changing from one layout to the next

    def keep_matching_residents(
        self, units: list[Unit], entries: list[Entry], adapters: list[Entry], streamed: Sequence[Unit] = ()
    ) -> None:
        """Keep those residents of the new plan that are already on the device. Move the other tensors off the
        device, before anything is loaded.
        """
        groups, alone = group_by_buffer(units, entries)
        self._buffer_bytes += self.device_tensors.keep_matching(
            groups, [*alone, *adapters], streamed, self._use_host_copy
        )

    def put_aside(self, units: Sequence[Unit]) -> None:
        """Let the tensors of resident ``units`` use host memory, because the session is parked.

        A unit whose values are in host memory already is not copied. The others are copied as they are on the device, as
        long as the limit of pinned memory allows it. The rest stays on the device until a tier has copied it.
        """
        with ThreadPoolExecutor(workers(), thread_name_prefix="carom-fill") as self._prefaulting:
            try:
                self.keep_matching_residents([], [], [], units)
            finally:
                self._prefaulting = None
                if self._store.spares is not None:
                    self._store.spares.clear()

    def _use_host_copy(self, members: list[Moved], shared_buffer: SharedBuffer | None) -> bool:
        """Let tensors use their host copy, if it still holds their values, so that nothing is copied from the
        device. Returns whether this was done.
        """
        copies = self._store.copies
        if shared_buffer is None or copies is None:
            return False
        copy, unit = shared_buffer.copy, shared_buffer.unit
        shared_buffer.copy = None
        # The host copy is not used for a tensor that became trainable (it has a gradient on the device), nor
        # if the copy is packed.
        usable = {id(moved.tensor) for moved in members} == {
            id(entry.tensor) for entry in unit.entries
        } and all(
            shared_buffer.holds(entry.tensor) and not entry.trainable and entry.tensor.grad is None
            for entry in unit.entries
        )
        if copy is not None and usable and copy.matches(unit, self._bytes_of(shared_buffer)):
            copy.device_fingerprint = None
            self._store.attach_to_copy(copy)
            return True
        if copy is not None:
            copies.discard(copy)
        pool = self._prefaulting
        return usable and pool is not None and self._copy_out(shared_buffer, pool)

    def _copy_out(self, buffer: SharedBuffer, pool: ThreadPoolExecutor) -> bool:
        """Copy the tensors of ``buffer`` to a pinned block by one copy, and let them use the block. Returns False if the
        limit of pinned memory does not allow it.
        """
        engine, unit = self._engine, buffer.unit
        if engine.shares_host or self._store.copies is None:
            return False
        if any(entry.tensor.data_ptr() != buffer.start + entry.offset for entry in unit.entries):
            return False  # the program exchanged the memory of tensors
        block = self._pinned_block(unit.nbytes, pool)
        if block is None:
            return False
        engine.synchronize(engine.copy_out(block.data, self._bytes_of(buffer)))
        tensors = [entry.tensor for entry in unit.entries]
        views = [
            typed_view(block.data[entry.offset : entry.offset + entry.nbytes], entry.tensor)
            for entry in unit.entries
        ]
        copy = HostCopy(tensors, list(views), block, [None] * len(tensors), aside=True)
        self._store.copies.keep(unit, copy)
        self._store.attach_to_copy(copy)
        return True

    def _pinned_block(self, nbytes: int, pool: ThreadPoolExecutor) -> Block | None:
        """Return a pinned block, into which copies run at the link's full rate: one that was made ahead, or a new one.
        Returns None if the limit of pinned memory does not allow it.
        """
        arena, spares = self._store.arena, self._store.spares
        block = None if spares is None else spares.take(nbytes)
        if block is not None:
            return block
        if not arena.has_room(nbytes):
            return None
        block = arena.allocate(nbytes)
        for job in prefault(block.data, pool):
            job.result()
        return block if arena.pin(block) else None

    def unsaved_bytes(self) -> list[int]:
        """Return the bytes of each buffer on the device of which there is no host copy, so that `put_aside` copies it."""
        buffers = {id(moved.shared_buffer): moved.shared_buffer for moved in self.device_tensors.moved}
        return [buffer.nbytes for buffer in buffers.values() if buffer is not None and buffer.copy is None]

    # -- moving tensors back

    def undo(self) -> None:
        """Move every tensor back to its original device. After a failure the call may be repeated."""
        self.device_tensors.undo()
        self._buffer_bytes = self.adapter_bytes = 0


def _laid_out(entries: Iterable[Entry]) -> Unit:
    """Return ``entries`` as a unit, one after another as in a slot."""
    unit = Unit("", "", [])
    for entry in entries:
        unit.add(replace(entry))
    return unit
