"""What the YAML may say to Carom, how one budget is divided, and the command that puts the extension in place."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import carom
import pytest
from carom.cli.host_python import host_python
from carom.cli.shell_text import typed
from carom.core.common import held_files
from carom.core.common.sizes import GIB
from carom.core.metrics.report import Report
from carom.toolkit_ext import log_messages, options
from carom.toolkit_ext.budget_shares import require
from carom.tools import ai_toolkit_folder as folder
from hypothesis import given
from hypothesis import strategies as st
from tests_held_open import HeldOpen


@pytest.mark.parametrize("value", [None, "off", False])
def test_absent_and_off_mean_no_policy(value):
    assert options.read({"offload": value}) is None


def test_every_option_arrives():
    policy = options.read(
        {"offload": "bouncing", "offload_kwargs": {"vram": "12GiB", "ram": "20GB", "disk": None, "codec": "raw", "granularity": "block", "priority": "high"}}
    )  # fmt: skip
    assert policy == options.Policy("bouncing", "12GiB", "20GB", None, "raw", "block", "high")
    assert options.read({"offload": "auto"}) == options.Policy("auto")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"offload": "bounce"}, "bouncing, aimdo, auto, off"),
        ({"offload": True}, "bouncing, aimdo, auto, off"),
        ({"offload": ["bouncing"]}, "bouncing, aimdo, auto, off"),
        (
            {"offload": "bouncing", "offload_kwargs": {"vramm": 1}},
            "vram, ram, disk, codec, granularity, priority",
        ),
        ({"offload": "bouncing", "offload_kwargs": "12GiB"}, "vram, ram, disk, codec, granularity, priority"),
        ({"offload": "off", "offload_kwargs": {"vramm": 1}}, "vram, ram, disk, codec, granularity, priority"),
        ({"offload": "bouncing", "offload_kwargs": {"vram": "12 apples"}}, "vram"),
        ({"offload": "bouncing", "offload_kwargs": {"vram": -1}}, "vram"),
        ({"offload": "bouncing", "offload_kwargs": {"ram": True}}, "ram"),
        ({"offload": "bouncing", "offload_kwargs": {"codec": "zip"}}, "auto, raw, lossless"),
        ({"offload": "bouncing", "offload_kwargs": {"priority": "urgent"}}, "normal, high, low"),
        (
            {"offload": "bouncing", "offload_kwargs": {"priority": 1}},
            "offload_kwargs.priority: 1 is not known",
        ),
        ({"offload": "bouncing", "offload_kwargs": {"granularity": "atom"}}, "auto, block, phase, layer"),
        ({"offload": "bouncing", "offload_kwargs": {"disk": True}}, "the path of a folder, or null"),
        ({"offload": "bouncing", "offload_kwargs": {"disk": " "}}, "the path of a folder, or null"),
        (
            {"offload": "bouncing", "offload_kwargs": {"disk": __file__}},
            "is a file; write the path of a folder",
        ),
        (
            {"offload": "bouncing", "layer_offloading": True, "layer_offloading_transformer_percent": 70},
            "between 0 and 1",
        ),
        (
            {"offload": "bouncing", "offload_kwargs": {"vram": 12}},
            "12 means 12 bytes; did you mean 12GiB",
        ),
        ({"offload": "bouncing", "offload_kwargs": {"vram": "12"}}, "did you mean 12GiB"),
        ({"offload": "bouncing", "offload_kwargs": {"vram": 7.5}}, "did you mean 7.5GiB"),
        ({"offload": "bouncing", "offload_kwargs": {"ram": 32}}, "did you mean 32GiB"),
        ({"offload": "bouncing", "offload_kwargs": {"vram": 12000}}, "did you mean 12000MiB"),
        ({"offload": "bouncing", "offload_kwargs": {"vram": 0}}, "leaves no room for weights"),
        ({"offload": "bouncing", "offload_kwargs": {"vram": "0%"}}, "leaves no room for weights"),
        ({"offload_kwargs": {"vram": "12GiB"}}, "does nothing without model.offload"),
        (
            {"offload": "bouncing", "layer_offloading": True, **dict.fromkeys(options.PERCENTS, 0)},
            "nothing would be offloaded",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(model, says):
    with pytest.raises(carom.UnsupportedError, match=says):
        options.read(model)


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=3)
)
def test_any_value_is_taken_or_refused(value):
    for model in (
        {"offload": value},
        *({"offload": "auto", "offload_kwargs": {k: value}} for k in options.OPTIONS),
    ):
        try:
            policy = options.read(model)
        except carom.UnsupportedError:
            continue
        assert policy is None or policy.mode in options.MODES


def test_contradictions_are_named_and_vram_wins():
    model = {"offload": "bouncing", "offload_kwargs": {"vram": "8GiB"}, "layer_offloading": True}
    model["layer_offloading_transformer_percent"] = 0.5
    policy = options.read(model, {"AI_TOOLKIT_OFFLOAD_DEPTH": "8"})
    assert policy is not None and policy.transformer_percent is None
    assert len(policy.remarks) == 2
    for remark, word in zip(policy.remarks, ("vram wins", "AI_TOOLKIT_OFFLOAD_DEPTH"), strict=True):
        assert word in remark


@pytest.mark.parametrize("vram", [{}, {"offload_kwargs": {"vram": "8GiB"}}])
def test_what_the_ui_writes_is_as_if_it_were_absent(vram):
    """It writes these three keys into every job, whatever its user chose."""
    written = {"layer_offloading": False, **dict.fromkeys(options.PERCENTS, 1.0)}
    asked = {"offload": "bouncing", **vram}
    assert options.read({**asked, **written}) == options.read(asked)


def test_percents_count_where_layer_offloading_is_true_and_no_vram_is_given():
    asked = {"offload": "bouncing", "layer_offloading": True}
    policy = options.read({**asked, "layer_offloading_transformer_percent": 0.5})
    assert policy is not None and policy.transformer_percent == 0.5 and policy.text_encoder_percent is None
    policy = options.read(
        {**asked, "offload_kwargs": {"vram": "8GiB"}, "layer_offloading_text_encoder_percent": 0}
    )
    assert policy is not None and policy.text_encoder_percent == 0
    policy = options.read({"offload": "bouncing", "layer_offloading_transformer_percent": 0.5})
    assert policy is not None and policy.transformer_percent is None


# -- shares


@given(st.lists(st.integers(0, 1 << 34), min_size=1, max_size=6), st.integers(0, 1 << 37))
def test_a_budget_must_hold_the_least_of_every_model(leasts, total):
    needs = {f"model {index}": least for index, least in enumerate(leasts)}
    if sum(leasts) <= total:
        require(total, needs)
        return
    with pytest.raises(carom.BudgetError, match="models together .model 0 |too small for model 0") as refused:
        require(total, needs)
    assert refused.value.least_bytes == sum(leasts)


# -- words


def test_the_start_line_tells_what_stays_and_what_streams():
    report = Report(
        resident_bytes=2 * GIB,
        streamed_bytes=6 * GIB,
        slot_bytes=GIB,
        vram_budget_bytes=3 * GIB,
        device="cuda:0",
    )
    line = log_messages.start("transformer", report)
    assert "2.00 GiB stay on cuda:0" in line and "6.00 GiB stream through 1.00 GiB of slots" in line
    assert "all 2.00 GiB stay" in log_messages.start("vae", Report(resident_bytes=2 * GIB))


def test_advice_is_the_bytes_whose_transfers_take_as_long_as_the_stall():
    stalled = Report(
        step_seconds=1.0,
        stall_seconds=0.25,
        transfers_per_weight=2.0,
        link_bytes_per_second=16 * GIB,
        streamed_bytes=6 * GIB,
    )
    assert log_messages.advice(stalled) == "about 2.00 GiB more vram would hide it"
    assert "250 ms of 1 s per step" in log_messages.progress("unet", stalled)
    assert log_messages.advice(Report(step_seconds=1.0, stall_seconds=0.01)) == "nothing to gain"
    assert "no step measured yet" in log_messages.progress("unet", Report())


# -- the command


@pytest.fixture
def checkout(tmp_path):
    for name in ("toolkit", "extensions"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.py").write_text("")
    return tmp_path


def everything(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_install_writes_one_guarded_file_and_uninstall_takes_it_away(checkout, carom_cli):
    before = everything(checkout)
    done = carom_cli("install-ai-toolkit", str(checkout), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["installed"], done.stderr
    place = checkout / "extensions" / folder.NAME
    assert [p.name for p in place.iterdir()] == ["__init__.py"]
    assert carom_cli("install-ai-toolkit", str(checkout)).returncode == 0, "a second time is no error"
    (place / "__pycache__").mkdir()
    (place / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"")
    done = carom_cli("install-ai-toolkit", str(checkout), "--uninstall", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["removed"]
    assert everything(checkout) == before
    assert not folder.uninstall(checkout), "a second time is no error"


def test_a_folder_that_is_no_ai_toolkit_is_refused_and_left_alone(tmp_path, carom_cli):
    (tmp_path / "run.py").write_text("")
    done = carom_cli("install-ai-toolkit", str(tmp_path))
    assert done.returncode == 2 and "toolkit, extensions" in done.stderr
    assert everything(tmp_path) == ["run.py"]


@pytest.mark.parametrize("strange", ["__init__.py", "other.py"])
def test_what_somebody_else_put_there_is_not_touched(checkout, strange):
    place = checkout / "extensions" / folder.NAME
    place.mkdir()
    (place / strange).write_text("mine")
    for act in (folder.install, folder.uninstall):
        with pytest.raises(carom.UnsupportedError, match="not Carom's"):
            act(checkout)
    assert (place / strange).read_text() == "mine"


def test_the_extension_survives_a_missing_carom(checkout, tmp_path):
    place = folder.install(checkout)
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import runpy; runpy.run_path({str(place / '__init__.py')!r})"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, env={},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("WARNING: Carom is not active") == 1, done.stderr


def test_the_warning_has_letters_that_the_logs_code_page_lacks_in_escaped_form(checkout, tmp_path):
    """On Windows a job's log is a pipe with a code page of 256 letters. The warning itself ended the job."""
    place = folder.install(checkout)
    (tmp_path / "lib" / "carom").mkdir(parents=True)
    (tmp_path / "lib" / "carom" / "__init__.py").write_text("raise OSError('\\u6a21')")
    code = f"import runpy, sys; sys.path.insert(0, 'lib'); runpy.run_path({str(place / '__init__.py')!r})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, env={"PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert done.returncode == 0 and r"OSError: \u6a21" in done.stdout, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script takes the part of Python")
