"""What users of ai-toolkit run into: models that its loaders move whole, budgets that cannot work, settings without effect."""

from __future__ import annotations

import sys
import types
from typing import Any

import carom
import pytest
import tests_aitoolkit_stand_in as standin
import torch
from carom.toolkit_ext import loading, toolkit_patches
from carom.toolkit_ext.job import JobOffload
from carom.toolkit_ext.options import Policy, read
from torch import nn

BOUNCING = {"offload": "bouncing", "offload_kwargs": {"vram": 400_000}}
META = torch.device(
    "meta"
)  # stands for a device that no whole model may be moved to: what went there has lost its values


@pytest.fixture(autouse=True)
def toolkit():
    with standin.installed():
        yield


def run(folder, model, model_class=standin.Attaching, **train):
    made = standin.BaseSDTrainProcess(model, folder, **train)
    made.model_class = model_class
    made.run()
    return made


def offload(policy: Policy | None = None) -> JobOffload:
    return JobOffload(policy or Policy("bouncing"), META, standin.SAID.append)


def devices(module: nn.Module) -> set[str]:
    return {p.device.type for p in module.parameters()}


class Autoencoder(nn.Module):
    """Not streamed, and with blocks like those of what is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


class MovesFirst(standin.Attaching):
    """As Wan 2.1, 2.2 and Flux.2: whole models go to the device before they are attached, and again at the end."""

    def __init__(self, **config: Any) -> None:
        super().__init__(META, standin.ModelConfig(**config))

    def load_model(self) -> None:
        self.make()
        self.vae = Autoencoder().to(META)
        self.unet.to(META)
        block = self.unet.blocks[0]
        self.quantised_on = devices(block.to(META))  # one block at a time is what a card has room for
        self.unet.blocks[0] = standin.Transformer().blocks[0]
        self.text_encoder.to(META)
        self.unet = self.unet.to(META)
        self.text_encoder.to(META)


MovesFirst.__module__ = "standin_attaching"


# -- whole models


def test_no_model_goes_to_the_device_whole_while_a_class_loads():
    sd, job = MovesFirst(layer_offloading=True), offload()
    job.load(sd, sd.load_model)
    assert devices(sd.unet) == devices(sd.text_encoder) == {"cpu"}
    assert sd.quantised_on == {"meta"}, "blocks may pass"
    assert devices(sd.vae) == {"meta"}, "what nobody streams is where its loader put it, after all"
    job.close()


def test_a_model_that_has_no_role_streams_where_its_loader_moved_it():
    """Wan 2.1's image encoder: it is neither transformer nor text encoder nor VAE."""

    class Sees(MovesFirst):
        def load_model(self) -> None:
            super().load_model()
            self.image_encoder = standin.Transformer().to(META)

    Sees.__module__ = MovesFirst.__module__
    sd, job = Sees(), offload()
    job.load(sd, sd.load_model)
    assert devices(sd.image_encoder) == {"cpu"} and job.of(sd.image_encoder) is not None
    assert devices(sd.vae) == {"meta"}
    job.close()
    sd, job = Sees(), offload(Policy("bouncing", text_encoder_percent=0.0))
    job.load(sd, sd.load_model)
    assert devices(sd.image_encoder) == {"meta"}
    job.close()


def test_a_model_left_alone_goes_where_its_loader_put_it():
    sd, job = MovesFirst(), offload(Policy("bouncing", text_encoder_percent=0.0))
    job.load(sd, sd.load_model)
    assert devices(sd.unet) == {"cpu"} and devices(sd.text_encoder) == {"meta"}
    job.close()


def test_the_guard_is_gone_when_a_loader_fails():
    before = nn.Module._apply
    with pytest.raises(RuntimeError), loading.models_stay_on_the_host(META):
        assert nn.Module._apply is not before
        raise RuntimeError
    assert nn.Module._apply is before


def test_a_class_that_makes_its_values_on_the_device_makes_them_on_the_host():
    seen = []

    class Ideogram4Model(MovesFirst):
        def load_model(self) -> None:
            seen.append(self.model_config.low_vram)
            super().load_model()

    Ideogram4Model.__module__ = "standin_attaching"
    sd, job = Ideogram4Model(), offload()
    job.load(sd, sd.load_model)
    assert seen == [True] and sd.model_config.low_vram is False
    job.close()


