"""`TensorAccess`: reads, writes and refreshes tensors of a streamed module by name, wherever their bytes are."""

from __future__ import annotations

import torch
from torch import nn

from ..common.errors import WeightsError
from ..model.arriving_tensor import load_pending
from ..model.shared_attributes import original_of
from ..placement.bound_checkpoint import FileTensor
from ..placement.packed_home import PackedHome
from ..placement.placement import wanted_residents
from ..placement.stored_home import StoredHome
from .layout_manager import LayoutManager


class TensorAccess:
    """Reads and writes the values of parameters and buffers of one session's module."""

    def __init__(self, manager: LayoutManager) -> None:
        self._manager = manager
        manager.write_streamed = self._write_streamed

    def refresh(self, module: nn.Module | None) -> None:
        """Copy host weights of ``module`` and below to the device again at their next use, as
        `Session.refresh` describes.
        """
        manager = self._manager
        if manager.attached:
            root = manager.module.root
            whole = module is None or module is original_of(root)
            below = None if whole else {id(m) for m in module.modules()}  # type: ignore[union-attr]
            with manager.layout.runner.lock:
                for unit in manager.layout.below(below):
                    unit.epoch += 1

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a copy of the tensor ``name`` on ``device``, as `Session.read` describes."""
        module = self._manager.module
        quantised = None if module.quantized is None else module.quantized.read(name)
        if quantised is not None:
            return quantised.to(device)
        tensor = self._tensor(name)
        packed = self._manager.host.shelf.get(id(tensor))
        if packed is not None:
            on_device = device == self._manager.engine.device
            return packed.value(device) if on_device else packed.value().to(device)
        stand = None if module.checkpoint is None else module.checkpoint.of(tensor)
        if stand is not None and tensor.is_meta:
            assert module.checkpoint is not None
            return module.checkpoint.read(stand).to(device)
        return tensor.detach().to(device, copy=True)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Set the tensor ``name`` to the values of ``tensor``, as `Session.write` describes."""
        manager = self._manager
        target = self._tensor(name)
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise WeightsError(
                f"{name} is {target.dtype} {tuple(target.shape)}; cannot write {tensor.dtype} {tuple(tensor.shape)}"
            )
        home = getattr(target, "_carom", None)
        if id(target) in manager.host.shelf or isinstance(home, StoredHome):
            assert isinstance(home, (PackedHome, StoredHome))
            with manager.lock:
                home.replace(tensor)
            return
        checkpoint = manager.module.checkpoint
        stand = None if checkpoint is None else checkpoint.of(target)
        if stand is not None and target.is_meta:
            self._write_streamed(stand, tensor)
            return
        load_pending(target)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            target.copy_(tensor)

    def _write_streamed(self, stand: FileTensor, tensor: torch.Tensor) -> None:
        """Set the weight ``stand``, which comes from a file, to the values of ``tensor``.

        The values are kept in RAM, within the RAM budget. The file is not changed.
        """
        manager = self._manager
        with manager.lock:
            manager.need_open()
            stand.check(tensor)
            if manager.phase.parked:
                self._need_room(stand)
                stand.change(tensor)
                return
            if not manager.layout.placement.tier.write_to_file_tensor(stand, tensor):
                # Host memory has no room for the value beside the cache. Make a new layout, with a smaller
                # cache.
                manager.change(manager.present(), reuse=False, between=lambda: stand.change(tensor))

    def _need_room(self, stand: FileTensor) -> None:
        """Raise BudgetError if a new value of ``stand`` in host memory would leave too little for a parked
        session to make a layout.
        """
        manager = self._manager
        checkpoint, layout = manager.module.checkpoint, manager.layout
        assert checkpoint is not None
        streamed = wanted_residents(layout.carving, layout.plan)[1]
        sizes = [checkpoint.wire(unit, layout.plan.staging_bytes).nbytes for unit in streamed]
        checkpoint.require_room(stand, manager.wanted.ram, sizes)

    def _tensor(self, name: str) -> torch.Tensor:
        found = self._manager.module.tensor(name)
        if found is None:
            raise WeightsError(f"{name!r} is no parameter or buffer of the module")
        return found
