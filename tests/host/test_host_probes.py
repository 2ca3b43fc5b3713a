"""Host and hardware probes: limits that apply, bounds on time and memory, and a stand-in torch in place of a GPU."""

from __future__ import annotations

import os
import subprocess
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tests_stand_in_machines as stand_in
import torch
from carom.core.checkpoint import direct_io, direct_io_windows
from carom.core.common.sizes import GIB, MIB
from carom.core.device.pin_ways import PinTrial
from carom.core.host import probe
from carom.core.host.pin_limit import PinLimit
from carom.core.session import settings
from carom.tools.doctor import diagnosis, extras, hardware
from tests_fake_kernel32 import FakeKernel32

whole, gpu_of, memory_of = stand_in.whole, stand_in.gpu_of, stand_in.memory_of


def group_tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_tightest_cgroup_v2_ancestor_counts(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/user.slice/app.scope\n")
    group_tree(tmp_path / "fs", {
        "memory.max": "max\n", "user.slice/memory.max": "8000000\n", "user.slice/memory.current": "3000000\n",
        "user.slice/memory.stat": "anon 1\ninactive_file 900000\nactive_file 100000\n", "user.slice/app.scope/memory.max": "max\n",
    })  # fmt: skip
    assert probe.cgroup_memory(proc, tmp_path / "fs") == (8_000_000, 2_000_000)


def test_a_cgroup_v2_soft_limit_counts_too(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/\n")
    group_tree(tmp_path / "fs", {"memory.max": "9000\n", "memory.high": "5000\n", "memory.current": "100\n"})
    assert probe.cgroup_memory(proc, tmp_path / "fs") == (5000, 100)


def test_a_cgroup_v1_limit_counts_and_its_no_limit_does_not(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    files = {"memory/docker/abc/memory.limit_in_bytes": "7000\n", "memory/docker/abc/memory.usage_in_bytes": "4000\n",
             "memory/docker/abc/memory.stat": "total_inactive_file 400\ntotal_active_file 100\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"}  # fmt: skip
    group_tree(tmp_path / "fs", files)
    assert probe.cgroup_memory(proc, tmp_path / "fs") == (7000, 3500)
    (tmp_path / "fs/memory/docker/abc/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert probe.cgroup_memory(proc, tmp_path / "fs") == (None, None)


@pytest.mark.parametrize("text", ["", "garbage", "0::/../../etc\n", "a:b"])
def test_a_strange_cgroup_file_is_no_limit(tmp_path, text):
    (tmp_path / "cgroup").write_text(text)
    assert probe.cgroup_memory(tmp_path / "cgroup", tmp_path / "none") == (None, None)
    assert probe.cgroup_memory(tmp_path / "absent", tmp_path) == (None, None)


def test_on_windows_a_budget_stays_below_the_cards_own_memory(monkeypatch):
    engine: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), free_bytes=lambda: 8 * GIB)
    monkeypatch.setattr(settings, "on_windows", lambda: False)
    assert settings.within_dedicated(20 * GIB, engine) == (20 * GIB, "")
    monkeypatch.setattr(settings, "on_windows", lambda: True)
    assert settings.within_dedicated(7 * GIB, engine) == (7 * GIB, "")
    budget, note = settings.within_dedicated(20 * GIB, engine)
    assert budget < 8 * GIB and "Windows" in note and "20" in note
    assert settings.within_dedicated(20 * GIB, engine, mine=16 * GIB) == (20 * GIB, "")


def test_a_device_without_streams_or_never_tried_says_so():
    def engine(kind: str, blocking: bool) -> Any:
        return SimpleNamespace(device=torch.device(kind), blocking=blocking, pinner=None)

    assert "no streams" in settings.device_note(engine("mps", True))
    for kind in ("xpu", "mtia"):
        note = settings.device_note(engine(kind, False))
        assert note.startswith(kind) and "copies are from pageable memory" in note
    assert settings.device_note(engine("cuda", False)) == settings.device_note(engine("cpu", True)) == ""


def test_usable_memory_is_what_the_tightest_limit_leaves():
    limit, by, usable = probe.usable_memory(64 * GIB, 40 * GIB, None, None)
    assert (limit, by) == (64 * GIB, "physical memory")
    assert usable == 40 * GIB - int(0.10 * 64 * GIB)
    limit, by, usable = probe.usable_memory(64 * GIB, 40 * GIB, 16 * GIB, 6 * GIB)
    assert limit == 16 * GIB and "cgroup" in by and usable == 8 * GIB
    assert probe.usable_memory(4 * GIB, 1 * GIB, None, None)[2] == 0


def test_wsl_is_told_by_the_kernels_version(tmp_path):
    (tmp_path / "version").write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    assert probe.is_wsl(tmp_path / "version")
    assert not probe.is_wsl(tmp_path / "absent")


def test_a_probe_that_hangs_or_fails_gives_a_reason_in_time():
    start = time.monotonic()
    result, reason = probe.call_with_timeout(lambda: time.sleep(30), 0.2, "the sleeping probe")
    assert result is None and "did not answer" in reason and time.monotonic() - start < 5
    result, reason = probe.call_with_timeout(lambda: 1 // 0, 5, "the dividing probe")
    assert result is None and "ZeroDivisionError" in reason
    assert probe.call_with_timeout(lambda: 7, 5, "the good probe") == (7, None)


def test_what_is_not_there_is_said_in_its_own_words(tmp_path):
    def absent():
        raise probe.NotAvailable("torch sees no device")

    assert probe.call_with_timeout(absent, 5, "the GPU probe") == (None, "torch sees no device")
    for folder in (tmp_path / "none", Path(__file__)):
        result, reason = probe.call_with_timeout(lambda f=folder: probe.disk_rate(f), 5, "the disk probe")
        assert result is None and reason == f"there is no folder {folder}"


def test_a_folder_that_may_not_be_written_is_said(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(probe.tempfile, "mkstemp", refuse)
    with pytest.raises(probe.NotAvailable, match="nothing may be written in"):
        probe.disk_rate(tmp_path)


def test_the_remedy_for_a_drive_that_was_not_to_be_measured_is_its_option():
    def remedy(reason):
        found = diagnosis.diagnose(whole(disk_reason=reason))
        return next(finding.remedy for finding in found if finding.topic == "drive")

    assert "--no-disk" in remedy(probe.NOT_ASKED) and "--folder" in remedy("there is no folder x")


def test_the_disk_probe_measures_and_leaves_nothing_behind(tmp_path):
    found = probe.disk_rate(tmp_path, size=8 * MIB, block=MIB, threads=2, seconds=0.1)
    assert found.one > 0 and found.several > 0
    assert 0 < found.bytes_read <= 8 * MIB
    assert list(tmp_path.iterdir()) == []


def test_on_windows_the_drive_is_measured_past_the_page_cache(tmp_path, monkeypatch):
    """Windows has neither O_DIRECT nor preadv. Reads of a handle without buffering bypass its cache."""
    kernel32 = FakeKernel32()
    monkeypatch.setattr(direct_io_windows, "_load_kernel32", lambda: kernel32)
    monkeypatch.setattr(direct_io.sys, "platform", "win32")
    for name in ("O_DIRECT", "preadv", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)
    found = probe.disk_rate(tmp_path, size=8 * MIB, block=MIB, threads=2, seconds=0.02)
    assert found.direct and found.one > 0 and found.several > 0
    assert not kernel32.handles and list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:  # a file system that refuses unbuffered reads
        patch.setattr(direct_io_windows, "_load_kernel32", lambda: FakeKernel32("read"))
        assert not probe.disk_rate(tmp_path, size=8 * MIB, block=MIB, threads=2, seconds=0.02).direct


def test_the_disk_probe_leaves_nothing_behind_when_reading_fails(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no such luck")

    monkeypatch.setattr(probe, "open_raw", refuse)
    with pytest.raises(OSError, match="luck"):
        probe.disk_rate(tmp_path, size=4 * MIB, block=MIB, threads=2, seconds=0.1)
    assert list(tmp_path.iterdir()) == []


def test_the_disk_probe_refuses_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(probe.psutil, "disk_usage", lambda _: types.SimpleNamespace(free=10 * MIB))
    with pytest.raises(OSError, match="free"):
        probe.disk_rate(tmp_path)
    assert list(tmp_path.iterdir()) == []


class StandInEvent:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def small_gpu(monkeypatch):
    """torch.cuda answered by the CPU: enough for the probe's own logic, not for its figures."""
    cuda = torch.cuda
    monkeypatch.setattr(
        "carom.core.device.video_memory.on_windows", lambda: False
    )  # its DXGI has no such card
    used = {"largest": 0}
    zeros = torch.zeros

    def cpu_zeros(*size, device=None, pin_memory=False, **more):
        used["largest"] = max(used["largest"], size[0] if isinstance(size[0], int) else 0)
        return zeros(*size, **more)

    properties = types.SimpleNamespace(name="NVIDIA GeForce RTX 4090", major=8, minor=9)
    for name, value in {
        "is_available": lambda: True, "current_device": lambda: 0, "mem_get_info": lambda _: (20 * GIB, 24 * GIB),
        "get_device_properties": lambda _: properties, "is_bf16_supported": lambda **_: True, "Event": StandInEvent,
        "synchronize": lambda: None, "empty_cache": lambda: None, "cudart": lambda: object(),
        "device": lambda _: torch.no_grad(),
    }.items():  # fmt: skip
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(torch, "zeros", cpu_zeros)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(hardware, "COMPUTE_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr(
        hardware,
        "measure_compute",
        lambda t, d, dtype: MEASURE(t, d, torch.float32, ((64, 64, 64), (32, 64, 128)), 0.01),
    )
    # What Windows adds is tested in tests/device; the stand-in has no torch.device.
    monkeypatch.setattr(hardware, "room_on_card", lambda device, free: free)
    monkeypatch.setattr(hardware, "pinning", lambda device: ((), None))
    monkeypatch.setattr(hardware, "_smi", lambda query: "1024" if query == "memory.used" else "580.1")
    return used


MEASURE = hardware.measure_compute


def test_the_gpu_probe_fills_every_figure(small_gpu):
    state = torch.random.get_rng_state()
    gpu = hardware.probe_gpu(probe.host_memory())
    assert not gpu.failures
    assert (gpu.name, gpu.kind, gpu.capability, gpu.used_by_others) == (
        "NVIDIA GeForce RTX 4090",
        "cuda",
        "sm_89",
        1024 * MIB,
    )
    assert {(s.direction, s.pinned) for s in gpu.link} == {
        (d, p) for d in ("to device", "to host") for p in (True, False)
    }
    assert [s.size for s in gpu.link if s.pinned and s.direction == "to device"] == list(hardware.LINK_SIZES)
    assert gpu.flops > 0 and gpu.memory_rate > 0 and gpu.pin_rate > 0
    assert 0 < gpu.launch_seconds < 0.01 and gpu.launch_seconds < gpu.layer_seconds < 0.1
    assert any(
        f.topic == "host" and "Python issues an operator in" in f.value
        for f in diagnosis.diagnose(whole(gpu))
    )
    assert small_gpu["largest"] <= 256 * MIB
    assert torch.equal(state, torch.random.get_rng_state()), "the probe drew random numbers"


def test_a_probe_that_runs_out_of_memory_is_a_finding_and_not_a_crash(small_gpu, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hardware, "measure_link", out_of_memory)
    gpu = hardware.probe_gpu(probe.host_memory())
    assert gpu.link == () and "OutOfMemoryError" in gpu.failures["link"] and gpu.flops
    assert any("out of memory" in f.value and f.verdict == "poor" for f in diagnosis.diagnose(whole(gpu=gpu)))


def test_little_free_vram_means_small_copies(small_gpu):
    samples = hardware.measure_link(torch, "cpu", free=200 * MIB, seconds=0.0)
    assert max(s.size for s in samples) <= 200 * MIB // 16


def test_the_combined_rate_is_all_flops_over_all_time():
    by_shape = (((1, 1, 1), 2.0), ((1, 1, 3), 2.0))
    assert hardware.combined_rate(by_shape) == pytest.approx(2.0)
    assert hardware.combined_rate((((1, 1, 1), 1.0), ((1, 1, 1), 3.0))) == pytest.approx(1.5)


def verdicts(found):
    return {finding.topic: finding.verdict for finding in diagnosis.diagnose(found)}


def test_a_good_machine_gets_good_verdicts():
    disk = probe.DiskRate("/", 6.5e9, 7e9, 4, True, 128 * MIB)
    found = verdicts(whole(gpu_of(), disk=disk, disk_reason=None))
    assert {found[topic] for topic in ("torch", "GPU", "link, pinned", "compute", "drive")} == {"good"}


@pytest.mark.parametrize("changes, topic, verdict", [
    ({"used_by_others": 8 * GIB}, "VRAM", "poor"), ({"free": 4 * GIB}, "VRAM", "poor"), ({"free": 11 * GIB}, "VRAM", "fair"),
    ({"flops": 80e12}, "compute", "fair"), ({"name": "Some Card"}, "compute", "info"), ({"flops": None}, "compute", "poor"),
    ({"link": ()}, "link, pinned", "poor"), ({"pin_rate": None}, "pinning", "poor"), ({"flops_dtype": "fp16"}, "GPU", "fair"),
    ({"link": (hardware.LinkSample("to device", True, MIB, 11e9),)}, "link, pinned", "fair"),
    ({"link": (hardware.LinkSample("to device", True, MIB, 5e9),)}, "link, pinned", "poor"),
])  # fmt: skip
def test_what_is_wrong_with_a_card_is_said(changes, topic, verdict):
    assert verdicts(whole(gpu_of(**changes)))[topic] == verdict


@pytest.mark.parametrize("changes, topic, verdict", [
    ({"usable": 2 * GIB}, "RAM", "poor"), ({"limit": 16 * GIB, "cgroup_limit": 16 * GIB}, "RAM limit", "fair"),
    ({"commit_limit": 66 * GIB, "commit_left": 50 * GIB}, "page file", "poor"),
    ({"commit_limit": 68 * GIB, "commit_left": 62 * GIB}, "page file", "fair"),
    ({"commit_limit": 96 * GIB, "commit_left": 80 * GIB}, "page file", "good"),
    ({"swap_total": 8 * GIB, "swap_used": 4 * GIB}, "swap", "poor"), ({"memlock": 64 * 1024}, "ulimit -l", "info"),
    ({"wsl": True}, "WSL", "fair"),
])  # fmt: skip
def test_what_bounds_pinning_is_said(changes, topic, verdict):
    assert verdicts(whole(memory=memory_of(**changes)))[topic] == verdict


def test_a_torch_that_cannot_be_imported_is_a_finding():
    found = whole(torch=hardware.TorchInstall(None, "none", "OSError: libcudart.so"))
    assert verdicts(found)["torch"] == "missing"


def test_a_finding_without_remedy_or_with_an_unknown_verdict_is_refused():
    with pytest.raises(ValueError):
        diagnosis.Finding("a", "b", "good", "")
    with pytest.raises(ValueError):
        diagnosis.Finding("a", "b", "splendid", "c")


def aimdo_answering(monkeypatch, stdout="", code=0, error=None):
    def answer(*_, **__):
        if error is not None:
            raise error
        return subprocess.CompletedProcess([], code, stdout, "")

    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(extras.subprocess, "run", answer)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return extras.probe_aimdo(gpu_of().kind, seconds=1)


@pytest.mark.parametrize("answer, usable, reason", [
    ({"stdout": '{"reason": ""}\n'}, True, "works"), ({"stdout": '{"reason": "did not load"}\n'}, False, "did not load"),
    ({"code": -11}, False, "exit code -11"),
    ({"stdout": "nonsense\n"}, False, "no answer"), ({"error": subprocess.TimeoutExpired("x", 1)}, False, "did not answer"),
])  # fmt: skip
def test_the_aimdo_probe_tells_its_outcomes_apart(monkeypatch, answer, usable, reason):
    found = aimdo_answering(monkeypatch, **answer)
    assert found.usable is usable and reason in found.reason


def test_aimdo_is_not_tried_under_expandable_segments(monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(extras.subprocess, "run", lambda *_, **__: pytest.fail("tried"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "expandable_segments" in extras.probe_aimdo(gpu_of().kind).reason


def test_the_ways_of_pinning_and_its_limit_are_said_where_a_system_has_them():
    def said(**changes):
        return {f.topic: (f.verdict, f.value) for f in diagnosis.diagnose(whole(gpu_of(**changes)))}

    assert not {"ways of pinning", "pinned limit"} & set(said())
    heap, section = PinTrial("heap", None, 3e9), PinTrial("section", "error 801", 0.0)
    limit = PinLimit(int(12.8 * GIB), "Windows says so")
    found = said(pin_trials=(heap, section), pin_limit=limit)
    assert found["ways of pinning"] == ("good", "heap: 3.0 GB/s; section: refused (error 801)")
    assert "12.80 GiB" in found["pinned limit"][1] and "Windows says so" in found["pinned limit"][1]
    assert said(pin_trials=(section,))["ways of pinning"][0] == "poor"
