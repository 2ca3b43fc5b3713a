"""Every error Carom raises on purpose. Each message names the tensor or the setting and a remedy."""

from __future__ import annotations


class CaromError(Exception):
    """Base of all errors raised by Carom."""


class BudgetError(CaromError):
    """A budget is too small for what must be on the device (or in RAM) at once.

    ``least_bytes`` is the smallest budget in bytes that works, or None where it is not known.
    """

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class WeightsError(CaromError):
    """A weights file is bad, hostile, or does not fit the module."""


class PinError(CaromError):
    """Host memory could not be pinned where pinned memory was demanded."""


class UnsupportedError(CaromError):
    """What was asked for cannot be done here; the message says what can."""


# Hosts show an error by its class's full name: ours as users import it, not by the folder that a host loaded us from.
for _error in (CaromError, BudgetError, WeightsError, PinError, UnsupportedError):
    _error.__module__ = "carom"
