"""GPUDirect Storage through kvikio, with a small stand-in for it: when it is used, what comes of it, when it fails.

The stand-in has the calls that kvikio documents; it shows that ours are made as documented and that nothing is lost. It
cannot show that a drive and a GPU work together.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import carom
import pytest
import torch
from carom.core.host import gds
from tests_disk_harness import uniform
from tests_limits import units_apart_from


class StandIn:
    """kvikio as far as Carom calls it, over CPU memory; counts, and fails when told to."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, mode: Any, available: bool = True, seconds: float = 0.0
    ) -> None:
        self.reads, self.opened, self.closed, self.fail = 0, 0, 0, False
        outer = self

        class Future:
            def __init__(self, work: Any) -> None:
                self._result: Any = None

                def run() -> None:
                    try:
                        self._result = work()
                    except Exception as error:
                        self._result = error

                self._thread = threading.Thread(target=run)
                self._thread.start()

            def get(self) -> int:
                self._thread.join()
                if isinstance(self._result, Exception):
                    raise self._result
                return self._result

        class CuFile:
            def __init__(self, file: str, flags: str = "r") -> None:
                self._file, self._lock = open(file, "rb", buffering=0), threading.Lock()  # noqa: SIM115
                outer.opened += 1

            def pread(self, buf: Any, size: int | None = None, file_offset: int = 0) -> Future:
                outer.reads += 1
                return Future(lambda: self._read(buf, size, file_offset))

            def _read(self, buf: torch.Tensor, size: int, offset: int) -> int:
                if outer.fail:
                    raise RuntimeError("cuFile internal error")
                if seconds:
                    threading.Event().wait(seconds)
                with self._lock:
                    self._file.seek(offset)
                    return self._file.readinto(memoryview(buf.numpy())[:size])

            def close(self) -> None:
                self._file.close()
                outer.closed += 1

        package = types.ModuleType("kvikio")
        package.__spec__ = types.SimpleNamespace(name="kvikio")  # type: ignore[assignment]
        package.CuFile = CuFile  # type: ignore[attr-defined]
        defaults = types.ModuleType("kvikio.defaults")
        if isinstance(mode, bool):
            defaults.compat_mode = lambda: mode  # type: ignore[attr-defined]
        else:
            defaults.get = lambda name: types.SimpleNamespace(name=mode)  # type: ignore[attr-defined]
        driver = types.ModuleType("kvikio.cufile_driver")
        driver.DriverProperties = lambda: types.SimpleNamespace(is_gds_available=available)  # type: ignore[attr-defined]
        for module in (package, defaults, driver):
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose kernel module is loaded, with the CPU in the place of the GPU."""
    stats = tmp_path / "stats"
    stats.write_text("")
    monkeypatch.setattr(gds, "NVIDIA_FS", str(stats))
    monkeypatch.setattr(gds, "DEVICES", ("cpu",))
    monkeypatch.setattr(gds, "_MEASURED_GAIN", {})
    units_apart_from(monkeypatch, 1024)
    return stats


def run(tmp_path: Any, passes: int = 2) -> tuple[list[bool], Any]:
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    with (
        carom.stream(empty, device="cpu", vram=int(0.7 * nbytes), weights=path, ram="1MiB") as session,
        torch.no_grad(),
    ):
        same = [torch.equal(empty(x), loaded(x)) for _ in range(passes)]
        return same, session.report()


def said(report: Any) -> bool:
    return any("GPUDirect" in note for note in report.notes)


@pytest.mark.parametrize("mode", [False, "OFF", "AUTO"])
def test_where_it_is_real_and_faster_residents_come_past_host_memory(machine, monkeypatch, tmp_path, mode):
    kvikio = StandIn(monkeypatch, mode)
    monkeypatch.setattr(gds, "LEAST_GAIN", 0.0)
    same, report = run(tmp_path)
    assert same == [True, True] and said(report)
    assert kvikio.reads > 10 and kvikio.opened == kvikio.closed > 0
    assert report.disk_bytes_per_second and report.disk_bytes_per_second > 0


@pytest.mark.parametrize(
    "why", ["compatible, as ever", "compatible", "no driver", "no module", "slower", "no GPU"]
)
def test_otherwise_it_is_left_alone(machine, monkeypatch, tmp_path, why):
    mode = {"compatible, as ever": True, "compatible": "ON"}.get(why, "AUTO")
    kvikio = StandIn(
        monkeypatch, mode, available=why != "no driver", seconds=0.05 if why == "slower" else 0.0
    )
    if why == "no module":
        machine.unlink()
    if why == "no GPU":
        monkeypatch.setattr(gds, "DEVICES", ("cuda",))
    same, report = run(tmp_path)
    assert same == [True, True] and not said(report)
    assert (kvikio.reads > 0) == (why == "slower") and kvikio.opened == kvikio.closed
    before = kvikio.reads
    if why == "slower":  # known by now
        (tmp_path / "again").mkdir()
        assert run(tmp_path / "again")[0] == [True, True] and kvikio.reads == before


def test_when_it_fails_in_use_the_way_through_host_memory_takes_over(machine, monkeypatch, tmp_path, caplog):
    kvikio = StandIn(monkeypatch, "AUTO")
    monkeypatch.setattr(gds, "LEAST_GAIN", 0.0)
    loaded, empty, path, nbytes = uniform(tmp_path)
    x = torch.ones(1, 64)
    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="1MiB"), torch.no_grad():
        assert torch.equal(empty.blocks[0](x), loaded.blocks[0](x))
        kvikio.fail = True
        for _ in range(2):
            assert torch.equal(empty(x), loaded(x))
    assert "not used any more" in caplog.text and kvikio.opened == kvikio.closed


def test_a_session_closed_early_waits_for_what_is_under_way(machine, monkeypatch, tmp_path):
    kvikio = StandIn(monkeypatch, "AUTO", seconds=0.02)
    monkeypatch.setattr(gds, "LEAST_GAIN", 0.0)
    loaded, empty, path, nbytes = uniform(tmp_path)
    before = threading.active_count()
    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="1MiB"), torch.no_grad():
        empty.blocks[0](torch.ones(1, 64))
    assert threading.active_count() == before and kvikio.opened == kvikio.closed


def test_a_file_that_was_replaced_is_noticed(machine, monkeypatch, tmp_path):
    StandIn(monkeypatch, "AUTO")
    monkeypatch.setattr(gds, "LEAST_GAIN", 0.0)
    _, empty, path, nbytes = uniform(tmp_path)
    with carom.stream(empty, device="cpu", vram=2 * nbytes, weights=path, ram="1MiB"), torch.no_grad():
        os.utime(path, ns=(1, 1))
        with pytest.raises(carom.WeightsError, match="written to"):
            empty(torch.ones(1, 64))