def test_the_environment_of_the_checkout_is_asked_for_carom_and_told_the_command_that_puts_it_there(
    checkout, carom_cli, root
):
    bin = checkout / "env of its own" / "venv" / "bin"
    for name in ("toolkit", "extensions"):
        (checkout / "env of its own" / name).mkdir(parents=True)
    (checkout / "env of its own" / "run.py").touch()
    bin.mkdir(parents=True)
    (bin / "python").write_text("#!/bin/sh\nexit 1\n")
    (bin / "python").chmod(0o755)
    done = carom_cli("install-ai-toolkit", str(checkout / "env of its own"))
    command = [str(bin / "python"), "-m", "pip", "install", str(root)]
    assert done.stdout.endswith(f"run this:\n{typed(command)}\n")
    assert (root / "pyproject.toml").exists()


@pytest.mark.parametrize("name", ["venv", ".venv", "env"])
def test_the_python_of_every_usual_environment_is_found_also_that_of_windows(tmp_path, name):
    host = tmp_path / "ai-toolkit"
    assert host_python(host) is None
    python = host / name / "Scripts" / "python.exe"
    python.parent.mkdir(parents=True)
    python.touch()
    assert host_python(host) == [str(python)]
    embedded = tmp_path / "python_embeded" / "python.exe"
    embedded.parent.mkdir()
    embedded.touch()
    assert host_python(host) == [str(embedded), "-s"]


def test_a_program_that_holds_the_extension_loses_nothing_and_the_next_run_does_the_work(
    checkout, monkeypatch
):
    monkeypatch.setattr(held_files, "WAIT_SECONDS", 0.05)
    place = folder.install(checkout)
    compiled = place / "__pycache__" / "__init__.cpython-313.pyc"
    compiled.parent.mkdir()
    held = HeldOpen(monkeypatch)
    for file in (place / "__init__.py", compiled):
        compiled.parent.mkdir(exist_ok=True)
        compiled.touch()
        held.hold(file)
        for act in (folder.install, folder.uninstall):
            with contextlib.suppress(PermissionError):
                act(checkout)
            assert (place / "__init__.py").read_text("utf-8") == folder.TEXT
        held.release()
    monkeypatch.setattr(held_files, "WAIT_SECONDS", 60)
    held.hold(place / "__init__.py", times=2)  # as a virus scanner does
    assert folder.install(checkout) == place
    (place / ".__init__.123.py").touch()  # left by a run that was killed
    folder.install(checkout)
    assert folder.uninstall(checkout) and not place.exists()
