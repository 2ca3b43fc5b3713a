"""`SimulatedDevice`: a device with streams, events and a clock over CPU tensors, for tests that are impossible
on a real GPU.

`SimulatedEngine` is the `StreamEngine` of any accelerator with virtual streams. Kernels run when they are
issued. Copies take effect as late ("late"), as early ("early") or as arbitrarily ("random") as the events
allow, so a step with a missing wait reads NaN. A slot is a range of device memory that weights are copied to.
Every read and every overwrite of a slot is also checked against the happens-before order (by vector clocks over
the streams), which finds a missing wait under any timing. Freed slots are filled with NaN. A tensor is tagged
as being on the device or on the host, or has no tag. While a step computes, a dispatch mode raises when an
operator mixes the two, or computes with the host copy of a streamed weight. The clock is virtual: a copy takes
latency + bytes / link rate, an operator takes its flops / rate.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..common.errors import CaromError, UnsupportedError
from ..common.memory_snapshot import Memory
from ..host.arena import Pinner
from ..plan.region import ALIGN
from .cpu_engine import host_alias, host_memory_at
from .dispatch_watch import DispatchWatch
from .engine import Engine
from .peer_link import PeerLink
from .simulated_links import Links, SimulatedHost
from .simulated_memory import LOCATION, Places, Ranges, Reserve, Tag
from .simulated_streams import CURRENT, VirtualDevice, WeakTensor
from .stream_engine import StreamEngine

_COPY = torch.ops.aten.copy_.default
_ELSEWHERE = Tag(False, "memory of another device")
_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.empty_like.default}


class SimulatedRaceError(CaromError):
    """A memory access that would read or leave wrong bytes under some timing that is possible on a real
    device.
    """


class SimulatedPlaceError(CaromError):
    """An operator or copy got a tensor on the host where a tensor on the device is needed, or the reverse."""


@dataclass(eq=False)
class Ledger:
    """The memory accounts that sessions on one simulated device share.

    ``allocated``: bytes held by sessions. ``others``: bytes held by other programs.
    """

    allocated: int = 0
    others: int = 0
    places: Places = field(default_factory=Places, repr=False)


@dataclass(frozen=True)
class SimulatedDevice:
    """The settings of a simulated device; pass an instance as ``device=``. Rates are in bytes/s and flops/s,
    times in seconds.

    ``timing``: "late", "early" or "random", when copies take effect. ``refuse_pinning``: simulate a system
    without pinned memory. ``memory_bytes``: the device's memory. ``activation_bytes``: memory that a step
    needs beside the weights. ``unpacks``: whether decoding counts as faster than the link. ``integrated``:
    whether the device computes in host memory. ``host_seconds``: seconds that the host takes to issue an operator, a
    copy or a decoding; the device cannot begin it earlier. ``p2p``: whether the device reads the memory of other simulated
    devices directly, at ``peer_bytes_per_second``. ``host``: the host that several devices share.
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
    p2p: bool = True
    peer_bytes_per_second: float = 25e9
    host_seconds: float = 0.0
    host: SimulatedHost = field(default_factory=SimulatedHost, repr=False, compare=False)
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise UnsupportedError for an unknown ``timing``."""
        if self.timing not in ("late", "early", "random"):
            raise UnsupportedError(f"timing={self.timing!r}: choose 'late', 'early' or 'random'")

    @contextlib.contextmanager
    def stream(self, index: int) -> Iterator[None]:
        """Return a context in which this thread computes on the stream ``index``. Outside of such contexts,
        a thread computes on stream 0.
        """
        before, CURRENT.index = CURRENT.index, index
        try:
            yield
        finally:
            CURRENT.index = before

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor that is on the device."""
        return self.ledger.places.copy_of(tensor, True)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on the device."""
        return self.ledger.places.on_device(tensor)


class SimulatedEngine(StreamEngine):
    """An `Engine` over CPU tensors that also counts transfers, for tests.

    ``copies`` and ``bytes_in``: copies from the host to the device and their bytes. ``peer_copies`` and
    ``peer_bytes_in``: those from other devices. ``reserve``: the memory that a caching allocator would hold.
    """

    grain = ALIGN
    location = LOCATION
    virtual_clock = True
    counts_all_memory = watches_slots = True
    decodes_lossless_files = True

    def __init__(self, config: SimulatedDevice) -> None:
        self._watch = DispatchWatch(self._check_operator, self._account_operator)
        device = VirtualDevice(config.timing, config.seed, self._watch.unwatched)
        self.host_on_clock = config.host_seconds > 0
        self.config, self._virtual = config, device
        super().__init__(torch.device("cpu"), device)
        self._local = (
            threading.local()
        )  # ``last``: the last stream of this thread, and the kernel that ran on it
        self.device = torch.device("cpu")
        self.name = f"simulated({config.timing}, seed={config.seed})"
        self.pinner: Pinner | None = Pinner(self._register, self._unregister)
        self.copies = self.peer_copies = 0
        self.bytes_in = self.peer_bytes_in = 0
        self._links = Links(
            config.link_bytes_per_second, config.peer_bytes_per_second, config.p2p, config.host
        )
        self._peers: list[SimulatedEngine] = []  # the devices from which weights are copied
        self.unpacks = config.unpacks
        self.decode_bytes_per_second = config.decode_bytes_per_second
        # When these streams wait for an event, copies before the event need not take effect yet, because
        # nothing reads the results of decoding or of copies to the host before it waits for these streams.
        self._decode.lands = self._out.lands = False
        self._copying = {self._in, self._decode}  # and those of links to other devices
        self._streams = {
            "compute": device.computing(0), "in": self._in, "out": self._out, "decode": self._decode
        }  # fmt: skip
        self.ledger = config.ledger
        self._places = config.ledger.places
        self._guarded, self._pinned = Ranges(), Ranges()
        self.reserve = Reserve()
        self.allocated = 0  # bytes allocated by this engine, a part of the ledger's
        self.activations = config.activation_bytes
        self._cached = 0  # bytes of past activations that a caching allocator would keep
        self._ooms = 0
        self._copied_out: WeakTensor | None = None  # the source of the last copy to the host

    @property
    def place(self) -> int:
        return id(self.ledger)

    def _integrated(self) -> bool:
        """Return whether the simulated device computes in host memory."""
        return self.config.integrated

    def _register(self, address: int, size: int) -> str | None:
        """Pin host memory; return the reason if the simulated system refuses, else None."""
        if self.config.refuse_pinning:
            return "the simulated system refuses to pin memory"
        self._pinned.add(address, size, Tag(False, "pinned memory"))
        return None

    def _unregister(self, address: int) -> None:
        """Unpin host memory."""
        self._pinned.remove(address)

    # -- memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._need(nbytes)
        with self._watch.unwatched(), torch.inference_mode(False):
            buffer = torch.full((nbytes,), 255, dtype=torch.uint8, device=self.device)
        self.allocated += nbytes
        self.ledger.allocated += nbytes
        weakref.finalize(buffer, self._released, nbytes, self.reserve.take(nbytes))
        return self._memory(buffer)

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tag ``tensor`` as memory of the device, read and overwritten under events; return it."""
        self._places.tag(tensor, Tag(True, "device memory", slots=True))
        return tensor

    def _released(self, nbytes: int, segment: int) -> None:
        """Subtract memory whose tensor has died from the accounts."""
        self.allocated -= nbytes
        self.ledger.allocated -= nbytes
        self.reserve.give_up(segment)

    def _need(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if ``nbytes`` are not free."""
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
        """Return the tensor's values on ``to``; the ledger does not count the copy, as it does not count
        activations.
        """
        if self.locate(tensor) == to:
            return tensor
        with self._watch.unwatched():
            return self._places.copy_of(tensor, to == LOCATION)

    def guard(self, data: torch.Tensor, name: str) -> None:
        """Make operators raise SimulatedRaceError if they compute with the host bytes ``data`` in a step."""
        self._guarded.add(data.data_ptr(), data.numel(), Tag(False, f"the host copy of {name}", guarded=True))

    def unguard(self, data: torch.Tensor) -> None:
        self._guarded.remove(data.data_ptr())

    def belongs_to_host(self, tensor: torch.Tensor, name: str) -> None:
        """Tag a module's tensor, as it was before a session managed it, as a host tensor."""
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

    def step(self) -> contextlib.AbstractContextManager[None]:
        return self._watch.step()

    def copy_in(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        return super().copy_in(target, source, after, True)

    def decode(
        self, decoder: Any, wire: torch.Tensor, target: torch.Tensor, after: Iterable[Any], timed: bool
    ) -> tuple[Any, Any]:
        self.stream().clock += self._decode_seconds(target)  # kernels that run beside it take longer
        return super().decode(decoder, wire, target, after, True)

    def _decode_seconds(self, target: torch.Tensor) -> float:
        return self.config.kernel_seconds + target.numel() / self.config.decode_bytes_per_second

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy on ``stream``: to the device on the copy-in stream, to the host on any other.

        Raises SimulatedPlaceError if an end of the copy is on the wrong side, SimulatedRaceError if a wait is
        missing.
        """
        inward = stream is self._in
        place, origin = self._tag_of(target), self._tag_of(source)
        device, host = (place, origin) if inward else (origin, place)
        if (device is not None and not device.device) or (
            host is not None and (host.device or host is _ELSEWHERE)
        ):
            raise SimulatedPlaceError(
                f"a copy {'to' if inward else 'from'} the device mixes up its ends: from "
                f"{_described(source, origin)} to {_described(target, place)}"
            )
        nbytes = source.numel() * source.element_size()
        if inward:
            self.copies += 1
            self.bytes_in += nbytes
            self._overwrites(stream, target)
        with self._virtual.unwatched(), torch.no_grad():
            if inward or target.is_floating_point():  # the target is undefined until the copy takes effect
                target.fill_(255 if inward else float("nan"))
        kept = WeakTensor(source)
        if not inward:
            self._copied_out = kept
            # The last stream and kernel of this thread.
            computes, last = getattr(self._local, "last", (None, 0))
            if stream.seen.get(computes, 0) < last and computes is self.stream():
                raise SimulatedRaceError("a tensor is copied to the host before the kernels that compute it")
            if origin is not None and origin.slots:
                self._virtual.accesses.read(*_address_range(source), stream, ahead=1)

        self._issues(stream)
        latency = self.config.copy_latency_seconds
        takes = self._links.from_host if inward else self._links.to_host
        stream.issue(latency + takes(stream.clock + latency, nbytes), _copying(target, kept))

    def connect(self, peer: Engine) -> PeerLink:
        link = super().connect(peer)
        assert isinstance(peer, SimulatedEngine)
        self._peers.append(peer)
        self._virtual.mates.add(peer._virtual)
        peer._virtual.mates.add(self._virtual)
        return link

    def reaches(self, peer: StreamEngine) -> bool:
        return self.config.p2p

    def new_copy_stream(self) -> Any:
        stream = super().new_copy_stream()
        self._copying.add(stream)
        return stream

    def copy_from_peer(
        self, stream: Any, peer_stream: Any, target: torch.Tensor, source: torch.Tensor, after: Iterable[Any],
        timed: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        return super().copy_from_peer(stream, peer_stream, target, source, after, True)

    def _copy_between(
        self, stream: Any, peer_stream: Any, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Issue a copy from another simulated device on ``stream``.

        Raises SimulatedPlaceError if an end of the copy is on the wrong device, SimulatedRaceError if a wait is
        missing.
        """
        place = self._tag_of(target)
        peer = next((peer for peer in self._peers if peer.ledger.places.on_device(source)), None)
        if place is None or not place.device or peer is None:
            raise SimulatedPlaceError(
                f"a copy between devices mixes up its ends: from {_described(source, self._tag_of(source))} to "
                f"{_described(target, place)}"
            )
        nbytes = source.numel() * source.element_size()
        self.peer_copies += 1
        self.peer_bytes_in += nbytes
        self._overwrites(stream, target)
        if not peer._virtual.accesses.read(*_address_range(source), stream, ahead=1):
            raise SimulatedRaceError(
                "another device's memory is read before the event of the copy that fills it"
            )
        with self._watch.unwatched():
            target.fill_(255)
        self._issues(stream)
        latency = self.config.copy_latency_seconds
        seconds = latency + self._links.from_peer(stream.clock + latency, nbytes)
        stream.issue(seconds, _copying(target, WeakTensor(source)))

    def _keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory that the last copy to the host reads until that copy is done."""
        if self._copied_out is not None and self._copied_out.holds(tensor):
            self._copied_out.keep(tensor)

    def _on_stream(self, stream: Any, call: Any, *args: Any) -> None:
        """Issue the decoding of ``args`` (wire, target), or their gathering, by ``call`` on ``stream``.

        Only decoders and all-gathers are issued by this method. Raises SimulatedRaceError if a wait is missing.
        """
        wire, target = args
        self._overwrites(stream, target)
        with self._watch.unwatched():
            start = wire.data_ptr() - target.data_ptr()
            if 0 <= start < target.numel():  # in place, as in an all-gather: the wire is a part of the target
                target[:start].fill_(255)
                target[start + wire.numel() :].fill_(255)
            else:
                target.fill_(255)
        if not self._virtual.accesses.read(*_address_range(wire), stream, ahead=1):
            raise SimulatedRaceError("packed bytes are decoded before the event of the copy that brings them")
        self._issues(stream)
        stream.issue(self._decode_seconds(target), lambda: call(wire, target))

    def record(self, stream: Any, event: Any = None) -> Any:
        """Record an event as `StreamEngine` does; with random timing, let some waiting copy take effect
        first.
        """
        if stream not in self._copying:
            self._virtual.some_land()
        return super().record(stream, event)

    def done(self, mark: Any) -> bool:
        return not self.host_on_clock or mark.time <= self._virtual.now

    def hold(self, seconds: float) -> None:
        self.stream().clock += seconds

    def _issues(self, stream: Any) -> None:
        """Let the host issue a piece of work to ``stream``, which cannot begin before that."""
        self._virtual.now += self.config.host_seconds
        stream.clock = max(stream.clock, self._virtual.now)

    def elapsed(self, first: Any, last: Any) -> float:
        return last.time - first.time

    # -- checks of reads and overwrites of slots

    def freed(self, memory: torch.Tensor, start: int, end: int) -> None:
        """Fill freed bytes with 255, which makes NaNs of floats."""
        with self._watch.unwatched():
            memory[start:end].fill_(255)

    def read(self, target: torch.Tensor) -> None:
        """Raise SimulatedRaceError if the current stream has not waited for the copy that fills the slot."""
        stream = self.stream()
        self._local.last = stream, stream.ran()
        if not self._virtual.accesses.read(*_address_range(target), stream):
            raise SimulatedRaceError("a slot is read before the event of the copy that fills it")

    def _overwrites(self, stream: Any, target: torch.Tensor) -> None:
        """Raise SimulatedRaceError if ``stream`` has not waited for the last reads of ``target``."""
        if not self._virtual.accesses.write(target.data_ptr(), target.data_ptr() + target.numel(), stream):
            raise SimulatedRaceError(
                "a slot is overwritten before the event of the last kernel that reads it"
            )

    # -- checks of operators' arguments, and the cost of operators

    def _tag_of(self, tensor: torch.Tensor) -> Tag | None:
        """Return the tag that says where a tensor is, None if the tensor has no tag."""
        found = self._places.of(tensor)
        if found is None:
            address = tensor.data_ptr()
            found = self._guarded.find(address) or self._pinned.find(address)
        if found is None and any(peer.ledger.places.on_device(tensor) for peer in self._peers):
            found = _ELSEWHERE
        return found

    def _check_operator(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Raise if ``func`` mixes device and host tensors, or computes with the host copy of a streamed
        weight.

        Returns whether any of ``tensors`` is on the device.
        """
        view = func.is_view
        device_operand: tuple[torch.Tensor, Tag] | None = None
        host_operand: tuple[torch.Tensor, Tag] | None = None
        for index, tensor in enumerate(tensors):
            tag = self._tag_of(tensor)
            if tag is None:
                continue
            if tag.device:
                device_operand = device_operand or (tensor, tag)
                if tag.slots and not view and tensor.numel():
                    self.read(tensor)
            elif tag.guarded:
                # Views and copies compute nothing. An operator that writes its first argument in place writes
                # to host memory.
                harmless = view or func in _COPIES or (index == 0 and func._schema.is_mutable)
                if not harmless:
                    raise SimulatedRaceError(
                        f"{func} computes with {tag.what}, which is streamed, instead of its slot"
                    )
            elif tensor.dim():  # scalars may mix with device tensors
                host_operand = host_operand or (tensor, tag)
        if device_operand is not None and host_operand is not None and not view and func is not _COPY:
            raise SimulatedPlaceError(
                f"{func} mixes {_described(*device_operand)} with {_described(*host_operand)}"
            )
        return device_operand is not None

    def _account_operator(self, func: Any, args: Any, kwargs: Any, result: Any, on_device: bool) -> None:
        """Tag the operator's result, advance the clock by its time, and check the memory for activations."""
        if on_device:
            self._places.made(func, result)
        count = _flop_formulas().get(func._overloadpacket)
        seconds = self.config.kernel_seconds
        if count is not None:
            # If a formula does not fit a call, only kernel_seconds count.
            with contextlib.suppress(Exception):
                seconds = max(seconds, count(*args, **kwargs, out_val=result) / self.config.flops)
        stream = self.stream()
        if on_device:
            self._issues(stream)
        stream.clock += seconds
        if self.activations:
            self._need(self.activations)
            self._cached = max(self._cached, self.activations)


def _copying(target: torch.Tensor, source: WeakTensor) -> Callable[[], None]:
    """Return the function that copies ``source`` to ``target`` when the copy takes effect in virtual time."""

    def run() -> None:
        found = source.take()
        if found is None:
            raise SimulatedRaceError("the memory that a copy reads was given up before the copy was done")
        with torch.no_grad():
            target.copy_(found)

    return run


@functools.cache
def _flop_formulas() -> Any:
    """Return torch's table of flop formulas by operator."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of the tensor's elements and the address after the last."""
    low = tensor.data_ptr()
    if tensor.is_contiguous():
        return low, low + tensor.numel() * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (reach + 1) * tensor.element_size()


def _described(tensor: torch.Tensor, tag: Tag | None) -> str:
    """Return the tensor's dtype, shape and place, for an error text."""
    where = "" if tag is None else f" ({tag.what}) on the {'device' if tag.device else 'host'}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{where}"
