"""Before an optimizer's first step: room on the device for the state that the step will make.

With ``vram="auto"`` weights take what steps leave free, and until an optimizer has stepped nothing shows what it will
keep. A step that runs out of memory half way leaves a state that later steps fall over. So torch tells of every step that
begins (one hook for all optimizers, while any session's budget follows a device); what parameters with a gradient and
without state will need is estimated, and where it is not free sessions hold less, the one used least first. The
allocator's cache is not counted as free for what stays: the next step's activations return there.

A step whose parameters all have their state pays a few microseconds.
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

from ..common.memory import Memory
from ..common.sizes import MIB, format_size
from ..model import managed_tensor
from ..plan.region import ALIGN
from ..plan.residency import round_up
from .device_governor import LOW, Governor

logger = logging.getLogger("carom")
VALUES = 2  # kept for each value trained, by Adam and its kin: two moments; of others nothing is known
FOUND = 2  # more where the step's size is found on the way (Prodigy): where training began, and a sum of gradients
TRIES = 4  # layouts of one session before a step
FULL = 4  # bytes: optimizers other than torch's keep values in full precision, whatever the parameter's

# How torch's CUDA allocator reserves: up to the first, many share a segment; below the second, a segment of the third is
# divided; from there on each has its own (c10/cuda/CUDACachingAllocator.h: kSmallSize, kMinLargeAlloc, kLargeBuffer).
_SMALL, _LARGE, _SHARED = MIB, 10 * MIB, 20 * MIB


@dataclass(frozen=True)
class Needs:
    """Bytes of a device that a step newly takes: ``state`` it keeps, ``passing`` it gives back at its end."""

    state: int = 0
    passing: int = 0

    def missing(self, memory: Memory, activations: int = 0) -> int:
        """Bytes that weights have to leave for it, so that the headroom is free after it; 0 where it fits.

        ``activations``: what the next forward and backward want of what is free; what passes may use it meanwhile.
        """
        wanted = self.state + max(self.passing, activations)
        headroom = Governor.headroom(memory)
        if not self.state or memory.free >= wanted + LOW * headroom:
            return 0
        return wanted + headroom - memory.free


def reserved(nbytes: int, grain: int) -> int:
    """Device bytes that a tensor of ``nbytes`` takes; ``grain``: what the allocator rounds large ones up to."""
    exact = round_up(nbytes, ALIGN)
    if grain < _SMALL or exact <= _SMALL:
        return exact
    return _SHARED // (_SHARED // exact) if exact < _LARGE else round_up(exact, grain)


def needs(
    optimizer: torch.optim.Optimizer, fresh: set[int], device: torch.device, grain: int, coming: bool = False
) -> Needs:
    """What a step of ``optimizer`` takes on ``device`` beside what is there: ``fresh`` are the ids of parameters that get
    their state in it. ``coming``: gradients come, and are stepped, one by one."""
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
    """Bytes of one of the values kept for ``parameter``."""
    size = parameter.element_size()
    if "foreach" not in group:  # torch's own have it; their state has the parameter's dtype
        size = max(size, FULL)
        bits = getattr(
            getattr(optimizer, "args", None), "optim_bits", None
        )  # bitsandbytes says what it keeps
        if bits == 8:
            size = 1
    return parameter.numel() * size


def _passing(
    group: dict[str, Any], copies: list[int], values: int, device: torch.device, one_by_one: bool
) -> int:
    """Bytes that stepping a group takes for a while."""
    if "foreach" not in group:  # each parameter in its turn, all that is computed for it apart
        return values * max(copies)
    if group.get("fused"):
        return 0
    # Of torch's, those that step a group at once hold one more copy of it: roots of second moments in Adam, for one.
    at_once = group["foreach"] if group["foreach"] is not None else device.type != "cpu"
    return sum(copies) if at_once and not one_by_one else max(copies)


def where_trained(module: nn.Module) -> str | None:
    """``training`` (see `stream`) where a budget follows the device: what trains beside larger frozen weights stays on
    the device whatever the budget is by now, because its optimizer's state is, or will be, there."""
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
    """Of an optimizer: its parameters, its states, and the parameters that had neither state nor gradient so far."""

    count: int
    states: int
    left: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()


