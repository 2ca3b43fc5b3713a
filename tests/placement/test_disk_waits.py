"""Host memory between the disk and the device: read into only when no copy reads it any more, pinned meanwhile, given back."""

from __future__ import annotations

import contextlib
import time

import carom
import pytest
import tests_disk_harness as disk
import torch
from carom.core.checkpoint.disk_reader import DiskReader
from carom.core.device.simulated import SimulatedEngine
from carom.core.host.host_cache import HostCache
from carom.core.placement.file_backing import FileBacking
from carom.core.placement.file_reads import FileReads
from tests_inside import inside

pytestmark = pytest.mark.timeout(60)
X = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def watched(monkeypatch):
    """A read into memory from which a copy is still to land raises. Yields the engines that were made."""
    engines: list[SimulatedEngine] = []
    make, submit, copy_in = SimulatedEngine.__init__, DiskReader.submit_reads, SimulatedEngine.copy_in

    def init(self, config):
        make(self, config)
        self.under_way = []  # its number on the copy stream, and where its source lies
        engines.append(self)

    def noted(self, target, source, after, timed):
        low = source.data_ptr()
        self.under_way.append((self._in.issued + 1, low, low + source.numel()))
        return copy_in(self, target, source, after, timed)

    def watched_submit(self, reads, target, *more):
        start, end = target.address, target.address + len(target.view)
        for engine in engines:
            engine.under_way = [copy for copy in engine.under_way if copy[0] > engine._in.done]
            for _, low, high in engine.under_way:
                assert not (start < high and low < end), "read into while it is copied"
        return submit(self, reads, target, *more)

    monkeypatch.setattr(SimulatedEngine, "__init__", init)
    monkeypatch.setattr(SimulatedEngine, "copy_in", noted)
    monkeypatch.setattr(DiskReader, "submit_reads", watched_submit)
    return engines


@pytest.mark.parametrize("share", [0.08, 0.3, 0.6])
@pytest.mark.parametrize("timing", ["late", "random"])
def test_buffers_are_read_into_when_their_copies_are_over(tmp_path, watched, timing, share):
    loaded, empty, path, size = disk.uniform(tmp_path)
    with torch.no_grad():
        expected = loaded(X)
        device = carom.SimulatedDevice(timing=timing)
        with carom.stream(
            empty, device=device, vram=size // 4, ram=int(share * size), weights=path
        ) as session:
            for _ in range(4):
                assert torch.equal(empty(X), expected)
            report = session.report()
        assert 0 < report.ram_peak_bytes <= int(share * size) and report.disk_bytes_per_step > 0


@pytest.mark.parametrize("timing", ["late", "random"])
def test_residents_pass_through_few_buffers_which_are_given_back(tmp_path, watched, timing):
    loaded, empty, path, size = disk.uniform(tmp_path)
    with torch.no_grad():
        expected = loaded(X)
        device = carom.SimulatedDevice(timing=timing)
        with carom.stream(empty, device=device, vram=2 * size, ram=size // 8, weights=path) as session:
            deadline = time.monotonic() + 30
            while session.report().pinned_bytes == 0:
                assert time.monotonic() < deadline, "what is read waits pinned"
                time.sleep(0.002)
            for _ in range(3):
                assert torch.equal(empty(X), expected)
            report = session.report()
            assert report.pinned_bytes == 0 and report.slot_bytes == 0
            assert 0 < report.ram_peak_bytes <= size // 8
            session.write("blocks.0.0.weight", loaded.blocks[0][0].weight)
            assert torch.equal(empty(X), expected)


def test_no_memory_stays_pinned_when_the_session_ends(tmp_path, watched):
    loaded, empty, path, size = disk.uniform(tmp_path)
    session = carom.stream(empty, device=carom.SimulatedDevice(), vram=size // 4, ram=size, weights=path)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(empty(X), loaded(X))
            for number in (0, 9):
                weight = loaded.blocks[number][1].weight
                weight.mul_(0.5)
                session.write(f"blocks.{number}.1.weight", weight)
        assert torch.equal(empty(X), loaded(X))
    arena, report = inside(session).arena, session.report()
    assert 0 < report.pinned_bytes == arena.pinned_bytes and report.ram_peak_bytes >= report.pinned_bytes
    session.close()
    assert arena.pinned_bytes == 0


def test_a_copy_that_failed_leaves_its_buffer_to_others(tmp_path, monkeypatch):
    loaded, empty, path, size = disk.uniform(tmp_path)
    with torch.no_grad():
        expected = loaded(X)
        with carom.stream(empty, device=carom.SimulatedDevice(), vram=size // 4, ram=size // 8, weights=path):
            assert torch.equal(empty(X), expected)

            failed = []

            def fails(self, *args):
                failed.append(1)
                raise RuntimeError("no luck")

            with monkeypatch.context() as broken:
                broken.setattr(SimulatedEngine, "copy_in", fails)
                for block in empty.blocks:  # each in a buffer of its own, and never needed again meanwhile
                    with contextlib.suppress(RuntimeError):  # what is in a slot already needs no copy
                        block(X)
            assert len(failed) >= 10
            for _ in range(2):
                assert torch.equal(empty(X), expected)


@pytest.mark.parametrize("meanwhile", ["units were used lately", "a use ends"])
def test_what_a_pass_waits_for_is_read_first(tmp_path, monkeypatch, meanwhile):
    loaded, empty, path, size = disk.uniform(tmp_path)
    acquire, fetch, first = HostCache.acquire, FileBacking.fetch, []

    def noted(self, pieces):
        buffer = self.pool.holding.get(pieces[0].rank)
        if buffer is None or not buffer.ready:
            order = self._use_order  # and what of it was not used
            first.append((pieces[0].unit, order._order[order._place].unit))
        return acquire(self, pieces)

    def while_a_use_ends(self, *arguments):
        # The collector may end a use here, after which the units to come are told to the store.
        self.runtime.read_ahead()
        return fetch(self, *arguments)

    monkeypatch.setattr(HostCache, "acquire", noted)
    if meanwhile == "units were used lately":
        monkeypatch.setattr(FileReads, "_not_used_lately", lambda self, upcoming: [])
    else:
        monkeypatch.setattr(FileBacking, "fetch", while_a_use_ends)
    with torch.no_grad(), carom.stream(empty, device="cpu", vram=size // 4, ram=size // 4, weights=path):
        for _ in range(2):
            assert torch.equal(empty(X), loaded(X))
    assert all(unit == read for unit, read in first)
