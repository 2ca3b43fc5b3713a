"""Wrappers that are made once for the tensors they stand around, and found again at every run.

Putting one together takes Python tens of microseconds, which a step pays twice for every quantised weight where the host
sets the pace. A wrapper that is kept has references on a slot's views, which tell whether a model kept any: they are counted.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .shells import Shell, elsewhere, is_wrapper, lay_open
from .transfer import storage_uses

# Of an object that nobody has but a list, as `alone` counts them: its list's, and those of the counting.
OWN_REFERENCES = max(map(sys.getrefcount, [object()]))
_LOCK = threading.Lock()
_CONTAINERS = (dict, list, tuple)
_DEPTH = 8  # objects within objects, and what they keep their attributes in


def alone(objects: Sequence[Any]) -> bool:
    """Whether nobody but the list has any of ``objects``."""
    return max(map(sys.getrefcount, objects), default=0) <= OWN_REFERENCES


@dataclass(frozen=True)
class Grip:
    """References that a kept wrapper of ``shell`` has on each inner tensor, and what is counted of each of its holders while
    nobody else has one."""

    shell: Shell
    tensors: tuple[int, ...]
    holders: tuple[int, ...]

    def around(self, tensors: list[Any]) -> Any:
        """A frozen parameter around ``tensors`` themselves."""
        return filled(self.shell, tensors)


def grip_of(shell: Shell, tensors: list[torch.Tensor]) -> Grip | None:
    """What a wrapper of ``shell`` takes hold of, measured on stand-ins for ``tensors`` that nobody else has.

    None where it does not stand around the very objects that it is made of (a copy or an alias would not be where they go),
    where it has tensors besides, or has one through something that is not known: who keeps that could not be told.
    """
    stand_ins = elsewhere(tensors)
    uses = [storage_uses(part) for part in stand_ins]
    before = list(map(sys.getrefcount, stand_ins))
    made = [filled(shell, stand_ins)]
    taken = list(map(operator.sub, map(sys.getrefcount, stand_ins), before))
    found = lay_open(made[0])[1]
    same = len(found) == len(stand_ins) and all(map(operator.is_, found, stand_ins))
    del found
    if not same or [storage_uses(part) for part in stand_ins] != uses:
        return None
    kept = Kept(made.pop(), stand_ins)
    if kept.others or list(map(kept.times, stand_ins)) != taken:
        return None
    counts = map(operator.sub, map(sys.getrefcount, stand_ins), before)
    return Grip(shell, tuple(counts), tuple(map(sys.getrefcount, kept.holders)))


def filled(shell: Shell, tensors: list[Any]) -> Any:
    """A frozen parameter around ``tensors`` themselves, good within inference mode and without."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        made = shell.fill(iter(tensors))
        made._is_param = True  # what nn.Parameter makes of it, but for an alias of every inner tensor
    return made


class Kept:
    """A wrapper that is kept; every object through which it has its tensors (a model may keep any), and what these held."""

    def __init__(self, made: Any, tensors: Sequence[Any]) -> None:
        self.made = made
        found: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        lead = {id(tensor) for tensor in tensors}
        self.others = _explore(made, lead, found, 0)  # whether it has tensors besides, or may have
        more = True
        while more:  # there are few, and may be circles
            new = {one for one, (_, inner) in found.items() if not lead.isdisjoint(map(id, inner))} - lead
            more = bool(new)
            lead |= new
        self.holders = [value for one, (value, _) in found.items() if one in lead]
        self._held = [(holder, _held(holder)) for holder in self.holders if type(holder) in _CONTAINERS]

    def times(self, tensor: Any) -> int:
        """How often the holders have ``tensor``."""
        return sum(part is tensor for _, held in self._held for part in held)

    @property
    def changed(self) -> bool:
        """Whether a run put something else there: what a class remembers of one run is not for the next."""
        for holder, held in self._held:
            if len(holder) != len(held) or not all(map(operator.is_, _parts(holder), held)):
                return True
        return False


def _explore(value: Any, known: set[int], found: dict[int, tuple[Any, tuple]], depth: int) -> bool:
    """Add to ``found`` what ``value`` is and has, and what that has; whether there are tensors that are not ``known``."""
    if id(value) in known or id(value) in found:
        return False
    inner: tuple[Any, ...] = ()
    if type(value) in _CONTAINERS:
        inner = _held(value)
    elif isinstance(value, torch.Tensor) and not is_wrapper(value):
        return True
    elif not isinstance(value, (type, nn.Module)) and isinstance(getattr(value, "__dict__", None), dict):
        inner = (value.__dict__,)
    if depth == _DEPTH:
        return bool(inner)
    found[id(value)] = value, inner
    others = [_explore(part, known, found, depth + 1) for part in inner]
    return any(others)


def _parts(container: Any) -> Any:
    return container.values() if type(container) is dict else container


def _held(container: Any) -> tuple[Any, ...]:
    return tuple(_parts(container))


class Around:
    """Wrappers around ``tensors``, the views of one place in the region, by what they stand for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._own: list[int] = []
        self._made: dict[Any, tuple[Kept, Grip, list[int]]] = {}
        self._count()
        for tensor in tensors:  # no attribute of theirs: it would go where copies of them go, into files too
            _PLACES[id(tensor)] = self

    def get(self, key: Any) -> Any:
        found = self._made.get(key)
        return None if found is None or found[0].changed else found[0].made

    def add(self, key: Any, made: Any, parts: Sequence[Any], grip: Grip) -> None:
        """Keep ``made`` of ``parts``, some of the tensors; not where another thread was first."""
        places = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        kept = Kept(made, parts)
        with _LOCK:
            if key not in self._made and len(kept.holders) == len(grip.holders) and not kept.others:
                self._made[key] = kept, grip, [places[id(part)] for part in parts]
                self._count()

    def _count(self) -> None:
        own = [OWN_REFERENCES] * len(self._tensors)
        for _, grip, places in self._made.values():
            for place, references in zip(places, grip.tensors, strict=True):
                own[place] += references
        self._own = own

    def let_go(self, changed: bool = False) -> None:
        """Keep none of the wrappers, or none that has ``changed``."""
        with _LOCK:
            self._made = {key: it for key, it in self._made.items() if changed and not it[0].changed}
            self._count()

    def kept_elsewhere(self) -> bool:
        """Whether anybody else has one of the tensors, or of what leads to them."""
        count = sys.getrefcount
        if any(kept.changed for kept, _, _ in self._made.values()):
            self.let_go(changed=True)
        return any(map(operator.gt, map(count, self._tensors), self._own)) or any(
            any(map(operator.gt, map(count, kept.holders), grip.holders))
            for kept, grip, _ in self._made.values()
        )


# By the view's id: it lives as long as what it leads to.
_PLACES: weakref.WeakValueDictionary[int, Around] = weakref.WeakValueDictionary()


def around_of(tensor: Any) -> Around | None:
    """What stands around ``tensor``, where that is a view of a place in a region."""
    return _PLACES.get(id(tensor))
