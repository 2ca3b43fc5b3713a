"""Files of packed weights whose bytes stay packed in the host cache and over the link: the same bits, fewer bytes."""

# mypy: disable-error-code="union-attr,arg-type,index"

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import carom
import pytest
import tests_models as models
import torch
from carom.core.checkpoint.disk_reader import DiskReader
from carom.core.checkpoint.index import open_index
from carom.core.codec.blob_format import BlobFormat
from carom.core.codec.crc import combine_crc32
from carom.core.codec.lossless import encode
from carom.core.codec.lossless_format import HEADER_BYTES, parse_header
from carom.core.common.errors import WeightsError
from carom.core.device.simulated import SimulatedDevice, SimulatedEngine
from carom.core.device.staging import Staging
from carom.core.host.blob_checksums import Blob, BlobChecks
from carom.core.host.cache_pieces import cut
from carom.core.streaming.streamer import Streamer
from carom.tools.pack.writer import pack
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests_disk_harness import NativeFile, within_ram
from tests_harness import SIMULATED, assert_same, infer, on_simulated_devices, train
from tests_inside import inside
from tests_limits import units_apart_from
from tests_pairwise import each
from torch import nn

WIDE = 256
CPU = torch.device("cpu")


def stack(checkpoint: str = "none", meta: bool = False, depth: int = 5) -> models.Stack:
    """Blocks of a MiB, Gaussian-like."""
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = models.Stack(depth, d=WIDE)
        if not meta:
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.05)
    model.checkpoint = checkpoint
    return model.bfloat16()


class Case:
    """What `infer` and `train` feed it with."""

    @staticmethod
    def inputs(index: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 3, WIDE, generator=generator).bfloat16().to(device)


def packed_file(model: nn.Module, folder: Path, **options: str) -> Path:
    save_file({n: t.detach().clone() for n, t in model.state_dict().items()}, folder / "m.safetensors")
    report = pack(
        folder / "m.safetensors", folder / "packed.safetensors", **(options or {"codec": "lossless"})
    )
    assert report.codecs["lossless"]
    return folder / "packed.safetensors"


def loaded_and_empty(
    folder: Path, depth: int = 5, passes: int = 3
) -> tuple[nn.Module, Path, list, nn.Module]:
    """A model, its packed file, what it computes, and the same on meta to load the file into."""
    model = stack(depth=depth).eval()
    path = packed_file(model, folder)
    return model, path, infer(model, Case, CPU, passes=passes), stack(meta=True, depth=depth).eval()


ALL = sum(p.nbytes for p in stack(meta=True).parameters())
VRAM = ALL * 3 // 5
RAMS = {"all of it": ALL * 3 // 4, "some": ALL // 3, "two pages": 8192}
# Where the timings were run against the same code already, by the two tests of exactness.
AT_RANDOM = SIMULATED["simulated-random"]


def streams_packed(session: Any) -> None:
    report = session.report()
    assert report.packed_units == len(inside(session).streamed) > 0
    assert report.staging_bytes and 0 < report.waiting_bytes <= 0.72 * report.streamed_bytes
    assert report.vram_peak_bytes <= VRAM
    within_ram(session)


# -- the same bits


@each(device=SIMULATED, ram=RAMS)
def test_what_streams_packed_computes_what_the_loaded_module_does_in_fewer_bytes(tmp_path, device, ram):
    model, path, expected, empty = loaded_and_empty(tmp_path, passes=5)
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=ram) as session:
        assert_same(expected, infer(empty, Case, CPU, passes=5))
        streams_packed(session)
        report = session.report()
        assert 0 < report.wire_bytes_per_step <= 0.72 * report.raw_bytes_per_step
        assert report.decode_seconds > 0
        crossed = report.raw_bytes_per_step
        if ram >= ALL * 3 // 4:
            assert report.disk_bytes_per_step == 0, (
                "packed, all of it stays in RAM that would not hold it raw"
            )
        else:
            assert 0 < report.disk_bytes_per_step <= 0.72 * crossed
        assert torch.equal(session.read("blocks.3.up.weight"), model.blocks[3].up.weight)


