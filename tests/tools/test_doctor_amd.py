"""The AMD part of `carom doctor`: real proofs on the CPU, and the faults of a GPU as a child process that shows them."""

from __future__ import annotations

import json
import sys
import time

import psutil
import pytest
import torch
from carom.cli import main as cli
from carom.tools.doctor import amd, amd_proof, hardware
from carom.tools.doctor.amd import Ended
from carom.tools.doctor.extras import OptionalBackend

GOOD = OptionalBackend("comfy-aimdo", True, "0.6.0 works here")
GPU = {"name": "AMD Radeon RX 9070 XT", "arch": "gfx1201", "vram_bytes": 16 << 30, "integrated": False}
OWN = "C:\\v\\Lib\\site-packages\\_rocm_sdk_core\\bin\\amdhip64_7.dll"
EXAMINE = amd.examine
STEPS = ("torch", "gpu", "runtime", "pin", "train", "end")


def events(last: str = "end", state: str = "ok", **changed) -> tuple[dict, ...]:
    """The events of a proof that ends with step `last` in `state`."""
    facts = {
        "torch": {"version": "2.13.0+rocm10.0.0", "hip": "10.0.1"}, "gpu": GPU,
        "runtime": {"loaded": [OWN], "brought": [OWN]}, "train": {"exact": True},
    }  # fmt: skip
    steps = STEPS[: STEPS.index(last) + 1]
    told = [{"step": step, "state": "ok", **facts.get(step, {}), **changed.get(step, {})} for step in steps]
    told[-1]["state"] = state
    return tuple(told)


def examined(ended: Ended, triton: Ended | None = None, aimdo: OptionalBackend = GOOD) -> amd.Report:
    children = iter([ended, triton or Ended(0, ({"step": "triton", "state": "ok", "reason": ""},))])
    return EXAMINE(child=lambda statements, seconds: next(children), aimdo=lambda kind: aimdo)


def finding(report: amd.Report, topic: str):
    (found,) = [f for f in report.findings if f.topic == topic]
    return found


# -- faults: each is one sentence with a remedy


@pytest.mark.parametrize(
    ("ended", "topic", "words", "remedy"),
    [
        (Ended(-11, events("train", "start")), "AMD: proof", "stream and train a model crashed: killed by SIGSEGV", "update AMD's driver"),
        (Ended(3221225477, events("gpu", "start")), "AMD: proof", "access violation", "update AMD's driver"),
        (Ended(-9, events("pin")), "AMD: proof", "crashed: killed by SIGKILL", "update AMD's driver"),
        (Ended(None, events("gpu", "start")), "AMD: proof", "no answer within 180 s", "restart"),
        (Ended(1, events("torch", "failed", torch={"why": "OSError: [WinError 126] hipblas"})), "AMD: torch", "WinError 126", "docs/amd.md"),
        (Ended(0, events("gpu", "failed", gpu={"why": "torch sees no GPU"})), "AMD: gpu", "no GPU", " "),
        (Ended(0, events("train", "failed", train={"why": "other results than the resident one"})), "AMD: train", "other results", "report it"),
        (Ended(0, events(runtime={"loaded": ["C:\\Windows\\System32\\amdhip64_7.dll"]})), "AMD: runtime", "System32", "PATH"),
        (Ended(0, events(runtime={"loaded": [OWN, "C:\\Windows\\System32\\amdhip64_6.dll"]})), "AMD: runtime", "amdhip64_6.dll", "PATH"),
        (Ended(0, events(runtime={"loaded": ["/opt/rocm/lib/libamdhip64.so.6", "/usr/lib/libamdhip64.so.7"], "brought": []})), "AMD: runtime", "so.7", "PATH"),
        (Ended(0, events(torch={"version": "2.9.0+cu128", "hip": None})), "AMD: torch", "not built for ROCm", "docs/amd.md"),
        (Ended(1, (), "ModuleNotFoundError: No module named 'psutil'"), "AMD: proof", "psutil", "requirements.txt"),
    ],
)  # fmt: skip
def test_a_fault_fails_the_proof_with_a_sentence_and_a_remedy(ended, topic, words, remedy):
    report = examined(ended)
    assert not report.ok and report.to_dict()["ok"] is False
    found = finding(report, topic)
    assert found.verdict == "missing" and words in found.value and remedy in found.remedy
    assert report.died == ("crashed" in found.value or "no answer" in found.value)


