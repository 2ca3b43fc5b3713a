"""scripts/windows_check.py: each part's result or its failure is in the file, and none ends the rest."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest


@pytest.fixture(scope="module")
def check(root):
    spec = importlib.util.spec_from_file_location("windows_check", root / "scripts" / "windows_check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the shape is made on Linux")
def test_it_runs_in_the_windows_shape(windows_python, root, tmp_path):
    file = tmp_path / "check.json"
    done = windows_python(
        str(root / "scripts" / "windows_check.py"), "--size", "2MiB", "--only", "spill", "--json", str(file),
        "--dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(file.read_text("utf-8"))["parts"]
    assert all(part["ok"] for part in parts.values())
    spill = parts["spill"]["result"]
    assert spill["mapped_weights_are_found"] and spill["files_before_exit"] and not spill["files_after_exit"]
    assert spill["spilled_weights_are_found"] and spill["bytes_that_stay_read_only"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["check.json"]


def test_a_part_that_hangs_does_not_end_the_rest(check, tmp_path, capsys):
    file = tmp_path / "check.json"
    arguments = ["--only", "reads,system", "--seconds", "0.02", "--json", str(file), "--dir", str(tmp_path)]
    assert check.main(arguments) == 1
    parts = json.loads(file.read_text("utf-8"))["parts"]
    assert [part["message"] for part in parts.values()] == ["no answer within 0.02 s"] * 2
    assert "2/2 system" in (said := capsys.readouterr().out) and "failed: reads, system" in said


def test_an_error_is_recorded_with_its_message_and_windows_number(check, tmp_path, monkeypatch):
    def refused(folder, size):
        error = OSError("the paging file is too small")
        error.winerror = 1455  # type: ignore[attr-defined]
        raise error

    monkeypatch.setitem(check.PARTS, "spill", refused)
    (tmp_path / "files").mkdir()
    assert check.run_part("spill", tmp_path / "files", 1) == 0
    found = json.loads((tmp_path / check.RESULT).read_text("utf-8"))
    assert (found["error"], found["message"], found["winerror"]) == (
        "OSError",
        "the paging file is too small",
        1455,
    )
    assert "refused" in found["traceback"]


@pytest.mark.parametrize(
    "arguments", [["--only", "nothing"], ["--size", "large"], ["--dir", "no/such/folder"]]
)
def test_bad_use_is_said(check, arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        check.main([*arguments, "--json", str(tmp_path / "check.json")])
    assert ended.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_the_users_name_is_not_in_the_file(check):
    home = str(check.Path.home())
    assert check.without_home({"a": [f"{home}/models", 1]}) == {"a": ["~/models", 1]}
