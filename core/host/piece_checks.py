"""A thread pool that inspects the host cache's pieces (ranges of weights) after they were read, for example
to compute their checksums.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .cache_buffer import Buffer
from .cache_pieces import CachePiece

_THREADS = 4  # with one thread, checksums at 1 to 6 GB/s could slow down a fast drive


class InspectionPool:
    """A thread pool that calls ``inspect`` with a piece and its bytes (uint8) and stores the result in the
    buffer.
    """

    def __init__(self, inspect: Callable[[CachePiece, torch.Tensor], Any]) -> None:
        self._inspect = inspect
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="carom-check")

    def submit(self, buffer: Buffer, done: Callable[[Buffer], None]) -> None:
        """Submit the piece in ``buffer`` for inspection; ``done`` is called with the buffer afterwards.

        Raises RuntimeError if the interpreter is shutting down.
        """
        self._threads.submit(self._run, buffer, done)

    def _run(self, buffer: Buffer, done: Callable[[Buffer], None]) -> None:
        """Inspect the buffer's piece and store the result or the error."""
        assert buffer.piece is not None
        try:
            buffer.inspection = self._inspect(buffer.piece, buffer.block.data[: buffer.piece.nbytes])
        except BaseException as error:  # noqa: BLE001 - `HostCache.acquire` raises the error
            buffer.error = error
        done(buffer)

    def close(self) -> None:
        """Wait until all submitted pieces are inspected."""
        self._threads.shutdown(wait=True)
