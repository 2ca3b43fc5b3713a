"""The interface of tensor transforms in `carom pack`, and the transform that writes every tensor unchanged.

A transform converts each source tensor to the tensor that is written; encode.py has the transform that
applies codecs. Nothing here imports torch, so that packing without a codec needs no torch and a fraction of
the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ...core.checkpoint.index import TensorEntry
from ...core.common.errors import UnsupportedError
from .quant_scheme import QuantScheme

CODECS = ("raw", "lossless")


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written: its entry in the header, and its bytes in ``parts``.

    The writer has finished with a part before it takes the next one. ``meta``: the codec's metadata of an
    encoded tensor (see docs/codec.md), None for an unchanged tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Iterable[memoryview | bytes]
    meta: dict[str, Any] | None = None


class Transform(Protocol):
    """A conversion of a source tensor (decoded, where the source is packed) to a tensor of the packed file.

    ``name``: the codec name that the file records; ``has_metadata``: whether results may have ``meta``;
    ``runs_ahead``: whether the next tensor may be converted on another thread while a result is written. A
    result has at most as many bytes as its source tensor.
    """

    name: str
    has_metadata: bool
    runs_ahead: bool

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> OutputTensor:
        """Convert the tensor ``entry``, whose bytes are ``parts`` in order."""

    def wanted(self, entry: TensorEntry) -> str:
        """Return the name of the codec that is tried for ``entry``, "raw" for none."""


class RawTransform:
    """A transform that leaves every tensor unchanged."""

    name, has_metadata, runs_ahead = "raw", False, False

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> OutputTensor:
        """Return the tensor ``entry`` unchanged."""
        return OutputTensor(entry.name, entry.dtype, entry.shape, parts)

    def wanted(self, entry: TensorEntry) -> str:
        """Return "raw"."""
        return "raw"


def make_transform(codec: str, quant: QuantScheme | None, device: str = "auto") -> Transform:
    """Return the transform for the settings of `pack`. Raises UnsupportedError for an unknown codec."""
    if codec not in CODECS:
        raise UnsupportedError(
            f"codec {codec!r}: this version of carom packs {', '.join(CODECS)} (and --quant nf4, nf3, nf2)"
        )
    if codec == "raw" and quant is None:
        return RawTransform()
    from .encode import CodecTransform  # imports torch

    return CodecTransform(codec, quant, device)
