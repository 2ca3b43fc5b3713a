"""`carom.stream(group=)` on two GPUs with NCCL. tests/session/test_group.py has the same tests for the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests_ranks import ON_GPUS, SCRIPTS, run_ranks, shared_memory

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SCRIPT = "data_parallel.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(SCRIPT, folder / "meet", "on_gpus", str(folder), settings=ON_GPUS)


def test_adapters_are_those_of_ddp_on_resident_weights_bit_for_bit(ranks):
    for rank in ranks:
        assert len(rank) == 8
        assert all(case["equal"] and case["closed"] for case in rank.values()), rank


@pytest.mark.parametrize("source", ["memory", "file", "packed"])
def test_each_rank_copies_its_part_if_the_ranks_gather(ranks, source):
    for rank in ranks:
        whole, part = rank[f"{source}-False"]["wire"], rank[f"{source}-True"]["wire"]
        assert 0 < part <= 1.02 / 2 * whole, rank[f"{source}-True"]["notes"]
    assert ranks[0]["packed-True"]["wire"] < 0.95 * ranks[0]["file-True"]["wire"]


@pytest.mark.parametrize("mode", ["whole", "gather"])
def test_torchrun_ends_the_other_rank_of_a_killed_one_and_leaves_no_shared_memory(tmp_path, mode):
    """Without a launcher, NCCL ends the process only a minute after the group's time-out, with and without Carom."""
    script = [str(SCRIPTS / "data_parallel.py"), str(tmp_path / "meet"), "killed", str(tmp_path), mode]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script],
        capture_output=True, text=True, timeout=60, env={**os.environ, **ON_GPUS, "CAROM_TEST_DIE": "1"},
    )  # fmt: skip
    assert "ready" in done.stdout and done.returncode != 0
    assert "Signal 9" in done.stderr
    assert not shared_memory(tmp_path)
