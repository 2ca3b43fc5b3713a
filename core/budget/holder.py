"""`Holder`: the view that a `BudgetLedger` has of its session's weights on the device.

The module `ledger` explains the words unit, resident, layout, VBAR and promise.
"""

from __future__ import annotations

import contextlib
from typing import Protocol


class Holder(Protocol):
    """The view that a ledger has of its session's weights on the device. All sizes are bytes."""

    name: str

    @property
    def closed(self) -> bool:
        """Whether the session has no layout yet or was closed."""

    @property
    def attached(self) -> bool:
        """Whether a layout is in effect."""

    @property
    def held_bytes(self) -> int:
        """Device memory that the layout's weights take now."""

    @property
    def pool_promise(self) -> int | None:
        """The most bytes that residents and a VBAR take together; None if the session has no VBAR."""

    @property
    def vbar_bytes(self) -> int:
        """Device memory of a VBAR, which torch's allocator does not count."""

    @property
    def everything_bytes(self) -> int:
        """The bytes that all of the module's weights take on the device."""

    @property
    def loading_bytes(self) -> int:
        """An upper bound of `everything_bytes` before any layout was made."""

    @property
    def least_bytes(self) -> int:
        """The smallest budget that works with the module's present tensors."""

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the units that stream now."""

    @property
    def waiting_bytes(self) -> int | None:
        """Host memory that is freed when waiting weights move to a device that shares the host's memory.

        None for other devices, and for weights that are read from files.
        """

    @property
    def may_give(self) -> bool:
        """Whether residents may leave the device now.

        They may if no autograd graph needs them and the times of the last step have been read.
        """

    def hold_idle(self, locks: contextlib.ExitStack) -> bool:
        """Block passes of the session until ``locks`` is closed; return False at once if a pass is running."""

    def resize(self, budget: int) -> None:
        """Lay the weights out again for ``budget`` bytes."""

    def account(self) -> None:
        """Report the held bytes to the ledger after the budget changed."""
