"""Operators on lists of tensors (`torch._foreach_...`), run for one place of the lists after the other.

Such an operator computes with the tensors at one place of its lists and with nothing else. So weights of the whole model in
one call need no more room on the device than those of one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Runs an operator: (operator, arguments, keyword arguments, the streamed tensors among them).
RunOperator = Callable[[Callable, tuple, dict, list[Any]], Any]


def has_places(name: str, args: tuple) -> bool:
    """Return whether the operator ``name`` computes with several places of lists, the first of which is ``args[0]``."""
    return name.startswith("_foreach_") and bool(args) and len(args[0]) > 1


def run_each_place(run: RunOperator, func: Callable, args: tuple, kwargs: dict, found: list[Any]) -> Any:
    """Return the result of ``func(*args, **kwargs)``, computed by ``run`` for each place by itself.

    ``found``: the streamed tensors among the arguments.
    """
    streamed = {id(tensor) for tensor in found}
    first, in_place = args[0], func.__name__.endswith("_")
    results: list[Any] = []

    def run_at(func: Callable, args: tuple, kwargs: dict) -> Any:
        values = [
            leaf
            for value in (*args, *kwargs.values())
            for leaf in (value if isinstance(value, list) else [value])
        ]
        its_found = [leaf for leaf in values if isinstance(leaf, torch.Tensor) and id(leaf) in streamed]
        return run(func, args, kwargs, its_found) if its_found else func(*args, **kwargs)

    for place in range(len(first)):

        def here(value: Any, place: int = place) -> Any:
            return [value[place]] if isinstance(value, (list, tuple)) else value

        its_args, its_kwargs = tuple(map(here, args)), {name: here(value) for name, value in kwargs.items()}
        if in_place:
            # The result is not bound to a name: its views would keep their slots in use.
            run_at(func, its_args, its_kwargs)
        else:
            results += run_at(func, its_args, its_kwargs)
    # An operator in place returns its first list.
    return list(first) if in_place else tuple(results)
