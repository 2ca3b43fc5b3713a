"""A job's process under Carom: the YAML's switch, the budget among its models, what the log and the output folder get."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import carom
import pytest
import tests_aitoolkit_stand_in as standin
import torch
from carom.toolkit_ext import options
from carom.toolkit_ext.job import JobOffload
from carom.toolkit_ext.job_reports import JobReports
from carom.toolkit_ext.options import Policy, read
from tests_harness import assert_same
from tests_inside import inside, open_sessions

BUDGET = 400_000  # bytes: about a third of the stand-in's transformer and text encoder


@pytest.fixture(autouse=True)
def toolkit():
    gc.collect()  # sessions of other files' tests
    before = open_sessions()
    with standin.installed():
        yield
    assert all(found in before for found in open_sessions()), "a session was left open"


def process(folder, model, model_class=standin.Attaching, name="job", **train):
    made = standin.BaseSDTrainProcess(model, folder, name, **train)
    made.model_class = model_class
    return made


def run(*args, **kwargs):
    made = process(*args, **kwargs)
    made.run()
    return made


BOUNCING = {"offload": "bouncing", "offload_kwargs": {"vram": BUDGET}}


# -- the switch


@pytest.mark.parametrize("model", [{}, {"offload": "off"}, {"offload": False}, {"layer_offloading": True}])
def test_absent_or_off_is_ai_toolkit_as_it_is(tmp_path, model):
    stock = {key: value for key, value in model.items() if key != "offload"}
    made = run(tmp_path, model)
    joined = list(standin.STOCK)
    undone, config = made.result, vars(made.model_config)
    from carom.toolkit_ext import toolkit_patches

    toolkit_patches.uninstall()
    standin.STOCK.clear()
    without = run(tmp_path, stock)
    assert_same(without.result, undone)
    assert config == vars(without.model_config) and joined == standin.STOCK and not standin.SAID
    assert not (tmp_path / "job").exists()


def test_the_job_is_the_plain_job_but_for_where_its_weights_wait(tmp_path):
    made = run(tmp_path, {**BOUNCING, "layer_offloading": True})
    assert made.model_config.qtype == made.model_config.qtype_te == "qfloat8", "the stock switch would map it"
    assert made.model_config.layer_offloading is False, "it would forbid merging"
    assert made.sd.model_config.layer_offloading is True, "loaders ask it before they attach"
    assert not standin.STOCK


@pytest.mark.parametrize(
    "model", [{"offload": "bounce"}, {"offload": "bouncing", "offload_kwargs": {"vrm": 1}}]
)
def test_a_bad_value_stops_the_job_before_anything_loads(tmp_path, model):
    with pytest.raises(
        carom.UnsupportedError, match="bouncing, aimdo, auto, off|vram, ram, disk, codec, granularity"
    ):
        process(tmp_path, model)


def test_a_missing_seam_is_noticed_before_anything_is_changed(monkeypatch):
    from carom.toolkit_ext import install, toolkit_patches

    toolkit_patches.uninstall()
    before = {name: vars(standin.BaseSDTrainProcess)[name] for name in ("run", "hook_before_train_loop")}
    monkeypatch.delattr(standin.BaseSDTrainProcess, "sample")
    with pytest.raises(carom.UnsupportedError, match=r"BaseSDTrainProcess\.sample"):
        install()
    assert {name: vars(standin.BaseSDTrainProcess)[name] for name in before} == before


def test_installing_twice_wraps_once():
    from carom.toolkit_ext import install

    before = standin.ModelConfig.__init__
    install()
    assert standin.ModelConfig.__init__ is before


# -- models that never attach, and several processes


def test_a_model_that_never_attaches_loads_on_the_cpu_and_streams(tmp_path):
    class Elsewhere(standin.Legacy):
        def load_model(self):
            self.moved_to = [self.device_torch, self.te_device_torch, self.quantize_device]
            super().load_model()

    plain = run(tmp_path, {}, standin.Legacy)
    made = process(tmp_path, BOUNCING, Elsewhere)
    made.device_torch = torch.device("cpu", 0)  # tells apart what the loader saw from what the process has
    made.run()
    assert made.sd.moved_to == [torch.device("cpu")] * 3
    assert made.sd.device_torch == torch.device("cpu", 0) and "load_model" not in vars(made.sd)
    assert_same(plain.result, made.result)
    assert sum("stream through" in line for line in standin.SAID) == 2


def test_a_host_that_forbids_moving_an_encoder_is_obeyed(tmp_path):
    class Fixed(standin.Legacy):
        def make(self):
            super().make()
            self.text_encoder.to = lambda *args, **kwargs: None

    made = run(tmp_path, BOUNCING, Fixed)
    assert not hasattr(made.sd.text_encoder, "_memory_manager")
    assert not any("TextEncoder" in line for line in standin.SAID)


def test_each_process_of_a_job_has_its_own_policy(tmp_path):
    first = process(tmp_path, BOUNCING, name="one")
    second = process(tmp_path, {"layer_offloading": True}, name="two")
    third = process(tmp_path, {**BOUNCING, "offload_kwargs": {"vram": "1GiB"}}, name="three")
    for each in (first, second, third):
        each.run()
    assert standin.STOCK == ["attach Transformer 1.0", "attach TextEncoder 1.0"], "of the second only"
    assert any("stay on" in line and "stream through" not in line for line in standin.SAID), "the third fits"
    assert_same(first.result, second.result)
    assert_same(first.result, third.result)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("name", ["cuda:1", "cuda"])
def test_models_stream_to_the_device_of_their_job(monkeypatch, name):
    """A second GPU is asked for as such: nothing goes to the first, which stays the current one."""
    from carom.toolkit_ext import devices

    asked = []
    monkeypatch.setattr(devices, "engine_device", lambda device: asked.append(device) or torch.device("cpu"))
    job = JobOffload(Policy("bouncing", BUDGET), name, standin.SAID.append)
    try:
        job.attach(model := standin.Transformer().requires_grad_(False))
        (attachment,) = job.attachments
        attachment.activate()
        assert asked and set(asked) == {torch.device(name)} == {attachment.process_device}
        marks = {part.__dict__.get("_memory_management_device") for part in model.modules()} - {None}
        assert marks == {torch.device(name)}
    finally:
        job.close()


def test_an_error_in_a_job_closes_its_sessions_and_leaves_the_report(tmp_path):
    class Failing(standin.Attaching):
        count = 0

        def predict(self, x, text):
            self.count += 1
            if self.count == 3:
                raise ValueError("from the job")
            return super().predict(x, text)

    with pytest.raises(ValueError, match="from the job"):
        run(tmp_path, BOUNCING, Failing)
    assert not open_sessions()
    assert (tmp_path / "job" / "carom" / "report.json").exists()
    assert_same(run(tmp_path, {}).result, run(tmp_path, BOUNCING).result)


# -- the budget


def budgets():
    return {type(s.module).__name__: inside(s).capacity for s in open_sessions()}


def test_the_models_of_a_job_share_one_budget_and_an_unloaded_ones_part_returns(tmp_path, monkeypatch):
    seen = []
    real = standin.BaseSDTrainProcess.one

    def one(self, index):
        real(self, index)
        seen.append(budgets())

    monkeypatch.setattr(standin.BaseSDTrainProcess, "one", one)
    run(tmp_path, BOUNCING)
    assert seen[0].keys() == {"Transformer", "TextEncoder"} and sum(seen[0].values()) <= BUDGET
    assert all(share > 0 for share in seen[0].values())
    seen.clear()
    run(tmp_path, BOUNCING, cache_text=True)
    assert seen[0] == {"Transformer": BUDGET}


def test_what_an_unloaded_model_held_goes_to_one_that_streams_already(tmp_path):
    made = process(tmp_path, BOUNCING)
    grown = {}

    def unload(step=None):
        made.sd.encode(standin._tokens(0))
        grown["before"] = budgets()["Transformer"]
        standin.MemoryManager.free(made.sd.text_encoder[0])
        grown["after"] = budgets()["Transformer"]
        raise KeyboardInterrupt

    # Its graph is dropped before: weights that a backward still wants stay where they are.
    made.one = lambda index: made.sd.predict(standin._noise(0), standin._noise(1)) is None or unload()
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert 0 < grown["before"] < grown["after"] == BUDGET


def job_with(tmp_path, monkeypatch, **options):
    """The ranks of a job's models in a step, and the bytes that they hold then."""
    ranks, held = {}, {}
    real = standin.BaseSDTrainProcess.one

    def one(self, index):
        real(self, index)
        for session in open_sessions():
            name = type(session.module).__name__
            ranks[name], held[name] = inside(session).ledger.priority, inside(session).held_bytes

    with monkeypatch.context() as patch:
        patch.setattr(standin.BaseSDTrainProcess, "one", one)
        made = run(tmp_path, {"offload": "bouncing", "offload_kwargs": {"vram": BUDGET, **options}})
    return ranks, held, made.result