def fresh_in(optimizer: torch.optim.Optimizer, coming: bool = False) -> set[int]:
    """Ids of the parameters that get their state in the step that begins; of each it is told once. ``coming``: of those
    without a gradient too."""
    state, groups = optimizer.state, optimizer.param_groups
    count = sum(len(group["params"]) for group in groups)
    seen = _seen.get(optimizer)
    if (
        seen is None or seen.count != count or len(state) < seen.states
    ):  # new ones, or a state that was dropped
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
    """A session's ledger, which lets residents leave where memory is short."""

    def release(self, nbytes: int, of_device: bool = False) -> int: ...


class Place(Protocol):
    """An engine: where a session computes."""

    device: torch.device
    grain: int

    def memory(self) -> Memory | None: ...
    def trim(self) -> None: ...


class Used(Protocol):
    """Tells how often sessions were used lately."""

    def uses(self, key: int) -> int: ...


@dataclass(frozen=True)
class _Member:
    place: Place
    key: Hashable  # of the device
    used: Used


_members: weakref.WeakKeyDictionary[Any, _Member] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_hook: Any = None
_register: Any = getattr(
    importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_pre_hook", None
)
_graph_task = torch._C._current_graph_task_id


def enter(session: Giver, place: Place, key: Hashable, used: Used) -> None:
    """``session`` gives way before optimizers' steps, on the device that ``key`` names."""
    global _hook
    with _lock:
        _members[session] = _Member(place, key, used)
        if _hook is None and _register is not None:
            _hook = _register(_before_step)


def leave(session: Giver) -> None:
    """It does so no more."""
    with _lock:
        _members.pop(session, None)
        _unhook()


def _unhook() -> None:
    """Nobody is left to give way (sessions may be dropped unclosed): torch need not tell of steps."""
    global _hook
    if not _members and _hook is not None:
        _hook.remove()
        _hook = None


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or _graph_task() != -1:
        return  # nothing may move within a backward
    make_room(optimizer)


def make_room(optimizer: torch.optim.Optimizer, coming: bool = False) -> None:
    """Let sessions give way for the state that ``optimizer``'s next step makes. ``coming``: for all parameters, whose
    gradients are not there yet and are to be stepped one by one.

    Raises torch.OutOfMemoryError where a session found no room for what it was to hold; nothing was stepped then.
    """
    for members, wanted in _wanted(optimizer, coming):
        _give(members, wanted)


def _wanted(optimizer: torch.optim.Optimizer, coming: bool) -> list[tuple[list[tuple[Any, _Member]], Needs]]:
    """Sessions of a device, and what the step takes there: of devices where it takes anything."""
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
    except Exception as error:  # making room is a service: the step runs all the same
        logger.warning("carom: what a step of %s takes is not known: %s", type(optimizer).__name__, error)
        return []
    return [(members, wanted) for members, wanted in found if wanted.state]


def _give(members: list[tuple[Any, _Member]], wanted: Needs) -> None:
    """The session that was used least gives first, and again where what it gave lies in pieces that nobody can use."""
    place = members[0][1].place
    before = place.memory()
    if before is None or not wanted.missing(before):
        return
    place.trim()  # what the allocator still keeps then lies in pieces: too small for the state, and for what passes
    activations = 0
    for session, _ in sorted(members, key=lambda pair: pair[1].used.uses(id(pair[0]))):
        for _ in range(TRIES):
            memory = place.memory()
            if memory is None:
                return
            # The first reading says it: pieces of what gave way since are no room for activations either.
            activations = max(activations, before.cached - memory.cached)
            missing = wanted.missing(memory, activations)
            given = session.release(missing, of_device=True) if missing else 0
            if not given:
                break
            logger.info("carom: %s of weights gave way to an optimizer's state", format_size(given))


__all__ = ["Needs", "enter", "fresh_in", "leave", "make_room", "needs", "reserved", "where_trained"]
