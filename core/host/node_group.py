"""Defines `NodeGroup`: the ranks of a torch.distributed process group that run on this machine.

Ranks that share a machine and a PID namespace can open each other's memory, so they can share host copies of
weights. A gloo process group of these ranks carries Carom's own messages, whatever backend the user's group has.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..common.errors import GroupError, UnsupportedError

WORLD = "world"  # the value of group= that names the default process group
T = TypeVar("T")


def resolve_group(group: Any) -> Any:
    """Return the process group that ``group`` names: "world", a process group, or a one-dimensional DeviceMesh.

    Raises UnsupportedError for other values, and if torch.distributed is not initialised.
    """
    dist = torch.distributed
    if not dist.is_available():
        raise UnsupportedError("group=: this build of torch has no torch.distributed; leave group= out")
    if not dist.is_initialized():
        raise UnsupportedError(
            f"group={group!r}: torch.distributed is not initialised; start the script with torchrun, and call "
            "torch.distributed.init_process_group() before carom.stream"
        )
    if isinstance(group, str):
        if group != WORLD:
            raise UnsupportedError(f"group={group!r}: choose 'world', a process group or a DeviceMesh")
        return dist.group.WORLD
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh
        if group.ndim != 1:
            raise UnsupportedError(
                f"group=: the DeviceMesh has {group.ndim} dimensions; name the one over which data is parallel, such "
                "as mesh['dp']"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedError(
            f"group={type(group).__name__}: choose 'world', a process group or a DeviceMesh"
        )
    return group


class NodeGroup:
    """The ranks of ``group`` on this machine. All ranks of ``group`` must make theirs at the same time.

    ``rank`` and ``size``: position of this process among them, and their number. ``whole``: whether they are all
    ranks of the group. Raises GroupError if a rank does not take part within the time-out of the group.
    """

    def __init__(self, group: Any) -> None:
        dist = torch.distributed
        found = resolve_group(group)
        try:
            machines: list[Any] = [None] * dist.get_world_size(found)
            dist.all_gather_object(machines, (_machine(), dist.get_rank()), group=found)
            here = [rank for machine, rank in machines if machine == _machine()]
            self._ranks, self._time_out = here, _timeout(found)
            self._control = self._group("control", "gloo")
        except Exception as error:
            raise GroupError(
                "carom.stream(group=...): the ranks did not meet. Another rank may have ended before its carom.stream; "
                "with GPUs, each calls torch.cuda.set_device(LOCAL_RANK) before torch.distributed.init_process_group: "
                f"{error}"
            ) from error
        self.rank, self.size = here.index(dist.get_rank()), len(here)
        self.whole = len(here) == len(machines)

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Return the ``value`` of every rank, in order of ranks. ``value``: any object that pickles.

        Raises GroupError, which names ``what``, if a rank has ended or does not take part within the time-out.
        """
        values: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(values, value, group=self._control)
        except Exception as error:
            raise self._lost(what, error) from error
        return values

    def exchange_numbers(self, numbers: Sequence[int], what: str) -> list[list[int]]:
        """Return the integers (of 64 bits) of every rank, in order of ranks; all have as many. Faster than `exchange`.

        Raises GroupError as `exchange` does.
        """
        mine = torch.tensor(numbers, dtype=torch.int64)
        ranks = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            torch.distributed.all_gather(ranks, mine, group=self._control)
        except Exception as error:
            raise self._lost(what, error) from error
        return [rank.tolist() for rank in ranks]

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Fill ``tensor``, on the CPU, with the values that it has on the first rank. All ranks call this at once.

        Raises GroupError as `exchange` does.
        """
        try:
            torch.distributed.broadcast(tensor, self._ranks[0], group=self._control)
        except Exception as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: Exception) -> GroupError:
        return GroupError(
            f"{what}: another rank ended, was closed, or runs other code than rank {self.rank}: {error}"
        )

    def all(self, condition: bool) -> bool:
        """Return whether ``condition`` holds on every rank."""
        return all(self.exchange(condition, "comparing the ranks"))

    def device_group(self, device: torch.device) -> Any:
        """Return a process group of these ranks for tensors on ``device``: NCCL, or gloo for the CPU."""
        return self._group("device", torch.distributed.get_default_backend_for_device(device))

    def _group(self, purpose: str, backend: str) -> Any:
        """Return the process group of these ranks for ``purpose``, which all sessions of the process use.

        It is never destroyed: a group of the same ranks that is made again, while another rank still has the old
        one, connects to the old one's addresses, which torch.distributed keeps in its store.
        """
        dist = torch.distributed
        key = (purpose, backend, tuple(self._ranks))
        world, made = _groups.get(key, (None, None))
        if world is not dist.group.WORLD:  # none yet, or torch.distributed was initialised again
            made = dist.new_group(
                self._ranks, timeout=self._time_out, backend=backend, use_local_synchronization=True
            )
            _groups[key] = dist.group.WORLD, made
        return made

    def together(self, what: str, function: Callable[[], T]) -> T:
        """Call ``function`` on every rank, wait for all ranks, and return this rank's result.

        If ``function`` raises on any rank, it raises on all: its own error on that rank, GroupError on the others.
        """
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        try:
            words = self.exchange(None if error is None else f"{type(error).__name__}: {error}", what)
        except GroupError as lost:
            raise (lost if error is None else error) from None
        if error is not None:
            raise error
        for rank, message in enumerate(words):
            if message is not None:
                raise GroupError(f"{what} failed on rank {rank} of this machine: {message}")
        return result  # type: ignore[return-value]


def together(node: NodeGroup | None, what: str, function: Callable[[], T]) -> T:
    """Return the result of ``function``, which is called as by `NodeGroup.together` if there is a ``node``."""
    return function() if node is None else node.together(what, function)


# {(purpose, backend, ranks): (default process group, process group)} of this process
_groups: dict[tuple[str, str, tuple[int, ...]], tuple[Any, Any]] = {}


def _machine() -> tuple[str, ...]:
    """Return what is equal for processes that can open each other's memory: machine, its start, PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return socket.gethostname(), boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return (socket.gethostname(),)


def _timeout(group: Any) -> timedelta | None:
    """Return the time-out of the process group, or None (torch's default) if this version of torch does not tell."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    return None
