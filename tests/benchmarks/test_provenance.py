"""No record without the commit, the versions and the host it was taken on."""

from __future__ import annotations

import json
import socket
import subprocess

import pytest
from carom.benchmarks.engines.record import new_record
from carom.benchmarks.results import provenance as module
from carom.benchmarks.results.provenance import ProvenanceError, checkout_commit, provenance
from carom.cli.main import main


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAROM_COMMIT", "0123abc+changes")
        return provenance(peers={"ComfyUI": "v0.16.0"})


def test_what_a_record_says_of_its_origin(found):
    assert found["commit"] == "0123abc+changes" and found["date"].startswith("20")
    assert {"python", "torch"} <= set(found["versions"]) and found["versions"]["ComfyUI"] == "v0.16.0"
    host = found["machine"]
    assert host["cpu_model"] and host["cores"] >= 1 and host["memory_bytes"] > 1 << 28
    assert 1e-4 < host["python_loop_seconds"] < 10
    assert (host["accelerator"] is None) == (host["link_bytes_per_second"] is None)


def test_no_name_of_the_host(found):
    assert socket.gethostname() not in json.dumps(found)


@pytest.mark.parametrize("given", ["", "test", "unknown", "HEADHASH", "after 38a2ed2", "38a2ed2 and more"])
def test_a_commit_in_words_is_refused(monkeypatch, given):
    monkeypatch.setenv("CAROM_COMMIT", given)
    with pytest.raises(ProvenanceError, match="CAROM_COMMIT.*git rev-parse HEAD"):
        new_record("test", [])


def test_without_git_the_error_names_the_setting(monkeypatch, tmp_path):
    monkeypatch.delenv("CAROM_COMMIT", raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    with pytest.raises(ProvenanceError, match="Set CAROM_COMMIT"):
        new_record("test", [])


def test_without_git_a_record_that_is_only_printed_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.delenv("CAROM_COMMIT", raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert new_record("test", [], kept=False)["commit"] is None
    monkeypatch.setenv("CAROM_COMMIT", "not a commit")
    with pytest.raises(ProvenanceError, match="CAROM_COMMIT"):
        new_record("test", [], kept=False)


def test_without_git_bench_prints_json_and_keeps_no_file(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CAROM_COMMIT", raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    small = ["bench", "--engines", "none", "--mode", "infer", "--d", "64", "--depth", "2", "--tokens", "8",
             "--steps", "1", "--warmup", "0", "--device", "cpu"]  # fmt: skip
    assert main([*small, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["commit"] is None and printed["cases"][-1]["result"]["status"] == "ok"
    assert main([*small, "--out", str(tmp_path / "kept")]) != 0
    assert "Set CAROM_COMMIT" in capsys.readouterr().err and not (tmp_path / "kept").exists()


def test_the_commit_of_a_checkout(tmp_path):
    def git(*arguments):
        told = ["-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *told], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("one")
    (tmp_path / "inner").mkdir()
    git("add", "file")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert checkout_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert checkout_commit(tmp_path) == head + "+changes"
    assert checkout_commit(tmp_path / "inner") is None  # a folder inside a repository is no checkout
