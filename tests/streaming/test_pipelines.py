"""Stages of torch.distributed.pipelining: two processes, several microbatches in flight, LoRA on streamed weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_two_stages_of_a_process_train_bit_for_bit_with_a_session_each(stages, schedule):
    """Zero-bubble schedules compute the gradients of inputs and of weights apart: a checkpoint is recomputed twice."""
    for stage in stages:
        found = [run for run in stage if run["schedule"] == schedule]
        assert len(found) == 2
        for run in found:
            assert run["exact"] and 0 < run["slot_bytes"] <= run["vram_peak_bytes"] <= VRAM, run


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


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "accelerate": (
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no",
    ),
}  # fmt: skip


@pytest.mark.skipif(
    sys.platform == "win32",
    reason="torchrun's rendezvous needs libuv, which not every Windows build of torch has",
)
@pytest.mark.parametrize(
    "launcher, schedule, more",
    [("torchrun", "1f1b", ()), ("torchrun", "gpipe", ("--simulated",)), ("accelerate", "gpipe", ())],
)
def test_the_example_trains_a_model_larger_than_the_memory_of_all_stages(
    root: Path, launcher: str, schedule: str, more: tuple[str, ...]
):
    """``accelerate launch`` needs --multi_gpu to start several processes; they use the CPU where there is no GPU."""
    if launcher == "accelerate":
        pytest.importorskip("accelerate")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        *LAUNCHERS[launcher],
        str(root / "docs" / "examples" / "pipeline.py"),
    ]
    small = ["--width", "64", "--vram", "400KiB", "--blocks", "6", "--steps", "3", "--schedule", schedule]
    done = subprocess.run(
        [*command, *small, *more],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["bit_exact"] is True and found["schedule"] == schedule
    assert (found["device"] == "simulated") == bool(more)
    assert found["model_bytes"] > 1.5 * found["vram_bytes"]
    for stage in found["stages"]:
        assert 0 < stage["vram_peak_bytes"] <= found["vram_bytes"] / 2 < stage["weight_bytes"]
        assert stage["transfers_per_weight"] > 0