def test_a_crash_after_everything_was_proven_is_no_fault():
    report = examined(Ended(-11, events()))
    assert report.ok and not report.died


@pytest.mark.parametrize(
    ("ended", "triton", "aimdo", "topic", "words"),
    [
        (events(pin={"state": "failed", "why": "RuntimeError: HIP error: out of memory"}), None, GOOD, "AMD: pin", "out of memory"),
        (events(), Ended(None, ()), GOOD, "AMD: Triton", "no answer"),
        (events(), Ended(-11, ()), GOOD, "AMD: Triton", "SIGSEGV"),
        (events(), Ended(0, ({"step": "triton", "state": "ok", "reason": "no C compiler"},)), GOOD, "AMD: Triton", "no C compiler"),
        (events(), None, OptionalBackend("comfy-aimdo", False, "not installed"), "comfy-aimdo", "not installed"),
        (events(), None, OptionalBackend("comfy-aimdo", False, "0.6.0 did not load: hooks"), "comfy-aimdo", "hooks"),
        (events(gpu={"integrated": True}), None, GOOD, "AMD: memory", "system's RAM"),
        (events(runtime={"loaded": [], "brought": []}), None, GOOD, "AMD: runtime", "does not tell"),
    ],
)  # fmt: skip
def test_what_only_makes_carom_slower_is_no_failure(monkeypatch, ended, triton, aimdo, topic, words):
    monkeypatch.setattr(amd.importlib.util, "find_spec", lambda name: object())
    report = examined(Ended(0, ended), triton, aimdo)
    found = finding(report, topic)
    assert report.ok and found.verdict in ("poor", "fair", "info") and words in found.value and found.remedy


def test_a_machine_where_all_is_well(monkeypatch):
    monkeypatch.setattr(amd.importlib.util, "find_spec", lambda name: object())
    report = examined(Ended(0, events()))
    assert {f.topic: f.verdict for f in report.findings} == dict.fromkeys(
        ("AMD: torch", "AMD: runtime", "AMD: proof", "AMD: Triton", "comfy-aimdo"), "good"
    )
    told = report.to_dict()
    assert (told["arch"], told["hip"], told["runtimes"]) == ("gfx1201", "10.0.1", [OWN]) and json.dumps(told)
    assert "bit for bit" in finding(report, "AMD: proof").value


def test_a_gpu_that_does_not_repeat_itself_is_not_called_exact():
    found = finding(examined(Ended(0, events(train={"exact": False}))), "AMD: proof")
    assert found.verdict == "good" and "bit for bit" not in found.value


def test_triton_is_not_tried_on_an_architecture_that_it_does_not_support(monkeypatch):
    monkeypatch.setattr(amd.importlib.util, "find_spec", lambda name: object())
    tried = []

    def child(statements, seconds):
        tried.append(statements)
        return Ended(0, events(gpu={"arch": "gfx1030"}))

    report = amd.examine(child=child, aimdo=lambda kind: GOOD)
    assert report.ok and len(tried) == 1 and "gfx1030" in finding(report, "AMD: Triton").value


def test_in_a_comfyui_comfy_aimdo_is_comfyuis(tmp_path, monkeypatch):
    (tmp_path / "ComfyUI" / "custom_nodes").mkdir(parents=True)
    for prefix in (tmp_path / "python_embeded", tmp_path / "ComfyUI" / "venv"):
        monkeypatch.setattr(sys, "prefix", str(prefix))
        found = finding(examined(Ended(0, events()), aimdo=None), "comfy-aimdo")
        assert found.verdict == "info" and "ComfyUI owns" in found.value
    assert amd.comfyui_beside(tmp_path / "v", tmp_path / "custom_nodes" / "carom")
    assert not amd.comfyui_beside(tmp_path / "elsewhere" / "v", tmp_path / "elsewhere" / "carom")


