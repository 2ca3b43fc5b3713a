"""Defines `DeviceTensors`: the tensors that a placement has in device memory. It selects those that the next
layout keeps, and moves the others back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..common.run_all import run_all
from ..device.engine import Engine
from ..model.units import Entry, Site, Unit, is_dense
from ..plan.residency import SMALL_UNIT, round_up
from .host_copies import HostCopy


@dataclass(eq=False)
class SharedBuffer:
    """A device buffer, from address ``start``, into which tensors were moved together.

    ``unit``: the tensors with their offsets in the buffer.
    ``copy``: the host copy of their bytes, None if none was kept.
    """

    start: int
    unit: Unit
    copy: HostCopy | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.unit.nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is still in the buffer. False if the model has given the tensor other
        memory.
        """
        return self.start <= tensor.data_ptr() < self.start + max(1, self.nbytes)


@dataclass(eq=False)
class Moved:
    """A tensor that was moved to the device.

    ``origin``: the device to which the tensor returns.
    ``shared_buffer``: the buffer that contains the tensor, None if it was moved alone.
    ``sites``: for a buffer that the model created, its places in modules.
    """

    tensor: torch.Tensor
    origin: torch.device
    shared_buffer: SharedBuffer | None = None
    sites: Sequence[Site] = ()


class DeviceTensors:
    """The tensors that one placement moved to the device, or took over from the previous placement."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.moved: list[Moved] = []
        # taken over from the previous placement; the tier copies them directly from the device
        self.leaving: dict[int, Moved] = {}
        # Ids of tensors that were taken over from the previous placement. Emptied once the layout is
        # complete.
        self.received: set[int] = set()
        self.left_since_trim = False  # whether tensors left the device since the allocator was last trimmed

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is already on the device."""
        if id(tensor) in self.received:
            return True
        # If the session's device is the CPU, slots and buffers are separate memory in RAM, and tensors are
        # copied there as on any device.
        engine = self._engine
        return engine.location.type != "cpu" and engine.locate(tensor) == engine.location

    def origin_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the device to which ``tensor``, which is about to be streamed, returns at the end."""
        left = self.leaving.get(id(tensor))
        return self._engine.locate(tensor) if left is None else left.origin

    @torch.inference_mode(False)
    def move_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Move one tensor to the device. Returns its previous value, or None if it was already on the device."""
        engine = self._engine
        origin, before = engine.locate(tensor), tensor.detach()
        if origin == engine.location:
            return None
        relocate(tensor, engine.location, engine)
        self.moved.append(Moved(tensor, origin))
        return before

    def replaced(self, entries: dict[int, Entry]) -> None:
        """Update the records of tensors that the model replaced. At the end, the new tensors are moved back
        instead of the previous ones.

        ``entries``: the new tensors, by the id of the tensor that each replaces.
        """
        for moved in self.moved:
            entry = entries.get(id(moved.tensor))
            if entry is not None:
                moved.tensor, moved.sites = entry.tensor, entry.sites
                if (
                    not entry.tensor.is_inference()
                    and self._engine.locate(entry.tensor) != self._engine.location
                ):
                    relocate(entry.tensor, self._engine.location, self._engine)

    def adopt_buffer(self, entry: Entry, origin: torch.device) -> None:
        """Record a buffer that the model created. If the buffer is on the device, it moves to ``origin`` at
        the end.
        """
        if self._engine.locate(entry.tensor) == self._engine.location != origin:
            self.moved.append(Moved(entry.tensor, origin, sites=entry.sites))

    # -- changing from one placement to the next

    def hand_over(self) -> list[Moved]:
        """Return the records of all tensors on the device, and delete them here. The caller has to move the
        tensors back.
        """
        left, self.moved = self.moved, []
        return left

    def take_over(self, left: list[Moved]) -> None:
        """Record tensors that the previous placement left on the device. This object moves them back at the
        end.
        """
        self.moved += left

    @torch.inference_mode(False)
    @torch.no_grad()
    def keep_matching(
        self,
        groups: list[list[Entry]],
        alone: Sequence[Entry],
        streamed: Sequence[Unit],
        use_host_copy: Callable[[list[Moved], SharedBuffer | None], bool],
    ) -> int:
        """Keep the taken-over tensors that the new layout groups in exactly the same way. Move the others off
        the device.

        This is done before anything is loaded. Tensors of units that are about to be streamed (``streamed``)
        stay on the device until the tier has copied them.
        ``groups``: the tensors that share a device buffer in the new layout.
        ``alone``: the tensors that have memory of their own in the new layout.
        ``use_host_copy``: lets tensors use their host copy if it is valid, and returns whether it is.

        Returns the bytes of the buffers that stay, as the allocator reserves them.
        """
        wanted = {frozenset(id(entry.tensor) for entry in shared_buffer) for shared_buffer in groups}
        single = {id(entry.tensor) for entry in alone}
        leaving = {id(entry.tensor) for unit in streamed for entry in unit.entries}
        by_buffer: dict[int, list[Moved]] = {}
        for moved in self.moved:
            by_buffer.setdefault(id(moved.shared_buffer or moved), []).append(moved)
        self.moved = []
        undecided = list(reversed(by_buffer.values()))
        kept_bytes = 0
        try:
            while undecided:
                members = undecided[-1]
                shared_buffer, names = (
                    members[0].shared_buffer,
                    frozenset(id(moved.tensor) for moved in members),
                )
                if shared_buffer is None and names <= single:
                    self._keep(members)
                elif (
                    shared_buffer is not None
                    and names in wanted
                    and all(shared_buffer.holds(moved.tensor) for moved in members)
                ):
                    self._keep(members)
                    kept_bytes += round_up(shared_buffer.nbytes, self._engine.grain)
                elif not use_host_copy(members, shared_buffer):
                    self._move_off(members, leaving)
                undecided.pop()
        except BaseException:  # `undo` needs a record of every tensor that is still on the device
            known = {id(moved) for moved in (*self.moved, *self.leaving.values())}
            self.moved += [moved for members in undecided for moved in members if id(moved) not in known]
            raise
        return kept_bytes

    def _keep(self, members: list[Moved]) -> None:
        """Keep the tensors ``members`` on the device for this layout."""
        self.moved += members
        self.received |= {id(moved.tensor) for moved in members}

    def _move_off(self, members: list[Moved], leaving: set[int]) -> None:
        """Move tensors of one buffer back, or leave them on the device until the tier has copied them.

        ``leaving``: ids of the tensors that are about to be streamed.
        """
        shared_buffer = members[0].shared_buffer
        # Small tensors that share a buffer are moved off at once, because the buffer is freed only when all
        # its tensors have left.
        streams_from_device = all(id(moved.tensor) in leaving for moved in members)
        streams_from_device = streams_from_device and (
            shared_buffer is None or shared_buffer.nbytes >= SMALL_UNIT
        )
        for moved in members:
            # A tensor with a gradient is moved back now, together with its gradient.
            if streams_from_device and not moved.tensor.is_inference() and not _has_gradient(moved.tensor):
                self.leaving[id(moved.tensor)] = moved
                self.left_since_trim = True
            else:
                self._return_to_origin(moved)

    # -- moving tensors back

    def undo(self) -> None:
        """Move every tensor back to its original device. After a failure, the other tensors are moved nevertheless,
        and the call may be repeated.
        """
        everything = [*reversed(self.moved), *self.leaving.values()]
        run_all(*(partial(self._return_to_origin, moved) for moved in everything))
        self.moved.clear()
        self.received.clear()
        self.leaving.clear()

    @property
    def empty(self) -> bool:
        """Whether no tensor is left to be moved back."""
        return not (self.moved or self.leaving)

    def _return_to_origin(self, moved: Moved) -> None:
        """Move one tensor back to its original device."""
        # The model created an inference-mode tensor itself, and such a tensor cannot be changed in place.
        # Replace it in its modules instead.
        if moved.tensor.is_inference():
            if self._engine.locate(moved.tensor) != moved.origin:
                returned = self._engine.move(moved.tensor, moved.origin)
                for site in moved.sites:
                    if site.table.get(site.name) is moved.tensor:
                        site.table[site.name] = returned
            return
        if self._engine.locate(moved.tensor) != moved.origin:
            relocate(moved.tensor, moved.origin, self._engine)
        elif moved.shared_buffer is not None and moved.shared_buffer.holds(moved.tensor):
            # The session's device is the CPU: copy the tensor out of the session's buffer.
            moved.tensor.data = moved.tensor.data.clone(memory_format=torch.preserve_format)


