"""Triton decodes only where a trial kernel compiles, runs and gives the right bits."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import threading

import pytest
import torch

backends = importlib.import_module("carom.core.codec.backends")
CPU = torch.device("cpu")

TRIAL = """
import importlib, torch
backends = importlib.import_module("carom.core.codec.backends")
unit = importlib.import_module("carom.core.codec.unit_decoder")
print("right:" + backends.triton_hindrance(torch.device("cpu")))
make = unit.UnitDecoder._make_groups
def shifted(self, along):  # the exponent base one too high
    groups = make(self, along)
    for group in groups:
        group.table[:, 8] += 1
    return groups
unit.UnitDecoder._make_groups = shifted
print("damaged:" + backends.triton_hindrance(torch.device("cpu")))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_trial_runs_a_kernel_and_compares_its_bits(package):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRIAL], capture_output=True, text=True, timeout=240, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    right, damaged = (line.partition(":")[2] for line in done.stdout.splitlines())
    if "interpreter" in right or "np." in right:
        pytest.skip(f"Triton's interpreter does not run here: {right}")
    assert right == "" and "other bits" in damaged


def test_a_triton_that_imports_but_cannot_compile_is_not_used_and_named_once(monkeypatch, caplog):
    def no_compiler(device):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(backends, "_decodes_exactly", no_compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    backends.triton_works.cache_clear()
    try:
        with caplog.at_level("INFO", logger=backends.log.name):
            assert backends.triton_works() is False and backends.triton_works() is False
    finally:
        backends.triton_works.cache_clear()
    (line,) = caplog.messages
    assert "C compiler" in line and "torch operations" in line


def test_a_card_that_is_full_at_the_trial_does_not_turn_triton_off_for_good(monkeypatch):
    answers = [torch.OutOfMemoryError("full"), True]

    def decodes(device):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(backends, "_decodes_exactly", decodes)
    monkeypatch.setattr(backends, "_trial", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    backends.triton_works.cache_clear()
    try:
        assert [backends.triton_works() for _ in range(3)] == [False, True, True]
    finally:
        backends.triton_works.cache_clear()


def test_an_unsupported_architecture_is_refused_before_a_kernel_runs(monkeypatch):
    monkeypatch.setattr(backends, "_decodes_exactly", lambda device: pytest.fail("a kernel was tried"))
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    properties = type("Properties", (), {"gcnArchName": "gfx1030"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert "gfx1030" in backends.triton_hindrance(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("arch", "supported"),
    [("gfx1010", False), ("gfx1036", False), ("gfx906:sramecc+", False), ("gfx90a:sramecc+:xnack-", True),
     ("gfx942", True), ("gfx1100", True), ("gfx1151", True), ("gfx1201", True)],
)  # fmt: skip
def test_architectures_of_tritons_amd_backend(arch, supported):
    assert backends.triton_supports(arch) is supported


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Lets the codec believe in a GPU on which nothing was tried yet. Returns the calls of `_decodes_exactly`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backends, "_trial", None)
    monkeypatch.setattr(backends, "_warmed", set())
    calls, go = [], threading.Event()

    def decodes(device, dtype=torch.bfloat16, power=1):
        assert go.wait(20)
        calls.append((threading.current_thread().name, dtype, power))
        return True

    monkeypatch.setattr(backends, "_decodes_exactly", decodes)
    monkeypatch.setattr(backends, "_encodes_exactly", lambda device, dtype: calls.append(("encoded", dtype)))
    backends.triton_works.cache_clear()
    yield calls, go
    go.set()
    for thread in threading.enumerate():
        if thread.name == "carom-triton":
            thread.join()
    backends.triton_works.cache_clear()


def test_kernels_are_compiled_beside_the_caller_and_once(on_a_gpu):
    calls, go = on_a_gpu
    backends.warm_up(torch.device("cuda", 0), [torch.float8_e4m3fn, torch.int8])
    backends.warm_up(torch.device("cuda", 0), [torch.float8_e4m3fn])
    assert calls == []  # the callers have not waited
    go.set()
    assert backends.triton_works()  # waits for the thread, and tries nothing itself
    assert calls[0] == ("carom-triton", torch.bfloat16, 1)
    e4m3 = torch.float8_e4m3fn
    rest = {("encoded", torch.bfloat16), ("carom-triton", e4m3, 1), ("carom-triton", e4m3, 2)}
    assert len(calls) == 4 and set(calls[1:]) == rest


def test_an_error_while_kernels_are_compiled_ahead_is_left_to_their_first_use(on_a_gpu, monkeypatch):
    _, go = on_a_gpu
    go.set()

    def no_device(device):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "device", no_device)
    backends.warm_up(torch.device("cuda", 0), [torch.float16])
    assert backends.triton_works()


def test_nothing_is_compiled_ahead_for_the_cpu(on_a_gpu):
    backends.warm_up(CPU, [torch.bfloat16])
    assert "carom-triton" not in [thread.name for thread in threading.enumerate()]


def test_an_encoder_that_writes_other_bytes_is_not_used(on_a_gpu, monkeypatch):
    _, go = on_a_gpu
    go.set()
    for works in (True, False):
        monkeypatch.setattr(backends, "_encodes_exactly", lambda device, works=works: works)
        backends.triton_encodes.cache_clear()
        assert backends.triton_encodes() is works
    backends.triton_encodes.cache_clear()
