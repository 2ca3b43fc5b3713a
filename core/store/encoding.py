"""Tensors packed by a codec: lossless, or quantised by a codebook (lossy), on all cores or on the device there is.

A tensor stays as it is where its dtype has no codec, or where packing would not save a page of the file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch

from ..codec import lossless, lossless_format
from ..codec.packed import Packed
from ..codec.registry import KbitCodec, LosslessCodec, get
from ..errors import UnsupportedError, WeightsError
from .header import show
from .index import TensorEntry
from .layout import whole_pages
from .quant import Scheme
from .rawio import ALIGN, aligned_buffer
from .transform import Piece

logger = logging.getLogger("carom")

DEVICE_LEAST = 8 << 20  # bytes; what is smaller is packed before a device has heard of it


class Encode:
    """Packs with ``codec`` ("raw", "lossless") what ``scheme`` does not quantise.

    ``device``: "auto" encodes large tensors on the current accelerator where there is one (a CUDA or ROCm GPU), "cpu"
    on the cores. Both write the same bytes. Holds two tensors and a blob at a time.
    """

    describes = ahead = True

    def __init__(self, codec: str, scheme: Scheme | None, device: str = "auto") -> None:
        self._codec, self._scheme = codec, scheme
        quantised = None if scheme is None else scheme.text
        self.name = quantised or codec
        if quantised is not None and codec != "raw":
            self.name = f"{quantised}+{codec}"
        self._device = _accelerator() if device == "auto" else None
        # For all tensors, since each thread's first chunk costs the pages of its memory. They end with this object.
        self._threads = ThreadPoolExecutor(lossless.cores(), thread_name_prefix="carom-encode")
        # The one before is still being written while the next is read.
        self._buffers = [memoryview(bytearray()), memoryview(bytearray())]

    def wanted(self, entry: TensorEntry) -> str:
        """The codec that is tried for ``entry``."""
        chosen = None if self._scheme is None else self._scheme.codebook(entry.name, entry.dtype, entry.shape)
        if chosen is not None or self._codec == "raw":
            return chosen or "raw"
        return "lossless" if _dtype(entry) in lossless_format.KIND_BY_DTYPE else "raw"

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> Piece:
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
            return Piece(entry.name, entry.dtype, entry.shape, [raw])
        blob = packed.blob.numpy()
        return Piece(entry.name, "U8", (len(blob),), [blob.data], packed.meta)

    def _gather(self, entry: TensorEntry, parts: Iterator[memoryview]) -> memoryview:
        self._buffers.reverse()
        if len(self._buffers[0]) < entry.nbytes:
            self._buffers[0] = memoryview(b"")  # the old one goes first
            try:
                self._buffers[0] = aligned_buffer(entry.nbytes)
            except (MemoryError, OSError) as error:
                raise WeightsError(
                    f"{entry.file.path}: no memory for tensor {show(entry.name)} of {entry.nbytes} bytes, which is packed "
                    "whole; free some, or pack with --codec raw, which needs none"
                ) from error
        raw, at = self._buffers[0][: entry.nbytes], 0
        for part in parts:
            raw[at : at + len(part)] = part
            at += len(part)
        return raw

    def _pack(self, tensor: torch.Tensor, wanted: str, entry: TensorEntry) -> Packed | None:
        """The tensor packed with codec ``wanted``; None where that saves no page, or cannot express its values."""
        limit = whole_pages(entry.nbytes) - ALIGN + 1  # a blob of more bytes fills as many pages
        codec = get(wanted)
        pool = self._threads
        if self._device is not None and entry.nbytes >= DEVICE_LEAST:
            with contextlib.suppress(RuntimeError):  # no room there, a kernel it lacks: the cores do it
                return _smaller(_encode(codec, tensor.to(self._device), entry, limit, pool), limit)
        return _smaller(_encode(codec, tensor, entry, limit, pool), limit)


def _encode(
    codec: Any, tensor: torch.Tensor, entry: TensorEntry, limit: int, pool: Executor
) -> Packed | None:
    if isinstance(codec, LosslessCodec):
        return codec.smaller(tensor, limit, pool) if limit > 1 else None
    assert isinstance(codec, KbitCodec)
    try:
        packed = codec.encode(tensor, entry.name, measure=True)
    except WeightsError:  # infinities or NaN: no codebook has them
        return None
    return Packed(packed.meta, packed.blob.cpu())


def _smaller(packed: Packed | None, limit: int) -> Packed | None:
    return packed if packed is not None and packed.wire_nbytes < limit else None


def _dtype(entry: TensorEntry) -> torch.dtype | None:
    try:
        return entry.torch_dtype
    except UnsupportedError:
        return None


def _accelerator() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    logger.info("carom: packing on %s", device)
    return device
