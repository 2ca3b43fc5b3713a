"""scripts/rocm_setup.py over fake folders: what it finds, refuses, runs and says. pip and the doctor are stand-ins."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROCM = "__version__ = '2.9.1+rocmsdk20260116'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.2.53211-e1a6bc5663'\n"
PROVEN = [{"level": "good", "check": "AMD: proof", "what": "streams", "remedy": "nothing to do"}]


@pytest.fixture
def setup(root, tmp_path, monkeypatch):
    """The script as a module, with a checkout in tmp_path and a torch for ROCm; `pip` and `doctor` record calls."""
    spec = importlib.util.spec_from_file_location("rocm_setup", root / "scripts" / "rocm_setup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rocm_setup", module)
    spec.loader.exec_module(module)
    version = tmp_path / "version.py"
    version.write_text(ROCM)
    module.calls = []
    monkeypatch.setattr(module, "torch_file", lambda: version)
    monkeypatch.setattr(module, "run_pip", lambda command, say: module.calls.append(command))
    monkeypatch.setattr(
        module, "doctor", lambda start, folder: module.calls.append(["doctor", *start]) or PROVEN
    )
    monkeypatch.setattr(module, "link", lambda command, folder: module.calls.append(command) or "linked")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        module.shutil, "which", lambda name: None
    )  # no NVIDIA driver, whatever this machine has
    monkeypatch.delenv("CAROM_PYTHON", raising=False)
    place_checkout(module, monkeypatch, tmp_path / "work" / "carom")
    return module


def place_checkout(module, monkeypatch, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text("numpy\n")
    monkeypatch.setattr(module, "ROOT", folder)
    return folder


def comfyui(folder: Path) -> Path:
    for name in ("comfy", "custom_nodes"):
        (folder / name).mkdir(parents=True)
    (folder / "main.py").touch()
    return folder


def desktop(folder: Path) -> Path:
    """Comfy Desktop's base folder, which holds no program."""
    for name in ("custom_nodes", "models", "user"):
        (folder / name).mkdir(parents=True)
    return folder


