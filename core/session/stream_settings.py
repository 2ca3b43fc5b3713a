"""Defines `StreamSettings`: the arguments of `carom.stream`, and their checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..budget.shared_budget import SharedBudget
from ..common.errors import BudgetError, UnsupportedError
from ..common.sizes import GIB, parse_size
from ..host.node_group import resolve_group
from ..model.sharded import refuse_sharded
from ..model.units import collect
from ..placement.bound_checkpoint import Weights
from ..placement.store_kinds import require_store

_CHOICES = {
    "granularity": ("auto", "block", "phase", "layer"),
    "codec": ("auto", "raw", "lossless"),
    "pool": ("auto", "torch", "aimdo"),
    "host": ("auto", "raw"),
    "training": (None, "resident", "stream"),
}

PEERS_HINT = "write peers=[('cuda:1', '8GiB')], with bytes, '8GiB', '50%' or 'auto'"


@dataclass(frozen=True)
class StreamSettings:
    """The arguments of `carom.stream`, which describes them.

    ``backward``: whether backward passes will go through the module although none of its weights are trained, because
    other code keeps the adapters.
    ``compiled``: whether the module will run compiled by torch.compile although nothing in it shows that. Without this
    hint the first compiled forward changes the layout.
    ``pins``: the most bytes of host memory that the session may pin, where a host program limits that; None: no limit
    beside ``ram``.
    ``rewritten``: whether the program will write to frozen weights again and again, as merges of adapters do. Blocks of
    packed weights then have some room, and new values are written over the old ones.
    ``store``: the name of the registered store (`placement.store_kinds.register_store`) in which streamed weights lie.
    None: pinned host memory, plain or packed, or a file, as the other arguments ask for.
    """

    device: Any = None
    vram: int | str | SharedBudget = "auto"
    ram: int | str = "auto"
    weights: Any = None
    granularity: str = "auto"
    codec: str = "auto"
    pool: str = "auto"
    host: str = "auto"
    training: str | None = None
    disk: str | os.PathLike[str] | None = None
    group: Any = None
    peers: Sequence[tuple[Any, int | str]] = ()
    backward: bool = False
    compiled: bool = False
    pins: int | None = None
    rewritten: bool = False
    store: str | None = None

    def check(self, module: Any) -> None:
        """Raise UnsupportedError for a module that cannot be streamed, for an unknown value, or for settings that
        cannot be combined, and BudgetError for a bad size in ``peers``.
        """
        _check_module(module)
        if self.weights is not None and not isinstance(self.weights, (str, os.PathLike, Weights)):
            raise UnsupportedError(
                f"weights={type(self.weights).__name__}: name a .safetensors file, a folder of them or an index.json"
            )
        if self.weights is not None and self.training == "stream":
            raise UnsupportedError(
                "weights that stream from a file are frozen; train adapters, or load the module first and leave weights= out"
            )
        disk = self.disk
        if disk is not None and (not isinstance(disk, (str, os.PathLike)) or not os.fspath(disk)):
            raise UnsupportedError(f"disk={disk!r}: name a folder, or choose 'auto' or None")
        for setting, choices in _CHOICES.items():
            value = getattr(self, setting)
            if value not in choices:
                raise UnsupportedError(f"{setting}={value!r}: choose one of {', '.join(map(repr, choices))}")
        self._check_peers()
        if self.group is not None:
            self._check_group()
        if self.store is not None:
            self._check_store(self.store)

    def _check_peers(self) -> None:
        """Raise UnsupportedError unless ``peers`` is a sequence of (device, size), and BudgetError for a bad size."""
        peers = self.peers
        if not isinstance(peers, Sequence) or isinstance(peers, (str, bytes)):
            raise UnsupportedError(f"peers={peers!r}: {PEERS_HINT}")
        for peer in peers:
            if not isinstance(peer, (tuple, list)) or len(peer) != 2:
                raise UnsupportedError(f"peers={peers!r}: {PEERS_HINT}")
            if peer[1] != "auto":
                peer_size(peer[1], GIB)
        if peers and self.group is not None:
            raise UnsupportedError(
                "peers= does not go with group=: with group= each rank computes on a device of its own; leave one of both out"
            )

    def _check_store(self, name: str) -> None:
        """Raise UnsupportedError if no store is registered as ``name``, or if another setting asks for another store."""
        require_store(name)
        others = {
            "weights=": self.weights, "disk=": self.disk, "group=": self.group, "peers=": self.peers or None,
            "codec='lossless'": self.codec == "lossless" or None, "pool='aimdo'": self.pool == "aimdo" or None,
        }  # fmt: skip
        for setting, value in others.items():
            if value is not None:
                raise UnsupportedError(f"store={name!r} does not go with {setting}: leave one of both out")

    def _check_group(self) -> None:
        """Raise UnsupportedError if ``group`` names no process group, or cannot be combined with another setting."""
        resolve_group(self.group)
        for setting, other, remedy in (
            (self.codec == "lossless", "codec='lossless'", "pack the file with `carom pack --codec lossless` and name it as weights="),
            (self.training == "stream", "training='stream'", "freeze the weights and train adapters, or divide the model into pipeline stages"),
            (self.disk is not None, "disk=", "build the model on meta and name its file as weights="),
        ):  # fmt: skip
            if setting:
                raise UnsupportedError(f"group= does not go with {other}: {remedy}, or leave group= out")


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UnsupportedError(f"carom.stream takes an nn.Module, not {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError("a scripted module hides its forwards; stream the eager module")
    collect(module)  # raises UnsupportedError for tensors that have no shape yet
    refuse_sharded(module)


def peer_size(value: int | str, free: int) -> int:
    """Return the bytes that the size ``value`` in ``peers`` amounts to. Raises BudgetError.

    ``free``: the free memory of the device, for percentages.
    """
    try:
        return parse_size(value, whole=free, setting="peers")
    except ValueError as error:
        raise BudgetError(f"{error}; 'auto' takes what is free") from error
