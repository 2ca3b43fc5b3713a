"""vram="auto" on emulated small cards, two models under one budget, doctor and plan: one GPU, in four minutes.

Run by path from any folder. Only torch and Carom's own dependencies must be installed:

    python benchmarks/engines/auto_gpu.py [--json FILE] [--seconds 235] [--cards 8,12,16,24] [--parts doctor,alternate,aimdo,cards]

Part `cards`: a second process holds memory so that 8, 12, 16 or 24 GB of the card remain. A model 1.4 times as large
runs with vram="auto" until its layout has settled, and then with a few hand-set budgets near the budget found (each
with the layout that its own session advises). ``ratio`` is auto's step time divided by the best of the hand-set step
times. ``ooms`` counts failed allocations, including handled ones. Part `alternate`: two models take turns under one
SharedBudget that holds 1.5 models. ``ratio`` is the bytes copied, divided by the bytes copied with the best fixed
split. Part `aimdo`: pool="aimdo" while torch takes memory, where comfy-aimdo can be imported. Each part gets a share
of the remaining time. Inference runs before training, and the output names the runs for which no time was left.

Without a GPU the same runs work in miniature on the simulated device: --d 32 --cards 1.5 --tokens 8 --train-tokens 8
--rounds 6.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("doctor", "alternate", "aimdo", "cards")
MODES = ("infer", "train")
GIB = 1 << 30
CHILD_SECONDS = 60.0


@contextlib.contextmanager
def importable() -> Iterator[dict[str, str]]:
    """Provide an environment in which a child process imports this checkout as the package carom."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "carom").symlink_to(ROOT, target_is_directory=True)
        yield {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


def child(arguments: list[str], seconds: float = CHILD_SECONDS) -> dict[str, Any]:
    """Run a command and return the JSON that the command printed last, with its duration, or the reason for a
    failure.
    """
    began = time.monotonic()
    with importable() as environment:
        try:
            done = subprocess.run(
                [sys.executable, *arguments], capture_output=True, text=True, timeout=seconds, env=environment, check=False,
                cwd=environment["PYTHONPATH"].split(os.pathsep)[0],
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer within {seconds:g} s"}
    found: dict[str, Any] = {"exit_code": done.returncode, "wall_s": time.monotonic() - began}
    try:
        found["output"] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        found["failed"] = done.stderr[-2000:] or "it printed no JSON"
    return found


def doctor() -> dict[str, Any]:
    """Run `carom doctor` and `carom plan` on the probed card, as a user would; return their results."""
    return {
        "doctor": child(["-m", "carom", "doctor", "--json"]),
        "plan": child(["-m", "carom", "plan", "flux2-dev", "--gpu", "probe", "--json"]),
    }


def aimdo(gpu: bool) -> dict[str, Any]:
    """Run the test of pool="aimdo" while torch's allocator takes memory; return its result."""
    if importlib.util.find_spec("comfy_aimdo") is None:
        return {"skipped": "comfy-aimdo is not installed"}
    if not gpu:
        return {"skipped": "there is no GPU for it"}
    return child([str(ROOT / "tests" / "support" / "aimdo_gpu.py")])


def table(record: dict[str, Any]) -> str:
    """Return the record as text for people."""
    lines = [
        "card   mode   tokens  model GB  auto ms  host ms  held GiB  best ms  at GiB  ratio  ooms  layouts  exact"
    ]
    for row in record["cards"]:
        auto = row.get("auto")
        if auto is None:
            lines.append(f"{row['card_gb']:g} GB  {row['mode']}: {row.get('skipped') or row['failed']}")
            continue
        best = f"{1e3 * row['best_s']:>7.2f}  {row['best_budget_bytes'] / GIB:>6.2f}" if "best_s" in row else f"{'-':>15}"  # fmt: skip
        lines.append(
            f"{row['card_gb']:>3g} GB  {row['mode']:<6}{row['tokens']:>6}  {row['model_bytes'] / 1e9:>8.3g}"
            f"  {1e3 * auto['step_s']:>7.2f}  {1e3 * auto['host_s']:>7.2f}  {auto['held_bytes'] / GIB:>8.2f}  {best}"
            f"  {row.get('ratio', float('nan')):>5.3f}  {auto['ooms']:>4}  {auto['layouts']:>7}  {row.get('exact', '-')!s:>5}"
        )
    both = record.get("alternate")
    if both:
        lines.append(
            f"two models, one budget for 1.5: {both['ratio']:.3f} x the bytes of the best fixed split, "
            f"{both['shared']['layouts']} layouts, the last in round {both['shared']['last_change_round'] + 1} of "
            f"{both['rounds']}, exact: {both['exact']}"
        )
    for name, found in {**record.get("doctor", {}), "aimdo": record.get("aimdo", {})}.items():
        words = found.get("skipped") or found.get("failed")
        if words is None and found:
            inside = found["output"].get("seconds")
            words = f"exit {found['exit_code']}, {found['wall_s']:.1f} s" + (
                f", of which the probe {inside:.1f} s" if inside is not None else ""
            )
        if words:
            lines.append(f"{name}: {words.strip().splitlines()[-1]}")
    ratios = [row["ratio"] for row in record["cards"] if "ratio" in row]
    if ratios:
        lines.append(f"auto by best hand-set: at most {max(ratios):.3f} over {len(ratios)} runs; all {record['seconds']:.0f} s")  # fmt: skip
    return "\n".join(lines)


def cards(args: argparse.Namespace, cases: Any, bench: Any, until: float) -> list[dict[str, Any]]:
    """Run every card in every mode, inference first, each with a share of the time; return the results."""
    pages = cases.Pages(bench.case)
    cases.warm_up(bench, pages)
    with cases.SmallCard(bench) as small:
        return _each(args, cases, bench, until, pages, small)


def _each(
    args: argparse.Namespace, cases: Any, bench: Any, until: float, pages: Any, small: Any
) -> list[dict[str, Any]]:
    wanted = [(card, mode) for mode in args.modes for card in args.cards]
    rows: list[dict[str, Any]] = []
    for place, (card, mode) in enumerate(wanted):
        tokens = args.tokens if mode == "infer" else args.train_tokens
        shares = [each * (1.3 if kind == "train" else 1.0) + 4 for each, kind in wanted[place:]]
        end = cases.sliced(until, shares)
        row: dict[str, Any] = {"card_gb": card, "mode": mode, "tokens": tokens}
        if time.monotonic() > until - 5:
            rows.append(row | {"skipped": "out of time"})
            continue
        try:
            small.become(card)
            rows.append(cases.on_card(bench, card, mode, tokens, pages, end) | {"card": small.figures()})
        except Exception as error:  # a failure on one card is recorded, and the others still run
            cases.give_back()
            rows.append(row | {"failed": f"{type(error).__name__}: {str(error)[:500]}"})
        print(f"{card:g} GB {mode}: done", flush=True)
    return rows


def numbers(text: str) -> list[float]:
    found = [float(part) for part in text.split(",") if part]
    if not found or not all(0.5 <= each <= 200 for each in found):
        raise argparse.ArgumentTypeError("give sizes in GB, as 8,12")
    return found


def choice(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if wrong := [each for each in found if each not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: choose from {', '.join(allowed)}")
        return found

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", type=numbers, default=[8, 12, 16, 24], help="sizes in GB, 1e9 bytes")
    parser.add_argument("--modes", type=choice(MODES), default=list(MODES))
    parser.add_argument("--parts", type=choice(PARTS), default=list(PARTS))
    parser.add_argument("--d", type=int, default=3072, help="features; 18 d^2 bf16 weights a block")
    parser.add_argument("--over", type=float, default=1.4, help="the model's size by the card's")
    parser.add_argument("--tokens", type=int, default=4096, help="of an inference step")
    parser.add_argument("--train-tokens", type=int, default=1024, help="of a training step")
    parser.add_argument("--codec", choices=("raw", "lossless", "auto"), default="raw")
    parser.add_argument("--rounds", type=int, default=100, help="of the two models that take turns")
    parser.add_argument("--seconds", type=float, default=235.0, help="begin nothing new after so many")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    began = time.monotonic()
    found: dict[str, Any] = {"cards": []}
    if "doctor" in args.parts:  # before this process creates a CUDA context
        found["doctor"] = doctor()
        print("doctor and plan: done", flush=True)
    spec = importlib.util.spec_from_file_location(
        "carom_launch", ROOT / "benchmarks" / "engines" / "launch.py"
    )
    assert spec and spec.loader
    launch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launch)
    launch.load_checkout()
    cases, recording, case = (
        importlib.import_module(f"carom.benchmarks.engines.{name}")
        for name in ("auto_cases", "record", "case")
    )
    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)  # with tensors of a few kB, threads would mostly wait for each other
    record = (recording.new_record("carom auto", sys.argv[1:]) if args.json else {}) | found
    if "aimdo" in args.parts:
        record["aimdo"] = aimdo(cuda)
    base = case.Case(engine="carom", d=args.d, device="cuda" if cuda else "cpu")
    bench = cases.Bench(base, args.over, args.codec, cuda)
    if "alternate" in args.parts:
        record["alternate"] = cases.alternating(bench, 6, args.train_tokens, args.rounds, cases.Pages(base))
        print("two models: done", flush=True)
    if "cards" in args.parts:
        record["cards"] = cards(args, cases, bench, until)
    record["seconds"] = time.monotonic() - began
    if args.json:
        recording.write_record(record, Path(args.json))
    print(table(record))
    return 1 if any("failed" in row for row in record["cards"]) else 0


if __name__ == "__main__":
    sys.exit(main())
