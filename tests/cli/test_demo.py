"""`carom demo`: its model and checkpoint, its verdicts, and that it leaves nothing behind."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from carom.cli import demo, demo_model, demo_trial
from carom.cli import main as cli
from carom.core.common.errors import UnsupportedError
from safetensors import safe_open
from tests_harness import heed_interrupts

CPU = torch.device("cpu")
SMALL = demo_model.config_for(2 << 20, torch.float32)


@pytest.fixture(autouse=True, scope="module")
def few_threads():
    """Models this small gain nothing from threads, and lose seconds where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def nothing(*_args) -> None: ...


def make(folder: Path, config: demo_model.DecoderConfig = SMALL) -> demo_model.Decoder:
    demo_model.write_checkpoint(config, folder, CPU, 7, nothing)
    return demo_model.load_checkpoint(config, folder, nothing)


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# the model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1 << 20, 8 << 20, 352 << 20, 4 << 30, 24 << 30])
def test_the_config_is_the_size_asked_for_or_a_block_more(size, dtype):
    config = demo_model.config_for(size, dtype)
    assert size <= config.weight_bytes < size + config.block_parameters * dtype.itemsize
    assert config.width % config.heads == 0 and config.width // config.heads % 2 == 0
    counted = sum(shape.numel() for _, shape in demo_model.shapes(config)) * dtype.itemsize
    assert counted == config.weight_bytes


def test_a_size_below_any_decoder_is_refused():
    with pytest.raises(ValueError, match="--size 1000 is too small"):
        demo_model.config_for(1000, torch.float32)


def test_the_cpu_demo_has_at_least_300_mb_and_no_block_fills_its_budget():
    config = demo_model.config_for(demo.default_size(CPU), torch.float32)
    assert config.weight_bytes >= 300 * 10**6
    assert config.block_parameters * 4 * 3 < config.weight_bytes // 4


def test_the_checkpoint_is_sharded_safetensors_with_an_index_and_the_same_seed_writes_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(demo_model, "SHARD_BYTES", 1 << 20)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    written: list[int] = []
    demo_model.write_checkpoint(SMALL, one, CPU, 7, written.append)
    demo_model.write_checkpoint(SMALL, two, CPU, 7, nothing)
    assert sum(written) == SMALL.weight_bytes
    index = json.loads((one / "model.safetensors.index.json").read_text("utf-8"))
    assert index["metadata"]["total_size"] == SMALL.weight_bytes
    assert len(set(index["weight_map"].values())) > 1
    for shard in set(index["weight_map"].values()):
        assert (one / shard).read_bytes() == (two / shard).read_bytes()
        with safe_open(one / shard, framework="pt") as file:
            assert set(file.keys()) == {n for n, s in index["weight_map"].items() if s == shard}


def test_the_loaded_model_is_the_checkpoint_and_says_something_finite(tmp_path):
    model = make(tmp_path)
    names = {name for name, _ in model.named_parameters()}
    found = set()
    for shard in tmp_path.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert torch.equal(file.get_tensor(name), model.get_parameter(name))
                found.add(name)
    assert found == names
    logits = model(demo_trial.sample(model, 16, 0))
    assert logits.shape == (1, 16, SMALL.vocabulary)
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_the_decoder_is_causal(tmp_path):
    model = make(tmp_path)
    tokens = demo_trial.sample(model, 16, 0)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % SMALL.vocabulary
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:9].max() < 1e-4 < difference[9:].max()


def test_lora_wraps_every_linear_of_the_blocks_alike_for_a_seed_and_comes_off(tmp_path):
    model = make(tmp_path)
    modules = dict(model.named_modules())
    adapters = demo_model.add_lora(model, 4, 3)
    assert len(adapters) == 2 * 7 * SMALL.layers
    values = {name: p.detach().clone() for name, p in adapters.items()}
    demo_model.remove_lora(model)
    assert dict(model.named_modules()) == modules
    again = demo_model.add_lora(model, 4, 3)
    assert all(torch.equal(values[name], p) for name, p in again.items())


# the experiment


