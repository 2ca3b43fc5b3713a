"""Triton decodes only where a trial kernel compiles, runs and gives the right bits."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

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
