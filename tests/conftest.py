"""Makes `import carom` mean this checkout, whatever its folder is called and whatever is installed."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

# Dozens of tests start processes: each would compile the whole package again where nobody keeps what was compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tensors of a few hundred bytes: threads would only wait for each other.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # For devices that are not there torch.manual_seed keeps stack traces, each time: 1 ms of pytest's frames.
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        backend.manual_seed_all = lambda seed: None

ROOT = Path(__file__).resolve().parent.parent


def _load(name: str, path: Path, **options: list[str]) -> None:
    spec = importlib.util.spec_from_file_location(name, path, **options)  # type: ignore[arg-type]
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load("tests_lock_recorder", ROOT / "tests" / "support" / "lock_recorder.py")
if os.environ.get("CAROM_RECORD_LOCKS"):
    sys.modules["tests_lock_recorder"].install(ROOT / "core", os.environ["CAROM_RECORD_LOCKS"])
_load("carom", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
# Helpers of the tests: tests/ is no package, and its folders are not on the path. Each comes after those that it imports.
for helper in (
    "inside", "limits", "watch", "interrupts", "ranks", "priority_pools", "lossless_reference", "models", "residual", "uneven", "pairwise", "harness", "wrappers", "disk_harness", "stand_in_machines", "fake_kernel32", "fake_dxgi", "held_open", "pool_bench", "toy_store",
    "comfyui/comfy_server", "comfyui/comfy_graphs", "comfyui/comfy_stand_in", "comfyui/comfy_layers", "comfyui/web_page", "aimdo_stand_in", "ai_toolkit/aitoolkit_stand_in",
):  # fmt: skip
    path = ROOT / "tests" / "support" / f"{helper}.py"
    _load(f"tests_{path.stem}", path)
_load("tests_windows_shape", ROOT / "tests" / "support" / "windows_shape" / "run.py")
_load("tests_mapped_memory", ROOT / "tests" / "support" / "windows_shape" / "mapped_memory.py")
_load("tests_lacking", ROOT / "tests" / "support" / "windows_shape" / "lacking.py")
_load("tests_schedule_cases", ROOT / "tests" / "support" / "schedule_cases.py")


def pytest_collection_finish():
    _keep_what_is_here()


@pytest.fixture(autouse=True, scope="module")
def collections_stay_fast():
    """Does the same between two test files, because tests import further libraries."""
    if time.monotonic() - _kept_at > 20:
        _keep_what_is_here()


def _keep_what_is_here() -> None:
    """Exclude the objects that exist now from later garbage collections, of which tests make many."""
    global _kept_at
    gc.collect()
    gc.freeze()
    _kept_at = time.monotonic()


_kept_at = 0.0


@pytest.fixture(autouse=True)
def fine_grain(request, monkeypatch):
    """Lets small models stream on a GPU, whose allocator's 2 MiB would hold all of their weights at once."""
    if torch.cuda.is_available() and request.module.__name__.rpartition(".")[2] != "test_gpu":
        monkeypatch.setattr("carom.core.device.stream_engine.StreamEngine.grain", 512)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """A folder in which the checkout is called carom, for the path of other processes."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "carom").symlink_to(ROOT, target_is_directory=True)
    return folder


@pytest.fixture(scope="session")
def carom_cli(package):
    """Runs `python -m carom ...` of this checkout in a fresh process; returns CompletedProcess."""

    def run(*args: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess:
        full = {**os.environ, "PYTHONPATH": str(package), **env}
        return subprocess.run(
            [sys.executable, "-m", "carom", *args],
            capture_output=True, text=True, timeout=timeout, env=full, cwd=package,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def windows_python(package):
    """Runs Python with these arguments in the Windows shape (tests/support/windows_shape); returns CompletedProcess.

    ``options``: those of `tests_windows_shape.environment`. Output is what the program wrote, read in its encoding.
    """

    def run(
        *args: str,
        cwd: Path | None = None,
        timeout: float = 300,
        env: dict[str, str] | None = None,
        **options,
    ):
        base = {**os.environ, "PYTHONPATH": str(package), **(env or {})}
        surroundings = sys.modules["tests_windows_shape"].environment(base=base, **options)
        encoding = "utf-8" if base.get("PYTHONUTF8") == "1" else "cp1252"
        return subprocess.run(
            [sys.executable, *args], capture_output=True, encoding=encoding, timeout=timeout, env=surroundings,
            cwd=cwd or package,
        )  # fmt: skip

    return run


# These take the longest. With xdist's `--dist loadfile` a file that begins last keeps one worker busy alone.
_LONG = (
    "test_bench.py", "test_compile.py", "test_exact.py", "test_faults.py", "test_aitoolkit_contract.py", "test_packed_residents.py",
    "test_codec_triton.py", "test_module_db.py", "test_leftover_memory.py", "test_transformers.py", "test_sharing.py", "test_packed.py",
    "test_disk.py", "test_shared_budget_growth.py", "test_vbar_slots.py", "test_layout_memory.py", "test_pack.py", "test_relayout_failures.py",
)  # fmt: skip


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist begins with the files that have the most tests otherwise


def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def no_saved_tensor_hooks_stay():
    """Fails the test after which saved-tensor hooks are left on the thread: they would reach the next tests."""
    yield
    api, left = torch._C._autograd, 0
    while api._top_saved_tensors_default_hooks(False) is not None:
        api._pop_saved_tensors_default_hooks()
        left += 1
    assert not left, f"{left} saved-tensor hooks are left on the thread"
