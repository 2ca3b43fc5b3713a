"""A unit's forward that ran out of memory runs again, after resident units that are needed later have given way.

In inference with ``vram="auto"``. First what is needed last: the unit that ran last. The unit that failed, and what is in use
around it, stay. What runs between the parts of a block that was split is the block's forward. It runs again only where everything that it could have changed is as it was: tensors that torch counts
writes to (inputs, parameters, buffers) were not written; inputs made in inference mode, to which it counts none, were copied
beforehand, which is done in passes with sizes of inputs that are new; random states are put back. Whatever is
in doubt goes to the whole forward (`adapt`), or is raised.

What a pass that goes well pays: under a microsecond a unit. In the first pass of every layout each unit is looked at: whether
it draws random numbers, changes attributes, and whether its inputs were ever written to. For most it does not, and
they were not: then that is still so when it fails, or it is not run again. Of the others versions and random states are noted.
"""

from __future__ import annotations

import itertools
import logging
import re
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import on_device
from .again import PLAIN, Before, shape
from .attach import Placement
from .hooks import OutOfMemory, Wrapped, _compiling, _untraced
from .sizes import format_size
from .transfer import Engine
from .units import Unit
from .yielding import Resident

if TYPE_CHECKING:
    from .streamed import Streamed
    from .streamer import Streamer

logger = logging.getLogger("carom")
TRIES = 3  # times that a unit's forward is run again at most
COPIES = 32 << 20  # bytes of a unit's inputs that are copied, where torch counts no writes to them
SHARE = 1 / 16  # of the resident units' bytes: what gives way at the first try, then twice as much each time
_ASKED = re.compile(r"Tried to allocate ([0-9.]+) ([KMG]iB|bytes)")
_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_AT_ONCE = frozenset(PLAIN)


@dataclass(eq=False)
class _Unit:
    """A module whose forward may run again; ``streamed``: the unit that streams for it, if any."""

    module: nn.Module
    streamed: Streamed | None
    known: _Known | None = None
    epoch: int = 0  # of its host bytes, when it was looked at
    fresh: bool = (
        False  # its inputs are of the kind that nobody ever wrote to, and it changes and draws nothing
    )
    draws: bool = False  # random numbers
    changes: bool = False  # what no version tells of, or may: it is given objects


class _Note(NamedTuple):
    """What a unit's forward found: ``versions`` of its inputs, ``random`` states where it draws, ``epoch`` of its host bytes;
    ``before``: in a pass in which it is looked at."""

    versions: list[tuple[torch.Tensor, int]]
    random: Any
    epoch: int
    before: Before | None = None


class _Known:
    """Parameters and buffers below a module and their versions, and what else its modules have (`again.shape`)."""

    def __init__(self, module: nn.Module) -> None:
        self._shapes = [(part, shape(part)) for part in module.modules()]
        self._tensors: list[tuple[dict, str, Callable[[], Any], int]] = []
        with torch._C.DisableTorchFunctionSubclass():
            tables: list[dict[str, Any]] = [
                t for part in module.modules() for t in (part._parameters, part._buffers)
            ]
            found: list[tuple[dict, str, Any]] = [
                (table, name, t) for table in tables for name, t in table.items() if t is not None
            ]
            self._countable = not any(t.is_inference() for _, _, t in found)
            if self._countable:
                self._tensors = [(table, name, weakref.ref(t), t._version) for table, name, t in found]

    @property
    def unchanged(self) -> bool:
        if any(shape(part) != before for part, before in self._shapes):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            for table, name, ref, version in self._tensors:
                tensor = table.get(name)
                if tensor is None or ref() is not tensor or tensor._version != version:
                    return False
        return self._countable


