"""What a streamed unit is at run time: its host bytes, its tensors' owners, its views in the region's slots."""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .codec.unit import UnitDecoder
from .deliver import call_when_landed
from .errors import UnsupportedError
from .made_once import Around, alone
from .slots import Slot
from .store.arena import Block
from .transfer import storage_uses
from .units import Entry, Unit
from .wrapped import is_inner

if TYPE_CHECKING:
    from .landing import Buffer
    from .streamer import Streamer

_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_VIEW_SETS = 64  # slot positions whose views a unit remembers


class Owner:
    """What a streamed host tensor leads to: its entry, its unit, its streamer."""

    __slots__ = (
        "streamer",
        "unit",
        "entry",
        "host",
        "tensor",
        "trainable",
        "landing",
        "sink",
        "sink_version",
        "_no_swap",
    )

    def __init__(self, streamer: Streamer, unit: Streamed, entry: Entry, host: torch.Tensor) -> None:
        self.streamer, self.unit, self.entry, self.host = streamer, unit, entry, host
        self.tensor = entry.tensor
        self.trainable = entry.trainable
        self.landing: list[Buffer] = []  # pinned host memory that gradients land in
        self._no_swap = weakref.ref(self.tensor)  # torch.utils.swap_tensors refuses what has weak references
        self.sink: torch.Tensor | None = (
            None  # `Deliver`'s result: what differentiable runs use as the weight
        )
        self.sink_version = 0  # of it, when the host's bytes were last made the same

    keeps_writes = True  # whether what the model writes to the weight can be kept

    def value(self) -> torch.Tensor:
        """What a state dict holds of it."""
        return self.host.detach()

    def read(self) -> torch.Tensor:
        """The true value on the CPU, not to be written to."""
        return self.host

    def keep(self, value: torch.Tensor) -> None:
        """The model has written ``value`` (on the CPU)."""
        self.host.copy_(value)

    def dress(self, view: torch.Tensor) -> None:
        """Give ``view``, which stands for the weight, the attributes that the model set on the weight."""
        view.__dict__.update(
            {name: value for name, value in self.tensor.__dict__.items() if name != "_carom"}
        )

    def set_trainable(self, trainable: bool) -> None:
        """``requires_grad`` was set: from the next run on its gradients go to the host, or no longer do."""
        self.trainable = trainable
        if trainable:
            call_when_landed(self.tensor)
        self.unit.trainable = any(owner.trainable for owner in self.unit.owners)

    def set_data(self, new: torch.Tensor) -> None:
        """``parameter.data = new`` while streamed: the host bytes change, their place does not.

        Raises UnsupportedError for another shape, dtype or device, and while a graph needs the old value.
        """
        streamer = self.streamer
        device = streamer.engine.device
        if (
            new.device == device
            and device.type != "cpu"
            and (new.shape, new.dtype) != (self.host.shape, self.host.dtype)
        ):
            return  # a submodule's .to moved and converted it
        if new.device.type not in ("cpu", device.type) or (new.shape, new.dtype) != (
            self.host.shape,
            self.host.dtype,
        ):
            raise UnsupportedError(
                f"{self.entry.name} is streamed as {self.host.dtype} {tuple(self.host.shape)}; it cannot become "
                f"{new.dtype} {tuple(new.shape)} on {new.device} while attached: close the session first"
            )
        if getattr(new, "_carom", None) is self or streamer.low <= new.data_ptr() < streamer.high:
            return  # a submodule's .to moved it to where it computes already: it stays streamed
        self.refuse_in_graphs()
        self.unit.epoch += 1
        if new.device.type != "cpu":
            new = new.cpu()
        if new.data_ptr() != self.host.data_ptr():
            with torch.no_grad():
                self.host.copy_(new)

    def refuse_in_graphs(self) -> None:
        """Raises UnsupportedError while an autograd graph still needs the value that is to be replaced."""
        if self.unit.in_graphs:
            raise UnsupportedError(
                f"{self.entry.name}.data is replaced while a graph that was made before still needs the old value: call "
                "backward() first, drop what keeps the graph, or run that forward under torch.no_grad()"
            )


class InGraphs:
    """Whether autograd graphs are left that will ask for a unit: each of their handles keeps the token alive."""

    __slots__ = ("_reference",)

    def __init__(self) -> None:
        self._reference: Callable[[], Any] = _nothing

    def token(self) -> Any:
        token = self._reference()
        if token is None:
            token = _Token()
            self._reference = weakref.ref(token)
        return token

    def __bool__(self) -> bool:
        return self._reference() is not None


class _Token:
    __slots__ = ("__weakref__",)


def _nothing() -> None:
    return None


def _references(owner: Any) -> tuple[int, int]:
    """How many references there are to an owner's sink: Python's, and all of torch's."""
    return sys.getrefcount(owner.sink), owner.sink._use_count()


class _StandIn:
    __slots__ = ("sink",)

    def __init__(self) -> None:
        self.sink = torch.zeros(1, requires_grad=True) * 1


_ALONE = _references(_StandIn())  # of a sink that only its owner has


