"""Other devices whose memory holds weights (``peers=``): the links to them and their measured rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from ..common.errors import CaromError, UnsupportedError
from ..common.sizes import GIB, MIB
from ..device.engine import Engine
from ..device.make_engine import make_engine
from ..device.peer_link import PeerLink
from ..device.simulated import SimulatedDevice
from ..host.arena import Block, HostArena
from ..placement.peer_memory import Peer, PeerMemory
from ..plan.peers import PeerRates
from .assembly import Parts
from .stream_settings import PEERS_HINT, peer_size

_SAMPLE = 64 * MIB  # most bytes of one copy that is measured
_VIRTUAL_SAMPLE = 4 * MIB  # the same for a simulated device, whose rates are exact
_REPEATS = 3
_KEPT_SHARE = 0.1  # of a peer's memory, which "auto" leaves free


def begin(parts: Parts, peers: Sequence[tuple[Any, int | str]]) -> None:
    """Connect the session's device to ``peers``, checked pairs (device, size), and measure the links.

    Called before the first layout. Raises UnsupportedError for a device that cannot be a peer, and BudgetError for a
    bad size.
    """
    found: list[Peer] = []
    places = {parts.engine.place}
    for device, size in peers:
        engine = _engine(device)
        if engine.place in places:
            raise UnsupportedError(
                f"peers=: {engine.name} is the session's device, or is named twice; name each other device once"
            )
        places.add(engine.place)
        link = parts.engine.connect(engine)
        free = engine.free_bytes()
        nbytes = (
            max(0, int(free * (1 - _KEPT_SHARE)) - GIB // 2)
            if size == "auto"
            else min(free, peer_size(size, free))
        )
        rates = measure(parts.engine, engine, link, parts.manager.host.arena)
        found.append(Peer(engine, link, nbytes, rates))
    if found:
        parts.manager.leave_vbars("weights that wait on other devices are copied to torch's memory only")
        parts.manager.host.peers = PeerMemory(found, [describe(peer) for peer in found])


def measure(engine: Engine, peer: Engine, link: PeerLink, arena: HostArena) -> PeerRates:
    """Return the rates of ``link`` and of the link from host memory, in bytes per second. Takes some milliseconds.

    The samples are smaller where memory is short.
    """
    most = _VIRTUAL_SAMPLE if engine.virtual_clock else _SAMPLE
    block = arena.allocate(max(1, min(most, peer.free_bytes() // 4, engine.free_bytes() // 8)))
    block.data.fill_(0)
    arena.pin(block)
    try:
        return _measured(engine, peer, link, block)
    finally:
        block.unpin()


def _measured(engine: Engine, peer: Engine, link: PeerLink, block: Block) -> PeerRates:
    """Measure with copies of ``block``, a block of host memory."""
    source = peer.allocate(block.data.numel())
    targets = [engine.allocate(block.data.numel()) for _ in range(2)]
    peer.synchronize()  # other streams may still use memory that the allocator reused
    engine.synchronize()
    filled, _ = peer.copy_in(source, block.data, (), False)
    peer.synchronize(filled)

    def from_host() -> Any:
        return engine.copy_in(targets[0], block.data, (), True)[1]

    def from_peer() -> Any:
        return link.copy(targets[1], source, (), True)[1]

    def seconds(*copies: Callable[[], Any]) -> float:
        """Return the seconds from the begin of the first of ``copies`` to the end of the last one."""
        marks = [copy() for copy in copies]
        engine.synchronize()
        peer.synchronize()
        return max(1e-9, *(engine.elapsed(marks[0][0], end) for _, end in marks))

    found = []
    for _ in range(1 + _REPEATS):  # the first copies also map the peer's memory
        found.append((seconds(from_host), seconds(from_peer), seconds(from_host, from_peer)))
    host, other, both = (block.data.numel() / median(times) for times in zip(*found[1:], strict=True))
    return PeerRates(host, other, 2 * both)


def describe(peer: Peer) -> str:
    """Return the note on the measured rates of ``peer`` for the report."""
    rates = peer.rates
    how = "directly (P2P)" if peer.link.direct else "through host memory (no P2P)"
    told = (
        f"{peer.engine.name}: weights are copied {how} at {rates.peer / 1e9:.3g} GB/s, and from host memory at "
        f"{rates.host / 1e9:.3g} GB/s"
    )
    if rates.worth:
        return f"{told}, at the same time"
    return f"{told}, one after the other: weights stay on the host as far as it can pin or cache them"


def _engine(device: Any) -> Engine:
    """Return the engine of the peer ``device``. Raises UnsupportedError if it is not there, or is the CPU."""
    if not isinstance(device, SimulatedDevice):
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise UnsupportedError(f"peers=: {device!r} is not a device torch knows; {PEERS_HINT}") from error
        if kind == "cpu":
            raise UnsupportedError(
                "peers=: weights beyond vram wait in the memory of 'cpu' anyway; name other GPUs, or leave peers= out"
            )
    try:
        return make_engine(device)
    except CaromError as error:
        raise UnsupportedError(
            f"peers=: {error}; name a device that is there, or leave peers= out"
        ) from error
