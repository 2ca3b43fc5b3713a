"""Make room on the device for an optimizer's state before the step that creates the state.

With ``vram="auto"`` weights take the memory that steps leave free. Until an optimizer has stepped, no
reading of free memory shows how much its state will take. An optimizer step that runs out of memory half
way leaves an incomplete state, on which later steps fail. So a hook runs before every step of every
optimizer, while any session's budget follows a device. The hook estimates the bytes of state for the
parameters that have a gradient and no state yet. If these bytes are not free, sessions give up resident
weights, the least used session first. The allocator's cache does not count as free for the state, because
the activations of the next step need that cache.

For an optimizer step whose parameters all have their state, the hook takes a few microseconds.
"""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..common.memory_snapshot import Memory
from ..common.sizes import MIB, format_size
from ..model import managed_tensor
from ..plan.region import ALIGN
from ..plan.residency import round_up
from .device_governor import LOW, Governor

logger = logging.getLogger("carom")
# State values for each trained value: the two moments of Adam and similar optimizers, assumed for every
# optimizer.
VALUES = 2
# Further state values of optimizers that estimate the step size (Prodigy): the first weights, a sum of
# gradients.
FOUND = 2
TRIES = 4  # how often one session may lay out its weights anew before an optimizer step, at most
FULL = 4  # bytes of a state value: optimizers other than torch's keep full precision for any parameter dtype

# Bytes that decide how torch's CUDA allocator reserves memory. Allocations of at most ``_SMALL`` bytes
# share small segments. Allocations below ``_LARGE`` bytes share segments of ``_SHARED`` bytes. Each
# larger allocation has a segment of its own (c10/cuda/CUDACachingAllocator.h: kSmallSize, kMinLargeAlloc,
# kLargeBuffer).
_SMALL, _LARGE, _SHARED = MIB, 10 * MIB, 20 * MIB


@dataclass(frozen=True)
class Needs:
    """The device bytes that an optimizer step takes in addition to the bytes allocated before the step.

    ``state``: bytes that stay allocated; ``passing``: bytes that are free again at the end of the step.
    """

    state: int = 0
    passing: int = 0

    def missing(self, memory: Memory, activations: int = 0) -> int:
        """Return the bytes that weights must free to keep the headroom free; 0 if the step fits.

        ``activations``: bytes of free memory that the next forward and backward will take. The step's passing
        bytes may use this memory too, because they are free again before that forward.
        """
        wanted = self.state + max(self.passing, activations)
        headroom = Governor.headroom(memory)
        if not self.state or memory.free >= wanted + LOW * headroom:
            return 0
        return wanted + headroom - memory.free


def reserved(nbytes: int, grain: int) -> int:
    """Return the device bytes that a tensor of ``nbytes`` bytes takes.

    ``grain``: bytes to whose multiples the allocator rounds large allocations.
    """
    exact = round_up(nbytes, ALIGN)
    if grain < _SMALL or exact <= _SMALL:
        return exact
    return _SHARED // (_SHARED // exact) if exact < _LARGE else round_up(exact, grain)


def needs(
    optimizer: torch.optim.Optimizer, fresh: set[int], device: torch.device, grain: int, coming: bool = False
) -> Needs:
    """Return the bytes of ``device`` that the next step of ``optimizer`` takes in addition to present ones.

    ``fresh``: ids of the parameters that get their state in the step. ``grain``: see `reserved`.
    ``coming``: whether gradients are still to be computed, and each parameter is stepped as soon as its
    gradient is there.
    """
    state = passing = 0
    for group in optimizer.param_groups:
        stepped = [
            p for p in group["params"]
            if p.device == device and not isinstance(p, managed_tensor.HostParameter) and (coming or p.grad is not None)
        ]  # fmt: skip
        if not stepped:
            continue
        values = VALUES + bool(group.get("amsgrad")) + FOUND * ("d" in group)
        state += sum(
            values * reserved(_kept_bytes(optimizer, group, p), grain) for p in stepped if id(p) in fresh
        )
        copies = [reserved(p.numel() * p.element_size(), grain) for p in stepped]
        passing = max(passing, _passing(group, copies, values, device, coming))
    return Needs(state, passing)


