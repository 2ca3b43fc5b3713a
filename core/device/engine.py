"""`Engine`: the protocol by which the streamer asks a device to allocate, copy, decode and order work.

The streamer (core/streaming) copies weights from host memory to *slots*, which are ranges of device memory that
one unit (a module) after another uses. Packed weights reach the device as a *wire*, the packed bytes of a unit,
and are decoded into a slot. A *mark* is a recorded time on a stream.

An engine owns the copy streams and creates events. An engine knows nothing of units. `StreamEngine`
(stream_engine.py) serves any accelerator with torch streams. `RuntimeEngine` (cuda_runtime.py) makes its
calls cheaper on CUDA and ROCm. `PlainEngine` (cpu_engine.py) serves the CPU and accelerators without streams.
`SimulatedEngine` (simulated.py) is for tests. `make_engine` chooses among them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..common.errors import UnsupportedError
from ..common.memory_snapshot import Memory
from ..host.arena import Pinner
from .peer_link import PeerLink


class Decoder(Protocol):
    """Interface of an object that unpacks one unit on the device: `codec.unit_decoder.UnitDecoder`."""

    # (bytes, offset in the wire, offset in the target) of each unpacked tensor that the launches of
    # `cached_launches` do not copy.
    raw_copies: Sequence[tuple[int, int, int]]

    def __call__(self, wire: torch.Tensor, target: torch.Tensor, /) -> None:
        """Unpack ``wire`` into ``target``, both uint8 tensors on the device, on the current stream."""

    def cached_launches(
        self, wire: torch.Tensor, target: torch.Tensor, /
    ) -> Sequence[Callable[..., Any]] | None:
        """Return the kernel launches that unpack ``wire`` into ``target``, or None if no earlier call cached
        launches that fit these buffers.

        Each launch takes the raw handle of a stream as ``stream``.
        """


class Engine(Protocol):
    """Interface of a device for the streamer.

    Events are opaque: only the engine that created an event can interpret it.
    """

    device: torch.device
    name: str
    pinner: Pinner | None
    blocking: bool  # whether a copy is done when the call returns
    grain: int  # bytes; the device's allocator rounds large buffers up to a multiple of it
    shares_host: bool  # whether the device computes in host memory, so that its allocations reduce the host's
    virtual_clock: bool  # whether the times of marks are simulated
    host_on_clock: (
        bool  # whether the times of marks contain the seconds in which the device waits for the host
    )
    decode_bytes_per_second: float | None  # unpacked bytes per second, if known without measuring
    # Whether `memory` also counts device memory that is not the allocator's, such as VBAR pages.
    counts_all_memory: bool
    watches_slots: bool  # whether `freed` and `read` do anything; else they need not be called

    @property
    def unpacks(self) -> bool:
        """Whether unpacking on the device is faster than copying unpacked weights over the link."""

    @property
    def decodes_files(self) -> bool:
        """Whether quantised (k-bit) weights of a file may be copied packed, even if that is no faster."""

    @property
    def decodes_lossless_files(self) -> bool:
        """Whether losslessly packed weights of a file may be copied packed too; only where `decodes_files`."""

    @property
    def place(self) -> Hashable:
        """A hashable name of the device, equal for engines that share its memory."""

    @property
    def location(self) -> torch.device:
        """The value that `locate` returns for a tensor on the device."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised device memory as a uint8 tensor of ``nbytes``."""

    def alias(self, buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        """Return ``buffer[offset:offset+nbytes]``, with a storage of its own where possible, so that its uses
        can be counted.
        """

    def at(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        """Return device memory at ``address`` that is not from torch's allocator, as a uint8 tensor.

        Every tensor over this memory keeps ``owner`` alive.
        """

    def locate(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor is on; on the simulated device this is not ``tensor.device``."""

    def move(self, tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
        """Return the tensor's values on ``to``, a device as `locate` returns it; the tensor itself if it is on
        ``to`` already.
        """

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Copy from host to device on the copy stream, after the events ``after``.

        Returns the event of the copy's end, and if ``timed`` the marks of its begin and end, else None.
        """

    def decode(
        self, decoder: Decoder, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        """Unpack ``wire`` into ``target`` (both on the device) on the decode stream.

        Returns the event of the decoding's end and the marks, as `copy_in` does for a copy.
        """

    def connect(self, peer: Engine) -> PeerLink:
        """Return a link for copies from the memory of the device of ``peer`` to this device.

        Raises UnsupportedError if the devices cannot be connected.
        """

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy from device to host after all work issued so far on the current stream; return the event of
        the copy's end.
        """

    def stream(self) -> Any:
        """Return the stream (hashable) that the current thread computes on."""

    def record(self, stream: Any, event: Any = None) -> Any:
        """Return an event after all work issued so far on ``stream``; if ``event`` is given, record that
        event again.
        """

    def mark(self) -> Any:
        """Record a time on the current stream; `elapsed` reads it once it is `done`."""

    def wait(self, event: Any) -> None:
        """Let later work on the current stream wait for ``event``, without blocking the host."""

    def done(self, mark: Any) -> bool:
        """Return whether a mark has been reached."""

    def hold(self, seconds: float) -> None:
        """Let the current stream wait for about ``seconds``, so that the host issues work ahead. Does nothing on devices
        that cannot.
        """

    def landed(self, copied: Any) -> bool:
        """Return whether a copy's end event has been reached, so that its host memory may be overwritten.

        Any thread may call this.
        """

    def synchronize(self, event: Any = None) -> None:
        """Block the host until ``event`` is reached, or without an event until the device is idle."""

    def elapsed(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks that have been reached."""

    def freed(self, memory: torch.Tensor, start: int, end: int) -> None:
        """Note that bytes ``start`` to ``end`` of ``memory`` are unused now; the simulated device overwrites
        them with NaN.
        """

    def read(self, target: torch.Tensor) -> None:
        """Note that the current stream is about to read the slot ``target``; the simulated device checks that
        the stream has waited for the copy that fills the slot.
        """

    def step(self) -> AbstractContextManager:
        """Return a context to hold while a step computes; the simulated device watches the operators in it."""

    def free_bytes(self) -> int:
        """Return the bytes of device memory that could be allocated now."""

    def memory(self) -> Memory | None:
        """Return a snapshot of the device's memory; None if the engine computes in host memory."""

    def trim(self) -> None:
        """Give the allocator's unused memory back to the device."""

    def belongs_to_host(self, tensor: torch.Tensor, name: str) -> None:
        """Note that the module's tensor called ``name`` is on the host; the simulated device tracks where
        tensors are.
        """

    def guard(self, data: torch.Tensor, name: str) -> None:
        """Make operators raise if they read the host bytes ``data`` during a step; ``name`` is for the error.

        Engines of real devices do not watch operators and do nothing.
        """

    def unguard(self, data: torch.Tensor) -> None:
        """Let operators read the host bytes ``data`` again, after a call of `guard`."""


class DefaultEngine:
    """Base class of the engines of real devices, with the implementations that most of them share."""

    unpacks = False
    shares_host = False
    virtual_clock = False
    host_on_clock = True
    decodes_files = False
    decodes_lossless_files = False
    decode_bytes_per_second: float | None = None
    counts_all_memory = watches_slots = False
    device: torch.device
    name: str

    @property
    def place(self) -> Hashable:
        return self.name

    def belongs_to_host(self, tensor: torch.Tensor, name: str) -> None:
        pass

    def guard(self, data: torch.Tensor, name: str) -> None:
        pass

    def unguard(self, data: torch.Tensor) -> None:
        pass

    def connect(self, peer: Engine) -> PeerLink:
        raise UnsupportedError(
            f"peers=: {self.name} has no streams, and cannot copy weights from another device; leave peers= out"
        )

    @property
    def location(self) -> torch.device:
        return self.device

    def locate(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device

    def move(self, tensor: torch.Tensor, to: torch.device) -> torch.Tensor:
        return tensor.to(to)

    def freed(self, memory: torch.Tensor, start: int, end: int) -> None:
        pass

    def read(self, target: torch.Tensor) -> None:
        pass

    def step(self) -> AbstractContextManager:
        return contextlib.nullcontext()

    def hold(self, seconds: float) -> None:
        pass


use_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # of a storage's address, see `storage_uses`


def storage_uses(tensor: torch.Tensor) -> int | None:
    """Return the number of references to ``tensor``'s storage, from tensors and from Python; None if torch
    cannot tell.

    The number is meaningful only in comparison with an earlier one.
    """
    if use_count is None:
        return None
    storage = tensor.untyped_storage()
    return use_count(storage._cdata) + sys.getrefcount(storage)
