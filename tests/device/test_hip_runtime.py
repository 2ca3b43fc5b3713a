"""The HIP runtime called directly, over a stand-in library (tests/support/hip_stand_in.c) that a C compiler builds here."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from carom.core.common.errors import CaromError
from carom.core.device import cuda_runtime
from carom.core.device.runtime_library import choose, loaded_libraries
from carom.core.device.stream_engine import runtime_pinner
from carom.core.host.arena import HostArena

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux",
    reason="builds a Linux library: needs a C compiler (cc) there",
)


@pytest.fixture(scope="module")
def build(tmp_path_factory, root: Path) -> Callable[..., Path]:
    """A function that builds the stand-in as a file of some name, with what it links to; loads nothing."""

    def build(name: str, version: int = 0, *, folder: str = "rocm", links: Path | None = None) -> Path:
        assert COMPILER
        place = tmp_path_factory.getbasetemp() / folder
        place.mkdir(exist_ok=True)
        source = ["-x", "c", str(root / "tests" / "support" / "hip_stand_in.c"), f"-DVERSION={version}"]
        if links is not None:  # like torch's own library: no function of the runtime, but a dependency on it
            source = ["-x", "c", "/dev/null", "-x", "none", "-Wl,--no-as-needed", str(links), f"-Wl,-rpath,{links.parent}"]  # fmt: skip
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(place / name), *source],
            check=True, capture_output=True,
        )  # fmt: skip
        return place / name

    return build


@pytest.fixture(scope="module")
def library(build) -> Any:
    return ctypes.CDLL(str(build("stand_in.so")))  # by a name under which nothing is looked for


@pytest.fixture
def hip(library, monkeypatch) -> Iterator[Any]:
    """The stand-in as the runtime of a torch for ROCm, in which no function fails."""
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    monkeypatch.setattr(cuda_runtime, "runtime_library", lambda: (library, "hip"))
    yield library
    library.standInFail(b"", 0)
    library.hipGetLastError()


# -- which library

WINDOWS = r"C:\ComfyUI\python_embeded\Lib\site-packages\_rocm_sdk_core\bin" + "\\"


@pytest.mark.parametrize(
    ("paths", "stem", "version", "found"),
    [
        (["/opt/rocm/lib/libamdhip64.so.5.7.50700"], "amdhip64", "5.7.31921", 0),
        (["/opt/rocm/lib/libamdhip64.so.6", "/v/_rocm_sdk_core/lib/libamdhip64.so.7"], "amdhip64", "7.2.1", 1),
        (["/opt/rocm/lib/libamdhip64.so.6", "/v/_rocm_sdk_core/lib/libamdhip64.so.7"], "amdhip64", "6.4.2", 0),
        (["/v/torch/lib/libc10_hip.so", "/v/torch/lib/libamdhip64.so"], "amdhip64", "7.2.1", 1),
        ([WINDOWS + "amdhip64_6.dll", WINDOWS + "amdhip64_7.dll"], "amdhip64", "7.2.1", 1),
        ([WINDOWS + "AMDHIP64_8.DLL"], "amdhip64", "8.0.1", 0),
        ([WINDOWS + "amdhip64.dll", WINDOWS + "amdhip64_6.dll"], "amdhip64", "6.4.2", 1),
        ([WINDOWS + "amdhip64.dll"], "amdhip64", "5.7.0", 0),
        ([WINDOWS + "cudart64_110.dll"], "cudart", "11.8", 0),
        ([WINDOWS + "cudart64_12.dll", WINDOWS + "cudart64_13.dll"], "cudart", "13.0", 1),
        (["/v/torch/lib/libcudart-9335f6a2.so.12"], "cudart", "12.4", 0),
        (["/v/lib/libamdhip64_not.so", WINDOWS + "amdhip64_7.dll.mui", WINDOWS + "hiprtc0702.dll"], "amdhip64", "7.2", None),
        ([], "amdhip64", "7.2.1", None),
    ],
)  # fmt: skip
def test_the_runtime_is_chosen_among_the_loaded_files_of_any_version(paths, stem, version, found):
    assert choose(paths, stem, version) == (None if found is None else paths[found])


def version_in_use() -> int | None:
    """The version of the library that `find` found, by what its own function says."""
    runtime = cuda_runtime.find()
    if runtime is None:
        return None
    version = ctypes.c_int()
    cuda_runtime.runtime_library()[0].hipRuntimeGetVersion(ctypes.byref(version))  # type: ignore[index]
    return version.value


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines on which no other runtime is loaded")
def test_the_library_that_torch_is_linked_with_or_has_loaded_is_used_and_nothing_else_is_loaded(
    build, monkeypatch
):
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    six, seven = build("libamdhip64.so.6", 6), build("libamdhip64.so.7", 7)
    assert version_in_use() is None
    assert str(six) not in loaded_libraries()
    ctypes.CDLL(str(six))
    assert version_in_use() == 6
    ctypes.CDLL(str(seven))
    assert version_in_use() == 7
    torch_own = build("libamdhip64.so", 77, folder="own")
    linked = build("libc10_hip.so", folder="lib", links=torch_own)
    monkeypatch.setattr(torch, "__file__", str(linked.parents[1] / "__init__.py"))
    monkeypatch.setattr(torch.version, "hip", "6.4.2")  # of whatever version
    assert version_in_use() == 77


# -- what is called

CALLS: list[tuple[str, Callable[[Any, Any], object]]] = [
    ("MemcpyAsync", lambda runtime, event: runtime.copy(event.handle, event.handle, 1, 5)),
    ("EventRecord", lambda runtime, event: runtime.record(event, 5)),
    ("StreamWaitEvent", lambda runtime, event: runtime.wait(5, event)),
    ("EventQuery", lambda runtime, event: runtime.reached(event)),
    ("EventSynchronize", lambda runtime, event: runtime.synchronize(event)),
    ("EventCreateWithFlags", lambda runtime, event: runtime._new_event()),
]


@needs_compiler
@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
@pytest.mark.parametrize(("code", "meaning"), [(719, "hipErrorLaunchFailure"), (2, "hipErrorOutOfMemory")])
def test_a_call_that_fails_names_the_function_the_error_and_a_remedy_and_leaves_no_error(
    hip, name, call, code, meaning
):
    runtime = cuda_runtime.find()
    assert runtime is not None
    event = runtime.event()
    call(runtime, event)  # a sound call works
    hip.standInFail(f"hip{name}".encode(), code)
    with pytest.raises(
        cuda_runtime.DeviceError, match=rf"hip{name} failed with error {code} \({meaning}\)"
    ) as raised:
        call(runtime, event)
    assert raised.value.code == code and isinstance(raised.value, CaromError)
    assert "start the process again" in str(raised.value) and "AMD_SERIALIZE_KERNEL=3" in str(raised.value)
    assert hip.hipGetLastError() == 0


@needs_compiler
def test_an_event_is_reached_or_not_yet_and_all_events_are_destroyed_at_the_end(hip):
    gc.collect()
    before = hip.standInEvents()
    runtime = cuda_runtime.find()
    assert runtime is not None
    event = runtime.event()
    runtime.record(event, 5)
    assert runtime.reached(event)
    hip.standInFail(b"hipEventQuery", 600)  # hipErrorNotReady
    assert not runtime.reached(event)
    assert hip.hipGetLastError() == 0 and hip.standInEvents() == before + 1
    del event, runtime
    gc.collect()
    assert hip.standInEvents() == before


def engine_over(runtime: cuda_runtime.Runtime) -> Any:
    """A `RuntimeEngine` on host memory, which the stand-in copies."""
    engine: Any = object.__new__(cuda_runtime.RuntimeEngine)
    engine.device, engine._runtime = torch.device("cpu", 0), runtime
    engine._current_device = engine._raw_stream = lambda *index: 5 if index else 0
    engine._in_raw, engine._device_context = 6, contextlib.nullcontext
    return engine


@needs_compiler
def test_the_test_copy_of_an_engine_is_right_or_the_engine_is_not_used(hip):
    runtime = cuda_runtime.find()
    assert runtime is not None
    engine_over(runtime).prove()
    runtime.copy = lambda *arguments: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="other bytes"):
        engine_over(runtime).prove()


@needs_compiler
@pytest.mark.parametrize(("code", "meaning"), [(2, "hipErrorOutOfMemory"), (1, "hipErrorInvalidValue")])
def test_memory_is_pinned_and_a_refused_pin_is_reported_with_a_remedy(hip, monkeypatch, code, meaning):
    # torch has these calls under CUDA's names in its builds for ROCm too
    calls = {f"cuda{name}": getattr(hip, f"hip{name}") for name in ("HostRegister", "HostUnregister")}
    hip.hipHostRegister.argtypes, hip.hipHostUnregister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint), (ctypes.c_void_p,)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(**calls))
    arena, found = HostArena(runtime_pinner(torch.device("cuda", 0)), None), ctypes.c_void_p()
    block = arena.allocate(4096)
    address = block.data.data_ptr()

    def is_pinned() -> bool:
        # The runtime gives only pinned memory an address on the device.
        return hip.hipHostGetDevicePointer(ctypes.byref(found), ctypes.c_void_p(address), 0) == 0

    assert not is_pinned()
    assert arena.pin(block) and is_pinned()
    block.unpin()
    assert not is_pinned() and arena.pinned_bytes == 0

    hip.standInFail(b"hipHostRegister", code)
    refused = arena.allocate(4096)
    assert not arena.pin(refused) and arena.pinned_bytes == 0 and arena.pageable_bytes == 4096
    (note,) = arena.notes
    assert f"hipHostRegister of 4096 bytes failed with error {code} ({meaning}); set a smaller ram" in note
    assert hip.hipGetLastError() == 0


def test_loaded_libraries_are_enumerated():
    if not Path("/proc/self/maps").exists() and sys.platform != "win32":
        pytest.skip("this system lists no loaded libraries")
    assert any("torch" in Path(path).name for path in loaded_libraries())
