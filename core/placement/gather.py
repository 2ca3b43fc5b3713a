"""Defines `Gather`: a unit's bytes are copied to the devices of several ranks over all of their links at once.

Each rank copies its part of the bytes from host memory, and the ranks exchange the parts between their devices by an
all-gather of torch.distributed (NCCL over NVLink or PCIe, gloo for CPU tensors). Of N ranks, each then copies 1/N of
the bytes over its own link. All ranks must fetch the same units in the same order (`FetchOrder` checks it), so all
have the same layout, and the layout does not follow measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.errors import GroupError
from ..device.engine import Engine
from .fetch_order import WHOLE, FetchOrder

ALIGN = 512  # bytes; each rank's part of a unit starts at a multiple of this


@dataclass(frozen=True)
class Parts:
    """The division of a unit's bytes: ``own`` (start, end) is copied by this rank, the bytes below ``gathered`` are
    exchanged, and those from there on, fewer than `ALIGN` a rank, are copied by every rank.
    """

    own: tuple[int, int]
    gathered: int

    def spans(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the byte ranges that this rank copies of a unit of ``nbytes`` bytes."""
        return [span for span in (self.own, (self.gathered, nbytes)) if span[0] < span[1]]


def divide(nbytes: int, rank: int, size: int) -> Parts:
    """Return how ``size`` ranks divide ``nbytes`` bytes, for the rank ``rank``."""
    part = nbytes // (size * ALIGN) * ALIGN
    return Parts((rank * part, (rank + 1) * part), size * part)


class _AllGather:
    """An all-gather as a `Decoder`, so that an engine runs it on its decode stream, after the copy and beside others."""

    raw_copies: Sequence[tuple[int, int, int]] = ()

    def __init__(self, engine: Engine, group: Any) -> None:
        self._engine, self._group = engine, group
        dist = torch.distributed
        self._all_gather = getattr(
            dist, "all_gather_single", dist.all_gather_into_tensor
        )  # renamed in torch 2.13

    def __call__(self, wire: torch.Tensor, target: torch.Tensor, /) -> None:
        """Gather ``wire``, this rank's part of ``target``, with the parts of the other ranks into ``target``."""
        # The backend's threads keep the tensors for an unknown time. With the storage of the slot they would change
        # whether the slot counts as in use, and the ranks would evict different units.
        into, part = (self._engine.at(tensor.data_ptr(), tensor.numel(), None) for tensor in (target, wire))
        self._all_gather(into, part, group=self._group)

    def cached_launches(
        self, wire: torch.Tensor, target: torch.Tensor, /
    ) -> Sequence[Callable[..., Any]] | None:
        """Return None: torch.distributed launches its kernels itself."""
        return None


class Gather:
    """The all-gathers of one session with the device of ``engine``, over ``group``, a process group of its own.

    ``rank`` and ``size``: the position of this process in the group, and the number of ranks. ``order``: the units
    that were fetched.
    """

    def __init__(self, engine: Engine, group: Any, rank: int, size: int, order: FetchOrder) -> None:
        self.rank, self.size, self.order = rank, size, order
        self._engine, self._group = engine, group
        self._call = _AllGather(engine, group)

    def parts(self, nbytes: int) -> Parts:
        """Return how the ranks divide a unit of ``nbytes`` bytes."""
        return divide(nbytes, self.rank, self.size)

    def run(self, parts: Parts, target: torch.Tensor, copied: Any, name: str) -> Any:
        """Enqueue the exchange of the parts in ``target`` (uint8, on the device) after the event ``copied``, and return
        the event of its end. ``name``: of the unit, for errors.

        Raises GroupError if another rank has ended, or fetches nothing within the group's time-out. That the others
        fetch the same unit is seen only by `FetchOrder.compare`.
        """
        self.order.add(name)
        if not parts.gathered:
            return copied
        own = target[slice(*parts.own)]
        try:
            event, _ = self._engine.decode(self._call, own, target[: parts.gathered], (copied,), False)
        except RuntimeError as error:
            raise GroupError(
                f"{name}: the ranks fetch weights together, and another rank ended, closed its session or runs other "
                f"code than rank {self.rank} (with {WHOLE}=0 in the environment, each copies whole units): {error}"
            ) from error
        return event