def group_by_buffer(units: list[Unit], entries: list[Entry]) -> tuple[list[list[Entry]], list[Entry]]:
    """Return (groups of entries that share a buffer, entries that are moved alone), for all tensors that are
    to stay on the device.

    The last group holds all small tensors. A buffer of a module (``register_buffer``) is moved alone, because
    the model may resize it, which needs a storage of its own.
    """
    groups = [unit.entries for unit in units if unit.nbytes >= SMALL_UNIT]
    small = [entry for unit in units if unit.nbytes < SMALL_UNIT for entry in unit.entries]
    alone: list[Entry] = []
    for entry in entries:
        by_buffer = entry.nbytes < SMALL_UNIT and not entry.is_buffer and is_plain(entry.tensor)
        (small if by_buffer else alone).append(entry)
    return [*groups, small], alone


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is an ordinary dense strided tensor whose bytes are its whole state."""
    strided = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, nn.Parameter)
    return strided and tensor.numel() > 0 and is_dense(tensor)


def relocate(tensor: torch.Tensor, to: torch.device, engine: Engine) -> None:
    """Move the value and the gradient of a tensor to the device ``to``. The tensor object stays the same."""
    grad = tensor.grad if tensor.is_leaf else None
    new, new_grad = engine.move(tensor.detach(), to), None if grad is None else engine.move(grad, to)
    if grad is None:
        replace(tensor, new)
        return
    try:
        tensor.grad = None
        replace(tensor, new)
    finally:  # an interrupt must not cost the gradient
        tensor.grad = new_grad if tensor.device == new.device else grad


def replace(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Let the tensor object hold the data of ``new``."""
    tensor.data = new


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a leaf with a gradient."""
    return tensor.is_leaf and tensor.grad is not None
