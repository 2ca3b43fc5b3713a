"""The transform of `carom pack` that encodes tensors with a codec: lossless, or quantised by a codebook
(lossy).

Encoding runs on all CPU cores, or on the GPU where there is one. A tensor is written unchanged where its
dtype has no codec, or where packing would not save at least one 4 KiB page of the file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch

from ...core.checkpoint.direct_io import ALIGN, aligned_buffer
from ...core.checkpoint.header import show
from ...core.checkpoint.index import TensorEntry
from ...core.codec import lossless, lossless_format
from ...core.codec.blob_metadata import Packed
from ...core.codec.registry import KbitCodec, LosslessCodec, get
from ...core.common.commit_memory import with_advice
from ...core.common.errors import UnsupportedError, WeightsError
from .file_layout import whole_pages
from .quant_scheme import QuantScheme
from .transform import OutputTensor

logger = logging.getLogger("carom")

# bytes; the CPU encodes smaller tensors faster than a GPU, which adds copies and launches.
DEVICE_LEAST = 8 << 20


class CodecTransform:
    """A transform that quantises the tensors chosen by ``scheme`` and encodes the others with ``codec``
    ("raw", "lossless").

    ``device``: "auto" encodes large tensors on the current CUDA or ROCm GPU where there is one, "cpu" always
    encodes on the CPU cores. Both write the same bytes. At most two tensors and one encoded tensor are in
    memory at a time.
    """

    has_metadata = runs_ahead = True

    def __init__(self, codec: str, scheme: QuantScheme | None, device: str = "auto") -> None:
        self._codec, self._scheme = codec, scheme
        quantised = None if scheme is None else scheme.text
        self.name = quantised or codec
        if quantised is not None and codec != "raw":
            self.name = f"{quantised}+{codec}"
        self._device = _accelerator() if device == "auto" else None
        # One pool for all tensors, because the first chunk of each thread has to map the pages of its
        # buffers. The threads end with this object.
        self._threads = ThreadPoolExecutor(lossless.cores(), thread_name_prefix="carom-encode")
        # Two buffers, because one tensor is still being written while the next is read.
        self._buffers = [memoryview(bytearray()), memoryview(bytearray())]

    def wanted(self, entry: TensorEntry) -> str:
        """Return the name of the codec that is tried for ``entry``, "raw" for none."""
        chosen = None if self._scheme is None else self._scheme.codebook(entry.name, entry.dtype, entry.shape)
        if chosen is not None or self._codec == "raw":
            return chosen or "raw"
        return "lossless" if _dtype(entry) in lossless_format.KIND_BY_DTYPE else "raw"

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> OutputTensor:
        """Return ``entry`` encoded, or unchanged where encoding saves nothing; ``parts``: the tensor's bytes
        in order.
        """
        raw = self._gather(entry, parts)
        wanted = self.wanted(entry)
        packed = None
        dtype = _dtype(entry)
        if wanted != "raw" and dtype is not None and entry.nbytes:
            tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(entry.shape)
            packed = self._pack(tensor, wanted, entry)
            if packed is None and wanted != "lossless" and self._codec == "lossless":
                packed = self._pack(tensor, "lossless", entry)
        if packed is None:
            return OutputTensor(entry.name, entry.dtype, entry.shape, [raw])
        blob = packed.blob.numpy()
        return OutputTensor(entry.name, "U8", (len(blob),), [blob.data], packed.meta)

    def _gather(self, entry: TensorEntry, parts: Iterator[memoryview]) -> memoryview:
        """Copy ``parts`` to one buffer, valid until the call after next.

        Raises WeightsError where memory is short.
        """
        self._buffers.reverse()
        if len(self._buffers[0]) < entry.nbytes:
            self._buffers[0] = memoryview(b"")  # frees the old buffer before the larger one is allocated
            try:
                self._buffers[0] = aligned_buffer(entry.nbytes)
            except (MemoryError, OSError) as error:
                message = (
                    f"{entry.file.path}: no memory for tensor {show(entry.name)} of {entry.nbytes} bytes, which is packed "
                    "whole; free some, or pack with --codec raw, which needs none"
                )
                raise WeightsError(with_advice(message, error)) from error
        raw, at = self._buffers[0][: entry.nbytes], 0
        for part in parts:
            raw[at : at + len(part)] = part
            at += len(part)
        return raw

    def _pack(self, tensor: torch.Tensor, wanted: str, entry: TensorEntry) -> Packed | None:
        """Encode the tensor with codec ``wanted``; return None where that saves no page or cannot represent
        the values.
        """
        # A result of this many bytes would fill as many pages as the tensor.
        limit = whole_pages(entry.nbytes) - ALIGN + 1
        codec = get(wanted)
        pool = self._threads
        if self._device is not None and entry.nbytes >= DEVICE_LEAST:
            # Fall back to the CPU where the GPU has too little memory or lacks a kernel.
            with contextlib.suppress(RuntimeError):
                return _smaller(_encode(codec, tensor.to(self._device), entry, limit, pool), limit)
        return _smaller(_encode(codec, tensor, entry, limit, pool), limit)


def _encode(
    codec: Any, tensor: torch.Tensor, entry: TensorEntry, limit: int, pool: Executor
) -> Packed | None:
    """Encode ``tensor`` with ``codec``; return None where the codec cannot represent the values or gives
    ``limit`` bytes.
    """
    if isinstance(codec, LosslessCodec):
        return codec.smaller(tensor, limit, pool) if limit > 1 else None
    assert isinstance(codec, KbitCodec)
    try:
        packed = codec.encode(tensor, entry.name, measure=True)
    except WeightsError:  # the tensor has infinities or NaN, which no codebook contains
        return None
    return Packed(packed.meta, packed.blob.cpu())


def _smaller(packed: Packed | None, limit: int) -> Packed | None:
    """Return ``packed`` if it has fewer than ``limit`` bytes, else None."""
    return packed if packed is not None and packed.wire_nbytes < limit else None


def _dtype(entry: TensorEntry) -> torch.dtype | None:
    """Return the torch dtype of ``entry``; None where torch has no such dtype."""
    try:
        return entry.torch_dtype
    except UnsupportedError:
        return None


def _accelerator() -> torch.device | None:
    """Return the current CUDA or ROCm device; None where there is none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    logger.info("carom: packing on %s", device)
    return device
