"""`Bench`: a pool over the simulated device, with units whose bytes are known, for dialogues and properties.

`Pool.check` runs after each call of the pool. The simulated device raises SimulatedRaceError where an order of events is
missing, and fills what is freed with 255, a byte that no unit contains.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from carom.core.device.pool import Pool
from carom.core.device.pool_memory import PoolMemory
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from carom.core.device.slot import Issue, Slot, SlotWaiters, User

TIMINGS = ("late", "early", "random")


@dataclass(eq=False)
class Unit:
    """A unit of ``nbytes``, whose bytes follow from its number and its version."""

    number: int
    nbytes: int
    version: int = 1

    @property
    def name(self) -> str:
        return f"u{self.number}"

    def bytes(self, version: int) -> torch.Tensor:
        start = 31 * self.number + 97 * version
        return ((start + torch.arange(self.nbytes)) % 251).to(torch.uint8)


class Views:
    """What a program keeps of a slot."""

    def __init__(self) -> None:
        self.kept = False

    def kept_elsewhere(self) -> bool:
        return self.kept


class Checked:
    """A pool that verifies its rules after each call."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.pool, name)
        if not callable(value) or name == "check":
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return value(*args, **kwargs)
            finally:
                self.pool.check()

        return call


class Bench:
    """``region``: bytes of the region. ``engine``: another one than of the simulated device, to which the other
    arguments belong.
    """

    def __init__(
        self,
        region: int,
        timing: str = "late",
        seed: int = 0,
        memory_bytes: int = 1 << 30,
        engine: Any = None,
    ) -> None:
        self.device = SimulatedDevice(timing=timing, seed=seed, memory_bytes=memory_bytes)
        self.engine = engine or SimulatedEngine(self.device)
        self.lock = threading.RLock()
        self.waiters = SlotWaiters(self.lock)
        self.others_active = False
        self.memory = PoolMemory(self.engine)
        self.raw = Pool(self.engine, self.memory, self.waiters, lambda: self.others_active)
        self.pool: Any = Checked(self.raw)
        self.pool.set_region(region)
        self.units: list[Unit] = []
        self._sources: list[torch.Tensor] = []  # alive until their copies have landed
        self.copies = 0

    def make_unit(self, nbytes: int) -> Unit:
        self.units.append(Unit(len(self.units), nbytes))
        return self.units[-1]

    def make_slot(self, unit: Unit, offset: int) -> Slot:
        """Return a slot of ``unit`` in the region."""
        slot = self.memory.make_slot(unit, self.memory.region, offset)
        slot.views = Views()
        return slot

    def make_cached(self, *sizes: int) -> list[Slot]:
        """Return slots with new units that have crossed to memory reserved for them."""
        slots = self.memory.reserve([self.make_unit(nbytes) for nbytes in sizes])
        for slot in slots:
            assert self.fetch(slot)
        return slots

    def make_user(self, stream: int = 0) -> User:
        with self.device.stream(stream):
            return User(threading.get_ident(), self.engine.stream())

    # -- what the pool's owner does

    def fetch(self, slot: Slot, version: int | None = None, decoded: bool = False) -> bool:
        """Ask for a copy into ``slot``, and issue it. Returns whether there was one to issue."""
        version = slot.unit.version if version is None else version
        if self.pool.issue(slot, version) is not Issue.TAKEN:
            return False
        self.pool.complete(slot, self.copy(slot, version, decoded))
        return True

    def copy(self, slot: Slot, version: int, decoded: bool = False) -> Any:
        """Issue the copy into a slot that is FILLING, and return its event."""
        slot.views = slot.views or Views()
        source = slot.unit.bytes(version)
        self._sources.append(source)
        self.copies += 1
        if not decoded:
            return self.engine.copy_in(slot.target, source, slot.after, False)[0]

        def decode(wire: torch.Tensor, target: torch.Tensor) -> None:
            target.copy_(wire)

        return self.engine.decode(decode, source, slot.target, slot.after, False)[0]

    def fault(self, *units: Unit, user: User | None = None) -> tuple[list[Slot], User]:
        """Let a user read ``units`` at once, and copy those that are not on the device."""
        user = user or self.make_user()
        with self.lock:
            slots = self.pool.fault({unit: unit.version for unit in units}, user)
            for slot in slots:
                if slot.state.name == "FILLING":
                    self.pool.complete(slot, self.copy(slot, slot.unit.version))
        return slots, user

    def read(self, slot: Slot, version: int | None = None) -> None:
        """Let a kernel of the current stream read the slot, and verify the bytes that it finds."""
        self.engine.read(slot.base)
        want = slot.unit.bytes(slot.unit.version if version is None else version)
        assert torch.equal(slot.base, want), f"wrong bytes of {slot.unit.name}"

    def use(self, unit: Unit, stream: int = 0) -> bool:
        """Read ``unit``, if it is on the device, on a stream. Returns whether it was."""
        with self.device.stream(stream):
            user = self.make_user(stream)
            slot = self.pool.enter(unit, unit.version, user)
            if slot is None:
                return False
            self.read(slot)
            self.pool.leave(slot, user)
            return True

    @contextlib.contextmanager
    def using(self, unit: Unit, stream: int = 0) -> Iterator[Slot]:
        """Return a context in which a user reads ``unit``, which is on the device."""
        with self.device.stream(stream):
            user = self.make_user(stream)
            slot = self.pool.enter(unit, unit.version, user)
            assert slot is not None
            self.read(slot)
            yield slot
            self.pool.leave(slot, user)

    # -- what is there

    def states(self) -> dict[str, str]:
        """Return the state of the slot in which each unit is looked for, and its place in the region."""
        found = {}
        for unit, slot in self.raw._last.items():
            where = slot.offset if slot.chunk is self.memory.region else "own"
            found[unit.name] = f"{slot.state.name} {where}"
        return found


def in_threads(*functions: Callable[[], object]) -> tuple[list[threading.Thread], list[BaseException]]:
    """Start ``functions`` in threads of their own. Returns the threads, and a list of what they raise."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,), daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    return threads, errors
