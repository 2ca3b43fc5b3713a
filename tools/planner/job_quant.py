"""Sizes of ai-toolkit's quantised formats (`qtype`), in bits per weight with scales.

Source: ai-toolkit at commit 27a03a9, the buffers that toolkit/util/*_quant.py register for each weight.
"""

from __future__ import annotations

from .presets import Quant, find_quant

# Names that another format of the planner describes exactly, or that have one scale a row, which does not count.
_BITS = {
    "qfloat8": 8, "float8": 8, "qint8": 8, "int8": 8, "convrot8": 8, "convrotint8": 8,
    "nvfp4": 4.5,  # 4 bits, and one fp8 scale for 16 weights
    "convrot4": 5,  # as nvfp4, with its scales stored twice
    "uint8": 16,  # ai-toolkit leaves weights of this type as they are
}  # fmt: skip
for _bits in range(2, 8):
    _BITS[f"uint{_bits}"] = _bits + 24 / 64  # a 16-bit scale and an 8-bit zero point for 64 weights
    _BITS[f"convrotint{_bits}"] = _bits + 32 / 128  # an fp32 scale for 128 weights
for _bits in range(2, 5):
    _BITS[f"orbit{_bits}"] = _bits
    _BITS[f"orbitvq{_bits}"] = _bits + 16 / 128  # a 16-bit scale for 128 weights
_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
}  # fmt: skip


def quant_of(qtype: str | None, dtype: str) -> tuple[Quant, bool]:
    """Return the format of weights of type `qtype` (None: not quantised) in a job of number format `dtype`, and
    whether the type is known.

    Weights of an unknown type are counted in `dtype`, and in bf16 where that is unknown too.
    """
    plain = find_quant(_DTYPES.get(dtype.lower(), "bf16"))
    if qtype is None:
        return plain, dtype.lower() in _DTYPES
    if qtype not in _BITS:
        return plain, False
    return Quant(qtype, _BITS[qtype], _BITS[qtype]), True
