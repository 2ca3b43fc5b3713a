"""The simulated device: streams, events and a clock over CPU tensors, to test what no GPU test can.

Kernels run when they are issued; copies land as late ("late"), as early ("early") or as arbitrarily
("random") as the events allow, so a missing wait reads poison. Every slot read and every overwrite is
also checked against happens-before (vector clocks over the streams), which finds a missing wait under
any timing. Freed slots are filled with NaN. While a step computes, a dispatch mode raises when an
operator computes with the host copy of a streamed weight: nothing passes because host and device are
one memory. The clock is virtual: copies take latency + bytes / link, operators take flops / rate.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .auto import Memory
from .errors import CaromError, UnsupportedError
from .plain_engine import host_alias, host_memory_at
from .slots import ALIGN
from .store.arena import Pinner
from .watched import Watched

_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.empty_like.default}


class SimulatedRaceError(CaromError):
    """An access that some legal timing of a real device would have made wrong."""


@dataclass(eq=False)
class Ledger:
    """What sessions on one imagined device have in common: bytes that they and other programs hold."""

    allocated: int = 0
    others: int = 0


@dataclass(frozen=True)
class SimulatedDevice:
    """Pass as ``device=``. Rates are of the imagined hardware: bytes/s, seconds, flops/s.

    ``refuse_pinning`` imagines a system without pinned memory, ``memory_bytes`` its memory, ``activation_bytes`` what
    a step needs of it beside the weights; ``unpacks``: its unpacking is taken to be faster than its link.
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
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.timing not in ("late", "early", "random"):
            raise UnsupportedError(f"timing={self.timing!r}: choose 'late', 'early' or 'random'")


@dataclass
class _Stream:
    name: str
    clock: float = 0.0
    issued: int = 0
    seen: dict[str, int] = field(default_factory=dict)  # stream -> how much of it happened before


@dataclass(frozen=True)
class _Event:
    stream: str
    time: float
    seen: dict[str, int]


@dataclass
class _Copy:
    number: int
    target: torch.Tensor
    source: torch.Tensor


@dataclass
class _Decoding:
    number: int
    target: torch.Tensor
    wire: torch.Tensor
    decoder: Any
    copied: int  # the copy it comes after