class Reruns:
    """Of one attachment of a session. ``units``: resident ones; those with device memory of their own may give way.

    ``blocks``: modules around parts that are units of their own, and what runs between these.
    """

    def __init__(
        self, engine: Engine, streamer: Streamer, placement: Placement, units: Sequence[Unit],
        blocks: Sequence[nn.Module], noticed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.engine, self._streamer, self._noticed = engine, streamer, noticed
        self._residents = [
            Resident(unit, self, placement)
            for unit in units
            if unit.modules and unit.nbytes >= on_device.SMALL_UNIT
        ]
        self._blocks = blocks
        self._wrapped = Wrapped()
        self._count = itertools.count(1).__next__
        self._on = False  # whether the pass is one of inference
        self._looking = False
        self._steady = False  # neither training nor looking
        self._begun: Any = None
        self.gave = False  # weights gave way since the layout was made
        self.again = 0  # forwards of units that were run again

    # -- passes

    def stand_in_front(self, root: nn.Module) -> None:
        """See the forwards of resident units and of blocks. (The root's own is the session's.)"""
        for resident in self._residents:
            for module in resident.unit.modules:
                if module is not root:
                    self._wrapped.forward(module, self._resident_forward(module, resident))
        for module in self._blocks:
            if module is not root:
                self._wrapped.forward(module, self.around(lambda inner: inner, module, None))

    def step_aside(self) -> None:
        """No longer stand in front of them: somebody compiles the model, whose graphs would break there."""
        self._wrapped.undo()

    def pass_begins(self, inference: bool, looking: bool) -> None:
        """``looking``: at everything, sizes of inputs are new."""
        self._on, self._looking = inference, looking
        self._steady = inference and not looking
        if inference:
            self._begun = self._random()

    def close(self) -> None:
        """What is away is on the host from here on. Idempotent."""
        self._wrapped.undo()
        self._on = self._steady = False
        for resident in self._residents:
            resident.close()
        self._residents = []

    # -- forwards

    def around(
        self, make: Callable[[Callable], Callable], module: nn.Module, streamed: Streamed | None
    ) -> Callable[[Callable], Callable]:
        """As ``make``, which lets ``module``'s forward run once, with further tries where it runs out of memory."""
        unit, before, after, again = _Unit(module, streamed), self._before, self._after, self._again
        gradient = torch.is_grad_enabled

        def made(inner: Callable) -> Callable:
            once = make(inner)

            @_untraced
            def forward(*args: Any, **kwargs: Any) -> Any:
                if gradient() or _compiling() is not None:
                    return once(*args, **kwargs)
                note = None if unit.fresh and self._steady else before(unit, args, kwargs)
                try:
                    result = once(*args, **kwargs)
                except OutOfMemory as error:
                    makes_room(unit, note, error, 0, args, kwargs)
                else:
                    if note is not None and note.before is not None:
                        after(unit, note)
                    return result
                return again(once, unit, note, args, kwargs)

            return forward

        makes_room = self._makes_room
        return made

    def _resident_forward(self, module: nn.Module, resident: Resident) -> Callable[[Callable], Callable]:
        """The same for a unit that is on the device, or brought. (One frame: it is in front of every such unit.)"""
        unit, before, after, again = _Unit(module, None), self._before, self._after, self._again
        makes_room, gradient, count = self._makes_room, torch.is_grad_enabled, self._count

        def make(inner: Callable) -> Callable:
            @_untraced
            def forward(*args: Any, **kwargs: Any) -> Any:
                resident.used = count()
                resident.depth += 1
                try:
                    if resident.away:
                        self.bring(resident)
                    if gradient() or _compiling() is not None:
                        return inner(*args, **kwargs)
                    note = None if unit.fresh and self._steady else before(unit, args, kwargs)
                    try:
                        result = inner(*args, **kwargs)
                    except OutOfMemory as error:
                        makes_room(unit, note, error, 0, args, kwargs)
                    else:
                        if note is not None and note.before is not None:
                            after(unit, note)
                        return result
                    return again(inner, unit, note, args, kwargs)
                finally:
                    resident.depth -= 1
                    if resident.host is not None and not resident.away:
                        self._rests(resident)

            return forward

        return make

    def _again(self, once: Callable, unit: _Unit, note: _Note | None, args: tuple, kwargs: dict) -> Any:
        """There is more memory than before: run until it suffices."""
        for tries in itertools.count(1):
            try:
                return once(*args, **kwargs)
            except OutOfMemory as error:
                self._makes_room(unit, note, error, tries, args, kwargs)
        return None

    # -- what is noted

    def _before(self, unit: _Unit, args: tuple, kwargs: dict) -> _Note | None:
        """What the forward finds; None where it may not run again."""
        if not self._on:
            return None
        epoch = 0 if unit.streamed is None else unit.streamed.epoch
        if self._looking or unit.known is None:
            unit.known, unit.epoch = _Known(unit.module), epoch
            # What nobody ever wrote needs no note: its version is zero, before and after.
            versions = _versions(args, kwargs)
            unit.fresh = versions is not None and not any(version for _, version in versions)
            # Objects come again: what they are is not looked for each time.
            unit.changes = versions is None and not torch.is_inference_mode_enabled()
            limit = COPIES if self._looking else 0
            return _Note([], self._random(), epoch, Before(unit.module, args, kwargs, limit))
        if unit.changes or torch.is_inference_mode_enabled():
            return None
        versions = _versions(args, kwargs)
        if versions is None:
            return None
        return _Note(versions, self._random() if unit.draws else None, epoch)

    def _after(self, unit: _Unit, note: _Note) -> None:
        """The forward went well: learn what it does besides."""
        assert note.before is not None and unit.known is not None
        unit.draws = unit.draws or not _same(note.random, self._random())
        unit.changes = unit.changes or not unit.known.unchanged
        unit.fresh = unit.fresh and not (unit.draws or unit.changes)

    def _random(self) -> tuple[torch.Tensor, ...]:
        """The states of the generators that a forward may draw from."""
        states = [torch.default_generator.get_state()]
        api: Any = None if self.engine.device.type == "cpu" else torch.get_device_module(self.engine.device)
        if hasattr(api, "get_rng_state"):
            states.append(api.get_rng_state(self.engine.device))
        return tuple(states)

    def _put_back(self, random: tuple[torch.Tensor, ...]) -> None:
        torch.default_generator.set_state(random[0])
        if len(random) > 1:
            torch.get_device_module(self.engine.device).set_rng_state(random[1], self.engine.device)

    def _restore(self, unit: _Unit, note: _Note | None, args: tuple, kwargs: dict) -> bool:
        """Put back what can be; False where something that the forward could have changed is not as it was."""
        if unit.known is None or not unit.known.unchanged or not self._on:
            return False
        if note is None:
            if not unit.fresh or not self._steady:
                return False
            versions = _versions(args, kwargs)
            if versions is None or any(version for _, version in versions):
                return False
            note = _Note([], None, unit.epoch)
        if unit.streamed is not None and unit.streamed.epoch != note.epoch:
            return False  # it wrote to its weights
        if note.before is not None:
            if not note.before.restore():
                return False
            self._put_back(note.random)
            return True
        if any(tensor._version != version for tensor, version in note.versions):
            return False
        if note.random is not None:
            self._put_back(note.random)
            return True
        return _same(self._begun, self._random())  # nothing drew since the pass began

    # -- giving way

    def _makes_room(
        self, unit: _Unit, note: _Note | None, error: BaseException, tries: int, args: tuple, kwargs: dict
    ) -> None:
        """A unit's forward ran out of memory: returns where it may run again, with more memory than before; else raises."""
        if getattr(error, "_carom_tried", False):
            raise error
        with self._streamer.lock:
            if self._streamer.runs.elsewhere() or not self._restore(unit, note, args, kwargs):
                raise error
            # The failed run's frames would keep its activations.
            traceback.clear_frames(error.__traceback__)
            freed = 0 if tries >= TRIES else self._evict(max(_asked(error), self._least << tries))
            if not freed:  # nor is there anything for a unit around this one
                error._carom_tried = True  # type: ignore[attr-defined]
                raise error
        self.again += 1
        name = type(unit.module).__name__ if unit.streamed is None else unit.streamed.name
        logger.info(
            "carom: %s ran out of memory: %s of weights gave way, it runs again", name, format_size(freed)
        )

    @property
    def _least(self) -> int:
        held = sum(resident.unit.nbytes for resident in self._residents) + self._streamer.packed_here.nbytes
        return int(SHARE * held)

    def _evict(self, wanted: int) -> int:
        """Let residents give up at least ``wanted`` bytes, what is needed last first; returns how many it was."""
        self.engine.synchronize()
        freed, order = 0, {id(resident): place for place, resident in enumerate(self._residents)}
        for resident in sorted(self._residents, key=lambda r: (-r.used, -order[id(r)])):
            if freed >= wanted:
                break
            freed += resident.leave()
        if freed < wanted:
            freed += self._streamer.packed_leave(wanted - freed)
        if freed:
            self.gave = True
            self._noticed()
            self.engine.trim()
        return freed

    def bring(self, resident: Resident) -> None:
        """It is needed: others give way where there is no room. Raises torch.OutOfMemoryError."""
        with self._streamer.lock:
            resident.depth += 1
            try:
                while resident.away:
                    try:
                        resident.come()
                    except OutOfMemory:
                        if not self._evict(resident.unit.nbytes):
                            raise
            finally:
                resident.depth -= 1

    def _rests(self, resident: Resident) -> None:
        """It was away and has run: its memory is somebody else's for the rest of the pass. (A graph may keep it.)"""
        if not torch.is_grad_enabled() and not self._streamer.runs.elsewhere():
            with self._streamer.lock:
                self.engine.synchronize()
                resident.leave()


def _versions(args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, int]] | None:
    """Of every tensor among the arguments; None where one has none (it was made in inference mode), or for other objects."""
    found = []
    try:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is torch.Tensor:
                found.append((value, value._version))
            elif type(value) not in _AT_ONCE:
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        found.append((leaf, leaf._version))
                    elif not isinstance(leaf, PLAIN):
                        return None
    except RuntimeError:
        return None
    return found


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _asked(error: BaseException) -> int:
    """Bytes that could not be had, as far as the message says."""
    found = _ASKED.search(str(error))
    return 0 if found is None else int(float(found[1]) * _BYTES[found[2]])