def test_priority_ranks_the_transformer_that_trains_and_no_other_model(tmp_path, monkeypatch):
    ranks, held, result = {}, {}, {}
    for priority in options.PRIORITIES:
        ranks[priority], held[priority], result[priority] = job_with(tmp_path, monkeypatch, priority=priority)
    assert {name: found["Transformer"] for name, found in ranks.items()} == {
        "normal": 0,
        "high": 1,
        "low": -1,
    }
    assert {found["TextEncoder"] for found in ranks.values()} == {0}
    assert held["low"]["Transformer"] < held["normal"]["Transformer"] <= held["high"]["Transformer"]
    assert all(sum(found.values()) <= BUDGET for found in held.values())
    for priority in ("high", "low"):
        assert_same(result["normal"], result[priority])


def test_a_budget_too_small_for_all_names_the_least_that_works(tmp_path):
    with pytest.raises(carom.BudgetError, match="models together") as refused:
        run(tmp_path, {"offload": "bouncing", "offload_kwargs": {"vram": 70_000}})
    least = refused.value.least_bytes
    assert least is not None
    assert_same(
        run(tmp_path, {}).result,
        run(tmp_path, {"offload": "bouncing", "offload_kwargs": {"vram": least}}).result,
    )


class Dual(torch.nn.Module):
    """As Wan 2.2's root: one of two transformers runs, by the noise, and a `.to` of the whole is nobody's."""

    def __init__(self):
        super().__init__()
        self.high, self.low = standin.Transformer(depth=8), standin.Transformer(depth=8)

    device = property(lambda self: self.high.device)

    def to(self, *args, **kwargs):
        return self

    def forward(self, x, text, high=False):
        return (self.high if high else self.low)(x, text)


