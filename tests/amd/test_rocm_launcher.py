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


def test_the_windows_launcher_stays_a_launcher(root: Path):
    data = (root / "scripts" / BAT).read_bytes()
    assert data.count(b"\r\n") == data.count(b"\n") and data.isascii(), "cmd wants CRLF and ASCII"
    text = data.decode()
    # Each of these breaks under Wine 8, or on paths with spaces.
    for broken in ("&&", "||", "for /d", "for /f", "set /p", "usebackq", "pushd"):
        assert broken not in text.lower(), broken
    assert len(text.splitlines()) <= 30


@pytest.fixture(scope="session")
def wine(tmp_path_factory):
    """Runs a batch file under Wine, or as it is on Windows; returns CompletedProcess."""
    if sys.platform == "win32":
        # Only System32 in PATH: no py.exe, no python.exe.
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
    for name in ("DISPLAY", "VIRTUAL_ENV", "CAROM_PYTHON", "WAYLAND_DISPLAY"):
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
        ("ai & more", "ai-toolkit/carom", "ai-toolkit/venv/Scripts/python.exe"),
    ],
)
def test_it_finds_the_python_beside_it_and_hands_over_arguments_and_exit_code(
    wine, root, tmp_path_factory, folder, place, python
):
    base, plain = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("told")
    bat = checkout(base / folder, root, place)
    stand_in_python(base / folder / python, plain / "told.txt", 23)
    done = wine(bat, "--check", "--comfyui", "C:\\My Games\\ComfyUI", "--json", cwd=plain)
    assert done.returncode == 23, done
    told = (plain / "told.txt").read_bytes().decode("utf-8", "replace")
    assert "rocm_setup.py" in told
    assert told.rstrip().endswith('--check --comfyui "C:\\My Games\\ComfyUI" --json')


def test_carom_python_goes_before_everything_and_success_is_zero(wine, root, tmp_path):
    bat = checkout(tmp_path, root, "ComfyUI/custom_nodes/carom")
    stand_in_python(tmp_path / "ComfyUI/venv/Scripts/python.exe", tmp_path / "wrong.txt", 1)
    stand_in_python(tmp_path / "my python/python.exe", tmp_path / "right.txt", 0)
    done = wine(bat, "--check", cwd=tmp_path, CAROM_PYTHON=windows(tmp_path / "my python/python.exe"))
    assert done.returncode == 0, done
    assert (tmp_path / "right.txt").exists() and not (tmp_path / "wrong.txt").exists()


def test_an_active_venv_is_used(wine, root, tmp_path):
    bat = checkout(tmp_path, root, "carom")
    stand_in_python(tmp_path / "v e/Scripts/python.exe", tmp_path / "told.txt", 7)
    assert wine(bat, "--check", cwd=tmp_path, VIRTUAL_ENV=windows(tmp_path / "v e")).returncode == 7


def test_without_any_python_it_says_so_and_exits_with_10(wine, root, tmp_path):
    bat = checkout(tmp_path, root, "carom")
    done = wine(bat, "--check", cwd=tmp_path)
    assert done.returncode == 10 and b"No Python found" in done.stdout
    done = wine(bat, "--check", cwd=tmp_path, CAROM_PYTHON="C:\\absent\\python.exe")
    assert done.returncode != 0 and b"Traceback" not in done.stdout


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
        scripts = tmp_path / "with space ü" / "custom_nodes" / "carom" / "scripts"
        scripts.mkdir(parents=True)
        shutil.copy(root / "scripts" / "build-rocm-linux.sh", scripts)
        (scripts / "rocm_setup.py").write_text("import sys; print(sys.argv[1:]); sys.exit(42)")

        def run(*args, **env):
            base = {"PATH": "/usr/bin:/bin", **env}
            return subprocess.run(
                ["sh", str(scripts / "build-rocm-linux.sh"), *args],
                capture_output=True,
                text=True,
                env=base,
                timeout=60,
            )

        return run, scripts

    def test_it_hands_over_arguments_and_exit_code(self, sh):
        done = sh[0]("--check", "a b", CAROM_PYTHON=sys.executable)
        assert (done.returncode, done.stdout.strip()) == (42, "['--check', 'a b']"), done.stderr

    def test_it_finds_the_venv_beside_it(self, sh):
        run, scripts = sh
        place = scripts.parents[2] / "venv" / "bin"
        place.mkdir(parents=True)
        (place / "python").symlink_to(sys.executable)
        assert run().returncode == 42

    def test_without_any_python_it_exits_with_10(self, sh, tmp_path):
        tools = tmp_path / "tools"
        tools.mkdir()
        for name in ("sh", "dirname"):
            (tools / name).symlink_to(shutil.which(name))
        done = sh[0](PATH=str(tools))
        assert done.returncode == 10 and "No Python found" in done.stderr
