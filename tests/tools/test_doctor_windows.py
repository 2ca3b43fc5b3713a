"""What `carom doctor` says on Windows with an NVIDIA card. The system, Triton and its trial are stand-ins."""

from __future__ import annotations

import types

import pytest
from carom.tools.doctor import amd, windows
from carom.tools.doctor.amd import Ended

NVIDIA = types.SimpleNamespace(kind="cuda")


@pytest.fixture
def on_windows(monkeypatch, tmp_path):
    """Windows with a Python in tmp_path and a Triton that is installed."""
    monkeypatch.setattr(windows.sys, "platform", "win32")
    monkeypatch.setattr(windows.sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(windows.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(windows.importlib.util, "find_spec", lambda name: object())
    return tmp_path


def whole(python) -> None:
    """Give the Python the folders that an ordinary installation has."""
    (python / "include").mkdir()
    (python / "include" / "Python.h").touch()
    (python / "libs").mkdir()
    (python / "libs" / "python313.lib").touch()


def triton(reason: str = "", crashed: bool = False):
    return next(f for f in windows.examine(NVIDIA, lambda: (reason, crashed)) if f.topic == "Triton")


def test_an_embedded_python_without_headers_is_named_with_what_to_copy_where(on_windows):
    found = triton("CalledProcessError: tcc.exe")
    assert (
        found.verdict == "fair" and "no include and libs" in found.value and "packing is off" in found.value
    )
    assert f"into {on_windows}" in found.remedy and "docs/windows.md" in found.remedy
    (on_windows / "include").mkdir()
    (on_windows / "include" / "Python.h").touch()
    assert "copy the folders libs of" in triton("CalledProcessError: tcc.exe").remedy


def test_without_triton_packing_is_said_to_be_off(on_windows, monkeypatch):
    monkeypatch.setattr(windows.importlib.util, "find_spec", lambda name: None)
    found = triton()
    assert found.verdict == "info" and "not installed; packing is off" in found.value
    assert "triton-windows" in found.remedy and "include and libs" in found.remedy
    whole(on_windows)
    assert "include" not in triton().remedy


def test_a_triton_that_works_is_good_and_one_that_crashes_is_to_be_removed(on_windows):
    whole(on_windows)
    assert triton().verdict == "good"
    assert "goes with your torch" in triton("ImportError: DLL load failed").remedy
    found = triton("access violation (0xC0000005)", crashed=True)
    assert found.verdict == "poor" and "uninstall Triton" in found.remedy


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(0, ({"reason": ""},)), ("", False)),
        (Ended(0, ({"reason": "no compiler"},)), ("no compiler", False)),
        (Ended(None, ()), ("no answer within 120 s", True)),
        (Ended(0xC0000005, ()), ("access violation (0xC0000005)", True)),
        (Ended(1, (), "ImportError: x"), ("ImportError: x", True)),
    ],
)
def test_the_trial_in_a_process_of_its_own_tells_a_reason_from_a_crash(ended, expected):
    assert amd.try_triton(lambda statements, seconds: ended) == expected


def test_the_drivers_setting_for_a_full_card_is_named_with_this_python(on_windows):
    (found,) = [f for f in windows.examine(NVIDIA, lambda: ("", False)) if f.topic == "full card"]
    assert "Sysmem Fallback Policy" in found.remedy and windows.sys.executable in found.remedy
    assert "slow" in found.value and found.verdict == "info"


def test_nothing_is_said_on_other_machines(on_windows, monkeypatch):
    for gpu in (None, types.SimpleNamespace(kind="rocm")):
        assert windows.examine(gpu) == []
    monkeypatch.setattr(windows.sys, "platform", "linux")
    assert windows.examine(NVIDIA) == []
