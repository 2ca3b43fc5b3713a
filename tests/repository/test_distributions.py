"""The wheel and the source archive: built from this checkout, installed into an empty environment, and used there.

Nothing is downloaded. The environments see the libraries of the interpreter that runs the tests, but neither Carom
nor a link to this checkout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import carom
import pytest

NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "tests", "records")
# What ComfyUI reads beside the code, and the scripts, which a checkout that ComfyUI-Manager copied has too.
BESIDE_THE_CODE = ("web", "locales", "workflows", "scripts")
BUILD = "import setuptools.build_meta as b; b.build_sdist('out'); b.build_wheel('out')"


def run(*command: object, cwd: Path, timeout: float = 200) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = env["PIP_NO_INDEX"] = "1"
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )  # fmt: skip


def whole(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(root, tmp_path_factory) -> dict[str, Path]:
    """The two files that are published: {"wheel": ..., "sdist": ...}."""
    try:
        setuptools = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("setuptools is not installed, so nothing can be built without the network")
    if tuple(map(int, setuptools.split(".")[:2])) < (70, 1):
        pytest.skip(f"setuptools {setuptools} cannot build a wheel by itself; 70.1 can")
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed, so nothing can be installed")
    copy = tmp_path_factory.mktemp("build") / "carom-main"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (copy / "out").mkdir()
    whole(run(sys.executable, "-c", BUILD, cwd=copy))
    (wheel,), (sdist,) = (copy / "out").glob("*.whl"), (copy / "out").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Path:
    """A folder with links to all installed libraries except Carom."""
    folder = tmp_path_factory.mktemp("libraries")
    for path in sys.path:
        if not path.endswith(("site-packages", "dist-packages")) or not os.path.isdir(path):
            continue
        for entry in Path(path).iterdir():
            known = entry.name.lower().startswith(("carom", "__editable__")) or entry.suffix == ".pth"
            if not known and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    return folder


def files_of(path: Path) -> set[str]:
    """Return the files of a wheel below carom/, or of a source archive below its folder."""
    if path.suffix == ".whl":
        return {
            name.partition("/")[2] for name in zipfile.ZipFile(path).namelist() if name.startswith("carom/")
        }
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def shown_files(folder: Path) -> set[str]:
    """Return the files below `folder`, without caches and hidden ones."""
    parts = ((path, path.relative_to(folder).parts) for path in folder.rglob("*") if path.is_file())
    return {"/".join(p) for _, p in parts if not any(word.startswith((".", "__pycache__")) for word in p)}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_both_hold_what_comfyui_and_the_doctor_read(distributions, root, kind):
    inside = files_of(distributions[kind])
    for folder in BESIDE_THE_CODE:
        expected = {f"{folder}/{name}" for name in shown_files(root / folder)}
        assert expected and expected <= inside, expected - inside
    assert {"pyproject.toml", "requirements.txt", "__main__.py"} <= inside


def test_the_source_archive_holds_all_that_the_wheel_holds(distributions):
    wheel, sdist = (files_of(distributions[kind]) for kind in ("wheel", "sdist"))
    assert wheel <= sdist, wheel - sdist
    assert {"README.md", "LICENSE"} <= sdist


def test_neither_holds_tests_records_or_caches(distributions):
    for path in distributions.values():
        assert not [
            name
            for name in files_of(path)
            if name.startswith("tests/") or "records/" in name or ".pyc" in name
        ]


@pytest.mark.skipif(
    "CAROM_WINDOWS_SHAPE" in os.environ, reason="the shape's environments have the folders of Linux"
)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_an_empty_environment_and_runs_the_demo(distributions, libraries, tmp_path, kind):
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    purelib = Path(
        whole(
            run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
        ).strip()
    )
    (purelib / "libraries.pth").write_text(f"{libraries}\n")
    absent = run(python, "-c", "import torch, carom", cwd=tmp_path)
    assert absent.returncode == 1 and "No module named 'carom'" in absent.stderr, "the environment is empty"

    install = ("-m", "pip", "install", "--no-deps", "--no-build-isolation", distributions[kind])
    whole(run(python, *install, cwd=tmp_path))
    where = whole(run(python, "-c", "import carom; print(carom.__file__)", cwd=tmp_path)).strip()
    assert Path(where).parent.parent == purelib
    assert whole(run(scripts / "carom", "--version", cwd=tmp_path)) == f"carom {carom.__version__}\n"

    demo = (
        "demo",
        "--json",
        "--size",
        "16MiB",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--out",
        tmp_path / "demo",
    )
    report = json.loads(whole(run(scripts / "carom", *demo, cwd=tmp_path)))
    assert report["bit_exact"] is True and report["transfers_per_weight"] > 0
