"""What becomes of each tensor when a checkpoint is packed: the seam where codecs come in.

Nothing here imports torch: packing raw works without it and in a fraction of its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import UnsupportedError
from .index import TensorEntry
from .quant import Scheme

CODECS = ("raw", "lossless")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to be written: its header entry and its bytes in parts. A part is used up before the next is asked for.

    ``meta`` describes a packed one (docs/codec.md); None: it stands as it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Iterable[memoryview | bytes]
    meta: dict[str, Any] | None = None


class Transform(Protocol):
    """Turns a source tensor (what it decodes to, where the source is packed) into a tensor of the packed file.

    ``name`` stands in the file as its codec. ``describes``: pieces may have a ``meta``. ``ahead``: the next tensor may
    be worked on, on another thread, while a piece is written. Pieces take at most the tensor's own bytes.
    """

    name: str
    describes: bool
    ahead: bool

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> Piece: ...

    def wanted(self, entry: TensorEntry) -> str:
        """The codec that is tried for ``entry``."""


class Raw:
    """Every tensor as it is."""

    name, describes, ahead = "raw", False, False

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> Piece:
        return Piece(entry.name, entry.dtype, entry.shape, parts)

    def wanted(self, entry: TensorEntry) -> str:
        return "raw"


def make_transform(codec: str, quant: Scheme | None, device: str = "auto") -> Transform:
    """The transform for `pack`'s settings; UnsupportedError for a codec that this Carom lacks."""
    if codec not in CODECS:
        raise UnsupportedError(
            f"codec {codec!r}: this version of carom packs {', '.join(CODECS)} (and --quant nf4, nf3, nf2)"
        )
    if codec == "raw" and quant is None:
        return Raw()
    from .encoding import Encode  # imports torch

    return Encode(codec, quant, device)
