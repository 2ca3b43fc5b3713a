"""PURE. One budget for several models of a job: who gets how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import BudgetError
from ..core.sizes import format_size


@dataclass(frozen=True)
class Need:
    """What a model can use: ``least`` bytes to run at all, ``full`` bytes to stay on the device whole."""

    name: str
    least: int
    full: int


def divide(total: int, needs: Sequence[Need]) -> list[int]:
    """Bytes for each of ``needs``, at most ``total`` together: their least, then by size, none beyond its full.

    Raises BudgetError with the least total that works.
    """
    least = sum(need.least for need in needs)
    if least > total:
        parts = ", ".join(f"{need.name} {format_size(need.least)}" for need in needs)
        raise BudgetError(
            f"vram={format_size(total)} is too small for this job's models together ({parts}); the least budget that "
            f"works is {least} bytes ({format_size(least)})",
            least,
        )
    shares = [need.least for need in needs]
    hungry = [i for i, need in enumerate(needs) if need.full > need.least]
    rest = total - least
    while hungry and rest > 0:
        weight = sum(needs[i].full for i in hungry)
        sated = [i for i in hungry if shares[i] + rest * needs[i].full // weight >= needs[i].full]
        if not sated:
            for i in hungry:
                shares[i] += rest * needs[i].full // weight
            break
        for i in sated:  # what they do not need goes to the others
            rest -= needs[i].full - shares[i]
            shares[i] = needs[i].full
        hungry = [i for i in hungry if i not in sated]
    return shares
