"""Compression of weight tensors: raw bytes, lossless exponent coding, and NF4/NF3/NF2 quantisation (lossy).

The formats are described in docs/codec.md. For one tensor: `encode`, `decode`, `verify`, `get`. For all
packed tensors of a unit (a module whose weights are copied to the device together): `UnitDecoder`. May import
`common`.
"""

from __future__ import annotations

from .backends import DECODE_KERNELS, triton_works, warm_up
from .blob_format import BlobFormat
from .blob_metadata import METADATA_KEY, Packed, read_metadata, write_metadata
from .registry import NAMES, Codec, codec_of, decode, decoded_nbytes, encode, entry_of, get, verify
from .unit_decoder import AnyEntry, KbitEntry, LosslessEntry, PackedEntry, RawEntry, Tuning, UnitDecoder

__all__ = [
    "DECODE_KERNELS", "METADATA_KEY", "NAMES", "AnyEntry", "BlobFormat", "Codec", "LosslessEntry", "KbitEntry", "Packed", "PackedEntry", "RawEntry", "Tuning", "UnitDecoder",
    "codec_of", "decode", "decoded_nbytes", "encode", "entry_of", "get", "read_metadata", "triton_works", "verify", "warm_up", "write_metadata",
]  # fmt: skip
