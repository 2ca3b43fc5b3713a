"""What looks at pieces once they are read, such as checksums: on threads of its own, several at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .held import Buffer
from .pieces import Piece

_THREADS = 4  # on one, checksums of 1 to 6 GB/s could hold up a fast drive


class Inspectors:
    """Call ``inspect`` with a piece and its bytes (uint8); what it returns is kept in the buffer."""

    def __init__(self, inspect: Callable[[Piece, torch.Tensor], Any]) -> None:
        self._inspect = inspect
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="carom-check")

    def look(self, buffer: Buffer, looked: Callable[[Buffer], None]) -> None:
        """Begin to look at the buffer's piece; ``looked`` is called in the end. RuntimeError as the interpreter ends."""
        self._threads.submit(self._look, buffer, looked)

    def _look(self, buffer: Buffer, looked: Callable[[Buffer], None]) -> None:
        assert buffer.piece is not None
        try:
            buffer.found = self._inspect(buffer.piece, buffer.block.data[: buffer.piece.nbytes])
        except BaseException as error:  # noqa: BLE001 - who needs the piece is told
            buffer.error = error
        looked(buffer)

    def close(self) -> None:
        """Wait for what was begun."""
        self._threads.shutdown(wait=True)
