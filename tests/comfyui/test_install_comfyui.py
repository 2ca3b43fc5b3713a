"""`carom install-comfyui`: into a ComfyUI and out again, and nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import types
from pathlib import Path

import pytest
from carom.cli import install_comfyui as command
from carom.cli import installed_folder
from carom.cli import main as cli
from carom.core.common import held_files
from carom.core.common.errors import CaromError
from tests_held_open import HeldOpen


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


@pytest.mark.skipif(sys.platform == "win32", reason="junctions: test_where_no_junction_can_be_made_it_copies")
def test_where_links_are_refused_it_copies(comfyui, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(command, "link_folder", refuse)
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
    assert f"{python} -s -m pip install -r " in command.install(comfyui).next_step
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


@pytest.mark.parametrize(
    "name",
    ["venv/Scripts/python.exe", ".venv/Scripts/python.exe", "env/Scripts/python.exe", "env/bin/python"],
)
def test_the_python_of_every_usual_environment_is_named(comfyui, name):
    (comfyui / name).parent.mkdir(parents=True)
    (comfyui / name).touch()
    assert f"{comfyui / name} -m pip install" in command.install(comfyui).next_step


# -- a program that holds a file of the installed copy, as Windows has it


@pytest.fixture
def held(comfyui, monkeypatch) -> HeldOpen:
    """A copy is installed; a file of it can be held open."""
    monkeypatch.setattr(held_files, "WAIT_SECONDS", 0.05)
    command.install(comfyui, copy=True)
    return HeldOpen(monkeypatch)


def names(comfyui: Path) -> list[str]:
    return sorted(path.name for path in (comfyui / "custom_nodes").iterdir())


@pytest.mark.parametrize("uninstall", [False, True])
def test_with_a_file_open_nothing_is_lost_and_the_next_run_does_the_work(comfyui, held, capsys, uninstall):
    before = {path.relative_to(target(comfyui)) for path in target(comfyui).rglob("*")}
    held.hold(target(comfyui) / "core" / "common" / "sizes.py")
    what = ["install-comfyui", str(comfyui), "--uninstall" if uninstall else "--copy"]
    assert cli.main(what) == 1
    assert "may have a file of it open" in capsys.readouterr().err
    assert {path.relative_to(target(comfyui)) for path in target(comfyui).rglob("*")} == before
    assert names(comfyui) == ["carom", "other"]
    held.release()
    assert cli.main(what) == 0
    assert names(comfyui) == (["other"] if uninstall else ["carom", "other"])


def test_a_virus_scanner_that_holds_new_files_for_a_moment_loses_nothing(comfyui, held, monkeypatch):
    monkeypatch.setattr(held_files, "WAIT_SECONDS", 60)
    scanned = comfyui / "custom_nodes" / "carom-new.disabled" / "nodes" / "extension.py"
    held.hold(scanned, times=1)
    held.hold(target(comfyui) / "nodes" / "extension.py", times=1)
    assert command.install(comfyui, copy=True).how == "copied" and held.refused == 2
    assert names(comfyui) == ["carom", "other"]


def test_a_new_copy_that_cannot_take_its_place_leaves_the_earlier_one(comfyui, held):
    held.hold(comfyui / "custom_nodes" / "carom-new.disabled" / "__init__.py")
    with pytest.raises(PermissionError):
        command.install(comfyui, copy=True)
    assert (target(comfyui) / "__init__.py").is_file() and (target(comfyui) / installed_folder.MARK).is_file()
    held.release()
    assert command.install(comfyui, copy=True).how == "copied" and names(comfyui) == ["carom", "other"]


def test_a_new_copy_that_fails_leaves_the_earlier_one(comfyui, held, monkeypatch):
    def fail(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr(shutil, "copytree", fail)
    with pytest.raises(OSError, match="no space"):
        command.install(comfyui, copy=True)
    assert names(comfyui) == ["carom", "other"] and (target(comfyui) / "__init__.py").is_file()


def test_what_could_not_be_deleted_is_not_loaded_and_the_next_run_deletes_it(comfyui, held, capsys):
    old = comfyui / "custom_nodes" / "carom-old-0.disabled"  # ComfyUI loads no name that ends so
    held.hold(old / "core" / "common" / "sizes.py")
    assert cli.main(["install-comfyui", str(comfyui), "--uninstall"]) == 0
    assert "run this again later" in capsys.readouterr().out
    assert not target(comfyui).exists() and (old / installed_folder.MARK).is_file()
    assert command.install(comfyui, copy=True).how == "copied"
    held.release()
    assert cli.main(["install-comfyui", str(comfyui), "--uninstall"]) == 0
    assert names(comfyui) == ["other"]


# -- junctions


@pytest.fixture
def junctions(monkeypatch) -> list[str]:
    """Windows' junctions, of which symbolic links take the part; returns those that were made."""
    made: list[str] = []

    def create(source: str, path: str) -> None:
        made.append(path)
        os.symlink(source, path)

    monkeypatch.setitem(sys.modules, "_winapi", types.SimpleNamespace(CreateJunction=create))
    monkeypatch.setattr(installed_folder.sys, "platform", "win32")
    return made


