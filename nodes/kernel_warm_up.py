"""`prepare_kernels`: compiles the kernels that a file's weights need while the file is read."""

from __future__ import annotations

import torch

from ..core.checkpoint.index import read_header
from ..core.codec import warm_up
from ..core.common.errors import CaromError
from ..core.placement.packer import LEAST
from .node_settings import Settings


def prepare_kernels(path: str, settings: Settings, device: torch.device) -> None:
    """Begin to compile the kernels that unpack weights of the file at ``path`` on ``device``, in the background.

    Nothing happens where weights are not packed: on other devices than GPUs, and if the user chose to copy them raw.
    """
    if device.type == "cuda" and settings.codec != "raw":
        warm_up(device, _dtypes_of(path))


def _dtypes_of(path: str) -> set[torch.dtype]:
    """Return the dtypes of the large tensors of a safetensors file; none of other files."""
    try:
        return {entry.torch_dtype for entry in read_header(path)[1] if entry.nbytes >= LEAST}
    except (CaromError, OSError):  # the loader of the file reports the error
        return set()
