"""What bytes look like on the wire: raw, lossless, and k-bit codebooks (lossy). The formats: docs/codec.md.

One tensor: `encode`, `decode`, `verify`, `get`. All tensors of a unit on the device: `UnitDecoder`.
"""

from __future__ import annotations

from .backends import triton_works
from .packed import METADATA_KEY, Packed, read_metadata, write_metadata
from .registry import NAMES, Codec, codec_of, decode, decoded_nbytes, encode, entry_of, get, verify
from .unit import AnyEntry, Entry, KbitEntry, RawEntry, Tuning, UnitDecoder

__all__ = [
    "METADATA_KEY", "NAMES", "AnyEntry", "Codec", "Entry", "KbitEntry", "Packed", "RawEntry", "Tuning", "UnitDecoder",
    "codec_of", "decode", "decoded_nbytes", "encode", "entry_of", "get", "read_metadata", "triton_works", "verify", "write_metadata",
]  # fmt: skip
