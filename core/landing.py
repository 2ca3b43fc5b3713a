"""Where gradients of trainable streamed weights land: pinned host buffers, two at most in turn for each weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .deliver import accumulate
from .made_once import alone
from .store.arena import Block, HostArena
from .transfer import Engine, storage_uses

if TYPE_CHECKING:
    from .streamed import Owner


@dataclass(frozen=True)
class _Flight:
    owner: Owner
    landing: torch.Tensor
    event: Any  # the copy is done
    task: int  # the backward pass it belongs to


class Buffer:
    """Host memory that gradients of one weight land in: ``tensor``, over the bytes of ``block``."""

    def __init__(self, tensor: torch.Tensor, block: Block) -> None:
        self._alone, self.block = [tensor], block
        self._uses = storage_uses(tensor)

    @property
    def tensor(self) -> torch.Tensor:
        return self._alone[0]

    def kept_elsewhere(self) -> bool:
        """Whether anybody else has the tensor, or another tensor of its memory."""
        return not alone(self._alone) or storage_uses(self.tensor) != self._uses


class Landed(list[_Flight]):
    """Gradients of one finished backward pass, all of them on the host."""

    def add_up(self) -> None:
        """As autograd does: what one pass adds up for a weight is added to ``.grad`` once."""
        sums: dict[int, tuple[Owner, torch.Tensor]] = {}
        for flight in self:
            if id(flight.owner) in sums:
                sums[id(flight.owner)][1].add_(flight.landing)
            else:
                sums[id(flight.owner)] = flight.owner, flight.landing
        for owner, gradient in sums.values():
            runs = owner.streamer.runs
            runs.hosting(
                True
            )  # within a backward, but it is the host's values that an optimizer in a hook steps
            try:
                accumulate(owner.tensor, gradient)
            finally:
                runs.hosting(False)


class Landings:
    """Host buffers and the copies on their way to them. Called under the streamer's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arena: HostArena | None = None
        self._flights: list[_Flight] = []
        self._blocks: list[Block] = []

    def start(self, arena: HostArena) -> None:
        """Buffers will come from ``arena``."""
        self._arena = arena

    def send(self, owner: Owner, gradient: torch.Tensor, task: int) -> None:
        """Start the copy of a gradient of pass ``task``; the host does not wait."""
        landing = self._free_buffer(owner)
        with torch.no_grad():
            event = self._engine.copy_out(landing, gradient.detach().to(landing.dtype))
        self._flights.append(_Flight(owner, landing, event, task))

    def arrive(self, task: int) -> Landed:
        """Wait for all gradients of pass ``task``."""
        landed = Landed(flight for flight in self._flights if flight.task == task)
        self.forget(task)
        for event in {id(flight.event): flight.event for flight in landed}.values():
            self._engine.synchronize(event)
        return landed

    def forget(self, task: int) -> None:
        self._flights = [flight for flight in self._flights if flight.task != task]

    def _free_buffer(self, owner: Owner) -> torch.Tensor:
        """A buffer that no pending copy uses, and nobody else: neither ``.grad`` nor who kept an earlier one."""
        taken = {flight.landing.data_ptr() for flight in self._flights}
        for buffer in list(owner.landing):
            if buffer.tensor.data_ptr() in taken:
                continue
            if not buffer.kept_elsewhere():
                return buffer.tensor
            if owner.tensor.grad is None or owner.tensor.grad.data_ptr() != buffer.tensor.data_ptr():
                owner.landing.remove(buffer)  # somebody keeps an earlier gradient: the memory is theirs now
                buffer.block.unpin()
        owner.landing.append(self._new_buffer(owner))
        return owner.landing[-1].tensor

    def _new_buffer(self, owner: Owner) -> Buffer:
        """Pinned host memory laid out like the weight."""
        assert self._arena is not None
        block = self._arena.allocate(owner.entry.nbytes)
        self._arena.pin(block)
        self._blocks.append(block)
        with torch.inference_mode(False):
            return Buffer(
                block.data.view(owner.host.dtype).as_strided(owner.host.shape, owner.host.stride()), block
            )

    def close(self) -> None:
        """Give up what is on its way and unpin; ``.grad`` keeps its memory."""
        self._flights.clear()
        for block in self._blocks:
            block.unpin()
