"""Wrappers that are made once for the tensors they stand around, and found again at every run.

Putting one together takes Python some 30 us, which a step pays twice for every quantised weight where the host sets the
pace. A wrapper that is kept has references on a slot's views, which tell whether a model kept any: they are counted.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .shells import Shell, elsewhere, is_wrapper, lay_open
from .transfer import storage_uses

# Of an object that nobody has but a list, as `alone` counts them: its list's, and those of the counting.
OWN_REFERENCES = max(map(sys.getrefcount, [object()]))
_LOCK = threading.Lock()


def alone(objects: Sequence[Any]) -> bool:
    """Whether nobody but the list has any of ``objects``."""
    return max(map(sys.getrefcount, objects), default=0) <= OWN_REFERENCES


@dataclass(frozen=True)
class Grip:
    """References that a kept wrapper of ``shell`` has on each inner tensor, and what is counted of each wrapper in it while
    nobody else has one."""

    shell: Shell
    tensors: tuple[int, ...]
    wrappers: tuple[int, ...]

    def around(self, tensors: list[Any]) -> Any:
        """A frozen parameter around ``tensors`` themselves."""
        return filled(self.shell, tensors)


def grip_of(shell: Shell, tensors: list[torch.Tensor]) -> Grip | None:
    """What a wrapper of ``shell`` takes hold of, measured on stand-ins for ``tensors`` that nobody else has.

    None where it does not stand around the very objects that it is made of: a copy or an alias would not be where they go.
    """
    stand_ins = elsewhere(tensors)
    uses = [storage_uses(part) for part in stand_ins]
    before = list(map(sys.getrefcount, stand_ins))
    kept = {0: filled(shell, stand_ins)}
    counts = list(map(sys.getrefcount, stand_ins))
    wrappers = list(_wrappers(kept[0]))
    of_wrappers = tuple(map(sys.getrefcount, wrappers))
    found = lay_open(kept[0])[1]
    same = len(found) == len(stand_ins) and all(map(operator.is_, found, stand_ins))
    if not same or [storage_uses(part) for part in stand_ins] != uses:
        return None
    return Grip(shell, tuple(map(operator.sub, counts, before)), of_wrappers)


def filled(shell: Shell, tensors: list[Any]) -> Any:
    """A frozen parameter around ``tensors`` themselves, good within inference mode and without."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        made = shell.fill(iter(tensors))
    made._is_param = True  # what nn.Parameter makes of it, but for an alias of every inner tensor
    return made


def _wrappers(made: Any) -> Iterator[Any]:
    """``made`` and the wrappers in it."""
    yield made
    for name in made.__tensor_flatten__()[0]:
        part = getattr(made, name)
        if is_wrapper(part):
            yield from _wrappers(part)


class Where:
    """Leads from a view to the `Around` of its place; a copy of the view, in a file or not, leads nowhere."""

    __slots__ = ("around",)

    def __init__(self, around: Around) -> None:
        self.around = weakref.ref(around)

    def __reduce__(self) -> Any:
        return type(None), ()


class Around:
    """Wrappers around ``tensors``, the views of one place in the region, by what they stand for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._own = [OWN_REFERENCES] * len(tensors)
        self._made: dict[Any, Any] = {}
        self._wrappers: list[Any] = []
        self._of_wrappers: list[int] = []

    def get(self, key: Any) -> Any:
        return self._made.get(key)

    def add(self, key: Any, made: Any, parts: Sequence[Any], grip: Grip) -> None:
        """Keep ``made`` of ``parts``; not where another thread was first, or some part is none of the tensors."""
        places = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        with _LOCK:
            if key in self._made or not all(id(part) in places for part in parts):
                return
            for part, references in zip(parts, grip.tensors, strict=True):
                self._own[places[id(part)]] += references
            self._wrappers += _wrappers(made)
            self._of_wrappers += grip.wrappers
            self._made[key] = made

    def kept_elsewhere(self) -> bool:
        """Whether anybody else has one of the tensors, or of the wrappers."""
        count = sys.getrefcount
        return any(map(operator.gt, map(count, self._tensors), self._own)) or any(
            map(operator.gt, map(count, self._wrappers), self._of_wrappers)
        )
