"""Files that `carom pack --quant` wrote: their codes stay packed in RAM and over the link, and the bits are those of the dequantised model."""

# mypy: disable-error-code="union-attr,arg-type,index,operator,call-overload"

from __future__ import annotations

import copy
import itertools
import zlib
from pathlib import Path
from typing import Any

import carom
import pytest
import tests_models as models
import torch
from carom.core.checkpoint.disk_reader import DiskReader
from carom.core.checkpoint.index import open_index
from carom.core.checkpoint.packed_source import PackedSource, meta_of, stored_entry
from carom.core.codec import registry
from carom.core.codec.blob_format import BlobFormat
from carom.core.codec.unit_decoder import KbitEntry, LosslessEntry, RawEntry
from carom.core.common.errors import WeightsError
from carom.core.device.simulated import SimulatedDevice
from carom.core.host.blob_checksums import Blob, BlobChecks
from carom.core.host.cache_pieces import cut
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
from torch.nn import functional as F  # noqa: N812

WIDE = 256
CPU = torch.device("cpu")
# A GPU that is there decodes with Triton, the simulated device with torch operations.
DECODING: dict[str, Any] = {**SIMULATED, **({"cuda": "cuda"} if torch.cuda.is_available() else {})}


def place(device: Any) -> torch.device:
    """Where the model that is compared with computes."""
    return torch.device("cuda", 0) if device == "cuda" else CPU


def filled(model: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.05)
    return model


def stack(
    checkpoint: str = "none", meta: bool = False, depth: int = 5, dtype: torch.dtype = torch.bfloat16
) -> models.Stack:
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        model = models.Stack(depth, d=WIDE)
    if not meta:
        filled(model)
    model.checkpoint = checkpoint
    return model.to(dtype)


class Case:
    """What `infer` and `train` feed a model with."""

    dtype = torch.bfloat16

    @classmethod
    def inputs(cls, index: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 3, WIDE, generator=generator).to(cls.dtype).to(device)


def quantised_file(model: nn.Module, folder: Path, quant: str = "nf4", codec: str = "raw") -> Path:
    """Pack the model's weights, and give the model the values that the codes of the file stand for."""
    path = folder / "packed.safetensors"
    save_file({n: t.detach().clone() for n, t in model.state_dict().items()}, folder / "m.safetensors")
    assert pack(folder / "m.safetensors", path, codec=codec, quant=quant).codecs
    model.load_state_dict(carom.load_file(path))
    return path


def file_bytes(session: Any, path: Path) -> int:
    """The bytes that the streamed weights take in the file."""
    index = open_index(path)
    return sum(stored_entry(index[name]).nbytes for unit in inside(session).streamed for name in unit.weights)


def entries(session: Any) -> list[list[Any]]:
    """The decoders' entries of each streamed unit that crosses packed."""
    return [list(u.wire.decoder.entries) for u in inside(session).placement.streamed if u.packed]


def forbid_host_decoding(monkeypatch: Any) -> None:
    monkeypatch.setattr(DiskReader, "_get_decoding_reader", lambda *_: pytest.fail("decoded on the host"))


ALL = sum(p.nbytes for p in stack(meta=True).parameters())
VRAM = ALL * 3 // 5
RAMS = {"all of it": ALL * 3 // 10, "some": ALL // 10, "two pages": 8192}


# -- the same bits, in the file's bytes


@each(device=DECODING, ram=RAMS, quant=["nf4", "nf3", "nf2"])
def test_codes_cross_the_link_and_the_bits_are_those_of_the_dequantised_model(
    tmp_path, monkeypatch, device, ram, quant
):
    model = stack().eval()
    path = quantised_file(model, tmp_path, quant)
    expected = infer(model.to(place(device)), Case, place(device), passes=5)
    forbid_host_decoding(monkeypatch)
    empty = stack(meta=True).eval()
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=ram) as session:
        assert_same(expected, infer(empty, Case, place(device), passes=5))
        report = session.report()
        assert report.packed_units == len(inside(session).streamed) > 0
        # Each tensor begins at a page, as in the file, and the blocks of this model are small.
        most = file_bytes(session, path) + 4 * 4096 * report.packed_units
        assert 0 < report.wire_bytes_per_step <= most < 0.32 * report.raw_bytes_per_step
        assert report.waiting_bytes <= most and report.decode_seconds > 0
        within_ram(session)
        assert report.vram_peak_bytes <= VRAM
        if ram == RAMS["all of it"]:
            assert report.disk_bytes_per_step == 0, "`ram` holds the codes, not the decoded weights"
        else:
            assert 0 < report.disk_bytes_per_step <= most
        within = [e for unit in entries(session) for e in unit if isinstance(e, KbitEntry)]
        assert {e.layout.codebook.name for e in within} == {quant}


