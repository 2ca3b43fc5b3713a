"""Defines `StoredTier`: gives the weights of a layout's streamed units to a `Store`, and takes them back.

A frozen weight has its only copy in the store; the model's tensor gives up its memory. A trained weight keeps its bytes
in host memory too, because optimizers write them there. What they have written goes to the store before the next fetch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..device.engine import Engine
from ..model.elsewhere_tensor import AwayParameter, AwayTensor
from ..model.home import Home, ManagedUnit, Runtime
from ..model.managed_tensor import HostParameter, HostTensor
from ..model.units import Entry, Unit
from ..stores.store import Store
from ..stores.transfer import Transfer
from .attached_tensors import attach
from .backing import Backing
from .given_up_bytes import refuse_kernels
from .resident_placer import ResidentPlacer
from .residents import replace
from .stored_home import StoredHome
from .tier import Tier

_CPU = torch.device("cpu")


class StoredUnit(Backing):
    """One unit in the store of ``tier``.

    ``in_host``: homes of the weights whose bytes are in host memory too.
    """

    def __init__(self, unit: Unit, runtime: Runtime, index: int, tier: StoredTier) -> None:
        super().__init__(unit, runtime, index)
        self._tier = tier
        self.in_host: list[Home] = []
        self._written: int | None = None  # the version that the store has of these weights

    def forget(self) -> None:
        super().forget()
        self.in_host.clear()

    def fetch(self, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        self.write_trained()
        return self._tier.store.fetch(self, target, after, transfer)

    def write_trained(self) -> None:
        """Bring to the store what was written to weights in host memory, by an optimizer for instance (T7)."""
        if self.in_host and (version := self.version()) != self._written:
            for home in self.in_host:
                self._tier.store.write(home, home.host.detach())
            self._written = version  # last: an interrupt before it repeats the writes


class StoredTier(Tier):
    """Puts units into ``store``, which may be of any kind."""

    def __init__(self, engine: Engine, store: Store) -> None:
        super().__init__(engine)
        self._store: Store | None = store
        self._away: list[StoredHome] = []  # homes of weights whose memory was given up

    @property
    def store(self) -> Store:
        """The store of the units. It is dropped by `undo`: the session may refer to this tier while it is parked."""
        assert self._store is not None
        return self._store

    @property
    def complete(self) -> bool:  # type: ignore[override]
        """Whether no fetch waits for bytes."""
        return self.store.complete

    def read_ahead(self, upcoming: Iterable[ManagedUnit]) -> None:
        self.store.read_ahead(upcoming)

    def ready(self, unit: ManagedUnit) -> bool:
        return self.store.ready(unit)

    def recover(self) -> None:
        self.store.recover()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    # -- giving weights to the store, and taking them back

    def place(self, units: Sequence[Unit], runtime: Runtime, residents: ResidentPlacer) -> list[Backing]:
        """Write the units' weights to the store, and turn them into managed tensors."""
        for index, unit in enumerate(units):
            backing = StoredUnit(unit, runtime, index, self)
            self.backings.append(backing)
            for entry in unit.entries:
                self._place_weight(backing, entry, residents)
            backing.note_trainable()
            with runtime.lock:  # T2
                backing.write_trained()  # T1
        return self.backings

    def _place_weight(self, backing: StoredUnit, entry: Entry, residents: ResidentPlacer) -> None:
        tensor = entry.tensor
        self.attached.remember(tensor, residents.device_tensors.origin_of(tensor))
        residents.device_tensors.leaving.pop(id(tensor), None)
        replace(tensor, self.engine.move(tensor.detach(), _CPU))
        if entry.trainable:
            home = Home(backing, entry, tensor.detach())
            backing.homes.append(home)
            backing.in_host.append(home)
            attach(home, HostParameter, HostTensor)
            return
        stored = StoredHome(backing, entry, self)
        backing.homes.append(stored)
        stored.replace(tensor)
        self._away.append(stored)  # before the memory goes, so that `undo` brings the value back
        refuse_kernels(tensor, stored.host)
        attach(stored, AwayParameter, AwayTensor)

    def undo(self) -> None:
        """Give every weight its bytes back, and restore its class and device. After a failure the call may be repeated."""
        while self._away:
            home = self._away[-1]
            value = torch.empty_strided(home.host.shape, home.host.stride(), dtype=home.host.dtype)
            value.copy_(home.read())
            with torch._C.DisableTorchFunctionSubclass():
                replace(home.tensor, value)
            self._away.pop()
        super().undo()
        self._store = None
