"""The `Packed` tensor (one uint8 blob and its metadata) and how the metadata is stored in a safetensors file.

A packed file is an ordinary safetensors file: a packed tensor is stored under its own name as 1-D uint8, and
one `__metadata__` entry, ``carom.codec``, describes all packed tensors (docs/codec.md). Tensors that the
entry does not list are stored raw.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..common.errors import UnsupportedError, WeightsError

METADATA_KEY = "carom.codec"
METADATA_VERSION = 1
MAX_ELEMENTS = 1 << 48
MAX_DIMENSIONS = 64

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64,
    )
}  # fmt: skip
for _newer_dtype in ("float8_e8m0fnu", "uint16", "uint32", "uint64"):
    if hasattr(torch, _newer_dtype):
        DTYPES[_newer_dtype] = getattr(torch, _newer_dtype)


@dataclass(frozen=True)
class Packed:
    """A packed tensor: ``blob`` (1-D uint8, any device), and ``meta``, which describes how to decode the
    blob.

    ``meta`` holds the codec's name and version, dtype and shape of the decoded tensor, and further values
    that the codec needs; all can be written as JSON. Build an instance with a codec's `encode`, or from a
    file's metadata and bytes.
    """

    meta: dict[str, Any]
    blob: torch.Tensor

    @property
    def codec(self) -> str:
        """The name of the codec, such as "lossless" or "nf4"."""
        return str(self.meta.get("codec"))

    @property
    def wire_nbytes(self) -> int:
        """The number of packed bytes, which a copy to the device transfers."""
        return self.blob.numel()


def corrupt(name: str, why: str) -> WeightsError:
    """Return the WeightsError for packed bytes of tensor ``name`` that no version of Carom can have
    written.
    """
    return WeightsError(f"tensor {name!r}: packed data is corrupt: {why}; copy or download the file again")


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any shape and strides as 1-D uint8; a view where the tensor is
    contiguous, else a copy.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    # PyTorch calls a tensor of at most one element contiguous whatever its strides are, but refuses to view
    # such a tensor as bytes; so give the tensor the stride 1.
    return flat.as_strided((flat.numel(),), (1,), flat.storage_offset()).view(torch.uint8)


def describe(codec: str, version: int, tensor: torch.Tensor, data: memoryview, **more: Any) -> dict[str, Any]:
    """Return the ``meta`` of ``tensor`` as packed by ``codec``, with ``crc32``, a CRC-32 of the meta itself
    and ``data``.

    ``more``: further values of the codec. Raises UnsupportedError for a dtype that has no name in the format.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"a tensor of dtype {tensor.dtype} cannot be packed; keep it as it is")
    meta = {"codec": codec, "version": version, "dtype": dtype, "shape": list(tensor.shape), **more}
    return {**meta, "crc32": _metadata_crc32(meta, data)}


def _metadata_crc32(meta: Mapping[str, Any], data: memoryview | bytes) -> int:
    """Return the CRC-32 (zlib's) of ``meta`` as JSON without its ``crc32``, continued over ``data``."""
    others = {key: value for key, value in meta.items() if key != "crc32"}
    text = json.dumps(others, separators=(",", ":"), sort_keys=True)
    return zlib.crc32(data, zlib.crc32(text.encode()))


def metadata_crc32(meta: Mapping[str, Any], name: str) -> int:
    """Return the CRC-32 of ``meta`` alone; the blob's bytes added to it give ``crc32`` of `describe`.

    Raises WeightsError naming the tensor ``name`` for a ``meta`` that cannot be written as JSON.
    """
    try:
        return _metadata_crc32(meta, b"")
    except (TypeError, ValueError, RecursionError):
        raise corrupt(name, "its metadata is no JSON") from None


