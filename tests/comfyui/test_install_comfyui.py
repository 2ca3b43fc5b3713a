"""`carom install-comfyui`: into a ComfyUI and out again, and nothing else is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from carom.cli import install_comfyui as command
from carom.cli import main as cli
from carom.core.common.errors import CaromError


@pytest.fixture
def comfyui(tmp_path):
    root = tmp_path / "ComfyUI"
    for folder in ("comfy", "custom_nodes/other"):
        (root / folder).mkdir(parents=True)
    (root / "main.py").write_text("# the program")
    (root / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
    return root


def target(root: Path) -> Path:
    return root / "custom_nodes" / "carom"


def test_it_links_this_folder_and_says_what_is_left(comfyui, capsys):
    assert cli.main(["install-comfyui", str(comfyui), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["how"] == "linked" and told["version"] == "0.33.0" and "requirements.txt" in told["next_step"]
    assert target(comfyui).resolve() == command.source()
    assert (target(comfyui) / "requirements.txt").is_file()


def test_twice_is_once_and_uninstall_removes_the_link_alone(comfyui, capsys):
    for _ in range(2):
        assert cli.main(["install-comfyui", str(comfyui)]) == 0
    assert "present" in capsys.readouterr().out
    assert cli.main(["install-comfyui", str(comfyui), "--uninstall"]) == 0
    assert not target(comfyui).exists() and (comfyui / "custom_nodes" / "other").is_dir()
    assert (command.source() / "nodes" / "extension.py").is_file()
    assert cli.main(["install-comfyui", str(comfyui), "--uninstall"]) == 0
    assert "absent" in capsys.readouterr().out


def test_a_copy_has_what_comfyui_needs_and_nothing_more(comfyui):
    assert command.install(comfyui, copy=True).how == "copied"
    found = {path.name for path in target(comfyui).iterdir()}
    assert {"__init__.py", "core", "nodes", "cli", "web", "locales", "workflows", "requirements.txt"} <= found
    assert not {"tests", "benchmarks", ".git"} & found
    assert not list(target(comfyui).glob("**/__pycache__"))
    assert command.install(comfyui).how == "linked"  # a copy of ours gives way
    assert command.install(comfyui, copy=True).how == "copied", "and a link, to a copy that was asked for"
    assert (command.source() / "README.md").exists()
    command.uninstall(comfyui)
    assert not target(comfyui).exists()


def test_where_links_are_refused_it_copies(comfyui, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert command.install(comfyui).how == "copied"


def test_a_copy_that_fails_leaves_nothing(comfyui, monkeypatch):
    def fail(*_args, **_options):
        Path(_args[1]).mkdir()
        raise OSError("no space left on device")

    monkeypatch.setattr(shutil, "copytree", fail)
    with pytest.raises(OSError, match="no space"):
        command.install(comfyui, copy=True)
    assert [path.name for path in (comfyui / "custom_nodes").iterdir()] == ["other"]


@pytest.mark.parametrize("uninstall", [False, True])
def test_somebody_elses_folder_is_left_alone(comfyui, uninstall, capsys):
    target(comfyui).mkdir()
    (target(comfyui) / "theirs.py").write_text("# not ours")
    assert cli.main(["install-comfyui", str(comfyui), *(["--uninstall"] if uninstall else [])]) == 1
    assert (target(comfyui) / "theirs.py").is_file()
    assert str(target(comfyui)) in capsys.readouterr().err


def test_a_link_to_a_checkout_that_moved_is_replaced(comfyui, tmp_path):
    target(comfyui).symlink_to(tmp_path / "gone", target_is_directory=True)
    assert command.install(comfyui).how == "linked"
    assert target(comfyui).resolve() == command.source()


def test_a_portable_folder_and_a_data_folder_are_found(comfyui, tmp_path):
    assert command.find_comfyui(tmp_path) == comfyui
    python = tmp_path / "python_embeded" / "python.exe"
    python.parent.mkdir()
    python.write_text("")
    assert str(python) in command.install(comfyui).next_step
    data = tmp_path / "data"
    (data / "custom_nodes").mkdir(parents=True)
    assert command.find_comfyui(data) == data and command.version_of(data) == ""


def test_what_is_no_comfyui_or_too_old_is_refused_with_the_remedy(comfyui, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert cli.main(["install-comfyui", str(tmp_path / "empty")]) == 2
    assert "main.py" in capsys.readouterr().err
    assert cli.main(["install-comfyui", str(tmp_path / "nowhere")]) == 2
    (comfyui / "comfyui_version.py").write_text('__version__ = "0.9.2"\n')
    with pytest.raises(CaromError, match="0.9.2 is too old"):
        command.install(comfyui)
    assert not target(comfyui).exists()
