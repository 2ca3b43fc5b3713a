"""The command line: help, exit codes, JSON errors, `python -m carom`."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import types

import carom
import pytest
from carom.cli import main as cli
from carom.core.common.errors import BudgetError


@pytest.fixture
def command(monkeypatch):
    """Adds a command `probe` that does what the test says; returns a runner of `carom probe ...`."""

    def install(action):
        module = types.ModuleType("carom.cli.probe")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
        module.run = action  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "carom.cli.probe", module)
        monkeypatch.setitem(cli.COMMANDS, "probe", "a test's command")
        return lambda *args: cli.main(["probe", *args])

    return install


def fail(error: BaseException):
    def action(_args):
        raise error

    return action


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_of_every_command(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert f"carom {name}" in out and "--json" in out
    assert cli.COMMANDS[name].split()[0] in out


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_the_two_functions_and_a_help_line(name):
    module = importlib.import_module(f"carom.cli.{name.replace('-', '_')}")
    assert callable(module.add_arguments) and callable(module.run)
    assert module.__doc__ and cli.COMMANDS[name]


def test_the_help_lists_every_command_without_importing_any(carom_cli):
    done = carom_cli("--help")
    assert done.returncode == 0, done.stderr
    listed = {
        line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ") and line[4] != " "
    }
    assert set(cli.COMMANDS) <= listed
    assert "0 done, 1 failed, 2 bad use" in done.stdout


@pytest.mark.parametrize(
    "args", [[], ["no-such-command"], ["demo", "--no-such-option"], ["demo", "--steps", "many"]]
)
def test_bad_use_exits_with_2_and_says_so_on_stderr(args, carom_cli):
    done = carom_cli(*args)
    assert done.returncode == 2
    assert done.stdout == "" and "usage: carom" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_the_commands(command, code):
    assert command(lambda args: code)() == code


@pytest.mark.parametrize(
    ("error", "code"),
    [(BudgetError("blocks.0 needs 8 MiB", 8), 1), (PermissionError("no"), 1), (ValueError("--size=x"), 2)],
)
def test_errors_become_one_line_on_stderr_or_one_json_object(command, capsys, error, code):
    run = command(fail(error))
    assert run() == code
    out, err = capsys.readouterr()
    assert out == "" and err == f"carom probe: {type(error).__name__}: {error}\n"
    assert run("--json") == code
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out) == {"error": type(error).__name__, "message": str(error)}


def test_an_interrupt_exits_with_1_without_a_traceback(command, capsys):
    assert command(fail(KeyboardInterrupt()))() == 1
    assert capsys.readouterr().err.startswith("carom: interrupted; nothing was left")


def test_an_interrupted_command_says_what_is_left_of_it_in_json_too(command, capsys):
    run = command(fail(KeyboardInterrupt("half is there")))
    assert run() == 1 and capsys.readouterr().err == "carom: interrupted; half is there\n"
    assert run("--json") == 1
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["message"] == "interrupted; half is there"


def test_a_letter_that_the_pipes_code_page_lacks_is_printed_escaped(carom_cli, tmp_path):
    """On Windows a pipe has a code page of 256 letters. The command failed with exit code 2 after its work."""
    root = tmp_path / "模型" / "ComfyUI"
    (root / "custom_nodes").mkdir(parents=True)
    done = carom_cli("install-comfyui", str(root), PYTHONIOENCODING="cp1252", PYTHONUTF8="0")
    assert done.returncode == 0 and done.stderr == ""
    assert "linked: " in done.stdout and r"\u6a21\u578b" in done.stdout
    done = carom_cli(
        "install-comfyui", str(tmp_path / "模"), PYTHONIOENCODING="cp1252:strict", PYTHONUTF8="0"
    )
    assert done.returncode == 2 and r"\u6a21 is no folder" in done.stderr


def test_a_bug_is_not_hidden(command):
    with pytest.raises(ZeroDivisionError):
        command(fail(ZeroDivisionError()))()


def test_json_and_the_commands_own_options_arrive(command):
    seen = []
    run = command(lambda args: seen.append((args.json, args.number)) or 0)
    assert run("--number", "3", "--json") == 0
    assert seen == [(True, 3)]


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"carom {carom.__version__}"


@pytest.mark.parametrize("isolated", [False, True])
def test_a_checkout_that_is_not_installed_is_started_by_its_folder(root, tmp_path, isolated):
    """An embedded Python ignores the current folder and PYTHONPATH, as -I does."""
    command = [sys.executable, *(["-I"] if isolated else []), str(root), "install-comfyui", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2 and "nowhere is no folder" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's pipe")
def test_output_that_nobody_reads_to_the_end_is_no_failure_in_words(root, tmp_path):
    (tmp_path / "carom").symlink_to(root, target_is_directory=True)
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -u -m carom plan flux2-dev --gpu rtx4090 --json | head -c 10",
        shell=True, capture_output=True, text=True, timeout=120, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout and done.stderr == ""
