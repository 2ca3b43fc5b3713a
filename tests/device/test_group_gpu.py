"""`carom.stream(group=)` on two GPUs with NCCL. tests/session/test_group.py has the same tests for the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests_ranks import ON_GPUS, kill_one, run_ranks, shared_memory

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
def test_a_killed_rank_ends_the_other_and_leaves_no_shared_memory(tmp_path, mode):
    code, said = kill_one(SCRIPT, tmp_path, 0.2, "killed", str(tmp_path), mode, settings=ON_GPUS)
    assert code != 0 and said
    assert not shared_memory(tmp_path)