class Noises(standin.Attaching):
    def load_model(self):
        self.make()
        self.unet, self.text_encoder = Dual(), [self.text_encoder]
        for part in (self.unet.high, self.unet.low):
            standin.attaching.MemoryManager.attach(part, self.device_torch)


def test_both_transformers_of_a_dual_model_are_laid_out_for_backwards(tmp_path):
    made = process(tmp_path, BOUNCING, Noises)
    found = {}

    def one(index):
        made.sd.unet(standin._noise(0), standin._noise(1))
        made.sd.unet(standin._noise(0), standin._noise(1), high=True)
        found.update({id(s.module): inside(s).manager.planner.backward for s in open_sessions()})
        raise KeyboardInterrupt

    made.one = one
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert [found[id(part)] for part in (made.sd.unet.low, made.sd.unet.high)] == [True, True]


def test_a_transformer_that_does_not_train_leaves_its_part_to_the_one_that_does(tmp_path, monkeypatch):
    monkeypatch.setattr(carom.core.session.policies.device_memory, "_SECONDS", 0.0)
    made = process(tmp_path, BOUNCING, Noises)
    held = {}

    def one(index):
        dual = made.sd.unet
        x, text = standin._noise(0), standin._noise(1)
        runs = {"alone": (False,) * 40, "both": (False, True) * 40, "again alone": (False,) * 60}
        for name, noises in runs.items():
            for high in noises:
                with torch.no_grad():
                    dual(x, text, high=high)
                parts = {id(s.module): inside(s).held_bytes for s in open_sessions()}
                assert sum(parts.values()) <= BUDGET
            held[name] = parts[id(dual.low)], parts.get(id(dual.high), 0)
        raise KeyboardInterrupt

    made.one = one
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert held["alone"][0] > 0.65 * BUDGET and not held["alone"][1]
    assert 0.25 * BUDGET < held["both"][0] < 0.6 * BUDGET and 0.25 * BUDGET < held["both"][1] < 0.6 * BUDGET
    assert held["again alone"][0] > 0.6 * BUDGET, "after a sample with both"