def test_classes_that_never_ask_for_offloading_are_not_told_of_it(tmp_path):
    """ACE-Step 1.5 raises where it is on."""

    class Refuses(standin.Legacy):
        def load_model(self) -> None:
            if self.model_config.layer_offloading:
                raise NotImplementedError
            super().load_model()

    Refuses.__module__ = "standin_legacy"
    assert run(tmp_path, BOUNCING, Refuses).sd.model_config.layer_offloading is False
    assert run(tmp_path, BOUNCING).sd.model_config.layer_offloading is True


# -- budgets and settings


@pytest.mark.parametrize("steps", [{}, {"sample_every": 1}])
def test_a_budget_that_cannot_work_ends_the_job_before_the_first_step(tmp_path, steps):
    small = {"offload": "bouncing", "offload_kwargs": {"vram": 70_000}}
    made, ran = standin.BaseSDTrainProcess(small, tmp_path, **steps), []
    made.one = made.sample = ran.append
    with pytest.raises(carom.BudgetError) as refused:
        made.run()
    assert refused.value.least_bytes > 100_000 and not ran, "the models' least, not a small probe's"


def test_one_model_alone_is_named(tmp_path):
    class Alone(standin.Legacy):
        def load_model(self) -> None:
            self.unet, self.text_encoder = standin.Transformer(), None

    with pytest.raises(carom.BudgetError, match="too small for Transformer "):
        run(tmp_path, {"offload": "bouncing", "offload_kwargs": {"vram": "10KiB"}}, Alone)


def test_optimizers_that_step_on_the_gpu_only_are_refused_before_the_first_step(tmp_path, monkeypatch):
    """ai-toolkit's adafactor and others round bf16 weights at random, and assert that these are not on the CPU."""
    module = types.ModuleType("toolkit_adafactor")
    module.copy_stochastic = None
    Adafactor = type("Adafactor", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(torch.bfloat16)
    job = JobOffload(Policy("bouncing", 60_000), "cpu", standin.SAID.append)
    job.attach(model)
    job.ready()
    assert job.attachments[0].streams_what_trains
    job.check(torch.optim.SGD(model.parameters()), False)
    for optimizer, averages in (
        (Adafactor(), False),
        (types.SimpleNamespace(optimizer=Adafactor()), False),
        (None, True),
    ):
        with pytest.raises(carom.UnsupportedError, match="stepped on the CPU"):
            job.check(optimizer, averages)
    model.requires_grad_(False)
    job.check(Adafactor(), True)
    job.close()


def test_offload_in_a_process_that_does_not_train_is_refused():
    class BaseProcess:
        pass

    class Generator(BaseProcess):
        def __init__(self, model: dict) -> None:
            self.model_config = standin.ModelConfig(**model)

    Generator({"name_or_path": "x"})
    with pytest.raises(carom.UnsupportedError, match="Generator does not"):
        Generator(BOUNCING)


# -- what is told


def test_without_samples_what_would_help_is_said_at_the_end(tmp_path):
    run(tmp_path, BOUNCING)
    assert any("per step" in line for line in standin.SAID)
    assert standin.SAID[-1].endswith(str(tmp_path / "job" / "carom"))


def test_what_carom_refuses_is_one_line_and_other_errors_are_as_before(capsys):
    before = []
    toolkit_patches.uninstall()
    own, sys.excepthook = sys.excepthook, lambda *error: before.append(error[0])
    try:
        toolkit_patches.install()
        try:
            read({"offload": "bouncing", "offload_kwargs": {"vram": 12}})
        except carom.UnsupportedError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        assert capsys.readouterr().err == (
            "carom: model.offload_kwargs.vram: 12 means 12 bytes; did you mean 12GiB?\n"
        )
        sys.excepthook(ValueError, ValueError("of others"), None)
        assert before == [ValueError]
        toolkit_patches.uninstall()
        sys.excepthook(ValueError, ValueError("of others"), None)
        assert before == [ValueError] * 2
    finally:
        sys.excepthook = own
