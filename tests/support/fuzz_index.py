"""Fuzz of the index: `python tests/support/fuzz_index.py --seconds 60 [--seed N] [--corpus DIR]`.

Any bytes must give an `Index` or a CaromError, quickly and without allocating beyond a bound; and what Carom takes,
the safetensors library must take too, with the same names, shapes, dtypes and bytes. With atheris installed it drives
the inputs; without it, a mutation loop keeps every input that reaches a new pair of lines in the parser (traced with
`sys.settrace`), which is the same idea at a lower rate.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import struct
import sys
import tempfile
import time
import types
from pathlib import Path

if "carom" not in sys.modules:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("conftest")
header = importlib.import_module("carom.core.checkpoint.header")
index = importlib.import_module("carom.core.checkpoint.index")
format_errors = importlib.import_module("carom.core.checkpoint.format_errors")
errors = importlib.import_module("carom.core.common.errors")


def wrap(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file with header ``text`` and ``data``; ``length`` overrides the true header length."""
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def seeds() -> list[bytes]:
    def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    two = {"a.weight": entry("F32", [2, 3], 0, 24), "b": entry("U8", [8], 24, 32)}
    packed = {
        "__metadata__": {"carom.pack": '{"codec":"raw","version":1}', "carom.sha256": "{}", "format": "pt"},
        "é.1": entry("BF16", [4], 0, 8),
        "__pad__.000000": entry("U8", [8], 8, 16),
    }
    return [
        wrap(b"{}"),
        wrap(json.dumps(two).encode(), bytes(32)),
        wrap(json.dumps(packed, separators=(",", ":")).encode() + b"   ", bytes(16)),
        wrap(
            json.dumps({"s": entry("I64", [], 0, 8), "z": entry("F4", [0, 3], 8, 8)}, indent=1).encode(),
            bytes(8),
        ),
        wrap(b'{"\\u0061\\n":{"shape":[1],"dtype":"F8_E4M3","data_offsets":[0,1]}}', b"x"),
    ]


TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud800", b"null", b"NaN", b"-1", b"0", b"00", b"1e9",
    b"18446744073709551615", b"9223372036854775807", b"4611686018427387904", b'"dtype"', b'"shape"',
    b'"data_offsets"', b'"__metadata__"', b'"F32"', b'"BF16"', b'"F4"', b'"F6_E2M3"', b"\xff", b"\x00", b" " * 7,
    b"[" * 300, b'{"a":' * 300, b'"carom.pack"', b'"{}"', b"1" * 5000,
]  # fmt: skip


def mutate(rng: random.Random, pool: list[bytes]) -> bytes:
    data = bytearray(rng.choice(pool))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            del data[at : at + rng.choice((1, 1, 2, 5, 20))]
        elif kind == 3:
            other = rng.choice(pool)
            cut = rng.randrange(len(other) + 1)
            data[at:] = other[cut:]
        elif kind == 4:
            piece = data[at : at + rng.randrange(1, 40)]
            data[at:at] = piece
        else:
            data[at : at + 1] = str(rng.choice((0, 1, 8, 24, 32, 2**31, 2**62, 2**64))).encode()
    if rng.random() < 0.7 and len(data) > 8:  # most mutants should get past the length
        end = bytes(data).rfind(b"}") + 1
        if end > 8:
            data[:8] = struct.pack("<Q", end - 8)
    return bytes(data[: 1 << 16])


def check(data: bytes, path: str) -> bool:
    """Return whether Carom accepts one input. Raises AssertionError if a guarantee is violated."""
    with open(path, "wb") as file:
        file.write(data)
    began = time.perf_counter()
    try:
        found = index.open_index(path)
        found.codec  # noqa: B018 - reads metadata, which must fail as cleanly
        found.checksums()
    except errors.CaromError:
        found = None
    assert time.perf_counter() - began < 5, "took seconds"
    if found is None:
        return False
    import safetensors

    pieces = dict(safetensors.deserialize(data))
    ours = {e.name: e for e in found.entries.values()}
    pads = {n for n in pieces if n.startswith(index.PAD_PREFIX)} if ours.keys() != pieces.keys() else set()
    assert ours.keys() == pieces.keys() - pads
    for name, entry in ours.items():
        theirs = pieces[name]
        assert (entry.dtype, list(entry.shape)) == (theirs["dtype"], list(theirs["shape"])), name
        assert data[entry.offset : entry.offset + entry.nbytes] == bytes(theirs["data"]), name
    return True


class Coverage:
    """The pairs of consecutive lines reached in the parser's files."""

    def __init__(self) -> None:
        self.files = {header.__file__, index.__file__, format_errors.__file__}
        self.seen: set[tuple] = set()
        self.new = False

    def _call(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        last = frame.f_lineno

        def line(frame, event, arg):
            nonlocal last
            arc = (frame.f_code.co_name, last, frame.f_lineno, event == "exception")
            last = frame.f_lineno
            if arc not in self.seen:
                self.seen.add(arc)
                self.new = True
            return line

        return line

    def run(self, data: bytes, path: str) -> bool:
        """Check one input and return whether it reached a new pair of lines."""
        self.new = False
        old = sys.gettrace()
        sys.settrace(self._call)
        try:
            check(data, path)
        finally:
            sys.settrace(old)
        return self.new


def fuzz(seconds: float, seed: int, corpus: str | None = None, most: float = float("inf")) -> dict:
    """Mutate inputs for ``seconds`` or ``most`` times; return the figures of the run.

    A failing input is written to the corpus folder, or to the current folder.
    """
    rng, coverage, pool, runs = random.Random(seed), Coverage(), [], 0
    stored = (
        [p.read_bytes() for p in sorted(Path(corpus).iterdir())] if corpus and Path(corpus).is_dir() else []
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "input.safetensors")
        waiting = seeds() + stored
        end = time.monotonic() + seconds
        while waiting or (time.monotonic() < end and runs < most):
            data = waiting.pop(0) if waiting else mutate(rng, pool)
            runs += 1
            try:
                new = coverage.run(data, path)
            except BaseException:
                failed = Path(corpus or ".") / f"crash-{seed}-{runs}.bin"
                failed.parent.mkdir(parents=True, exist_ok=True)
                failed.write_bytes(data)
                print(f"failing input kept in {failed}", file=sys.stderr)
                raise
            if new or runs <= len(seeds()):
                pool.append(data)
    return {"runs": runs, "arcs": len(coverage.seen), "kept": len(pool), "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", help="folder of further inputs; failing inputs are written there")
    args = parser.parse_args()
    try:
        import atheris
    except ImportError:
        print(json.dumps(fuzz(args.seconds, args.seed, args.corpus)))
        return
    for owner in (header, index, format_errors, header._Scanner):
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.FunctionType) and value.__module__ in (
                header.__name__,
                index.__name__,
                format_errors.__name__,
            ):
                setattr(owner, name, atheris.instrument_func(value))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "input.safetensors")
        started = Path(folder, "seeds")
        started.mkdir()
        for number, seed in enumerate(seeds()):
            (started / str(number)).write_bytes(seed)
        folders = [args.corpus] if args.corpus else []
        options = [f"-max_total_time={int(args.seconds)}", f"-seed={args.seed + 1}", "-max_len=65536"]
        atheris.Setup(
            [sys.argv[0], *options, *folders, str(started)], lambda data: check(data, path) and None
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
