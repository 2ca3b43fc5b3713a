"""Defines `GradientBuffers`: pinned host buffers into which the gradients of trainable streamed weights are
copied.

Each weight has at most two buffers, which are used in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..device.engine import Engine, storage_uses
from ..host.arena import Block, HostArena
from ..model.wrapper_cache import alone
from .gradient_delivery import accumulate

if TYPE_CHECKING:
    from ..model.home import Home


@dataclass(frozen=True)
class _PendingCopy:
    """A gradient that is being copied from the device to the host buffer ``landing``."""

    home: Home
    landing: torch.Tensor
    event: Any  # reached when the copy is done
    task: int  # id of the backward pass that computed the gradient


class Buffer:
    """A pinned host buffer for the gradients of one weight.

    ``tensor``: a tensor that uses the memory of ``block``.
    """

    def __init__(self, tensor: torch.Tensor, block: Block) -> None:
        self._tensor_list, self.block = [tensor], block
        self._uses = storage_uses(tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor over the buffer's memory."""
        return self._tensor_list[0]

    def kept_elsewhere(self) -> bool:
        """Return whether other code holds the tensor, or another tensor that uses its memory."""
        return not alone(self._tensor_list) or storage_uses(self.tensor) != self._uses


class ArrivedGradients(list[_PendingCopy]):
    """The gradients of one finished backward pass, all on the host."""

    def add_up(self, show_host_tensors: Callable[[bool], None]) -> None:
        """Sum the gradients of each weight, and add each sum to ``.grad`` once, as autograd does.

        ``show_host_tensors`` is called with True before and with False after each addition, so that the
        user's gradient hooks see the host tensors.
        """
        sums: dict[int, tuple[Home, torch.Tensor]] = {}
        for copy in self:
            if id(copy.home) in sums:
                sums[id(copy.home)][1].add_(copy.landing)
            else:
                sums[id(copy.home)] = copy.home, copy.landing
        for home, gradient in sums.values():
            # The thread is in a backward pass, where operators on a weight use its slot. An optimizer that
            # runs in a hook has to update the host tensors instead.
            show_host_tensors(True)
            try:
                accumulate(home.tensor, gradient)
            finally:
                show_host_tensors(False)


class GradientBuffers:
    """Pinned host buffers for gradients, and the copies to them that are not done yet. Must be called under
    the streamer's lock.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arena: HostArena | None = None
        self._pending: list[_PendingCopy] = []
        self._landing: set[int] = set()  # addresses of the buffers of pending copies
        self._buffers: dict[Home, list[Buffer]] = {}
        self._blocks: list[Block] = []

    def start(self, arena: HostArena) -> None:
        """Set ``arena`` as the allocator of the buffers."""
        self._arena = arena

    def send(self, home: Home, gradient: torch.Tensor, task: int) -> None:
        """Enqueue the copy of a gradient to the host, without waiting.

        ``home``: the home of the weight (the object that reads and writes its value on the host).
        ``task``: the id of the backward pass.
        """
        landing = self._free_buffer(home)
        with torch.no_grad():
            event = self._engine.copy_out(landing, gradient.detach().to(landing.dtype))
        self._pending.append(_PendingCopy(home, landing, event, task))
        self._landing.add(landing.data_ptr())

    def has(self, home: Home, task: int) -> bool:
        """Return whether a gradient of the weight was sent in the pass with the id ``task``."""
        return any(copy.home is home and copy.task == task for copy in self._pending)

    def arrive(self, task: int) -> ArrivedGradients:
        """Wait for all gradients of the pass with the id ``task``, and return them."""
        landed = ArrivedGradients(copy for copy in self._pending if copy.task == task)
        self.forget(task)
        for event in {id(copy.event): copy.event for copy in landed}.values():
            self._engine.synchronize(event)
        return landed

    def forget(self, task: int) -> None:
        """Drop the gradients of the pass with the id ``task``."""
        self._pending = [copy for copy in self._pending if copy.task != task]
        self._landing = {copy.landing.data_ptr() for copy in self._pending}

    def forget_all(self) -> None:
        """Drop the gradients of all passes."""
        self._pending.clear()

    def _free_buffer(self, home: Home) -> torch.Tensor:
        """Return a buffer of the weight that no pending copy, ``.grad`` or other code uses. Allocates a
        buffer if there is none.
        """
        buffers = self._buffers.setdefault(home, [])
        for buffer in list(buffers):
            if buffer.tensor.data_ptr() in self._landing:
                continue
            if not buffer.kept_elsewhere():
                return buffer.tensor
            if home.tensor.grad is None or home.tensor.grad.data_ptr() != buffer.tensor.data_ptr():
                # other code keeps an earlier gradient in this buffer, and owns the memory from now on
                buffers.remove(buffer)
                buffer.block.unpin()
        buffers.append(self._new_buffer(home))
        return buffers[-1].tensor

    def _new_buffer(self, home: Home) -> Buffer:
        """Return a new pinned buffer with the weight's shape and strides."""
        assert self._arena is not None
        block = self._arena.allocate(home.entry.nbytes)
        self._arena.pin(block)
        self._blocks.append(block)
        with torch.inference_mode(False):
            return Buffer(
                block.data.view(home.host.dtype).as_strided(home.host.shape, home.host.stride()), block
            )

    def close(self) -> None:
        """Drop pending copies and unpin the buffers. Gradients in ``.grad`` keep their memory."""
        self._pending.clear()
        self._landing.clear()
        self._buffers.clear()
        for block in self._blocks:
            block.unpin()
        self._blocks.clear()