def ai_toolkit(folder: Path) -> Path:
    for name in ("toolkit", "extensions"):
        (folder / name).mkdir(parents=True)
    (folder / "run.py").touch()
    return folder


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def ask(setup, capsys, *words: str) -> dict:
    """What --json prints, with the exit code that was returned."""
    code = setup.main([*words, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    return report


# -- where the checkout lies


@pytest.mark.parametrize(
    ("make", "host", "checkout", "kind", "linked"),
    [
        (comfyui, "ComfyUI", "ComfyUI/custom_nodes/carom", "ComfyUI", False),
        (comfyui, "portable/ComfyUI", "portable/carom", "ComfyUI", True),
        (comfyui, "ComfyUI", "ComfyUI/carom", "ComfyUI", True),
        (desktop, "Documents/ComfyUI", "Documents/ComfyUI/custom_nodes/carom-main", "ComfyUI", False),
        (ai_toolkit, "ai-toolkit", "ai-toolkit/carom", "ai-toolkit", True),
        (ai_toolkit, "Ostris & ü", "Ostris & ü/extensions/carom", "ai-toolkit", True),
        (ai_toolkit, "ai-toolkit", "carom", "ai-toolkit", True),
    ],
)
def test_the_place_of_the_checkout_decides_what_is_installed(
    setup, capsys, monkeypatch, tmp_path, make, host, checkout, kind, linked
):
    folder = make(tmp_path / "place" / host)
    place_checkout(setup, monkeypatch, tmp_path / "place" / checkout)
    report = ask(setup, capsys)
    assert report["exit_code"] == 0 and report["host"] == f"{kind}, {folder}"
    requirements, carom, proof, *link = setup.calls
    assert "-r" in requirements and "--no-deps" in carom and proof == ["doctor", "-m", "carom"]
    assert link == (
        [[sys.executable, "-m", "carom", f"install-{kind.lower()}", str(folder)]] if linked else []
    )
    assert ("offload: bouncing" in report["message"]) == (kind == "ai-toolkit")


def test_a_checkout_that_lies_alone_is_installed_and_says_how_to_name_a_host(setup, capsys):
    report = ask(setup, capsys)
    assert report["exit_code"] == 0 and "--ai-toolkit" in report["message"] and len(setup.calls) == 3


def test_two_hosts_beside_the_checkout_are_a_question(setup, capsys, tmp_path):
    comfyui(tmp_path / "work" / "ComfyUI"), ai_toolkit(tmp_path / "work" / "ai-toolkit")
    report = ask(setup, capsys)
    assert report["exit_code"] == 2 and "--comfyui" in report["remedy"] and not setup.calls
    assert ask(setup, capsys, "--ai-toolkit", str(tmp_path / "work" / "ai-toolkit"))["exit_code"] == 0


@pytest.mark.parametrize("option", ["--comfyui", "--ai-toolkit"])
def test_a_named_folder_that_is_no_host_is_refused(setup, capsys, tmp_path, option):
    other = ai_toolkit(tmp_path / "t") if option == "--comfyui" else comfyui(tmp_path / "c")
    for folder in (other, tmp_path / "absent"):
        report = ask(setup, capsys, option, str(folder))
        assert report["exit_code"] == 2 and str(folder) in report["message"] and not setup.calls


@pytest.mark.parametrize(
    ("windows", "python"),
    [
        (True, "host/.venv/Scripts/python.exe"), (True, "host/venv/Scripts/python.exe"),
        (True, "host/env/Scripts/python.exe"), (True, "python_embeded/python.exe"),
        (True, "host/python_embeded/python.exe"), (False, "host/.venv/bin/python"), (False, "host/venv/bin/python"),
    ],
)  # fmt: skip
def test_a_host_has_its_own_python(setup, tmp_path, windows, python):
    assert setup.python_of(tmp_path / "host", windows) is None
    touch(tmp_path / python)
    assert setup.python_of(tmp_path / "host", windows) == tmp_path / python


@pytest.fixture
def own_python(setup, tmp_path, monkeypatch):
    """An ai-toolkit around the checkout, with a Python of its own that writes down how it was called."""
    if sys.platform == "win32":
        pytest.skip("the stand-in is a shell script")
    folder = ai_toolkit(tmp_path / "ai & toolkit")
    place_checkout(setup, monkeypatch, folder / "carom")
    python = touch(folder / "venv/bin/python")
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$CAROM_PYTHON" "$@" > "{tmp_path / "told"}"\nexit 12\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("named", [True, False])
def test_a_host_is_set_up_with_its_own_python(setup, tmp_path, own_python, named):
    words = ["--ai-toolkit", str(own_python.parents[2]), "--check"] if named else ["--check"]
    assert setup.main(words) == 12 and not setup.calls
    told, script, *passed = (tmp_path / "told").read_text().splitlines()
    assert told == str(own_python) and script.endswith("rocm_setup.py") and passed == words


def test_carom_python_keeps_the_script_in_the_python_that_runs_it(setup, capsys, own_python, monkeypatch):
    monkeypatch.setenv("CAROM_PYTHON", sys.executable)
    assert ask(setup, capsys)["exit_code"] == 0 and setup.calls


def test_a_python_of_the_host_that_does_not_start_is_exit_code_10(setup, capsys, own_python):
    own_python.chmod(0o644)
    report = ask(setup, capsys)
    assert report["exit_code"] == 10 and str(own_python) in report["message"] and not setup.calls


# -- checks: nothing is changed where one fails


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (ROCM, None),
        ("__version__ = '2.8.0+rocm6.4'\nhip = '6.4.43482'\n", None),
        ("__version__ = '2.6.0'\ncuda = None\nhip = '6.2.0'\n", None),  # a distribution's own build
        ("__version__ = '2.10.0a0+rocm7.11.0a20260101'\n", None),
        (
            "__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
            "CUDA build",
        ),
        ("__version__ = '2.9.0+xpu'\nxpu: Optional[str] = '20250101'\n", "XPU build"),
        ("__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU build"),
        ("", "not installed"),
    ],
)
def test_torchs_build_is_read_without_importing_torch(setup, tmp_path, text, build):
    (tmp_path / "version.py").write_text(text)
    if build is None:
        assert setup.check_torch(tmp_path / "version.py") == "torch " + text.split("'")[1]
        return
    with pytest.raises(setup.Stop, match=build) as caught:
        setup.check_torch(tmp_path / "version.py")
    assert caught.value.code == 12 and "stable.repo.amd.com" in caught.value.remedy
    assert ("uninstall" in caught.value.remedy) == (build != "not installed")
    if os.name != "nt":
        typed = next(line for line in caught.value.remedy.splitlines() if "install --index-url" in line)
        assert shlex.split(typed)[:4] == [
            sys.executable,
            "-m",
            "pip",
            "install",
        ] and "torch[device-all]" in shlex.split(typed)


