"""The launchers: Windows' under Wine where it is installed, Linux' under sh.

Under Wine the Python is a stand-in: pip's own script launcher (an .exe with a command line appended)
that runs a batch file, which writes down its arguments and ends with a chosen exit code.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BAT = "build-rocm-windows.bat"


def test_the_windows_launcher_is_ascii_with_windows_line_ends(root: Path):
    data = (root / "scripts" / BAT).read_bytes()
    assert data.count(b"\r\n") == data.count(b"\n") and data.isascii()


@pytest.fixture(scope="session")
def wine(tmp_path_factory):
    """Runs a batch file under Wine, or as it is on Windows; returns CompletedProcess."""
    if sys.platform == "win32":
        # Only System32 in PATH: no py.exe, no python.exe.
        if "SYSTEMROOT" not in os.environ:
            pytest.skip("cmd.exe is not here: this is Linux in the shape of Windows")
        keep = ("SystemRoot", "COMSPEC", "TEMP", "TMP", "USERPROFILE", "LOCALAPPDATA", "PATHEXT")
        bare = {k: v for k, v in os.environ.items() if k.upper() in [n.upper() for n in keep]}
        bare["PATH"] = os.path.join(os.environ["SYSTEMROOT"], "System32")

        def native(bat: Path, *args: str, cwd: Path, **more: str) -> subprocess.CompletedProcess:
            return subprocess.run(
                [str(bat), *args], stdin=subprocess.DEVNULL, capture_output=True, timeout=180,
                env={**bare, **more}, cwd=cwd,
            )  # fmt: skip

        yield native
        return
    wine = shutil.which("wine") or shutil.which("wine64")
    if wine is None:
        pytest.skip("wine is not installed (Debian: apt-get install --no-install-recommends wine)")
    prefix = tmp_path_factory.mktemp("wine")
    env = {
        **os.environ,
        "WINEPREFIX": str(prefix),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml=",
    }
    for name in ("DISPLAY", "VIRTUAL_ENV", "CONDA_PREFIX", "CAROM_PYTHON", "WAYLAND_DISPLAY"):
        env.pop(name, None)

    def run(bat: Path, *args: str, cwd: Path, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [wine, windows(bat), *args], stdin=subprocess.DEVNULL, capture_output=True, timeout=180,
            env={**env, **more}, cwd=cwd,
        )  # fmt: skip

    server = shutil.which("wineserver") or "/usr/lib/wine/wineserver"
    # One server for the session: starting one per call is slow, and races with the last one's end.
    # What stays in the background must not hold a pipe, or whoever reads that pipe waits for it.
    quiet: dict = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "env": env,
    }
    subprocess.run([server, "-p"], timeout=60, **quiet)
    first = subprocess.run([wine, "cmd", "/c", "exit 5"], timeout=240, **quiet)
    if first.returncode != 5:
        pytest.skip("wine is installed but does not run cmd.exe here")
    yield run
    subprocess.run([server, "-k"], timeout=60, **quiet)  # this prefix's server only


def windows(path: Path) -> str:
    """The path as Windows (or Wine, which shows the root folder as Z:) names it."""
    return str(path) if sys.platform == "win32" else "Z:" + str(path).replace("/", "\\")


def stand_in_python(exe: Path, told: Path, code: int) -> None:
    """A python.exe that writes its arguments into ``told`` and ends with ``code``."""
    distlib = pytest.importorskip("pip._vendor.distlib")
    launcher = Path(distlib.__file__).parent / "t64.exe"
    if not launcher.is_file():
        pytest.skip("this pip comes without its Windows script launcher (Debian removes it)")
    script = told.with_suffix(".bat")
    # `told` lies in a folder without spaces: cmd /c takes the rest of the line as it is.
    script.write_bytes(f"@echo off\r\necho %*> {windows(told)}\r\nexit /b {code}\r\n".encode())
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "")
    shebang = f"#!C:\\windows\\system32\\cmd.exe /c {windows(script)}\r\n".encode()
    exe.parent.mkdir(parents=True, exist_ok=True)
    exe.write_bytes(launcher.read_bytes() + shebang + archive.getvalue())


def checkout(base: Path, root: Path, inside: str) -> Path:
    scripts = base / inside / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(root / "scripts" / BAT, scripts)
    return scripts / BAT


@pytest.mark.parametrize(
    ("folder", "place", "python"),
    [
        ("plain", "ComfyUI/custom_nodes/carom", "python_embeded/python.exe"),
        ("with spaces (x86) & co!", "ComfyUI/custom_nodes/carom", "ComfyUI/venv/Scripts/python.exe"),
        ("имя", "ComfyUI/custom_nodes/carom-main", "ComfyUI/.venv/Scripts/python.exe"),
        (
            "Müller & Söhne (1)",
            "Documents/ComfyUI/custom_nodes/carom",
            "Documents/ComfyUI/.venv/Scripts/python.exe",
        ),
        ("ai & more", "ai-toolkit/carom", "ai-toolkit/venv/Scripts/python.exe"),
        ("side by side", "carom", "ai-toolkit/env/Scripts/python.exe"),
        ("portable beside", "carom", "python_embeded/python.exe"),
    ],
)
def test_it_finds_the_python_beside_it_and_hands_over_arguments_and_exit_code(
    wine, root, tmp_path_factory, folder, place, python
):
    base, plain = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("told")
    bat = checkout(base / folder, root, place)
    stand_in_python(base / folder / python, plain / "told.txt", 23)
    # An environment that is gone, and one of another program, hide nothing.
    stale = {"VIRTUAL_ENV": "C:\\gone", "CONDA_PREFIX": "C:\\gone too"}
    done = wine(bat, "--check", "--comfyui", "C:\\My Games\\ComfyUI", "--json", cwd=plain, **stale)
    assert done.returncode == 23, done
    told = (plain / "told.txt").read_bytes().decode("utf-8", "replace")
    assert "rocm_setup.py" in told
    assert told.rstrip().endswith('--check --comfyui "C:\\My Games\\ComfyUI" --json')


def test_a_venv_beside_it_goes_before_an_active_one(wine, root, tmp_path):
    bat = checkout(tmp_path, root, "ComfyUI/custom_nodes/carom")
    stand_in_python(tmp_path / "ComfyUI/.venv/Scripts/python.exe", tmp_path / "right.txt", 0)
    stand_in_python(tmp_path / "other/Scripts/python.exe", tmp_path / "wrong.txt", 1)
    assert wine(bat, "--check", cwd=tmp_path, VIRTUAL_ENV=windows(tmp_path / "other")).returncode == 0
    assert (tmp_path / "right.txt").exists()


@pytest.mark.parametrize("quotes", ["", '"'])
def test_carom_python_goes_before_everything_quoted_or_not(wine, root, tmp_path, quotes):
    bat = checkout(tmp_path, root, "ComfyUI/custom_nodes/carom")
    stand_in_python(tmp_path / "ComfyUI/venv/Scripts/python.exe", tmp_path / "wrong.txt", 1)
    named = tmp_path / "my & python (1)/python.exe"
    stand_in_python(named, tmp_path / "right.txt", 0)
    done = wine(bat, "--check", cwd=tmp_path, CAROM_PYTHON=quotes + windows(named) + quotes)
    assert done.returncode == 0, done
    assert (tmp_path / "right.txt").exists() and not (tmp_path / "wrong.txt").exists()


@pytest.mark.parametrize("absent", ["C:\\absent\\python.exe", "a folder"])
def test_a_wrong_carom_python_is_an_error(wine, root, tmp_path, absent):
    bat = checkout(tmp_path, root, "ComfyUI/custom_nodes/carom")
    stand_in_python(tmp_path / "ComfyUI/venv/Scripts/python.exe", tmp_path / "wrong.txt", 0)
    done = wine(
        bat, "--check", cwd=tmp_path, CAROM_PYTHON=windows(tmp_path) if absent == "a folder" else absent
    )
    assert done.returncode == 10 and b"CAROM_PYTHON names" in done.stdout


@pytest.mark.parametrize(
    ("variable", "python"), [("VIRTUAL_ENV", "Scripts/python.exe"), ("CONDA_PREFIX", "python.exe")]
)
def test_an_active_environment_is_used_where_none_lies_beside(wine, root, tmp_path, variable, python):
    bat = checkout(tmp_path, root, "carom")
    stand_in_python(tmp_path / "v e" / python, tmp_path / "told.txt", 7)
    found = {"VIRTUAL_ENV": "C:\\gone", variable: windows(tmp_path / "v e")}
    assert wine(bat, "--check", cwd=tmp_path, **found).returncode == 7


def test_without_any_python_it_says_so_and_exits_with_10(wine, root, tmp_path):
    done = wine(checkout(tmp_path, root, "carom"), "--check", cwd=tmp_path)
    assert done.returncode == 10 and b"No Python found" in done.stdout


def test_a_double_click_waits_for_a_key_before_the_window_closes(wine, root, tmp_path):
    bat = checkout(tmp_path, root, "ComfyUI/custom_nodes/carom")
    stand_in_python(tmp_path / "ComfyUI/venv/Scripts/python.exe", tmp_path / "told.txt", 12)
    done = wine(bat, cwd=tmp_path)
    assert done.returncode == 12 and b"Press any key" in done.stdout
    assert b"Press any key" not in wine(bat, "--check", cwd=tmp_path).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell script")
class TestLinux:
    @pytest.fixture
    def sh(self, root, tmp_path):
        def run(place, *args, **env):
            scripts = tmp_path / "with space & ü" / place / "scripts"
            scripts.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / "scripts" / "build-rocm-linux.sh", scripts)
            (scripts / "rocm_setup.py").write_text(
                "import sys; print(sys.argv[1:], sys.executable); sys.exit(42)"
            )
            return subprocess.run(
                ["sh", str(scripts / "build-rocm-linux.sh"), *args],
                capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **env}, timeout=60,
            )  # fmt: skip

        return run

    @pytest.fixture
    def python(self, tmp_path):
        """Makes an environment's python."""

        def make(place):
            path = tmp_path / "with space & ü" / place / "bin" / "python"
            path.parent.mkdir(parents=True)
            path.symlink_to(sys.executable)
            return path

        return make

    @pytest.mark.parametrize(
        ("place", "env"),
        [("ComfyUI/custom_nodes/carom", "ComfyUI/.venv"), ("ai-toolkit/carom", "ai-toolkit/venv"),
         ("carom", "ai-toolkit/env"), ("carom", "ComfyUI/venv")],
    )  # fmt: skip
    def test_it_finds_the_environment_beside_it_before_an_active_one(self, sh, python, place, env):
        beside, active = python(env), python("other")
        done = sh(place, "--check", "a b", VIRTUAL_ENV=str(active.parents[1]), CONDA_PREFIX="/gone")
        assert done.returncode == 42 and "['--check', 'a b']" in done.stdout, done.stderr
        assert beside.samefile(done.stdout.split("] ")[1].strip()) and "other" not in done.stdout

    @pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
    def test_an_active_environment_is_used_where_none_lies_beside(self, sh, python, variable):
        done = sh("carom", **{"VIRTUAL_ENV": "/gone", variable: str(python("v e").parents[1])})
        assert done.returncode == 42 and "v e" in done.stdout

    @pytest.mark.parametrize("quotes", ["", '"', "'"])
    def test_carom_python_goes_before_everything_quoted_or_not(self, sh, python, quotes):
        python("ai-toolkit/venv")
        done = sh("ai-toolkit/carom", CAROM_PYTHON=quotes + str(python("named one")) + quotes)
        assert done.returncode == 42 and "named one" in done.stdout

    def test_a_wrong_carom_python_is_an_error(self, sh, python, tmp_path):
        python("ai-toolkit/venv")
        for wrong in ("/absent/python", str(tmp_path)):
            done = sh("ai-toolkit/carom", CAROM_PYTHON=wrong)
            assert done.returncode == 10 and "CAROM_PYTHON names" in done.stderr

    def test_without_any_python_it_exits_with_10(self, sh, tmp_path):
        tools = tmp_path / "tools"
        tools.mkdir()
        for name in ("sh", "dirname"):
            (tools / name).symlink_to(shutil.which(name))
        done = sh("carom", PATH=str(tools))
        assert done.returncode == 10 and "No Python found" in done.stderr