@each(device=SIMULATED, checkpoint=["non-reentrant", "reentrant"])
def test_lora_trains_on_it_as_on_the_loaded_module(tmp_path, device, checkpoint):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)

    def run(model: nn.Module) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            wrapped = peft.get_peft_model(model, config)
        model(Case.inputs(0, CPU))
        return train(wrapped, Case, CPU, steps=2)

    model = stack(checkpoint)
    path = packed_file(model, tmp_path)
    expected = run(copy.deepcopy(model))
    empty = stack(checkpoint, meta=True)
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=64 << 10) as session:
        assert_same(expected, run(empty))
        streams_packed(session)
        report = session.report()
        assert 0 < report.wire_bytes_per_step <= 0.72 * report.raw_bytes_per_step
        assert report.transfers_per_weight <= 2


def test_a_weight_that_was_written_is_used_and_the_others_still_cross_packed(tmp_path):
    device = SIMULATED["simulated-early"]
    model = stack().eval()
    path = packed_file(model, tmp_path)
    empty = stack(meta=True).eval()
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=ALL) as session:
        name = next(name for unit in inside(session).streamed for name in unit.weights if "up.weight" in name)
        fresh = torch.randn(model.get_parameter(name).shape).bfloat16()
        infer(empty, Case, CPU, passes=1)
        session.write(name, fresh)
        with torch.no_grad():
            model.get_parameter(name).copy_(fresh)
        assert_same(infer(model, Case, CPU, passes=5), infer(empty, Case, CPU, passes=5))
        assert torch.equal(session.read(name), fresh)
        assert session.report().packed_units


