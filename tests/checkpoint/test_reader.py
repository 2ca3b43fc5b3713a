"""The disk reader: true bytes into any memory, soonest first, and clear ends to every fault."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import gc
import os
import random
import tempfile
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
import torch
from carom.core.checkpoint import direct_io, direct_io_windows
from carom.core.checkpoint.direct_io import ALIGN, aligned_buffer, open_raw
from carom.core.checkpoint.disk_reader import DiskReader, ReaderPolicy
from carom.core.checkpoint.file_read import FileRead, ReadTarget
from carom.core.checkpoint.index import open_index
from carom.core.checkpoint.packed_source import PackedSource
from carom.core.checkpoint.read_path import ReadPathPolicy, ReadPathTuner
from carom.core.common.errors import WeightsError
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests_disk_harness import NativeFile
from tests_fake_kernel32 import FakeKernel32

SMALL = ReaderPolicy(workers=3, chunk=4 * ALIGN, retries=3, backoff=0.001)


def checkpoint(folder: Path | str, nbytes: int = 100_003, name: str = "m.safetensors"):
    """(index entry of a tensor of random bytes that begins off a page, its bytes)"""
    data = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))
    save_file({"odd": torch.zeros(13, dtype=torch.uint8), "w": data}, Path(folder) / name)
    index = open_index(Path(folder) / name)
    return index["w"], data.numpy().tobytes()


class Faulty:
    """A file whose reads go through ``play(call number, offset, buffer)``: an exception to raise, a number of bytes to
    cut the read to, or None for a true read."""

    def __init__(self, path: str, direct: bool, play) -> None:
        self.inner, self.play, self.calls, self.lock = NativeFile(path, direct), play, 0, threading.Lock()

    @property
    def direct(self) -> bool:
        return self.inner.direct

    def read_into(self, buffer: memoryview, offset: int) -> int:
        with self.lock:
            self.calls += 1
            number = self.calls
        verdict = self.play(number, offset, buffer)
        if isinstance(verdict, Exception):
            raise verdict
        got = self.inner.read_into(buffer, offset)
        return got if verdict is None else min(got, verdict)

    def stat(self):
        return self.inner.stat()

    def close(self) -> None:
        self.inner.close()


def faulty(play, policy: ReaderPolicy = SMALL) -> tuple[DiskReader, list[Faulty]]:
    made: list[Faulty] = []

    def opener(path: str, direct: bool) -> Faulty:
        made.append(Faulty(path, direct, play))
        return made[-1]

    return DiskReader(policy, opener=opener), made


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 60_000), st.integers(0, 60_000), st.integers(0, 2 * ALIGN), st.booleans(), st.booleans(),
    st.sampled_from([0, ALIGN, 3 * ALIGN]),
)  # fmt: skip
def test_any_range_into_any_address_is_exact_and_nothing_else_is_touched(
    start, length, shift, direct, congruent, aside
):
    with tempfile.TemporaryDirectory() as folder:
        entry, data = checkpoint(folder, nbytes=120_003)
        shift = (entry.offset + start) % ALIGN if congruent else shift
        room = aligned_buffer(length + shift + 100)
        room[:] = b"\xa5" * len(room)
        policy = ReaderPolicy(workers=3, chunk=2 * ALIGN, direct=direct)
        with DiskReader(policy, path_tuner=ReadPathTuner(ReadPathPolicy(paths=(aside,)))) as reader:
            assert reader.submit(entry, room[shift:], start=start, nbytes=length).result(20) == length
        assert bytes(room[shift : shift + length]) == data[start : start + length]
        assert set(room[:shift]) | set(room[shift + length :]) == {0xA5}


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.empty(n, dtype=torch.uint8),
        lambda n: torch.empty((n + 1) // 2, dtype=torch.bfloat16),
        lambda n: np.empty(n, np.uint8),
        lambda n: bytearray(n),
        lambda n: memoryview(bytearray(n)),
        lambda n: (ctypes.c_char * n)(),
    ],
)
def test_memory_of_every_kind_is_taken(make, tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    target = make(len(data))
    with DiskReader(SMALL) as reader:
        reader.submit(entry, target).result(20)
    raw = (
        target.view(torch.uint8).numpy()
        if isinstance(target, torch.Tensor)
        else np.frombuffer(target, np.uint8)
    )
    assert raw.tobytes()[: len(data)] == data


def test_bad_memory_and_ranges_are_refused_at_once(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    with DiskReader(SMALL) as reader:
        for bad in (
            b"readonly" * 20000,
            np.empty((2, len(data)), np.uint8).T,
            torch.empty(len(data), dtype=torch.uint8)[::2],
            torch.empty(len(data), device="meta"),
            torch.empty(len(data), requires_grad=True),
            bytearray(10),
        ):
            with pytest.raises(ValueError):
                reader.submit(entry, bad)
        for start, nbytes in ((-1, 1), (0, len(data) + 1), (len(data), 1), (0, -1)):
            with pytest.raises(ValueError, match="'w', which has"):
                reader.submit(entry, bytearray(len(data) + 10), start=start, nbytes=nbytes)
        assert reader.submit(entry, bytearray(), start=5, nbytes=0).result(1) == 0
    with pytest.raises(ValueError, match="workers=0"):
        ReaderPolicy(workers=0)


def test_ranges_submitted_together_fill_one_memory_and_end_together(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    ranges = [(0, 9000, 20_000), (50_003, 50_000, 30_000), (9000, 100, 4096), (9100, 0, 8000)]
    reads = [FileRead(entry.file, entry.offset + at, n, to, f"from {at}") for at, n, to in ranges]
    memory = bytearray(b"\xa5" * 100_000)
    ended: list[bytes] = []
    with DiskReader(SMALL) as reader:
        (handle,) = reader.submit_reads(reads, ReadTarget.of(memory))
        handle.add_done_callback(lambda done: ended.append(bytes(memory)))
        assert handle.result(20) == sum(n for _, n, _ in ranges)
    expected = bytearray(b"\xa5" * 100_000)
    for at, n, to in ranges:
        expected[to : to + n] = data[at : at + n]
    assert ended == [expected] == [memory]


def test_a_range_no_longer_than_a_chunk_is_one_read_wherever_it_begins(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    reader, made = faulty(lambda number, offset, buffer: None)
    into = bytearray(SMALL.chunk)
    with reader:
        for calls, start in enumerate((0, 1, SMALL.chunk - 100), 1):
            assert reader.submit(entry, into, start=start, nbytes=SMALL.chunk).result(20) == SMALL.chunk
            assert into == data[start : start + SMALL.chunk] and made[0].calls == calls


def test_no_bytes_of_a_packed_tensor_are_there_at_once(tmp_path: Path):
    entry, _ = checkpoint(tmp_path)
    file = entry.file
    packed = PackedSource(file.path, 100, file.mtime_ns, file.inode, file.device, entry, "{}")
    with DiskReader(SMALL) as reader:
        read = reader.submit_range(packed, 7, 0, bytearray(1))
        assert read.done() and read.result() == 0 and reader.stats().requests == 0


def test_a_range_outside_its_memory_or_file_is_refused_and_none_of_the_others_is_read(tmp_path: Path):
    entry, _ = checkpoint(tmp_path)
    good = FileRead(entry.file, entry.offset, 4096, 0, "w")
    with DiskReader(SMALL) as reader:
        for bad in (dataclasses.replace(good, at=5000), dataclasses.replace(good, at=-1)):
            with pytest.raises(ValueError, match="8192"):
                reader.submit_reads([good, bad], ReadTarget.of(bytearray(8192)))
        with pytest.raises(ValueError, match="which has"):
            reader.submit_reads(
                [good, dataclasses.replace(good, offset=entry.file.size)], ReadTarget.of(bytearray(8192))
            )
        assert reader.stats().requests == 0


def test_a_failure_of_one_range_ends_all_and_names_its_range(tmp_path: Path):
    entry, _ = checkpoint(tmp_path)
    places = (0, 40_000, 80_000)
    reads = [FileRead(entry.file, entry.offset + at, 5000, at, f"from {at}") for at in places]
    middle = range(entry.offset + 40_000 - ALIGN, entry.offset + 45_000)
    reader, _ = faulty(lambda number, offset, buffer: OSError(errno.EIO, "bad") if offset in middle else None)
    with reader, pytest.raises(WeightsError, match="from 40000 could not be read"):
        reader.submit_reads(reads, ReadTarget.of(bytearray(100_000)))[0].result(20)


def test_page_aligned_files_and_slots_need_no_second_buffer(tmp_path: Path):
    entry, data = checkpoint(tmp_path, nbytes=1 << 20)
    slot = aligned_buffer(len(data) + ALIGN)
    lead = entry.offset % ALIGN
    with DiskReader(SMALL) as reader:
        reader.submit(entry, slot[lead:]).result(20)
        straight = reader.stats().bounced
        reader.submit(entry, slot[lead + 1 :]).result(20)
        crooked = reader.stats().bounced - straight
    if not direct_works(tmp_path):
        assert straight == crooked == 0
        return
    assert straight < 2 * ALIGN
    assert crooked == len(data)


def direct_works(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(bytes(ALIGN))
    raw = open_raw(str(path))
    raw.read_into(aligned_buffer(ALIGN), 0)
    return raw.direct


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache is asked through POSIX")
def test_reads_leave_nothing_in_the_page_cache(tmp_path: Path):
    entry, data = checkpoint(tmp_path, nbytes=4 << 20)
    for direct in (True, False):
        fd = os.open(entry.file.path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with DiskReader(ReaderPolicy(direct=direct)) as reader:
            reader.submit(entry, bytearray(len(data))).result(20)
        cached = resident_pages(fd, entry.file.size)
        os.close(fd)
        assert cached is None or cached * ALIGN < len(data) // 4


def resident_pages(fd: int, size: int) -> int | None:
    """Pages of a file in the page cache, by mincore(2); None where that says nothing."""
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    with mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as view:
        pages = (size + ALIGN - 1) // ALIGN
        flags = (ctypes.c_ubyte * pages)()
        hold = (ctypes.c_char * size).from_buffer(view)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(hold)), ctypes.c_size_t(size), flags)
        del hold
        return None if failed else sum(f & 1 for f in flags)


def test_sooner_needed_is_read_first_and_urgency_can_change(tmp_path: Path):
    entry, data = checkpoint(tmp_path, nbytes=10 * ALIGN)
    gate, order = threading.Event(), []

    def play(number, offset, buffer):
        if number == 1:
            gate.wait(20)

    reader, _ = faulty(play, ReaderPolicy(workers=1, chunk=16 * ALIGN, backoff=0.001))
    with reader:
        handles = {"blocker": reader.submit(entry, bytearray(len(data)), priority=-9)}
        time.sleep(0.05)
        for name, priority in (("late", 9), ("b", 2), ("a", 1), ("a2", 1), ("raised", 8), ("lowered", 0)):
            handles[name] = reader.submit(entry, bytearray(len(data)), priority=priority)
            handles[name].add_done_callback(lambda h, name=name: order.append(name))
        reader.reprioritise(handles["raised"], -1)
        reader.reprioritise(handles["lowered"], 5)
        gate.set()
        for handle in handles.values():
            handle.result(20)
    assert order == ["raised", "a", "a2", "b", "lowered", "late"]


def test_all_workers_help_with_one_request(tmp_path: Path):
    entry, data = checkpoint(tmp_path, nbytes=40 * ALIGN)
    together = threading.Barrier(3, timeout=20)

    def play(number, offset, buffer):
        if number <= 3:
            together.wait()

    reader, _ = faulty(play)
    with reader:
        target = bytearray(len(data))
        reader.submit(entry, target).result(20)
    assert bytes(target) == data


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_and_passing_errors_end_in_true_bytes(direct: bool, tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    rng = random.Random(5)

    def play(number, offset, buffer):
        roll = rng.random()
        if roll < 0.2:
            return OSError(errno.EIO, "Input/output error")
        if roll < 0.6:
            return min(len(buffer), rng.choice((1, 100, ALIGN, ALIGN + 1, 3 * ALIGN)))
        return None

    reader, made = faulty(
        play, ReaderPolicy(workers=3, chunk=4 * ALIGN, retries=12, backoff=0.0001, direct=direct)
    )
    with reader:
        for _ in range(10):
            target = bytearray(len(data))
            reader.submit(entry, target).result(60)
            assert bytes(target) == data
        assert reader.stats().retries > 0
        assert made[0].direct == (direct and direct_works(tmp_path)), "no read was off its boundary"


@pytest.mark.parametrize("verdict", [OSError(errno.EIO, "Input/output error"), 0, 1])
def test_lasting_failure_is_bounded_and_names_file_and_tensor(verdict, tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    reader, made = faulty(lambda *_: verdict)
    if verdict == 1 and not direct_works(tmp_path):
        pytest.skip("plain reads go on after one byte")
    with reader:
        handle = reader.submit(entry, bytearray(3 * ALIGN), nbytes=3 * ALIGN)
        with pytest.raises(
            WeightsError, match=r"m\.safetensors: tensor 'w' could not be read after 4 attempts"
        ):
            handle.result(20)
        assert handle.done() and not handle.cancelled()
        assert made[0].calls <= 4 * 3
        made[0].play = lambda *_: None  # and the pool has outlived it
        target = bytearray(len(data))
        reader.submit(entry, target).result(20)
        assert bytes(target) == data


def test_unexpected_exception_in_a_worker_reaches_the_waiter(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    reader, made = faulty(lambda *_: ZeroDivisionError("odd"))
    with reader:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                reader.submit(entry, bytearray(len(data))).result(20)
        made[0].play = lambda *_: None
        assert reader.submit(entry, bytearray(len(data))).result(20) == len(data)


@pytest.mark.parametrize("direct", [True, False])
def test_file_cut_while_in_use_is_an_error_not_zeros(direct: bool, tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    with DiskReader(ReaderPolicy(chunk=4 * ALIGN, backoff=0.001, direct=direct)) as reader:
        reader.submit(entry, bytearray(len(data))).result(20)
        os.truncate(entry.file.path, entry.offset + 5 * ALIGN)
        with pytest.raises(WeightsError, match="changed from .* bytes while in use"):
            reader.submit(entry, bytearray(len(data))).result(20)


def test_file_replaced_while_in_use_is_an_error(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    checkpoint(tmp_path, name="other.safetensors")
    with DiskReader(SMALL) as reader:
        reader.submit(entry, bytearray(len(data))).result(20)
        os.replace(tmp_path / "other.safetensors", entry.file.path)
        with pytest.raises(WeightsError, match="replaced by another file"):
            reader.submit(entry, bytearray(len(data))).result(20)
    with DiskReader(SMALL) as reader, pytest.raises(WeightsError, match="replaced by another file"):
        reader.submit(entry, bytearray(len(data))).result(20)


def test_file_gone_before_its_first_read_is_an_error_without_retries(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    os.unlink(entry.file.path)
    with (
        DiskReader(ReaderPolicy(backoff=5)) as reader,
        pytest.raises(WeightsError, match="No such file|does not exist"),
    ):
        reader.submit(entry, bytearray(len(data))).result(4)


def test_cancelled_read_stops_at_the_next_piece_and_leaves_the_buffer_alone(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    gate, inside = threading.Event(), threading.Event()

    def play(number, offset, buffer):
        inside.set()
        gate.wait(20)

    reader, made = faulty(play, ReaderPolicy(workers=1, chunk=ALIGN))
    with reader:
        target = bytearray(len(data))
        running = reader.submit(entry, target)
        waiting = reader.submit(entry, bytearray(len(data)))
        assert inside.wait(20)
        assert waiting.cancel() and waiting.done()
        assert running.cancel()
        assert not running.done()  # a worker is still writing
        assert not running.wait(0.05)
        gate.set()
        assert running.wait(20)
        assert made[0].calls == 1
        before = bytes(target)
        time.sleep(0.05)
        assert bytes(target) == before
        for handle in (running, waiting):
            with pytest.raises(CancelledError):
                handle.result(1)
        assert not running.cancel()


def test_waiting_has_a_limit(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    gate = threading.Event()
    reader, _ = faulty(lambda *_: gate.wait(20) and None)
    with reader:
        handle = reader.submit(entry, bytearray(len(data)))
        with pytest.raises(TimeoutError, match="tensor 'w' was not read within 0.05 s"):
            handle.result(0.05)
        gate.set()
        assert handle.result(20) == len(data)


def test_close_cancels_what_waits_and_ends_the_workers(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    before = threading.active_count()
    reader = DiskReader(SMALL)
    handles = [reader.submit(entry, bytearray(len(data))) for _ in range(50)]
    reader.close()
    reader.close()
    assert all(h.done() for h in handles)
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(entry, bytearray(len(data)))


def open_files() -> int:
    """The files that this process has open; 0 on Windows."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_forgotten_reader_ends_its_workers_and_closes_its_files(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    before, files = threading.active_count(), open_files()
    reader = DiskReader(SMALL)
    reader.submit(entry, bytearray(len(data))).result(20)
    del reader
    gc.collect()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    gc.collect()
    assert threading.active_count() == before
    while open_files() > files and time.monotonic() < end:  # a thread's object is dropped after it has ended
        time.sleep(0.01)
    assert open_files() <= files


