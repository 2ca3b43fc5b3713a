"""Division of a module tree into units. A unit is a group of tensors that are copied to the device, used and
evicted together.

Blocks are found by structure: children of a container that repeat (lists, dicts, numbered attributes), at any
depth and of any number of kinds. Weights outside blocks become units of kind "stem". A unit larger than the
limit is split into phases (its children), and these into layers. No class names are used. Tensors that cannot
be streamed safely are listed with the reason, and are resident: they stay on the device. A slot is the device
memory that holds a streamed unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..common.errors import UnsupportedError
from ..plan.region import ALIGN
from .managed_tensor import HostParameter, HostTensor, waits_elsewhere
from .quantized import is_inner

# In bytes. Smaller buffers are often state that the model writes (statistics, caches), so they stay on the
# device.
SMALL_BUFFER = 256 << 10
# The reason given for buffers that the model creates during a forward. They stay on the device, but the VRAM
# budget does not count them, as it does not count activations.
MODELS_OWN = "the model makes it as it runs"
FILE_ALIGN = 4096  # bytes; with this alignment, direct reads of packed files need no second buffer
_NUMBERED = re.compile(r"(.*?)(\d+)$")


@dataclass(frozen=True)
class Site:
    """An attribute of a module in the tree that holds a tensor, by module and name."""

    module: nn.Module
    name: str
    buffer: bool

    @property
    def table(self) -> dict[str, Any]:
        """The module's dict of parameters or of buffers that holds the tensor."""
        return self.module._buffers if self.buffer else self.module._parameters


@dataclass(eq=False)
class Entry:
    """A parameter or buffer: one tensor, with all the sites (modules and names) that share it."""

    name: str
    tensor: torch.Tensor
    sites: list[Site]
    offset: int = 0  # bytes from the start of the unit
    counted: bool = True  # whether the VRAM budget counts the tensor
    # Whether the tensor counts as frozen although it requires a gradient, because no pass has recorded gradients.
    untrained: bool = False
    # `nbytes`, once it was asked for: queries of a managed tensor take time, and a layout asks a dozen times.
    _nbytes: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without alignment padding."""
        if self._nbytes is None:
            self._nbytes = self.tensor.numel() * self.tensor.element_size()
        return self._nbytes

    def refer_to(self, tensor: torch.Tensor) -> None:
        """Let the entry be that of ``tensor``, which the module has in place of the present one."""
        self.tensor, self._nbytes = tensor, None

    @property
    def trainable(self) -> bool:
        """Whether the tensor requires a gradient, and passes may record one."""
        return self.tensor.requires_grad and not self.untrained

    @property
    def is_buffer(self) -> bool:
        """Whether the tensor is a buffer at all its sites. Buffers that hold inner tensors of quantised
        weights do not count.
        """
        return all(site.buffer and not is_inner(site.name) for site in self.sites)


@dataclass(eq=False)
class Unit:
    """Entries that are copied to the device together, and the modules whose forward needs the entries.

    ``modules`` is empty for a unit that is used only by operators outside the forward of any of these
    modules.
    """

    name: str
    kind: str  # "block" | "phase" | "layer" | "stem" | "loose"
    modules: list[nn.Module]
    entries: list[Entry] = field(default_factory=list)
    nbytes: int = 0  # bytes in a slot, alignment padding included
    raw_bytes: int = 0
    align: int = ALIGN  # bytes; every tensor of the unit starts at a multiple of this

    def add(self, entry: Entry) -> None:
        """Append ``entry`` at the next aligned offset."""
        entry.offset = self.nbytes
        self.entries.append(entry)
        self.nbytes += -(-entry.nbytes // self.align) * self.align
        self.raw_bytes += entry.nbytes

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the unit's tensors."""
        return tuple(entry.name for entry in self.entries)


@dataclass(eq=False)
class Carving:
    """A division of a module's tensors into units and tensors that stay on the device.

    ``units``: in registration order.
    ``resident``: (entry, reason) of tensors that must stay on the device.
    ``adapters``: trainable entries that stay on the device.
    """

    units: list[Unit]
    resident: list[tuple[Entry, str]]
    adapters: list[Entry]
    split_bytes: int = 0  # bytes of the largest block (or stem) that was split into parts

    @property
    def largest(self) -> int:
        """Bytes of the largest unit, alignment padding included."""
        return max((unit.nbytes for unit in self.units), default=0)