@pytest.mark.parametrize(
    ("listed", "card"),
    [
        ("GPU 0: NVIDIA GeForce RTX 4070 (UUID: GPU-1)\r\nGPU 1: NVIDIA A2 (UUID: GPU-2)\r\n", "NVIDIA GeForce RTX 4070"),
        ("No devices found.\n", ""),
    ],
)  # fmt: skip
def test_a_torch_that_runs_on_an_nvidia_card_is_left_as_it_is(
    setup, capsys, monkeypatch, tmp_path, listed, card
):
    (tmp_path / "version.py").write_text("__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    asked = []

    def run(command, **_options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, listed.encode())

    monkeypatch.setattr(setup.shutil, "which", lambda name: f"C:\\{name}.exe")
    monkeypatch.setattr(setup.subprocess, "run", run)
    report = ask(setup, capsys)
    assert asked == [["C:\\nvidia-smi.exe", "-L"]] and report["exit_code"] == 12 and not setup.calls
    if card:
        assert f"torch 2.9.0+cu128 runs on {card} here" in report["message"]
        assert "docs/windows.md" in report["remedy"] and "CAROM_PYTHON" in report["remedy"]
    assert ("uninstall" in report["remedy"]) == (not card)


def without_torch(setup, monkeypatch):
    monkeypatch.setattr(setup, "torch_file", lambda: None)


def without_pip(setup, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))


def on_arm(setup, monkeypatch):
    monkeypatch.setattr(setup.platform, "machine", lambda: "arm64")


def old_python(setup, monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 1))


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (without_torch, 12, "not installed"),
        (without_pip, 20, "no pip"),
        (on_arm, 11, "arm64"),
        (old_python, 11, "too old"),
    ],
)
def test_a_failed_check_names_the_remedy_and_changes_nothing(setup, capsys, monkeypatch, fault, code, words):
    fault(setup, monkeypatch)
    report = ask(setup, capsys)
    assert report["exit_code"] == code and words in report["message"] and report["remedy"]
    assert not setup.calls and not report["changed"]


def test_a_failed_proof_leaves_the_host_as_it_was_and_says_what_changed(setup, capsys, monkeypatch, tmp_path):
    def failed(start, folder):
        raise setup.Stop(30, "AMD: proof: the attempt crashed", "update the driver")

    ai_toolkit(tmp_path / "work" / "ai-toolkit")
    monkeypatch.setattr(setup, "doctor", failed)
    report = ask(setup, capsys)
    assert report["exit_code"] == 30 and len(setup.calls) == 2 and "installed Carom" in report["changed"][0]
    assert setup.main([]) == 30 and "Changed: installed Carom" in capsys.readouterr().out


# -- modes


def test_check_proves_this_checkout_and_runs_no_pip(setup, capsys):
    report = ask(setup, capsys, "--check")
    assert (
        report["exit_code"] == 0
        and report["findings"] == PROVEN
        and "Nothing was changed" in report["message"]
    )
    assert setup.calls == [["doctor", str(setup.ROOT)]]


def test_dry_run_prints_what_an_install_runs(setup, capsys, tmp_path):
    ai_toolkit(tmp_path / "work" / "ai-toolkit")
    report = ask(setup, capsys, "--dry-run")
    assert report["exit_code"] == 0 and not setup.calls
    assert [
        word
        for step in report["planned"]
        for word in ("-r ", "--no-deps", "doctor", "install-ai-toolkit")
        if word in step
    ]
    assert ask(setup, capsys)["exit_code"] == 0 and len(report["planned"]) == len(setup.calls)


def test_wheels_are_installed_without_the_network(setup, capsys, tmp_path):
    wheel = touch(tmp_path / "usb stick" / "carom-0.2.0-py3-none-any.whl")
    assert ask(setup, capsys, "--wheel", str(wheel))["exit_code"] == 0
    for command in setup.calls[:2]:
        assert "--no-index" in command and f"--find-links={wheel.parent}" in command
    assert setup.calls[1][-1] == str(wheel) and str(setup.ROOT) not in setup.calls[1]
    for wrong in (tmp_path / "absent.whl", touch(tmp_path / "carom.zip")):
        assert ask(setup, capsys, "--wheel", str(wrong))["exit_code"] == 2
    assert len(setup.calls) == 3


