"""The codecs (raw, lossless, nf4, nf3, nf2) by name, each of which packs and unpacks one tensor at a time.

    packed = get("lossless").encode(weight)       # Packed(meta, blob); codec "raw" if not smaller
    codec_of(packed.meta).verify(packed, "name")  # once, on the host, for bytes from a file
    weight = decode(packed, "name")

`core/codec/unit_decoder.py` decodes many tensors on the device with few kernel launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, Protocol

import torch

from ..common.errors import UnsupportedError
from . import kbit, lossless
from .blob_metadata import (
    Packed,
    check_blob,
    check_metadata_crc32,
    check_version,
    corrupt,
    describe,
    parse_meta,
    raw_bytes,
)
from .lossless_device import encode_on_device
from .lossless_format import HEADER_BYTES, KIND_BY_DTYPE, Header, checksum, parse_header
from .lossless_torch import decode_torch
from .lossless_validation import check_tiles
from .unit_decoder import AnyEntry, KbitEntry, LosslessEntry, RawEntry

NAMES = ("raw", "lossless", "nf4", "nf3", "nf2")


class Codec(Protocol):
    """The interface of a codec. A ``lossy`` codec changes values; all others give back every bit."""

    name: str
    version: int
    lossy: bool

    def encode(self, tensor: torch.Tensor, name: str = "tensor") -> Packed:
        """Pack a tensor of any shape; ``name`` is for error messages."""

    def verify(self, packed: Packed, name: str = "tensor") -> None:
        """Raise WeightsError naming ``name`` unless the blob (in host memory) is undamaged and safe to
        decode.
        """

    def decode(self, packed: Packed, name: str = "tensor", out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the decoded tensor on the blob's device.

        ``out`` (1-D uint8, at least the decoded bytes), if given, receives the bytes, and the result is a
        view of ``out``.
        """

    def decoded_nbytes(self, meta: Mapping[str, Any], name: str = "tensor") -> int:
        """Return the number of bytes of the decoded tensor."""


def get(name: str) -> Codec:
    """Return the codec called ``name``; raise ValueError, which lists the known names, for an unknown one."""
    codec = _CODECS.get(name)
    if codec is None:
        raise ValueError(f"codec={str(name)[:40]!r} is unknown; choose one of {', '.join(NAMES)}")
    return codec


def codec_of(meta: Mapping[str, Any], name: str = "tensor") -> Codec:
    """Return the codec that the ``meta`` of a packed tensor names; raise UnsupportedError if this Carom has
    no such codec.
    """
    codec = _CODECS.get(meta["codec"]) if isinstance(meta.get("codec"), str) else None
    if codec is None:
        raise UnsupportedError(
            f"tensor {name!r} is packed with codec {str(meta.get('codec'))[:40]!r}; this Carom reads "
            f"{', '.join(NAMES)}: update Carom"
        )
    return codec


def encode(tensor: torch.Tensor, codec: str = "lossless", name: str = "tensor") -> Packed:
    """Pack a tensor with the codec called ``codec``; see `Codec.encode`."""
    return get(codec).encode(tensor, name)


def verify(packed: Packed, name: str = "tensor") -> None:
    """Raise WeightsError unless a tensor packed by any codec is undamaged; see `Codec.verify`."""
    codec_of(packed.meta, name).verify(packed, name)


def decode(packed: Packed, name: str = "tensor", out: torch.Tensor | None = None) -> torch.Tensor:
    """Decode a packed tensor, after verifying the blob if it is in host memory; see `Codec.decode`."""
    codec = codec_of(packed.meta, name)
    if packed.blob.device.type == "cpu":
        codec.verify(packed, name)
    return codec.decode(packed, name, out)


def decoded_nbytes(meta: Mapping[str, Any], name: str = "tensor") -> int:
    """Return the number of bytes that a packed tensor with this ``meta`` decodes to."""
    return codec_of(meta, name).decoded_nbytes(meta, name)


def entry_of(packed: Packed, wire_at: int, out_at: int, name: str = "tensor") -> AnyEntry:
    """Return the entry by which a `UnitDecoder` decodes a packed tensor.

    ``wire_at`` and ``out_at``: the tensor's byte offsets in the buffer of packed bytes and in the buffer of
    decoded bytes. Verifies a blob in host memory; a blob on a device must have been verified before.
    """
    codec = codec_of(packed.meta, name)
    if packed.blob.device.type == "cpu":
        codec.verify(packed, name)
    if isinstance(codec, LosslessCodec):
        return LosslessEntry(codec.header(packed, name), wire_at, out_at)
    dtype, _, nbytes = parse_meta(packed.meta, name)
    if isinstance(codec, KbitCodec):
        return KbitEntry(codec.layout(packed, name), dtype, wire_at, out_at)
    return RawEntry(nbytes, wire_at, out_at)


