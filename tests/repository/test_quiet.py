"""Law 10: draws no random numbers, changes no global torch setting, prints nothing, warns of nothing."""

from __future__ import annotations

import gc
import logging
import random
import threading
import warnings

import carom
import numpy
import pytest
import tests_harness as harness
import tests_models as models
import torch
import torch._dynamo  # noqa: F401 - checkpointing imports it in its first call, and it sets warning filters of its own

on_cpu_and_simulated = pytest.mark.parametrize("device", harness.DEVICES.values(), ids=harness.DEVICES)


def settings() -> dict:
    """Everything global that the engine could be tempted to touch."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "precision": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "overwrite": torch.__future__.get_overwrite_module_params_on_conversion(),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
        "hooks": len(torch.nn.modules.module._global_forward_hooks),
        "filters": list(warnings.filters),
        "log level": (
            logging.getLogger().level,
            logging.getLogger("carom").level,
            logging.getLogger().handlers[:],
        ),
    }


def random_state() -> tuple:
    numbers = numpy.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), numbers[1].tolist(), numbers[2]


@on_cpu_and_simulated
@pytest.mark.parametrize("training", ["resident", "stream"])
def test_a_session_draws_no_random_numbers_and_changes_no_setting(training, device):
    case = models.CASES["stack"]
    model = case.build("non-reentrant")
    if training == "resident":
        models.freeze(model)
    vram = harness.some_vram(model, device, 0.2, training=training)
    before, drawn = settings(), random_state()
    with carom.stream(model, device=device, vram=vram, training=training) as session:
        assert settings() == before
        for seed in range(2):
            harness.loss_of(model(case.inputs(seed))).backward()
            assert settings() == before
        with torch.no_grad():
            model(case.inputs())
        session.set_budget(vram=vram + 4096)
        session.park()
        session.unpark()
        session.report()
        session.report().table()
        session.refresh()
        session.read("stem.weight")
        assert random_state() == drawn
    assert random_state() == drawn
    assert settings() == before


@on_cpu_and_simulated
def test_settings_survive_a_forward_that_raises(device):
    model = models.CASES["stack"].build().requires_grad_(False)
    before = settings()
    with carom.stream(model, device=device, vram=harness.some_vram(model, device, 0.2)):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, models.D + 1, requires_grad=True))
        assert settings() == before
    assert settings() == before


@on_cpu_and_simulated
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_callers_settings_do_not_reach_the_weights(dtype, device):
    """Under the caller's own default dtype, inference mode and deterministic algorithms all is as without."""
    case = models.CASES["stack"]
    model = case.build().requires_grad_(False)
    x = case.inputs()
    with torch.no_grad():
        expected = model(x)
    vram = harness.some_vram(model, device, 0.2)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode(), carom.stream(model, device=device, vram=vram):
            assert torch.equal(model(x), expected)
        with carom.stream(model, device=device, vram=vram):
            model(x.requires_grad_()).sum().backward()
            assert x.grad is not None and torch.isfinite(x.grad).all()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@on_cpu_and_simulated
def test_nothing_is_printed_and_nothing_warned(device, capfd, caplog):
    case = models.CASES["stack"]
    model = case.build("non-reentrant").requires_grad_(False)
    vram = harness.some_vram(model, device, 0.2)
    capfd.readouterr()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        with carom.stream(model, device=device, vram=vram) as session:
            harness.loss_of(model(case.inputs().requires_grad_())).backward()
            with torch.no_grad():
                model(case.inputs())
            session.report()
        gc.collect()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert not caplog.records


def test_the_decision_is_logged_once(caplog):
    model = models.CASES["stack"].build().requires_grad_(False)
    vram = harness.some_vram(model, "cpu", 0.2)
    with caplog.at_level(logging.INFO, "carom"), carom.stream(model, device="cpu", vram=vram):
        model(models.CASES["stack"].inputs())
    assert len(caplog.records) == 1 and "stream through" in caplog.text


def test_no_thread_stays_behind():
    model = models.CASES["stack"].build().requires_grad_(False)
    before = set(threading.enumerate())
    with carom.stream(model, device="cpu", vram=harness.some_vram(model, "cpu", 0.2)):
        model(models.CASES["stack"].inputs())
    assert set(threading.enumerate()) <= before
