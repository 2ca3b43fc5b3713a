"""True values of a streamed module's tensors, wherever they wait: read, written, no longer trusted.

A mixin of `Session`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from torch import nn

from .attach import Placement, wanted_residents
from .checkpoint import Checkpoint, Stand
from .disk_streamer import DiskStreamer
from .errors import WeightsError
from .packed_owner import PackedOwner
from .packed_tensors import PackedTensor
from .pending import bring_all
from .plan import Plan
from .streamer import Streamer
from .units import Carving
from .wrapped import LaidOpen


class Values:
    """Values by name of a `Session` (which see for the fields)."""

    module: nn.Module
    _checkpoint: Checkpoint | None
    _shelf: dict[int, PackedTensor]
    _placement: Placement
    _streamer: Streamer
    _lock: threading.RLock
    _parked: bool
    _carving: Carving
    plan: Plan
    _ram: int
    _laid_open: LaidOpen | None

    def _need_open(self) -> None:
        raise NotImplementedError

    def _again(self, between: Callable[[], None] = lambda: None) -> None:
        raise NotImplementedError

    def refresh(self, module: nn.Module | None = None) -> None:
        """Do not trust copies of host weights (below ``module``) kept on the device: they changed unseen.

        Resident weights have no other copy; what changes them changes them on the device.
        """
        self._need_open()
        if self._parked:
            return
        below = None if module is None else {id(m) for m in module.modules()}
        units = [
            unit
            for unit in self._placement.streamed
            if below is None
            or any(id(site.module) in below for entry in unit.unit.entries for site in entry.sites)
        ]
        self._streamer.refresh(units)

    def read(self, name: str) -> torch.Tensor:
        """The true value of parameter or buffer ``name``: a copy on the CPU. Raises WeightsError if unknown."""
        self._need_open()
        quantised = None if self._laid_open is None else self._laid_open.read(name)
        if quantised is not None:
            return quantised
        tensor = self._tensor(name)
        packed = self._shelf.get(id(tensor))
        if packed is not None:
            return packed.value()
        stand = None if self._checkpoint is None else self._checkpoint.of(tensor)
        if stand is not None and tensor.is_meta:
            assert self._checkpoint is not None
            return self._checkpoint.read(stand)
        return tensor.detach().cpu().clone()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Set parameter or buffer ``name``. Raises WeightsError for an unknown name, another shape or dtype."""
        self._need_open()
        target = self._tensor(name)
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise WeightsError(
                f"{name} is {target.dtype} {tuple(target.shape)}; cannot write {tensor.dtype} {tuple(tensor.shape)}"
            )
        if id(target) in self._shelf:
            owner: PackedOwner = target._carom  # type: ignore[attr-defined]
            with self._lock:
                owner.replace(tensor)
            return
        stand = None if self._checkpoint is None else self._checkpoint.of(target)
        if stand is not None and target.is_meta:
            self._write_streamed(stand, tensor)
            return
        bring_all(target)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            target.copy_(tensor)

    def _write_streamed(self, stand: Stand, tensor: torch.Tensor) -> None:
        """A weight from a file gets another value: it is kept in RAM, within the budget, and the file is left alone."""
        with self._lock:
            self._need_open()
            stand.check(tensor)
            if self._parked:
                self._checkpoint_has_room(stand)
                stand.change(tensor)
            elif not (isinstance(self._streamer, DiskStreamer) and self._streamer.take(stand, tensor)):
                self._again(lambda: stand.change(tensor))  # with a smaller cache

    def _checkpoint_has_room(self, stand: Stand) -> None:
        """Raises BudgetError where the way back from parking could not be with a value of ``stand`` in host memory."""
        assert self._checkpoint is not None
        streamed = wanted_residents(self._carving, self.plan)[1]
        sizes = [self._checkpoint.wire(unit, self.plan.staging_bytes).nbytes for unit in streamed]
        self._checkpoint.require_room(stand, self._ram, sizes)

    def _tensor(self, name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        with contextlib.suppress(AttributeError):
            module = self.module.get_submodule(path)
            found: torch.Tensor | None = module._parameters.get(leaf)
            found = module._buffers.get(leaf) if found is None else found
            if found is not None:
                return found
        raise WeightsError(f"{name!r} is no parameter or buffer of the module")