@pytest.mark.parametrize(
    "words", [["--bogus"], ["--check", "--dry-run"], ["--comfyui", "a", "--ai-toolkit", "b"]]
)
def test_wrong_use_exits_with_2(setup, capsys, words):
    with pytest.raises(SystemExit) as caught:
        setup.main(words)
    assert caught.value.code == 2 and not setup.calls


def test_interrupted_exits_with_130(setup, capsys, monkeypatch):
    def interrupt(command, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "run_pip", interrupt)
    assert ask(setup, capsys)["exit_code"] == 130


def test_the_text_ends_with_one_sentence_and_its_remedy(setup, capsys, monkeypatch):
    assert setup.main([]) == 0 and capsys.readouterr().out.splitlines()[-1].startswith("Carom is installed.")
    without_pip(setup, monkeypatch)
    assert setup.main([]) == 20
    text = capsys.readouterr().out
    assert "NOT READY (exit code 20): this Python has no pip." in text and "ensurepip" in text


# -- pip, the doctor and the link: the real functions over processes that fail


@pytest.fixture
def real(root):
    spec = importlib.util.spec_from_file_location("rocm_setup_real", root / "scripts" / "rocm_setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rocm_setup_real"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["rocm_setup_real"]


@pytest.mark.parametrize(
    ("printed", "meaning"),
    [
        (
            "WARNING: Retrying ... NewConnectionError('Failed to establish a new connection')",
            "index cannot be reached",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement numpy>=1.24 (from versions: none)",
            "does not have a package",
        ),
        ("socket.gaierror: [Errno 11001] getaddrinfo failed", "index cannot be reached"),
        ("ERROR: [WinError 5] Access is denied: 'python_embeded'", "in use"),
        ("error: externally-managed-environment", "may not be changed"),
        ("ERROR: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: Failed building wheel for carom", "Failed building wheel for carom"),
        ("", "no message"),
    ],
)
def test_what_pip_printed_becomes_one_sentence(real, printed, meaning):
    lines = []
    with pytest.raises(real.Stop, match=meaning) as caught:
        real.run_pip([sys.executable, "-c", f"print({printed!r}); raise SystemExit(1)"], lines.append)
    assert caught.value.code == 20 and "run this again" in caught.value.remedy
    assert any(printed in line for line in lines), "pip's own lines are shown"


def test_a_pip_that_is_content_is_no_error(real):
    real.run_pip([sys.executable, "-c", "print('ERROR: not one')"], lambda line: None)


FAILED = {
    "ok": False,
    "findings": [{"level": "missing", "check": "AMD: proof", "what": "hung", "remedy": "restart"}],
}


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import not_there", "No module named 'not_there'"),
        ("import os; os.abort()", "does not start"),
        (f"import json; print('noise', json.dumps({{'rocm': {FAILED!r}}}))", "AMD: proof: hung"),
    ],
)
def test_a_doctor_that_fails_is_exit_code_30(real, tmp_path, code, what):
    with pytest.raises(real.Stop, match=what) as caught:
        real.doctor(["-c", code], str(tmp_path))
    assert caught.value.code == 30 and caught.value.remedy


def test_a_doctor_that_hangs_is_exit_code_30(real, tmp_path, monkeypatch):
    monkeypatch.setattr(real, "DOCTOR_SECONDS", 0.5)
    with pytest.raises(real.Stop, match="no answer"):
        real.doctor(["-c", "import time; time.sleep(60)"], str(tmp_path))


def test_the_checkouts_own_doctor_is_run_without_being_installed(real, root, tmp_path):
    """This machine has no AMD GPU, so the doctor's verdict is exit code 30, in its own words."""
    with pytest.raises(real.Stop, match="AMD: ") as caught:
        real.doctor([str(root)], str(tmp_path))
    assert caught.value.code == 30


def test_a_host_that_refuses_the_link_is_exit_code_20_with_the_command(real, tmp_path):
    with pytest.raises(real.Stop, match="is not Carom's") as caught:
        real.link([sys.executable, "-c", 'print("x is not Carom\'s"); raise SystemExit(1)'], str(tmp_path))
    assert caught.value.code == 20 and "repeat: " in caught.value.remedy


