"""Defines `Store`: the interface of what keeps the bytes of streamed weights outside the device.

A unit is a group of weights that cross to the device together; its homes stand for its weights, in the order of their
places in the unit. A slot is the device memory that holds a unit. The runner (`streaming.runner.Runner`) runs the passes
of a session, and its lock is the one that protects its slots. A fetch is a copy of a unit to a slot.

A further kind of store is one class with these members and one call of `register_store` (placement/store_kinds.py). The
store of tests/support/toy_store.py is an example. Rules of the interface:

T1. Life. A store that `register_store` added gets the values of all weights by `write` before the first of the other calls
    (Carom's own take them when a layout is made), but ``complete``
    may be asked at any time. `close` is the last call but for `read`: afterwards the values are read once more, go back to
    the module, and the store is dropped. `close` may come at any time between passes, also without a fetch before it, and
    again.
T2. Lock. `read_ahead`, `ready`, `fetch`, `write` and `recover` are called with the runner's lock held, so never two at a
    time. They may be called on any thread: that of a forward, a thread of autograd, one that writes a weight. `read` is
    called without the lock too, on any thread, also while another call runs. A store with threads of its own never takes
    the runner's lock on them.
T3. Time. `fetch` alone may wait, for bytes that are not in host memory yet. The runner asks `ready` before a fetch that
    is not needed yet, and leaves it for later if the answer is no; a unit that is needed now is fetched without asking. A
    unit whose bytes are known to be wrong is not ready, so that its error comes where the unit is needed. While
    ``complete`` is true, `read_ahead` need not be called.
T4. Order. `read_ahead` gets the units that are to be fetched from now on, the next one first; a unit may occur more than
    once, and more may come than the store has room for. It comes before the first fetch. While ``complete`` is false it
    comes again where the order has changed, and before a unit is fetched for the second time since; in between, the fetches
    themselves tell how far the order was followed. It is a hint: any unit may be fetched next, also one that was not among
    them.
T5. Streams. `fetch` enqueues copies on the streams of the engine, and only after the events ``after``: until these have
    passed, kernels may read what lies in ``target``. It writes exactly ``target``, all bytes of the unit's weights, and
    returns the event after which they are there. It does not wait for the device.
T6. Memory. Until that event has passed, the store keeps the host memory that the copies read, at the same address. Their
    bytes may change before: `write` raises the unit's version, so the runner does not use what such a copy brought.
T7. Versions. `write` replaces the value at once: a `read` or `fetch` that begins later gives the new one, whatever was
    read ahead before. A trained weight is written too: before the next fetch of its unit if an optimizer has changed it.
T8. Errors. A `fetch` that raises has left no copy that writes ``target`` later than the device's present work, because the
    runner waits for the device and uses the place again. A later fetch of the same unit tries anew. Bytes that cannot be
    had are a `WeightsError` that names the weight; it reaches the caller of the module unchanged.
T9. Interrupts. A KeyboardInterrupt may end any call between two lines. No `read_ahead`, `ready` or `fetch` comes after that
    until `recover`, which runs while the device is idle. `recover` gives up what was read ahead or half done, and only what
    `write` has stored counts. A store whose calls leave nothing half done has nothing to do there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from ..model.home import Home, ManagedUnit
from .transfer import Transfer


class Store(Protocol):
    """Keeps the bytes of the streamed units of one layout.

    ``complete``: whether every unit lies in host memory and stays there, so that nothing is read ahead (T3).
    """

    @property
    def complete(self) -> bool: ...

    def read_ahead(self, upcoming: Iterable[ManagedUnit]) -> None:
        """Note which units are to be fetched from now on, the next one first (T4). Does not wait."""

    def ready(self, unit: ManagedUnit) -> bool:
        """Return whether `fetch` of ``unit`` would neither wait for bytes nor find them wrong (T3)."""

    def fetch(self, unit: ManagedUnit, target: torch.Tensor, after: Sequence[Any], transfer: Transfer) -> Any:
        """Enqueue the copy of ``unit`` into ``target``, a uint8 tensor on the device that is exactly the unit's slot,
        after the events ``after``. Returns the event after which ``target`` holds the unit (T5, T6).

        ``transfer``: what copies and counts. Raises WeightsError if bytes cannot be had (T8).
        """

    def read(self, weight: Home) -> torch.Tensor:
        """Return the present value of ``weight``, as a CPU tensor of its shape and dtype that the caller does not write
        to (T7). Raises WeightsError if bytes cannot be had.
        """

    def write(self, weight: Home, value: torch.Tensor) -> None:
        """Store a copy of ``value``, a CPU tensor of the shape and dtype of ``weight``, as its value (T7)."""

    def recover(self) -> None:
        """Give up everything that an interrupt may have left half done (T9)."""

    def close(self) -> None:
        """End what runs on threads of the store, and release what only fetches need (T1)."""