class Fused(nn.Module):
    """Rows that the file has apart, beside a matrix that it has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDE, 3 * WIDE, bias=False)
        self.o_proj = nn.Linear(3 * WIDE, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o_proj(self.qkv_proj(x))


@on_simulated_devices
def test_rows_of_fused_tensors_are_decoded_on_the_host_beside_packed_ones(tmp_path, device):
    model = nn.Sequential(*(Fused() for _ in range(4))).bfloat16()
    state = {}
    for name, tensor in model.state_dict().items():
        if "qkv" in name:
            for part, rows in zip("qkv", tensor.split(WIDE), strict=True):
                state[name.replace("qkv_proj", f"{part}_proj")] = rows.clone()
        else:
            state[name] = tensor.clone()
    save_file(state, tmp_path / "m.safetensors")
    pack(tmp_path / "m.safetensors", tmp_path / "p.safetensors", codec="lossless")
    expected = infer(model, Case, CPU)
    with torch.device("meta"):
        empty = nn.Sequential(*(Fused() for _ in range(4))).bfloat16()
    vram = sum(p.nbytes for p in empty.parameters()) * 3 // 4
    with carom.stream(
        empty, device=device, vram=vram, weights=tmp_path / "p.safetensors", ram=200 << 10
    ) as session:
        assert_same(expected, infer(empty, Case, CPU))
        report = session.report()
        assert report.packed_units and 0.75 < report.waiting_bytes / report.streamed_bytes < 0.9


@pytest.mark.parametrize(
    "settings", [{"device": "cpu"}, {"device": SimulatedDevice(), "codec": "raw"}], ids=["cpu", "codec=raw"]
)
def test_where_the_device_cannot_or_may_not_unpack_the_host_decodes_to_the_same_bits(tmp_path, settings):
    _, path, expected, empty = loaded_and_empty(tmp_path)
    with carom.stream(empty, vram=VRAM, weights=path, ram=64 << 10, **settings) as session:
        assert_same(expected, infer(empty, Case, CPU))
        report = session.report()
        assert not report.packed_units and not report.staging_bytes
        assert report.wire_bytes_per_step >= report.raw_bytes_per_step


def test_where_vram_has_no_room_to_unpack_the_host_decodes(tmp_path):
    _, path, expected, empty = loaded_and_empty(tmp_path)
    device = SimulatedDevice(timing="random")
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(empty, device=device, vram=0, weights=path, ram=64 << 10)
    vram = refused.value.least_bytes
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=64 << 10) as session:
        assert_same(expected, infer(empty, Case, CPU))
        report = session.report()
        assert not report.packed_units and report.vram_peak_bytes <= vram


def test_budgets_change_between_steps_and_bounds_hold(tmp_path):
    _, path, expected, empty = loaded_and_empty(tmp_path)
    device = SimulatedDevice(timing="random")
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=8192) as session:
        for vram, ram in ((VRAM, 200 << 10), (VRAM * 97 // 100, ALL // 2), (VRAM, 8192)):
            session.set_budget(vram=vram, ram=ram)
            assert_same(expected, infer(empty, Case, CPU))
            report = session.report()
            assert report.packed_units and report.ram_peak_bytes <= ram and report.vram_peak_bytes <= VRAM
            assert report.vram_budget_bytes == vram
        with pytest.raises(carom.BudgetError):
            session.set_budget(ram=4096)
        assert_same(expected, infer(empty, Case, CPU))


# -- residents


@pytest.fixture
def apart(monkeypatch):
    """Units of this size come to the device one by one, as large ones do."""
    units_apart_from(monkeypatch, 512 << 10)


def reads_wrong(monkeypatch: Any, at: int, turns: Callable[[int], bool]) -> list[int]:
    """From now on a bit of the byte ``at`` is read wrong in those of its reads that ``turns`` picks: their numbers."""
    read_into, reads, wrong = NativeFile.read_into, itertools.count(1), []

    def read(self: Any, buffer: memoryview, offset: int) -> int:
        got = read_into(self, buffer, offset)
        if offset <= at < offset + got and turns(turn := next(reads)):
            wrong.append(turn)
            buffer[at - offset] ^= 1
        return got

    monkeypatch.setattr(NativeFile, "read_into", read)
    return wrong


def resident_names(session: Any) -> set[str]:
    return {resident.entry.name for resident in inside(session).placement.tier._residents.residents}


MOST = (
    sum(p.nbytes for p in stack(meta=True, depth=8).parameters()) * 4 // 5
)  # some stay, and there is room to unpack


@each(device=SIMULATED, ram={"some": ALL // 3, "little": 64 << 10, "two pages": 8192})
def test_residents_come_packed_and_are_unpacked_on_the_device(tmp_path, monkeypatch, apart, device, ram):
    """Nothing that is packed is decoded on the host, and each byte of the file is read once for what stays."""
    _, path, expected, empty = loaded_and_empty(tmp_path, depth=8, passes=1)
    monkeypatch.setattr(DiskReader, "_get_decoding_reader", lambda *_: pytest.fail("decoded on the host"))
    with carom.stream(empty, device=device, vram=MOST, weights=path, ram=ram) as session:
        stays = resident_names(session)
        assert sum(name.endswith("up.weight") for name in stays) >= 2
        assert inside(session).streamed
        assert_same(expected, infer(empty, Case, CPU, passes=1))
        assert not inside(session).placement.tier.residents.waiting
        brought = sum(
            open_index(path)[name].file.stored.nbytes
            for name in stays
            if "weight" in name and "norm" not in name
        )
        assert brought <= inside(session).placement.tier.residents.total_read() <= brought + (200 << 10)
        assert session.report().vram_peak_bytes <= MOST
        within_ram(session)


def test_bytes_that_were_wrong_once_are_read_again(tmp_path, monkeypatch, apart):
    """A drive gave wrong bytes, and the right ones later: a session that keeps residents in RAM does not keep the wrong ones."""
    _, path, expected, empty = loaded_and_empty(tmp_path, depth=8, passes=1)
    checksum, wrong = BlobChecks.checksum, []

    def once(self: Any, piece: Any, memory: torch.Tensor) -> Any:
        found = checksum(self, piece, memory)
        if found and not wrong:
            wrong.append(piece)
            return tuple(dataclasses.replace(one, crc=None) for one in found)
        return found

    with carom.stream(empty, device=AT_RANDOM, vram=1 << 30, weights=path, ram=2 * ALL) as session:
        assert_same(expected, infer(empty, Case, CPU, passes=1))
        session.park(keep=True)
        monkeypatch.setattr(BlobChecks, "checksum", once)
        found = None
        for _ in range(2):  # no error if they were found wrong before they were needed
            try:
                found = infer(empty, Case, CPU, passes=1)
            except WeightsError as error:
                assert "checksum" in str(error)
        assert wrong
        assert_same(expected, found)


def test_residents_that_are_needed_out_of_turn_come_packed_too(tmp_path, apart):
    device = AT_RANDOM
    model = stack(depth=8).eval()
    path = packed_file(model, tmp_path)
    empty = stack(meta=True, depth=8).eval()
    with carom.stream(empty, device=device, vram=MOST, weights=path, ram=100 << 10) as session:
        names = sorted(
            name for name in resident_names(session) if name.endswith(("up.weight", "down.weight"))
        )
        for name in reversed(names):
            assert torch.equal(session.read(name), model.get_parameter(name))
            index = int(name.split(".")[1])
            x = Case.inputs(index, CPU)
            with torch.no_grad():
                assert torch.equal(empty.blocks[index](x), model.blocks[index](x))
        assert_same(infer(model, Case, CPU), infer(empty, Case, CPU))


def test_a_damaged_resident_is_named_by_the_pass_that_needs_it_and_the_next_one_too(tmp_path, apart):
    path = packed_file(stack(depth=8), tmp_path)
    empty = stack(meta=True, depth=8).eval()
    with carom.stream(empty, device=SimulatedDevice(), vram=MOST, weights=path, ram=64 << 10) as session:
        name = sorted(n for n in resident_names(session) if n.endswith("up.weight"))[-1]
    stored = open_index(path)[name].file.stored
    flip(path, stored.offset + 90_000)
    empty = stack(meta=True, depth=8).eval()
    with carom.stream(empty, device=SimulatedDevice(), vram=MOST, weights=path, ram=64 << 10):
        for _ in range(2):
            with torch.no_grad(), pytest.raises(WeightsError, match=name.replace(".", r"\.")):
                empty(Case.inputs(0, CPU))


def test_a_resident_that_was_read_wrong_once_is_right_in_the_next_pass(tmp_path, apart, monkeypatch):
    _, path, expected, empty = loaded_and_empty(tmp_path, depth=8)
    with carom.stream(empty, device=SimulatedDevice(), vram=MOST, weights=path, ram=64 << 10) as session:
        name = sorted(n for n in resident_names(session) if n.endswith("up.weight"))[-1]
    wrong = reads_wrong(
        monkeypatch, open_index(path)[name].file.stored.offset + 90_000, lambda turn: turn == 1
    )
    empty = stack(meta=True, depth=8).eval()
    with carom.stream(empty, device=SimulatedDevice(), vram=MOST, weights=path, ram=64 << 10):
        with torch.no_grad(), pytest.raises(WeightsError, match=name.replace(".", r"\.")):
            empty(Case.inputs(0, CPU))
        assert_same(expected, infer(empty, Case, CPU))
    assert wrong == [1]


# -- damage


def wait_for(what: Any, seconds: float) -> None:
    """Until ``what`` holds, or ``seconds`` have passed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not what():
        time.sleep(0.01)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    "where", ["magic", "escape table", "header", "bytes", "planes", "tile table", "escapes", "end"]
)
def test_one_flipped_bit_is_an_error_that_names_the_tensor_from_the_pass_that_needs_it(tmp_path, where):
    path = packed_file(stack(), tmp_path)
    name = "blocks.4.down.weight"
    stored = open_index(path)[name].file.stored
    header = parse_header(path.read_bytes()[stored.offset :][:HEADER_BYTES], name, stored.nbytes)
    at = {
        "magic": 0, "escape table": 50, "header": 100, "bytes": 70_000, "planes": header.bits_at + 9,
        "tile table": header.tiles_at + 4, "escapes": header.escapes_at + 7, "end": stored.nbytes - 1,
    }[where]  # fmt: skip
    flip(path, stored.offset + at)
    empty = stack(meta=True).eval()
    reached = []
    for index, block in enumerate(empty.blocks):
        block.register_forward_hook(lambda *_, index=index: reached.append(index))
    # The last block streams: what is read ahead of its turn says nothing.
    with carom.stream(
        empty, device=SimulatedDevice(timing="random"), vram=VRAM, weights=path, ram=ALL
    ) as session:
        assert any(name in unit.weights for unit in inside(session).streamed)
        index = next(u.index for u in inside(session).placement.streamed if u.name == "blocks.4")
        # What is read ahead of the first pass arrives at once, where it arrives; nothing is ahead of one after an error.
        wait_for(
            lambda: (
                inside(session).placement.tier.reads.cache is not None
                and inside(session).placement.tier.reads.cache.has(index)
            ),
            0.5,
        )
        for _ in range(2):
            reached.clear()
            with (
                torch.no_grad(),
                pytest.raises(WeightsError, match=r"packed\.safetensors.*blocks\.4\.down\.weight"),
            ):
                empty(Case.inputs(0, CPU))
            assert 3 in reached
        assert torch.equal(session.read("blocks.2.down.weight"), stack().blocks[2].down.weight)
    assert all(p.is_meta for p in empty.parameters())


