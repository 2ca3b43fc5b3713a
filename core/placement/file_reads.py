"""Defines `FileReads`: the host cache between a weights file and the device, the read-ahead, and the count of
host memory in use.

A streamed unit (a group of tensors) is read from the file into the cache, and copied from there to a slot
(device memory) when it is needed. Residents are tensors that stay on the device. They are read once, through
a cache of their own (`ResidentLoader`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..checkpoint.direct_io import ALIGN as PAGE
from ..common.errors import BudgetError, UnsupportedError, WeightsError
from ..common.run_all import run_all
from ..device.engine import Engine
from ..host.arena import HostArena
from ..host.blob_checksums import BlobChecks, PieceChecksums
from ..host.cache_pieces import LEAST_BUFFERS, BufferPlan, CachePiece, choose_buffers, cut
from ..host.host_cache import CacheFigures, HostCache
from ..host.shared_cache import SharedCache
from ..stores.transfer import Transfer
from .backing import RunnerState
from .bound_checkpoint import FileTensor
from .file_source import FileSource
from .gather import Gather
from .resident_cache import few_buffers
from .resident_loader import ResidentLoader
from .tier import ReadFigures
from .wire_format import WireFormat

if TYPE_CHECKING:
    from .file_backing import FileBacking


_NOTHING = WireFormat(0, ())  # of a unit that takes no room in the cache


@dataclass(frozen=True)
class Read:
    """Figures of disk reads.

    ``nbytes``: bytes read recently.
    ``seconds``: time in which at least one of these reads was running.
    ``late_seconds``: total time that host threads waited for reads.
    ``held_bytes``: peak host memory of the cache and its buffers.
    """

    nbytes: int = 0
    seconds: float = 0.0
    late_seconds: float = 0.0
    held_bytes: int = 0


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length in seconds of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class FileReads:
    """The disk reads of the streamed units of one `FileTier`, through a host cache.

    ``cache``: None until host memory has room for the cache beside the buffers of residents that are still being
    loaded.
    ``gather``: the all-gathers by which several ranks fetch units together, None if each fetches whole units.
    """

    def __init__(
        self, engine: Engine, arena: HostArena, source: FileSource, residents: ResidentLoader
    ) -> None:
        self._engine, self._arena, self._source, self._residents = engine, arena, source, residents
        self.backings: list[FileBacking] = []
        self.cache: HostCache | SharedCache | None = None
        self._state: RunnerState | None = None
        self._upcoming: list[int] = []  # indexes of the units to be fetched, as last told
        self._fetched = 0  # how many of these were fetched since
        self._closed = False
        self._final = Read()
        self.gather: Gather | None = None
        self._pieces: list[list[CachePiece]] = []
        self._piece_bytes = 0
        self._of_tensor: dict[
            int, list[FileBacking]
        ] = {}  # backings of the units with a tensor, by the FileTensor's id
        self._shared: dict[
            int, list[CachePiece]
        ] = {}  # the pieces of units that are in shared memory, by unit
        self._checks: BlobChecks | None = None  # set if any unit is copied to the device packed
        self._buffers: BufferPlan | None = None
        self._peak = 0  # peak bytes of host memory before the last release of memory
        self._used_units: set[int] = set()  # units used while residents are still being loaded
        self._left_out = False  # whether the cache was last told an order without these

    @property
    def loader(self) -> ResidentLoader:
        """The loader of what is read once, and not through the cache."""
        return self._residents

    @property
    def fast_ram_bytes(self) -> float:
        """Bytes of units that the cache holds within the ``ram`` budget; infinite if it holds all."""
        nbytes, cache = sum(backing.wire.nbytes for backing in self.backings), self._source.cache_bytes
        return math.inf if nbytes <= cache else cache

    @property
    def state(self) -> RunnerState:
        """The state of the runner that fetches the units. Known after `start`."""
        assert self._state is not None
        return self._state

    def start(self, transfer: Transfer, runner: RunnerState) -> None:
        """Begin to read residents first. Units are read at the same time if host memory has room for both.

        Raises BudgetError if residents have to be read and the ``ram`` budget is less than one page.
        """
        self._state = runner
        budget, residents = self._source.cache_bytes, self._residents
        for file_tensor in {
            id(h.file_tensor): h.file_tensor for b in self.backings for h in b.file_homes
        }.values():
            if file_tensor.block is not None:
                self._arena.pin(file_tensor.block)
        wires = [backing.wire for backing in self.backings]
        if wires:
            self._cut(wires, budget)
        if any(wire.blobs for wire in wires):
            self._checks = BlobChecks(
                [self._shared.get(unit, pieces) for unit, pieces in enumerate(self._pieces)],
                [wire.blobs for wire in wires],
            )
        transfer.meter.disk_bytes = self.total_read
        if not self._engine.virtual_clock:
            transfer.meter.disk_reads = self._reads
        residents.attach_streamer(runner.lock, transfer.meter)
        residents.note_peak = self._note_peak
        self._limit_kept()
        beside = self._buffers_beside_cache(budget)
        buffers = None
        if residents.wanted:
            buffers = beside or self._few_buffers(budget)
            if buffers is None:
                raise BudgetError(
                    f"ram={budget} is too small to load weights through: {PAGE} bytes work", PAGE
                )
        residents.start(
            self._source.reader, buffers, self._residents_loaded, transfer.staging, self._source.kept,
            self._source.keeps_residents,
        )  # fmt: skip
        if beside or not residents.waiting:
            self._open_cache()

    def _cut(self, wires: Sequence[WireFormat], budget: int) -> None:
        """Cut the units into pieces: those in shared memory by its ranges, the others by the cache's buffers, which
        take at most ``budget`` bytes.
        """
        image = self._source.image
        if image is not None:
            image.pin(self._arena)
            rank = sum(wire.nbytes // PAGE + 1 for wire in wires)  # above the ranks that `cut` gives
            for unit, wire in enumerate(wires):
                pieces = image.cut(unit, wire.placed, rank)
                if pieces is not None:
                    self._shared[unit] = pieces
                    rank += len(pieces)
        # Whether a unit that is read or decoded on the host is ready depends on times, so the ranks would fetch in
        # different orders.
        self.gather = self._source.gather if len(self._shared) == len(wires) else None
        own = [_NOTHING if unit in self._shared else wire for unit, wire in enumerate(wires)]
        self._buffers = choose_buffers([wire.nbytes for wire in own], budget)
        self._pieces = cut([(wire.nbytes, wire.placed) for wire in own], self._buffers.nbytes)
        self._piece_bytes = sum(piece.nbytes for pieces in self._pieces for piece in pieces)

    def _limit_kept(self, beside: int = 0) -> None:
        """Release pieces kept from the last layout as far as host memory is needed for the buffers of both caches,
        changed values, and ``beside`` further bytes.
        """
        taken = self._source.checkpoint.changed_bytes + beside
        self._source.kept.set_budget(max(0, self._source.ram - taken))

    def _few_buffers(self, budget: int) -> BufferPlan | None:
        """Return the plan of buffers through which residents are read while no cache is open."""
        # Kept pieces are worth more than large buffers, because they save reads.
        spare = min(budget, max(budget - self._source.kept.nbytes, budget // 16, PAGE))
        return few_buffers(self._residents.sizes, spare, 4, PAGE)

    def _buffers_beside_cache(self, budget: int) -> BufferPlan | None:
        """Return the plan of buffers through which residents are read while the cache fills.

        Returns None if host memory has no room for the buffers and the cache at once.
        """
        buffers, residents = self._buffers, self._residents
        room = budget - self._full_bytes
        few = self._few_buffers(budget) if buffers is None else few_buffers(residents.sizes, budget, 16)
        if few is None:
            return None
        if self._source.keeps_residents and room > max(few.count * few.nbytes, LEAST_BUFFERS * PAGE):
            return choose_buffers(residents.sizes, room)
        if buffers is not None and buffers.whole and room < few.count * few.nbytes:
            return None
        return few

    @property
    def _full_bytes(self) -> int:
        """The bytes of host memory that the cache of streamed units takes once it is full; 0 if nothing streams."""
        buffers = self._buffers
        if buffers is None:
            return 0
        return self._piece_bytes if buffers.whole else buffers.count * buffers.nbytes

    def _note_peak(self) -> None:
        """Record the bytes of host memory that hold weights now, if they are the most so far."""
        self._peak = max(self._peak, self._host_bytes())

    def _residents_loaded(self) -> None:
        """Open the cache, or let the open cache use the memory of the residents' buffers. Called once all
        residents are on the device.
        """
        if self.cache is None:
            self._open_cache()
        else:
            self.cache.hold_back(0)
            self._used_units.clear()
            self.expect(self._from_now())

    def _open_cache(self) -> None:
        """Create the host cache and begin to read the units that are expected first, before they are
        requested.
        """
        if self._buffers is None or self.cache is not None:
            return
        inspect = None if self._checks is None else self._checks.checksum
        cache = HostCache(
            self._pieces, self._buffers, self._arena, self._source.reader(self._buffers.nbytes), self._engine.landed,
            self._engine.synchronize, self._source.checkpoint.settings.eviction,
            inspect, self._source.kept,
        )  # fmt: skip
        image = self._source.image
        self.cache = cache if image is None else SharedCache(cache, image, self._shared, inspect)
        if not self._buffers.whole:
            self.cache.hold_back(self._residents.limit_bytes)
        upcoming = self._from_now()
        self.cache.adopt(upcoming)
        self.cache.expect(upcoming)

    @property
    def waits_for_residents(self) -> bool:
        """Whether the cache can be created only after all residents are on the device, for want of host
        memory.
        """
        return self.cache is None and self._buffers is not None

    def expect(self, upcoming: list[int]) -> None:
        """Read the units with the indexes ``upcoming`` ahead, in this order, once there is a cache.

        While residents are being loaded, each unit is read from the drive only once, for the first pass. The
        residents are read before any unit is read a second time.
        """
        self._upcoming, self._fetched = upcoming, 0
        if self.cache is not None and not self.cache.complete:
            expected = self._not_used_lately(upcoming)
            self._left_out = len(expected) < len(upcoming)
            self.cache.expect(expected)

    def _from_now(self) -> list[int]:
        """Return the units to be fetched from now on."""
        return self._upcoming[self._fetched :] + self._upcoming[: self._fetched]

    def _not_used_lately(self, upcoming: list[int]) -> list[int]:
        if not (self._used_units and self._residents.waiting):
            return upcoming
        return [index for index in upcoming if index not in self._used_units]

    def expect_now(self, index: int) -> None:
        """Read the unit at ``index`` first, which is fetched now, whatever was expected and used lately.

        Otherwise the reads of units that come later would take its buffers again and again.
        """
        if not self._left_out and self._upcoming[self._fetched : self._fetched + 1] == [index]:
            return  # the cache expects it first
        if self.cache is not None and not self.cache.complete and not self.cache.has(index):
            later = self._not_used_lately(self._from_now())
            place = later.index(index) if index in later else len(later)  # of the use that is now
            self.cache.expect([index, *later[:place], *later[place + 1 :]])

    def recover(self) -> None:
        """Begin all reads anew after an interrupt, which may have come between two steps of a read."""
        self._residents.recover()
        if self.cache is not None:
            self.cache.recover()
        # Each cache has counted only its own buffers.
        buffers = 0 if self.cache is None else self.cache.figures().held_bytes
        self._source.kept.recover(buffers + self._residents.figures().held_bytes)

    # -- pieces of units

    def pieces(self, index: int) -> list[CachePiece]:
        """Return the pieces of the unit at ``index``, and record that the unit is being used."""
        if self._residents.waiting:
            self._used_units.add(index)
        if self._fetched < len(self._upcoming) and self._upcoming[self._fetched] == index:
            self._fetched += 1
        return self._shared.get(index) or self._pieces[index]

    def verify_checksums(self, index: int, found: list[PieceChecksums]) -> None:
        """Raise WeightsError if the packed bytes of a unit do not match their checksums. The cache then drops
        the unit, so that it is read again.
        """
        assert self._checks is not None and self.cache is not None
        try:
            self._checks.verify(index, found)
        except WeightsError:
            self.cache.discard(index)
            raise

    def is_verified(self, index: int) -> bool:
        """Return whether all bytes of a packed unit are in RAM and match their checksums.

        For a wrong checksum the result is False. The error is raised when the unit is needed.
        """
        if self.cache is None:
            return False
        found = self.cache.inspections(index)
        try:
            if found is not None:
                self.verify_checksums(index, found)
        except WeightsError:
            return False
        return found is not None

    # -- values that the program writes to weights

    def write(self, file_tensor: FileTensor, value: torch.Tensor) -> bool:
        """Store ``value`` as the value of a streamed weight.

        Returns False if the cache has to become smaller first, which needs a new layout. Raises BudgetError
        if even the smallest cache leaves no room for the value, and UnsupportedError if there is no room and
        a pass is running.
        """
        with self.state.lock:
            changed = self._source.checkpoint.changed_bytes
            spare = self._source.ram - self._reserved_bytes() - changed
            if (
                file_tensor.kept_bytes > spare and file_tensor.changed is not None
            ):  # no room for both values: overwrite the previous value once its copies have ended
                self._engine.synchronize()
                with torch.inference_mode(False), torch.no_grad():
                    file_tensor.changed.copy_(value.detach())
                self._invalidate(file_tensor)
                return True
            if file_tensor.kept_bytes > spare:
                if not self.state.idle:
                    raise UnsupportedError(
                        f"no room in ram for a new value of {file_tensor.name} during a pass; write it between passes"
                    )
                sizes = [backing.wire.nbytes for backing in self.backings]
                self._source.checkpoint.require_room(file_tensor, self._source.ram, sizes)
                return False
            self._limit_kept(file_tensor.kept_bytes)
        kept = file_tensor.copy_of(value)  # a slow copy, so it is not made under the lock
        if kept.block is not None:
            self._arena.pin(kept.block)
        with self.state.lock:
            if file_tensor.changed is not None:
                self._engine.synchronize()  # a copy to a slot may still read the previous value
                self._peak = max(self._peak, self._host_bytes() + file_tensor.kept_bytes)
            file_tensor.accept(kept)
            self._invalidate(file_tensor)
        return True

    def _reserved_bytes(self) -> int:
        """Return the bytes of ``ram`` that reading takes, now or later, for the cache and the staging buffers
        of residents.
        """
        residents, buffers = self._residents, self._buffers
        staging = residents.limit_bytes
        if buffers is None:
            return staging
        cache = buffers.count * buffers.nbytes if self.cache is None else self.cache.limit_bytes
        if buffers.whole:
            cache = self._piece_bytes
            if self.cache is not None:
                return cache + staging
        # the buffers of residents are released before the cache opens, or both share this bound
        return max(cache, staging)

    def _host_bytes(self) -> int:
        """Return the bytes of host memory that hold weights at this moment."""
        cache = 0 if self.cache is None else self.cache.figures().held_bytes
        held = self._residents.figures().held_bytes + cache + self._source.checkpoint.changed_bytes
        held += self._source.kept.nbytes
        if self._source.image is not None:
            held += self._source.image.nbytes
        return held

    def _invalidate(self, file_tensor: FileTensor) -> None:
        """Mark the copies in slots of the unit that contains ``file_tensor`` as outdated. Called after the
        value has changed.
        """
        if not self._of_tensor:
            for backing in self.backings:
                for home in backing.file_homes:
                    self._of_tensor.setdefault(id(home.file_tensor), []).append(backing)
        for backing in self._of_tensor.get(id(file_tensor), ()):
            backing.epoch += 1

    def figures(self) -> ReadFigures:
        """Return the disk and RAM figures for the report."""
        source, read = self._source, self._read_figures()
        return ReadFigures(
            ram_budget_bytes=source.ram + (0 if source.image is None else source.image.nbytes),
            ram_peak_bytes=read.held_bytes,
            read_bytes=read.nbytes,
            reading_seconds=read.seconds,
            wait_seconds=read.late_seconds,
            notes=(
                *source.checkpoint.notes,
                *self._packing_note(),
                *source.budget_notes(),
            ),
        )

    def total_read(self) -> int:
        """Return the bytes read from disk so far."""
        return self._residents.total_read() + (0 if self.cache is None else self.cache.total_read())

    def _reads(self) -> list[tuple[str, float, float, int]]:
        """Return recent reads as (label, start in seconds, end in seconds, bytes)."""
        return [*self._residents.reads(), *(() if self.cache is None else self.cache.reads())]

    def _read_figures(self) -> Read:
        """Return the present figures of disk reads. After `close`, the figures are those at the time of
        closing.
        """
        if self._closed:
            return self._final
        spans, residents = self._reads(), self._residents
        cache = CacheFigures() if self.cache is None else self.cache.figures()
        return Read(
            sum(nbytes for *_, nbytes in spans),
            union_seconds((start, end) for _, start, end, _ in spans),
            residents.late_seconds + cache.late_seconds,
            max(self._peak, self._host_bytes()),
        )

    def _packing_note(self) -> tuple[str, ...]:
        """Return a note for the report that tells how many reads and host copies the command `carom pack`
        would save.
        """
        copied = sum(
            read.nbytes
            for pieces in self._pieces
            for piece in pieces
            for read in piece.reads
            if (read.offset - read.at) % PAGE
        )
        count = sum(len(piece.reads) for pieces in self._pieces for piece in pieces)
        whole = sum(len(pieces) for pieces in self._pieces)
        if not copied or self._source.checkpoint.laid_out:
            return ()
        return (
            f"the file is not packed: {count} reads a pass ({whole} if it were), and {copied} bytes copied once more in "
            "host memory; `carom pack` rewrites it in streaming order",
        )

    def close(self) -> None:
        """End all reads and release the host memory. Must not be called while work is pending on the device."""
        self._final, self._closed = self._read_figures(), True
        run_all(self._residents.close, self._close_cache, self._release_backings)

    def _close_cache(self) -> None:
        """End the reads of the host cache."""
        if self.cache is not None:
            self.cache.close()
            self.cache = None

    def _release_backings(self) -> None:
        """Release the device memory and the pins of the units."""
        for backing in self.backings:
            backing.release()
            for home in backing.file_homes:
                if home.file_tensor.block is not None:
                    home.file_tensor.block.unpin()
