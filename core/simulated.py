"""The simulated device: streams, events and a clock over CPU tensors, to test what no GPU test can.

It runs the engine of any accelerator's streams (`StreamEngine`) on virtual ones. Kernels run when they are issued;
copies land as late ("late"), as early ("early") or as arbitrarily ("random") as the events allow, so a missing wait
reads poison. Every slot read and every overwrite is also checked against happens-before (vector clocks over the
streams), which finds a missing wait under any timing. Freed slots are filled with NaN. Every tensor lives on the device
or on the host, or nobody knows: while a step computes, a dispatch mode raises when an operator mixes the two, or
computes with the host copy of a streamed weight. The clock is virtual: copies take latency + bytes / link, operators
take flops / rate.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .auto import Memory
from .errors import CaromError, UnsupportedError
from .plain_engine import host_alias, host_memory_at
from .simulated_memory import LOCATION, Places, Ranges, Reserve, Tag
from .simulated_streams import CURRENT, Kept, VirtualDevice
from .slots import ALIGN
from .store.arena import Pinner
from .transfer import StreamEngine
from .watched import Watched

_COPY = torch.ops.aten.copy_.default
_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.empty_like.default}


class SimulatedRaceError(CaromError):
    """An access that some legal timing of a real device would have made wrong."""


class SimulatedPlaceError(CaromError):
    """An operator or a copy that has a tensor on the host where it needs it on the device, or the other way round."""


@dataclass(eq=False)
class Ledger:
    """What sessions on one imagined device have in common: bytes that they and other programs hold."""

    allocated: int = 0
    others: int = 0
    places: Places = field(default_factory=Places, repr=False)


@dataclass(frozen=True)
class SimulatedDevice:
    """Pass as ``device=``. Rates are of the imagined hardware: bytes/s, seconds, flops/s.

    ``refuse_pinning`` imagines a system without pinned memory, ``memory_bytes`` its memory, ``activation_bytes`` what
    a step needs of it beside the weights; ``unpacks``: its unpacking is taken to be faster than its link;
    ``integrated``: it computes in the host's memory.
    """

    seed: int = 0
    timing: str = "late"
    link_bytes_per_second: float = 25e9
    copy_latency_seconds: float = 10e-6
    flops: float = 50e12
    kernel_seconds: float = 2e-6
    memory_bytes: int = 1 << 34
    decode_bytes_per_second: float = 1.5e12
    refuse_pinning: bool = False
    activation_bytes: int = 0
    unpacks: bool = False
    integrated: bool = False
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.timing not in ("late", "early", "random"):
            raise UnsupportedError(f"timing={self.timing!r}: choose 'late', 'early' or 'random'")

    @contextlib.contextmanager
    def stream(self, index: int) -> Iterator[None]:
        """What this thread computes inside is given to another stream (0 is the one outside)."""
        before, CURRENT.index = CURRENT.index, index
        try:
            yield
        finally:
            CURRENT.index = before

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor that lives on the device."""
        return self.ledger.places.copy_of(tensor, True)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lives on the device."""
        return self.ledger.places.on_device(tensor)


class SimulatedEngine(Watched, StreamEngine):
    """An `Engine` over CPU tensors. Also counts what crossed, for tests: ``copies`` and ``bytes_in``, and what a caching
    allocator would have of the device: ``reserve``."""

    grain = ALIGN
    location = LOCATION
    virtual_clock = True

    def __init__(self, config: SimulatedDevice) -> None:
        Watched.__init__(self)
        device = VirtualDevice(config.timing, config.seed, self.unwatched)
        self.config, self._virtual = config, device
        StreamEngine.__init__(self, torch.device("cpu"), device)
        self.device = torch.device("cpu")
        self.name = f"simulated({config.timing}, seed={config.seed})"
        self.pinner: Pinner | None = Pinner(self._register, self._unregister)
        self.copies = 0
        self.bytes_in = 0
        self.unpacks = config.unpacks
        # What is decoded or copied out nobody sees yet: waiting for something, it may as well come later.
        self._decode.lands = self._out.lands = False
        self._streams = {
            "compute": device.computing(0), "in": self._in, "out": self._out, "decode": self._decode
        }  # fmt: skip
        self.ledger = config.ledger
        self._places = config.ledger.places
        self._guarded, self._pinned = Ranges(), Ranges()
        self.reserve = Reserve()
        self.allocated = 0  # of the ledger's bytes by this engine
        self.activations = config.activation_bytes
        self._cached = 0  # activations of steps so far, kept by the allocator
        self._ooms = 0
        self._leaving: Kept | None = None  # what the last copy to the host reads

    def _integrated(self) -> bool:
        return self.config.integrated

    def _register(self, address: int, size: int) -> str | None:
        if self.config.refuse_pinning:
            return "the simulated system pins nothing"
        self._pinned.add(address, size, Tag(False, "pinned memory"))
        return None

    def _unregister(self, address: int) -> None:
        self._pinned.remove(address)

    # -- memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._need(nbytes)
        with self.unwatched(), torch.inference_mode(False):
            buffer = torch.full((nbytes,), 255, dtype=torch.uint8, device=self.device)
        self.allocated += nbytes
        self.ledger.allocated += nbytes
        weakref.finalize(buffer, self._released, nbytes, self.reserve.take(nbytes))
        return self._memory(buffer)

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self._places.tag(tensor, Tag(True, "device memory", slots=True))
        return tensor

    def _released(self, nbytes: int, segment: int) -> None:
        self.allocated -= nbytes
        self.ledger.allocated -= nbytes
        self.reserve.give_up(segment)

    def _need(self, nbytes: int) -> None:
        free = self.config.memory_bytes - self.ledger.allocated - self.ledger.others
        if nbytes > free:
            self._ooms += 1
            raise torch.OutOfMemoryError(
                f"simulated: {nbytes} bytes are needed and {max(0, free)} of {self.config.memory_bytes} are free"
            )

    def alias(self, buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        return self._memory(host_alias(buffer, offset, nbytes))

    def at(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        return self._memory(host_memory_at(address, nbytes, owner))

    def locate(self, tensor: torch.Tensor) -> torch.device:
        return LOCATION if self._places.on_device(tensor) else tensor.device

    def move(self, tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
        """Not counted in the ledger: as activations are not."""
        if self.locate(tensor) == to:
            return tensor
        with self.unwatched():
            return self._places.copy_of(tensor, to == LOCATION)

    def mapped(self, data: torch.Tensor, pinned: bool) -> torch.Tensor | None:
        with self.unwatched(), torch.inference_mode(False):
            if not pinned:
                return None
            found = data.clone()
            self._places.tag(found, Tag(True, "host memory that the device addresses"))
            return found

    def guard(self, data: torch.Tensor, name: str) -> None:
        """Operators that compute with these host bytes during a step raise."""
        self._guarded.add(data.data_ptr(), data.numel(), Tag(False, f"the host copy of {name}", guarded=True))

    def unguard(self, data: torch.Tensor) -> None:
        self._guarded.remove(data.data_ptr())

    def belongs_to_host(self, tensor: torch.Tensor, name: str) -> None:
        """A module's tensor, as it was before a session had it."""
        self._places.belongs_to_host(tensor, name)

    def free_bytes(self) -> int:
        return max(0, self.config.memory_bytes - self.ledger.allocated - self.ledger.others)

    def memory(self) -> Memory:
        return Memory(
            self.config.memory_bytes, max(0, self.free_bytes() - self._cached), self._cached, self._ooms
        )

    def trim(self) -> None:
        self._cached = 0
        self.reserve.trim()

    # -- streams and events

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        return super().copy_in(target, source, after, True)

    def decode(
        self, decoder: Any, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        return super().decode(decoder, wire, target, after, True)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Bytes to the device, or a tensor to the host."""
        inward = stream is self._in
        place, origin = self._side(target), self._side(source)
        device, host = (place, origin) if inward else (origin, place)
        if (device is not None and not device.device) or (host is not None and host.device):
            raise SimulatedPlaceError(
                f"a copy {'to' if inward else 'from'} the device mixes up its ends: from "
                f"{_described(source, origin)} to {_described(target, place)}"
            )
        nbytes = source.numel() * source.element_size()
        if inward:
            self.copies += 1
            self.bytes_in += nbytes
            self._overwrites(stream, target)
        with self.unwatched(), torch.no_grad():
            if inward or target.is_floating_point():  # bytes in flight are worth nothing yet
                target.fill_(255 if inward else float("nan"))
        kept = Kept(source)
        if not inward:
            self._leaving = kept
            computes, last = getattr(self._local, "last", (None, 0))  # of this thread
            if stream.seen.get(computes, 0) < last and computes is self.stream():
                raise SimulatedRaceError("a tensor is copied to the host before the kernels that make it")
            if origin is not None and origin.slots:
                self._virtual.accesses.read(*_reach(source), stream, ahead=1)

        def run() -> None:
            found = kept.take()
            if found is None:
                raise SimulatedRaceError("the memory that a copy reads was given up before the copy was done")
            with torch.no_grad():
                target.copy_(found)

        seconds = self.config.copy_latency_seconds + nbytes / self.config.link_bytes_per_second
        stream.issue(seconds, run)

    def _stays_for(self, tensor: torch.Tensor, stream: Any) -> None:
        if self._leaving is not None and self._leaving.holds(tensor):
            self._leaving.keep(tensor)

    def _on_stream(self, stream: Any, call: Any, *args: Any) -> None:
        """A decoder with its wire and its target: nothing else comes here."""
        wire, target = args
        self._overwrites(stream, target)
        with self.unwatched():
            target.fill_(255)
        seconds = self.config.kernel_seconds + target.numel() / self.config.decode_bytes_per_second
        if not self._virtual.accesses.read(*_reach(wire), stream, ahead=1):
            raise SimulatedRaceError("packed bytes are decoded before the event of the copy that brings them")
        stream.issue(seconds, lambda: call(wire, target))

    def record(self, stream: Any, event: Any = None) -> Any:
        if stream is not self._in and stream is not self._decode:
            self._virtual.some_land()
        return super().record(stream, event)

    def done(self, mark: Any) -> bool:
        return True

    def elapsed(self, first: Any, last: Any) -> float:
        return last.time - first.time

    # -- what may be read and overwritten

    def freed(self, memory: torch.Tensor, start: int, end: int) -> None:
        with self.unwatched():
            memory[start:end].fill_(255)

    def read(self, target: torch.Tensor) -> None:
        stream = self.stream()
        self._local.last = stream, stream.ran()
        if not self._virtual.accesses.read(*_reach(target), stream):
            raise SimulatedRaceError("a slot is read before the event of the copy that fills it")

    def _overwrites(self, stream: Any, target: torch.Tensor) -> None:
        if not self._virtual.accesses.write(target.data_ptr(), target.data_ptr() + target.numel(), stream):
            raise SimulatedRaceError(
                "a slot is overwritten before the event of the last kernel that reads it"
            )

    # -- what operators may compute with, and what they take

    def _side(self, tensor: torch.Tensor) -> Tag | None:
        """What is known of where a tensor lives."""
        found = self._places.of(tensor)
        if found is None:
            address = tensor.data_ptr()
            found = self._guarded.find(address) or self._pinned.find(address)
        return found

    def _operator(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        view = func.is_view
        here: tuple[torch.Tensor, Tag] | None = None
        there: tuple[torch.Tensor, Tag] | None = None
        for index, tensor in enumerate(tensors):
            tag = self._side(tensor)
            if tag is None:
                continue
            if tag.device:
                here = here or (tensor, tag)
                if tag.slots and not view and tensor.numel():
                    self.read(tensor)
            elif tag.guarded:
                # Views and copies compute nothing; a first argument that is written in place is a host write.
                harmless = view or func in _COPIES or (index == 0 and func._schema.is_mutable)
                if not harmless:
                    raise SimulatedRaceError(
                        f"{func} computes with {tag.what}, which is streamed, instead of its slot"
                    )
            elif tensor.dim():  # (numbers may mix)
                there = there or (tensor, tag)
        if here is not None and there is not None and not view and func is not _COPY:
            raise SimulatedPlaceError(f"{func} mixes {_described(*here)} with {_described(*there)}")
        return here is not None

    def _spend(self, func: Any, args: Any, kwargs: Any, result: Any, on_device: bool) -> None:
        if on_device:
            self._places.made(func, result)
        count = _formulas().get(func._overloadpacket)
        seconds = self.config.kernel_seconds
        if count is not None:
            with contextlib.suppress(Exception):  # a formula that does not fit a call costs a kernel, no more
                seconds = max(seconds, count(*args, **kwargs, out_val=result) / self.config.flops)
        self.stream().clock += seconds
        if self.activations:
            self._need(self.activations)
            self._cached = max(self._cached, self.activations)


@functools.cache
def _formulas() -> Any:
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its elements."""
    low = tensor.data_ptr()
    if tensor.is_contiguous():
        return low, low + tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (reach + 1) * tensor.element_size()


def _described(tensor: torch.Tensor, tag: Tag | None) -> str:
    where = "" if tag is None else f" ({tag.what}) on the {'device' if tag.device else 'host'}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{where}"