@dataclass(eq=False)
class Views:
    """A unit's tensors at one position of the region, made once: ``tensors`` match the unit's owners."""

    base: torch.Tensor  # uint8, exactly the unit's bytes, where possible a storage of its own
    target: torch.Tensor  # the same for our copies: writing to it raises no version that autograd checks
    tensors: list[torch.Tensor]
    uses: int | None  # of the storage, when nobody but us holds it
    addresses: list[int] = field(default_factory=list)  # of the tensors, when made
    saved: dict[tuple, torch.Tensor] = field(default_factory=dict)  # views that autograd asked for, by place
    around: Around | None = None  # wrappers made of the tensors, where any are a quantised weight's
    kept_version: int = 0  # `version` when the host's bytes were last made the same

    @property
    def version(self) -> int:
        """Raised by every write of the model to any of the tensors (they share the counter)."""
        return self.base._version

    def moved(self) -> bool:
        """Whether a tensor's data was replaced."""
        return list(map(_address, self.tensors)) != self.addresses

    def written(self, owners: list[Owner]) -> bool:
        """Whether the model has written to any of the tensors since the host's bytes were the same."""
        if self.version != self.kept_version or self.moved():
            return True
        return any(owner.sink is not None and owner.sink._version != owner.sink_version for owner in owners)

    def view(self, place: tuple) -> torch.Tensor:
        """The view of a handle's place; the caller takes an alias of its own."""
        found = self.saved.get(place)
        if found is None:
            found = self.saved[place] = _view(self.base, place)
            if self.uses is not None:
                self.uses += _uses_of_a_view()
        return found

    def kept_elsewhere(self) -> bool:
        """Whether anybody else holds one of the tensors, or another tensor of their storage."""
        if self.uses is not None and (storage_uses(self.base) or 0) > self.uses:
            return True
        return not alone(self.tensors) if self.around is None else self.around.kept_elsewhere()


def _view(base: torch.Tensor, place: tuple) -> torch.Tensor:
    dtype, shape, stride, start = place
    with torch.inference_mode(False), torch.no_grad():
        typed = base.view(dtype)
        return typed.as_strided(shape, stride, typed.storage_offset() + start // typed.element_size())


@functools.cache
def _uses_of_a_view() -> int:
    """By how much a `_view` raises the count of its storage: measured where nobody else has the storage. In a slot autograd
    on another thread takes and drops views meanwhile, without Python's lock."""
    with _disable_current_modes():
        base = torch.zeros(16, dtype=torch.uint8, device="cpu")
        before = storage_uses(base) or 0
        made = _view(base, (torch.float32, (2,), (1,), 4))
        after = storage_uses(base) or 0
        del made
    return after - before


@dataclass(eq=False)
class Streamed:
    """A unit at run time."""

    streamer: Streamer
    unit: Unit
    index: int
    block: Block
    owners: list[Owner] = field(default_factory=list)
    slot: Slot | None = None
    views: OrderedDict[int, Views] = field(default_factory=OrderedDict)
    nbytes: int = 0  # aligned, as it lies in a slot
    depth: int = 0  # runs in progress: its slot views stand in the modules while above zero
    epoch: int = 0  # raised when the host bytes may have changed unseen
    trainable: bool = False
    sites: list[tuple[dict, str, int]] = field(default_factory=list)  # table, name, which owner
    standing: list[tuple[dict, str, Any, Any]] = field(default_factory=list)  # table, name, ours, the host's
    in_graphs: InGraphs = field(default_factory=InGraphs)
    packed: list[Any] = field(
        default_factory=list
    )  # of a unit that may be packed: PackedTensor or None by owner
    decoder: UnitDecoder | None = None  # of packed bytes, None where the host's bytes are the slot's
    wire: torch.Tensor | None = None  # its packed bytes on the device, where it stays there packed
    encoded: int | None = None  # the version that was packed, where weights keep their plain bytes besides
    differentiable: bool = False  # what stands carries gradients of trainable weights to the host

    @property
    def name(self) -> str:
        return self.unit.name

    def park_sinks(self) -> None:
        """Let the weights that differentiable runs use point nowhere; one that somebody keeps stays as it is."""
        for owner in self.owners:
            if owner.sink is None:
                continue
            if any(map(operator.gt, _references(owner), _ALONE)):
                owner.sink = None
            elif owner.sink.numel():
                owner.sink.data = torch.empty(0, dtype=owner.sink.dtype, device=owner.sink.device)

    @property
    def host(self) -> torch.Tensor:
        """The unit's bytes as they cross (uint8)."""
        return self.block.data

    def version(self) -> int:
        """Changes whenever torch sees the host tensors change."""
        version = self.epoch
        for owner in self.owners:
            version += owner.host._version
        return version

    def remember(self, offset: int, views: Views) -> None:
        """``views`` are the unit's in a slot at ``offset``; of many places, the one remembered longest is forgotten."""
        while len(self.views) >= _VIEW_SETS:
            oldest = next(iter(self.views))
            del self.views[oldest]
        self.views[offset] = views


def make_views(unit: Streamed, base: torch.Tensor) -> Views:
    """The unit's tensors in ``base``, its bytes in a slot. Outside inference mode, so that they serve training too."""
    with torch.inference_mode(False), torch.no_grad():
        tensors: list[torch.Tensor] = []
        for owner in unit.owners:
            entry = owner.entry
            piece = base[entry.offset : entry.offset + entry.nbytes].view(owner.host.dtype)
            view = piece.as_strided(owner.host.shape, owner.host.stride(), piece.storage_offset())
            is_parameter = isinstance(owner.tensor, nn.Parameter)
            tensors.append(nn.Parameter(view, requires_grad=False) if is_parameter else view)
            owner.dress(tensors[-1])
    del piece, view
    views = Views(
        base, base.data, tensors, storage_uses(base), addresses=[tensor.data_ptr() for tensor in tensors],
        kept_version=base._version,
    )  # fmt: skip
    if any(is_inner(owner.entry.name) for owner in unit.owners):
        views.around = Around(tensors)
    return views