@pytest.mark.parametrize("wsl", [True, False])
def test_wsl_is_named(monkeypatch, wsl):
    monkeypatch.setattr(amd, "is_wsl", lambda: wsl)
    report = examined(Ended(0, events()))
    assert report.ok and ("AMD: WSL" in {f.topic for f in report.findings}) is wsl


# -- what is read


@pytest.mark.parametrize(
    ("version", "hip", "rocm"),
    [
        ("2.9.1+rocmsdk20260116", "7.2.53211-e1a6bc5663", "7.2"), ("2.8.0+rocm6.4", "6.4.43482", "6.4"),
        ("2.13.0+rocm10.0.0", "10.0.1", "10.0.0"), ("2.6.0", "6.2.41134", "6.2"), ("2.10.0a0+rocm7.11.0a20260101", "7.11", "7.11.0"),
    ],
)  # fmt: skip
def test_rocms_version_is_read_of_every_kind_of_build(version, hip, rocm):
    assert amd.rocm_version(version, hip) == rocm


@pytest.mark.parametrize(("vendor", "there"), [(None, False), ("0x10de", False), ("0x1002", True)])
def test_an_amd_card_is_seen_without_torch(tmp_path, vendor, there):
    if vendor:
        (tmp_path / "card0" / "device").mkdir(parents=True)
        (tmp_path / "card0" / "device" / "vendor").write_text(vendor + "\n")
    assert amd.has_amd(drm=str(tmp_path), kfd=str(tmp_path / "no")) is there
    (tmp_path / "kfd").touch()
    assert amd.has_amd(drm=str(tmp_path), kfd=str(tmp_path / "kfd"))


@pytest.mark.parametrize(
    ("text", "rocm"),
    [
        ("__version__ = '2.9.1+rocmsdk20260116'", True),
        ("hip: Optional[str] = '7.2'", True),
        ("hip: Optional[str] = None", False),
        ("", False),
    ],
)
def test_a_torch_for_rocm_is_seen_without_importing_it(tmp_path, monkeypatch, text, rocm):
    package = tmp_path / "a_torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "version.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert amd.has_amd(drm=str(tmp_path), kfd=str(tmp_path / "no"), torch="a_torch") is rocm


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, ""), (1, ""), (-11, "SIGSEGV"), (-6, "SIGABRT"), (3221225477, "access violation"), (-1073741819, "access violation"),
     (0xC0000409, "0xC0000409")],
)  # fmt: skip
def test_an_exit_code_tells_a_crash_from_an_end(code, words):
    assert bool(amd.cause_of_death(code)) == bool(words) and words in amd.cause_of_death(code)


# -- child processes


def test_a_child_reports_what_it_did_until_it_crashed():
    ended = amd.run_child(
        "from carom.tools.doctor import amd_proof\n"
        "amd_proof.tell('torch', 'ok', version='1', hip=None)\nprint('noise')\namd_proof.tell('gpu', 'start')\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGABRT)", 60
    )  # fmt: skip
    assert [event["step"] for event in ended.events] == ["torch", "gpu"]
    assert ended.code is not None and (amd.cause_of_death(ended.code) or sys.platform == "win32")


def test_a_child_that_hangs_is_killed_with_its_children():
    begin = time.monotonic()
    ended = amd.run_child(
        "from carom.tools.doctor import amd_proof\namd_proof.tell('torch', 'start')\n"
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "amd_proof.tell('gpu', 'start', pid=child.pid)\ntime.sleep(600)", 3
    )  # fmt: skip
    assert ended.code is None and time.monotonic() - begin < 30
    assert [event["step"] for event in ended.events] == ["torch", "gpu"]
    deadline = time.monotonic() + 10
    while psutil.pid_exists(ended.events[-1]["pid"]) and time.monotonic() < deadline:
        if psutil.Process(ended.events[-1]["pid"]).status() == psutil.STATUS_ZOMBIE:
            break  # nobody reaps it in this container
        time.sleep(0.05)
    else:
        assert not psutil.pid_exists(ended.events[-1]["pid"])


