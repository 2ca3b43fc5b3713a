"""Refusal of modules whose parameters are divided among processes: FSDP2, FSDP1 and tensor parallelism."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ..common.errors import UnsupportedError

INSTEAD = (
    "Stream the undivided module instead: for data parallel training, call carom.stream(module, group=...) on each rank; for "
    "a model that is divided over devices, make stages of torch.distributed.pipelining and stream each stage"
)
CLOSE = "The session is of no use any more: Session.close() ends it, and leaves the divided parameters as they are"


def refuse_sharded(root: nn.Module, streamed: bool = False) -> None:
    """Raise UnsupportedError if a parameter or buffer below ``root`` is a DTensor, or if FSDP manages a module there.

    The error names the tensor, or the module if its tensors are whole at the moment. `fully_shard` (FSDP2) and
    `parallelize_module` make DTensors. A DTensor can exist only after its module was imported, so nothing is imported.
    ``streamed``: whether a session streams ``root`` already; the error then says how to go on.
    """
    instead = f"{INSTEAD}. {CLOSE}" if streamed else INSTEAD
    dtensor = _loaded("torch.distributed.tensor", "DTensor")
    if dtensor is None:
        return
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if isinstance(tensor, dtensor):
            raise UnsupportedError(
                f"{name} is a DTensor: fully_shard (FSDP2) or tensor parallelism divided it among processes, and Carom streams "
                f"whole tensors. {instead}"
            )
    kinds = [
        kind
        for kind in (
            _loaded("torch.distributed.fsdp", "FSDPModule"),
            _loaded("torch.distributed.fsdp", "FullyShardedDataParallel"),
        )
        if kind is not None
    ]
    for name, module in root.named_modules():
        if isinstance(module, tuple(kinds)):
            raise UnsupportedError(
                f"{name or 'the module'} ({type(module).__name__}) is managed by FSDP, which divides its parameters among "
                f"processes. {instead}"
            )


def _loaded(module: str, name: str) -> Any:
    """Return the attribute ``name`` of ``module`` if that was imported, else None."""
    return getattr(sys.modules.get(module), name, None)