@pytest.mark.parametrize("ram", [ALL, 64 << 10], ids=["all of it", "little"])
def test_what_was_read_wrong_once_is_read_again(tmp_path, monkeypatch, ram):
    """A drive or a cable that gives other bytes, once: an error, and the next pass is right."""
    _, path, expected, empty = loaded_and_empty(tmp_path)
    stored = open_index(path)["blocks.3.up.weight"].file.stored
    with carom.stream(empty, device=SimulatedDevice(), vram=VRAM, weights=path, ram=ram) as session:
        assert any(stored.name in unit.weights for unit in inside(session).streamed)
        wrong = reads_wrong(monkeypatch, stored.offset + 40_000, lambda turn: turn == 1)
        failed = 0
        for _ in range(3):
            try:
                with torch.no_grad():
                    empty(Case.inputs(0, CPU))
            except WeightsError as error:
                assert stored.name in str(error)
                failed += 1
        assert wrong == [1] and failed <= 1
        assert_same(expected, infer(empty, Case, CPU))


def test_a_pass_never_computes_with_bytes_that_were_read_wrong(tmp_path, monkeypatch):
    _, path, (expected,), empty = loaded_and_empty(tmp_path, passes=1)
    stored = open_index(path)["blocks.3.up.weight"].file.stored
    reads_wrong(monkeypatch, stored.offset + 40_000, lambda turn: turn % 3 == 0)
    failed = right = 0
    with carom.stream(empty, device=SimulatedDevice(), vram=VRAM, weights=path, ram=64 << 10):
        for _ in range(9):
            try:
                with torch.no_grad():
                    found = empty(Case.inputs(0, CPU))
            except WeightsError:
                failed += 1
            else:
                right += 1
                assert torch.equal(found, expected)
    assert right


