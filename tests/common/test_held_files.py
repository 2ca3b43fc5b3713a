"""Renames and deletions that Windows refuses while another program, such as a virus scanner, has a file open."""

from __future__ import annotations

import errno
import os
import sys

import pytest
from carom.core.checkpoint.index import open_index
from carom.core.common import held_files
from carom.core.common.errors import WeightsError
from tests_held_open import HeldOpen, windows_error


@pytest.fixture
def held(monkeypatch) -> HeldOpen:
    monkeypatch.setattr(held_files, "WAIT_SECONDS", 60)
    return HeldOpen(monkeypatch)


def test_a_file_that_is_held_for_a_moment_is_renamed_replaced_and_deleted(tmp_path, held):
    for move in (held_files.rename, held_files.replace):
        (tmp_path / "a").write_text("new")
        held.hold(tmp_path / "a", times=2)
        move(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "new" and not (tmp_path / "a").exists()
    held.hold(tmp_path / "b", times=2)
    held_files.unlink(tmp_path / "b")
    assert held.refused == 6 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [5, 32, 33])
def test_a_file_that_stays_held_gives_the_systems_error_after_a_bounded_time(number):
    tries = []

    def refuse():
        tries.append(1)
        raise windows_error(number, "a")

    with pytest.raises(PermissionError):
        held_files.retry_while_in_use(refuse, 0.1)
    assert 1 < len(tries) < 10


@pytest.mark.skipif(sys.platform == "win32", reason="Windows' errors have a winerror")
def test_errors_of_other_systems_are_raised_at_once(monkeypatch):
    monkeypatch.setattr(held_files.time, "sleep", lambda seconds: pytest.fail("waited"))
    for error in (PermissionError(errno.EACCES, "no"), FileNotFoundError(errno.ENOENT, "no"), OSError("no")):
        with pytest.raises(type(error)):
            held_files.retry_while_in_use(lambda error=error: (_ for _ in ()).throw(error))


def test_a_file_written_atomically_replaces_one_that_is_held_for_a_moment(tmp_path, held, monkeypatch):
    target = tmp_path / "report.txt"
    target.write_text("old")
    held.hold(target, times=2)
    held_files.write_atomically(target, lambda path: path.write_text("new"))
    assert target.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["report.txt"]
    monkeypatch.setattr(held_files, "WAIT_SECONDS", 0.05)
    held.hold(target)
    with pytest.raises(PermissionError):
        held_files.write_atomically(target, lambda path: path.write_text("newer"))
    assert target.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["report.txt"]


@pytest.mark.parametrize(
    ("number", "platform", "words"),
    [
        (32, "linux", "in use by another program"),
        (5, "linux", "access is denied: close programs"),
        (None, "win32", "access is denied: close programs"),  # `open` gives no winerror
        (None, "linux", "no permission to read it"),
    ],
)
def test_a_refused_weights_file_is_not_called_a_missing_permission_on_windows(
    tmp_path, monkeypatch, number, platform, words
):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * 100)

    def refuse(*_args, **_options):
        raise windows_error(number, path) if number else PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(held_files.sys, "platform", platform)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(WeightsError, match=words):
        open_index(path)
