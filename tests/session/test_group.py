"""`carom.stream(group=)`: the ranks of a machine share the frozen weights (gloo, on the CPU)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests_ranks import kill_one, run_ranks, shared_memory

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not hasattr(os, "memfd_create"),
    reason="ranks share memory by memfd_create, which this system lacks",
)
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "data_parallel.py"
FROZEN = 6 * 2 * 256 * 1024 * 4  # bytes of the large weights of the model in tests/support/distributed


@pytest.fixture(scope="module", params=[2, 4])
def exact(request, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("exact")
    return run_ranks(SCRIPT, folder / "meet", "exact", str(folder), ranks=request.param)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("failing")
    return run_ranks(SCRIPT, folder / "meet", "failing", str(folder))


@pytest.fixture(scope="module")
def one_source(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("one-source")
    return run_ranks(SCRIPT, folder / "meet", "one_source", str(folder))


def test_adapters_are_those_of_ddp_on_resident_weights_bit_for_bit(exact):
    for rank in exact:
        assert len(rank) == 13
        assert all(case["equal"] for case in rank.values()), rank


def test_closing_leaves_the_values_of_the_weights(exact):
    for rank in exact:
        assert all(case["closed"] for name, case in rank.items() if name != "by hand")


def test_each_rank_copies_its_part_if_the_ranks_gather(exact):
    for rank in exact:
        for source in ("memory", "file"):
            whole, part = rank[f"{source}-False"]["wire"], rank[f"{source}-True"]["wire"]
            assert whole > 0.4 * FROZEN
            assert part <= 1.02 / len(exact) * whole
            assert any("gather" in note for note in rank[f"{source}-True"]["notes"])


def test_packed_bytes_are_gathered_packed(exact):
    for rank in exact:
        assert rank["packed"]["wire"] < 0.95 * rank["file-True"]["wire"]
        assert any("gather" in note for note in rank["packed"]["notes"])


def test_units_that_the_host_decodes_are_not_gathered(exact):
    """When they are ready depends on times, so the ranks would fetch in different orders."""
    for rank in exact:
        assert rank["decoded by the host"]["wire"] > 0.9 * rank["file-False"]["wire"]


def test_weights_beyond_the_ram_of_the_machine_are_read_in_each_pass(exact):
    for rank in exact:
        assert rank["partly"]["read"] and not rank["file-False"]["read"]
        share = next(note for note in rank["partly"]["notes"] if "ranks share" in note)
        assert " of 12." in share and not share.startswith("12.")


def test_the_ranks_hold_one_copy_of_the_weights(exact):
    # A page that all ranks have touched counts 1/N for each of them.
    together = sum(rank["memory-False"]["memory"]["shared"] for rank in exact)
    assert 0.9 * FROZEN <= together <= 1.1 * FROZEN + (1 << 20)
    # 64 MiB of weights, less the slots, which are in host memory on the CPU: at most `vram`, 20 MiB
    assert all(rank["freed"]["bytes"] > (32 << 20) for rank in exact)


def test_an_error_of_one_rank_is_an_error_of_all(failing):
    first, second = failing
    assert second["small budget"][0] == "BudgetError"
    assert first["small budget"][0] == "GroupError" and "rank 1" in first["small budget"][1]
    assert second["no file"][0] == "WeightsError"
    assert first["no file"][0] == "GroupError" and "none.safetensors" in first["no file"][1]
    assert second["no device"][0] != "GroupError"
    assert first["no device"][0] == "GroupError" and "failed on rank 1" in first["no device"][1]
    for rank in failing:
        assert rank["other model"][0] == "GroupError"
        assert rank["works after all"][1] == "True"


@pytest.mark.parametrize("case", ["nothing frozen", "codec", "disk", "training", "name", "set_budget"])
def test_what_does_not_go_with_a_group_is_refused_with_a_remedy(failing, case):
    remedies = {
        "nothing frozen": "requires_grad_(False)", "codec": "carom pack", "disk": "weights=", "training": "pipeline",
        "name": "'world'", "set_budget": "close the session",
    }  # fmt: skip
    for rank in failing:
        assert rank[case][0] == "UnsupportedError" and remedies[case] in rank[case][1]


def test_a_rank_that_closes_early_ends_the_others_within_the_time_out(failing):
    assert failing[0]["closed early"][0] == "GroupError"
    assert float(failing[0]["seconds"][1]) < 30


def test_ranks_that_fetch_different_units_get_an_error_instead_of_wrong_results(failing):
    """The parts of different units of the same size would be mixed."""
    for rank in failing:
        assert rank["other paths"][0] == "GroupError" and "CAROM_GATHER=0" in rank["other paths"][1]
        assert "different units" in rank["other paths"][1]


def test_ranks_that_run_different_passes_get_an_error_that_names_validation(failing):
    for rank in failing:
        assert rank["validation"][0] == "GroupError" and "validation on all ranks" in rank["validation"][1]


def test_the_ranks_copy_whole_units_if_one_of_them_says_so(failing):
    for rank in failing:
        assert "CAROM_GATHER is 0" in rank["whole"][1]


def test_an_automatic_ram_budget_allows_to_pin_what_is_shared(failing):
    """The budget is measured while each rank still has a copy of the weights, and too little memory is free."""
    for rank in failing:
        assert int(rank["pinned"][1]) >= FROZEN


def test_ranks_that_seed_otherwise_compute_with_the_values_of_the_first_rank(one_source):
    """Trainable weights, small ones and buffers too: with its own ones a rank would compute with a mixture."""
    for rank in one_source:
        for case in ("memory", "file"):
            assert not rank[case]["other"] and rank[case]["output"]
            assert "others differed between the ranks" in rank[case]["notes"]
            assert rank[case]["strides"] == [1, 16]


def test_a_weight_that_one_rank_writes_after_close_is_its_own(one_source):
    assert all(rank["own after close"] for rank in one_source)


def test_tensors_that_one_rank_lacks_or_that_have_other_strides_are_named_on_every_rank(one_source):
    named = {"more": "3.more", "strides": "3.first.weight", "wrapped": "3.odd"}
    for rank in one_source:
        for case, name in named.items():
            assert rank[case][0] == "GroupError" and name in rank[case][1]


def test_ranks_with_different_files_of_equal_size_and_time_are_refused(tmp_path):
    for kind, text in run_ranks(SCRIPT, tmp_path / "meet", "other_files", str(tmp_path)):
        assert kind == "GroupError" and "weights file" in text


def test_a_group_needs_torch_distributed():
    import carom

    with pytest.raises(carom.UnsupportedError, match="torchrun"):
        carom.stream(torch.nn.Linear(4, 4).requires_grad_(False), device="cpu", group="world")


@pytest.mark.parametrize("mode", ["whole", "gather"])
def test_a_killed_rank_ends_the_other_and_leaves_no_shared_memory(tmp_path, mode):
    for attempt in range(int(os.environ.get("CAROM_TEST_KILLS", "1"))):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        code, said = kill_one(
            SCRIPT, folder, random.Random(attempt).uniform(0, 0.3), "killed", str(folder), mode
        )
        assert code != 0 and "Error" in said
        assert not shared_memory(folder)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_example_is_bit_exact(launcher):
    command = {
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
    }[launcher]
    if launcher == "accelerate":
        pytest.importorskip("accelerate")
    done = subprocess.run(
        [sys.executable, *command, str(ROOT / "docs" / "examples" / "data_parallel.py"), "--width", "128"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout[done.stdout.index("{") :])
    assert said["bit_exact"] is True and len(said["host_memory"]) == 2
