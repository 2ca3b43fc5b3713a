"""PURE. `require`: checks that the models of a job can run within one budget."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.common.errors import BudgetError
from ..core.common.sizes import format_size


def require(total: int, leasts: Mapping[str, int]) -> None:
    """Raise BudgetError, with the least total that works, if ``total`` bytes are less than the sum of ``leasts``.

    ``leasts``: the least budget that works for each model in bytes, by the model's name.
    """
    least = sum(leasts.values())
    if least > total:
        what = "this job's models together (%s)" if len(leasts) > 1 else "%s"
        parts = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in leasts.items())
        raise BudgetError(
            f"vram={format_size(total)} is too small for {what % parts}; the least budget that works is {least} bytes "
            f"({format_size(least)})",
            least,
        )
