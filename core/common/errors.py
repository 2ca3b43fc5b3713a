"""The exception classes that Carom raises on purpose. Each message names the tensor or the setting at fault
and a remedy.
"""

from __future__ import annotations


class CaromError(Exception):
    """Base class of all errors raised by Carom."""


class BudgetError(CaromError):
    """The error for a memory budget that is too small for the tensors that must be in the memory at the same
    time.

    The budget is of device memory or of host RAM. ``least_bytes``: the smallest budget in bytes that works,
    or None where that number is not known.
    """

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class WeightsError(CaromError):
    """The error for a weights file that is damaged, hostile, or does not fit the module."""


class PinError(CaromError):
    """The error for host memory that the driver refused to pin where the caller demanded pinned memory."""


class UnsupportedError(CaromError):
    """The error for a request that cannot be fulfilled on this machine or by this version; the message says
    which alternatives work.
    """


class GroupError(CaromError):
    """The error for a group of processes in which another process failed, ended, or does not take part."""


class BrokenRuleError(RuntimeError):
    """The error for a rule that Carom's own code has broken. It is a fault of Carom, never of its user.

    It is no `CaromError`, so that a handler of users' mistakes does not take it for one. ``rule``: the rule's number at
    the top of the file that keeps it ("P1"). ``unit``: the name of the unit that the rule is broken for, "" if there is
    none.
    """

    def __init__(self, rule: str, expected: str, found: str, unit: str = "") -> None:
        of_unit = f" for unit {unit!r}" if unit else ""
        super().__init__(
            f"rule {rule} of Carom is broken{of_unit}: expected {expected}, found {found}; please report this"
        )
        self.rule, self.expected, self.found, self.unit = rule, expected, found, unit


# Programs that embed Carom (such as ComfyUI) show the full name of an exception's class. This makes the name
# `carom.BudgetError`, as users import it, whatever folder the package was loaded from.
for _error_class in (CaromError, BudgetError, WeightsError, PinError, UnsupportedError, GroupError):
    _error_class.__module__ = "carom"
