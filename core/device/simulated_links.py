"""The links of simulated devices: transfers that share a link or the host's memory take turns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(eq=False)
class Lane:
    """A link, one direction of a link, or a memory bus, in virtual time.

    ``bytes_per_second``: its rate. ``free``: the virtual second from which the next transfer can use it.
    """

    bytes_per_second: float
    free: float = 0.0

    def seconds(self, start: float, nbytes: int) -> float:
        """Return how long a transfer of ``nbytes`` that is issued at ``start`` takes, and count it."""
        waits = max(0.0, self.free - start)
        seconds = waits + nbytes / self.bytes_per_second
        self.free = start + seconds
        return seconds


@dataclass(eq=False)
class SimulatedHost:
    """The host of one or more simulated devices. ``bytes_per_second``: the rate of its memory, which the transfers of
    all devices share.
    """

    bytes_per_second: float = math.inf
    memory: Lane = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.memory = Lane(self.bytes_per_second)


class Links:
    """The links of one simulated device.

    ``p2p``: whether the device reads the memory of other devices directly, at ``peer_bytes_per_second``. Otherwise these
    copies use the link to the host, and the host's memory twice.
    """

    def __init__(
        self, bytes_per_second: float, peer_bytes_per_second: float, p2p: bool, host: SimulatedHost
    ) -> None:
        self._inward, self._outward = Lane(bytes_per_second), Lane(bytes_per_second)
        self._peer, self._p2p, self._host = Lane(peer_bytes_per_second), p2p, host

    def from_host(self, start: float, nbytes: int) -> float:
        """Return the seconds of a copy from host memory that is issued at ``start``."""
        return self._together(start, nbytes, self._inward, self._host.memory)

    def to_host(self, start: float, nbytes: int) -> float:
        """Return the seconds of a copy to host memory that is issued at ``start``."""
        return self._together(start, nbytes, self._outward, self._host.memory)

    def from_peer(self, start: float, nbytes: int) -> float:
        """Return the seconds of a copy from another device's memory that is issued at ``start``."""
        if self._p2p:
            return self._peer.seconds(start, nbytes)
        return self._together(start, nbytes, self._inward, self._host.memory, self._host.memory)

    def _together(self, start: float, nbytes: int, *lanes: Lane) -> float:
        return max([lane.seconds(start, nbytes) for lane in lanes])
