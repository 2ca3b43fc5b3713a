"""Carom's disk reader against plain O_DIRECT loops over the same file, in one run: `python benchmarks/tiers/disk_read.py`.

The plain loop is `os.preadv` of 4 MiB into aligned memory on huge pages, on 1, 2, 4 and 8 threads; the best of them is the
machine's raw rate; once more on ordinary pages, for comparison. The reader gets the same bytes as requests of one block
(64 MiB) into page-aligned slots, straight and through its workers' own buffers, and into slots that agree with no page,
where every byte takes that way. In two more cases the CRC-32 of the bytes is known, as of spill files: they are compared,
or were compared before. Beside them stands CRC-32 alone, of bytes in memory. Rounds alternate, medians are shown.

Without --file a scratch file of random bytes is written (and removed) in --folder.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path


def load_checkout():
    """Return the checkpoint modules of this script's checkout, imported as the package carom for any folder name."""
    if "carom" not in sys.modules:
        root = Path(__file__).resolve().parents[2]
        spec = importlib.util.spec_from_file_location(
            "carom", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec and spec.loader
        sys.modules["carom"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["carom"])
    return tuple(
        importlib.import_module(f"carom.core.checkpoint.{n}")
        for n in ("index", "direct_io", "disk_reader", "read_path", "range_checks")
    )


CHUNK = 4 << 20
BLOCK = 64 << 20


def plain_loop(path: str, size: int, threads: int, buffers: list[memoryview]) -> float:
    """Return the seconds to read ``size`` bytes by preadv on an O_DIRECT descriptor."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    turn = iter(range(0, size, CHUNK))
    lock = threading.Lock()

    if not hasattr(os, "preadv"):
        raise SystemExit("this comparison needs os.preadv (Linux)")

    def work(buffer: memoryview) -> None:
        while True:
            with lock:
                offset = next(turn, None)
            if offset is None:
                return
            os.preadv(fd, [buffer[: min(CHUNK, size - offset)]], offset)

    workers = [threading.Thread(target=work, args=(buffers[i],)) for i in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


def carom_reader(
    reader_module, file, size: int, workers: int, slots: list[memoryview], shift: int, tuner=None, checks=None
) -> float:
    """Return the seconds in which the reader reads the same bytes, block by block, into rotating slots."""
    policy = reader_module.ReaderPolicy(workers=workers, chunk=CHUNK)
    with reader_module.DiskReader(policy, path_tuner=tuner, checks=checks) as reader:
        reader.submit_range(file, 0, 4096, slots[0]).result()  # create threads and descriptors before timing
        began = time.perf_counter()
        waiting = []
        for number, offset in enumerate(range(0, size, BLOCK)):
            if len(waiting) == len(slots):
                waiting.pop(0).result()
            slot = slots[number % len(slots)][shift:]
            waiting.append(
                reader.submit_range(file, offset, min(BLOCK, size - offset), slot, priority=number)
            )
        for handle in waiting:
            handle.result()
        return time.perf_counter() - began


def checksums(path: str, size: int) -> list[tuple[int, int, int]]:
    """Return (offset, bytes, CRC-32) of each block of the file."""
    with open(path, "rb") as file:
        return [
            (at, min(BLOCK, size - at), zlib.crc32(file.read(min(BLOCK, size - at))))
            for at in range(0, size, BLOCK)
        ]


def crc_alone(memory: memoryview, size: int) -> float:
    """Return the seconds in which one thread computes the CRC-32 of ``size`` bytes in memory."""
    began = time.perf_counter()
    for at in range(0, size, CHUNK):
        zlib.crc32(memory[at % BLOCK :][: min(CHUNK, size - at)])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", help="read this file instead of a scratch file")
    parser.add_argument("--folder", default=".", help="where the scratch file goes: on the drive to measure")
    parser.add_argument(
        "--mib", type=int, default=1024, help="size of the scratch file, or how much of --file is read"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=Path, help="the result, with commit, date and machine")
    args = parser.parse_args()
    if not Path(args.folder).is_dir():
        parser.error(f"--folder {args.folder}: there is no such folder; make it, or name another")
    if args.record is not None and not args.record.absolute().parent.is_dir():
        parser.error(f"--record {args.record}: there is no folder for it; make it, or name another")
    index, rawio, reader, tuners, range_checks = load_checkout()
    record = importlib.import_module("carom.benchmarks.engines.record")
    fresh = record.new_record("disk_read", sys.argv[1:]) if args.record is not None else {}
    scratch = None
    try:
        if args.file is None:
            handle, scratch = tempfile.mkstemp(dir=args.folder, prefix="carom-disk-read-")
            with os.fdopen(handle, "wb") as out:
                for _ in range(args.mib):
                    out.write(os.urandom(1 << 20))  # random, because a drive may compress repeated data
                out.flush()
                os.fsync(out.fileno())
        path = os.path.abspath(args.file or scratch)
        found = os.stat(path)
        size = min(found.st_size, args.mib << 20) // 4096 * 4096
        file = index.SourceFile(path, found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)
        slots = [rawio.aligned_buffer(BLOCK + 4096) for _ in range(3)]
        # Both use the same kind of memory, because the kind of pages changes the rates by tens of percent.
        buffers = [slots[i % 3][i // 3 * CHUNK :][:CHUNK] for i in range(8)]
        cases = {
            f"plain loop, {n} threads": (lambda n=n: plain_loop(path, size, n, buffers)) for n in (1, 2, 4, 8)
        }
        for workers in (2, 4, 8):
            cases[f"reader, {workers} workers"] = lambda w=workers: carom_reader(
                reader, file, size, w, slots, 0
            )
        small = []
        for _ in range(4):  # shared mappings get no huge pages
            small.append(memoryview(mmap.mmap(-1, CHUNK)))
            small[-1][:] = bytes(CHUNK)
        cases["plain loop, 4 threads, ordinary pages"] = lambda: plain_loop(path, size, 4, small)
        bounced = tuners.ReadPathTuner(tuners.ReadPathPolicy(paths=(CHUNK,)), CHUNK)
        cases["reader, 4 workers, through their buffers"] = lambda: carom_reader(
            reader, file, size, 4, slots, 0, bounced
        )
        cases["reader, 4 workers, unaligned slots"] = lambda: carom_reader(reader, file, size, 4, slots, 1)
        known = checksums(path, size)

        def checks():
            found = range_checks.RangeChecks()
            for number, (offset, nbytes, crc) in enumerate(known):
                found.add(file, offset, nbytes, crc, f"block {number}")
            return found

        done = checks()
        cases["reader, 4 workers, compared with CRC-32"] = lambda: carom_reader(
            reader, file, size, 4, slots, 0, None, checks()
        )
        carom_reader(reader, file, size, 4, slots, 0, None, done)
        cases["reader, 4 workers, compared before"] = lambda: carom_reader(
            reader, file, size, 4, slots, 0, None, done
        )
        cases["CRC-32 in memory, 1 thread"] = lambda: crc_alone(slots[0], size)
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for round_number in range(args.rounds):
            names = list(cases) if round_number % 2 == 0 else list(reversed(cases))
            for name in names:
                seconds[name].append(cases[name]())
    finally:
        if scratch:
            os.unlink(scratch)
    rates = {name: size / statistics.median(values) for name, values in seconds.items()}
    raw = max(rate for name, rate in rates.items() if name.startswith("plain"))
    found = {"bytes": size, "rounds": args.rounds, "bytes_per_second": rates, "raw": raw}
    if args.record is not None:
        del fresh["cases"]
        record.write_record({**fresh, "interrupted": False, "result": found}, args.record)
    if args.json:
        print(json.dumps(found))
        return
    for name, rate in rates.items():
        spread = [size / value / 2**30 for value in seconds[name]]
        print(
            f"{name:41s} {rate / 2**30:6.2f} GiB/s  {rate / raw:5.1%} of raw  ({min(spread):.2f} to {max(spread):.2f})"
        )


if __name__ == "__main__":
    main()
