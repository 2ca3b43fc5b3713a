"""The journal of `carom pack`: records finished tensors on disk, so that a run killed at any moment can be
resumed.

A work folder next to the destination holds the files being written and the journal. The journal consists of
JSON lines. The first line is a fingerprint of all inputs that determine the result. Each further line is a
source tensor whose bytes were synced to the drive before the line was written. An incomplete last line is
dropped, and its tensor is written again. If the fingerprint differs, the run starts over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

from ...core.common.errors import CaromError
from ...core.common.held_files import retry_while_in_use, unlink
from .file_layout import WrittenTensor


class PackError(CaromError):
    """A packed file cannot be written (the destination exists, is full or not writable), or differs when
    verified.
    """


@dataclass(frozen=True, slots=True)
class Record:
    """A journal entry: source tensor ``number`` (in packing order) was written to shard ``shard`` as
    ``written``.
    """

    number: int
    shard: int
    written: tuple[WrittenTensor, ...]


class WorkFolder:
    """The folder of an unfinished run, locked by one process at a time.

    `records`: the entries of an earlier, interrupted run with the same fingerprint. Raises PackError where
    another process holds the lock.
    """

    def __init__(self, destination: str, fingerprint: str) -> None:
        parent, name = os.path.split(os.path.abspath(destination))
        # The name is a hash of the destination's name, because most file systems limit names to 255 bytes.
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        self.path = os.path.join(parent, f".carom-pack-{digest}")
        self.output = os.path.join(self.path, "output")
        self._journal_path = os.path.join(self.path, "journal.jsonl")
        os.makedirs(self.output, exist_ok=True)
        self._file = retry_while_in_use(lambda: open(self._journal_path, "a+b", buffering=0))  # noqa: SIM115
        try:
            self._lock()
            self.records = self._load(fingerprint)
            if not self.records:
                self.restart(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Lock the journal file. Raises PackError where another process holds the lock."""
        try:
            if os.name == "nt":
                import msvcrt

                self._file.seek(1 << 40)  # an offset far beyond the end of any journal
                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            else:
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined,unused-ignore]
        except OSError as error:
            raise PackError(
                f"{self.path}: another process is packing to this destination; wait for it"
            ) from error

    def _load(self, fingerprint: str) -> list[Record]:
        """Read the complete entries, cut off an incomplete one, and return them; empty where the fingerprint
        differs.
        """
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        records: list[Record] = []
        good = len(lines[0]) + 1
        try:
            if json.loads(lines[0]) != {"carom-pack": fingerprint}:
                return []
            for line in lines[1:-1]:  # the last line is empty or incomplete
                number, shard, written = json.loads(line)
                if number != len(records):
                    break
                records.append(
                    Record(
                        number, shard, tuple(WrittenTensor(w[0], w[1], tuple(w[2]), *w[3:]) for w in written)
                    )
                )
                good += len(line) + 1
        except (ValueError, TypeError, IndexError):
            pass  # the entries before the bad line are used
        self._file.truncate(good)
        return records

    def restart(self, fingerprint: str) -> None:
        """Delete the files of the earlier run and begin an empty journal."""
        self.records = []
        for name in os.listdir(self.output):
            unlink(os.path.join(self.output, name))
        self._file.truncate(0)
        self._append({"carom-pack": fingerprint})

    def _append(self, value: Any) -> None:
        """Write ``value`` as one JSON line."""
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")

    def add(self, record: Record) -> None:
        """Append an entry for a finished tensor, whose bytes must be on the drive already."""
        written = [[w.name, w.dtype, w.shape, w.begin, w.end, w.sha256, w.meta] for w in record.written]
        self._append([record.number, record.shard, written])

    def close(self) -> None:
        """Unlock the folder and keep its files for a later run."""
        self._file.close()

    def remove(self) -> None:
        """Unlock the folder and delete it."""
        self._file.close()
        try:
            retry_while_in_use(lambda: shutil.rmtree(self.path))
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
