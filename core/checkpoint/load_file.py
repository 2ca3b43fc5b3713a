"""`load_file`: loads all tensors of a checkpoint into CPU memory, decoded, for callers that do not stream
them.
"""

from __future__ import annotations

import os

import torch

from ..common.errors import WeightsError
from .disk_reader import DiskReader, ReaderPolicy
from .header import show
from .index import TensorEntry, open_index
from .packed_source import require_readable


def load_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file or folder by name, in file order; packed tensors are decoded.

    Each is a CPU tensor with a storage of its own, and the dtype and shape that it had before packing;
    padding is left out. Losslessly packed tensors have every bit of the original; quantised tensors (lossy)
    have the values that their codes stand for. Raises WeightsError (naming the tensor) for damaged files and
    for a checkpoint larger than memory, UnsupportedError for codecs, codec versions and dtypes that this
    version of Carom or torch lacks.
    """
    index = open_index(path)
    require_readable(index)
    # Unsupported dtypes raise here, before anything is read.
    dtypes = {entry.name: entry.torch_dtype for entry in index.entries.values()}
    # Carom's files are page-aligned and these tensors are not, so direct reads would pass through a second
    # buffer.
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
    """Return an uninitialised CPU tensor for ``entry``; raise WeightsError if memory is short."""
    try:
        return torch.empty(entry.torch_shape, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise WeightsError(
            f"{entry.file.path}: no memory for tensor {show(entry.name)} of {entry.nbytes} bytes; stream the "
            "checkpoint instead of loading it whole"
        ) from error