def collect(root: nn.Module) -> list[Entry]:
    """Return every parameter and buffer of the tree once, with all its sites, in registration order.

    Raises UnsupportedError for a lazy parameter or buffer, which has no shape yet, for nested tensors, and for
    parameters of torch's quantised dtypes.
    """
    found: dict[int, Entry] = {}
    for prefix, module in root.named_modules():
        for buffer, table in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise UnsupportedError(
                        f"{prefix + '.' if prefix else ''}{name} of {type(module).__name__} has no shape yet: run one forward "
                        "of the module before it streams (a dry run), so that lazy modules make their weights"
                    )
                if tensor.is_nested or (tensor.is_quantized and not buffer):
                    kind = "a nested tensor" if tensor.is_nested else f"a parameter of type {tensor.dtype}"
                    raise UnsupportedError(
                        f"{prefix + '.' if prefix else ''}{name} is {kind}, which cannot be moved to a device in place: "
                        "replace it by ordinary tensors, or stream the modules beside it"
                    )
                entry = found.get(id(tensor))
                if entry is None:
                    entry = found[id(tensor)] = Entry(f"{prefix}.{name}" if prefix else name, tensor, [])
                entry.sites.append(Site(module, name, buffer))
    return list(found.values())


def why_not_streamed(entry: Entry) -> str | None:
    """Return the reason why a tensor has to stay resident, None if it can be streamed."""
    tensor = entry.tensor
    # A streamed tensor has one of Carom's classes while a session is open, and this function may be called
    # then too.
    if type(tensor) not in (nn.Parameter, torch.Tensor) and not isinstance(
        tensor, (HostParameter, HostTensor)
    ):
        return f"tensor subclass {type(tensor).__name__}, which cannot be put together of tensors in a slot"
    if waits_elsewhere(tensor):
        return None
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.is_inference():
        return "made under torch.inference_mode"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugate or negative view"
    if entry.nbytes == 0:
        return "empty"
    if not is_dense(tensor):
        return "its elements overlap or leave gaps in memory"
    state = any(site.buffer and not is_inner(site.name) for site in entry.sites)
    if state and entry.nbytes < SMALL_BUFFER:
        return "small buffer: may be written by the model"
    return None


def carve(
    root: nn.Module,
    *,
    granularity: str = "auto",
    limit: int | None = None,
    stream_trainable: bool = False,
    stay: dict[str, str] | None = None,
    from_file: Callable[[torch.Tensor], Any] | None = None,
    untrained: bool = False,
) -> Carving:
    """Divide the tensors of ``root`` into units, each of at most ``limit`` bytes where it can be split.

    ``granularity``: "auto", "phase" or "layer".
    ``stay``: names of tensors that must stay on the device, with the reason.
    ``from_file``: returns whether a tensor's bytes come from a weights file. If given, only such tensors
    stream, and they are aligned to 4096 bytes as in files.
    ``untrained``: treat tensors that require gradients as frozen ones, because no pass has recorded gradients.

    Raises UnsupportedError for meta tensors without a file and for parameters that are inference tensors,
    with their names.
    """
    carver = _Carver(root, granularity, limit, stream_trainable, stay or {}, from_file, untrained)
    carver.visit(root, "", top=True)
    carver.share_tied()
    order = {id(entry): index for index, entry in enumerate(carver.entries)}
    units = [unit for unit in carver.units if unit.entries]
    units.sort(key=lambda unit: order[id(unit.entries[0])])
    return Carving(units, carver.resident, carver.adapters, carver.split_bytes)


