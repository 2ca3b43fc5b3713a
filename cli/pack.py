"""`carom pack`: rewrites a checkpoint for streaming (in order of use, page-aligned), or verifies a rewritten
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import psutil

from ..core.common.sizes import format_size, parse_size
from ..tools.pack.quant_scheme import parse_scheme
from ..tools.pack.report import PackReport
from ..tools.pack.transform import CODECS
from ..tools.pack.verify import verify_packed
from ..tools.pack.writer import pack

ROWS = 100  # most rows in the table of errors, because a model with experts has tens of thousands of tensors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carom pack` to ``parser``."""
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
        help="where tensors are encoded: auto (a GPU where there is one) or cpu",
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
    """Pack or verify, print the report, and return exit code 0. Raises ValueError for bad options."""
    scheme = None if args.quant is None else parse_scheme(args.quant)
    if args.codec not in CODECS:
        raise ValueError(
            f"--codec {args.codec!r}: this version of carom packs {', '.join(CODECS)}; --quant has the lossy ones"
        )
    if args.dst is None and not args.verify:
        raise ValueError("name a destination: carom pack SRC DST (or: carom pack SRC --verify)")
    shard_bytes = None if args.shard_size is None else parse_size(args.shard_size, setting="--shard-size")
    try:
        return _pack_or_verify(args, scheme, shard_bytes)
    except KeyboardInterrupt:
        if args.dst is None:
            raise
        # A later run continues from the journal. The destination gets its name only once it is complete.
        raise KeyboardInterrupt(
            f"{args.dst} was not made; the same command goes on from what is safely written in .carom-pack-* beside it"
        ) from None


def _pack_or_verify(args: argparse.Namespace, scheme: Any, shard_bytes: int | None) -> int:
    """Verify the source where no destination is given, else pack; print the result and return exit code 0."""
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
            result, text = report.to_dict(), _text(report)
    peak = peak_rss_bytes()
    print(
        json.dumps({**result, "peak_rss_bytes": peak})
        if args.json
        else f"{text}; peak memory {format_size(peak)}"
    )
    return 0


def _text(report: PackReport) -> str:
    """Return the printed text of a run; the text begins with a table of errors where tensors were quantised."""
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
    """Return the table of quantised tensors and their errors; the worst ROWS tensors where there are more."""
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
    """Return the peak resident memory of this process in bytes, as the operating system counts it."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "linux":
        # getrusage is not used here: its maximum includes pages of the parent process that a forked child
        # shared at first.
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _Progress:
    """A progress bar on standard error if that is a terminal; silent otherwise."""

    def __init__(self, quiet: bool) -> None:
        self._on, self._done = not quiet and sys.stderr.isatty(), 0
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are finished."""
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