def test_stock_percents_keep_their_meaning(tmp_path, monkeypatch):
    kept = {}
    real = standin.BaseSDTrainProcess.one

    def one(self, index):
        real(self, index)
        for session in open_sessions():
            report = session.report()
            kept[type(session.module).__name__] = report.streamed_bytes

    monkeypatch.setattr(standin.BaseSDTrainProcess, "one", one)
    key = "layer_offloading_transformer_percent"
    whole = sum(p.nbytes for p in standin.Transformer(depth=12).parameters())

    class Deep(standin.Attaching):
        def make(self):
            super().make()
            self.unet = standin.Transformer(depth=12)

    streamed = {}
    for percent in (1.0, 0.5, 0.0):
        kept.clear()
        run(tmp_path, {"offload": "bouncing", "layer_offloading": True, key: percent}, Deep)
        streamed[percent] = kept.get("Transformer")
    assert streamed[1.0] >= 0.75 * whole and 0.25 * whole <= streamed[0.5] <= 0.6 * whole
    assert streamed[0.0] is None, "zero: not offloaded at all"


# -- the log and the output folder


def test_the_log_tells_once_at_the_start_and_at_each_sample(tmp_path):
    run(tmp_path, {**BOUNCING, "layer_offloading": False}, sample_every=1)
    assert all(line.startswith("carom: ") for line in standin.SAID)
    assert not any("layer_offloading" in line for line in standin.SAID), (
        "ai-toolkit's UI writes it into every job"
    )
    assert standin.SAID[-1].endswith(f"report, timelines and traces: {tmp_path / 'job' / 'carom'}")
    starts = [line for line in standin.SAID if "stream through" in line]
    samples = [line for line in standin.SAID if line.startswith("carom: step ")]
    assert len(starts) == 2 and len(samples) == 4, standin.SAID
    for word in ("Transformer: ", "TextEncoder: ", "resident", "streamed", "waits", "per step"):
        assert word in samples[-1], samples[-1]


def test_report_timeline_and_trace_go_to_the_jobs_folder(tmp_path):
    run(tmp_path, BOUNCING, sample_every=1)
    folder = tmp_path / "job" / "carom"
    names = {path.name for path in folder.iterdir()}
    pictures = {
        f"{kind}-{model}.{end}"
        for model in ("Transformer", "TextEncoder")
        for kind, end in (("timeline", "png"), ("trace", "json"))
    }
    assert names == {"report.json", "report.txt", *pictures}
    report = json.loads((folder / "report.json").read_text())
    transformer = report["models"]["Transformer"]
    assert transformer["vram_peak_bytes"] <= transformer["vram_budget_bytes"] <= BUDGET
    assert transformer["raw_bytes_per_step"] > 0 and "budget" in (folder / "report.txt").read_text()
    # ... of the steps that train, though the job's last ones are those of a sample
    assert transformer["kind"] == "train" and report["models"]["TextEncoder"]["kind"] == "infer"


def test_no_timeline_is_drawn_of_models_that_stream_nothing(tmp_path):
    run(tmp_path, {"offload": "bouncing", "offload_kwargs": {"vram": "1GiB"}})
    folder = tmp_path / "job" / "carom"
    assert {path.name for path in folder.iterdir()} == {"report.json", "report.txt"}
    assert standin.SAID[-1] == f"carom: report: {folder}"


@pytest.mark.parametrize("name", ["c", "carom", "offload", "o"])
def test_no_report_looks_like_a_checkpoint_of_its_job(tmp_path, name):
    run(tmp_path, BOUNCING, name=name)
    made = list((tmp_path / name).iterdir())
    assert made and not list(Path(tmp_path / name).glob(f"{name}*"))


def test_a_report_that_cannot_be_written_stops_no_job(tmp_path):
    (tmp_path / "job").write_text("in the way")
    run(tmp_path, BOUNCING)
    assert any("report could not be written" in line for line in standin.SAID)


def test_a_kept_report_has_the_peaks_of_every_session_that_the_model_had():
    with carom.stream(torch.nn.Linear(8, 8), device="cpu", vram=4096) as session:
        plain = session.report()
    trained = dataclasses.replace(plain, kind="train", steps=9, vram_peak_bytes=70, ram_peak_bytes=5)
    sampled = dataclasses.replace(plain, kind="infer", steps=2, vram_peak_bytes=50, ram_peak_bytes=8)
    reports = JobReports(Policy("bouncing"), [], lambda line: None)
    for report in (trained, sampled):  # of the session before a pause, and of the one after it
        again: Any = SimpleNamespace(name="model", session=SimpleNamespace(report=lambda one=report: one))
        reports.keep(again)
    kept = reports.of("model")
    assert (kept.kind, kept.steps, kept.vram_peak_bytes, kept.ram_peak_bytes) == ("train", 9, 70, 8)


