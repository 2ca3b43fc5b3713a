"""AMD's checks inside `carom doctor`: the script's own report, only where it concerns the machine, never a crash."""

from __future__ import annotations

import json
import sys

import pytest
from carom.cli import main as cli
from carom.tools.doctor import amd, hardware
from carom.tools.doctor.hardware import TorchInstall

REPORT = {
    "ok": False,
    "findings": [
        {
            "check": "torch",
            "level": "bad",
            "what": "a CPU build",
            "remedy": "Replace it.",
            "link": "https://x",
        },
        {"check": "disk", "level": "ok", "what": "9 GiB free", "remedy": "", "link": ""},
        {"check": "driver", "level": "odd", "what": "unheard of", "remedy": "", "link": ""},
    ],
}


def test_findings_keep_the_scripts_words_and_remedies():
    found = amd.findings(REPORT)
    assert [(f.topic, f.verdict) for f in found] == [
        ("AMD: torch", "missing"), ("AMD: disk", "good"), ("AMD: driver", "info"),
    ]  # fmt: skip
    assert found[0].remedy == "Replace it. https://x" and found[1].remedy == "nothing to do"
    assert found[0].data["check"] == "torch"


@pytest.mark.parametrize(
    ("build", "vendor", "there"),
    [("cpu", None, False), ("cuda 13.0", "0x10de", False), ("rocm 7.1", None, True), ("cpu", "0x1002", True)],
)
def test_the_checks_concern_amd_machines(tmp_path, build, vendor, there):
    if vendor:
        (tmp_path / "card0" / "device").mkdir(parents=True)
        (tmp_path / "card0" / "device" / "vendor").write_text(vendor + "\n")
    assert amd.has_amd(build, drm=str(tmp_path), kfd=str(tmp_path / "no")) is there
    (tmp_path / "kfd").touch()
    assert amd.has_amd(build, drm=str(tmp_path), kfd=str(tmp_path / "kfd"))


def test_the_real_script_is_loaded_and_leaves_the_path_alone():
    before = list(sys.path)
    report = amd.run_checks(prove=False)
    assert any(f["check"] == "torch" for f in report["findings"])
    assert sys.path == before
    assert all(f.remedy for f in amd.findings(report))


@pytest.mark.parametrize(
    "content", [None, "raise RuntimeError('broken')", "def examine(*a, **k): 1 / 0", "x ="]
)
def test_a_missing_or_broken_script_is_a_finding(tmp_path, content):
    script = tmp_path / "rocm_setup.py"
    if content is not None:
        script.write_text(content)
    (found,) = amd.findings(amd.run_checks(prove=False, script=script))
    assert found.verdict == "info" and "rocm_setup.py" in found.remedy


def test_doctor_asks_for_the_proof_only_where_rocm_is(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(amd, "run_checks", lambda prove: (asked.append(prove), REPORT)[1])
    monkeypatch.setattr(amd, "has_amd", lambda build: build.startswith("rocm"))
    real = hardware.probe
    for build in ("rocm 7.1", "cpu"):
        monkeypatch.setattr(hardware, "torch_build", lambda build=build: TorchInstall("2.9", build))
        monkeypatch.setattr(hardware, "probe", lambda *a, **k: real(*a, **{**k, "extras": False}))
        assert cli.main(["doctor", "--no-disk", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["rocm"] is not None) == (build != "cpu")
        assert any(f["topic"] == "AMD: torch" for f in found["findings"]) == (build != "cpu")
    assert asked == [True]
    assert cli.main(["doctor", "--no-disk", "--amd", "--json"]) == 0
    assert asked == [True, False] and json.loads(capsys.readouterr().out)["rocm"] == REPORT
