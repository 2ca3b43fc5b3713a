"""Counts how many deliberate defects the tests notice: ``python tests/mutation/run.py [--only TEXT ...] [--json FILE]``.

`mutants.py` lists one-line changes of synchronisation (a wait, an event or a lock is missing), accounting (a count of bytes is
wrong) and restoring (an undo step is skipped). For each one this script

1. changes the one place in a copy of the checkout (the checkout itself stays as it is),
2. runs the tests that `TESTS` names for that source file, until the first failure,
3. reports "noticed" (a test failed, or the run took longer than ``--timeout`` seconds and than three runs without a defect) or
   "survived", and changes it back.

Mutants that change no behaviour carry the reason in ``equivalent``. They are not run and do not count. An entry whose old text
does not occur exactly once is an error (exit code 2): correct the list after a change of the source. Exit code 1: a mutant
survived. pytest does not collect this folder. Every run is a fork of this process, so that torch is imported once; that needs
a POSIX system. A whole run takes an hour or more; ``--only core/store`` takes a part by source path or idea, ``--list``
shows the entries without running anything, ``--tests`` runs other tests than those that `TESTS` names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
IGNORED = shutil.ignore_patterns(
    ".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"
)
# Which tests are likely to notice a defect in a source file: the first entry whose key begins the file's path. The fast ones
# come first. Each entry is a list of pytest arguments, below tests/.
_SLOTS = ["test_slot_promises.py", "test_failed_passes.py", "test_late_host_copies.py"]
_WAITS = ["test_pinned_in_flight.py", "test_late_host_copies.py"]
TESTS: dict[str, list[str]] = {
    "core/streamer.py": [
        *_SLOTS,
        "test_pinned_in_flight.py",
        "test_transfers.py",
        "test_detach.py",
        "test_auto.py",
        "test_set_budget_between.py",
    ],
    "core/runs.py": [*_SLOTS, "test_detach.py", "test_faults.py"],
    "core/backward.py": [*_SLOTS, "test_transfers.py", "test_threads.py"],
    "core/landing.py": [*_SLOTS, "test_faults.py"],
    "core/slots.py": ["test_slots.py", *_SLOTS, "test_simulated.py"],
    "core/lookahead.py": [*_SLOTS, "test_lookahead.py", "test_disk.py"],
    "core/streamed.py": [*_SLOTS, "test_detach.py", "test_faults.py"],
    "core/transfer.py": ["test_stream_engine.py"],
    "core/staging.py": ["test_packed_pieces.py", "test_packed.py"],
    "core/packed_here.py": ["test_packed_here.py"],
    "core/packed_placement.py": [*_WAITS, "test_packed.py"],
    "core/unpacking.py": [*_WAITS, "test_packed.py"],
    "core/disk_streamer.py": [
        "test_disk_waits.py",
        "test_disk_written.py",
        "test_disk.py",
        "test_disk_wire.py",
    ],
    "core/disk_residents.py": ["test_disk_waits.py", "test_disk_residents.py"],
    "core/store/cache.py": ["test_cache.py", "test_disk.py"],
    "core/store/reader.py": ["test_reader.py"],
    "core/attach.py": ["test_undone.py", "test_pinned_in_flight.py", "test_detach.py", "test_rerun.py"],
    "core/on_device.py": ["test_undone.py", "test_detach.py"],
    "core/parking.py": ["test_undone.py", "test_host_copies.py"],
    "core/together.py": ["test_together.py", "test_shares.py", "test_growth.py"],
    "core/shared.py": ["test_together.py", "test_growth.py"],
    "core/adapt.py": ["test_auto.py", "test_stepping.py"],
    "core/follow_ram.py": [*_WAITS, "test_follow_ram.py"],
    "core/follow_room.py": ["test_room.py"],
    "core/stepping.py": ["test_stepping.py"],
    "core/meter.py": ["test_step_figures.py"],
    "core/report.py": ["test_report.py", "test_packed_here.py"],
    "core/hooks.py": [
        "test_undone.py",
        "test_failed_passes.py",
        "test_transfers.py",
        "test_set_budget_between.py",
    ],
    "core/wrapped.py": ["test_wrapped.py", "test_made_once.py"],
    "core/made_once.py": ["test_made_once.py"],
    "core/pooled.py": ["test_aimdo.py"],
    "core/pooling.py": ["test_aimdo.py"],
    "nodes/": ["test_comfy_undone.py", "test_comfy_patcher.py"],
    "toolkit_ext/": ["test_aitoolkit_undone.py", "test_aitoolkit_job.py"],
}


def tests_of(file: str) -> list[str]:
    return next((tests for key, tests in TESTS.items() if file.startswith(key)), [])


def problems(root: Path) -> list[str]:
    """Entries that no longer fit the source."""
    found = []
    for mutant in MUTANTS:
        path = root / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
        if count != 1:
            found.append(f"{mutant}: the old text occurs {count} times")
        if not mutant.equivalent and not tests_of(mutant.file):
            found.append(f"{mutant}: no tests are named for this file")
    missing = {test for tests in TESTS.values() for test in tests if not (root / "tests" / test).exists()}
    return found + [f"tests/{test}: there is no such file" for test in sorted(missing)]


def run_tests(root: Path, tests: list[str], timeout: float, log: Path) -> str | None:
    """None where all tests passed, else what noticed the defect."""
    child = os.fork()
    if child == 0:
        os.setsid()  # with whatever it starts it can be ended as one
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        os.chdir(root)
        import pytest

        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", *(f"tests/{test}" for test in tests)]
        )
        sys.stdout.flush()
        os._exit(int(code))
    until = time.monotonic() + timeout
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"took longer than {timeout:.0f} s"
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return None
    failed = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return failed[0][:200] if failed else f"exit code {code}"


def judge(root: Path, mutant: Mutant, tests: list[str], timeout: float, log: Path, clock: int) -> str | None:
    path = root / mutant.file
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        os.utime(path, (clock, clock))  # another time for each version: compiled files are told apart by it
        return run_tests(root, tests, timeout, log)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, (clock + 1, clock + 1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="in the path or the idea")
    parser.add_argument("--json", metavar="FILE", help="write the results there, after every mutant")
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="for one mutant (default: 300)"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="run these tests, below tests/, for every mutant"
    )
    parser.add_argument("--trust", action="store_true", help="do not first run the tests without a defect")
    parser.add_argument("--list", action="store_true", help="show the entries and check their old texts")
    chosen = parser.parse_args()

    wrong = problems(ROOT)
    for line in wrong:
        print(f"error: {line}")
    if wrong:
        return 2
    mutants = [m for m in MUTANTS if not chosen.only or any(text in str(m) for text in chosen.only)]
    if chosen.list:
        print(
            *(f"{m}{' (equivalent: ' + m.equivalent + ')' if m.equivalent else ''}" for m in mutants),
            sep="\n",
        )
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("hypothesis", "pytest", "safetensors.torch", "torch._dynamo", "torch.utils.flop_counter"):
        importlib.import_module(name)  # every fork has them already

    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="carom-mutants-") as scratch:
        root, log, clock = Path(scratch) / "checkout", Path(scratch) / "log.txt", int(time.time())
        shutil.copytree(ROOT, root, ignore=IGNORED)
        limits: dict[tuple[str, ...], float] = {}
        for mutant in (m for m in mutants if not (m.equivalent or chosen.trust)):
            tests, began = tuple(chosen.tests or tests_of(mutant.file)), time.monotonic()
            if tests not in limits and (failed := run_tests(root, list(tests), 10 * chosen.timeout, log)):
                print(f"error: without any defect: {failed}")  # it would seem to notice everything
                return 2
            limits.setdefault(tests, 3 * (time.monotonic() - began))  # how fast they are on this machine
        for mutant in (m for m in mutants if not m.equivalent):
            began, clock = time.monotonic(), clock + 2
            tests = tuple(chosen.tests or tests_of(mutant.file))
            limit = max(chosen.timeout, limits.get(tests, 0.0))
            by = judge(root, mutant, list(tests), limit, log, clock)
            seconds = time.monotonic() - began
            results.append(
                {"file": mutant.file, "idea": mutant.idea, "noticed": by, "seconds": round(seconds, 1)}
            )
            print(f"{'noticed ' if by else 'SURVIVED'} {seconds:5.0f} s  {mutant}  {by or ''}", flush=True)
            if chosen.json:
                Path(chosen.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    noticed = sum(result["noticed"] is not None for result in results)
    equivalent = sum(bool(mutant.equivalent) for mutant in mutants)
    share = f" ({noticed / len(results):.0%})" if results else ""
    print(f"{noticed} of {len(results)} noticed{share}; {equivalent} more change no behaviour")
    return int(noticed < len(results))


if __name__ == "__main__":
    sys.exit(main())