def test_the_jobs_budget_is_of_what_was_free_before_the_first_model_came(monkeypatch):
    """A model that is attached late shares all of the budget, not a part of what the first one left."""
    device = carom.SimulatedDevice(memory_bytes=3 << 29)
    monkeypatch.setattr("carom.toolkit_ext.devices.engine_device", lambda _: device)
    whole = int(0.7 * device.memory_bytes) - (1 << 30)
    said: list[str] = []
    job = JobOffload(read({"offload": "bouncing"}), "cpu", said.append)
    first, second = (torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(n))) for n in (10, 5))
    for model in (first, second):
        model.requires_grad_(False)
        job.attach(model)
        for _ in range(8):
            with torch.no_grad():
                model(torch.zeros(1, 1024))
    shared = job.attachments[0].given
    job.attachments[1].session.park()
    said.clear()
    job.reports.progress(3)
    job.close()
    assert isinstance(shared, carom.SharedBudget) and whole - 4096 <= shared.nbytes <= whole
    assert said[0].endswith("parked, all of it waits on the host")


class Models:
    """A job with two models on a device that holds both, and what they took of it."""

    def __init__(self, monkeypatch, vram):
        self.device = carom.SimulatedDevice(memory_bytes=3 << 29)
        monkeypatch.setattr("carom.toolkit_ext.devices.engine_device", lambda _: self.device)
        monkeypatch.setattr("carom.core.session.policies.device_memory._SECONDS", 0.0)
        options = {"offload": "bouncing", "offload_kwargs": {"vram": vram}}
        self.job = JobOffload(read(options), "cpu", lambda line: None)
        self.models = [
            torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(count))).requires_grad_(False)
            for count in (12, 8)
        ]
        for model in self.models:
            self.job.attach(model)

    def turns(self, rounds):
        x = torch.zeros(1, 1024)
        for _ in range(rounds):
            for attachment in self.job.attachments:
                with torch.no_grad():
                    attachment.module(x)

    def held(self):
        return [inside(attachment.session).held_bytes for attachment in self.job.attachments]


def test_models_that_share_auto_take_what_steps_leave_and_a_size_that_was_asked_for_stays(monkeypatch):
    whole = [4 * 1024 * 1025 * count for count in (12, 8)]
    for vram, grows in (("auto", True), (f"{50 << 20}", False)):
        made = Models(monkeypatch, vram)
        made.turns(24)
        shared = made.job.attachments[0].given
        assert isinstance(shared, carom.SharedBudget) and shared.grows is grows
        if grows:
            assert shared.grown > 0 and all(h >= w for h, w in zip(made.held(), whole, strict=True))
        else:
            assert sum(made.held()) <= shared.nbytes == 50 << 20
        made.job.close()


def test_who_is_left_of_two_models_follows_the_device_alone_and_shares_again_with_the_next(monkeypatch):
    made = Models(monkeypatch, "auto")
    made.turns(16)
    first, second = made.job.attachments
    shared = first.given
    made.job.release(made.models[1])
    made.turns(8)
    assert (
        first.given == "auto"
        and inside(first.session).ledger.shared is None
        and not list(shared.mates.members)
    )
    made.job.attach(made.models[1])
    made.turns(1)
    assert made.job.attachments[0].given is made.job.attachments[1].given is shared
    assert sum(made.held()) <= shared.nbytes
    made.turns(24)
    assert shared.grown > 0
    made.job.close()


def test_a_model_that_comes_after_a_step_ran_out_of_memory_is_not_refused(monkeypatch):
    """What was given up is out of the sum, and comes back where nobody has seen that it must not."""
    made = Models(monkeypatch, "auto")
    made.turns(4)
    shared = made.job.attachments[0].given
    for attachment in made.job.attachments:
        session = attachment.session
        inside(session).failed = True
        inside(session).governor.short = lambda memory, held, least, training: least
        made.turns(1)
    assert shared.nbytes < shared.first
    made.job.attach(torch.nn.Sequential(torch.nn.Linear(1024, 1024)).requires_grad_(False))
    made.turns(1)
    assert sum(made.held()) <= shared.nbytes
    made.job.close()