def test_finished_read_lets_the_memory_go(tmp_path: Path):
    import weakref

    entry, data = checkpoint(tmp_path)
    with DiskReader(SMALL) as reader:
        target = torch.empty(len(data), dtype=torch.uint8)
        alive = weakref.ref(target.untyped_storage())
        handle = reader.submit(entry, target)
        handle.result(20)
        array = np.empty(len(data), np.uint8)
        gone = weakref.ref(array)
        second = reader.submit(entry, array)
        second.result(20)
        del target, array, alive
        end = time.monotonic() + 5
        while gone() is not None and time.monotonic() < end:
            time.sleep(0.01)  # a worker's frame may hold it for a moment
        assert gone() is None


def test_hundreds_of_requests_from_many_threads(tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    wrong = []
    with DiskReader(SMALL) as reader:

        def use(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                start = rng.randrange(len(data))
                size = rng.randrange(len(data) - start)
                target = bytearray(size)
                handle = reader.submit(entry, target, start=start, nbytes=size, priority=rng.random())
                if rng.random() < 0.2:
                    handle.cancel()
                    handle.wait(20)
                elif handle.result(20) != size or bytes(target) != data[start : start + size]:
                    wrong.append((seed, start, size))

        threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong


@pytest.mark.skipif(
    not hasattr(os, "O_DIRECT"),
    reason="O_DIRECT; Windows' refusals: test_windows_reads_follow_the_documented_calls",
)
@pytest.mark.parametrize("where", ["open", "read"])
def test_file_system_without_direct_reads_falls_back(where: str, tmp_path: Path, monkeypatch):
    entry, data = checkpoint(tmp_path)
    true_open, true_preadv = os.open, os.preadv
    direct_fds = set()

    def opened(path, flags, *rest):
        if flags & os.O_DIRECT:
            if where == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
            fd = true_open(path, flags & ~os.O_DIRECT, *rest)
            direct_fds.add(fd)
            return fd
        return true_open(path, flags, *rest)

    def preadv(fd, buffers, offset):
        if fd in direct_fds:
            raise OSError(errno.EINVAL, "Invalid argument")
        return true_preadv(fd, buffers, offset)

    monkeypatch.setattr(direct_io.os, "open", opened)
    monkeypatch.setattr(direct_io.os, "preadv", preadv)
    with DiskReader(SMALL) as reader:
        for _ in range(3):
            target = bytearray(len(data))
            reader.submit(entry, target).result(20)
            assert bytes(target) == data
        assert reader.stats().retries == 0


@pytest.mark.parametrize("refuse", ["", "open", "read"])
def test_windows_reads_follow_the_documented_calls(refuse: str, tmp_path: Path):
    entry, data = checkpoint(tmp_path)
    kernel32 = FakeKernel32(refuse)
    policy = ReaderPolicy(workers=2, chunk=4 * ALIGN, backoff=0.001)
    with DiskReader(policy, opener=lambda p, d: direct_io_windows.WindowsFile(p, d, kernel32)) as reader:
        target = bytearray(len(data))
        reader.submit(entry, target).result(20)
        assert bytes(target) == data
        assert (reader.stats().direct > 0) == (refuse == "")
    assert not kernel32.handles, "every handle is closed"


@pytest.mark.parametrize(
    ("code", "attempts", "text"),
    [
        (2, 1, "the file does not exist"),
        (3, 1, "the folder does not exist"),
        (5, 1, "access is denied"),
        (32, 4, "in use by another program"),
        (1117, 4, "cannot be opened"),
    ],
)
def test_on_windows_only_errors_that_may_pass_are_retried(
    tmp_path: Path, code: int, attempts: int, text: str
):
    """A missing file stays missing. A virus scanner closes the file that it has open."""
    entry, data = checkpoint(tmp_path)
    kernel32, policy = FakeKernel32(code), ReaderPolicy(workers=1, backoff=0.001, retries=3)
    with DiskReader(policy, opener=lambda p, d: direct_io_windows.WindowsFile(p, d, kernel32)) as reader:
        found = rf"m\.safetensors.* after {attempts} attempts: .*{text} \(Windows error {code}\)"
        with pytest.raises(WeightsError, match=found):
            reader.submit(entry, bytearray(len(data))).result(20)


def test_windows_paths_are_lifted_over_the_length_limit(monkeypatch):
    monkeypatch.setattr(direct_io_windows.os.path, "abspath", lambda p: p)
    assert direct_io_windows.long_path("C:\\x\\m") == "\\\\?\\C:\\x\\m"
    assert direct_io_windows.long_path("\\\\host\\share\\m") == "\\\\?\\UNC\\host\\share\\m"
    assert direct_io_windows.long_path("\\\\?\\C:\\x") == "\\\\?\\C:\\x"
