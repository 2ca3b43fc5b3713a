"""Decoding of any byte range of a packed tensor on the CPU, from a blob in host memory that was verified
once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from . import kbit
from .blob_metadata import Packed, parse_meta
from .lossless_host import decode_bytes
from .registry import KbitCodec, LosslessCodec, codec_of


class HostBlob:
    """A verified packed tensor in host memory: ``blob`` (1-D uint8, starting at a multiple of 8 bytes),
    described by ``meta``.

    Raises WeightsError naming ``name`` if the blob is damaged, UnsupportedError if this version of Carom
    lacks the codec.
    """

    def __init__(self, meta: Mapping[str, Any], blob: torch.Tensor, name: str) -> None:
        self._packed = Packed(dict(meta), blob)
        self._codec = codec_of(meta, name)
        self._codec.verify(self._packed, name)
        self.dtype, self.shape, self.nbytes = parse_meta(meta, name)
        self._layout: Any = None
        if isinstance(self._codec, LosslessCodec):
            self._layout = self._codec.header(self._packed, name)
        elif isinstance(self._codec, KbitCodec):
            self._layout = self._codec.layout(self._packed, name)

    def read(self, begin: int, out: np.ndarray) -> None:
        """Decode bytes ``begin`` to ``begin + len(out)`` of the tensor into ``out`` (1-D contiguous uint8).

        Raises ValueError for a range outside the tensor.
        """
        if begin < 0 or begin + len(out) > self.nbytes:
            raise ValueError(f"bytes {begin} to {begin + len(out)} of a tensor that has {self.nbytes}")
        if not len(out):
            return
        blob = self._packed.blob
        if isinstance(self._codec, LosslessCodec):
            decode_bytes(blob.numpy(), self._layout, begin, out)
        elif isinstance(self._codec, KbitCodec):
            self._read_kbit(begin, out)
        else:
            out[:] = blob.numpy()[begin : begin + len(out)]

    def _read_kbit(self, begin: int, out: np.ndarray) -> None:
        layout, size = self._layout, self.dtype.itemsize
        step = kbit.CHUNK  # elements; a multiple of every block size
        end = begin + len(out)
        for start in range(begin // size // step * step, math.ceil(end / size), step):
            stop = min(start + step, layout.numel, math.ceil(end / size))
            first = max(start, begin // size) // layout.block * layout.block
            part = torch.empty(stop - first, dtype=self.dtype)
            kbit.dequantize_range(self._packed.blob, layout, first, part)
            raw = part.view(torch.uint8).numpy()
            low, high = max(begin, first * size), min(end, stop * size)
            out[low - begin : high - begin] = raw[low - first * size : high - first * size]
