"""`carom pack`: rewrite a checkpoint in streaming order, or check one that was rewritten."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import psutil

from ..core.sizes import format_size, parse_size
from ..core.store.pack_report import PackReport
from ..core.store.quant import parse_scheme
from ..core.store.transform import CODECS
from ..core.store.verify import verify_packed
from ..core.store.writer import pack

ROWS = 100  # of the table of errors; a model with experts has tens of thousands of tensors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "src", metavar="SRC", help="a .safetensors file, a folder of shards, or its index.json"
    )
    parser.add_argument(
        "dst", metavar="DST", nargs="?",
        help="a new .safetensors file or a new folder; without it, --verify checks SRC itself",
    )  # fmt: skip
    parser.add_argument(
        "--codec", default="raw", metavar="raw|lossless",
        help="raw (default): bytes as they are; unpacks a packed SRC. lossless: bf16 in 0.70 of the bytes, every bit kept",
    )  # fmt: skip
    parser.add_argument(
        "--quant", metavar="SCHEME",
        help="LOSSY: nf4, nf3 or nf2 for the matrices of linear layers, or by kind: dense=nf4,experts=nf2",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu"),
        help="what packs: a GPU where there is one, or the cores",
    )
    parser.add_argument(
        "--order", default="auto", metavar="FILE",
        help="auto (default: by the tensors' names) or a file with one name or glob a line",
    )  # fmt: skip
    parser.add_argument(
        "--verify", action="store_true", help="read the result back from the drive and compare"
    )
    parser.add_argument(
        "--shard-size", metavar="SIZE", help="split into files of at most SIZE (8GiB); DST is a folder"
    )
    parser.add_argument(
        "--no-pad", action="store_true",
        help="add no __pad__ tensors, for readers that refuse unknown names; small tensors are then not page-aligned",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    scheme = None if args.quant is None else parse_scheme(args.quant)
    if args.codec not in CODECS:
        raise ValueError(
            f"--codec {args.codec!r}: this version of carom packs {', '.join(CODECS)}; --quant has the lossy ones"
        )
    if args.dst is None and not args.verify:
        raise ValueError("name a destination: carom pack SRC DST (or: carom pack SRC --verify)")
    shard_bytes = None if args.shard_size is None else parse_size(args.shard_size, setting="--shard-size")
    try:
        return _packed_or_verified(args, scheme, shard_bytes)
    except KeyboardInterrupt:
        if args.dst is None:
            raise
        # The journal is what a rerun goes on from; the destination has its name only when it is whole.
        raise KeyboardInterrupt(
            f"{args.dst} was not made; the same command goes on from what is safely written in .carom-pack-* beside it"
        ) from None


def _packed_or_verified(args: argparse.Namespace, scheme: Any, shard_bytes: int | None) -> int:
    with _Progress(quiet=args.json) as progress:
        if args.dst is None:
            tensors, nbytes = verify_packed(args.src, progress)
            result = {"source": args.src, "tensors": tensors, "tensor_bytes": nbytes, "verified": True}
            text = f"{args.src}: {tensors} tensors ({format_size(nbytes)}) match their checksums"
        else:
            report = pack(
                args.src, args.dst, codec=args.codec, quant=scheme, device=args.device, order=args.order, shard_bytes=shard_bytes,
                pad=not args.no_pad, verify=args.verify, progress=progress,
            )  # fmt: skip
            result, text = report.to_dict(), _told(report)
    peak = peak_rss_bytes()
    print(
        json.dumps({**result, "peak_rss_bytes": peak})
        if args.json
        else f"{text}; peak memory {format_size(peak)}"
    )
    return 0


def _told(report: PackReport) -> str:
    """The run in words; a table of errors first where something was quantised."""
    rate = report.raw_bytes / max(report.seconds, 1e-9)
    resumed = f", {report.resumed_tensors} of them by an earlier run" if report.resumed_tensors else ""
    lines = [*_errors(report), *(f"note: {note}" for note in report.notes)]
    share = ""
    if report.tensor_bytes != report.raw_bytes:
        packed = ", ".join(f"{count} {codec}" for codec, count in sorted(report.codecs.items()))
        share = f" ({packed}; {report.tensor_bytes / max(1, report.raw_bytes):.3f} of {format_size(report.raw_bytes)})"
    lossy = ", LOSSY" if report.lossy else ""
    lines.append(
        f"{report.destination}: {report.tensors} tensors{resumed}{lossy}, {format_size(report.tensor_bytes)}{share} "
        f"+ {format_size(report.padding_bytes)} of padding in {len(report.files)} file(s), "
        f"{report.seconds:.1f} s ({format_size(rate)}/s){', verified' if report.verified else ''}"
    )
    return "\n".join(lines)


def _errors(report: PackReport) -> list[str]:
    """Each quantised tensor's error, the worst first where there are many."""
    found = report.lossy_tensors
    if not found:
        return []
    shown = found if len(found) <= ROWS else sorted(found, key=lambda t: -t.error)[:ROWS]
    wide = max(len(t.name) for t in shown)
    rows = [f"{'LOSSY tensor':<{wide}}  codec  relative error  bytes"]
    rows += [
        f"{t.name:<{wide}}  {t.codec:<5}  {t.error:<14.4f}  {t.bytes / max(1, t.raw_bytes):.3f}"
        for t in shown
    ]
    if len(shown) < len(found):
        rows.append(f"... and {len(found) - len(shown)} with smaller errors; --json lists all")
    mean = sum(t.error * t.raw_bytes for t in found) / max(1, sum(t.raw_bytes for t in found))
    rows.append(f"{len(found)} tensors are quantised (lossy): relative error {mean:.4f} on average by bytes")
    return rows


def peak_rss_bytes() -> int:
    """The most memory this process has held, in bytes, as the operating system counts it."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux":
        # Not getrusage: its maximum includes the parent's pages that a forked child shared before it ran this.
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _Progress:
    """A bar on standard error where that is a terminal; silent elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._on, self._done = not quiet and sys.stderr.isatty(), 0
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if not self._on:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, initial=done)
            self._done = done
        self._bar.update(done - self._done)
        self._done = done

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
