"""A selection of test runs smaller than the full cross product: every pair of values of two parameters is in some
run.

Errors in streaming depend on one setting or on a combination of two, hardly ever of three. ``pairwise`` therefore
runs a test with few combinations, in which each value of each parameter occurs with each value of each other
parameter. ``each`` only ensures that each value is run, for use if another test covers the pairs. The selection is
the same every time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

# A GPU is not one more value to choose among: all that is chosen runs on it as well.
ALSO = {"device": "cuda"}
TRIES = 12  # selections drawn, of which the smallest is taken


def covering(
    sizes: Sequence[int], strength: int, allowed: Callable[[tuple[int, ...]], bool]
) -> list[tuple[int, ...]]:
    """Return rows of value numbers in which every combination of ``strength`` values occurs that occurs in an allowed
    row.
    """
    rows = [row for row in itertools.product(*map(range, sizes)) if allowed(row)]
    # An axis of one value is met by every row: counted, it would draw to rows in which everything else is new as well.
    axes = [axis for axis, size in enumerate(sizes) if size > 1] or list(range(len(sizes)))
    strength = min(strength, len(axes))
    numbers: dict[tuple, int] = {}
    masks = []
    for row in rows:
        mask = 0
        for together in itertools.combinations([(axis, row[axis]) for axis in axes], strength):
            mask |= 1 << numbers.setdefault(together, len(numbers))
        masks.append(mask)
    # No selection is smaller than what the values of the largest axes make together.
    enough = math.prod(sorted(sizes)[-strength:])
    best = _greedy(rows, masks, (1 << len(numbers)) - 1, sizes, None)
    for seed in range(TRIES):
        if len(best) <= enough:
            break
        best = min(best, _greedy(rows, masks, (1 << len(numbers)) - 1, sizes, random.Random(seed)), key=len)
    return [rows[i] for i in sorted(best)]


def _greedy(
    rows: list[tuple[int, ...]],
    masks: list[int],
    left: int,
    sizes: Sequence[int],
    drawn: random.Random | None,
) -> list[int]:
    """Return the numbers of rows that together cover all combinations in ``left``.

    Rows are chosen one after another, each with the most combinations not covered yet. Of several such rows, take the
    row whose values were used least and then the first row, or a random row if ``drawn`` is given.
    """
    uses, chosen, others = [[0] * size for size in sizes], [], list(range(len(rows)))
    while left:
        if drawn is None:
            best = max(
                others,
                key=lambda i: ((masks[i] & left).bit_count(), -sum(map(list.__getitem__, uses, rows[i])), -i),
            )
        else:
            news = [(masks[i] & left).bit_count() for i in others]
            most = max(news)
            best = drawn.choice([i for i, new in zip(others, news, strict=True) if new == most])
        left &= ~masks[best]
        chosen.append(best)
        others = [i for i in others if masks[i] & left]
        for used, value in zip(uses, rows[best], strict=True):
            used[value] += 1
    return chosen


def pairwise(
    *, strength: int = 2, but: Callable[..., bool] | None = None, **axes: Mapping[str, Any] | Sequence[Any]
) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` with a selection of combinations of ``axes`` (lists, or ids with values).

    ``but``: returns whether a combination, given by ids, is excluded.
    """
    named: dict[str, dict[str, Any]] = {
        axis: dict(values) if isinstance(values, Mapping) else {str(value): value for value in values}
        for axis, values in axes.items()
    }
    also = {
        axis: {ALSO[axis]: named[axis].pop(ALSO[axis])} for axis in named if ALSO.get(axis) in named[axis]
    }
    ids = [list(values) for values in named.values()]

    def allowed(row: tuple[int, ...]) -> bool:
        return but is None or not but(
            **{axis: ids[i][value] for i, (axis, value) in enumerate(zip(named, row, strict=True))}
        )

    rows = [
        tuple(ids[i][value] for i, value in enumerate(row))
        for row in covering([len(v) for v in ids], strength, allowed)
    ]
    for axis, (value,) in also.items():
        at = list(named).index(axis)
        rows += dict.fromkeys((*row[:at], value, *row[at + 1 :]) for row in rows)
        named[axis].update(also[axis])
    return pytest.mark.parametrize(
        ",".join(named),
        [
            pytest.param(
                *(named[axis][value] for axis, value in zip(named, row, strict=True)), id="-".join(row)
            )
            for row in rows
        ],
    )


def each(
    *, but: Callable[..., bool] | None = None, **axes: Mapping[str, Any] | Sequence[Any]
) -> pytest.MarkDecorator:
    """Return `pairwise` with strength 1: each value is in some run."""
    return pairwise(strength=1, but=but, **axes)