@each(device=DECODING, checkpoint=["non-reentrant", "reentrant"])
def test_lora_trains_on_codes_as_on_the_resident_dequantised_model(tmp_path, monkeypatch, device, checkpoint):
    check_lora(tmp_path, checkpoint, device, monkeypatch)


@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
def test_lora_trains_on_the_cpu_as_well(tmp_path, checkpoint):
    check_lora(tmp_path, checkpoint, "cpu", None)


def check_lora(folder: Path, checkpoint: str, device: Any, monkeypatch: Any) -> None:
    """Outputs, gradients and adapters of a few steps equal those of the resident dequantised model.

    ``monkeypatch``: given where the weights have to stay packed.
    """
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)

    def run(model: nn.Module) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            wrapped = peft.get_peft_model(model, config)
        model(Case.inputs(0, place(device)))
        return train(wrapped, Case, place(device), steps=2)

    model = stack(checkpoint)
    path = quantised_file(model, folder)
    expected = run(copy.deepcopy(model).to(place(device)))
    empty = stack(checkpoint, meta=True)
    if monkeypatch is not None:
        forbid_host_decoding(monkeypatch)
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=64 << 10) as session:
        held = file_bytes(session, path)
        assert_same(expected, run(empty))
        report = session.report()
        assert bool(report.packed_units) == (monkeypatch is not None)
        if monkeypatch is not None:
            once = held + 4 * 4096 * report.packed_units
            assert 0 < report.wire_bytes_per_step <= report.transfers_per_weight * once
            assert report.transfers_per_weight <= 2


