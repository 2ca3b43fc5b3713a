"""A card with limited free memory: a second process holds the rest, and records the least free memory.

`set_per_process_memory_fraction` limits one allocator only, while ComfyUI, VBARs and vram="auto" read the free memory
of the card. The second process runs ``python card.py FREE_BYTES`` (0: hold nothing). A line on its stdin requests the
figures since the previous line, as JSON. A number in that line first changes the free bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

GRAIN = 2 << 20
POLL_S = 0.01  # seconds; more frequent calls of the driver would disturb the measured program


class Card:
    """A context manager that leaves ``free_bytes`` of the GPU's memory free (None: all); figures are bytes of the
    whole card.
    """

    def __init__(self, free_bytes: int | None, python: str = sys.executable) -> None:
        command = [python, str(Path(__file__).resolve()), str(free_bytes or 0)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start = self._answer()

    def figures(self) -> dict[str, int]:
        """Return ``free``, the free bytes now, and ``least_free``, the least since the last call."""
        return self._ask("")

    def leave(self, free_bytes: int) -> dict[str, int]:
        """Hold so much memory that ``free_bytes`` are free from now on (0: hold nothing); return the figures."""
        return self._ask(str(free_bytes))

    def _ask(self, words: str) -> dict[str, int]:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that holds the card's memory ended ({self._process.wait()})")
        return json.loads(line)

    def __enter__(self) -> Card:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def hold(free_bytes: int) -> list[Any]:
    """Allocate device memory until about ``free_bytes`` are free; return the tensors, which the caller must keep."""
    import torch

    held = [torch.zeros(1, device="cuda")]
    torch.cuda.synchronize()
    while free_bytes:
        over = (torch.cuda.mem_get_info()[0] - free_bytes) // GRAIN * GRAIN
        if over < 4 * GRAIN:
            break
        # Allocate somewhat less at first, then halves, because the allocator and the driver take additional memory.
        size = over - (256 << 20) if over > (1 << 30) else max(GRAIN, over // 2)
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return held


def touch(count: int) -> None:
    """Write to ``count`` bytes of host memory once in other processes, so that a virtual machine's memory has grown
    beforehand.
    """
    code = "import numpy, sys; numpy.empty(int(sys.argv[1]), numpy.uint8).fill(1)"
    pieces = max(1, min(16, count >> 30))
    running = [subprocess.Popen([sys.executable, "-c", code, str(count // pieces)]) for _ in range(pieces)]
    for process in running:
        process.wait()


def main(free_bytes: int) -> None:
    import torch

    held = hold(free_bytes)
    least = [torch.cuda.mem_get_info()[0]]
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            least[0] = min(least[0], torch.cuda.mem_get_info()[0])
            time.sleep(POLL_S)

    threading.Thread(target=watch, daemon=True).start()
    tell(least)
    for line in sys.stdin:
        if line.strip():
            held.clear()
            torch.cuda.empty_cache()
            held += hold(int(line))
            least[0] = torch.cuda.mem_get_info()[0]
        tell(least)
    ended.set()
    del held


def tell(least: list[int]) -> None:
    import torch

    free = torch.cuda.mem_get_info()[0]
    print(json.dumps({"free": free, "least_free": min(least[0], free)}), flush=True)
    least[0] = free


if __name__ == "__main__":
    main(int(sys.argv[1]))