def _kept_bytes(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> int:
    """Return the bytes of one state tensor (such as a moment) of ``parameter``."""
    size = parameter.element_size()
    # Groups of torch's own optimizers have "foreach"; their state has the parameter's dtype.
    if "foreach" not in group:
        size = max(size, FULL)
        # Optimizers of bitsandbytes name the bits of their state.
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
        if bits == 8:
            size = 1
    return parameter.numel() * size


def _passing(
    group: dict[str, Any], copies: list[int], values: int, device: torch.device, one_by_one: bool
) -> int:
    """Return the bytes that stepping a parameter group takes temporarily.

    ``copies``: device bytes of each stepped parameter; ``values``: state values for each trained value;
    ``one_by_one``: whether each parameter is stepped by itself.
    """
    if "foreach" not in group:  # parameters are stepped one after the other, with temporaries for one of them
        return values * max(copies)
    if group.get("fused"):
        return 0
    # An optimizer of torch that steps a whole group at once holds one more copy of the group, such as the
    # square roots of the second moments in Adam.
    at_once = group["foreach"] if group["foreach"] is not None else device.type != "cpu"
    return sum(copies) if at_once and not one_by_one else max(copies)


def where_trained(module: nn.Module) -> str | None:
    """Return the setting ``training`` of `stream` for a budget that follows the device.

    Return "resident" if ``module`` has trainable parameters that take no more bytes than its frozen parameters;
    else None. Such trainable parameters stay on the device under any budget, because their optimizer's state
    is, or will be, on the device.
    """
    trained = frozen = 0
    for parameter in module.parameters():
        size = parameter.numel() * parameter.element_size()
        trained, frozen = (
            trained + size * parameter.requires_grad,
            frozen + size * (not parameter.requires_grad),
        )
    return "resident" if 0 < trained <= frozen else None


# -- which parameters have no state yet


@dataclass
class _Seen:
    """The parameters of an optimizer, as `fresh_in` last saw them.

    ``count``: number of parameters; ``states``: number of parameters with state; ``left``: the parameters
    that had neither state nor gradient so far.
    """

    count: int
    states: int
    left: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()


def fresh_in(optimizer: torch.optim.Optimizer, coming: bool = False) -> set[int]:
    """Return the ids of the parameters that get their state in the step that begins.

    Each parameter is returned once only. ``coming``: include parameters that have no gradient yet.
    """
    state, groups = optimizer.state, optimizer.param_groups
    count = sum(len(group["params"]) for group in groups)
    seen = _seen.get(optimizer)
    # Start again for a new optimizer, after parameters were added, and after a state was dropped.
    if seen is None or seen.count != count or len(state) < seen.states:
        left = [weakref.ref(p) for group in groups for p in group["params"] if not state.get(p)]
        seen = _seen[optimizer] = _Seen(count, 0, left)
    seen.states = len(state)
    if not seen.left:
        return set()
    waiting = [p for reference in seen.left if (p := reference()) is not None]
    come = waiting if coming else [p for p in waiting if p.grad is not None]
    if not come:
        return set()
    ids = {id(p) for p in come}
    seen.left = [weakref.ref(p) for p in waiting if id(p) not in ids]
    return {id(p) for p in come if not state.get(p)}


# -- sessions whose budget follows a device


class Giver(Protocol):
    """A session's ledger, which moves resident weights off the device so that an optimizer step has memory."""

    def release(self, nbytes: int, of_device: bool = False) -> int: ...


class Place(Protocol):
    """A device engine of a session.

    ``device``: the device that computes; ``grain``: bytes to whose multiples its allocator rounds large
    allocations.
    """

    device: torch.device
    grain: int

    def memory(self) -> Memory | None: ...
    def trim(self) -> None: ...


class Used(Protocol):
    """A counter of the recent uses of sessions, by the session's id."""

    def uses(self, key: int) -> int: ...


@dataclass(frozen=True)
class _Member:
    place: Place
    key: Hashable  # names the device
    used: Used


_members: weakref.WeakKeyDictionary[Any, _Member] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_hook: Any = None
_register: Any = getattr(
    importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_pre_hook", None
)
_graph_task = torch._C._current_graph_task_id


def enter(session: Giver, place: Place, key: Hashable, used: Used) -> None:
    """Let ``session`` give up weights before optimizer steps, on the device that ``key`` names."""
    global _hook
    with _lock:
        _members[session] = _Member(place, key, used)
        if _hook is None and _register is not None:
            _hook = _register(_before_step)


def leave(session: Giver) -> None:
    """Stop asking ``session`` to give up weights before optimizer steps."""
    with _lock:
        _members.pop(session, None)
        _unhook()


def _unhook() -> None:
    """Remove the optimizer hook if no session is left; sessions may be dropped without being closed."""
    global _hook
    if not _members and _hook is not None:
        _hook.remove()
        _hook = None


# The hook that torch calls before each step of any optimizer.
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or _graph_task() != -1:
        return  # no weight may move while a backward runs
    make_room(optimizer)


def make_room(optimizer: torch.optim.Optimizer, coming: bool = False) -> None:
    """Let sessions give up weights to make room for the state that the next step of ``optimizer`` creates.

    ``coming``: make room for the state of all parameters, whose gradients are still to be computed and
    which are stepped one by one. Raises torch.OutOfMemoryError if a session found no memory for the
    weights that it keeps; no parameter was stepped then.
    """
    for members, wanted in _wanted(optimizer, coming):
        _give(members, wanted)


def _wanted(optimizer: torch.optim.Optimizer, coming: bool) -> list[tuple[list[tuple[Any, _Member]], Needs]]:
    """Return, for each device on which the step creates state, the sessions and the step's bytes there.

    Return an empty list, with a warning in the log, where the needs cannot be estimated.
    """
    devices: dict[Hashable, list[tuple[Any, _Member]]] = {}
    try:
        with _lock, torch._C.DisableTorchFunctionSubclass():
            if not _members:
                _unhook()
                return []
            fresh = fresh_in(optimizer, coming)
            if not fresh:
                return []
            for session, member in list(_members.items()):
                devices.setdefault(member.key, []).append((session, member))
            found = []
            for members in devices.values():
                place = members[0][1].place
                found.append((members, needs(optimizer, fresh, place.device, place.grain, coming)))
    except Exception as error:  # the step runs even where no room could be made
        logger.warning("carom: what a step of %s takes is not known: %s", type(optimizer).__name__, error)
        return []
    return [(members, wanted) for members, wanted in found if wanted.state]


def _give(members: list[tuple[Any, _Member]], wanted: Needs) -> None:
    """Let sessions give up weights until ``wanted`` fits, the least used session first.

    A session is asked up to `TRIES` times, because the memory that it frees may be too fragmented for the
    state.
    """
    place = members[0][1].place
    before = place.memory()
    if before is None or not wanted.missing(before):
        return
    place.trim()  # the memory that the allocator keeps after this is too fragmented for the step's tensors
    activations = 0
    for session, _ in sorted(members, key=lambda pair: pair[1].used.uses(id(pair[0]))):
        for _ in range(TRIES):
            memory = place.memory()
            if memory is None:
                return
            # The first reading after `trim` gives this value. In later readings `cached` includes
            # fragments that weights left behind, which activations cannot use either.
            activations = max(activations, before.cached - memory.cached)
            missing = wanted.missing(memory, activations)
            given = session.release(missing, of_device=True) if missing else 0
            if not given:
                break
            logger.info("carom: %s of weights gave way to an optimizer's state", format_size(given))


__all__ = ["Needs", "enter", "fresh_in", "leave", "make_room", "needs", "reserved", "where_trained"]
