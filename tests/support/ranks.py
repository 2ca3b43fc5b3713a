"""Runs a script in several processes that talk over gloo, and returns what each of them found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "distributed"


def run_ranks(
    script: str, rendezvous: Path, *arguments: str, ranks: int = 2, timeout: float = 120
) -> list[Any]:
    """Run ``script`` of tests/support/distributed once for each rank; return the JSON of each one's last line.

    ``rendezvous``: a path of a file that does not exist; the processes meet there. Each process finds RANK and
    WORLD_SIZE in its environment, and the path as its first argument. Fails with the errors of all ranks if one of
    them fails, and ends the others then.
    """
    found = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPTS / script), str(rendezvous), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=timeout) for process in found]
    finally:
        for process in found:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert all(process.returncode == 0 for process in found), "\n".join(
        f"rank {rank}: {errors[-3000:]}" for rank, (_, errors) in enumerate(said)
    )
    return [json.loads(out.splitlines()[-1]) for out, _ in said]