def check_metadata_crc32(meta: Mapping[str, Any], data: memoryview, name: str) -> None:
    """Raise WeightsError unless ``crc32`` in ``meta`` matches ``meta`` and ``data``, as `describe` computed
    it.
    """
    try:
        matches = _metadata_crc32(meta, data) == meta.get("crc32")
    except (TypeError, ValueError, RecursionError):
        matches = False
    if not matches:
        raise corrupt(name, "its checksum differs from its bytes")


def parse_meta(meta: Mapping[str, Any], name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return (dtype, shape, bytes of the decoded tensor) that ``meta`` declares; allocate nothing.

    Raises WeightsError naming the tensor ``name`` for an unknown dtype or an impossible shape.
    """
    dtype = DTYPES.get(meta["dtype"]) if isinstance(meta.get("dtype"), str) else None
    shape = meta.get("shape")
    if dtype is None:
        raise WeightsError(
            f"tensor {name!r}: its metadata declares the dtype {str(meta.get('dtype'))[:40]!r}, which this torch or "
            "Carom does not know; update them or pack the file again"
        )
    if (
        not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMENSIONS
        or any(type(d) is not int or not 0 <= d <= MAX_ELEMENTS for d in shape)
        or math.prod(d for d in shape if d) > MAX_ELEMENTS
    ):  # fmt: skip
        raise WeightsError(
            f"tensor {name!r}: its metadata declares no valid shape; copy or download the file again"
        )
    return dtype, tuple(shape), math.prod(shape) * dtype.itemsize


def check_version(meta: Mapping[str, Any], known: int, name: str) -> None:
    """Raise UnsupportedError unless the blob's codec version is ``known``, the version that this Carom reads.

    The message says which Carom reads the blob. Raises WeightsError where ``meta`` has no valid version.
    """
    version = meta.get("version")
    if type(version) is not int or version < 1:
        raise WeightsError(
            f"tensor {name!r}: its metadata has no codec version; copy or download the file again"
        )
    if version != known:
        raise UnsupportedError(
            f"tensor {name!r} is packed with codec {meta.get('codec')!r} version {version}; this Carom reads version "
            f"{known} (Carom 0.1 and later): " + ("update Carom" if version > known else "pack it again")
        )


def check_blob(packed: Packed, name: str) -> None:
    """Raise WeightsError unless the blob is 1-D contiguous uint8."""
    blob = packed.blob
    if blob.dtype != torch.uint8 or blob.dim() != 1 or not blob.is_contiguous():
        raise WeightsError(
            f"tensor {name!r}: packed data must be a 1-D uint8 tensor, this is {blob.dtype} of shape "
            f"{list(blob.shape)}; copy or download the file again"
        )


def write_metadata(metas: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the safetensors ``__metadata__`` entry that describes the packed tensors; ``metas`` maps names
    to meta.
    """
    text = json.dumps({"version": METADATA_VERSION, "tensors": metas}, separators=(",", ":"), sort_keys=True)
    return {METADATA_KEY: text}


def read_metadata(metadata: Mapping[str, str] | None) -> dict[str, dict[str, Any]]:
    """Return {tensor name: meta} of the packed tensors from a safetensors file's ``__metadata__``; empty if
    none is packed.

    Raises WeightsError for a malformed entry, UnsupportedError for one that a later version of Carom wrote.
    """
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightsError(
            f"the file's {METADATA_KEY} metadata is no JSON ({error}); pack it again"
        ) from error
    if not isinstance(value, dict) or type(value.get("version")) is not int:
        raise WeightsError(f"the file's {METADATA_KEY} metadata has no version; pack it again")
    if value["version"] != METADATA_VERSION:
        raise UnsupportedError(
            f"the file's packing is version {value['version']}; this Carom reads version {METADATA_VERSION} (Carom 0.1 "
            "and later): update Carom or pack the file again"
        )
    tensors = value.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(meta, dict) for meta in tensors.values()):
        raise WeightsError(f"the file's {METADATA_KEY} metadata lists no tensors; pack it again")
    return tensors
