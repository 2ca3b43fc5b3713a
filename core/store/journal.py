"""What a packing run has finished, on disk, so that a run killed at any moment is taken up where its data is safe.

One folder beside the destination holds the files being written and the journal: JSON lines, the first a fingerprint
of everything that decides the result, each other a source tensor whose bytes were synced before its line was
written. A torn last line is dropped with the bytes it spoke of; another fingerprint starts over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

from ..errors import CaromError
from .layout import Written


class PackError(CaromError):
    """A packed file could not be written: the destination exists, is full or not writable, or differs when verified."""


@dataclass(frozen=True, slots=True)
class Record:
    """Source tensor number ``number`` (in packing order) became ``written`` in shard number ``shard``."""

    number: int
    shard: int
    written: tuple[Written, ...]


class Workplace:
    """The folder of an unfinished run. Held by one process at a time; `Workplace.records` is what was taken over."""

    def __init__(self, destination: str, fingerprint: str) -> None:
        parent, name = os.path.split(os.path.abspath(destination))
        # Found again by the same destination, whatever its length: names end at 255 bytes on most file systems.
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        self.path = os.path.join(parent, f".carom-pack-{digest}")
        self.output = os.path.join(self.path, "output")
        self._journal_path = os.path.join(self.path, "journal.jsonl")
        os.makedirs(self.output, exist_ok=True)
        self._file = open(self._journal_path, "a+b", buffering=0)  # noqa: SIM115 - held until closed
        try:
            self._lock()
            self.records = self._load(fingerprint)
            if not self.records:
                self.restart(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            if os.name == "nt":
                import msvcrt

                self._file.seek(1 << 40)  # a byte no line reaches
                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            else:
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined,unused-ignore]
        except OSError as error:
            raise PackError(
                f"{self.path}: another process is packing to this destination; wait for it"
            ) from error

    def _load(self, fingerprint: str) -> list[Record]:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        records: list[Record] = []
        good = len(lines[0]) + 1
        try:
            if json.loads(lines[0]) != {"carom-pack": fingerprint}:
                return []
            for line in lines[1:-1]:  # the last is empty, or torn
                number, shard, written = json.loads(line)
                if number != len(records):
                    break
                records.append(
                    Record(number, shard, tuple(Written(w[0], w[1], tuple(w[2]), *w[3:]) for w in written))
                )
                good += len(line) + 1
        except (ValueError, TypeError, IndexError):
            pass  # what was read up to here stands
        self._file.truncate(good)
        return records

    def restart(self, fingerprint: str) -> None:
        """Forget what was taken over."""
        self.records = []
        for name in os.listdir(self.output):
            os.unlink(os.path.join(self.output, name))
        self._file.truncate(0)
        self._append({"carom-pack": fingerprint})

    def _append(self, value: Any) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")

    def add(self, record: Record) -> None:
        """Note a finished tensor. Its bytes must be on the drive already."""
        written = [[w.name, w.dtype, w.shape, w.begin, w.end, w.sha256, w.meta] for w in record.written]
        self._append([record.number, record.shard, written])

    def close(self) -> None:
        """Let go of the folder; it stays for a later run."""
        self._file.close()

    def remove(self) -> None:
        """Let go of the folder and delete it."""
        self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)
