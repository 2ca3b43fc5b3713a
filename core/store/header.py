"""The safetensors header, parsed by a pull parser that trusts nothing.

Format: https://huggingface.co/docs/safetensors/index#format (8 bytes of little-endian length, that many bytes of
JSON, then one byte buffer that the tensors cover without hole or overlap). `json.loads` is not used for the whole:
it recurses, keeps the last of two equal keys, takes NaN and unbounded integers, and builds any tree a hostile file
describes (20 times the file in memory) before a check could look at it. Here the first departure from the one
shape a header may have ends the parse, depth is fixed by the grammar, and memory is a few times the header.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ..errors import WeightsError

# The safetensors library's own limit; no real header comes near it.
MAX_HEADER_BYTES = 100_000_000
# Ten times the largest published checkpoint; bounds what a header of legal size may make us hold.
MAX_TENSORS = 1 << 20
MAX_DIMS = 64
MAX_NAME_BYTES = 1 << 16
# Elements and bytes are kept within what a signed 64-bit index can address.
MAX_COUNT = 1 << 62

# Bits per element of every dtype the format knows (safetensors/src/tensor.rs, `Dtype::bitsize`).
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_SPACE = re.compile(rb"[ \t\r\n]*")
_INTEGER = re.compile(rb"(?:0|[1-9][0-9]{0,18})(?![0-9.eE])")

# The one form every known writer uses; matched whole because 100,000 tensors by single steps take over a second.
# Whatever it does not match goes the long way, which also finds the words for what is wrong.
_COMPACT = re.compile(
    rb'\{"dtype": ?"([A-Z0-9_]{1,16})", ?"shape": ?\[((?:N(?:, ?N){0,63})?)\], ?"data_offsets": ?\[(N), ?(N)\]\}'.replace(
        b"N", rb"(?:0|[1-9][0-9]{0,18})"
    )
)


class RawTensor(NamedTuple):
    """One header entry as written: ``begin`` and ``end`` are bytes from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def show(name: str, limit: int = 120) -> str:
    """``name`` fit for an error message: escaped (no control characters reach a terminal) and bounded."""
    return repr(name if len(name) <= limit else name[:limit] + "...")


def dtype_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor of ``dtype`` code and ``shape``; None when they are no whole number of bytes or overflow."""
    count = 1
    for dim in shape:
        count *= dim or 1  # a zero elsewhere must not hide a product that overflows
        if count > MAX_COUNT:
            return None
    if 0 in shape:
        return 0
    bits = count * DTYPE_BITS[dtype]
    return bits // 8 if bits % 8 == 0 and bits // 8 <= MAX_COUNT else None


class _Scanner:
    """A cursor over JSON bytes; every method moves past what it names or raises WeightsError."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def fail(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self.where}: bad safetensors header: {what} (header byte {self.at}). "
            "The file is damaged or was not written by a safetensors writer; download or convert it again."
        )

    def peek(self) -> int:
        """The next byte that is no white space, -1 at the end."""
        data, at = self.data, self.at
        if at < len(data) and data[at] > 32:
            return data[at]
        match = _SPACE.match(data, at)
        assert match  # the pattern matches the empty string
        self.at = match.end()
        return data[self.at] if self.at < len(data) else -1

    def take(self, char: bytes) -> None:
        if self.peek() != char[0]:
            raise self.fail(f"expected {char.decode()!r}")
        self.at += 1

    def more(self, close: bytes) -> bool:
        """After a member: True past a comma, False past ``close``."""
        char = self.peek()
        if char not in (ord(","), close[0]):
            raise self.fail(f"expected ',' or {close.decode()!r}")
        self.at += 1
        return char == ord(",")

    def string(self, limit: int | None = None) -> str:
        self.take(b'"')
        start = part = self.at
        while True:
            end = self.data.find(b'"', part)
            if end < 0:
                raise self.fail("a string never ends")
            run = self.data[part:end]
            if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
                break
            part = end + 1  # that quote was escaped
        if limit is not None and end - start > limit:
            raise self.fail(f"a name of {end - start} bytes; at most {limit} are taken")
        try:
            text = self.data[start:end].decode("utf-8")
            if "\\" in text or not text.isprintable():
                # Escapes, control characters (refused in strict mode) and lone surrogates.
                text = json.loads(f'"{text}"')
                text.encode("utf-8")
        except (UnicodeError, ValueError) as error:
            raise self.fail(f"a string is not valid UTF-8 JSON ({type(error).__name__})") from None
        self.at = end + 1
        return text

    def integer(self) -> int:
        self.peek()
        match = _INTEGER.match(self.data, self.at)
        if not match:
            raise self.fail("expected a non-negative integer of at most 19 digits")
        self.at = match.end()
        return int(match[0])

    def integers(self, limit: int) -> tuple[int, ...]:
        self.take(b"[")
        if self.peek() == ord("]"):
            self.at += 1
            return ()
        values = [self.integer()]
        while self.more(b"]"):
            if len(values) == limit:
                raise self.fail(f"a list of more than {limit} numbers")
            values.append(self.integer())
        return tuple(values)


