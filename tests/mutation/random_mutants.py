"""Makes random defects in the schedule, the pool and the run, and counts those that the tests notice.

``python tests/mutation/random_mutants.py [--only TEXT ...] [--count N] [--seed N] [--json FILE]``

`mutants.py` lists defects that a person has thought of; here a seeded choice is made among all small changes of the syntax
tree: a comparison, ``and`` or ``or``, ``not``, an arithmetic operator, a number or truth value is replaced, a statement is
removed, the branches of a condition are swapped. Each mutant is run as `run.py` describes: first the tests in the first list
that `TESTS` names for the file, and if they pass, those in the next list. A mutant that survives all may be equivalent
(no behaviour changes): only a reader can tell. Exit code 1: a mutant survived.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mutants import Mutant
from run import IGNORED, ROOT, judge, run_tests

_SAME = "--hypothesis-seed=0"  # the same examples for each mutant
_USES = [  # together under 15 s
    "streaming/test_units_at_once.py",
    "streaming/test_uses_during_copies.py",
    "streaming/test_uses_in_backward.py",
    "streaming/test_runner.py",
    "streaming/test_known_orders.py",
    "streaming/test_slot_promises.py",
    "streaming/test_failed_passes.py",
]
_PASSES = [
    "streaming/test_slot_promises.py",
    "streaming/test_transfers.py",
    "streaming/test_prefetch.py",
    "streaming/test_failed_passes.py",
    "streaming/test_runner.py",
    "placement/test_toy_store.py",
]
_SLOW = [
    "streaming/test_interrupts.py",
    "streaming/test_threads.py",
    "streaming/test_order_across_layouts.py",
    "streaming/test_late_host_copies.py",
    "streaming/test_vbar_slots.py",
    "streaming/test_host_calls.py",
    "streaming/test_failed_beside_another.py",
    "streaming/test_writes_in_a_step.py",
    "session/test_close.py",
    "session/test_codec_choice.py",
    "session/test_peers.py",
    "session/test_replan.py",
    "model/test_autograd_api.py",
    "host/test_pinned_in_flight.py",
    "session/test_set_budget_between.py",
    "placement/test_packed.py",
    "placement/test_disk_waits.py",
]
_POOL = [
    _SAME,
    # These look for texts of the source.
    "-knot rule_that_is_broken_is_found and not every_rule_of_the_list",
    "device/test_places.py", "device/test_pool.py", "device/test_pool_rules.py",
]  # fmt: skip
# The first entry whose key begins the file's path.
TESTS: dict[str, list[list[str]]] = {
    "core/plan/schedule_follower.py": [
        [
            _SAME, "plan/test_access_order.py", "plan/test_schedule_follower.py", "plan/test_schedule_by_need.py",
            "plan/test_schedule_fetches.py", "streaming/test_known_orders.py",
        ],
        _PASSES,
        ["streaming/test_order_across_layouts.py", "placement/test_reads_ahead.py", "streaming/test_interrupts.py"],
    ],
    "core/plan/learnt_order.py": [
        ["plan/test_schedule_follower.py", "streaming/test_known_orders.py", "streaming/test_order_across_layouts.py"],
    ],
    "core/plan/schedule": [
        [
            _SAME, "plan/test_schedule_by_need.py", "plan/test_schedule_check.py", "plan/test_schedule_fetches.py",
            "plan/test_schedule_maker.py", "plan/test_schedule_offsets.py", "plan/test_schedule_phases.py",
            "plan/test_schedule_residents.py", "plan/test_schedule_seconds.py", "plan/test_schedule_ways.py",
        ],
    ],
    "core/device/": [_POOL, _PASSES, _SLOW],
    "core/stores/": [
        ["placement/test_toy_store.py"],
        [*_USES, "placement/test_packed.py", "streaming/test_exact.py"],
    ],
    "core/streaming/vbar_streamer.py": [["streaming/test_vbar_slots.py"], _PASSES],
    "core/streaming/": [_USES, [*_PASSES, "streaming/test_order_across_layouts.py"], _SLOW],
    "core/session/managed_module.py": [
        ["session/test_returns.py", "streaming/test_known_orders.py", "streaming/test_order_across_layouts.py"],
        [
            "session/test_undone.py", "model/test_detach.py", "model/test_quantized_wrappers.py",
            "session/test_stream_failures.py", "placement/test_disk.py", "placement/test_disk_quantised.py",
        ],
    ],
}  # fmt: skip
FILES = [
    "core/plan/schedule*.py", "core/plan/learnt_order.py", "core/device/pool*.py", "core/device/slot*.py", "core/stores/*.py",
    "core/streaming/streamer.py", "core/streaming/run*.py", "core/streaming/vbar_streamer.py", "core/streaming/no_room.py",
    "core/streaming/units_together.py", "core/streaming/unit_schedules.py", "core/streaming/first_uses.py",
    "core/session/managed_module.py",
]  # fmt: skip

_COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


def _changed(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Return (new text, idea) for each change of ``node`` itself."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARED:
            yield ast.unparse(ast.Compare(left, [_COMPARED[type(operator)]()], [right])), "comparison"
        case ast.BoolOp(ast.And(), values):
            yield f"({ast.unparse(ast.BoolOp(ast.Or(), values))})", "and to or"
        case ast.BoolOp(ast.Or(), values):
            yield f"({ast.unparse(ast.BoolOp(ast.And(), values))})", "or to and"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})", "not removed"
        case ast.BinOp(left, operator, right) if type(operator) in _COMPUTED:
            yield f"({ast.unparse(ast.BinOp(left, _COMPUTED[type(operator)](), right))})", "arithmetic"
        case ast.Constant(bool() as value):
            yield str(not value), "truth value"
        case ast.Constant(int() | float() as value):
            yield str(value + 1), "number"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})", "branches swapped"
        case ast.If(test):
            yield f"if not ({ast.unparse(test)}):", "condition inverted"
        case (
            ast.Expr(ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break()
        ):
            yield "pass", "statement removed"
        case ast.Return(ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "return None", "nothing returned"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes at and below ``node`` whose change may change behaviour: no annotations, imports or texts."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.arg):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def mutants_of(path: Path, file: str) -> list[Mutant]:
    """Return all mutants of ``file`` at ``path``. ``old`` and ``new`` are the whole texts."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, data = [], text.encode()
    for node in _nodes(ast.parse(text)):
        for new, idea in _changed(node):
            begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            if isinstance(node, ast.If):
                if data[begin : begin + 2] != b"if":  # elif
                    new = "el" + new
                last = node.test
                end = data.index(b":", starts[last.end_lineno - 1] + last.end_col_offset) + 1  # type: ignore
            old = data[begin:end].decode()
            changed = (data[:begin] + new.encode() + data[end:]).decode()
            try:
                ast.parse(changed)
            except SyntaxError:
                continue
            shown = f"line {node.lineno}: {idea}: {' '.join(old.split())} -> {new}"  # type: ignore[attr-defined]
            found.append(Mutant(file, text, changed, shown))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="in the path")
    parser.add_argument("--count", type=int, default=300, help="number of mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--skip", type=int, default=0, help="begin behind so many of the chosen mutants")
    parser.add_argument("--json", metavar="FILE", help="write the results there, after every mutant")
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds that a list of tests may take at least"
    )
    chosen = parser.parse_args()
    files = sorted({str(path.relative_to(ROOT)) for pattern in FILES for path in ROOT.glob(pattern)})
    files = [file for file in files if not chosen.only or any(text in file for text in chosen.only)]
    mutants = [mutant for file in files for mutant in mutants_of(ROOT / file, file)]
    random.Random(chosen.seed).shuffle(mutants)
    print(f"{len(mutants)} possible mutants")
    for name in ("hypothesis", "pytest", "safetensors.torch", "torch._dynamo", "torch.utils.flop_counter"):
        importlib.import_module(name)  # every fork has them already

    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="carom-mutants-") as scratch:
        root, log, clock = Path(scratch) / "checkout", Path(scratch) / "log.txt", int(time.time())
        shutil.copytree(ROOT, root, ignore=IGNORED)
        limits: dict[
            tuple[str, ...], float
        ] = {}  # how long the tests may take, by what they take on this machine
        for mutant in mutants[chosen.skip : chosen.count]:
            began, by = time.monotonic(), None
            for tests in next(tests for key, tests in TESTS.items() if mutant.file.startswith(key)):
                if tuple(tests) not in limits:
                    start = time.monotonic()
                    if failed := run_tests(root, tests, 10 * chosen.timeout, log):
                        print(f"error: without any defect: {failed}")
                        return 2
                    limits[tuple(tests)] = max(chosen.timeout, 3 * (time.monotonic() - start))
                clock += 2
                by = judge(root, mutant, tests, limits[tuple(tests)], log, clock)
                if by:
                    break
            seconds = time.monotonic() - began
            results.append(
                {"file": mutant.file, "idea": mutant.idea, "noticed": by, "seconds": round(seconds, 1)}
            )
            print(f"{'noticed ' if by else 'SURVIVED'} {seconds:5.0f} s  {mutant}  {by or ''}", flush=True)
            if chosen.json:
                Path(chosen.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    noticed = sum(result["noticed"] is not None for result in results)
    print(f"{noticed} of {len(results)} noticed")
    return int(noticed < len(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
