"""What a placement has on the device: what moved there together or alone, what of it stays at the next layout, and its
way home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .host_copies import HostCopy
from .plan import SMALL_UNIT, round_up
from .transfer import Engine
from .units import Entry, Site, Unit, is_dense


@dataclass(eq=False)
class Lot:
    """Device memory, from address ``start``, in which tensors went to the device together; ``copy``: their bytes on the
    host, where these were kept."""

    start: int
    nbytes: int
    copy: HostCopy | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is still there, and was not given other memory by the model."""
        return self.start <= tensor.data_ptr() < self.start + max(1, self.nbytes)


@dataclass(eq=False)
class Moved:
    """A tensor that went to the device, and where it has to return to; ``lot``: None where it went alone; ``sites``: where a
    buffer stands that the model made there."""

    tensor: torch.Tensor
    home: torch.device
    lot: Lot | None = None
    sites: Sequence[Site] = ()


class OnDevice:
    """The tensors that one placement has on the device, or received there from the one before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.moved: list[Moved] = []
        self.leaving: dict[int, Moved] = {}  # received, and to stream from where they are
        self.received: set[int] = set()  # that the placement before left here, while attaching
        self.has_left = False  # since memory was last given back

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device already."""
        if id(tensor) in self.received:
            return True
        # The CPU as a session's device has slots and buffers of its own: its tensors move like any.
        engine = self._engine
        return engine.location.type != "cpu" and engine.locate(tensor) == engine.location

    def home_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor that is to stream returns to in the end."""
        left = self.leaving.get(id(tensor))
        return self._engine.locate(tensor) if left is None else left.home

    @torch.inference_mode(False)
    def bring(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Have a tensor here, alone; returns what it was elsewhere, None where it was here."""
        engine = self._engine
        home, before = engine.locate(tensor), tensor.detach()
        if home == engine.location:
            return None
        relocate(tensor, engine.location, engine)
        self.moved.append(Moved(tensor, home))
        return before

    def replaced(self, entries: dict[int, Entry]) -> None:
        """The model put others in the place of tensors that are here: they go home in their stead. ``entries``: what they
        are now, by the id of what they were."""
        for moved in self.moved:
            entry = entries.get(id(moved.tensor))
            if entry is not None:
                moved.tensor, moved.sites = entry.tensor, entry.sites
                if (
                    not entry.tensor.is_inference()
                    and self._engine.locate(entry.tensor) != self._engine.location
                ):
                    relocate(entry.tensor, self._engine.location, self._engine)

    def made(self, entry: Entry, home: torch.device) -> None:
        """The model made a buffer: where it is here, it goes ``home`` in the end."""
        if self._engine.locate(entry.tensor) == self._engine.location != home:
            self.moved.append(Moved(entry.tensor, home, sites=entry.sites))

    def let_go(self, tensors: list[torch.Tensor]) -> list[Moved] | None:
        """What is known of tensors that leave within a pass; None where one has to return to a device."""
        wanted = set(map(id, tensors))
        moved = [moved for moved in self.moved if id(moved.tensor) in wanted]
        if any(one.home.type != "cpu" for one in moved):
            return None
        self.moved = [moved for moved in self.moved if id(moved.tensor) not in wanted]
        return moved

    # -- from one placement to the next

    def given(self) -> list[Moved]:
        """All that is here: it is the caller's from now on."""
        left, self.moved = self.moved, []
        return left

    def receive(self, left: list[Moved]) -> None:
        """Tensors are here already, and are to be brought home from now on."""
        self.moved += left

    @torch.inference_mode(False)
    @torch.no_grad()
    def keep(
        self,
        lots: list[list[Entry]],
        alone: Sequence[Entry],
        streamed: Sequence[Unit],
        stands_on_host: Callable[[list[Moved], Lot | None], bool],
    ) -> int:
        """Of what was received, what lies here just so from now on stays; the rest goes home, before anything comes, but
        for units that are to stream (``streamed``): those go to their blocks from where they are.

        ``stands_on_host`` lets tensors stand where the host still has their bytes, and says whether it has. Returns the
        bytes of the lots that stay, as the allocator reserves them.
        """
        wanted = {frozenset(id(entry.tensor) for entry in lot) for lot in lots}
        single = {id(entry.tensor) for entry in alone}
        leaving = {id(entry.tensor) for unit in streamed for entry in unit.entries}
        together: dict[int, list[Moved]] = {}
        for moved in self.moved:
            together.setdefault(id(moved.lot or moved), []).append(moved)
        self.moved = []
        waiting = list(reversed(together.values()))
        stays = 0
        try:
            while waiting:
                members = waiting[-1]
                lot, names = members[0].lot, frozenset(id(moved.tensor) for moved in members)
                if lot is None and names <= single:
                    self._stay(members)
                elif (
                    lot is not None and names in wanted and all(lot.holds(moved.tensor) for moved in members)
                ):
                    self._stay(members)
                    stays += round_up(lot.nbytes, self._engine.grain)
                elif not stands_on_host(members, lot):
                    self._go(members, leaving)
                waiting.pop()
        except BaseException:  # whoever undoes this must know of all that is on the device
            known = {id(moved) for moved in (*self.moved, *self.leaving.values())}
            self.moved += [moved for members in waiting for moved in members if id(moved) not in known]
            raise
        return stays

    def _stay(self, members: list[Moved]) -> None:
        self.moved += members
        self.received |= {id(moved.tensor) for moved in members}

    def _go(self, members: list[Moved], leaving: set[int]) -> None:
        """Home, or to be streamed from here."""
        lot = members[0].lot
        # What lies together with others goes at once: its memory is free only when all have gone.
        later = all(id(moved.tensor) in leaving for moved in members)
        later = later and (lot is None or lot.nbytes >= SMALL_UNIT)
        for moved in members:
            # (A gradient goes home with its tensor.)
            if later and not moved.tensor.is_inference() and not _has_gradient(moved.tensor):
                self.leaving[id(moved.tensor)] = moved
                self.has_left = True
            else:
                self._bring_home(moved)

    # -- the way home

    def undo(self) -> None:
        """Every tensor goes home. May be called again where it failed."""
        for moved in reversed(self.moved):
            self._bring_home(moved)
        self.moved.clear()
        self.received.clear()
        for moved in self.leaving.values():
            self._bring_home(moved)
        self.leaving.clear()

    def _bring_home(self, moved: Moved) -> None:
        if (
            moved.tensor.is_inference()
        ):  # made by the model: it may not be touched, but its place in the tree may
            if self._engine.locate(moved.tensor) != moved.home:
                at_home = self._engine.move(moved.tensor, moved.home)
                for site in moved.sites:
                    if site.table.get(site.name) is moved.tensor:
                        site.table[site.name] = at_home
            return
        if self._engine.locate(moved.tensor) != moved.home:
            relocate(moved.tensor, moved.home, self._engine)
        else:  # the CPU as device: leave the session's buffer for memory of its own
            moved.tensor.data = moved.tensor.data.clone(memory_format=torch.preserve_format)


def lots_of(units: list[Unit], entries: list[Entry]) -> tuple[list[list[Entry]], list[Entry]]:
    """(entries that go to the device together, entries that go alone) of what is to stay there; the last lot is all that
    is small. A buffer goes alone: the model may resize it, which needs a storage of its own."""
    lots = [unit.entries for unit in units if unit.nbytes >= SMALL_UNIT]
    small = [entry for unit in units if unit.nbytes < SMALL_UNIT for entry in unit.entries]
    alone: list[Entry] = []
    for entry in entries:
        together = entry.nbytes < SMALL_UNIT and not entry.is_buffer and is_plain(entry.tensor)
        (small if together else alone).append(entry)
    return [*lots, small], alone


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all there is to it."""
    strided = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, nn.Parameter)
    return strided and tensor.numel() > 0 and is_dense(tensor)


def relocate(tensor: torch.Tensor, to: torch.device, engine: Engine) -> None:
    """Move values and gradient; the object stays."""
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None:
        tensor.grad = None
    replace(tensor, engine.move(tensor.detach(), to))
    if grad is not None:
        tensor.grad = engine.move(grad, to)


def replace(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.data = new


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.grad is not None
