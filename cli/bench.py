"""`carom bench`: compares Carom with no offloading, with the roofline, and with other installed offloaders,
in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..benchmarks.engines.case import CODECS, ENGINES, MODES, Case
from ..core.common.sizes import parse_size

# Default sizes. A GPU runs the diffusion transformer (DiT) of the published figures; the CPU runs a model of
# the same structure that takes seconds.
_GPU: dict[str, Any] = {"d": 3072, "depth": 20, "tokens": "4096", "steps": 8}
_CPU: dict[str, Any] = {"d": 512, "depth": 8, "tokens": "64", "steps": 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `carom bench` to ``parser``."""
    add = parser.add_argument
    add(
        "--engines",
        default="all",
        metavar="LIST",
        help=f"comma-separated, of {', '.join(ENGINES)} (default: all that can run)",
    )
    add("--mode", default="both", metavar="LIST", help="infer, train or both (default: both)")
    add(
        "--d",
        type=int,
        help="features (default: 3072 on a GPU, 512 on a CPU); a block has 18 d^2 bf16 weights",
    )
    add("--depth", type=int, help="blocks (default: 20 on a GPU, 8 on a CPU)")
    add("--tokens", metavar="LIST", help="tokens a sample, one or more (default: 4096 on a GPU, 64 on a CPU)")
    add("--batch", type=int, default=1, help="samples a step (default: 1)")
    add("--rank", type=int, default=16, help="LoRA rank when training (default: 16)")
    add("--heads", type=int, default=0, help="attention heads (default: 128 features each)")
    add(
        "--resident",
        default="0",
        metavar="LIST",
        help="share of the blocks kept on the device, 0 to 1, one or more (default: 0)",
    )
    add("--vram", help="Carom's budget, e.g. 2GiB, instead of what --resident and --slots imply")
    add("--slots", type=int, default=3, help="blocks in flight beside the resident ones (default: 3)")
    add("--codec", default="raw", metavar="LIST", help="Carom's codecs: raw, lossless, auto (default: raw)")
    add("--steps", type=int, help="timed steps (default: 8 on a GPU, 5 on a CPU)")
    add("--warmup", type=int, default=3, help="steps before the timed ones (default: 3)")
    add(
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="processes for each case, one of all cases before the next of any (default: 2)",
    )
    add("--device", help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)")
    add("--seed", type=int, default=0, help="of weights and inputs (default: 0)")
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="limit for each case's process (default: 300)",
    )
    add(
        "--show",
        type=Path,
        metavar="RECORD",
        help="run nothing: print (and --chart) a kept record of any kind",
    )
    add(
        "--write-docs",
        action="store_true",
        help="run nothing: write the records' index, docs/performance.md, README's table and docs/bench.png",
    )
    add("--out", type=Path, metavar="DIR", help="write the whole record to DIR/bench.json")
    add("--chart", type=Path, metavar="PNG", help="draw the comparison")
    add("--markdown", action="store_true", help="print the table as Markdown")


def make_cases(args: argparse.Namespace, device: str) -> dict[str, Case]:
    """Return the requested cases by key.

    The link comes first, and resident runs before the runs compared with them.

    Raises ValueError for bad options.
    """
    defaults = _CPU if device == "cpu" else _GPU
    engines = _names(args.engines, ENGINES, "--engines") if args.engines != "all" else list(ENGINES)
    modes = MODES if args.mode == "both" else _names(args.mode, MODES, "--mode")
    codecs = _names(args.codec, CODECS, "--codec")
    depth = defaults["depth"] if args.depth is None else args.depth
    base = Case(
        d=defaults["d"] if args.d is None else args.d,
        depth=depth,
        batch=args.batch,
        rank=args.rank,
        heads=args.heads,
        slots=args.slots,
        vram=None if args.vram is None else parse_size(args.vram, setting="--vram"),
        steps=defaults["steps"] if args.steps is None else args.steps,
        warmup=args.warmup,
        device=device,
        seed=args.seed,
        limit_s=args.timeout,
    )
    cases = {"link": base.but(kind="link")}
    for mode in modes:
        for tokens in _numbers(args.tokens or defaults["tokens"], int, "--tokens"):
            if "none" in engines:
                cases[f"none-{mode}-{tokens}"] = base.but(mode=mode, tokens=tokens, resident=depth)
            for share in _numbers(args.resident, float, "--resident"):
                if not 0 <= share <= 1:
                    raise ValueError(
                        f"--resident {share} is not a share; write 0 (stream all) to 1 (stream none)"
                    )
                for engine in engines:
                    for codec in codecs if engine == "carom" else ("raw",) * (engine != "none"):
                        key = f"{engine}-{mode}-{tokens}-{share:g}" + ("" if codec == "raw" else f"-{codec}")
                        resident = round(share * depth)
                        cases[key] = base.but(
                            engine=engine, mode=mode, tokens=tokens, resident=resident, codec=codec
                        )
    return cases