@on_simulated_devices
def test_qlora_of_a_llama_of_the_70b_shape_crosses_the_files_bytes(tmp_path, device):
    """The ratios of widths and heads are those of Llama 70B; width and depth are less."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1792, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=1,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)

    class Tokens:
        @staticmethod
        def inputs(index: int, device: torch.device) -> torch.Tensor:
            return torch.randint(64, (1, 5), generator=torch.Generator().manual_seed(index)).to(device)

    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).logits

    def run(model: nn.Module) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            adapted = peft.get_peft_model(model, lora)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return train(Logits(adapted), Tokens, CPU, steps=3)

    model = filled(transformers.LlamaForCausalLM(config)).bfloat16()
    path = quantised_file(model, tmp_path)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).bfloat16()
    expected = run(model)
    nbytes = sum(p.nbytes for p in empty.parameters())
    settings: Any = {"vram": nbytes * 3 // 4, "ram": nbytes // 3, "granularity": "block"}
    with carom.stream(empty, device=device, weights=path, **settings) as session:
        held = file_bytes(session, path)
        assert_same(expected, run(empty))
        report = session.report()
        assert report.packed_units == len(inside(session).streamed) >= 1
        assert report.disk_bytes_per_step == 0, "the codes fit `ram`"
        assert 0 < report.wire_bytes_per_step <= 1.02 * held * report.transfers_per_weight
        assert report.transfers_per_weight <= 2
        assert report.wire_bytes_per_step < 0.3 * report.raw_bytes_per_step


class Mixture(nn.Module):
    """A router that is packed losslessly, a dense matrix and stacked experts of two codebooks, and a norm as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.gate = nn.Linear(WIDE, WIDE, bias=False)
        self.up = nn.Linear(WIDE, WIDE)
        self.experts = nn.Module()
        self.experts.down = nn.Parameter(torch.empty(4, WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(self.norm(x)).softmax(-1)[..., :4]
        outputs = torch.einsum("btd,edf->btef", F.gelu(self.up(x)), self.experts.down)
        return x + (weights[..., None] * outputs).sum(-2)


@on_simulated_devices
def test_a_unit_may_mix_codebooks_with_lossless_and_raw_tensors(tmp_path, device):
    with torch.device("meta"):
        empty = nn.Sequential(*(Mixture() for _ in range(4))).bfloat16().eval()
    model = filled(nn.Sequential(*(Mixture() for _ in range(4)))).bfloat16().eval()
    path = quantised_file(model, tmp_path, "dense=nf4,experts=nf2", "lossless")
    expected = infer(model, Case, CPU)
    vram = sum(p.nbytes for p in empty.parameters()) * 3 // 4
    with carom.stream(
        empty, device=device, vram=vram, weights=path, ram=200 << 10, granularity="block"
    ) as session:
        assert_same(expected, infer(empty, Case, CPU))
        assert entries(session)
        for unit in entries(session):
            books = {e.layout.codebook.name for e in unit if isinstance(e, KbitEntry)}
            assert books == {"nf4", "nf2"}
            assert any(isinstance(e, LosslessEntry) for e in unit)
            assert any(isinstance(e, RawEntry) for e in unit)
        report = session.report()
        assert report.wire_bytes_per_step <= file_bytes(session, path) + 8 * 4096 * report.packed_units
        assert 0 < report.wire_bytes_per_step < 0.3 * report.raw_bytes_per_step


class Odd(nn.Module):
    """Matrices whose last group of 8 and last block are short."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, 77, bias=False)
        self.down = nn.Linear(77, WIDE, bias=False)
        self.small = nn.Linear(67, 77, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x) + self.small(x[..., :67]))


@each(device=SIMULATED, dtype=[torch.bfloat16, torch.float16, torch.float32], quant=["nf4", "nf3", "nf2"])
def test_every_dtype_and_short_last_groups_are_exact(tmp_path, device, dtype, quant):
    class Inputs(Case):
        pass

    Inputs.dtype = dtype
    with torch.device("meta"):
        empty = nn.Sequential(*(Odd() for _ in range(6))).to(dtype)
    model = filled(nn.Sequential(*(Odd() for _ in range(6)))).to(dtype)
    path = quantised_file(model, tmp_path, quant)
    expected = infer(model, Inputs, CPU)
    vram = sum(p.nbytes for p in empty.parameters()) * 9 // 10
    with carom.stream(
        empty, device=device, vram=vram, weights=path, ram=64 << 10, granularity="block"
    ) as session:
        assert_same(expected, infer(empty, Inputs, CPU))
        assert any(isinstance(e, KbitEntry) and e.layout.numel % 8 for unit in entries(session) for e in unit)


# -- what cannot stay packed


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDE, 3 * WIDE, bias=False)
        self.o_proj = nn.Linear(3 * WIDE, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o_proj(self.qkv_proj(x))


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for part in "qkv":
            self.add_module(f"{part}_proj", nn.Linear(WIDE, WIDE, bias=False))
        self.o_proj = nn.Linear(3 * WIDE, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o_proj(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1))


@each(device=SIMULATED, kinds=[(Apart, Fused), (Fused, Apart)])
def test_fused_and_split_tensors_are_decoded_on_the_host_and_the_report_says_so(tmp_path, device, kinds):
    stored, used = kinds
    in_file = filled(nn.Sequential(*(stored() for _ in range(4)))).bfloat16()
    path = quantised_file(in_file, tmp_path)
    model = nn.Sequential(*(used() for _ in range(4))).bfloat16()
    for ours, theirs in zip(model, in_file, strict=True):
        ours.o_proj.load_state_dict(theirs.o_proj.state_dict())
        if stored is Apart:
            rows = [getattr(theirs, f"{part}_proj").weight for part in "qkv"]
            ours.qkv_proj.weight = nn.Parameter(torch.cat(rows).detach())
        else:
            for part, rows in zip("qkv", theirs.qkv_proj.weight.split(WIDE), strict=True):
                getattr(ours, f"{part}_proj").weight = nn.Parameter(rows.detach().clone())
    with torch.device("meta"):
        empty = nn.Sequential(*(used() for _ in range(4))).bfloat16()
    vram = sum(p.nbytes for p in empty.parameters()) * 3 // 4
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=200 << 10) as session:
        assert_same(infer(model, Case, CPU), infer(empty, Case, CPU))
        report = session.report()
        # One half of a block stays packed, the other crosses decoded.
        assert report.packed_units and 0.5 < report.waiting_bytes / report.streamed_bytes < 0.75
        count = 4 if stored is Apart else 12
        first = "0.qkv_proj.weight" if stored is Apart else "0.q_proj.weight"
        assert any(f"host decodes {count} packed weights, first '{first}'" in note for note in report.notes)


@pytest.mark.parametrize(
    "settings", [{"device": "cpu"}, {"device": SimulatedDevice(), "codec": "raw"}], ids=["cpu", "codec=raw"]
)
def test_where_the_device_cannot_or_may_not_decode_the_host_does_to_the_same_bits(tmp_path, settings):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = quantised_file(model, tmp_path)
    with carom.stream(empty, vram=VRAM, weights=path, ram=64 << 10, **settings) as session:
        assert_same(infer(model, Case, CPU), infer(empty, Case, CPU))
        report = session.report()
        assert not report.packed_units and not report.staging_bytes
        assert report.wire_bytes_per_step >= report.raw_bytes_per_step


def test_where_vram_has_no_room_to_decode_the_host_does(tmp_path):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = quantised_file(model, tmp_path)
    device = SimulatedDevice(timing="random")
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(empty, device=device, vram=0, weights=path, ram=64 << 10)
    vram = refused.value.least_bytes
    with carom.stream(empty, device=device, vram=vram, weights=path, ram=64 << 10) as session:
        assert_same(infer(model, Case, CPU), infer(empty, Case, CPU))
        assert not session.report().packed_units and session.report().vram_peak_bytes <= vram


# -- values, budgets, residents


def test_a_weight_that_was_written_is_used_and_the_others_still_cross_as_codes(tmp_path):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = quantised_file(model, tmp_path)
    with carom.stream(
        empty, device=SIMULATED["simulated-early"], vram=VRAM, weights=path, ram=ALL
    ) as session:
        names = [name for unit in inside(session).streamed for name in unit.weights]
        name = next(name for name in names if "up.weight" in name)
        assert torch.equal(session.read(name), model.get_parameter(name))
        fresh = torch.randn(model.get_parameter(name).shape).bfloat16()
        infer(empty, Case, CPU, passes=1)
        session.write(name, fresh)
        with torch.no_grad():
            model.get_parameter(name).copy_(fresh)
        assert_same(infer(model, Case, CPU, passes=4), infer(empty, Case, CPU, passes=4))
        assert torch.equal(session.read(name), fresh)
        assert session.report().packed_units


def test_budgets_change_between_steps_and_bounds_hold(tmp_path):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = quantised_file(model, tmp_path)
    expected = infer(model, Case, CPU)
    device = SimulatedDevice(timing="random")
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=8192) as session:
        for vram, ram in ((VRAM, 200 << 10), (VRAM * 97 // 100, ALL // 2), (VRAM, 8192)):
            session.set_budget(vram=vram, ram=ram)
            assert_same(expected, infer(empty, Case, CPU))
            report = session.report()
            assert report.packed_units and report.ram_peak_bytes <= ram and report.vram_peak_bytes <= vram


MOST = sum(p.nbytes for p in stack(meta=True, depth=8).parameters()) * 4 // 5


@pytest.fixture
def apart(monkeypatch):
    """Units of this size come to the device one by one, as large ones do."""
    units_apart_from(monkeypatch, 512 << 10)


def resident_names(session: Any) -> list[str]:
    found = inside(session).placement.tier._residents.residents
    return sorted(resident.entry.name for resident in found)


@each(device=SIMULATED, ram={"some": ALL // 3, "little": 64 << 10, "two pages": 8192})
def test_residents_come_as_codes_and_are_decoded_on_the_device(tmp_path, monkeypatch, apart, device, ram):
    model, empty = stack(depth=8).eval(), stack(meta=True, depth=8).eval()
    path = quantised_file(model, tmp_path)
    expected = infer(model, Case, CPU, passes=1)
    forbid_host_decoding(monkeypatch)
    with carom.stream(empty, device=device, vram=MOST, weights=path, ram=ram) as session:
        stays = [name for name in resident_names(session) if name.endswith(("up.weight", "down.weight"))]
        assert len(stays) >= 4 and inside(session).streamed
        assert_same(expected, infer(empty, Case, CPU, passes=1))
        assert not inside(session).placement.tier.residents.waiting
        brought = sum(stored_entry(open_index(path)[name]).nbytes for name in stays)
        assert brought <= inside(session).placement.tier.residents.total_read() <= brought + (400 << 10)
        assert session.report().vram_peak_bytes <= MOST
        within_ram(session)


# -- damage


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("where", ["first code", "codes", "scales", "end"])
@pytest.mark.parametrize("kept", [False, True], ids=["streams", "stays"])
def test_one_flipped_bit_is_an_error_that_names_the_tensor(tmp_path, apart, where, kept):
    model = stack(depth=8).eval()
    path = quantised_file(model, tmp_path)
    options: Any = {"vram": MOST, "ram": ALL, "weights": path}
    with carom.stream(stack(meta=True, depth=8), device=SimulatedDevice(), **options) as session:
        stays = set(resident_names(session))
    names = [f"blocks.{index}.{part}.weight" for index in range(8) for part in ("up", "down")]
    name = [one for one in names if (one in stays) == kept][-1]
    entry = open_index(path)[name]
    stored = stored_entry(entry)
    assert isinstance(entry.file, PackedSource)
    scales = registry.get("nf4").layout_of(meta_of(entry), stored.nbytes, name).scales_at
    at = {"first code": 0, "codes": scales // 2, "scales": scales + 5, "end": stored.nbytes - 1}[where]
    flip(path, stored.offset + at)
    empty = stack(meta=True, depth=8).eval()
    with carom.stream(empty, device=SimulatedDevice(timing="random"), **options) as session:
        for _ in range(2):
            with (
                torch.no_grad(),
                pytest.raises(
                    WeightsError, match=rf"packed\.safetensors.*{name}.*checksum".replace(".w", r"\.w")
                ),
            ):
                empty(Case.inputs(0, CPU))
        other = next(one for one in names if one != name and (one in stays) == kept)
        assert torch.equal(session.read(other), model.get_parameter(other))
    assert all(p.is_meta for p in empty.parameters())


@pytest.mark.parametrize("ram", [ALL, 64 << 10], ids=["all of it", "little"])
def test_what_was_read_wrong_once_is_read_again(tmp_path, monkeypatch, ram):
    model, empty = stack().eval(), stack(meta=True).eval()
    path = quantised_file(model, tmp_path)
    stored = stored_entry(open_index(path)["blocks.3.up.weight"])
    read_into, turns, wrong = NativeFile.read_into, itertools.count(1), []

    def read(self: Any, buffer: memoryview, offset: int) -> int:
        got = read_into(self, buffer, offset)
        at = stored.offset + 40_000
        if offset <= at < offset + got and next(turns) == 1:
            wrong.append(offset)
            buffer[at - offset] ^= 1
        return got

    with carom.stream(empty, device=SimulatedDevice(), vram=VRAM, weights=path, ram=ram) as session:
        assert any(stored.name in unit.weights for unit in inside(session).streamed)
        monkeypatch.setattr(NativeFile, "read_into", read)
        failed = 0
        for _ in range(3):
            try:
                with torch.no_grad():
                    empty(Case.inputs(0, CPU))
            except WeightsError as error:
                assert stored.name in str(error)
                failed += 1
        assert len(wrong) <= 1 and failed <= 1
        assert_same(infer(model, Case, CPU), infer(empty, Case, CPU))


def blobs() -> tuple[list[Blob], torch.Tensor]:
    torch.manual_seed(0)
    found, parts, at = [], [], 0
    for name, codec, count in (
        ("a", "nf4", 12_000),
        ("b", "lossless", 30_011),
        ("c", "nf3", 703),
        ("d", "nf2", 9),
    ):
        packed = registry.encode((torch.randn(count) * 0.02).bfloat16(), codec, name)
        known = BlobFormat.parse(packed.meta, packed.blob.numpy().data[:128], len(packed.blob), name)
        found.append(Blob(at, known, name, "f"))
        padded = -(-len(packed.blob) // 4096) * 4096
        parts.append(F.pad(packed.blob, (0, padded - len(packed.blob))))
        at += padded
    return found, torch.cat(parts)


BLOBS, BYTES = blobs()


@given(st.integers(1, 12), st.integers(0, len(BYTES) - 1), st.integers(0, 7))
def test_whatever_the_cut_a_flipped_bit_of_a_blob_is_named_and_padding_is_not(pages, at, bit):
    pieces = cut([(len(BYTES), ())], 4096 * pages)
    checks = BlobChecks(pieces, [BLOBS])

    def judge(memory: torch.Tensor) -> None:
        found = [checks.checksum(p, memory[p.start : p.start + p.nbytes]) for p in pieces[0]]
        checks.verify(0, found)

    judge(BYTES)
    damaged = BYTES.clone()
    damaged[at] ^= 1 << bit
    hit = [blob.name for blob in BLOBS if blob.at <= at < blob.at + blob.format.nbytes]
    if hit:
        with pytest.raises(WeightsError, match=f"f: .*'{hit[0]}'.*checksum"):
            judge(damaged)
    else:
        judge(damaged)


def test_the_checksum_of_a_format_is_that_of_metadata_and_blob():
    for blob in BLOBS:
        data = BYTES[blob.at : blob.at + blob.format.nbytes].numpy().tobytes()
        assert data.startswith(blob.format.head)
        assert zlib.crc32(data[len(blob.format.head) :], blob.format.crc_start) == blob.format.crc