class _Carver:
    """The state of one call of `carve`: the tree, and the units found so far."""

    def __init__(
        self,
        root: nn.Module,
        granularity: str,
        limit: int | None,
        stream_trainable: bool,
        stay: dict[str, str],
        from_file: Callable[[torch.Tensor], Any] | None,
        untrained: bool,
    ) -> None:
        self.granularity, self.limit = granularity, limit
        self.align = ALIGN if from_file is None else FILE_ALIGN
        self.units: list[Unit] = []
        self.split_bytes = 0
        self.resident: list[tuple[Entry, str]] = []
        self.adapters: list[Entry] = []
        self.entries = collect(root)
        own: dict[int, list[Entry]] = {}
        for entry in self.entries:
            entry.untrained = untrained and entry.tensor.requires_grad
            filed = from_file is not None and bool(from_file(entry.tensor))
            if entry.tensor.is_meta and not filed and not waits_elsewhere(entry.tensor):
                raise UnsupportedError(
                    f"{entry.name} is on the meta device and no file with its value was given: name one with weights= "
                    "when streaming starts, or load the module's weights first"
                )
            if entry.tensor.is_inference() and not entry.is_buffer:
                raise UnsupportedError(
                    f"{entry.name} was made under torch.inference_mode and cannot be managed; build or clone "
                    "the module outside it"
                )
            reason = stay.get(entry.name) or why_not_streamed(entry)
            entry.counted = reason != MODELS_OWN
            if from_file is not None and not filed:
                reason = reason or "its value is in no file"
            if entry.trainable and not stream_trainable:
                self.adapters.append(entry)
            elif reason is not None:
                self.resident.append((entry, reason))
            else:
                for module in {id(site.module): site.module for site in entry.sites}.values():
                    own.setdefault(id(module), []).append(entry)
        self._own = own
        self._owners: dict[int, list[int]] = {}
        self._bytes: dict[int, int] = {}
        self._nested: dict[int, bool] = {}
        self.total = self.bytes(root)
        self._taken: dict[int, Unit] = {}  # the unit that contains an entry, by the entry's id
        self._tied: list[tuple[Entry, Unit]] = []

    def owners(self, module: nn.Module) -> list[int]:
        """Return the ids of the modules at and below ``module`` that own streamable weights, in the order of
        `nn.Module.modules`.
        """
        found = self._owners.get(id(module))
        if found is None:
            below = [owner for child in module.children() for owner in self.owners(child)]
            own = [id(module)] if id(module) in self._own else []
            # A module that stands at several places of the tree counts once.
            found = self._owners[id(module)] = list(dict.fromkeys(own + below))
        return found

    def bytes(self, module: nn.Module) -> int:
        """Return the bytes of all streamable tensors in ``module`` and below, aligned as in slots."""
        if id(module) not in self._bytes:
            entries = {id(entry): entry for owner in self.owners(module) for entry in self._own[owner]}
            self._bytes[id(module)] = sum(
                -(-entry.nbytes // self.align) * self.align for entry in entries.values()
            )
        return self._bytes[id(module)]

    def repeats(self, module: nn.Module, leaves: bool = False) -> set[str]:
        """Return the names of children that repeat: numbered children of a container, or attributes whose
        names differ only by a number.

        Single layers are included only if ``leaves`` is true: inside a block they are parts of the block, not
        blocks.
        """
        weighty = {name: child for name, child in module.named_children() if self.bytes(child)}
        groups: dict[object, list[str]] = {}
        for name, child in weighty.items():
            match = _NUMBERED.fullmatch(name)
            if isinstance(module, nn.ModuleDict) or (match and not match[1]):
                groups.setdefault("container", []).append(name)
            elif match:
                groups.setdefault((match[1], type(child)), []).append(name)
        found = {name for names in groups.values() if len(names) > 1 for name in names}
        return {name for name in found if leaves or not self.leaf(weighty[name])}

    def leaf(self, module: nn.Module) -> bool:
        """Return whether at most one module of the subtree owns streamable weights."""
        return len(self.owners(module)) <= 1

    def nested(self, module: nn.Module) -> bool:
        """Return whether ``module`` or any module below it has children that repeat."""
        if id(module) not in self._nested:
            self._nested[id(module)] = not self.leaf(module) and (
                bool(self.repeats(module)) or any(map(self.nested, module.children()))
            )
        return self._nested[id(module)]

    def visit(self, module: nn.Module, name: str, *, top: bool = False) -> None:
        """Emit the children that repeat as blocks, at any depth, and emit the modules beside them as stem
        units.
        """
        repeats = self.repeats(module) or self.repeats(module, leaves=True)
        if not top and not repeats and not self.nested(module):
            self.emit(module, name, "stem")
            return
        if top and self.leaf(module):
            self.emit(module, name, "stem")
            return
        self.loose(module, name)
        for child_name, child in module.named_children():
            if not self.bytes(child):
                continue
            path = f"{name}.{child_name}" if name else child_name
            if child_name in repeats and not (self.nested(child) and self.bytes(child) * 8 > self.total):
                self.emit(child, path, "block")
            else:
                self.visit(child, path)

    def emit(self, module: nn.Module, name: str, kind: str) -> None:
        """Add one unit for the whole subtree of ``module``, or units for its parts if it is too large or a
        finer granularity was asked for.
        """
        size = self.bytes(module)
        too_large = self.limit is not None and size > self.limit and self.granularity != "block"
        finer = self.granularity == "layer" or (self.granularity == "phase" and kind in ("block", "stem"))
        # A module that owns large weights beside its children's (attention with fused projections) uses all
        # of them together. So a module whose own weights are more than a quarter of its bytes is not split.
        own = sum(-(-e.nbytes // self.align) * self.align for e in self._own.get(id(module), ()))
        whole = self.leaf(module) or own * 4 > size
        if (too_large or finer) and not whole:
            self.split_bytes = max(self.split_bytes, size)
            self.loose(module, name)
            part = "phase" if kind in ("block", "stem") else "layer"
            for child_name, child in module.named_children():
                if self.bytes(child):
                    self.emit(child, f"{name}.{child_name}" if name else child_name, part)
            return
        unit = Unit(name or type(module).__name__, kind, self.run(module), align=self.align)
        for owner in self.owners(module):
            for entry in self._own[owner]:
                self.take(entry, unit)
        self.units.append(unit)

    def run(self, module: nn.Module) -> list[nn.Module]:
        """Return the outermost modules of a subtree that have weights and a forward of their own.

        A ModuleList or ModuleDict has no forward, so its children are returned. A container without a forward
        that owns weights itself (a ParameterList) is returned too: operators use its weights.
        """
        runs = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
        if runs or self._own.get(id(module)):
            return [module]
        return [part for child in module.children() if self.bytes(child) for part in self.run(child)]

    def loose(self, module: nn.Module, name: str) -> None:
        """Add a unit of kind "loose" for each weight that ``module`` itself owns, where ``module`` is split
        into parts.

        No module's forward is assigned to such a unit, because the forward of ``module`` contains those of
        all its parts.
        """
        for entry in self._own.get(id(module), ()):
            unit = Unit(entry.name, "loose", [], align=self.align)
            self.take(entry, unit)
            self.units.append(unit)

    def take(self, entry: Entry, unit: Unit) -> None:
        """Add ``entry`` to ``unit``, unless the unit has it. If another unit has the entry already, record that the
        tensor is tied (shared).
        """
        owner = self._taken.get(id(entry))
        if owner is None:
            self._taken[id(entry)] = unit
            unit.add(entry)
        elif owner is not unit:
            self._tied.append((entry, unit))

    def share_tied(self) -> None:
        """Move the tensors that several units share to units of their own, which all modules that own the tensors use.

        Tensors with the same owners are one unit, because a forward of an owner uses all of them at once.
        """
        shared: dict[frozenset[int], Unit] = {}
        for entry in {id(entry): entry for entry, _ in self._tied}.values():
            first = self._taken[id(entry)]
            rest = [e for e in first.entries if e is not entry]
            first.entries, first.nbytes, first.raw_bytes = [], 0, 0
            for other in rest:
                first.add(other)
            owners = {id(site.module): site.module for site in entry.sites}
            unit = shared.get(frozenset(owners))
            if unit is None:
                unit = shared[frozenset(owners)] = Unit(
                    entry.name, "stem", list(owners.values()), align=self.align
                )
                self.units.append(unit)
            unit.add(entry)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements fill one range of memory without overlaps or gaps, in any order of
    dimensions.
    """
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
