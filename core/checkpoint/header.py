"""A parser for safetensors headers that validates everything and trusts nothing in the file.

Format: https://huggingface.co/docs/safetensors/index#format (8 bytes of little-endian length, that many bytes
of JSON, then one byte buffer that the tensors cover without hole or overlap). `json.loads` is not used for
the whole header: it recurses, keeps the last of two equal keys, accepts NaN and unbounded integers, and
builds any tree that a hostile file describes (20 times the file in memory) before the caller could check
anything. Here the first departure from the one valid structure ends the parse, the grammar fixes the nesting
depth, and memory is a few times the header.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ..common.errors import WeightsError

# The limit of the safetensors library; no real header comes near it.
MAX_HEADER_BYTES = 100_000_000
# Ten times the tensors of the largest published checkpoint; bounds the memory that a header of legal size can
# take.
MAX_TENSORS = 1 << 20
MAX_DIMS = 64
MAX_NAME_BYTES = 1 << 16
# Numbers of elements and bytes must stay within the range of a signed 64-bit index.
MAX_COUNT = 1 << 62

# Bits per element of every dtype of the format (safetensors/src/tensor.rs, `Dtype::bitsize`).
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_SPACE = re.compile(rb"[ \t\r\n]*")
_INTEGER = re.compile(rb"(?:0|[1-9][0-9]{0,18})(?![0-9.eE])")

# A tensor's entry as every known writer formats it. A single regex match is used because parsing 100,000
# entries token by token takes over a second. An entry that does not match is parsed token by token, which
# also finds the message for invalid entries.
_COMPACT = re.compile(
    rb'\{"dtype": ?"([A-Z0-9_]{1,16})", ?"shape": ?\[((?:N(?:, ?N){0,63})?)\], ?"data_offsets": ?\[(N), ?(N)\]\}'.replace(
        b"N", rb"(?:0|[1-9][0-9]{0,18})"
    )
)


class RawTensor(NamedTuple):
    """A tensor's header entry as written; ``begin`` and ``end`` are bytes from the start of the data
    section.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def show(name: str, limit: int = 120) -> str:
    """Return ``name`` quoted for an error message: control characters are escaped and the length is
    bounded.
    """
    return repr(name if len(name) <= limit else name[:limit] + "...")


def dtype_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor of ``dtype`` code and ``shape``; None if that is not a whole number or is
    too large.
    """
    count = 1
    for dim in shape:
        count *= dim or 1  # a dimension of zero must not hide that the others overflow
        if count > MAX_COUNT:
            return None
    if 0 in shape:
        return 0
    bits = count * DTYPE_BITS[dtype]
    return bits // 8 if bits % 8 == 0 and bits // 8 <= MAX_COUNT else None


class _Scanner:
    """A cursor over JSON bytes; each method parses the token that it is named after, or raises
    WeightsError.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def fail(self, problem: str) -> WeightsError:
        """Return the WeightsError for the current position in the header."""
        return WeightsError(
            f"{self.where}: bad safetensors header: {problem} (header byte {self.at}). "
            "The file is damaged or was not written by a safetensors writer; download or convert it again."
        )

    def peek(self) -> int:
        """Return the next byte that is not white space, without consuming it; -1 at the end."""
        data, at = self.data, self.at
        if at < len(data) and data[at] > 32:
            return data[at]
        match = _SPACE.match(data, at)
        assert match  # always matches: the pattern matches the empty string
        self.at = match.end()
        return data[self.at] if self.at < len(data) else -1

    def take(self, char: bytes) -> None:
        """Consume the character ``char`` after any white space."""
        if self.peek() != char[0]:
            raise self.fail(f"expected {char.decode()!r}")
        self.at += 1

    def more(self, close: bytes) -> bool:
        """Consume the separator after a member: return True for a comma, False for ``close``."""
        char = self.peek()
        if char not in (ord(","), close[0]):
            raise self.fail(f"expected ',' or {close.decode()!r}")
        self.at += 1
        return char == ord(",")

    def string(self, limit: int | None = None) -> str:
        """Consume a JSON string of at most ``limit`` bytes (None: any length) and return its text."""
        self.take(b'"')
        start = part = self.at
        while True:
            end = self.data.find(b'"', part)
            if end < 0:
                raise self.fail("a string never ends")
            run = self.data[part:end]
            if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
                break
            part = end + 1  # that quote was escaped, so the string goes on
        if limit is not None and end - start > limit:
            raise self.fail(f"a name of {end - start} bytes; at most {limit} are taken")
        try:
            text = self.data[start:end].decode("utf-8")
            if "\\" in text or not text.isprintable():
                # The text has escapes, control characters (which json refuses) or lone surrogates (which
                # encode() refuses).
                text = json.loads(f'"{text}"')
                text.encode("utf-8")
        except (UnicodeError, ValueError) as error:
            raise self.fail(f"a string is not valid UTF-8 JSON ({type(error).__name__})") from None
        self.at = end + 1
        return text

    def integer(self) -> int:
        """Consume a non-negative integer of at most 19 digits."""
        self.peek()
        match = _INTEGER.match(self.data, self.at)
        if not match:
            raise self.fail("expected a non-negative integer of at most 19 digits")
        self.at = match.end()
        return int(match[0])

    def integers(self, limit: int) -> tuple[int, ...]:
        """Consume a list of at most ``limit`` non-negative integers."""
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
    """Parse the value of `__metadata__`: an object of strings, or null."""
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
    """Parse the entry of the tensor ``name``."""
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
    """Parse a header's JSON bytes; return the tensors in header order and `__metadata__`.

    ``where`` names the file in errors. Raises WeightsError for all that the format does not allow: invalid
    JSON, repeated keys, numbers that are not non-negative integers, unknown dtypes, sizes that are not dtype
    x shape. `check_ranges` compares the offsets with each other and with the file's size.
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
    """Raise WeightsError unless ``tensors`` cover ``data_bytes`` bytes of data exactly: without overlap, hole
    or excess.

    The order of the header's keys is free; the format requires only that the ranges, sorted, follow one
    another.
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
