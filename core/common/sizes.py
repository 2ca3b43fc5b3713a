"""Parsing and formatting of byte sizes as people write them: "8GiB", "8GB", "50%", 123."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from typing import SupportsIndex

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": KIB,
    "m": 10**6, "mb": 10**6, "mib": MIB,
    "g": 10**9, "gb": 10**9, "gib": GIB,
    "t": 10**12, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*|%)\s*")


def parse_size(value: SupportsIndex | float | str, *, whole: int | None = None, setting: str = "size") -> int:
    """Return the number of bytes that ``value`` means: an integer (NumPy's too), "8GiB", "8GB", or "50%" of
    ``whole`` bytes.

    Raises ValueError that names ``setting`` for any other value, for a negative size and for one above 2**60
    bytes.
    """
    if isinstance(value, bool):
        raise ValueError(f"{setting}={value!r} is not a size; write bytes, '8GiB', '8GB' or '50%'")
    with contextlib.suppress(TypeError):
        value = operator.index(value)  # type: ignore[arg-type]
    if isinstance(value, (int, float)):
        if value != value or value < 0 or value > 1 << 60:
            raise ValueError(f"{setting}={value!r} is out of range; write bytes, '8GiB', '8GB' or '50%'")
        return int(value)
    match = _PATTERN.fullmatch(value) if isinstance(value, str) and len(value) < 64 else None
    if not match:
        raise ValueError(f"{setting}={value!r} is not a size; write bytes, '8GiB', '8GB' or '50%'")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if whole is None:
            raise ValueError(f"{setting}={value!r}: a percentage has no meaning here; write bytes or '8GiB'")
        if number > 100:
            raise ValueError(f"{setting}={value!r} is more than 100 %")
        return int(whole * number / 100)
    if unit not in _UNITS:
        raise ValueError(f"{setting}={value!r} has an unknown unit {match[2]!r}; use KiB, MiB, GiB or TiB")
    size = number * _UNITS[unit]
    if size > 1 << 60:
        raise ValueError(f"{setting}={value!r} is out of range")
    return int(size)


def suggest_size(value: object) -> str | None:
    """Return the size that a user probably meant by a bare number too small to be a size in bytes, or None
    for any other value.

    A number below 1024 is taken as GiB (12 gives "12GiB"), one below 65536 as MiB (6000 gives "6000MiB").
    """
    number = str(value).strip()
    if isinstance(value, bool) or not number.replace(".", "", 1).isdigit() or not 0 < float(number) < 1 << 16:
        return None
    return number + ("GiB" if float(number) < 1024 else "MiB")


def round_up_to_mib(count: float) -> str:
    """Return the smallest whole number of MiB that holds ``count`` bytes, as text that `parse_size` reads
    ("118MiB").
    """
    return f"{math.ceil(count / MIB)}MiB"


def format_size(count: int | float) -> str:
    """Return ``count`` bytes as text for people, in binary units ("1.50 GiB")."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{int(count)} B"