class SimulatedEngine(Watched):
    """An `Engine` over CPU tensors. Also counts what crossed, for tests: ``copies`` and ``bytes_in``."""

    blocking = False
    grain = ALIGN

    def __init__(self, config: SimulatedDevice) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device("cpu")
        self.name = f"simulated({config.timing}, seed={config.seed})"
        self.pinner: Pinner | None = Pinner(self._register, lambda address: None)
        self.copies = 0
        self.bytes_in = 0
        self._random = random.Random(config.seed)
        self._streams = {name: _Stream(name) for name in ("compute", "in", "out", "decode")}
        self._pending: list[_Copy] = []
        self._undecoded: list[_Decoding] = []
        self.unpacks = config.unpacks
        self._landed = 0  # the number of the last copy whose bytes are there
        self._reads: dict[tuple[int, int, str], int] = {}
        self._regions: list[tuple[int, int]] = []
        self._guarded: dict[int, tuple[int, int, str]] = {}
        self.ledger = config.ledger
        self.allocated = 0  # of it by this engine
        self.activations = config.activation_bytes
        self._cached = 0  # activations of steps so far, kept by the allocator
        self._ooms = 0

    def _register(self, address: int, size: int) -> str | None:
        return "the simulated system pins nothing" if self.config.refuse_pinning else None

    # -- memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._need(nbytes)
        with self.unwatched(), torch.inference_mode(False):
            buffer = torch.full((nbytes,), 255, dtype=torch.uint8, device=self.device)
        self._regions.append((buffer.data_ptr(), buffer.data_ptr() + nbytes))
        self.allocated += nbytes
        self.ledger.allocated += nbytes
        weakref.finalize(buffer, self._released, nbytes)
        return buffer

    def _released(self, nbytes: int) -> None:
        self.allocated -= nbytes
        self.ledger.allocated -= nbytes

    def _need(self, nbytes: int) -> None:
        free = self.config.memory_bytes - self.ledger.allocated - self.ledger.others
        if nbytes > free:
            self._ooms += 1
            raise torch.OutOfMemoryError(
                f"simulated: {nbytes} bytes are needed and {max(0, free)} of {self.config.memory_bytes} are free"
            )

    def alias(self, buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        return host_alias(buffer, offset, nbytes)

    def at(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        self._regions.append((address, address + nbytes))
        return host_memory_at(address, nbytes, owner)

    def mapped(self, data: torch.Tensor, pinned: bool) -> torch.Tensor | None:
        with self.unwatched(), torch.inference_mode(False):
            return data.clone() if pinned else None

    def guard(self, data: torch.Tensor, name: str) -> None:
        """Operators that compute with these host bytes during a step raise."""
        self._guarded[data.data_ptr()] = (data.data_ptr(), data.data_ptr() + data.numel(), name)

    def unguard(self, data: torch.Tensor) -> None:
        self._guarded.pop(data.data_ptr(), None)

    def free_bytes(self) -> int:
        return max(0, self.config.memory_bytes - self.ledger.allocated - self.ledger.others)

    def memory(self) -> Memory:
        return Memory(
            self.config.memory_bytes, max(0, self.free_bytes() - self._cached), self._cached, self._ooms
        )

    def trim(self) -> None:
        self._cached = 0

    # -- streams and events

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        stream = self._streams["in"]
        for event in after:
            self._merge(stream, event)
        self._check_overwrite(target, stream)
        started = self._event(stream)
        stream.clock += self.config.copy_latency_seconds + source.numel() / self.config.link_bytes_per_second
        stream.issued += 1
        self.copies += 1
        self.bytes_in += source.numel()
        self._pending.append(_Copy(stream.issued, target, source))
        done = self._event(stream)
        with self.unwatched():
            target.fill_(255)  # bytes in flight are worth nothing yet
            if self.config.timing == "early" or (
                self.config.timing == "random" and self._random.random() < 0.5
            ):
                self._land(stream.issued)
        return done, (started, done)

    def decode(
        self, decoder: Any, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        stream = self._streams["decode"]
        for event in after:
            self._merge(stream, event, land=False)
        low, high = wire.data_ptr(), wire.data_ptr() + wire.numel()
        for copy in self._pending:
            start = copy.target.data_ptr()
            if low < start + copy.target.numel() and start < high and copy.number > stream.seen.get("in", 0):
                raise SimulatedRaceError(
                    "packed bytes are decoded before the event of the copy that brings them"
                )
        self._check_overwrite(target, stream)
        started = self._event(stream)
        stream.clock += self.config.kernel_seconds + target.numel() / self.config.decode_bytes_per_second
        stream.issued += 1
        self._reads[(low, high, "decode")] = stream.issued
        self._undecoded.append(_Decoding(stream.issued, target, wire, decoder, stream.seen.get("in", 0)))
        with self.unwatched():
            target.fill_(255)
            if self.config.timing == "early" or (
                self.config.timing == "random" and self._random.random() < 0.5
            ):
                self._decode(stream.issued)
        return self._event(stream), (started, self._event(stream))

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> _Event:
        out, compute = self._streams["out"], self._streams["compute"]
        self._merge(out, self._event(compute))
        out.clock += self.config.copy_latency_seconds + source.numel() * source.element_size() / (
            self.config.link_bytes_per_second
        )
        out.issued += 1
        with self.unwatched():
            target.copy_(source)
        return self._event(out)

    def stream(self) -> str:
        return "compute"

    def record(self, stream: Any, event: Any = None) -> _Event:
        self._some_land()
        return self._event(self._streams[stream])

    def mark(self) -> _Event:
        return self._event(self._streams["compute"])

    def wait(self, event: _Event) -> None:
        self._merge(self._streams["compute"], event)

    def done(self, mark: _Event) -> bool:
        return True

    def landed(self, copied: _Event) -> bool:
        return copied.seen.get("in", 0) <= self._landed

    def synchronize(self, event: _Event | None = None) -> None:
        for stream in self._streams.values():
            for other in [event] if event is not None else [self._event(s) for s in self._streams.values()]:
                self._merge(stream, other)

    def elapsed(self, first: _Event, last: _Event) -> float:
        return last.time - first.time

    def _event(self, stream: _Stream) -> _Event:
        return _Event(stream.name, stream.clock, {**stream.seen, stream.name: stream.issued})

    def _merge(self, stream: _Stream, event: _Event, land: bool = True) -> None:
        stream.clock = max(stream.clock, event.time)
        for name, count in event.seen.items():
            stream.seen[name] = max(stream.seen.get(name, 0), count)
        if land:  # a stream that comes after nobody sees yet may as well come later
            with self.unwatched():
                self._land(event.seen.get("in", 0))
                self._decode(event.seen.get("decode", 0))

    def _decode(self, up_to: int) -> None:
        while self._undecoded and self._undecoded[0].number <= up_to:
            decoding = self._undecoded.pop(0)
            self._land(decoding.copied)
            decoding.decoder(decoding.wire, decoding.target)

    def _land(self, up_to: int) -> None:
        while self._pending and self._pending[0].number <= up_to:
            copy = self._pending.pop(0)
            copy.target.copy_(copy.source)
            self._landed = copy.number  # last: threads that fill host memory ask for it

    def _some_land(self) -> None:
        if self.config.timing == "random" and self._pending and self._random.random() < 0.5:
            with self.unwatched():
                self._land(self._pending[0].number)

    # -- what may be read and overwritten

    def freed(self, memory: torch.Tensor, start: int, end: int) -> None:
        with self.unwatched():
            memory[start:end].fill_(255)

    def read(self, target: torch.Tensor) -> None:
        low = target.data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
        high = low + (reach + 1) * target.element_size()
        for target in [f.target for f in self._pending] + [f.target for f in self._undecoded]:
            start = target.data_ptr()
            if low < start + target.numel() and start < high:
                raise SimulatedRaceError("a slot is read before the event of the copy that fills it")
        compute = self._streams["compute"]
        compute.issued += 1
        self._reads[(low, high, "compute")] = compute.issued

    def _check_overwrite(self, target: torch.Tensor, stream: _Stream) -> None:
        low, high = target.data_ptr(), target.data_ptr() + target.numel()
        for (start, end, name), count in list(self._reads.items()):
            if low < end and start < high:
                if stream.seen.get(name, 0) < count:
                    raise SimulatedRaceError(
                        "a slot is overwritten before the event of the last kernel that reads it"
                    )
                del self._reads[(start, end, name)]

    # -- what operators may compute with, and what they take

    def _operator(self, func: Any, tensors: list[torch.Tensor]) -> None:
        view = func.is_view
        for index, tensor in enumerate(tensors):
            low = tensor.data_ptr()
            for start, end, name in list(self._guarded.values()):  # another thread may attach or close
                # Views and copies compute nothing; a first argument that is written in place is a host write.
                harmless = view or func in _COPIES or (index == 0 and func._schema.is_mutable)
                if start <= low < end and not harmless:
                    raise SimulatedRaceError(
                        f"{func} computes with the host copy of {name}, which is streamed, instead of its slot"
                    )
            if not view and tensor.numel() and any(start <= low < end for start, end in self._regions):
                self.read(tensor)

    def _spend(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        from torch.utils.flop_counter import flop_registry

        count = flop_registry.get(func._overloadpacket)
        seconds = self.config.kernel_seconds
        if count is not None:
            with contextlib.suppress(Exception):  # a formula that does not fit a call costs a kernel, no more
                seconds = max(seconds, count(*args, **kwargs, out_val=result) / self.config.flops)
        self._streams["compute"].clock += seconds
        if self.activations:
            self._need(self.activations)
            self._cached = max(self._cached, self.activations)
