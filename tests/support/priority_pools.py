"""A model of comfy-aimdo's pools: which entries of pools on one device stay resident, and which are evicted for
others.

The semantics are the known behaviour of comfy-aimdo's VBARs, for entries of any size instead of pages of 32 MiB. A
pool needs its first entries most, so the last entries are evicted first, down to the pool's watermark. Pools of lower
priority are evicted first. A signature shows whether any entry of a range was evicted since. Only offsets and bytes
are managed: the memory belongs to the caller, and ``freed`` tells the caller which memory to free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from carom.core.common.errors import CaromError


@dataclass(eq=False)
class Pool:
    """The entries of one owner, in order of need. `Device.pool` creates it. Counts are numbers of entries, sizes are
    bytes.
    """

    device: Device
    name: str
    sizes: tuple[int, ...]
    watermark: int = 0  # entries from here on are not to be resident
    limit: int = 0  # eviction for others stops at this watermark
    resident: list[bool] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    closed: bool = False

    def fault(self, first: int, end: int) -> tuple[int, ...] | None:
        """Make entries [first, end) resident and pin them; return their signature, or None if they must be streamed.

        A range that ends above the watermark is refused. Absent entries are mapped in turn. Room is made by evicting
        entries of pools of lower priority first, then the last entries of this pool. Entries that a refused range had
        mapped stay resident, unpinned. Raises ValueError for a range outside the pool.
        """
        if not 0 <= first < end <= len(self.sizes):
            raise ValueError(
                f"entries {first} to {end} are no range of pool {self.name!r} of {len(self.sizes)}"
            )
        with self.device.lock:
            self._need_open()
            if end > self.watermark:
                return None
            for entry in range(first, end):
                if not self.resident[entry] and not self.device._map(self, entry):
                    return None
            if end > self.watermark:  # what was mapped first had to make room for the rest
                return None
            for entry in range(first, end):
                self.pins[entry] += 1
            return tuple(self.serials[first:end])

    def unpin(self, first: int, end: int) -> None:
        """Remove one pin, once for each successful `fault`. An entry above the watermark is freed with its last pin.

        Raises CaromError if the entries are not pinned.
        """
        with self.device.lock:
            self._need_open()
            if not 0 <= first < end <= len(self.sizes) or not all(self.pins[first:end]):
                raise CaromError(
                    f"entries {first} to {end} of pool {self.name!r} are not pinned: a stray unpin"
                )
            for entry in range(first, end):
                self.pins[entry] -= 1
                if entry >= self.watermark:
                    self.device._free(self, entry)

    def prioritize(self) -> None:
        """Give the pool the highest priority, and set its watermark to all entries."""
        with self.device.lock:
            self._need_open()
            self.device.pools.remove(self)
            self.device.pools.append(self)
            self.watermark = len(self.sizes)

    def deprioritize(self) -> None:
        """Give the pool the lowest priority; the watermark is not changed."""
        with self.device.lock:
            self._need_open()
            self.device.pools.remove(self)
            self.device.pools.insert(0, self)

    def set_watermark(self, count: int) -> None:
        """Set the watermark: entries from ``count`` on are freed, pinned ones with their last pin."""
        with self.device.lock:
            self._need_open()
            self.watermark = max(0, min(count, len(self.sizes)))
            for entry in range(self.watermark, len(self.sizes)):
                self.device._free(self, entry)

    def set_limit(self, count: int) -> None:
        """Set the limit: evictions for other pools take no entry below ``count``."""
        with self.device.lock:
            self._need_open()
            self.limit = max(0, min(count, len(self.sizes)))

    def free_memory(self, nbytes: int) -> int:
        """Free at least ``nbytes`` bytes of this pool if possible; return the freed bytes."""
        with self.device.lock:
            self._need_open()
            before = self.device.used
            while before - self.device.used < nbytes and self.watermark > self.limit:
                self.device._lower(self)
            return before - self.device.used

    @property
    def loaded_bytes(self) -> int:
        """The bytes of resident entries."""
        return sum(size for size, there in zip(self.sizes, self.resident, strict=True) if there)

    def close(self) -> None:
        """Free all entries, pinned or not. Idempotent."""
        with self.device.lock:
            if not self.closed:
                self.closed = True
                self.pins = [0] * len(self.sizes)
                for entry in range(len(self.sizes)):
                    self.device._free(self, entry)
                self.device.pools.remove(self)

    def _need_open(self) -> None:
        if self.closed:
            raise CaromError(f"pool {self.name!r} was closed")


class Device:
    """A device of ``capacity`` bytes, of which ``headroom`` stay free and ``slack`` are lost to rounding.

    ``freed(pool, entry)`` is called under the lock for each evicted entry.
    """

    def __init__(
        self,
        capacity: int,
        headroom: int = 0,
        *,
        slack: int = 0,
        freed: Callable[[Pool, int], None] | None = None,
    ) -> None:
        if capacity < 0 or headroom < 0 or slack < 0:
            raise ValueError(
                f"capacity={capacity}, headroom={headroom}, slack={slack}: bytes are not negative"
            )
        self.capacity, self.headroom, self.slack = capacity, headroom, slack
        self.lock = threading.RLock()
        self.pools: list[Pool] = []  # lowest priority first
        self.used = 0
        self._freed = freed

    def pool(self, name: str, sizes: Sequence[int]) -> Pool:
        """Return a new pool with the highest priority."""
        if any(size <= 0 for size in sizes):
            raise ValueError(f"pool {name!r}: entries have at least one byte")
        count = len(sizes)
        with self.lock:
            pool = Pool(self, name, tuple(sizes), count, 0, [False] * count, [0] * count, [0] * count)
            self.pools.append(pool)
        return pool

    def set_headroom(self, headroom: int) -> None:
        """Leave ``headroom`` bytes free from now on, and evict entries for that, from the lowest priority up."""
        with self.lock:
            self.headroom = max(0, headroom)
            for pool in self.pools:
                while not self._fits(0) and pool.watermark > pool.limit:
                    self._lower(pool)

    def _fits(self, nbytes: int) -> bool:
        return self.used + nbytes + self.headroom + self.slack <= self.capacity

    def _map(self, pool: Pool, entry: int) -> bool:
        """Make ``entry`` resident; return False if its own pool's watermark fell below the entry."""

        def needed() -> int:
            # Room for what comes before it too: else a late entry would take the place of earlier ones.
            top = min(entry + 1, pool.watermark)
            return sum(size for at, size in enumerate(pool.sizes[:top]) if not pool.resident[at])

        for lower in self.pools:
            if lower is pool:
                break
            while not self._fits(needed()) and lower.watermark > lower.limit:
                self._lower(lower)
        while not self._fits(needed()) and pool.watermark > 0:
            self._lower(pool)
        if entry >= pool.watermark:
            return False
        self.used += pool.sizes[entry]
        pool.resident[entry] = True
        pool.serials[entry] += 1
        return True

    def _lower(self, pool: Pool) -> None:
        """Lower the watermark by one entry and free that entry."""
        pool.watermark -= 1
        self._free(pool, pool.watermark)

    def _free(self, pool: Pool, entry: int) -> None:
        if pool.resident[entry] and not pool.pins[entry]:
            pool.resident[entry] = False
            self.used -= pool.sizes[entry]
            if self._freed is not None:
                self._freed(pool, entry)