def test_training_moves_every_adapter_and_only_them(tmp_path):
    model = make(tmp_path)
    base = {name: p.clone() for name, p in model.named_parameters()}
    demo_trial.fresh_adapters(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    out = demo_trial.RunResults()
    demo_trial.run_training(model, CPU, 16, 2, out, nothing)
    assert out.adapters.keys() == before.keys()
    assert not any(torch.equal(out.adapters[name], before[name]) for name in before)
    assert len(out.gradients) == 2 * len(before) and len(out.losses) == len(out.step_seconds) == 2
    assert all(g.abs().sum() > 0 for g in out.gradients.values())
    demo_model.remove_lora(model)
    assert all(torch.equal(base[name], p) for name, p in model.named_parameters())


def test_one_flipped_bit_is_a_difference():
    a = torch.tensor([1.0, 0.0, float("nan")])
    assert demo_trial.same_bits(a, a.clone())
    b = a.clone()
    b.view(torch.int32)[0] ^= 1
    assert not demo_trial.same_bits(a, b)
    assert not demo_trial.same_bits(a, torch.tensor([1.0, -0.0, float("nan")]))
    assert not demo_trial.same_bits(a, a.double())
    assert not demo_trial.same_bits(a, a[:2])
    assert demo_trial.same_bits(torch.tensor(1.0), torch.tensor(1.0))


def test_a_missing_tensor_is_a_difference():
    whole = demo_trial.RunResults(outputs={"a": torch.ones(1), "b": torch.ones(1)})
    part = demo_trial.RunResults(outputs={"a": torch.ones(1)})
    assert demo_trial.differences(whole, part)["outputs"] == ["b"]
    assert demo_trial.differences(part, whole)["outputs"] == ["b"]


@pytest.mark.parametrize(("kind", "inside"), [("cpu", 1), ("cuda", 3)])
def test_the_number_of_threads_is_restored(kind, inside):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with contextlib.suppress(KeyboardInterrupt), demo_trial.one_thread(torch.device(kind)):
            assert torch.get_num_threads() == inside
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fails", [False, True])
def test_deterministic_algorithms_are_restored(fails, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def state():
        return (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(), dict(os.environ), torch.get_rng_state().tolist(),
        )  # fmt: skip

    before = state()
    try:
        with demo_trial.deterministic():
            assert (
                torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.flash_sdp_enabled()
            )
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert state() == before


# the command


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """One small run: its folder, its exit code, its JSON."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "checkpoints").mkdir()
    options = ["--size", "6MB", "--json", "--out", str(folder / "out"), "--dir", str(folder / "checkpoints")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main(["demo", "--device", "cpu", *options])
    return folder, code, printed.getvalue()


def test_the_demo_is_bit_exact_within_its_budget_and_prints_one_json_object(small_demo):
    _, code, printed = small_demo
    figures = json.loads(printed)
    assert code == 0
    assert figures["bit_exact"] is True and figures["within_budget"] is True
    assert figures["kind"] == "train"
    assert 0 < figures["vram_peak_bytes"] <= figures["vram_budget_bytes"] <= figures["weights_bytes"] / 4
    assert figures["wire_bytes_per_step"] > 0 and 0 < figures["transfers_per_weight"] <= 2
    assert figures["inference"]["kind"] == "infer"


def test_the_demo_streams_all_that_does_not_fit_and_loses_no_weight(small_demo):
    figures = json.loads(small_demo[2])
    held = figures["resident_bytes"] + figures["streamed_bytes"]
    assert figures["weights_bytes"] <= held < 1.01 * figures["weights_bytes"]  # alignment takes a little
    assert figures["streamed_bytes"] >= figures["weights_bytes"] * 0.75


def test_the_demo_leaves_its_picture_and_trace_and_no_checkpoint(small_demo):
    folder, _, printed = small_demo
    assert left(folder / "checkpoints") == []
    assert left(folder / "out") == ["timeline.png", "trace.json"]
    figures = json.loads(printed)
    assert Path(figures["timeline"]) == folder / "out" / "timeline.png"
    lanes = {e.get("cat") for e in json.loads(Path(figures["trace"]).read_text("utf-8"))["traceEvents"]}
    assert {"compute", "link"} <= lanes


def test_the_table_ends_with_the_verdicts(tmp_path, capsys):
    args = [
        "demo",
        "--device",
        "cpu",
        "--size",
        "2MB",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--keep",
    ]
    assert cli.main([*args, "--dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("bit_exact: true\nwithin_budget: true\n")
    assert "equal, bit for bit" in out and "transfers per weight" in out
    assert err == ""  # no bar where nobody watches
    kept = next(p for p in tmp_path.iterdir() if p.name.startswith("carom-demo-"))
    assert f"checkpoint: {kept}" in out and (kept / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("kind", demo_trial.KINDS)
def test_a_difference_fails_the_demo_and_is_named(tmp_path, capsys, monkeypatch, kind):
    real = demo_trial.differences

    def spoil(one, other):
        tensors = getattr(other, kind)
        name = sorted(tensors)[0]
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] += 1.0
        return real(one, other)

    monkeypatch.setattr(demo_trial, "differences", spoil)
    args = ["demo", "--device", "cpu", "--size", "2MB", "--steps", "1", "--out", str(tmp_path / "out")]
    assert cli.main([*args, "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["bit_exact"] is False and figures[f"{kind}_equal"] is False
    assert list(figures["differences"]) == [kind]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "gpu"], "--device 'gpu' is no device"),
        (["--device", "meta"], "the demo runs on cpu and cuda"),
        (["--steps", "0"], "--steps 0"),
        (["--size", "lots"], "--size='lots' is not a size"),
        (["--size", "10kB"], "too small for a decoder"),
        (["--vram", "200%"], "more than 100 %"),
        (["--dir", "no/such/folder"], "is no folder"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, capsys, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *options]) == 2
    assert words in capsys.readouterr().err
    assert left(tmp_path) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_a_device_that_is_not_there_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--device", "cuda:7"]) == 1
    assert "'cuda:7' cannot be used here" in capsys.readouterr().err


def test_too_little_ram_names_a_size_that_would_do(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "available_memory", lambda: 1 << 30)
    assert cli.main(["demo", "--device", "cpu", "--size", "8GiB"]) == 1
    assert "--size 170MiB" in capsys.readouterr().err
    assert left(tmp_path) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _folder: usage)
    assert cli.main(["demo", "--device", "cpu", "--dir", str(tmp_path)]) == 1
    assert "--dir" in capsys.readouterr().err
    assert left(tmp_path) == []


def test_a_disk_that_fills_up_while_writing_leaves_nothing(capsys, tmp_path, monkeypatch):
    def full(_tensors, path, **_options):
        Path(path).write_bytes(b"half")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(demo_model, "save_file", full)
    args = [
        "demo",
        "--device",
        "cpu",
        "--size",
        "2MB",
        "--dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--keep",
    ]
    assert cli.main(args) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert left(tmp_path) == []


def test_an_output_folder_that_cannot_be_written_is_found_before_the_work(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(demo_model, "write_checkpoint", lambda *_: pytest.fail("worked first"))
    assert (
        cli.main(["demo", "--device", "cpu", "--size", "2MB", "--out", str(tmp_path / "file" / "out")]) == 1
    )
    assert "name another folder" in capsys.readouterr().err


def test_results_of_an_earlier_run_survive_a_failed_one(tmp_path):
    (tmp_path / "timeline.png").write_text("old")
    with pytest.raises(KeyboardInterrupt), demo.output_folder(tmp_path):
        raise KeyboardInterrupt
    assert left(tmp_path) == ["timeline.png"]


@pytest.mark.parametrize(
    "folder", [lambda p: demo.checkpoint_folder(p, keep=False), lambda p: demo.output_folder(p / "out")]
)
def test_an_interrupt_while_a_folder_is_made_leaves_no_folder(tmp_path, monkeypatch, folder):
    made = Path.mkdir

    def interrupted(path, *args, **options):
        made(path, *args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), folder(tmp_path):
        pytest.fail("entered")
    assert left(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_leaves_no_files(tmp_path, root):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "carom").symlink_to(root, target_is_directory=True)
    work = tmp_path / "work"
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "carom", "demo", "--device", "cpu", "--dir", str(work), "--out", str(work / "out")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "path")}, cwd=work, stderr=subprocess.PIPE, text=True,
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(work.glob("carom-demo-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # -SIGINT: so CPython ends a process whose (handled) interrupt passed through exec'd code in an import
    assert process.returncode in (1, -signal.SIGINT), err
    assert "interrupted" in err and "Traceback" not in err
    assert left(work) == []


def test_a_budget_below_any_unit_names_the_least_that_works_and_leaves_nothing(capsys, tmp_path):
    args = ["demo", "--device", "cpu", "--size", "2MB", "--vram", "1kB", "--out", str(tmp_path / "out")]
    assert cli.main([*args, "--dir", str(tmp_path), "--json"]) == 1
    error = json.loads(capsys.readouterr().out)
    assert error["error"] == "BudgetError" and "least budget that works" in error["message"]
    assert left(tmp_path) == []


def test_a_peak_over_the_budget_fails_the_demo(tmp_path, capsys, monkeypatch):
    from carom.core.session.session import Session

    real = Session.report
    monkeypatch.setattr(Session, "report", lambda self: replace(real(self), vram_peak_bytes=1 << 30))
    args = ["demo", "--device", "cpu", "--size", "2MB", "--steps", "1", "--out", str(tmp_path / "out")]
    assert cli.main(args) == 1
    out = capsys.readouterr().out
    assert "OVER THE BUDGET" in out and out.endswith("bit_exact: true\nwithin_budget: false\n")


def test_the_default_size_on_a_gpu_fits_free_memory_of_device_and_host(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (24 << 30, 24 << 30))
    monkeypatch.setattr(demo, "available_memory", lambda: 64 << 30)
    assert demo.default_size(gpu) == 4 << 30
    monkeypatch.setattr(demo, "available_memory", lambda: 8 << 30)
    assert demo.default_size(gpu) == 2 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2 << 30, 24 << 30))
    assert demo.default_size(gpu) == 1 << 30


def test_settle_chooses_a_quarter_of_the_weights():
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    setting = demo.settle(parser.parse_args(["--device", "cpu"]))
    assert setting.vram == setting.config.weight_bytes // 4
    with pytest.raises(UnsupportedError, match="RAM"):
        demo.settle(parser.parse_args(["--device", "cpu", "--size", "64TiB"]))