# -- the end


def test_an_interrupt_and_a_close_in_mid_pass_leave_nothing_behind(tmp_path, monkeypatch):
    path = packed_file(stack(), tmp_path)
    threads = threading.active_count()
    kept = []
    start = Streamer.start

    def remembered(self: Streamer, *arguments: Any) -> None:
        start(self, *arguments)
        kept.append(weakref.ref(self.staging.memory))

    monkeypatch.setattr(Streamer, "start", remembered)
    for how in ("interrupt", "close"):
        empty = stack(meta=True).eval()
        session = carom.stream(
            empty, device=SimulatedDevice(timing="late"), vram=VRAM, weights=path, ram=100 << 10
        )

        def stop(*_: Any, how: str = how, session: Any = session) -> None:
            if how == "close":
                with pytest.raises(carom.UnsupportedError, match="within its own forward"):
                    session.close()
            raise KeyboardInterrupt

        hook = empty.blocks[3].register_forward_pre_hook(stop)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            empty(Case.inputs(0, CPU))
        hook.remove()
        assert_same(infer(stack().eval(), Case, CPU), infer(empty, Case, CPU))  # it goes on
        session.close()
        assert all(p.is_meta for p in empty.parameters())
        assert inside(session).pinned_bytes == 0
        del session, stop, hook
    gc.collect()
    assert all(memory() is None for memory in kept)
    assert threading.active_count() == threads


