"""Defines `prepare_for_ddp`: lets DistributedDataParallel ignore the weights that it has nothing to do for."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

M = TypeVar("M", bound=nn.Module)


def prepare_for_ddp(module: M) -> M:
    """Let DistributedDataParallel leave frozen parameters, and buffers that are not on the device, alone. Returns
    ``module``.

    DistributedDataParallel broadcasts all parameters and buffers when it is made, and wants them on one device. It
    cannot broadcast weights that Carom streams, and need not: they are frozen, and the ranks have the same values.
    Call this on the module that is given to DistributedDataParallel (or to `accelerator.prepare`), after
    `carom.stream` and after adapters were added.
    """
    trained = {parameter.device for parameter in module.parameters() if parameter.requires_grad}
    ignored = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    ignored += [name for name, buffer in module.named_buffers() if _elsewhere(buffer, trained)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return module


def _elsewhere(buffer: torch.Tensor, devices: set[torch.device]) -> bool:
    return buffer.is_meta or buffer.device not in devices
