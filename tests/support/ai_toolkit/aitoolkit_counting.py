"""A device on which every byte is counted, for models of full size: "cuda:0" of torch's fake tensors.

Fake tensors have a shape, a dtype and a device, but no values. A model of 50 GB takes no memory and needs no GPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")


class Counted(TorchDispatchMode):
    """A mode that counts the bytes of tensors on the device. ``bytes``: now; ``peak``: the maximum so far."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # `.item()`: there is no value
            return False if args[0].dtype == torch.bool else 1
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE.type:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.bytes -= nbytes


class Moves:
    """A record of modules that were moved to the device, by `.to` and similar calls or with a checkpoint.

    ``whole``: names of the classes that contain a stack of blocks and had more than half of their bytes on the device
    afterwards.
    """

    def __init__(self, has_stack: Any) -> None:
        self.whole: list[str] = []
        self._has_stack, self._depth = has_stack, 0

    @contextlib.contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if not self._depth and type(module).__name__ not in self.whole:
            here, everywhere = placed(module)
            if 2 * here > everywhere and self._has_stack(module):
                self.whole.append(type(module).__name__)


def placed(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of a module's tensors on the device, and the bytes of all its tensors."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    sizes = [(t.numel() * t.element_size(), t.device.type == DEVICE.type) for t in tensors]
    return sum(size for size, here in sizes if here), sum(size for size, _ in sizes)


@contextlib.contextmanager
def counting(moves: Moves) -> Iterator[Counted]:
    """Make every new tensor a fake tensor inside the ``with`` block, and provide the counter.

    Tensors of a model that are missing in a checkpoint are invented.
    """
    load, numbers, apply = nn.Module.load_state_dict, torch.Tensor.numpy, nn.Module._apply

    def _apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        # torch's own swaps parameters, which it cannot do with fake ones.
        with moves.of(self):
            for child in self.children() if recurse else ():
                child._apply(function)
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    with torch.no_grad():
                        moved = function(parameter)
                    if moved is not parameter:
                        self._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = function(buffer)
        return self

    def load_state_dict(self: nn.Module, given: Any, strict: bool = True, assign: bool = False) -> Any:
        full = {}
        for name, tensor in self.state_dict().items():
            found = given.get(name)
            same = found is not None and found.shape == tensor.shape
            full[name] = found if same else torch.empty_like(tensor, device="cpu")
        with moves.of(self):
            return load(self, full, strict=strict, assign=assign)

    nn.Module._apply, nn.Module.load_state_dict = _apply, load_state_dict  # type: ignore[method-assign]
    torch.Tensor.numpy = lambda self, **_: numpy.zeros(self.shape)  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Counted() as counted:
            yield counted
    finally:
        nn.Module._apply, nn.Module.load_state_dict = apply, load  # type: ignore[method-assign]
        torch.Tensor.numpy = numbers  # type: ignore[method-assign]
