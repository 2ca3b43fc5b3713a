"""A rule that decides which streamed units (groups of tensors that are copied together) wait in the memory of other
devices, the *peers*, and which wait on the host.

Copies from host memory and from each peer run at the same time, each over its own link. So each link gets a share of
the bytes in proportion to its rate, as far as the peers' memory reaches. The units of a link are spread evenly over
the order of use, so that no link is idle while another one brings several units in a row. A peer whose copies do not
run beside those of the host gets nothing. That is so where devices do not reach each other's memory: their copies use
the host's link too.

Units are used in order, and copied at most as many units ahead as there are slots. So while a unit is copied from the
host, at most ``slots - 1`` others can be copied from peers. If the peers would bring all ``slots`` units in that time,
the host makes a pass slower, and gets only the units for which the peers have no memory.

The module imports no torch and has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A peer is used if at least this share of the shorter of two copies runs beside the longer one. The share is 0 if both
# use one link, and 1 if each has a link of its own.
WORTH = 0.5


@dataclass(frozen=True)
class PeerRates:
    """Measured rates in bytes per second: ``host`` of the link from host memory while the peer's is idle, ``peer`` of
    the peer's link while the host's is idle, and ``both`` of both together while each copies the same bytes.
    """

    host: float
    peer: float
    both: float

    @property
    def overlap(self) -> float:
        """The share of the shorter of two copies of the same size, one over each link, that runs beside the longer one."""
        host, peer, both = 1 / self.host, 1 / self.peer, 2 / self.both  # seconds of a byte over each link
        return (host + peer - both) / min(host, peer)

    @property
    def worth(self) -> bool:
        """Whether both links together are faster than one of them."""
        return self.overlap >= WORTH


@dataclass(frozen=True)
class PeerRoom:
    """The memory of one peer for units: ``nbytes`` bytes, which are copied at ``rates``."""

    nbytes: int
    rates: PeerRates


def assign(
    sizes: Sequence[int], rooms: Sequence[PeerRoom], host_bytes: float, slots: int
) -> list[int | None]:
    """Return for each unit the index of the peer in ``rooms`` in which it waits, or None for the host.

    ``sizes``: bytes of the units in the order of use, 0 for a unit that has to wait on the host. ``host_bytes``: bytes
    of the others that pinned host memory can hold. The peers take what exceeds it, as it would be copied from pageable
    memory or read from a drive in each step. ``slots``: units that fit into the memory through which they are streamed.
    """
    total = sum(sizes)
    shares = _shares(total, rooms, host_bytes, slots)
    host_share = total - sum(shares)
    most_on_host = max(host_bytes, host_share)
    left, had = [room.nbytes for room in rooms], [0] * len(rooms)
    on_host = seen = 0
    result: list[int | None] = []
    for size in sizes:
        seen += size
        part = seen / total if total else 0.0
        # How many bytes each peer, and the host, lack to their share of the units so far.
        lacks = [share * part - mine for share, mine in zip(shares, had, strict=True)]
        host_lacks = host_share * part - on_host
        fitting = [peer for peer, room in enumerate(left) if 0 < size <= room and shares[peer] > 0]
        best = max(fitting, key=lambda peer: lacks[peer], default=None)
        if best is None or (lacks[best] < host_lacks and on_host + size <= most_on_host):
            on_host += size
            result.append(None)
        else:
            left[best] -= size
            had[best] += size
            result.append(best)
    return result


def _shares(total: int, rooms: Sequence[PeerRoom], host_bytes: float, slots: int) -> list[float]:
    """Return the bytes that each peer is to hold of ``total`` bytes."""
    useful = {peer for peer, room in enumerate(rooms) if room.nbytes and room.rates.worth}
    host = min((rooms[peer].rates.host for peer in useful), default=0.0)
    if sum(rooms[peer].rates.peer for peer in useful) >= slots * host:
        host = 0.0
    shares = [0.0] * len(rooms)
    rest = float(total)
    # A peer with less memory than its share is filled, and the others divide what is left.
    while useful:
        rate = sum(rooms[peer].rates.peer for peer in useful) + host
        wanted = {peer: rest * rooms[peer].rates.peer / rate for peer in useful}
        full = {peer for peer in useful if rooms[peer].nbytes <= wanted[peer]}
        for peer in full or useful:
            shares[peer] = float(rooms[peer].nbytes) if full else wanted[peer]
        if not full:
            break
        rest -= sum(shares[peer] for peer in full)
        useful -= full
    beyond = max(0.0, total - sum(shares) - host_bytes)
    for peer in sorted(range(len(rooms)), key=lambda peer: -rooms[peer].rates.peer):
        more = min(beyond, rooms[peer].nbytes - shares[peer])
        shares[peer] += more
        beyond -= more
    return shares
