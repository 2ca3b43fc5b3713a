"""The weights file of a session: which of a module's tensors come from it, and what stands for them meanwhile.

While bound, every tensor that the file holds stands in the module as a `meta` tensor without gradient: the one
that was there, or a stand-in where the module had values. What has no bytes in the file is left alone, but for
non-persistent buffers on `meta`, which their modules compute. Values written since are kept here, and the
module has them when it is given back; what was not written is again as it was before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .disk_wire import Wire, Wires, find_wires, plain_wire
from .errors import BudgetError, UnsupportedError, WeightsError
from .plan import round_up
from .sizes import format_size
from .store.arena import PAGE, Block, HostArena
from .store.buffers import compute_buffers
from .store.eviction import EVICTIONS
from .store.header import show
from .store.index import Index, open_index
from .store.lanes import Lanes
from .store.mapping import Bound, match_module
from .store.pace import Pace
from .store.pieces import LEAST_BUFFERS, choose_buffers
from .store.rawio import ALIGN
from .store.reader import DiskReader, ReaderPolicy
from .transfer import Engine
from .units import Site, Unit, collect

_SMALL = 64 << 10  # bytes; below it a value is no mapping of its own

logger = logging.getLogger("carom")


@dataclass(frozen=True)
class Weights:
    """``weights=`` with more to say than a path.

    ``path``: a .safetensors file, a folder of shards, or its index.json. ``prefix``: taken off the file's names
    ("auto" finds it). ``rename``: applied to the module's names first. ``eviction``: what a host cache that is
    too small for all keeps: "belady" (by the learnt order), "fifo" or "priority" (the model's first units).
    ``workers``: threads that read.
    """

    path: str | os.PathLike[str]
    prefix: str = "auto"
    rename: Callable[[str], str] | None = None
    eviction: str = "belady"
    workers: int = 4

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise UnsupportedError(
                f"eviction={self.eviction!r}: choose one of {', '.join(map(repr, EVICTIONS))}"
            )
        if not isinstance(self.workers, int) or not 1 <= self.workers <= 64:
            raise UnsupportedError(f"workers={self.workers!r}: choose 1 to 64")


@dataclass(frozen=True, eq=False)
class Kept:
    """A value in host memory, and where it lies if that can be pinned."""

    value: torch.Tensor
    block: Block | None = None


@dataclass(eq=False)
class Stand:
    """A tensor of the file: ``tensor`` (on meta) stands at ``sites`` for ``original``. ``changed``: its value on
    the CPU where it is no longer the file's."""

    bound: Bound
    tensor: torch.Tensor
    original: torch.Tensor
    sites: list[Site]
    trainable: bool
    changed: torch.Tensor | None = None
    block: Block | None = None  # where ``changed`` lies

    @property
    def name(self) -> str:
        return self.bound.name

    @property
    def kept_bytes(self) -> int:
        """Bytes of host memory that a value takes."""
        return self.bound.nbytes if self.bound.nbytes < _SMALL else round_up(self.bound.nbytes, PAGE)

    def change(self, value: torch.Tensor) -> None:
        """From now on the tensor has this value, kept in host memory."""
        self.accept(self.copy_of(value))

    def copy_of(self, value: torch.Tensor) -> Kept:
        """The value in host memory of its own, which can be pinned unless it is small. Raises MemoryError."""
        bound, block = self.bound, None
        with torch.inference_mode(False), torch.no_grad():
            if bound.nbytes < _SMALL:
                return Kept(value.detach().to("cpu", copy=True).contiguous())
            block = HostArena(None, None).allocate(bound.nbytes)
            # A storage of its own, so that saving the tensor saves no padding.
            own = torch.frombuffer(block.data.numpy(), dtype=torch.uint8).view(bound.dtype).view(bound.shape)
            own.copy_(value.detach())
        return Kept(own, block)

    def accept(self, kept: Kept) -> None:
        """The value is this (from `copy_of`); nothing reads the last one any more."""
        if self.block is not None:
            self.block.unpin()
        self.changed, self.block = kept.value, kept.block

    def check(self, value: torch.Tensor) -> None:
        """Raises WeightsError unless ``value`` may take the tensor's place."""
        if (value.shape, value.dtype) != (self.tensor.shape, self.tensor.dtype) or value.is_meta:
            raise WeightsError(
                f"{self.name} is {self.tensor.dtype} {tuple(self.tensor.shape)}; cannot write {value.dtype} "
                f"{tuple(value.shape)} on {value.device}"
            )


@dataclass(eq=False)
class _Computed:
    value: torch.Tensor
    original: torch.Tensor
    sites: list[Site] = field(default_factory=list)


class Checkpoint:
    """Binds ``module`` to ``weights`` (a path or `Weights`) until `unbind`.

    Raises WeightsError and UnsupportedError as `open_index`, `match_module` and `compute_buffers` do, and
    UnsupportedError for weights of the file that are to be trained. The module is untouched then.
    """

    def __init__(self, module: nn.Module, weights: Weights | str | os.PathLike[str]) -> None:
        self.settings = weights if isinstance(weights, Weights) else Weights(weights)
        self.index: Index = open_index(self.settings.path)
        # Of the drive it lies on, for whoever reads: what one attachment found of it serves the next.
        self.pace, self.lanes = Pace(), Lanes(self.settings.workers)
        self.module = module
        self.notes: list[str] = []
        self.wires: Wires | None = None  # where packed tensors may stay packed up to the device
        self._stands: dict[int, Stand] = {}
        self._computed: list[_Computed] = []
        try:
            found = match_module(module, self.index, prefix=self.settings.prefix, rename=self.settings.rename)
        except WeightsError as error:
            raise WeightsError(f"{error}{_about_adapters(module)}") from error
        values = compute_buffers(module, found.computed)
        tensors = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        sites = {id(entry.tensor): entry.sites for entry in collect(module)}
        self._refuse_trained({name: tensors[name] for name in found.bound})
        self._refuse_layouts({name: tensors[name] for name in found.bound})
        try:
            for bound in found.bound.values():
                self._stand_in(bound, tensors[bound.name], sites[id(tensors[bound.name])])
            for name, value in values.items():
                original = tensors[name]
                self._computed.append(_Computed(value, original, sites[id(original)]))
                put(sites[id(original)], original, value)
            self._note(found.extra)
        except BaseException:
            self.unbind()
            raise

    def _refuse_trained(self, tensors: dict[str, torch.Tensor]) -> None:
        parameters = {
            n: t for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.is_floating_point()
        }
        trained = [name for name, tensor in parameters.items() if tensor.requires_grad]
        if trained and len(trained) < len(parameters):
            raise UnsupportedError(
                f"{len(trained)} weights of the file are to be trained, first {trained[0]}; weights that stream from a "
                "file are frozen. Freeze them (requires_grad_(False)) and train adapters, or load the module first "
                "and stream it without weights="
            )

    def _refuse_layouts(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_meta and not tensor.is_contiguous():
                raise UnsupportedError(
                    f"{name} has strides {tensor.stride()} on meta, files hold contiguous tensors; build it contiguous"
                )

    def _stand_in(self, bound: Bound, tensor: torch.Tensor, sites: list[Site]) -> None:
        stand: torch.Tensor = tensor
        with torch.inference_mode(False):
            if not tensor.is_meta:
                stand = torch.empty(bound.shape, dtype=bound.dtype, device="meta")
                if isinstance(tensor, nn.Parameter):
                    stand = nn.Parameter(stand, requires_grad=False)
        self._stands[id(stand)] = Stand(bound, stand, tensor, sites, tensor.requires_grad)
        put(sites, tensor, stand)
        stand.requires_grad_(False)

    def _note(self, extra: tuple[str, ...]) -> None:
        if extra:
            names = ", ".join(show(name) for name in extra[:4])
            self.notes.append(
                f"{len(extra)} tensors of the file have no place in the module and are not read: {names}"
                f"{', ...' if len(extra) > 4 else ''}"
            )
        trained = sum(stand.trainable for stand in self._stands.values())
        if trained:
            self.notes.append(f"{trained} weights from the file take no gradients while they stream")
        kept = sum(s.original.nbytes for s in self._stands.values() if not s.original.is_meta)
        if kept:
            self.notes.append(
                f"the module holds {kept} bytes of weights of its own besides; built on meta it would not"
            )
        for note in self.notes:
            logger.info("carom: %s", note)

    # -- what stands where

    def of(self, tensor: torch.Tensor) -> Stand | None:
        """What ``tensor`` stands for, None for a tensor that is not the file's."""
        return self._stands.get(id(tensor))

    def stands_for(self, tensor: torch.Tensor, stand: Stand) -> None:
        """``tensor``, on the device, holds the value meanwhile; ends with `stands_no_more`."""
        self._stands[id(tensor)] = stand

    def stands_no_more(self, tensor: torch.Tensor) -> None:
        self._stands.pop(id(tensor), None)

    @property
    def changed_bytes(self) -> int:
        """Host memory of values that are no longer the file's."""
        found = {id(stand): stand for stand in self._stands.values() if stand.changed is not None}
        return sum(stand.kept_bytes for stand in found.values())

    def read(self, stand: Stand) -> torch.Tensor:
        """The true value, a CPU tensor of its own. Raises WeightsError."""
        if stand.changed is not None:
            return stand.changed.clone()
        bound = stand.bound
        with torch.inference_mode(False):
            try:
                value = torch.empty(bound.shape, dtype=bound.dtype)
            except (RuntimeError, MemoryError) as error:
                raise WeightsError(
                    f"no memory for {show(bound.name)} of {bound.nbytes} bytes; stream it instead of reading it"
                ) from error
            raw = value.reshape(-1).view(torch.uint8)
        with DiskReader(ReaderPolicy(direct=False, workers=self.settings.workers)) as reader:
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
        """From now on what the device unpacks crosses packed. Reads a header of each packed tensor."""
        self.wires, note = find_wires(self._stands.values(), self.of, engine, self.settings.workers)
        self.notes += [note] if note else []

    def wire(self, unit: Unit, staging_bytes: int) -> Wire:
        """How the unit waits in RAM and crosses, where what is packed may take ``staging_bytes`` of the device."""
        wire = plain_wire(unit, self.of) if self.wires is None else self.wires(unit)
        return wire if wire.decoder is None or wire.nbytes <= staging_bytes else plain_wire(unit, self.of)

    def require_ram(self, ram: int, units: list[Unit], staging_bytes: int = 0, known: bool = False) -> None:
        """Raises BudgetError where ``ram`` bytes are too few to stream ``units`` beside the values kept; ``known``: whether
        that is so already, and no reason to refuse."""
        if units:
            sizes = [self.wire(unit, staging_bytes).nbytes for unit in units]
            choose_buffers(sizes, self.cache_bytes(ram) if known else ram - self.changed_bytes)

    def require_room(self, stand: Stand, ram: int, sizes: Sequence[int]) -> None:
        """Raises BudgetError naming ``stand`` where its value in host memory leaves too few of ``ram`` bytes to stream units
        that wait in ``sizes``, or to bring residents."""
        kept = self.changed_bytes + (0 if stand.changed is not None else stand.kept_bytes)
        try:
            choose_buffers(sizes or [ALIGN], ram - kept)
        except BudgetError as error:
            least = kept + (error.least_bytes or 0)
            raise BudgetError(
                f"ram={format_size(ram)} has no room for a new value of {stand.name} beside what the file is read "
                f"through: values that were written would take {kept} bytes. Raise ram to {least} bytes "
                "(session.set_budget(ram=...)), or load the module first and stream it without weights=",
                least,
            ) from None

    def cache_bytes(self, ram: int) -> int:
        """What changed values leave of ``ram`` bytes for reading; the least that works, where they take more: residents
        that were changed on the device have no other place than host memory when they leave it."""
        return max(ram - self.changed_bytes, min(ram, LEAST_BUFFERS * ALIGN))

    def unbind(self) -> None:
        """Give the module its tensors back, those that were written with their new values. Idempotent."""
        with torch.inference_mode(False), torch.no_grad():
            for stand in self._stands.values():
                stand.tensor.requires_grad_(stand.trainable)
                back = stand.original
                if stand.changed is not None and back.is_meta:
                    back = stand.changed
                    if isinstance(stand.original, nn.Parameter):
                        back = nn.Parameter(back, requires_grad=stand.trainable)
                elif stand.changed is not None:
                    back.copy_(stand.changed)
                put(stand.sites, stand.tensor, back)
        for computed in self._computed:
            put(computed.sites, computed.value, computed.original)
        self._stands.clear()
        self._computed.clear()


def _about_adapters(module: nn.Module) -> str:
    """A hint where trainable parameters on meta stand among frozen ones: adapters without values."""
    meta = [parameter.requires_grad for parameter in module.parameters() if parameter.is_meta]
    if not any(meta) or all(meta):
        return ""
    return " Adapters that were added on meta have no values: call carom.stream first, then add the adapters."


def put(sites: list[Site], old: torch.Tensor, new: torch.Tensor) -> None:
    """Put ``new`` in every place of ``old``, in lists that modules keep of their own weights (as LSTMs do) too."""
    if new is old:
        return
    for site in sites:
        if site.table.get(site.name) is old:
            site.table[site.name] = new
    for module in {id(site.module): site.module for site in sites}.values():
        for kept in vars(module).values():
            if type(kept) is list:
                kept[:] = [new if item is old else item for item in kept]