def _output_bytes(nbytes: int, like: torch.Tensor, out: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return the uint8 tensor that receives ``nbytes`` decoded bytes: the beginning of ``out``, or a new one
    on ``like``'s device.
    """
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)
    if out.dtype != torch.uint8 or out.dim() != 1 or out.numel() < nbytes or out.device != like.device:
        raise ValueError(
            f"tensor {name!r}: out must be 1-D uint8 on {like.device} with at least {nbytes} elements"
        )
    return out[:nbytes]


def _as_tensor(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the bytes ``raw`` as a tensor of ``dtype`` and ``shape``; copies only if they are not aligned to
    the dtype.
    """
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


class _CodecBase:
    name: str
    version = 1
    lossy = False

    def decoded_nbytes(self, meta: Mapping[str, Any], name: str = "tensor") -> int:
        return parse_meta(meta, name)[2]


class RawCodec(_CodecBase):
    """The codec that stores a tensor's own bytes."""

    name = "raw"

    def encode(self, tensor: torch.Tensor, name: str = "tensor") -> Packed:
        blob = raw_bytes(tensor)
        return Packed(describe(self.name, self.version, tensor, blob.cpu().numpy().data), blob)

    def _check(self, packed: Packed, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        check_version(packed.meta, self.version, name)
        check_blob(packed, name)
        dtype, shape, nbytes = parse_meta(packed.meta, name)
        if packed.blob.numel() != nbytes:
            raise corrupt(name, f"the blob has {packed.blob.numel()} bytes, shape and dtype need {nbytes}")
        return dtype, shape

    def verify(self, packed: Packed, name: str = "tensor") -> None:
        self._check(packed, name)
        check_metadata_crc32(packed.meta, packed.blob.numpy().data, name)

    def decode(self, packed: Packed, name: str = "tensor", out: torch.Tensor | None = None) -> torch.Tensor:
        dtype, shape = self._check(packed, name)
        raw = _output_bytes(packed.blob.numel(), packed.blob, out, name)
        raw.copy_(packed.blob)
        return _as_tensor(raw, dtype, shape)


class LosslessCodec(_CodecBase):
    """The codec that stores exponents as k-bit codes, and rare exponents apart (escapes); decoding gives back
    every bit. `encode` returns a raw tensor if the packed one would not be smaller.
    """

    name = "lossless"

    def encode(self, tensor: torch.Tensor, name: str = "tensor") -> Packed:
        return self.smaller(tensor) or _CODECS["raw"].encode(tensor, name)

    def smaller(
        self, tensor: torch.Tensor, limit: int | None = None, pool: Executor | None = None
    ) -> Packed | None:
        """Return the packed tensor with its blob in host memory, or None where the blob would take ``limit``
        bytes or more.

        ``limit`` defaults to the tensor's bytes. ``pool``: an executor with one thread for each CPU core, for
        callers that pack many CPU tensors.
        """
        if tensor.device.type == "cpu":
            blob = lossless.encode(tensor, limit=limit, pool=pool)
        else:
            blob = encode_on_device(tensor)
        if blob is None or (limit is not None and blob.numel() >= limit):
            return None
        return Packed(describe(self.name, self.version, tensor, blob.numpy().data[:HEADER_BYTES]), blob)

    def header(self, packed: Packed, name: str = "tensor") -> Header:
        """Return the parsed header, checked against the metadata; copies 128 bytes from the device if the
        blob is there.
        """
        check_version(packed.meta, self.version, name)
        check_blob(packed, name)
        head = packed.blob[:HEADER_BYTES].cpu().numpy()
        return self._header(packed.meta, head.data, packed.blob.numel(), name)

    def header_of(self, meta: Mapping[str, Any], head: memoryview, length: int, name: str) -> Header:
        """Return the checked header of a blob of ``length`` bytes; ``head`` are the first 128 bytes, or more.

        Raises WeightsError naming ``name`` where header or metadata are damaged or contradict each other.
        """
        check_version(meta, self.version, name)
        header = self._header(meta, head, length, name)
        check_metadata_crc32(meta, head, name)
        return header

    @staticmethod
    def _header(meta: Mapping[str, Any], head: memoryview, length: int, name: str) -> Header:
        dtype, _, nbytes = parse_meta(meta, name)
        header = parse_header(head, name, length)
        if KIND_BY_DTYPE.get(dtype) is not header.kind or header.raw_nbytes != nbytes:
            raise corrupt(name, "its header does not fit the dtype and shape in the file's metadata")
        return header

    def verify(self, packed: Packed, name: str = "tensor") -> None:
        header = self.header(packed, name)
        blob = packed.blob.numpy()
        check_metadata_crc32(packed.meta, blob.data[:HEADER_BYTES], name)
        if checksum(header, blob.data[HEADER_BYTES:]) != header.crc:
            raise corrupt(name, "its checksum differs from its bytes")
        check_tiles(blob, header, name)

    def decode(self, packed: Packed, name: str = "tensor", out: torch.Tensor | None = None) -> torch.Tensor:
        header = self.header(packed, name)
        dtype, shape, nbytes = parse_meta(packed.meta, name)
        raw = _output_bytes(nbytes, packed.blob, out, name)
        blob = packed.blob if packed.blob.storage_offset() % 8 == 0 else packed.blob.clone()
        decode_torch(blob, header, raw)
        return _as_tensor(raw, dtype, shape)


class KbitCodec(_CodecBase):
    """A codec of block-wise quantisation with a codebook (NF4, NF3 or NF2): LOSSY."""

    lossy = True

    def __init__(self, codebook: kbit.Codebook) -> None:
        self.codebook = codebook
        self.name = codebook.name

    def encode(
        self,
        tensor: torch.Tensor,
        name: str = "tensor",
        block: int = kbit.DEFAULT_BLOCK,
        measure: bool = False,
    ) -> Packed:
        """Quantise a tensor; see `Codec.encode`.

        ``block``: elements that share a scale. ``measure``: add ``error`` to the metadata, the relative error
        (norm of the change over the tensor's norm).
        """
        blob = kbit.quantize(tensor, self.codebook, block, name)
        data = blob.cpu().numpy().data
        more: dict[str, Any] = {}
        if measure:
            layout = kbit.Layout(self.codebook, tensor.numel(), block)
            more["error"] = float(f"{kbit.relative_error(tensor, blob, layout):.6g}")
        return Packed(describe(self.name, self.version, tensor, data, block=block, lossy=True, **more), blob)

    def layout(self, packed: Packed, name: str = "tensor") -> kbit.Layout:
        """Return the byte offsets of codes and scales, after checking that they fit the blob's size."""
        check_blob(packed, name)
        return self.layout_of(packed.meta, packed.blob.numel(), name)

    def layout_of(self, meta: Mapping[str, Any], length: int, name: str) -> kbit.Layout:
        """Return the byte offsets of codes and scales in a blob of ``length`` bytes, which is not read.

        Raises WeightsError naming ``name`` where the metadata is damaged or does not fit ``length``.
        """
        check_version(meta, self.version, name)
        dtype, _, nbytes = parse_meta(meta, name)
        block = meta.get("block")
        if dtype not in kbit.DTYPES or type(block) is not int or block not in kbit.BLOCKS:
            raise corrupt(name, "its metadata has no valid dtype or block size")
        layout = kbit.Layout(self.codebook, nbytes // dtype.itemsize, block)
        if length != layout.total:
            raise corrupt(name, f"the blob has {length} bytes, its shape needs {layout.total}")
        return layout

    def verify(self, packed: Packed, name: str = "tensor") -> None:
        self.layout(packed, name)
        check_metadata_crc32(packed.meta, packed.blob.numpy().data, name)

    def decode(self, packed: Packed, name: str = "tensor", out: torch.Tensor | None = None) -> torch.Tensor:
        layout = self.layout(packed, name)
        dtype, shape, nbytes = parse_meta(packed.meta, name)
        raw = _output_bytes(nbytes, packed.blob, out, name)
        if raw.storage_offset() % dtype.itemsize:
            raise ValueError(f"tensor {name!r}: out must start at a multiple of {dtype.itemsize} bytes")
        kbit.dequantize(packed.blob, layout, raw.view(dtype))
        return raw.view(dtype).view(shape)


_CODECS: dict[str, Any] = {
    "raw": RawCodec(),
    "lossless": LosslessCodec(),
    **{book.name: KbitCodec(book) for book in kbit.CODEBOOKS.values()},
}
