"""Cache of quantised-weight wrappers. Each wrapper is made once for the slot views that it wraps, and reused
in every run.

A slot is the device memory that holds a streamed unit; slot views are the unit's tensors in that memory.
Building a wrapper subclass takes Python tens of microseconds, and a step would build two for every quantised
weight, which matters where the host limits the speed. A cached wrapper holds references to the slot's views.
But Carom uses the reference counts of views to detect that a model has kept a view. So the references that
cached wrappers hold are counted and subtracted.
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

from ..device.engine import storage_uses
from .tensor_flatten import WrapperSpec, flatten, is_wrapper, make_stand_ins

# The reference count of an object that only a list holds, as `alone` measures it: the list's reference, and
# the references that the counting itself takes.
OWN_REFERENCES = max(map(sys.getrefcount, [object()]))
_LOCK = threading.Lock()
_CONTAINERS = (dict, list, tuple)
_MAX_DEPTH = 8  # levels of nested objects and __dict__s that are searched


def alone(objects: Sequence[Any]) -> bool:
    """Return whether the list ``objects`` holds the only reference to each of its objects."""
    return max(map(sys.getrefcount, objects), default=0) <= OWN_REFERENCES


@dataclass(frozen=True)
class WrapperReferences:
    """The reference counts that a cached wrapper of ``spec`` causes.

    ``tensors``: the number of references to each inner tensor.
    ``holders``: the reference count of each object through which the wrapper holds its tensors, while no
    other code refers to that object.
    """

    spec: WrapperSpec
    tensors: tuple[int, ...]
    holders: tuple[int, ...]

    def build(self, tensors: list[Any]) -> Any:
        """Return a frozen parameter around exactly these ``tensors``, without copies."""
        return build_wrapper(self.spec, tensors)


def measure_references(spec: WrapperSpec, tensors: list[torch.Tensor]) -> WrapperReferences | None:
    """Measure the references that a wrapper of ``spec`` takes, on stand-ins for ``tensors``.

    Returns None if the wrapper cannot be cached. This is the case if the wrapper holds copies or aliases
    instead of the given objects (a slot's new bytes would not reach it), if it holds other tensors too, or if
    it holds a tensor through an object of an unknown kind (references to that object cannot be counted).
    """
    stand_ins = make_stand_ins(tensors)
    uses = [storage_uses(part) for part in stand_ins]
    baseline = list(map(sys.getrefcount, stand_ins))
    made = [build_wrapper(spec, stand_ins)]
    gained = list(map(operator.sub, map(sys.getrefcount, stand_ins), baseline))
    found = flatten(made[0])[1]
    same = len(found) == len(stand_ins) and all(map(operator.is_, found, stand_ins))
    del found
    if not same or [storage_uses(part) for part in stand_ins] != uses:
        return None
    kept = CachedWrapper(made.pop(), stand_ins)
    if kept.others or list(map(kept.count, stand_ins)) != gained:
        return None
    counts = map(operator.sub, map(sys.getrefcount, stand_ins), baseline)
    return WrapperReferences(spec, tuple(counts), tuple(map(sys.getrefcount, kept.holders)))


def build_wrapper(spec: WrapperSpec, tensors: list[Any]) -> Any:
    """Return a frozen parameter around exactly these ``tensors``, usable inside and outside inference mode."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        made = spec.unflatten(iter(tensors))
        made._is_param = True  # makes it a parameter; nn.Parameter() would alias every inner tensor
    return made


class CachedWrapper:
    """A cached wrapper, with every object (holder) through which it holds its tensors, and the holders'
    contents when the wrapper was made.

    A model may keep a reference to any holder.
    ``others``: whether the wrapper holds, or may hold, tensors other than those given.
    """

    def __init__(self, made: Any, tensors: Sequence[Any]) -> None:
        self.made = made
        found: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        leading = {id(tensor) for tensor in tensors}
        self.others = _collect_contents(made, leading, found, 0)  # see the class docstring
        more = True
        while more:  # add the holders of holders until no more are found; references may form cycles
            new = {
                key for key, (_, inner) in found.items() if not leading.isdisjoint(map(id, inner))
            } - leading
            more = bool(new)
            leading |= new
        self.holders = [value for key, (value, _) in found.items() if key in leading]
        self._held = [(holder, _contents(holder)) for holder in self.holders if type(holder) in _CONTAINERS]

    def count(self, tensor: Any) -> int:
        """Return how many times the holders hold ``tensor``."""
        return sum(part is tensor for _, held in self._held for part in held)

    @property
    def changed(self) -> bool:
        """Whether a run changed the contents of a holder. The wrapper is then dropped, because values that
        its class cached in one run are not valid in the next.
        """
        for holder, held in self._held:
            if len(holder) != len(held) or not all(map(operator.is_, _parts(holder), held)):
                return True
        return False


def _collect_contents(value: Any, known: set[int], found: dict[int, tuple[Any, tuple]], depth: int) -> bool:
    """Add ``value`` and the objects that it holds to ``found``. Return whether it holds tensors that are not
    in ``known``.
    """
    if id(value) in known or id(value) in found:
        return False
    inner: tuple[Any, ...] = ()
    if type(value) in _CONTAINERS:
        inner = _contents(value)
    elif isinstance(value, torch.Tensor) and not is_wrapper(value):
        return True
    elif not isinstance(value, (type, nn.Module)) and isinstance(getattr(value, "__dict__", None), dict):
        inner = (value.__dict__,)
    if depth == _MAX_DEPTH:
        return bool(inner)
    found[id(value)] = value, inner
    others = [_collect_contents(part, known, found, depth + 1) for part in inner]
    return any(others)


def _parts(container: Any) -> Any:
    """Return an iterable of the objects that a dict, list or tuple holds."""
    return container.values() if type(container) is dict else container


def _contents(container: Any) -> tuple[Any, ...]:
    """Return the objects that ``container`` holds, as a tuple."""
    return tuple(_parts(container))


class WrapperCache:
    """The cached wrappers, by weight, around ``tensors``, the views of one slot."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._own: list[int] = []
        self._made: dict[Any, tuple[CachedWrapper, WrapperReferences, list[int]]] = {}
        self._count()
        # The cache is not an attribute of the tensor, because copies of the tensor would carry the attribute
        # along, even into files.
        for tensor in tensors:
            _PLACES[id(tensor)] = self

    def get(self, key: Any) -> Any:
        """Return the wrapper cached for ``key``, or None if there is none or a run has changed it."""
        found = self._made.get(key)
        return None if found is None or found[0].changed else found[0].made

    def add(self, key: Any, made: Any, parts: Sequence[Any], references: WrapperReferences) -> None:
        """Cache ``made``, a wrapper of ``parts`` (some of the slot's views), unless another thread has cached
        one for ``key`` already.
        """
        places = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        kept = CachedWrapper(made, parts)
        with _LOCK:
            if key not in self._made and len(kept.holders) == len(references.holders) and not kept.others:
                self._made[key] = kept, references, [places[id(part)] for part in parts]
                self._count()

    def _count(self) -> None:
        """Compute the number of references that the cached wrappers hold to each view."""
        own = [OWN_REFERENCES] * len(self._tensors)
        for _, references, places in self._made.values():
            for place, count in zip(places, references.tensors, strict=True):
                own[place] += count
        self._own = own

    def clear(self, only_changed: bool = False) -> None:
        """Remove all wrappers, or only those that a run has changed if ``only_changed``."""
        with _LOCK:
            self._made = {
                key: entry for key, entry in self._made.items() if only_changed and not entry[0].changed
            }
            self._count()

    def has_other_references(self) -> bool:
        """Return whether code other than this cache holds a reference to a view or to a holder of views."""
        count = sys.getrefcount
        if any(kept.changed for kept, _, _ in self._made.values()):
            self.clear(only_changed=True)
        return any(map(operator.gt, map(count, self._tensors), self._own)) or any(
            any(map(operator.gt, map(count, kept.holders), references.holders))
            for kept, references, _ in self._made.values()
        )


# Caches by the id of a view. The id stays valid as long as the cache lives, because the cache holds the view.
_PLACES: weakref.WeakValueDictionary[int, WrapperCache] = weakref.WeakValueDictionary()


def cache_of(tensor: Any) -> WrapperCache | None:
    """Return the cache for ``tensor``, or None if ``tensor`` is no view of a slot with cached wrappers."""
    return _PLACES.get(id(tensor))
