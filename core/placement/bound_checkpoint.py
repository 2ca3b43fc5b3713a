"""Defines `Checkpoint`: weights of a module that are in files. Meta tensors replace them in the module.

While the file is bound, every tensor of the module that the file holds is a `meta` tensor without gradient:
either the module's own meta tensor, or a placeholder if the module had values. Tensors that are not in the
file are left alone, except non-persistent buffers on `meta`, whose values are computed by their modules.
Values that are written to the file's tensors during the session are kept in host memory. At the end
(`Checkpoint.unbind`), written values are put into the module, and unwritten tensors are replaced by the
module's original objects.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..checkpoint.direct_io import ALIGN
from ..checkpoint.disk_reader import DiskReader, ReaderPolicy
from ..checkpoint.header import show
from ..checkpoint.index import SourceFile
from ..checkpoint.mapped_views import memory_of
from ..checkpoint.mapping import BoundTensor
from ..checkpoint.range_checks import RangeChecks
from ..checkpoint.read_concurrency import ReadLimit
from ..checkpoint.read_path import ReadPathTuner
from ..checkpoint.segments import Segment
from ..checkpoint.spill import allow_writes
from ..common.commit_memory import with_advice
from ..common.errors import BudgetError, UnsupportedError, WeightsError
from ..common.sizes import format_size
from ..device.engine import Engine
from ..host.cache_pieces import LEAST_BUFFERS, choose_buffers
from ..host.eviction import EVICTIONS
from ..model.units import Site, Unit
from ..model.unread_tensor import read_value
from .file_tensor import FileTensor, no_room_needed
from .quantised_binding import QuantisedBinding
from .wire_format import WireFormat, WireFormats, find_wire_formats, plain_wire_format

logger = logging.getLogger("carom")


@dataclass(frozen=True)
class Weights:
    """The ``weights=`` argument of `carom.stream`, with options.

    ``path``: a .safetensors file, a folder of shards, or its index.json.
    ``prefix``: removed from the names in the file ("auto" detects the prefix).
    ``rename``: applied to the module's names before they are looked up in the file.
    ``eviction``: which units stay in a host cache that is too small for all units: "belady" (by the learnt
    order of use), "fifo" or "priority" (the model's first units).
    ``workers``: number of reader threads, 1 to 64.
    """

    path: str | os.PathLike[str]
    prefix: str = "auto"
    rename: Callable[[str], str] | None = None
    eviction: str = "belady"
    workers: int = 4

    def __post_init__(self) -> None:
        """Raise UnsupportedError for an unknown ``eviction`` or a ``workers`` outside 1 to 64."""
        if self.eviction not in EVICTIONS:
            raise UnsupportedError(
                f"eviction={self.eviction!r}: choose one of {', '.join(map(repr, EVICTIONS))}"
            )
        if not isinstance(self.workers, int) or not 1 <= self.workers <= 64:
            raise UnsupportedError(f"workers={self.workers!r}: choose 1 to 64")


@dataclass(eq=False)
class _Computed:
    """A non-persistent buffer that was on the meta device.

    ``value``: the value that its module computed, which replaces ``original`` at ``sites``.
    """

    value: torch.Tensor
    original: torch.Tensor
    sites: list[Site] = field(default_factory=list)


class Checkpoint:
    """Weights of a module that are in files: each is represented in the module by a meta tensor, until `unbind`.

    ``settings``: how the files are read. `file_binding.bind_file` and `disk_binding.bind_memory` make checkpoints.
    """

    def __init__(self, settings: Weights) -> None:
        self.settings = settings
        # Measurements of the drive. They are kept here so that the readers of later layouts start from them.
        self.path_tuner, self.read_limit = ReadPathTuner(), ReadLimit(settings.workers)
        self.notes: list[str] = []
        # The CRC-32 of the weights that Carom wrote to spill files.
        self.checks = RangeChecks()
        # None until `stay_packed` has found tensors that the device can decode.
        self.wires: WireFormats | None = None
        # Whether `carom pack` would bring nothing: the tensors are aligned in the order of use already.
        self.laid_out = False
        # Called before a value that was written or changed on the device is allocated in host memory.
        self.make_room: Callable[[int], object] = no_room_needed
        # The weights that are made of several tensors of the file; None if there are none.
        self.quantised: QuantisedBinding | None = None
        # Set by `unbind` if values of the module are lost.
        self.lost: WeightsError | None = None
        # Tensors that read their values from the files at their first use. `unbind` reads them.
        self.unread: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._file_tensors: dict[int, FileTensor] = {}
        # Bytes of host memory that hold values which differ from the file's. A sum over all tensors at each write would
        # make writing all of them quadratic.
        self.changed_bytes = 0
        self._computed: list[_Computed] = []

    def bind(self, bound: BoundTensor, tensor: torch.Tensor, sites: list[Site]) -> FileTensor:
        """Put a meta tensor without gradient into the module in place of ``tensor``, whose bytes are in files.

        The meta tensor has the shape and strides of ``tensor``, and is ``tensor`` itself if that is on meta.
        """
        placeholder: torch.Tensor = tensor
        with torch.inference_mode(False):
            if not tensor.is_meta:
                placeholder = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                )
                if isinstance(tensor, nn.Parameter):
                    placeholder = nn.Parameter(placeholder, requires_grad=False)
        found = FileTensor(bound, placeholder, tensor, sites, tensor.requires_grad)
        found.make_room, found.note_change = self._make_room, self._note_change
        self._file_tensors[id(placeholder)] = found
        replace_in_modules(sites, tensor, placeholder)
        placeholder.requires_grad_(False)
        return found

    def compute(self, original: torch.Tensor, value: torch.Tensor, sites: list[Site]) -> None:
        """Put ``value``, which its module computed, into the module in place of a buffer on meta."""
        self._computed.append(_Computed(value, original, sites))
        replace_in_modules(sites, original, value)

    def note(self, *notes: str) -> None:
        """Add ``notes`` to those for the report, and log them."""
        self.notes += notes
        for note in notes:
            logger.info("carom: %s", note)

    def of(self, tensor: torch.Tensor) -> FileTensor | None:
        """Return the file's tensor that ``tensor`` represents in the module, or None if the file does not
        hold that tensor.
        """
        return self._file_tensors.get(id(tensor))

    def segments(self) -> list[Segment]:
        """Return the file bytes that fill the tensors of the module, without those that only values in memory have."""
        tensors = {id(found): found for found in self._file_tensors.values()}
        return [segment for found in tensors.values() for segment in found.bound.segments]

    def bind_device_tensor(self, tensor: torch.Tensor, file_tensor: FileTensor) -> None:
        """Register ``tensor``, a copy on the device, as representing ``file_tensor``, until
        `unbind_device_tensor`.
        """
        self._file_tensors[id(tensor)] = file_tensor

    def unbind_device_tensor(self, tensor: torch.Tensor) -> None:
        """Remove the registration that `bind_device_tensor` made for ``tensor``."""
        self._file_tensors.pop(id(tensor), None)

    def replaced(self) -> dict[int, FileTensor]:
        """Return the tensors of the file in whose place the module has a frozen tensor in host memory now, by the id of
        that tensor. Called while no layout is in effect.
        """
        found = {}
        for file_tensor in self._file_tensors.values():
            now = {id(tensor): tensor for tensor in (site.table.get(site.name) for site in file_tensor.sites)}
            new = next(iter(now.values())) if len(now) == 1 else None
            if new is None or id(new) in self._file_tensors or new.requires_grad:
                continue
            like = (new.shape, new.dtype) == (file_tensor.tensor.shape, file_tensor.tensor.dtype)
            if like and new.device.type == "cpu":
                found[id(new)] = file_tensor
        return found

    def forget(self, file_tensor: FileTensor) -> None:
        """Let ``file_tensor``, which the module replaced, go, with the values that were written to it."""
        self._file_tensors.pop(id(file_tensor.tensor), None)

    def _make_room(self, nbytes: int) -> None:
        """Call `make_room`, which the session sets later than file tensors are bound."""
        self.make_room(nbytes)

    def _note_change(self, nbytes: int) -> None:
        """Count a written value of ``nbytes`` that the file does not have."""
        self.changed_bytes += nbytes

    def read(self, file_tensor: FileTensor) -> torch.Tensor:
        """Return the tensor's current value as a new CPU tensor, from host memory or from the file. Raises
        WeightsError.
        """
        return self.read_file(file_tensor) if file_tensor.changed is None else file_tensor.changed.clone()

    def read_file(self, file_tensor: FileTensor) -> torch.Tensor:
        """Return the value that the file has as a new CPU tensor, whatever was written since. Raises WeightsError."""
        bound = file_tensor.bound
        with torch.inference_mode(False):
            try:
                value = torch.empty_strided(bound.shape, file_tensor.tensor.stride(), dtype=bound.dtype)
            except (RuntimeError, MemoryError) as error:
                message = f"no memory for {show(bound.name)} of {bound.nbytes} bytes; stream it instead of reading it"
                raise WeightsError(with_advice(message, error)) from error
            raw = memory_of(value)
        policy = ReaderPolicy(direct=False, workers=self.settings.workers)
        with DiskReader(policy, checks=self.checks) as reader:
            handles = [
                reader.submit(
                    s.entry, raw[s.at : s.at + s.nbytes], start=s.start, nbytes=s.nbytes
                )
                for s in bound.segments
            ]  # fmt: skip
            for handle in handles:
                handle.result()
        return value

    def stay_packed(self, engine: Engine) -> None:
        """Let lossless packed tensors be copied to the device packed, if the device of ``engine`` can decode
        them.

        The header of each packed tensor is read from the file.
        """
        self.wires, note = find_wire_formats(
            self._file_tensors.values(), self.of, engine, self.settings.workers
        )
        self.notes += [note] if note else []

    def wire(self, unit: Unit, staging_bytes: int) -> WireFormat:
        """Return the byte layout in which ``unit`` is cached in RAM and copied to the device.

        The layout contains packed tensors only if they fit in ``staging_bytes`` of device memory.
        """
        wire = plain_wire_format(unit, self.of) if self.wires is None else self.wires(unit)
        return (
            wire if wire.decoder is None or wire.nbytes <= staging_bytes else plain_wire_format(unit, self.of)
        )

    def require_ram(self, ram: int, units: list[Unit], staging_bytes: int = 0, known: bool = False) -> None:
        """Raise BudgetError if ``ram`` bytes do not suffice to stream ``units`` and to hold the changed
        values in host memory.

        ``known``: whether the present session already exceeds the budget because of changed values. The
        excess is then no reason to raise.
        """
        if units:
            sizes = [self.wire(unit, staging_bytes).nbytes for unit in units]
            choose_buffers(sizes, self.cache_bytes(ram) if known else ram - self.changed_bytes)

    def require_room(self, file_tensor: FileTensor, ram: int, sizes: Sequence[int]) -> None:
        """Raise BudgetError if storing a written value of ``file_tensor`` would leave too little of ``ram``
        for reading. The message names the tensor.

        ``ram``: the budget in bytes.
        ``sizes``: bytes of each streamed unit in the host cache; empty if only tensors that stay on the
        device are read.
        """
        kept = self.changed_bytes + (0 if file_tensor.changed is not None else file_tensor.kept_bytes)
        try:
            choose_buffers(sizes or [ALIGN], ram - kept)
        except BudgetError as error:
            least = kept + (error.least_bytes or 0)
            raise BudgetError(
                f"ram={format_size(ram)} has no room for a new value of {file_tensor.name} beside what the file is read "
                f"through: values that were written would take {kept} bytes. Raise ram to {least} bytes "
                "(session.set_budget(ram=...)), or stream the module from RAM (without weights= and disk=)",
                least,
            ) from None

    def cache_bytes(self, ram: int) -> int:
        """Return the bytes of ``ram`` that remain for reading beside the changed values, but at least the
        minimum with which reading works.

        Changed values may exceed the budget: if a tensor was changed on the device and leaves the device,
        host memory is the only place for its value.
        """
        return max(ram - self.changed_bytes, min(ram, LEAST_BUFFERS * ALIGN))

    def unbind(self) -> None:
        """Put the module's original tensors back, with the written values if there are any. Idempotent.

        A tensor whose mapped file was cut off becomes empty, and `lost` is set: the process would end at the first use
        of the mapping's memory. A tensor on meta would not do, as torch.nn.functional.linear accepts one as the weight,
        and returns uninitialised memory.
        """
        for tensor in list(self.unread.values()):
            with contextlib.suppress(WeightsError):  # raised again where the tensor is used
                read_value(tensor)
        cut_off = _cut_off(self._file_tensors.values())
        missing = set(cut_off)
        if cut_off:
            self.lost = _lost(cut_off)
        with torch.inference_mode(False), torch.no_grad():
            for file_tensor in self._file_tensors.values():
                file_tensor.tensor.requires_grad_(file_tensor.trainable)
                back = file_tensor.original
                if file_tensor in missing:
                    back.data = torch.empty(0, dtype=back.dtype)
                elif file_tensor.changed is not None and back.is_meta:
                    back = file_tensor.changed
                    if isinstance(file_tensor.original, nn.Parameter):
                        back = nn.Parameter(back, requires_grad=file_tensor.trainable)
                elif file_tensor.changed is not None and file_tensor.mapped:
                    back.data = file_tensor.changed  # the mapped file may not be writable
                elif file_tensor.changed is not None:
                    back.copy_(file_tensor.changed)
                replace_in_modules(file_tensor.sites, file_tensor.tensor, back)
        self._allow_writes()
        for computed in self._computed:
            replace_in_modules(computed.sites, computed.value, computed.original)
        self._file_tensors.clear()
        self._computed.clear()
        self.changed_bytes = 0

    def _allow_writes(self) -> None:
        """Let the program write to the module's tensors that were spilled, which it has again."""
        mapped = [one.original for one in self._file_tensors.values() if one.mapped and one.changed is None]
        refused = allow_writes(mapped)
        if refused:
            logger.warning(
                "%s of weights stay in a spill file and must not be written to (merging an adapter into them ends the "
                "process): RAM and pagefile have no room for them. Load the model again before you change it",
                format_size(refused),
            )


def _cut_off(file_tensors: Iterable[FileTensor]) -> list[FileTensor]:
    """Return the tensors that are views of a mapped file which is now shorter than they need."""
    sizes: dict[SourceFile, float] = {}
    found = []
    for file_tensor in file_tensors:
        if not file_tensor.mapped or file_tensor.changed is not None:
            continue
        for segment in file_tensor.bound.segments:
            file = segment.entry.file
            if file not in sizes:
                sizes[file] = _size_now(file)
            if segment.entry.offset + segment.start + segment.nbytes > sizes[file]:
                found.append(file_tensor)
                break
    return found


def _size_now(file: SourceFile) -> float:
    """Return the length of ``file`` in bytes, infinite if its path leads to no file or to another one. The mapping then
    holds the file that it was made of, which nobody can cut off by its name.
    """
    try:
        status = os.stat(file.path)
    except OSError:
        return math.inf
    same = (status.st_ino, status.st_dev) == (file.inode, file.device)
    return status.st_size if same else math.inf


def _lost(cut_off: Sequence[FileTensor]) -> WeightsError:
    first = cut_off[0]
    return WeightsError(
        f"{first.bound.segments[0].entry.file.path}: the file was cut off while weights of the module were in it. The "
        f"values of {len(cut_off)} weights, first {first.name}, are lost, and these weights are empty now; load "
        "the module again"
    )


def replace_in_modules(sites: list[Site], old: torch.Tensor, new: torch.Tensor) -> None:
    """Replace ``old`` by ``new`` at every site, and in lists of weights that modules themselves keep (as
    LSTMs do).
    """
    if new is old:
        return
    for site in sites:
        if site.table.get(site.name) is old:
            site.table[site.name] = new
    for module in {id(site.module): site.module for site in sites}.values():
        for kept in vars(module).values():
            if type(kept) is list:
                kept[:] = [new if item is old else item for item in kept]
