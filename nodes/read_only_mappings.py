"""`ReadOnlyMappings`: which memory of this process is a mapped file that the process may not write to."""

from __future__ import annotations

import contextlib
import sys


class ReadOnlyMappings:
    """The address ranges of mapped files that this process may not write to, at the time of the call.

    ``known``: whether the system lists mappings (Linux).
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.known = False
        if not sys.platform.startswith("linux"):
            return
        with (
            contextlib.suppress(OSError),
            open("/proc/self/maps", encoding="utf-8", errors="replace") as maps,
        ):
            for line in maps:
                parts = line.split(maxsplit=5)
                if len(parts) == 6 and parts[4] != "0" and "w" not in parts[1]:
                    start, _, end = parts[0].partition("-")
                    self._ranges.append((int(start, 16), int(end, 16)))
            self.known = True

    def contain(self, address: int) -> bool:
        """Return whether the byte at ``address`` lies in such a mapping."""
        return any(start <= address < end for start, end in self._ranges)