def test_closing_waits_for_bytes_that_are_being_looked_at(tmp_path, monkeypatch):
    path = packed_file(stack(), tmp_path)
    looking, begun, look = [], threading.Event(), BlobChecks.checksum

    def slowly(self: BlobChecks, *piece: Any) -> Any:
        looking.append(1)
        begun.set()
        time.sleep(0.3)
        found = look(self, *piece)
        looking.pop()
        return found

    monkeypatch.setattr(BlobChecks, "checksum", slowly)
    session = carom.stream(stack(meta=True), device=SimulatedDevice(), vram=VRAM, weights=path, ram=100 << 10)
    assert begun.wait(20)
    session.close()
    assert not looking


def test_what_a_failed_taker_was_told_to_wait_for_the_next_one_is_told_as_well():
    staging = Staging(SimulatedEngine(SimulatedDevice()), 4096)
    staging.take(4096)
    staging.release_after("decoded")
    assert staging.take(1024)[1] == ["decoded"]  # and fails before it copies anything
    assert staging.take(1024)[1] == ["decoded"]
    staging.release_after("another")
    assert staging.take(2048)[1] == ["decoded"]  # what lay there too
    staging.release_after("last")
    assert staging.take(1024)[1] == ["decoded"]  # into what the failed one took


# -- checksums over pieces


def test_joined_checksums_are_those_of_the_whole():
    data = bytes(range(256)) * 41
    for at in (0, 1, 7, 4096, 10_000, len(data)):
        assert combine_crc32(zlib.crc32(data[:at]), zlib.crc32(data[at:]), len(data) - at) == zlib.crc32(data)


def blobs() -> tuple[list[Blob], torch.Tensor]:
    torch.manual_seed(0)
    found, parts, at = [], [], 0
    for name, count in (("a", 12_000), ("b", 700), ("c", 30_011)):
        blob = encode((torch.randn(count) * 0.02).bfloat16(), limit=1 << 20)
        header = parse_header(blob.numpy().data[:HEADER_BYTES], name, len(blob))
        found.append(Blob(at, BlobFormat.lossless(header), name, "f"))
        padded = -(-len(blob) // 4096) * 4096
        parts.append(torch.nn.functional.pad(blob, (0, padded - len(blob))))
        at += padded
    return found, torch.cat(parts)


BLOBS, BYTES = blobs()


@given(st.integers(1, 30), st.integers(0, len(BYTES) - 1), st.integers(0, 7))
def test_whatever_the_cut_a_flipped_bit_of_a_blob_is_named_and_padding_is_not(pages, at, bit):
    pieces = cut([(len(BYTES), ())], 4096 * pages)
    checks = BlobChecks(pieces, [BLOBS])

    def judge(memory: torch.Tensor) -> None:
        found = [checks.checksum(p, memory[p.start : p.start + p.nbytes]) for p in pieces[0]]
        checks.verify(0, found)
        checks.verify(0, found)

    judge(BYTES)
    damaged = BYTES.clone()
    damaged[at] ^= 1 << bit
    hit = [blob.name for blob in BLOBS if blob.at <= at < blob.at + blob.format.nbytes]
    if hit:
        with pytest.raises(WeightsError, match=f"f: .*'{hit[0]}'.*checksum"):
            judge(damaged)
        judge(BYTES)
    else:
        judge(damaged)
