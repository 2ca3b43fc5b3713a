"""How reads reach memory: the faster of two ways wherever the drive is what binds, and memory on huge pages."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from carom.core.checkpoint.disk_reader import DiskReader, ReaderPolicy
from carom.core.checkpoint.index import open_index
from carom.core.checkpoint.read_concurrency import ReadLimit
from carom.core.checkpoint.read_path import ReadPathPolicy, ReadPathTuner
from carom.core.common.huge_pages import HUGE, PAGE, allocate_pages
from safetensors.torch import save_file
from tests_disk_harness import NativeFile

MB = 1 << 20
SMALL = ReadPathPolicy(
    paths=(0, 4 * MB), window=64 * MB, rounds=4, gain=1.05, retrial_bytes=(1024 * MB, 4096 * MB)
)


def stream(
    tuner: ReadPathTuner, straight: float, aside: float, nbytes: int, noise: float = 0.0, seed: int = 0
) -> float:
    """Read ``nbytes`` in reads of 4 MiB from a drive of these rates (bytes per second): the seconds."""
    drawn, now, done = random.Random(seed), 0.0, 0
    while done < nbytes:
        way = tuner.bounce_bytes
        now += 4 * MB / (aside if way else straight) / drawn.uniform(1 - noise, 1 + noise)
        tuner.ended(now, 4 * MB, way)
        done += 4 * MB
    return now


@pytest.mark.parametrize(("straight", "aside", "wanted"), [
    (2e9, 3e9, 4 * MB), (3e9, 2e9, 0), (3e9, 3e9, 0), (3e9, 3.1e9, 0), (14e9, 10e9, 0), (2e9, 2.2e9, 4 * MB),
])  # fmt: skip
def test_the_faster_way_is_kept_and_straight_where_nothing_is_gained(straight, aside, wanted):
    tuner = ReadPathTuner(SMALL)
    stream(tuner, straight, aside, 1024 * MB)
    assert tuner.bounce_bytes == wanted
    assert tuner.rates == pytest.approx({0: straight, 4 * MB: aside}, rel=0.05)


def test_the_fastest_of_several_ways_is_found():
    tuner, now, rates = (
        ReadPathTuner(ReadPathPolicy(window=64 * MB)),
        0.0,
        {0: 2e9, 4 * MB: 2.5e9, 2 * MB: 2.9e9},
    )
    for _ in range(1024 * MB // (4 * MB)):
        way = tuner.bounce_bytes
        now += 4 * MB / rates[way]
        tuner.ended(now, 4 * MB, way)
    assert tuner.bounce_bytes == 2 * MB and tuner.rates == pytest.approx(rates, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_a_clear_gain_is_found_in_noise(seed):
    tuner = ReadPathTuner(SMALL)
    stream(tuner, 2e9, 2.8e9, 1024 * MB, noise=0.4, seed=seed)
    assert tuner.bounce_bytes


def test_a_drive_that_slows_down_meanwhile_favours_neither_way():
    tuner, now = ReadPathTuner(SMALL), 0.0
    for number in range(600 * MB // (4 * MB)):
        way = tuner.bounce_bytes
        now += 4 * MB / 3e9 * (1 + number / 100)
        tuner.ended(now, 4 * MB, way)
    assert len(tuner.rates) == 2 and tuner.rates[0] == pytest.approx(tuner.rates[4 * MB], rel=0.05)


def test_time_in_which_nobody_wanted_bytes_says_nothing():
    tuner, now = ReadPathTuner(SMALL), 0.0
    for number in range(1024 * MB // (4 * MB)):
        way = tuner.bounce_bytes
        now += 4 * MB / (2e9 if way else 3e9)
        idle = not way and number % 4 == 0
        tuner.ended(now, 4 * MB, way)
        if idle:
            tuner.idle()
            now += 0.1
    assert tuner.rates == pytest.approx({0: 3e9, 4 * MB: 2e9}, rel=0.1) and not tuner.bounce_bytes


def test_a_trial_costs_little_and_is_made_again():
    tuner = ReadPathTuner(SMALL)
    seconds = stream(tuner, 3e9, 2e9, 6000 * MB)
    assert seconds * 3e9 / (6000 * MB) < 1.12 and tuner.bounce_bytes == 0
    stream(tuner, 2e9, 3e9, 6000 * MB)  # another drive by now
    assert tuner.bounce_bytes == 4 * MB


def test_a_first_trial_that_was_marred_is_soon_corrected():
    tuner = ReadPathTuner(SMALL)
    stream(tuner, 0.1e9, 0.2e9, 400 * MB)  # memory that the system gives for the first time
    stream(tuner, 0.2e9, 0.1e9, 112 * MB)
    stream(tuner, 3e9, 2e9, 3000 * MB)
    assert tuner.bounce_bytes == 0 and tuner.rates == pytest.approx({0: 3e9, 4 * MB: 2e9}, rel=0.05)


class ByAddress(NativeFile):
    """A drive that takes longer for reads into some memory than into all other."""

    slow: tuple[int, int] = (0, 0)
    seconds = 0.0
    one_at_a_time = threading.Lock()

    def read_into(self, buffer: memoryview, offset: int) -> int:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        if self.slow[0] <= address < self.slow[1]:
            with self.one_at_a_time:
                time.sleep(self.seconds)
        return super().read_into(buffer, offset)


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_readers_take_the_way_that_is_faster_with_the_same_bytes(tmp_path: Path, seconds, monkeypatch):
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 2 * MB + 777, np.uint8))
    save_file({"w": data}, tmp_path / "m.safetensors")
    entry = open_index(tmp_path / "m.safetensors")["w"]
    lead = entry.offset % PAGE
    target = allocate_pages(len(data) + lead)[lead:]
    address = np.frombuffer(target, np.uint8).ctypes.data
    monkeypatch.setattr(ByAddress, "slow", (address, address + len(target)))
    monkeypatch.setattr(ByAddress, "seconds", seconds)
    tuner = ReadPathTuner(ReadPathPolicy(paths=(0, 64 << 10, 32 << 10), window=256 << 10, rounds=2))
    with DiskReader(ReaderPolicy(workers=2, chunk=64 << 10), opener=ByAddress, path_tuner=tuner) as reader:
        if not NativeFile(entry.file.path).direct:
            pytest.skip("no direct reads here: there is but one way")
        for _ in range(3):
            target[:] = bytes(len(target))
            reader.submit(entry, target).result(30)
            assert bytes(target) == data.numpy().tobytes()
        assert len(tuner.rates) == 3
        if seconds:
            assert tuner.bounce_bytes and reader.stats().bounced > 4 * MB
    assert reader.stats().bytes == 3 * len(data)


def test_readers_that_share_lanes_have_no_more_reads_under_way_than_those(tmp_path: Path):
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1 * MB, np.uint8))
    save_file({"w": data}, tmp_path / "m.safetensors")
    entry = open_index(tmp_path / "m.safetensors")["w"]
    lock, now, most = threading.Lock(), [0], [0]

    class Counted(NativeFile):
        def read_into(self, buffer: memoryview, offset: int) -> int:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.001)
            try:
                return super().read_into(buffer, offset)
            finally:
                with lock:
                    now[0] -= 1

    limit, policy = ReadLimit(3), ReaderPolicy(workers=3, chunk=16 << 10)
    with (
        DiskReader(policy, opener=Counted, read_limit=limit) as one,
        DiskReader(policy, opener=Counted, read_limit=limit) as two,
    ):
        targets = [bytearray(len(data)) for _ in range(4)]
        for handle in [r.submit(entry, t) for r, t in zip((one, two, one, two), targets, strict=True)]:
            handle.result(30)
    assert most[0] == 3 and all(bytes(target) == data.numpy().tobytes() for target in targets)


@pytest.mark.parametrize("nbytes", [1, PAGE, HUGE - 1, HUGE, HUGE + 1, 5 * HUGE + 3 * PAGE + 5])
def test_fresh_memory_is_exact_aligned_and_holds_no_more_than_was_asked_for(nbytes):
    before, kept = resident(), []
    for _ in range(16):
        kept.append(memory := allocate_pages(nbytes))
        address = np.frombuffer(memory, np.uint8).ctypes.data
        assert len(memory) == nbytes and not memory.readonly and not any(memory[:10])
        assert address % (HUGE if nbytes >= HUGE and sys.platform == "linux" else PAGE) == 0
        np.frombuffer(memory, np.uint8)[:] = 1
    assert resident() - before <= 16 * -(-nbytes // PAGE) * PAGE + MB
    assert [m.tobytes() for m in kept] == [b"\1" * nbytes] * 16


def resident() -> int:
    """Bytes of this process in memory; 0 where Linux does not say."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE
    except OSError:
        return 0
