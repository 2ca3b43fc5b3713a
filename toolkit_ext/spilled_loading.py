"""Defines `SpilledLoading`, which moves weights to disk while a model class of ai-toolkit loads them.

Quantising and converting make new weights, layer by layer. Without this, host memory would hold all of them before
the model streams. The session that opens later finds the weights in their spill file and writes nothing again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from ..core.checkpoint.mapped_views import MappedViews
from ..core.checkpoint.spill import allow_writes, spill
from ..core.common.errors import CaromError
from ..core.model.tensor_flatten import flatten, is_wrapper

LEAST = 4096  # bytes; smaller tensors stay in host memory


class SpilledLoading:
    """Spills the weights that loading made in host memory, whenever they exceed ``ram`` bytes.

    ``folder``: where the spill files are; ``ram``: bytes of weights that may stay in host memory.
    """

    def __init__(self, folder: str, ram: int) -> None:
        self._folder, self._ram = folder, ram
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._bytes = 0
        self._failure: CaromError | None = None

    def note(self, module: nn.Module) -> None:
        """Count the weights of ``module`` itself, without its children, and spill all counted ones if necessary.

        Called after the weights were moved to the host or converted there. Raises BudgetError if the drive has no room,
        and WeightsError if the folder cannot be written.
        """
        self._count(own_tensors(module))
        self._raise_failure()

    @contextlib.contextmanager
    def noting_quantised(self) -> Iterator[None]:
        """Count the quantised weights of each layer, inside this context, when the layer gets them, and spill as `note`.

        ai-toolkit quantises a whole text encoder on the CPU. This moves and converts no module, so `note` would be
        called after the last layer only. Quantised weights are parameters of a tensor subclass (torchao, quanto), or
        buffers (ai-toolkit's own types). The errors of `note` are raised at the end of the context, because ai-toolkit
        leaves a layer unquantised if an exception is raised while it quantises the layer.
        """
        hooks = [
            register_module_parameter_registration_hook(self._registered),
            register_module_buffer_registration_hook(self._registered),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._raise_failure()

    def _registered(self, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if is_wrapper(tensor):
            self._count(flatten(tensor)[1])
        elif tensor is not None and not isinstance(tensor, nn.Parameter):
            self._count((tensor,))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            seen = self._seen.get(id(tensor))
            if _may_spill(tensor) and (seen is None or seen() is not tensor):
                self._seen[id(tensor)] = weakref.ref(tensor)
                self._bytes += tensor.nbytes
        if self._bytes > self._ram and self._failure is None:
            try:
                self._spill()
            except CaromError as error:
                self._failure = error

    def _spill(self) -> None:
        views = MappedViews()
        alive = [tensor for reference in self._seen.values() if (tensor := reference()) is not None]
        made = [tensor for tensor in alive if _may_spill(tensor) and views.find(tensor) is None]
        if sum(tensor.nbytes for tensor in made) > self._ram:
            for tensor, spilled in zip(made, spill(made, self._folder), strict=True):
                tensor.data = spilled.view
            allow_writes(made)  # ai-toolkit may merge an adapter before the model streams
            made = []
        self._seen = {id(tensor): weakref.ref(tensor) for tensor in made}
        self._bytes = sum(tensor.nbytes for tensor in made)


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of ``module`` itself. A quantised weight counts as its inner tensors."""
    for table in (module._parameters, module._buffers):
        for tensor in table.values():
            if tensor is not None:
                yield from flatten(tensor)[1] if is_wrapper(tensor) else (tensor,)


def _may_spill(tensor: torch.Tensor) -> bool:
    """Return whether spilling ``tensor`` gives memory back: a plain tensor on the CPU with a storage of its own."""
    if (
        type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.device.type != "cpu"
        or tensor.nbytes < LEAST
    ):
        return False
    return (
        tensor.layout == torch.strided
        and not tensor.is_inference()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
