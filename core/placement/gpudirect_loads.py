"""Loads resident weights from the drive to the device without host memory, where GPUDirect Storage is
available and faster."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..checkpoint.disk_reader import DiskReader
from ..checkpoint.packed_source import PackedSource
from ..device.engine import Engine
from ..host import gds
from ..host.cache_pieces import CachePiece

logger = logging.getLogger("carom")


class Target(Protocol):
    """Device memory, and the pieces that are read into it."""

    buffer: torch.Tensor
    pieces: deque[CachePiece]


@dataclass(frozen=True)
class _PendingLoad:
    """A load whose reads were submitted. ``began``: the time of submission (`time.perf_counter`), in
    seconds."""

    target: Target
    wait_functions: list[Callable[[], None]]
    began: float


class DirectLoads:
    """Loads through GPUDirect Storage. One whole load is completed at a time, while the reads of later loads
    are already submitted."""

    def __init__(self, direct: gds.GdsReader) -> None:
        self._direct = direct
        self._pending: dict[int, _PendingLoad] = {}

    def load(self, targets: Sequence[Target]) -> float:
        """Submit the reads of all ``targets``, and wait for the first target.

        Return the time (perf_counter, in seconds) at which the first target's reads were submitted. Raise the
        errors of its reads.
        """
        for target in targets:
            if id(target) not in self._pending:
                began = time.perf_counter()
                wait_functions = [self._direct.submit(p.reads, target.buffer, p.start) for p in target.pieces]
                self._pending[id(target)] = _PendingLoad(target, wait_functions, began)
        pending = self._pending[id(targets[0])]
        try:
            for wait in pending.wait_functions:
                wait()
        finally:
            del self._pending[id(targets[0])]
        return pending.began

    def close(self) -> None:
        """Wait for all reads. After the call nothing writes to device memory any more."""
        for pending in self._pending.values():
            for wait in pending.wait_functions:
                with contextlib.suppress(Exception):
                    wait()
        self._pending.clear()
        self._direct.close()


def try_direct(
    engine: Engine, reader: DiskReader, targets: Sequence[Target], staging: Sequence[torch.Tensor]
) -> DirectLoads | None:
    """Return a GPUDirect Storage loader if it reads the first pieces faster than through ``staging`` in host
    memory, else None."""
    kvikio = gds.load_kvikio(engine.device)
    sample = [(target, piece) for target in targets for piece in target.pieces][: len(staging)]
    packed = any(
        isinstance(r.file, PackedSource) for target in targets for piece in target.pieces for r in piece.reads
    )
    # The host decodes packed tensors, so their bytes have to pass host memory.
    if kvikio is None or not sample or packed:
        return None
    direct = gds.GdsReader(kvikio)

    def read_directly() -> float:
        """Return the seconds that the sample takes with GPUDirect Storage."""
        began = time.perf_counter()
        for wait in [direct.submit(piece.reads, target.buffer, piece.start) for target, piece in sample]:
            wait()
        return time.perf_counter() - began

    def read_via_host() -> float:
        """Return the seconds that the sample takes through the staging buffers in host memory."""
        began, submitted = time.perf_counter(), []
        for block, (_, piece) in zip(staging, sample, strict=False):
            submitted.append([
                reader.submit_range(r.file, r.offset, r.nbytes, block[r.at : r.at + r.nbytes]) for r in piece.reads
            ])  # fmt: skip
        for block, (target, piece), handles in zip(staging, sample, submitted, strict=False):
            for handle in handles:
                handle.result()
            target_bytes = target.buffer[piece.start : piece.start + piece.nbytes]
            engine.copy_in(target_bytes, block[: piece.nbytes], (), False)
        engine.synchronize()
        return time.perf_counter() - began

    try:
        if gds.is_faster(engine.device, sample[0][1].reads[0].file, read_directly, read_via_host):
            return DirectLoads(direct)
    except Exception as error:
        logger.warning("carom: GPUDirect Storage failed its trial and is not used: %s", str(error))
    direct.close()
    return None
