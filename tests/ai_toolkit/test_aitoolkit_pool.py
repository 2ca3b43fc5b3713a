"""ai-toolkit's `offload: aimdo` and the steps down of `auto`, over stand-ins of ai-toolkit and of comfy-aimdo."""

from __future__ import annotations

import gc
import sys

import carom
import pytest
import tests_aimdo_stand_in as aimdo
import tests_aitoolkit_stand_in as standin
import torch
from carom.toolkit_ext import choose_mode, device_trial
from carom.toolkit_ext.options import Policy
from tests_harness import assert_same
from tests_pairwise import each

CPU = torch.device("cpu")
VRAM = 400_000  # bytes: about a third of the stand-in's models
TORCH = "bouncing with torch's allocator takes its place"
STOCK = "ai-toolkit's own layer offloading does it"


@pytest.fixture(autouse=True)
def toolkit():
    with standin.installed():
        yield
    gc.collect()


@pytest.fixture
def card(monkeypatch):
    """A simulated card on which jobs compute, with a stand-in for comfy-aimdo."""

    def make(memory=1 << 24, **options):
        device = carom.SimulatedDevice(seed=3, timing="random", memory_bytes=memory)
        driver = aimdo.install(monkeypatch, aimdo.Driver(device, **options))
        monkeypatch.setattr("carom.toolkit_ext.devices.engine_device", lambda _: device)
        return driver

    yield make
    for name in ("comfy_aimdo", "comfy_aimdo.control", "comfy_aimdo.model_vbar"):
        sys.modules.pop(name, None)


def job(folder, model, model_class=standin.Attaching):
    made = standin.BaseSDTrainProcess(model, folder)
    made.model_class = model_class
    made.run()
    return made


def said():
    return [line for line in standin.SAID if line.startswith("carom: offload:")]


def bounced(tmp_path, mode, **options):
    """Plain and with ``mode``, equal bit for bit; returns the second."""
    plain = job(tmp_path, {})
    standin.SAID.clear()
    made = job(tmp_path, {"offload": mode, "offload_kwargs": {"vram": VRAM, **options}})
    assert_same(plain.result, made.result)
    assert any("stream through" in line for line in standin.SAID), standin.SAID
    return made


@pytest.mark.parametrize("mode", ["aimdo", "auto"])
def test_where_the_pool_works_weights_live_in_it_and_nothing_has_to_be_explained(card, tmp_path, mode):
    driver = card()
    bounced(tmp_path, mode)
    assert not said() and driver.calls.count("init") == 1
    starts = [line for line in standin.SAID if "stay on" in line]
    assert starts and all("in comfy-aimdo's pool" in line for line in starts), starts


def test_weights_in_the_pool_give_way_when_the_job_needs_memory_and_the_lora_is_the_same(card, tmp_path):
    driver = card()
    lost, steps = [], []

    def one(self, index):
        steps.append(index)
        if len(steps) == 2:
            before = driver.pages.used
            driver.pressure(before * aimdo.PAGE // 2)
            lost.append(before - driver.pages.used)
        return step(self, index)

    plain = job(tmp_path, {})
    step = standin.BaseSDTrainProcess.one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standin.BaseSDTrainProcess, "one", one)
        made = job(tmp_path, {"offload": "aimdo", "offload_kwargs": {"vram": 3 * VRAM}})
    assert len(steps) > 2 and lost[0] > 0, "nothing gave way"
    assert_same(plain.result, made.result)


@pytest.mark.parametrize("priority", ["high", "low"])
def test_a_priority_changes_nothing_of_what_a_job_in_the_pool_computes(card, tmp_path, priority):
    card()
    bounced(tmp_path, "aimdo", priority=priority)


def test_bouncing_leaves_the_pool_alone(card, tmp_path):
    driver = card()
    bounced(tmp_path, "bouncing")
    assert not driver.calls and not any("comfy-aimdo" in line for line in standin.SAID)


BROKEN = {
    "init": "did not load", "hooks": "refused the device", "old": "has no get_devctx", "narrow": "set_watermark",
}  # fmt: skip


@each(mode=["aimdo", "auto"], broken=list(BROKEN))
def test_a_pool_that_does_not_work_is_said_in_one_line_and_bounces(card, tmp_path, mode, broken):
    card(broken=broken)
    why = BROKEN[broken]
    bounced(tmp_path, mode)
    (line,) = said()
    assert line.startswith(f"carom: offload: {mode}: no aimdo pool here (") and why in line and TORCH in line


@pytest.mark.parametrize("mode", ["aimdo", "auto"])
def test_without_comfy_aimdo_or_on_the_cpu_it_is_one_line_too(tmp_path, mode):
    bounced(tmp_path, mode)
    (line,) = said()
    assert "is neither a CUDA nor a ROCm device" in line and TORCH in line


def test_packed_weights_are_not_for_the_pool_and_the_job_says_so(card, tmp_path):
    driver = card()
    bounced(tmp_path, "aimdo", codec="lossless")
    (line,) = said()
    assert "codec: lossless unpacks into torch's memory" in line and not driver.calls


def test_without_streams_auto_keeps_the_weights_in_the_pool_alone(card, tmp_path, monkeypatch):
    card()

    def no_streams(device, **_):
        raise RuntimeError("no streams here")

    in_pool = device_trial.works_in_pool

    def resident_only(device, *, streaming=True):
        return no_streams(device) if streaming else in_pool(device, streaming=False)

    monkeypatch.setattr(device_trial, "works", no_streams)
    monkeypatch.setattr(device_trial, "works_in_pool", resident_only)
    plain = job(tmp_path, {})
    made = job(tmp_path, {"offload": "auto"})
    assert_same(plain.result, made.result)
    first, second = said()
    assert "no aimdo pool here (no streams here)" in first
    assert "bouncing does not work here (no streams here); the aimdo pool alone keeps the weights" in second
    starts = [line for line in standin.SAID if "stay on" in line]
    assert starts and all("all " in line and "in comfy-aimdo's pool" in line for line in starts), starts


def test_where_nothing_works_auto_is_the_stock_manager_with_what_its_switch_does(tmp_path, monkeypatch):
    def broken(device, **_):
        raise RuntimeError("no streams here")

    monkeypatch.setattr(device_trial, "works", broken)
    made = job(tmp_path, {"offload": "auto"})
    assert sum(STOCK in line for line in standin.SAID) == 1 and len(said()) == 2
    assert made.model_config.layer_offloading and made.model_config.qtype == "float8"
    assert standin.STOCK == ["attach Transformer 1.0", "attach TextEncoder 1.0"]


def test_bouncing_tries_nothing_out(monkeypatch):
    def never(device, **_):
        raise AssertionError

    monkeypatch.setattr(device_trial, "works", never)
    monkeypatch.setattr(device_trial, "works_in_pool", never)
    assert choose_mode.choose(Policy("bouncing"), CPU) == choose_mode.Choice("torch")


@pytest.mark.parametrize("pool", [False, True])
def test_the_trials_stream_and_train_for_real_and_draw_no_random_number(card, pool):
    driver = card()
    state = torch.get_rng_state()
    if pool:
        device_trial.works_in_pool(CPU)
        assert driver.calls.count("fault") > 2 * 3 * 8, "units at home are faulted in at every use"
        device_trial.works_in_pool(CPU, streaming=False)
    else:
        device_trial.works(CPU)
        assert not driver.calls
    assert torch.equal(torch.get_rng_state(), state)
