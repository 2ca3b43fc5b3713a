"""Runs a script in several processes that talk over gloo or NCCL, and returns what each of them found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "distributed"
ON_GPUS = {"CAROM_TEST_GPUS": "1"}  # settings of ranks that each use a GPU


def run_ranks(
    script: str,
    rendezvous: Path,
    *arguments: str,
    ranks: int = 2,
    timeout: float = 120,
    settings: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``script`` of tests/support/distributed once for each rank; return the JSON of each one's last line.

    ``rendezvous``: a path of a file that does not exist; the processes meet there. ``settings``: environment variables
    of the processes. Fails with the errors of all ranks if one of them fails, and ends the others then.
    """
    with _started(script, rendezvous, arguments, ranks, settings) as found:
        said = [process.communicate(timeout=timeout) for process in found]
    assert all(process.returncode == 0 for process in found), "\n".join(
        f"rank {rank}: {errors[-3000:]}" for rank, (_, errors) in enumerate(said)
    )
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def kill_one(script: str, folder: Path, seconds: float, *arguments: str) -> tuple[int, str]:
    """Kill rank 1 of 2 ``seconds`` after both ranks said "ready"; return the exit code of rank 0 and what it said.

    ``folder``: for the rendezvous; its path is in the command line of the ranks.
    """
    with _started(script, folder / "meet", arguments, 2) as ranks:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        assert shared_memory(folder)
        time.sleep(seconds)
        os.kill(ranks[1].pid, signal.SIGKILL)
        _, said = ranks[0].communicate(timeout=40)
        return ranks[0].returncode, said


def shared_memory(folder: Path) -> list[str]:
    """The descriptors of Carom's shared memory in processes that have ``folder`` in their command line."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            ours = str(folder) in (link.parent.parent / "cmdline").read_text()
            if ours and "carom-weights" in os.readlink(link):
                found.append(str(link))
        except OSError:
            continue
    return found


@contextlib.contextmanager
def _started(
    script: str,
    rendezvous: Path,
    arguments: tuple[str, ...],
    count: int,
    settings: dict[str, str] | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ``count`` ranks. Each finds RANK and WORLD_SIZE in its environment, and ``rendezvous`` as first argument."""
    # The ranks import the checkout of these tests, not an installed one: a mutation run changes a copy of it.
    packages = rendezvous.parent / "packages"
    if not packages.exists():
        packages.mkdir()
        (packages / "carom").symlink_to(SCRIPTS.parents[2], target_is_directory=True)
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    found = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPTS / script), str(rendezvous), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(settings or {}), "RANK": str(rank), "WORLD_SIZE": str(count),
            },
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()