def _metadata(scan: _Scanner) -> dict[str, str]:
    if scan.peek() == ord("n") and scan.data.startswith(b"null", scan.at):
        scan.at += 4
        return {}
    found: dict[str, str] = {}
    scan.take(b"{")
    if scan.peek() == ord("}"):
        scan.at += 1
        return found
    while True:
        key = scan.string(MAX_NAME_BYTES)
        if key in found:
            raise scan.fail(f"__metadata__ has {show(key)} twice")
        scan.take(b":")
        found[key] = scan.string()
        if len(found) > MAX_TENSORS:
            raise scan.fail(f"__metadata__ has more than {MAX_TENSORS} entries")
        if not scan.more(b"}"):
            return found


def _tensor(scan: _Scanner, name: str) -> RawTensor:
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    scan.peek()
    compact = _COMPACT.match(scan.data, scan.at)
    if compact and (code := compact[1].decode()) in DTYPE_BITS:
        scan.at = compact.end()
        dims = tuple(map(int, compact[2].split(b","))) if compact[2] else ()
        return RawTensor(name, code, dims, int(compact[3]), int(compact[4]))
    scan.take(b"{")
    while True:
        field = scan.string(MAX_NAME_BYTES)
        scan.take(b":")
        if field == "dtype" and dtype is None:
            dtype = scan.string(MAX_NAME_BYTES)
        elif field == "shape" and shape is None:
            shape = scan.integers(MAX_DIMS)
        elif field == "data_offsets" and offsets is None:
            offsets = scan.integers(2)
        else:
            raise scan.fail(f"tensor {show(name)} has an unknown or repeated field {show(field)}")
        if not scan.more(b"}"):
            break
    if dtype is None or shape is None or offsets is None or len(offsets) != 2:
        raise scan.fail(f"tensor {show(name)} lacks dtype, shape or two data_offsets")
    if dtype not in DTYPE_BITS:
        raise scan.fail(f"tensor {show(name)} has the unknown dtype {show(dtype)}")
    return RawTensor(name, dtype, shape, offsets[0], offsets[1])


def parse_header(data: bytes, where: str) -> tuple[list[RawTensor], dict[str, str]]:
    """Tensors in header order and ``__metadata__`` of a header's JSON bytes.

    ``where`` names the file in errors. Raises WeightsError for anything the format does not allow: text that is no
    such JSON, equal keys, numbers that are no non-negative integers, unknown dtypes, sizes that are not dtype x shape.
    Offsets are checked against one another and against the file by `check_ranges`.
    """
    scan = _Scanner(data, where)
    if not data.startswith(b"{"):
        raise scan.fail("it does not begin with '{'")
    scan.at = 1
    tensors: list[RawTensor] = []
    metadata: dict[str, str] | None = None
    seen: set[str] = set()
    if scan.peek() == ord("}"):
        scan.at += 1
    else:
        while True:
            name = scan.string(MAX_NAME_BYTES)
            scan.take(b":")
            if name == "__metadata__":
                if metadata is not None:
                    raise scan.fail("__metadata__ stands twice")
                metadata = _metadata(scan)
            else:
                if name in seen:
                    raise scan.fail(f"the key {show(name)} stands twice")
                seen.add(name)
                tensor = _tensor(scan, name)
                expected = dtype_bytes(tensor.dtype, tensor.shape)
                if tensor.end < tensor.begin:
                    raise scan.fail(
                        f"tensor {show(name)} ends at {tensor.end}, before its begin {tensor.begin}"
                    )
                if expected is None or expected != tensor.end - tensor.begin:
                    raise scan.fail(
                        f"tensor {show(name)}: {tensor.dtype} of shape {list(tensor.shape)} takes {expected} bytes, "
                        f"its range is {tensor.end - tensor.begin}"
                    )
                tensors.append(tensor)
                if len(tensors) > MAX_TENSORS:
                    raise scan.fail(f"more than {MAX_TENSORS} tensors")
            if not scan.more(b"}"):
                break
    if scan.peek() != -1:
        raise scan.fail("text after the closing '}'")
    return tensors, metadata or {}


def check_ranges(tensors: list[RawTensor], data_bytes: int, where: str) -> None:
    """Raise WeightsError unless ``tensors`` cover ``data_bytes`` of data exactly: no overlap, no hole, none outside.

    The order of the header's keys is free; the format asks only that the ranges, sorted, follow one another.
    """
    at, last = 0, ""
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin < at:
            raise WeightsError(
                f"{where}: tensors {show(last)} and {show(tensor.name)} overlap in the file. The header lies; "
                "download or convert the file again."
            )
        if tensor.begin > at:
            raise WeightsError(
                f"{where}: {tensor.begin - at} bytes before tensor {show(tensor.name)} belong to no tensor. "
                "The safetensors format forbids holes; write the file again with a safetensors writer."
            )
        if tensor.end > data_bytes:
            raise WeightsError(
                f"{where}: truncated: tensor {show(tensor.name)} ends at data byte {tensor.end}, the file holds "
                f"{data_bytes}. Download or copy the file again."
            )
        at, last = tensor.end, tensor.name
    if at != data_bytes:
        raise WeightsError(
            f"{where}: {data_bytes - at} bytes after the last tensor belong to no tensor. The file is damaged "
            "(or still being written); download or copy it again."
        )