def test_the_proof_runs_on_the_cpu_in_a_child():
    ended = amd.run_child("from carom.tools.doctor.amd_proof import main\nmain('cpu')", 120)
    assert ended.code == 0, ended.error
    passed = [event["step"] for event in ended.events if event["state"] == "ok"]
    assert passed == list(STEPS)
    assert next(e for e in ended.events if e["step"] == "train" and e["state"] == "ok")["exact"] is True


# -- the proof can fail


def wrong_stream(model, **settings):
    """A stream that computes with other weights."""
    from carom.core.session.session import stream

    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
    return stream(model, **settings)


def test_one_weight_that_differs_fails_the_proof():
    with pytest.raises(amd_proof.Refused, match="other results"):
        amd_proof.train(torch.device("cpu"), wrong_stream)


def test_a_model_that_stays_on_the_device_proves_nothing():
    from carom.core.session.session import stream

    with pytest.raises(amd_proof.Refused, match="did not stream"):
        amd_proof.train(
            torch.device("cpu"), lambda model, **settings: stream(model, **{**settings, "vram": "1GiB"})
        )


@pytest.fixture(autouse=True)
def as_before():
    """The proof changes a global setting, which ends with its process elsewhere."""
    yield
    torch.use_deterministic_algorithms(False)


def test_a_refused_pin_and_a_missing_gpu_are_told_and_the_rest_goes_on(monkeypatch, capsys):
    def refuse(device):
        raise RuntimeError("HIP error: out of memory")

    monkeypatch.setattr(amd_proof, "pin", refuse)
    amd_proof.main("cpu")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(amd.MARK)]
    told = {(e["step"], e["state"]) for e in (json.loads(line[len(amd.MARK) :]) for line in lines)}
    assert ("pin", "failed") in told and ("train", "ok") in told
    if not torch.cuda.is_available():
        amd_proof.main("cuda:0")
        assert '"gpu", "state": "failed", "why": "torch sees no GPU"' in capsys.readouterr().out


# -- the command


@pytest.mark.parametrize("option", [True, False])
def test_doctor_shows_the_proof_where_it_is_asked_for_or_an_amd_card_is(capsys, monkeypatch, option):
    monkeypatch.setattr(amd, "examine", lambda: examined(Ended(0, events())))
    monkeypatch.setattr(amd, "has_amd", lambda: not option)
    assert cli.main(["doctor", "--no-disk", "--json", *(["--amd"] if option else [])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rocm"]["ok"] and {"AMD: proof", "comfy-aimdo", "RAM"} <= {
        f["topic"] for f in found["findings"]
    }


def test_doctor_leaves_a_torch_alone_that_crashed_its_proof(capsys, monkeypatch):
    monkeypatch.setattr(amd, "examine", lambda: examined(Ended(-11, events("gpu", "start"))))
    for name in ("torch_build", "probe_gpu", "measure_cpu"):
        monkeypatch.setattr(hardware, name, lambda *_: pytest.fail("torch was used"))
    assert cli.main(["doctor", "--no-disk", "--amd"]) == 0
    text = capsys.readouterr().out
    assert "SIGSEGV" in text and "the proof on the GPU crashed or hung" in text.replace("\n", " ").replace(
        "  ", ""
    )


def test_doctor_without_amd_has_no_report_of_it(capsys, monkeypatch):
    monkeypatch.setattr(amd, "has_amd", lambda: False)
    assert cli.main(["doctor", "--no-disk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rocm"] is None


def test_the_trial_of_triton_runs_in_a_child_and_tells_its_reason():
    if torch.cuda.is_available():
        pytest.skip("here Triton may work")
    ended = amd.run_child(amd.TRITON, 120)
    assert ended.code == 0 and ended.events[-1]["reason"]
