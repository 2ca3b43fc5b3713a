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
_SLOTS = [
    "streaming/test_slot_promises.py",
    "streaming/test_failed_passes.py",
    "streaming/test_interrupts.py",
    "streaming/test_late_host_copies.py",
]
_WAITS = ["host/test_pinned_in_flight.py", "streaming/test_late_host_copies.py"]
TESTS: dict[str, list[str]] = {
    "core/streaming/streamer.py": [
        "streaming/test_failed_beside_another.py",
        "streaming/test_uses_during_copies.py",
        *_SLOTS,
        "streaming/test_prefetch.py",
        "host/test_pinned_in_flight.py",
        "streaming/test_transfers.py",
        "model/test_detach.py",
        "session/test_device_memory.py",
        "session/test_set_budget_between.py",
        "placement/test_packed.py",
    ],
    "core/streaming/run.py": [
        "streaming/test_failed_beside_another.py",
        "streaming/test_uses_during_copies.py",
        *_SLOTS,
        "placement/test_toy_store.py",
        "streaming/test_transfers.py",
        "streaming/test_uses_in_backward.py",
        "session/test_faults.py",
    ],
    "core/streaming/forwards.py": [*_SLOTS, "model/test_detach.py", "session/test_faults.py"],
    "core/streaming/backward.py": [*_SLOTS, "streaming/test_transfers.py", "streaming/test_threads.py"],
    "core/streaming/gradients.py": [*_SLOTS, "session/test_faults.py"],
    "core/streaming/unit.py": [*_SLOTS, "model/test_detach.py", "session/test_faults.py"],
    "core/device/stream_engine.py": ["device/test_stream_engine.py"],
    "core/device/staging.py": ["placement/test_packed_pieces.py", "placement/test_packed.py"],
    "core/placement/packed_residents.py": ["placement/test_packed_residents.py"],
    "core/placement/packed_tier.py": [*_WAITS, "placement/test_packed.py"],
    "core/placement/packed_writes.py": ["placement/test_packed_writes.py"],
    "core/placement/file_": [
        "placement/test_disk_waits.py",
        "placement/test_disk_written.py",
        "placement/test_disk.py",
        "placement/test_disk_wire.py",
    ],
    "core/placement/file_residents.py": [
        "placement/test_residents_stay.py",
        "session/test_changed_residents.py",
    ],
    "core/placement/resident_cache.py": [
        "placement/test_lazy_residents.py",
        "placement/test_disk_wire.py",
        "session/test_peers.py",
    ],
    "core/placement/resident_loader.py": ["placement/test_disk_waits.py", "placement/test_lazy_residents.py"],
    "core/host/host_cache.py": ["host/test_cache.py", "placement/test_disk.py"],
    "core/host/buffer_pool.py": ["host/test_cache.py", "placement/test_disk.py"],
    "core/checkpoint/disk_reader.py": ["checkpoint/test_reader.py"],
    "core/checkpoint/spill.py": ["checkpoint/test_spill.py", "placement/test_disk_memory.py"],
    "core/checkpoint/spill_file.py": ["checkpoint/test_spill.py", "placement/test_disk_memory.py"],
    "core/checkpoint/mapped_views.py": ["checkpoint/test_replaced_files.py", "placement/test_disk_memory.py"],
    "core/checkpoint/memory_maps.py": ["checkpoint/test_replaced_files.py", "placement/test_disk_memory.py"],
    "core/checkpoint/index.py": ["checkpoint/test_replaced_files.py", "checkpoint/test_index.py"],
    "core/host/shared_memory.py": ["session/test_group.py"],
    "core/placement/shared_weights.py": ["session/test_group.py"],
    "core/session/managed_module.py": ["session/test_group.py"],
    "core/placement/attached_tensors.py": [
        "session/test_undone.py",
        "host/test_pinned_in_flight.py",
        "model/test_detach.py",
        "streaming/test_rerun.py",
    ],
    "core/placement/peer_memory.py": ["session/test_peers.py"],
    "core/placement/pinned_tier.py": ["session/test_undone.py", "host/test_pinned_in_flight.py"],
    "core/placement/residents.py": ["session/test_undone.py", "model/test_detach.py"],
    "core/session/layout_manager.py": ["session/test_undone.py", "placement/test_host_copies.py"],
    "core/session/device_weights.py": ["budget/test_shared_budget.py", "budget/test_shared_budget_growth.py"],
    "core/budget/ledger.py": [
        "budget/test_shared_budget.py",
        "budget/test_sharing.py",
        "budget/test_shared_budget_growth.py",
    ],
    "core/budget/shared_budget.py": ["budget/test_shared_budget.py", "budget/test_shared_budget_growth.py"],
    "core/session/policies/device_memory.py": [
        "session/test_device_memory.py",
        "streaming/test_rerun.py",
        "budget/test_optimizer_reserve.py",
    ],
    "core/session/tensor_access.py": ["model/test_detach.py", "session/test_dropped_modules.py"],
    "core/session/policies/host_memory.py": [*_WAITS, "session/test_host_memory.py"],
    "core/session/policies/raise_budget.py": ["session/test_leftover_memory.py"],
    "core/budget/optimizer_reserve.py": ["budget/test_optimizer_reserve.py"],
    "core/metrics/meter.py": ["metrics/test_step_figures.py"],
    "core/metrics/report.py": ["metrics/test_report.py", "placement/test_packed_residents.py"],
    "core/model/interpose.py": ["session/test_undone.py"],
    "core/streaming/root_forward.py": [
        "streaming/test_failed_passes.py",
        "streaming/test_transfers.py",
        "session/test_set_budget_between.py",
    ],
    "core/model/quantized.py": ["model/test_quantized_wrappers.py", "model/test_wrapper_cache.py"],
    "core/model/wrapper_cache.py": ["model/test_wrapper_cache.py"],
    "core/streaming/vbar_slots.py": ["streaming/test_vbar_slots.py"],
    "core/session/policies/vbar_pressure.py": ["streaming/test_vbar_slots.py"],
    "nodes/": ["comfyui/test_comfy_undone.py", "comfyui/test_comfy_patcher.py"],
    "toolkit_ext/": ["ai_toolkit/test_aitoolkit_undone.py", "ai_toolkit/test_aitoolkit_job.py"],
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
            [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "--tb=short",
                *(test if test.startswith("-") else f"tests/{test}" for test in tests),
            ]
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