def run(args: argparse.Namespace) -> int:
    """Run the cases and print the table; return the exit code.

    The exit code is 1 where no case ran, Carom was requested and failed or differed, or the run was
    interrupted; else 0.
    """
    import torch

    from ..benchmarks.engines.case_rows import rows
    from ..benchmarks.engines.record import add_result, new_record, write_record
    from ..benchmarks.engines.runner import run_cases, unavailable
    from ..benchmarks.results.render import rendered
    from ..benchmarks.results.table import chart, table

    if args.show:
        return _show(args)
    if args.write_docs:
        return _write_docs(args)
    if not 1 <= args.processes <= 100:
        raise ValueError(f"--processes {args.processes}: write a number from 1 to 100")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device {device!r} is no device; write cpu, cuda or cuda:1") from None
    cases = make_cases(args, device)
    # Only a record that is kept needs the commit, so that a package installed from a wheel can print its results.
    record: dict[str, Any] = (
        new_record("carom bench", sys.argv[1:], kept=args.out is not None)
        if args.out or args.json
        else {"cases": [], "interrupted": False}
    )
    path = args.out / "bench.json" if args.out else None

    if not args.json:
        able = sum(unavailable(case) is None for case in cases.values())
        print(
            f"carom bench: {_count(len(cases), 'case')} on {device}, {'all' if able == len(cases) else able} of which can "
            f"run here, one after the other, each in {_count(args.processes, 'process')} of its own for {args.timeout:.0f} s at most",
            file=sys.stderr,
            flush=True,
        )
    steps = sum(case.kind == "step" for case in cases.values())
    total = len(cases) + (args.processes - 1) * steps
    with _progress(total, quiet=args.json or not sys.stderr.isatty()) as bar:

        def keep(key: str, process: int, result: dict[str, Any]) -> None:
            """Add a case's result to the record, and write the record, so that an interrupted run keeps it."""
            add_result(record, key, cases[key], result, process)
            if path:
                write_record(record, path)
            bar.done()

        record["interrupted"] = run_cases(
            cases, keep, processes=args.processes, progress=bar, on_start=bar.begins
        )
    found = rows(record["cases"])
    record["rooflines"] = {row.key: row.roofline.to_dict() for row in found if row.roofline}
    record["bit_exact"] = {row.key: row.bit_exact for row in found if row.bit_exact is not None}
    if path:
        write_record(record, path)
    shown = rendered({"tool": "carom bench", **record}).rows
    if args.chart and found:
        chart(shown, args.chart)
    if args.json:
        print(json.dumps(record))
    else:
        print(table(shown, markdown=args.markdown))
        if path:
            print(f"record: {path}")
    ours = [e["result"]["status"] for e in record["cases"] if e["case"]["engine"] in ("none", "carom")]
    bad = "failed" in ours or "timeout" in ours
    wrong = any(row.bit_exact is False for row in found if row.case.engine == "carom")
    nothing = not any(e["result"]["status"] == "ok" for e in record["cases"] if e["key"] != "link")
    if nothing:
        print("carom bench: no case could run; the reasons are printed above", file=sys.stderr)
    return 1 if bad or wrong or nothing or record["interrupted"] else 0


class _ProgressBar:
    """A progress bar on stderr that names the running case, below the printed lines of finished cases."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def begins(self, case: Case) -> None:
        """Show that ``case`` is running."""
        self._bar.set_description_str(case.label())

    def done(self) -> None:
        """Advance the bar by one case."""
        self._bar.update()

    def write(self, line: str) -> None:
        """Print ``line`` above the bar."""
        with self._bar.external_write_mode(file=sys.stderr):
            sys.stderr.write(line)

    def flush(self) -> None:
        """Flush stderr."""
        sys.stderr.flush()


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[_ProgressBar]:
    """Provide a tqdm bar over ``total`` cases; where ``quiet``, only lines are printed."""
    from tqdm import tqdm

    # The bar shows no elapsed time, because that would not advance while a case runs.
    layout, columns = "{desc} |{bar}| {n_fmt}/{total_fmt}", min(shutil.get_terminal_size().columns, 100)
    with tqdm(
        total=total, disable=quiet, file=sys.stderr, bar_format=layout, leave=False, ncols=columns
    ) as bar:
        yield _ProgressBar(bar)


def _count(number: int, noun: str) -> str:
    """Return the number with the noun in singular or plural."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _show(args: argparse.Namespace) -> int:
    """Print (and draw) the record of any kind that `--show` names, without running anything."""
    from ..benchmarks.results.render import read
    from ..benchmarks.results.table import chart, table

    shown = read(args.show)
    if args.chart:
        chart(shown.rows, args.chart)
    print(json.dumps(shown.record) if args.json else table(shown.rows, markdown=args.markdown))
    return 0


def _write_docs(args: argparse.Namespace) -> int:
    """Write what is generated from the records of this checkout, and print the files."""
    from ..benchmarks.results.docs import write_docs

    told = write_docs()
    print(json.dumps({"written": told}) if args.json else "\n".join(told))
    return 0


def _names(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    """Parse comma-separated names. Raises ValueError for a name that is not in ``allowed``."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        raise ValueError(f"{option} {text!r}: choose from {', '.join(allowed)}")
    return names


def _numbers(text: object, kind: type, option: str) -> list[Any]:
    """Parse comma-separated numbers of type ``kind``. Raises ValueError for anything else."""
    try:
        return list(dict.fromkeys(kind(part) for part in str(text).split(",")))
    except ValueError:
        raise ValueError(f"{option} {text!r}: write one number, or several with commas between") from None
