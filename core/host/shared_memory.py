"""Defines `SharedMemory`: host memory that several processes of one machine map together (Linux).

memfd_create(2) makes a file that has no name and lives in RAM. Other processes open it as /proc/PID/fd/NUMBER. The
kernel frees it when the last process that has it open or mapped ends, so nothing is left behind by killed processes.
Unlike files in /dev/shm, it is not limited by the size of a mounted file system.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass

import torch

from ..checkpoint.index import SourceFile
from ..common.errors import BudgetError, UnsupportedError
from ..common.sizes import format_size


@dataclass(frozen=True)
class Handle:
    """What another process needs to open the memory: process id, file descriptor, bytes."""

    pid: int
    descriptor: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedFile(SourceFile):
    """Shared memory as a file. It has no name, so nothing can replace it, and `check` has nothing to find.

    Its time of modification is not compared: some systems change it when a driver pins the pages.
    """

    def check(self, found: os.stat_result | None = None) -> None:
        """Do nothing."""


class _Mapping(mmap.mmap):
    """A mapping that can be the target of weak references."""


class SharedMemory:
    """``nbytes`` bytes of memory behind the file descriptor ``descriptor``, which this object owns.

    ``data``: the memory as a uint8 tensor. Writes to it are seen by all processes. Tensors over the memory keep it
    alive after `close`.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor, self.nbytes = descriptor, nbytes
        self.data = _tensor(descriptor, nbytes, mmap.ACCESS_WRITE)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Make new memory, filled with zeros. Pages take RAM when they are first written to.

        Raises UnsupportedError on systems other than Linux.
        """
        if sys.platform != "linux":
            raise UnsupportedError("group=: ranks share host memory on Linux only; leave group= out")
        descriptor = os.memfd_create("carom-weights")
        try:
            os.ftruncate(descriptor, nbytes)
            return cls(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, handle: Handle) -> SharedMemory:
        """Open memory that another process has made. Raises UnsupportedError if the system does not allow that."""
        try:
            descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDWR)
        except OSError as error:
            raise UnsupportedError(
                f"group=: the memory of process {handle.pid} cannot be opened ({error.strerror}); run all ranks of a "
                "machine as one user in one container, or leave group= out"
            ) from error
        return cls(descriptor, handle.nbytes)

    @property
    def handle(self) -> Handle:
        """The handle for `open` in another process. It is valid until this object is closed."""
        return Handle(os.getpid(), self.descriptor, self.nbytes)

    def private(self) -> torch.Tensor:
        """Return the memory as a uint8 tensor whose writes this process alone sees (copy on write)."""
        return _tensor(self.descriptor, self.nbytes, mmap.ACCESS_COPY)

    def file(self) -> SourceFile:
        """Return the memory as a file of this process, for reads. Valid until this object is closed."""
        status = os.fstat(self.descriptor)
        path = f"/proc/self/fd/{self.descriptor}"
        return SharedFile(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)

    def close(self) -> None:
        """Close the file descriptor, and forget the mapping. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        self.data = torch.empty(0, dtype=torch.uint8)
        if descriptor >= 0:
            os.close(descriptor)


def _tensor(descriptor: int, nbytes: int, access: int) -> torch.Tensor:
    """Return a mapping of the whole memory as a uint8 tensor. Raises BudgetError if the system refuses."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapping = _Mapping(descriptor, nbytes, access=access)
    except OSError as error:
        raise BudgetError(
            f"group=: {format_size(nbytes)} of shared host memory cannot be mapped ({error.strerror})"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)  # type: ignore[attr-defined,unused-ignore]
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)
