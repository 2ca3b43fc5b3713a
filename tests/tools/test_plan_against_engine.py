"""`carom plan` for a model larger than RAM: the bytes on the card, in RAM and on the drive are those of a session."""

from __future__ import annotations

from dataclasses import replace

import carom
import pytest
import torch
from carom.tools.planner import estimate, model_plan, presets, shapes
from carom.tools.planner.estimate import Job, Machine
from carom.tools.planner.placement import Placement
from carom.tools.planner.shapes import Group, Shape
from tests_disk_harness import Drive, save, uniform
from tests_inside import inside

BLOCK = 32768  # bytes of one of the twenty blocks of `uniform`
GB = 10**9


def shape() -> Shape:
    block = Group("block", 20, 2 * 64 * 64, 2 * 64 * 64, stored_bytes=BLOCK, repeated=True)
    return Shape("uniform", "uniform", "", "diffusion", (block,), 64, 1, "")


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.5])
def test_ram_and_drive_hold_what_a_session_holds_there(tmp_path, monkeypatch, share):
    loaded, empty, _, nbytes = uniform(tmp_path)
    path = save(loaded, tmp_path, packed=True)
    drive, ram = Drive(monkeypatch), int(share * nbytes)
    x = torch.ones(1, 64)
    with (
        torch.no_grad(),
        carom.stream(empty, device="cpu", vram=4 * BLOCK, ram=ram, weights=path, granularity="block") as session,
    ):  # fmt: skip
        for _ in range(20):
            empty(x)
        drive.fresh()
        for _ in range(20):
            empty(x)
        read = drive.fresh() / 20
        streamed = sum(unit.wire_bytes for unit in inside(session).streamed)
        report = session.report()
    card = replace(presets.CARDS["h200"])
    placement = Placement((20 - streamed // BLOCK,), nbytes - streamed, 2 * BLOCK, streamed, 0)
    machine = Machine(card, ram_usable=ram, disk=7 * GB)
    kept = estimate.cached_bytes(shape(), machine, Job(), placement)
    assert kept <= min(ram, streamed)
    assert streamed - kept == pytest.approx(read, abs=BLOCK / 4)
    assert report.ram_peak_bytes <= ram
    assert (kept == streamed) == (read == 0)


def test_a_plan_says_which_rate_of_a_drive_suffices():
    found = shapes.find_shape("llama3-70b")
    job = Job(quant=presets.find_quant("nf4"))
    slow = Machine(presets.CARDS["rtx4090"], ram=16 << 30, disk=3.5 * GB)
    plan = model_plan.plan(found, slow, job)
    needed = plan.drive_rate_needed
    assert plan.outcome.step.bound_by == "disk" and needed > slow.disk
    enough = model_plan.plan(found, replace(slow, disk=needed * 1.001), job)
    assert enough.outcome.step.bound_by != "disk"
    assert model_plan.to_dict(plan)["host"]["drive_bytes_per_second_needed"] == needed
