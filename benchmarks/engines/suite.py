"""Every figure to reach, in one run under a time limit: target against measured, and the record behind it.

    python -m carom.benchmarks.engines.suite --out DIR --limit-s 570
    python3 benchmarks/engines/launch.py suite --out DIR        # the same where carom is not installed

Cases run in the order of their importance. A case that does not fit in the limit is skipped, and its result says so.
`--tiny` runs the whole list in miniature on any machine, to check the harness; the figures of such a run mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ..results.render import rendered
from ..results.table import chart, table
from . import figures as f
from .case import Case
from .figures import Figure, Results, render
from .processes import pooled
from .record import add_result, new_record, write_record
from .runner import run_cases

INSTEAD = " (in its place where musubi cannot run)"
BUDGETS = {"quarter": 0.25, "half": 0.5, "most": 0.75}  # shares of the weights' bytes
RELAID = 160  # steps within which a session changes its layout by measured times, if that is worthwhile
MUSUBI_HALF = 5.3e9  # bytes that musubi's ring reserves with half of the blocks resident, from the issue


def suite_cases(device: str, tiny: bool = False) -> dict[str, Case]:
    """Return all cases by key, the most important first.

    A key consists of engine, mode and tokens, followed by a word for the special property of the case.
    """
    big = Case(device=device, d=3072, depth=20, steps=8, warmup=3, limit_s=120.0)
    if tiny:
        big = big.but(d=256, depth=4, steps=2, warmup=1)
    half = big.depth // 2
    short, middle, long = (1024, 4096, 16384) if not tiny else (16, 32, 64)
    infer, train = big.but(mode="infer"), big.but(mode="train")
    host = Case(kind="host", device=device, d=256, depth=20, tokens=16, steps=25, warmup=12, slots=4)
    again = host.but(
        depth=4, slots=2, repeat=25, steps=6, warmup=4
    )  # 96 of 100 calls find their block on the device
    flat = Case(
        device=device, engine="carom", mode="train", d=1536, depth=12, tokens=512, steps=500, verify=False
    )
    if tiny:
        host, again = host.but(depth=4, steps=1, warmup=1), again.but(repeat=2, steps=1, warmup=1)
        flat = flat.but(d=256, depth=4, tokens=16, steps=55)

    def none(case: Case, tokens: int) -> Case:
        return case.but(engine="none", tokens=tokens, resident=case.depth)

    def carom(case: Case, tokens: int, **changes: Any) -> Case:
        return case.but(engine="carom", tokens=tokens, **changes)

    def within(share: float, codec: str) -> Case:
        """Return a case whose budget is ``share`` of the weights' bytes, with enough steps for a measured layout."""
        vram = int(share * big.weight_bytes)
        return carom(infer, middle, vram=vram, codec=codec, warmup=1 if tiny else RELAID)

    def hosts(mode: str) -> dict[str, Case]:
        return {
            "resident": host.but(mode=mode, resident=host.depth),
            "fetched": again.but(mode=mode, steps=again.steps if mode == "infer" else 1),
            "streamed": host.but(mode=mode),
        }

    return {
        "link": big.but(kind="link"),
        "none-infer-4096": none(infer, middle),
        "carom-infer-4096": carom(infer, middle, slots=2),
        "none-train-4096": none(train, middle),
        "carom-train-4096": carom(train, middle),
        "musubi-train-4096": train.but(engine="musubi", tokens=middle),
        # As many bytes as torch reserves for musubi's ring: half of the blocks, its 3 slots and its casts.
        # The warm-up contains the first steps, in which a session changes its layout.
        "carom-train-4096-half": carom(
            train, middle, resident=half, slots=2, vram=int(11.9 * big.block_bytes), warmup=1 if tiny else RELAID // 2,
        ),
        "musubi-train-4096-half": train.but(engine="musubi", tokens=middle, resident=half),
        # Peers at the memory of Carom's cases: musubi's ring swept, ai-toolkit with half of its layers.
        **{
            f"musubi-{mode}-{tokens}-ring{ring}": case.but(engine="musubi", tokens=tokens, ring=ring)
            for mode, case, tokens in (("train", train, middle), ("infer", infer, middle))
            for ring in (3, 4)
        },
        "ai-toolkit-train-4096-half": train.but(engine="ai-toolkit", tokens=middle, resident=half),
        "ai-toolkit-infer-4096-half": infer.but(engine="ai-toolkit", tokens=middle, resident=half),
        "carom-train-4096-half-low": carom(train, middle, resident=half, slots=2, vram=int(11.5 * big.block_bytes)),
        "none-train-1024": none(train, short),
        "carom-train-1024": carom(train, short),
        "musubi-train-1024": train.but(engine="musubi", tokens=short),
        "carom-infer-4096-lossless": carom(infer, middle, codec="lossless"),
        "carom-train-1024-lossless": carom(train, short, codec="lossless"),
        "carom-train-4096-lossless": carom(train, middle, codec="lossless"),
        "carom-train-4096-half-lossless": carom(
            train, middle, resident=half, slots=2, vram=int(11.3 * big.block_bytes), codec="lossless",
            warmup=1 if tiny else RELAID // 2,
        ),
        # If the budget exceeds the slots, units stay on the device packed, once the first steps have shown a gain.
        **{
            f"carom-infer-4096-vram-{words}{ending}": within(share, codec)
            for words, share in BUDGETS.items()
            for codec, ending in (("raw", ""), ("lossless", "-lossless"))
        },
        "carom-infer-4096-auto": carom(infer, middle, slots=2, codec="auto").but(warmup=1 if tiny else 40),
        "carom-train-1024-auto": carom(train, short, codec="auto").but(warmup=1 if tiny else 40),
        "carom-train-4096-auto": carom(train, middle, codec="auto").but(warmup=1 if tiny else 40),
        "none-infer-16384": none(infer, long).but(steps=big.steps // 2),
        "carom-infer-16384": carom(infer, long).but(steps=big.steps // 2),
        "carom-infer-16384-lossless": carom(infer, long, codec="lossless").but(steps=big.steps // 2),
        "carom-infer-16384-auto": carom(infer, long, codec="auto").but(steps=big.steps // 2, warmup=1 if tiny else 12),
        **{f"host-infer-{kind}": c for kind, c in hosts("infer").items()},
        **{f"host-train-{kind}": c for kind, c in hosts("train").items()},
        "carom-attach-24GB": carom(infer, middle, depth=70 if not tiny else 8, steps=0, verify=False),
        "ai-toolkit-train-4096": train.but(engine="ai-toolkit", tokens=middle, steps=big.steps // 2),
        "ai-toolkit-train-1024": train.but(engine="ai-toolkit", tokens=short, steps=big.steps // 2),
        "carom-infer-4096-half": carom(infer, middle, resident=half, slots=2),
        "carom-flat": flat,
        "musubi-infer-4096": infer.but(engine="musubi", tokens=middle),
        "musubi-infer-4096-half": infer.but(engine="musubi", tokens=middle, resident=half),
        "ramtorch-train-4096": train.but(engine="ramtorch", tokens=middle, slots=2, steps=big.steps // 2),
        "ai-toolkit-infer-4096": infer.but(engine="ai-toolkit", tokens=middle),
        "ramtorch-infer-4096": infer.but(engine="ramtorch", tokens=middle, slots=2),
        "diffusers-infer-4096": infer.but(engine="diffusers", tokens=middle),
        "accelerate-infer-4096": infer.but(engine="accelerate", tokens=middle, steps=big.steps // 2),
        "carom-infer-4096-3": carom(infer, middle, slots=3),
        "ramtorch-train-1024": train.but(engine="ramtorch", tokens=short, slots=2, steps=big.steps // 2),
    }  # fmt: skip


PAIRS = {
    "carom-infer-4096": "none-infer-4096",
    "carom-train-4096": "none-train-4096",
    "carom-train-1024": "none-train-1024",
    "carom-train-4096-half": "none-train-4096",
    "carom-train-4096-half-low": "none-train-4096",
    "carom-infer-4096-half": "none-infer-4096",
    "carom-infer-16384": "none-infer-16384",
    "carom-infer-4096-3": "none-infer-4096",
    "carom-infer-4096-lossless": "none-infer-4096",
    **{
        f"carom-infer-4096-vram-{words}{codec}": "none-infer-4096"
        for words in BUDGETS
        for codec in ("", "-lossless")
    },
    "carom-infer-4096-auto": "none-infer-4096",
    "carom-train-1024-auto": "none-train-1024",
    "carom-train-4096-auto": "none-train-4096",
    "carom-infer-16384-lossless": "none-infer-16384",
    "carom-infer-16384-auto": "none-infer-16384",
    "carom-train-1024-lossless": "none-train-1024",
    "carom-train-4096-lossless": "none-train-4096",
    "carom-train-4096-half-lossless": "none-train-4096",
}
PEERS = ("musubi", "ai-toolkit", "ramtorch", "diffusers", "accelerate")


def suite_figures() -> list[Figure]:
    """Return the figures to reach on one H200, in the order in which the project states them."""
    found = [
        Figure("exact: cases that differ from no offloading", 0, partial(f.differing, pairs=PAIRS)),
        Figure("infer 4096, all streamed: share of the link", 0.98,
               partial(f.link_share, key="carom-infer-4096"), at_least=True),
        Figure("infer 4096, all streamed: reserved", 1.2, partial(f.reserved_gb, key="carom-infer-4096"), unit=" GB"),
        Figure("infer 4096, half resident: of the roofline", 1.02,
               partial(f.of_roofline, key="carom-infer-4096-half", base="none-infer-4096")),
    ]  # fmt: skip
    for tokens in (1024, 4096):
        mine, base = f"carom-train-{tokens}", f"none-train-{tokens}"
        found += [
            Figure(f"train {tokens}, all streamed: of musubi's ring", 0.97,
                   partial(f.ratio, key=mine, to=f"musubi-train-{tokens}")),
            Figure(f"train {tokens}, all streamed: of the roofline{INSTEAD}", 1.03,
                   partial(f.of_roofline, key=mine, base=base)),
            Figure(f"train {tokens}, all streamed: of ai-toolkit", 0.70,
                   partial(f.ratio, key=mine, to=f"ai-toolkit-train-{tokens}")),
            Figure(f"train {tokens}: transfers per weight over two less the turns", 0.0005,
                   partial(f.transfers_over_ideal, key=mine)),
        ]  # fmt: skip
    halves = ["carom-train-4096-half", "carom-train-4096-half-low"]
    return [
        *found,
        Figure("train 4096, half resident, within 5.3 GB: of no offloading", 1.03,
               partial(f.within_memory, keys=halves, base="none-train-4096", limit_bytes=MUSUBI_HALF)),
        Figure("train 4096, half resident, within musubi's memory here: of no offloading", 1.03,
               partial(f.within_memory_of, keys=halves, base="none-train-4096", other="musubi-train-4096-half")),
        Figure("infer 16384, all streamed: of no offloading", 1.01,
               partial(f.ratio, key="carom-infer-16384", to="none-infer-16384")),
        Figure("reserved over budget + resident run's activations", 1.05, partial(f.reserved_over_promise, pairs=PAIRS)),
        Figure("lossless: bytes on the wire", 0.70, partial(f.wire_share, key="carom-infer-4096-lossless")),
        Figure("lossless: raw bytes a second end to end, over the link", 1.40,
               partial(f.effective_share, key="carom-infer-4096-lossless"), at_least=True),
        Figure("lossless, infer 4096, all streamed: of the best peer", 0.72,
               partial(f.of_best, key="carom-infer-4096-lossless", others=[f"{p}-infer-4096" for p in PEERS])),
        Figure("lossless, train 1024, all streamed: of musubi's ring", 0.67,
               partial(f.ratio, key="carom-train-1024-lossless", to="musubi-train-1024")),
        Figure("lossless, train 4096, all streamed: of musubi's ring", 0.82,
               partial(f.ratio, key="carom-train-4096-lossless", to="musubi-train-4096")),
        *(
            Figure(f"lossless, {mode} {tokens}, all streamed: of the packed roofline", 1.03,
                   partial(f.of_roofline, key=f"carom-{mode}-{tokens}-lossless", base=f"none-{mode}-{tokens}"))
            for mode, tokens in (("infer", 4096), ("train", 1024), ("train", 4096))
        ),
        Figure("lossless, infer 16384 (compute binds): of raw", 1.03,
               partial(f.ratio, key="carom-infer-16384-lossless", to="carom-infer-16384")),
        *(
            Figure(f"codec auto, {mode} {tokens}: of raw", 1.01,
                   partial(f.ratio, key=f"carom-{mode}-{tokens}-auto", to=f"carom-{mode}-{tokens}"))
            for mode, tokens in (("infer", 16384), ("infer", 4096), ("train", 1024), ("train", 4096))
        ),
        *(
            figure
            for words, share in BUDGETS.items()
            for key in (f"carom-infer-4096-vram-{words}",)
            for figure in (
                Figure(f"lossless, infer 4096, in {share:g} of the bytes: of raw", 1.0,
                       partial(f.ratio, key=f"{key}-lossless", to=key)),
                Figure(f"lossless, infer 4096, in {share:g} of the bytes: units that stay packed", 1.0,
                       partial(f.stayed_packed, key=f"{key}-lossless"), at_least=True),
            )
        ),
        Figure("lossless, train 4096, half resident, within 5.3 GB: of no offloading", 1.03,
               partial(f.within_memory, keys=["carom-train-4096-half-lossless"], base="none-train-4096",
                       limit_bytes=MUSUBI_HALF)),
        Figure("reserved memory gained, step 50 to 500", 0.0, partial(f.growth, key="carom-flat"), unit=" MB"),
        Figure("host memory after attach over the weights", 1.05, partial(f.host_share, key="carom-attach-24GB")),
        Figure("weights placed in the pinned store", 10.0, partial(f.attach_rate, key="carom-attach-24GB"),
               at_least=True, unit=" GiB/s"),
        *(
            Figure(f"host time added a block, {mode}, {words}", bound, partial(f.host_added, key=f"host-{mode}-{kind}"),
                   unit=" us")
            for mode, limit in (("infer", 50.0), ("train", 150.0))
            for words, kind, bound in (
                ("all resident", "resident", limit),
                ("already fetched", "fetched", limit),
                ("each fetched anew (no bound set)", "streamed", float("inf")),
            )
        ),
    ]  # fmt: skip


def chosen(cases: dict[str, Case], words: list[str]) -> dict[str, Case]:
    """Return the link and the cases whose key contains one of ``words``, or equals a word after "="; without words,
    all.
    """

    def wanted(key: str) -> bool:
        return any(word[1:] == key if word.startswith("=") else word in key for word in words)

    return {k: c for k, c in cases.items() if not words or k == "link" or wanted(k)}


def main(argv: list[str] | None = None) -> int:
    """Run the suite; return 0 if every measured figure reaches its target, else 1."""
    parser = argparse.ArgumentParser(prog="suite", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where suite.json and suite.png go"
    )
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds for all of it (default: 570)")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT,...",
        help="run the cases whose key holds one of these, or is one written as =KEY (and the link)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="processes a case, each of all cases before the next of any (default: 2)",
    )
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument(
        "--touch-gb", type=float, default=40.0, help="host memory to grow first, on a GPU (default: 40 GB)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the same list in miniature; the figures mean nothing"
    )
    args = parser.parse_args(argv)
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = chosen(suite_cases(device, args.tiny), [word for word in args.only.split(",") if word])
    if device != "cpu" and args.touch_gb > 0:
        touch = Case(kind="touch", device="cpu", touch_bytes=int(args.touch_gb * 1e9), limit_s=90.0)
        cases = {"touch": touch, **cases}
    record = new_record("carom benchmark suite" + (" (tiny)" if args.tiny else ""), sys.argv[1:])
    path = args.out / "suite.json"

    def keep(key: str, process: int, result: dict[str, Any]) -> None:
        add_result(record, key, cases[key], result, process=process)
        write_record(record, path)

    record["interrupted"] = run_cases(
        cases, keep, processes=args.processes, time_limit_s=args.limit_s, progress=sys.stderr
    )
    merged = {entry["key"]: entry["result"] for entry in pooled(record["cases"])}
    judged = [figure.judge(Results(cases, merged)) for figure in suite_figures()]
    record["figures"] = judged
    write_record(record, path)
    shown = rendered(record).rows
    if any("ms_per_step" in result for result in merged.values()):
        chart(shown, args.out / "suite.png")
    print(table(shown))
    print()
    print(render(judged))
    print(json.dumps({"record": str(path), "interrupted": record["interrupted"]}))
    missed = [
        row for row in judged if row["reached"] is False and "of the roofline (where" not in row["figure"]
    ]
    return 1 if missed or record["interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