def test_the_checkout_is_copied_without_what_is_not_the_package(real, tmp_path, monkeypatch):
    source = tmp_path / "source"
    for name in (
        "core/a.py",
        "tests/t.py",
        ".git/config",
        "build/lib/old.py",
        "venv/bin/python",
        "core/__pycache__/a.pyc",
    ):
        touch(source / name)
    monkeypatch.setattr(real, "ROOT", source)
    copied = real.copy_checkout(str(tmp_path))
    assert [path.name for path in copied.rglob("*") if path.is_file()] == ["a.py"]


# -- what is printed to be pasted


@pytest.mark.parametrize(
    ("words", "shell", "line"),
    [
        (["python", "-m", "pip", "a==1"], "cmd", "python -m pip a==1"),
        (
            [r"C:\x & (y)\python.exe", "torch[device-all]"],
            "cmd",
            r'"C:\x & (y)\python.exe" "torch[device-all]"',
        ),
        ([r"C:\it's\python.exe", "a"], "powershell", r"& 'C:\it''s\python.exe' a"),
        (["python", "torch[device-all]"], "powershell", "python 'torch[device-all]'"),
        (["/a b/python", "torch[device-all]"], "sh", "'/a b/python' 'torch[device-all]'"),
    ],
)
def test_commands_are_quoted_for_their_shell(real, words, shell, line):
    assert real.quote(words, shell) == line


def test_on_windows_both_shells_are_served(real):
    assert real.typed(["python", "-m", "pip"], windows=True) == "python -m pip"
    assert "in PowerShell: & " in real.typed([r"C:\a b\python.exe"], windows=True)


def test_an_old_python_gets_a_sentence(root, tmp_path):
    """The file's syntax and names are those of Python 3.7, or it could not say that the Python is too old."""
    import ast

    ast.parse((root / "scripts" / "rocm_setup.py").read_text("utf-8"), feature_version=(3, 7))
    done = subprocess.run(
        [sys.executable, str(root / "scripts/rocm_setup.py"), "--check", "--json"], capture_output=True
    )
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] != 0 and report["python"]


def test_options_are_those_of_the_documentation(real, capsys):
    with pytest.raises(SystemExit):
        real.main(["--help"])
    text = capsys.readouterr().out
    for option in ("--comfyui PATH", "--ai-toolkit PATH", "--check", "--json", "--dry-run", "--wheel FILE"):
        assert option in text


@pytest.mark.parametrize(
    "before, after",
    [
        (None, "OCL_SET_SVM_SIZE=4194304\n"),
        ("HF_TOKEN=a", "HF_TOKEN=a\nOCL_SET_SVM_SIZE=4194304\n"),
        ("OCL_SET_SVM_SIZE=262144\n", "OCL_SET_SVM_SIZE=262144\n"),
        ("export OCL_SET_SVM_SIZE = 1", "export OCL_SET_SVM_SIZE = 1"),
    ],
)
def test_on_windows_ai_toolkits_env_file_sets_hips_addresses_unless_it_does(real, tmp_path, before, after):
    file = ai_toolkit(tmp_path / "ai-toolkit") / ".env"
    if before is not None:
        file.write_text(before)
    host = real.Host("ai-toolkit", file.parent)
    said = real.set_addresses(host, windows=True)
    assert file.read_text() == after and bool(said) == (before != after)
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".env")] == [".env"]
    assert real.set_addresses(host, windows=True) == ""


def test_no_env_file_is_written_elsewhere(real, tmp_path):
    folder = ai_toolkit(tmp_path / "ai-toolkit")
    assert real.set_addresses(real.Host("ai-toolkit", folder), windows=False) == ""
    assert real.set_addresses(real.Host("ComfyUI", folder), windows=True) == ""
    assert not (folder / ".env").exists()


def test_a_full_disk_leaves_ai_toolkits_env_file_as_it_was(real, tmp_path, monkeypatch):
    file = ai_toolkit(tmp_path / "ai-toolkit") / ".env"
    file.write_text("HF_TOKEN=a")

    def full(source: str, target: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(real.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        real.set_addresses(real.Host("ai-toolkit", file.parent), windows=True)
    assert file.read_text() == "HF_TOKEN=a"
    assert not (file.parent / ".env.carom").exists()
