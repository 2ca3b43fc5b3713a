"""A packed tensor: one uint8 blob and a small JSON-able description, as it lies in memory and in a safetensors file.

A packed file is an ordinary safetensors file: a packed tensor is stored under its own name as 1-D uint8, and one
`__metadata__` entry, ``carom.codec``, describes all packed tensors (docs/codec.md). Tensors not listed are as they are.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError, WeightsError

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
for _later in ("float8_e8m0fnu", "uint16", "uint32", "uint64"):
    if hasattr(torch, _later):
        DTYPES[_later] = getattr(torch, _later)


@dataclass(frozen=True)
class Packed:
    """``blob`` (1-D uint8, any device) with ``meta``: codec, version, dtype and shape of what it decodes to, and more
    that the codec needs. Build one with a codec's `encode`, or from a file's metadata and bytes."""

    meta: dict[str, Any]
    blob: torch.Tensor

    @property
    def codec(self) -> str:
        return str(self.meta.get("codec"))

    @property
    def wire_nbytes(self) -> int:
        return self.blob.numel()


def corrupt(name: str, why: str) -> WeightsError:
    """The error for bytes of tensor ``name`` that no Carom can have written."""
    return WeightsError(f"tensor {name!r}: packed data is corrupt: {why}; copy or download the file again")


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any shape and strides, 1-D uint8; a view of its storage where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # One element or none count as contiguous with any stride, but cannot be viewed as bytes then.
    return flat.as_strided((flat.numel(),), (1,), flat.storage_offset()).view(torch.uint8)


def describe(codec: str, version: int, tensor: torch.Tensor, data: memoryview, **more: Any) -> dict[str, Any]:
    """The ``meta`` of ``tensor`` under ``codec``, with ``crc32`` over itself and ``data``.

    Raises UnsupportedError for a dtype that cannot be named.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"a tensor of dtype {tensor.dtype} cannot be packed; keep it as it is")
    meta = {"codec": codec, "version": version, "dtype": dtype, "shape": list(tensor.shape), **more}
    return {**meta, "crc32": _seal(meta, data)}


def _seal(meta: Mapping[str, Any], data: memoryview) -> int:
    others = {key: value for key, value in meta.items() if key != "crc32"}
    text = json.dumps(others, separators=(",", ":"), sort_keys=True)
    return zlib.crc32(data, zlib.crc32(text.encode()))


def check_seal(meta: Mapping[str, Any], data: memoryview, name: str) -> None:
    """Raises WeightsError where ``meta`` or ``data`` is not what `describe` saw."""
    try:
        whole = _seal(meta, data) == meta.get("crc32")
    except (TypeError, ValueError, RecursionError):
        whole = False
    if not whole:
        raise corrupt(name, "its checksum differs")


def parse_meta(meta: Mapping[str, Any], name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
    """(dtype, shape, raw bytes) that ``meta`` declares; nothing is allocated. Raises WeightsError naming ``name``."""
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
    """Raises UnsupportedError where the blob's codec version is not ``known``, saying which Carom reads it."""
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
    """Raises WeightsError unless the blob is 1-D contiguous uint8."""
    blob = packed.blob
    if blob.dtype != torch.uint8 or blob.dim() != 1 or not blob.is_contiguous():
        raise WeightsError(
            f"tensor {name!r}: packed data must be a 1-D uint8 tensor, this is {blob.dtype} of shape "
            f"{list(blob.shape)}; copy or download the file again"
        )


def write_metadata(metas: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The safetensors ``metadata`` entry for packed tensors by name."""
    text = json.dumps({"version": METADATA_VERSION, "tensors": metas}, separators=(",", ":"), sort_keys=True)
    return {METADATA_KEY: text}


def read_metadata(metadata: Mapping[str, str] | None) -> dict[str, dict[str, Any]]:
    """Metas of packed tensors by name, from a safetensors file's metadata; empty where the file has none.

    Raises WeightsError where the entry is malformed, UnsupportedError where a later Carom wrote it.
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
