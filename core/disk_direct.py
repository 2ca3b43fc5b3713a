"""Resident weights read from the drive to the device past host memory, where GPUDirect Storage is real and faster."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .store import gds
from .store.packed_source import PackedSource
from .store.pieces import Piece
from .store.reader import DiskReader
from .transfer import Engine

logger = logging.getLogger("carom")


class Target(Protocol):
    """Device memory and the pieces that go there."""

    buffer: torch.Tensor
    pieces: deque[Piece]


@dataclass(frozen=True)
class _UnderWay:
    target: Target
    waits: list[Callable[[], None]]
    began: float


class DirectLoads:
    """Whole loads at a time, the next one asked for ahead."""

    def __init__(self, direct: gds.Direct) -> None:
        self._direct = direct
        self._under_way: dict[int, _UnderWay] = {}

    def bring(self, targets: Sequence[Target]) -> float:
        """Ask for all ``targets``; wait for the first: when (perf_counter) it was asked for. Raises what its reads raise."""
        for target in targets:
            if id(target) not in self._under_way:
                began = time.perf_counter()
                waits = [self._direct.submit(p.reads, target.buffer, p.start) for p in target.pieces]
                self._under_way[id(target)] = _UnderWay(target, waits, began)
        found = self._under_way[id(targets[0])]
        try:
            for wait in found.waits:
                wait()
        finally:
            del self._under_way[id(targets[0])]
        return found.began

    def close(self) -> None:
        """Nothing writes to device memory any more when this returns."""
        for found in self._under_way.values():
            for wait in found.waits:
                with contextlib.suppress(Exception):
                    wait()
        self._under_way.clear()
        self._direct.close()


def try_direct(
    engine: Engine, reader: DiskReader, targets: Sequence[Target], staging: Sequence[torch.Tensor]
) -> DirectLoads | None:
    """A way past host memory, if there is one and it brings the first pieces of ``targets`` faster than through ``staging``."""
    kvikio = gds.find(engine.device)
    sample = [(target, piece) for target in targets for piece in target.pieces][: len(staging)]
    packed = any(
        isinstance(r.file, PackedSource) for target in targets for piece in target.pieces for r in piece.reads
    )
    if kvikio is None or not sample or packed:  # packed tensors are decoded on the host
        return None
    direct = gds.Direct(kvikio)

    def past() -> float:
        began = time.perf_counter()
        for wait in [direct.submit(piece.reads, target.buffer, piece.start) for target, piece in sample]:
            wait()
        return time.perf_counter() - began

    def through() -> float:
        began, asked = time.perf_counter(), []
        for block, (_, piece) in zip(staging, sample, strict=False):
            asked.append([
                reader.submit_range(r.file, r.offset, r.nbytes, block[r.at : r.at + r.nbytes]) for r in piece.reads
            ])  # fmt: skip
        for block, (target, piece), handles in zip(staging, sample, asked, strict=False):
            for handle in handles:
                handle.result()
            here = target.buffer[piece.start : piece.start + piece.nbytes]
            engine.copy_in(here, block[: piece.nbytes], (), False)
        engine.synchronize()
        return time.perf_counter() - began

    try:
        if gds.faster(engine.device, sample[0][1].reads[0].file, past, through):
            return DirectLoads(direct)
    except Exception as error:
        logger.warning("carom: GPUDirect Storage failed its trial and is not used: %s", str(error))
    direct.close()
    return None
