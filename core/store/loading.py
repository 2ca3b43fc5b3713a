"""True tensors of a whole checkpoint, for those who want it loaded and not streamed."""

from __future__ import annotations

import os

import torch

from ..errors import WeightsError
from .header import show
from .index import TensorEntry, open_index
from .packed_source import require_readable
from .reader import DiskReader, ReaderPolicy


def load_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """All tensors of a file or folder that Carom wrote (or any safetensors checkpoint), by name, in file order.

    Each is a CPU tensor of its own, of the dtype and shape it had before packing; padding is left out. Lossless
    packing gives every bit back; quantised tensors (lossy) come as the values that their codes stand for. Raises
    WeightsError (naming the tensor) for bad files and for a checkpoint larger than memory, UnsupportedError for codecs,
    their versions and dtypes that this version or this torch lacks.
    """
    index = open_index(path)
    require_readable(index)
    dtypes = {
        entry.name: entry.torch_dtype for entry in index.entries.values()
    }  # refused before anything is read
    # Packed files are page-aligned and these tensors are not: direct reads would pass through a second buffer.
    with DiskReader(ReaderPolicy(direct=False)) as reader:
        loaded, handles = {}, []
        for entry in index.entries.values():
            tensor = _allocate(entry, dtypes[entry.name])
            handles.append(reader.submit(entry, tensor))
            loaded[entry.name] = tensor
        for handle in handles:
            handle.result()
    return loaded


def _allocate(entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(entry.torch_shape, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise WeightsError(
            f"{entry.file.path}: no memory for tensor {show(entry.name)} of {entry.nbytes} bytes; stream the "
            "checkpoint instead of loading it whole"
        ) from error
