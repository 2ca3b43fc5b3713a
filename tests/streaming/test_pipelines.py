"""Stages of torch.distributed.pipelining: two processes, several microbatches in flight, LoRA on streamed weights."""

from __future__ import annotations

import pytest
import torch
from tests_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

MICROBATCHES, STEPS, VRAM = 4, 4, 24_000  # as in tests/support/distributed/pipelines.py


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict]]:
    """For each of the two stages, the results of its runs; tests/support/distributed/pipelines.py."""
    return run_ranks("pipelines.py", tmp_path_factory.mktemp("ranks") / "rendezvous")


def runs_of(stage: list[dict], schedule: str) -> list[dict]:
    found = [run for run in stage if run["schedule"] == schedule]
    assert len(found) == 6, "three devices, with and without checkpointing"
    return found


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_streamed_stages_train_bit_for_bit_as_resident_ones(stages, schedule):
    for stage in stages:
        for run in runs_of(stage, schedule):
            assert run["exact"] and run["tensors"] >= 120, run
            assert 0 < run["slot_bytes"] <= run["vram_peak_bytes"] <= VRAM, run


def test_a_step_of_gpipe_has_the_forwards_and_backwards_of_all_microbatches(stages):
    for stage in stages:
        for run in runs_of(stage, "ScheduleGPipe"):
            # The two first steps are left out; on the last stage PipelineStage's own trial pass is one more.
            assert STEPS - 2 <= run["steps"] <= STEPS - 1, run
            # Two transfers a microbatch, less what is still in the slots where one pass follows another.
            assert 2 * MICROBATCHES - 1 <= run["transfers_per_weight"] <= 2 * MICROBATCHES, run


def test_a_step_of_1f1b_on_the_last_stage_has_one_microbatch(stages):
    for run in runs_of(stages[-1], "Schedule1F1B"):
        assert STEPS * MICROBATCHES - 2 <= run["steps"] <= STEPS * MICROBATCHES - 1, run
        assert 1 <= run["transfers_per_weight"] <= 2, run
    for run in runs_of(
        stages[0], "Schedule1F1B"
    ):  # its first step of each round has two forwards, its last two backwards
        assert run["steps"] == STEPS * (MICROBATCHES - 1) - 2, run
        assert 1 <= run["transfers_per_weight"] <= 3, run