def test_on_windows_a_junction_is_made_which_needs_no_privilege(comfyui, junctions, monkeypatch):
    monkeypatch.setattr(Path, "symlink_to", lambda *_args, **_options: pytest.fail("needs a privilege"))
    assert command.install(comfyui).how == "linked" and len(junctions) == 1
    assert target(comfyui).resolve() == command.source()
    assert command.install(comfyui).how == "present"
    command.uninstall(comfyui)
    assert names(comfyui) == ["other"] and (command.source() / "core").is_dir()


def test_where_no_junction_can_be_made_it_copies(comfyui, junctions, monkeypatch):
    def refuse(source: str, path: str) -> None:
        os.mkdir(path)  # Windows makes the folder first
        raise OSError("the target is on a network drive")

    monkeypatch.setattr(sys.modules["_winapi"], "CreateJunction", refuse)
    monkeypatch.setattr(Path, "symlink_to", lambda *_args, **_options: refuse("", str(comfyui / "none")))
    assert command.install(comfyui).how == "copied"


@pytest.mark.parametrize("leads_to", ["nowhere", "another folder"])
def test_a_junction_that_does_not_lead_to_the_checkout_is_not_kept(
    comfyui, junctions, monkeypatch, tmp_path, leads_to
):
    other = tmp_path / "of the server"
    if leads_to == "another folder":
        other.mkdir()
        (other / "kept").touch()
    monkeypatch.setattr(sys.modules["_winapi"], "CreateJunction", lambda _, path: os.symlink(other, path))
    rmdir = Path.rmdir  # deletes a junction on Windows, and not what it leads to
    monkeypatch.setattr(Path, "rmdir", lambda path: path.unlink() if path.is_symlink() else rmdir(path))

    def refuse(*_arguments, **_options) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert command.install(comfyui).how == "copied"
    assert (target(comfyui) / "nodes" / "extension.py").is_file()
    assert leads_to == "nowhere" or (other / "kept").is_file()


def test_a_junction_is_a_link_although_it_is_no_symbolic_link(tmp_path, monkeypatch):
    found = types.SimpleNamespace(st_mode=stat.S_IFDIR | 0o777, st_reparse_tag=0xA0000003)
    monkeypatch.setattr(os, "lstat", lambda path: found)
    assert installed_folder.is_link(tmp_path) and not installed_folder.is_marked(tmp_path)


IN_THE_SHAPE = """
import json, sys
from pathlib import Path
from carom.cli import main as cli
from carom.core.common import held_files
held_files.WAIT_SECONDS = 0.05
comfyui, nodes = Path(sys.argv[1]), Path(sys.argv[1]) / "custom_nodes"
def run(*options):
    code = cli.main(["install-comfyui", str(comfyui), *options])
    return code, sorted(path.name for path in nodes.iterdir()), sum(1 for _ in (nodes / "carom").rglob("*.py"))
told = {"copied": run("--copy")}
with open(nodes / "carom" / "core" / "common" / "sizes.py", encoding="utf-8"):
    told["open"], told["open at uninstall"] = run("--copy"), run("--uninstall")
told["again"], told["linked"], told["present"] = run("--copy"), run(), run()
told["removed"] = run("--uninstall")
print(json.dumps(told))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the shape is made on Linux")
def test_in_the_windows_shape_a_copy_and_a_junction_come_and_go_and_an_open_file_loses_nothing(
    comfyui, windows_python
):
    renamed = comfyui.rename(comfyui.parent / "ComfyUI 模型")  # letters that code page 1252 lacks
    done = windows_python("-c", IN_THE_SHAPE, str(renamed), symlinks=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    files = told["copied"][2]
    assert told["copied"] == told["again"] == [0, ["carom", "other"], files] and files > 100
    assert told["open"] == told["open at uninstall"] == [1, ["carom", "other"], files]
    assert told["linked"][:2] == told["present"][:2] == [0, ["carom", "other"]]
    assert told["removed"] == [0, ["other"], 0] and (command.source() / "core").is_dir()
    assert (
        r"\u6a21\u578b" in done.stdout
        and "linked: " in done.stdout
        and "may have a file of it open" in done.stderr
    )
