"""Loading of weights that stay on the device with GPUDirect Storage: from the drive to the device without
host memory.

GPUDirect Storage is used only if it is available and faster than reading through host memory.
"""

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
from ..checkpoint.file_read import ReadTarget
from ..checkpoint.packed_source import PackedSource
from ..device.engine import Engine
from ..host import gds
from ..host.cache_pieces import CachePiece

logger = logging.getLogger("carom")


class Target(Protocol):
    """The interface of a load: device memory, and the pieces of the file that are read into it."""

    buffer: torch.Tensor
    pieces: deque[CachePiece]


@dataclass(frozen=True)
class _PendingLoad:
    """A load whose reads have been submitted.

    ``began``: the time of submission (`time.perf_counter`), in seconds.
    """

    target: Target
    wait_functions: list[Callable[[], None]]
    began: float


class DirectLoads:
    """Loads through GPUDirect Storage. The reads of several loads may be submitted; one load after another is
    completed.
    """

    def __init__(self, direct: gds.GdsReader) -> None:
        self._direct = direct
        self._pending: dict[int, _PendingLoad] = {}

    def load(self, targets: Sequence[Target]) -> float:
        """Submit the reads of all ``targets``, and wait for those of the first target.

        Returns the time (perf_counter, in seconds) at which the reads of the first target were submitted.
        Raises the errors of these reads.
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
        """Wait for all submitted reads, so that nothing writes to device memory after this call."""
        for pending in self._pending.values():
            for wait in pending.wait_functions:
                with contextlib.suppress(Exception):
                    wait()
        self._pending.clear()
        self._direct.close()


def try_direct(
    engine: Engine, reader: DiskReader, targets: Sequence[Target], staging: Sequence[torch.Tensor]
) -> DirectLoads | None:
    """Return a GPUDirect Storage loader, or None if it is unavailable or not faster.

    The first pieces of ``targets`` are read both ways, directly and through ``staging`` buffers in host
    memory, and timed.
    """
    kvikio = gds.load_kvikio(engine.device)
    sample = [(target, piece) for target in targets for piece in target.pieces][: len(staging)]
    via_host = any(
        isinstance(r.file, PackedSource) or reader.compares(r.file)
        for target in targets
        for piece in target.pieces
        for r in piece.reads
    )
    # Packed tensors are decoded by the host here, and those of spill files are compared with their checksums, so their
    # bytes have to be read to host memory.
    if kvikio is None or not sample or via_host:
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
            submitted.append(reader.submit_reads(piece.reads, ReadTarget.of(block)))
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
