"""`load_file`: loads all tensors of a checkpoint into CPU memory, decoded, for callers that do not stream
them. `read_tensors` yields them one by one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from ..common.commit_memory import with_advice
from ..common.errors import WeightsError
from .disk_reader import DiskReader, ReaderPolicy
from .header import show
from .index import Index, TensorEntry, open_index
from .packed_source import require_readable
from .read_handle import SubmittedRead

AHEAD = 2  # tensors; the reader decodes as many at the same time


def load_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file or folder by name, in file order; packed tensors are decoded.

    Each is a CPU tensor with a storage of its own, and the dtype and shape that it had before packing;
    padding is left out. Losslessly packed tensors have every bit of the original; quantised tensors (lossy)
    have the values that their codes stand for. Raises WeightsError (naming the tensor) for damaged files and
    for a checkpoint larger than memory, UnsupportedError for codecs, codec versions and dtypes that this
    version of Carom or torch lacks.
    """
    index = open_index(path)
    return dict(read_tensors(index, list(index), ahead=len(index)))


def read_tensors(
    index: Index, names: Sequence[str], ahead: int = AHEAD
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors ``names`` of ``index``, decoded, one after the other, so that a caller can use and free each.

    Tensors and errors are those of `load_file`. ``ahead``: tensors that are read while the caller uses the last one.
    """
    require_readable(index)
    # Unsupported dtypes raise here, before anything is read.
    dtypes = {name: index[name].torch_dtype for name in names}
    # Carom's files are page-aligned and these tensors are not, so direct reads would pass through a second
    # buffer.
    with DiskReader(ReaderPolicy(direct=False)) as reader:
        reads: deque[tuple[str, torch.Tensor, SubmittedRead]] = deque()
        for name in names:
            tensor = _allocate(index[name], dtypes[name])
            reads.append((name, tensor, reader.submit(index[name], tensor)))
            del tensor
            if len(reads) > ahead:
                yield _finished(*reads.popleft())
        while reads:
            yield _finished(*reads.popleft())


def _finished(name: str, tensor: torch.Tensor, read: SubmittedRead) -> tuple[str, torch.Tensor]:
    read.result()
    return name, tensor


def _allocate(entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor for ``entry``; raise WeightsError if memory is short."""
    try:
        return torch.empty(entry.torch_shape, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        message = (
            f"{entry.file.path}: no memory for tensor {show(entry.name)} of {entry.nbytes} bytes; stream the "
            "checkpoint instead of loading it whole"
        )
        raise WeightsError(with_advice(message, error)) from error
