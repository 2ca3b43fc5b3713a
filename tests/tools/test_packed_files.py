"""Packed checkpoints: lossless gives every bit back, quantised ones say so, and both stream like any file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from concurrent.futures import CancelledError
from pathlib import Path

import carom
import pytest
import tests_models as models
import torch
from carom.cli.main import main
from carom.core.checkpoint.direct_io import ALIGN
from carom.core.checkpoint.disk_reader import DiskReader, ReaderPolicy
from carom.core.checkpoint.index import CODEC_KEY, CODEC_VERSION, open_index
from carom.core.common.errors import UnsupportedError, WeightsError
from carom.tools.pack import output_file
from carom.tools.pack.file_layout import whole_pages
from carom.tools.pack.journal import PackError
from carom.tools.pack.quant_scheme import QuantScheme, parse_scheme
from carom.tools.pack.verify import verify_packed
from carom.tools.pack.writer import pack
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file as library_load
from safetensors.torch import save_file
from tests_harness import SOME, assert_same, infer, place, train
from tests_inside import inside
from tests_pairwise import each, pairwise


def weights() -> dict[str, torch.Tensor]:
    """Named as a mixture of experts: what gains, what does not, and every awkward kind."""
    generator = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    rare = gaussian(96, 256)
    rare.view(-1)[::501], rare.view(-1)[3::907], rare.view(-1)[5::701] = 0.0, float("nan"), float("-inf")
    found = {
        "model.embed_tokens.weight": gaussian(130, 128),
        "model.norm.weight": gaussian(128),
        "lm_head.weight": gaussian(130, 128),
        "specials": rare,
        "noise": torch.randint(0, 255, (40_000,), generator=generator, dtype=torch.uint8).view(
            torch.bfloat16
        ),
        "half": gaussian(100, 257).half(),
        "single": gaussian(100, 257).float(),
        "small": gaussian(3, 5),
        "ids": torch.arange(3000),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(3.5),
        "float8": gaussian(160, 160).to(torch.float8_e4m3fn),
    }
    for i in range(2):
        at = f"model.layers.{i}"
        found[f"{at}.self_attn.q_proj.weight"] = gaussian(128, 128)
        found[f"{at}.mlp.gate.weight"] = gaussian(64, 128)
        found[f"{at}.mlp.experts.0.up_proj.weight"] = gaussian(192, 128)
        found[f"{at}.mlp.experts.gate_up_proj"] = gaussian(4, 64, 128)
    return found


def sha(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode() + data.numpy().tobytes()).hexdigest()


def shas(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: sha(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.safetensors"
    save_file(weights(), path, {"format": "pt", "note": "hello"})
    return path


# -- there and back


def test_lossless_gives_back_every_tensors_sha_and_every_byte_of_a_raw_packing(source: Path, tmp_path: Path):
    packed, back, straight = (tmp_path / f"{n}.safetensors" for n in ("packed", "back", "straight"))
    report = pack(source, packed, codec="lossless", verify=True)
    assert shas(carom.load_file(packed)) == shas(weights())
    assert not report.lossy and not report.lossy_tensors
    assert report.codecs["lossless"] >= 8 and report.tensor_bytes < report.raw_bytes
    pack(packed, back, codec="raw", verify=True)
    pack(source, straight)
    assert shas(carom.load_file(back)) == shas(weights())
    assert back.read_bytes() == straight.read_bytes()
    again = tmp_path / "again.safetensors"
    pack(packed, again, codec="lossless")
    assert again.read_bytes() == packed.read_bytes()


def test_plain_safetensors_show_the_documented_tensors(source: Path, tmp_path: Path):
    packed = tmp_path / "packed.safetensors"
    pack(source, packed, codec="lossless")
    shown = library_load(packed)
    with safe_open(packed, "pt") as opened:
        metadata = opened.metadata()
    described = json.loads(metadata[CODEC_KEY])
    assert described["version"] == CODEC_VERSION and metadata["note"] == "hello"
    info = json.loads(metadata["carom.pack"])
    assert info["codec"] == "lossless" and "lossy" not in info
    for name, tensor in weights().items():
        meta = described["tensors"].get(name)
        if meta is None:
            assert sha(shown[name]) == sha(tensor)
            continue
        assert shown[name].dtype == torch.uint8 and shown[name].dim() == 1
        assert (meta["dtype"], meta["shape"]) == (str(tensor.dtype)[6:], list(tensor.shape))
        assert whole_pages(shown[name].numel()) < whole_pages(tensor.nbytes), "packed where it saves a page"
    assert "noise" not in described["tensors"] and "ids" not in described["tensors"]


def test_packed_tensors_begin_on_pages_and_the_file_never_grows(tmp_path: Path):
    torch.manual_seed(0)
    bits = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
    noise = {f"w{i}": bits.view(torch.bfloat16)[: 400_000 + i] for i in range(4)}
    noise = {name: tensor.clone() for name, tensor in noise.items()}
    source, raw, packed = (tmp_path / f"{n}.safetensors" for n in ("s", "raw", "packed"))
    for tensors, most in ((noise, 1.001), (weights(), 1.0)):
        save_file(tensors, source)
        pack(source, raw)
        report = pack(source, packed, codec="lossless")
        assert packed.stat().st_size <= raw.stat().st_size * most
        for entry in open_index(packed).entries.values():
            offset = getattr(entry.file, "stored", entry).offset
            assert offset % ALIGN == 0
        assert report.written_bytes == packed.stat().st_size
        for path in (source, raw, packed):
            path.unlink()


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda n: not n.startswith("__")),
        st.tuples(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2, torch.int16]),
                  st.lists(st.integers(0, 70), max_size=3), st.booleans()),
        max_size=6,
    ),
    st.sampled_from([None, 3 * ALIGN, 1 << 20]),
)  # fmt: skip
def test_any_checkpoint_survives_lossless_packing(tmp_path_factory, spec, shard_bytes):
    folder = tmp_path_factory.mktemp("any")
    values = {}
    for name, (dtype, shape, tidy) in spec.items():
        count = torch.Size(shape).numel()
        if tidy and dtype.is_floating_point:
            values[name] = torch.randn(shape).mul(0.1).to(dtype)
        else:
            noise = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
            values[name] = noise.view(dtype).reshape(shape)
    save_file(values, folder / "s.safetensors")
    pack(folder / "s.safetensors", folder / "packed", codec="lossless", shard_bytes=shard_bytes, verify=True)
    assert shas(carom.load_file(folder / "packed")) == shas(values)
    pack(folder / "packed", folder / "back.safetensors")
    assert shas(carom.load_file(folder / "back.safetensors")) == shas(values)


def test_shards_of_a_packed_folder_are_read_as_one(source: Path, tmp_path: Path):
    report = pack(source, tmp_path / "out", codec="lossless", shard_bytes=64 << 10, verify=True)
    assert len(report.files) > 2
    assert shas(carom.load_file(tmp_path / "out")) == shas(weights())


def test_an_interrupted_packing_is_resumed_to_the_same_bytes(source: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(output_file, "SYNC_BYTES", 1)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    for options in ({"codec": "lossless"}, {"quant": "nf4", "codec": "lossless"}):
        target, straight = tmp_path / "packed.safetensors", tmp_path / "straight.safetensors"
        with pytest.raises(KeyboardInterrupt):
            pack(source, target, progress=stop, **options)
        assert not target.exists()
        report = pack(source, target, verify=True, **options)
        assert 0 < report.resumed_tensors < report.tensors
        expected = pack(source, straight, **options)
        assert target.read_bytes() == straight.read_bytes()
        # What is reported does not depend on which run packed it.
        assert (report.codecs, report.notes, report.lossy_tensors) == (
            expected.codecs, expected.notes, expected.lossy_tensors,
        )  # fmt: skip
        target.unlink(), straight.unlink()


# -- quantised


def test_quantised_tensors_are_lossy_everywhere_and_their_error_is_told(source: Path, tmp_path: Path):
    target = tmp_path / "packed.safetensors"
    report = pack(source, target, quant="dense=nf4,experts=nf2", verify=True)
    codecs = {t.name: t.codec for t in report.lossy_tensors}
    assert codecs == {
        f"model.layers.{i}.{name}": codec
        for i in range(2)
        for name, codec in (
            ("self_attn.q_proj.weight", "nf4"), ("mlp.experts.0.up_proj.weight", "nf2"), ("mlp.experts.gate_up_proj", "nf2"),
        )
    }  # fmt: skip
    assert report.lossy
    values, true = carom.load_file(target), weights()
    for name in true.keys() - codecs.keys():
        assert sha(values[name]) == sha(true[name]), f"{name} was to keep every bit"
    for told in report.lossy_tensors:
        found, exact = values[told.name].double(), true[told.name].double()
        assert (values[told.name].dtype, found.shape) == (true[told.name].dtype, exact.shape)
        assert told.error == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-4)
    with safe_open(target, "pt") as opened:
        metadata = opened.metadata()
    info, described = json.loads(metadata["carom.pack"]), json.loads(metadata[CODEC_KEY])["tensors"]
    assert info["lossy"] is True and info["codec"] == "dense=nf4,experts=nf2"
    assert described.keys() == codecs.keys()
    assert all(meta["lossy"] is True and meta["error"] > 0 for meta in described.values())


def test_unpacking_a_quantised_file_keeps_its_values_and_says_that_they_are_lossy(
    source: Path, tmp_path: Path
):
    packed, back, twice = (tmp_path / f"{n}.safetensors" for n in ("packed", "back", "twice"))
    pack(source, packed, quant="nf4", codec="lossless")
    report = pack(packed, back, codec="raw", verify=True)
    assert shas(carom.load_file(back)) == shas(carom.load_file(packed))
    assert report.lossy and any("lossy" in note for note in report.notes)
    assert open_index(back).lossy
    assert pack(back, twice, codec="lossless").lossy, "the mark stays however often it is packed"


def test_what_no_codebook_can_express_keeps_every_bit_and_is_noted(tmp_path: Path):
    tensor = torch.randn(80, 80).bfloat16()
    tensor[3, 4] = float("nan")
    save_file({"layers.0.w.weight": tensor}, tmp_path / "s.safetensors")
    report = pack(tmp_path / "s.safetensors", tmp_path / "p.safetensors", quant="nf4")
    assert not report.lossy_tensors and not report.lossy and "NaN" in report.notes[0]
    assert sha(carom.load_file(tmp_path / "p.safetensors")["layers.0.w.weight"]) == sha(tensor)


@pytest.mark.parametrize(
    "asked, dense, experts",
    [("nf4", "nf4", "nf4"), ("nf4+nf2", "nf4", "nf2"), ("dense=nf4,experts=nf2", "nf4", "nf2"),
     (" Experts = NF3 ", None, "nf3"), ("dense=nf2", "nf2", None)],
)  # fmt: skip
def test_schemes_name_dense_and_experts(asked, dense, experts):
    scheme = parse_scheme(asked)
    assert scheme == QuantScheme(dense, experts) and parse_scheme(scheme.text) == scheme


@pytest.mark.parametrize(
    "asked", ["", "nf5", "dense=", "dense=nf4,dense=nf2", "rest=nf4", "nf4+nf4+nf4", "=nf4"]
)
def test_schemes_that_say_nothing_are_refused_with_the_forms(asked):
    with pytest.raises(ValueError, match="dense=nf4,experts=nf2"):
        parse_scheme(asked)


@pytest.mark.parametrize(
    "name, shape, wanted",
    [
        ("model.layers.3.self_attn.q_proj.weight", (256, 256), "nf4"),
        ("transformer_blocks.0.ff.net.0.proj.weight", (256, 256), "nf4"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", (256, 256), "nf2"),
        ("model.layers.3.mlp.experts.down_proj", (8, 256, 256), "nf2"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", (256, 256), "nf4"),
        ("model.layers.3.block_sparse_moe.gate.weight", (8, 4096), None),
        ("model.embed_tokens.weight", (1000, 256), None),
        ("lm_head.weight", (1000, 256), None),
        ("time_text_embed.timestep_embedder.linear_1.weight", (256, 256), None),
        ("model.norm.weight", (4096,), None),
        ("blocks.0.norm1.linear.weight", (256, 256), None),
        ("conv_in.weight", (320, 4, 3, 3), None),
        ("transformer_blocks.0.scale_shift_table", (6, 4096), None),
        ("blocks.0.table", (256, 256), None),
        ("layers.0.q_proj.lora_A.weight", (16, 4096), None),
        ("layers.0.tiny.weight", (8, 8), None),
    ],
)
def test_only_matrices_of_linear_layers_are_quantised(name, shape, wanted):
    assert parse_scheme("nf4+nf2").codebook(name, "BF16", shape) == wanted
    assert parse_scheme("nf4").codebook(name, "I32", shape) is None


# -- bad input


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("options", [{"codec": "lossless"}, {"quant": "nf4"}], ids=["lossless", "nf4"])
def test_one_flipped_bit_of_a_packed_tensor_is_an_error_that_names_it(options, source: Path, tmp_path: Path):
    target, name = tmp_path / "p.safetensors", "model.layers.1.self_attn.q_proj.weight"
    pack(source, target, **options)
    stored = open_index(target)[name].file.stored
    for at in (0, 3, 200, stored.nbytes - 1 if options.get("quant") else stored.nbytes // 2):
        flip(target, stored.offset + at)
        with pytest.raises(
            WeightsError, match=r"p\.safetensors.*model\.layers\.1\.self_attn\.q_proj\.weight"
        ):
            carom.load_file(target)
        with pytest.raises(WeightsError, match=r"layers\.1\.self_attn"):
            pack(target, tmp_path / "back.safetensors")
        flip(target, stored.offset + at)
    assert carom.load_file(target).keys() == weights().keys()


def rewritten(path: Path, change) -> Path:
    """The file with its description of packed tensors changed by ``change``, a function of the parsed entry."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    described = json.loads(header["__metadata__"][CODEC_KEY])
    header["__metadata__"][CODEC_KEY] = json.dumps(change(described) or described)
    text = json.dumps(header).encode()
    other = path.with_name("changed.safetensors")
    other.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return other


NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            lambda d: d["tensors"][NAME].update(version=2),
            UnsupportedError,
            "version 2.*reads version 1.*update",
        ),
        (lambda d: d["tensors"][NAME].update(codec="zip"), UnsupportedError, "'zip'.*reads raw, lossless"),
        (lambda d: d.update(version=7), UnsupportedError, "version 7.*reads version 1"),
        (lambda d: d["tensors"][NAME].update(shape=[128, 129]), WeightsError, "q_proj"),
        (lambda d: d["tensors"][NAME].update(shape=[1 << 40, 1 << 40]), WeightsError, "q_proj"),
        (lambda d: d["tensors"][NAME].update(dtype="float99"), WeightsError, "float99"),
        (lambda d: d["tensors"].update(ghost=d["tensors"][NAME]), WeightsError, "ghost"),
        (lambda d: d["tensors"].update(ids=d["tensors"][NAME]), WeightsError, "ids.*I64"),
        (lambda d: d["tensors"].update({NAME: 3}), WeightsError, "pack it again"),
        (lambda d: d["tensors"].pop(NAME) and None, None, ""),
    ],
)
def test_descriptions_that_do_not_fit_are_refused_never_decoded(change, error, words, source, tmp_path):
    target = tmp_path / "p.safetensors"
    pack(source, target, codec="lossless")
    changed = rewritten(target, change)
    if error is None:  # without its description a blob is what plain safetensors show: bytes
        assert carom.load_file(changed)[NAME].dtype == torch.uint8
        return
    for read in (carom.load_file, lambda path: pack(path, tmp_path / "back.safetensors")):
        with pytest.raises(error, match=f"(?s)changed.safetensors.*{words}"):
            read(changed)


def test_a_truncated_packed_file_is_refused(source: Path, tmp_path: Path):
    target = tmp_path / "p.safetensors"
    pack(source, target, codec="lossless")
    os.truncate(target, target.stat().st_size - ALIGN)
    with pytest.raises(WeightsError, match="truncated"):
        carom.load_file(target)


def test_sha_of_what_stands_in_the_file_is_verified(source: Path, tmp_path: Path):
    target = tmp_path / "p.safetensors"
    pack(source, target, codec="lossless")
    assert verify_packed(target)[0] == len(weights())
    flip(target, open_index(target)[NAME].file.stored.offset + 77)
    with pytest.raises(PackError, match=r"1 tensors differ.*q_proj"):
        verify_packed(target)


def test_settings_that_do_not_go_together_are_refused(source: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="--no-pad"):
        pack(source, tmp_path / "p.safetensors", codec="lossless", pad=False)


# -- command


def test_command_packs_reports_and_marks_what_is_lossy(source: Path, tmp_path: Path, capsys):
    def command(*arguments: str) -> str:
        assert main(["pack", *arguments]) == 0
        return capsys.readouterr().out

    packed, quant = str(tmp_path / "packed.safetensors"), str(tmp_path / "quant.safetensors")
    said = command(str(source), packed, "--codec", "lossless", "--verify")
    assert "lossless" in said and "LOSSY" not in said and "verified" in said
    assert "1 tensors of I64 have no lossless codec and stay raw" in said
    said = command(str(source), quant, "--quant", "dense=nf4,experts=nf2")
    rows = [line.split() for line in said.splitlines()]
    assert ["LOSSY", "tensor", "codec", "relative", "error", "bytes"] in rows and "LOSSY," in said
    row = next(row for row in rows if row and row[0] == NAME)
    assert row[1] == "nf4" and 0.05 < float(row[2]) < 0.15
    result = json.loads(command(quant, str(tmp_path / "back.safetensors"), "--codec", "raw", "--json"))
    assert result["lossy"] is True and result["codec"] == "raw"
    result = json.loads(command(packed, str(tmp_path / "raw.safetensors"), "--codec", "raw", "--json"))
    assert result["lossy"] is False
    assert shas(carom.load_file(tmp_path / "raw.safetensors")) == shas(weights())


# -- streaming from disk


def stack(checkpoint: str = "none", meta: bool = False) -> models.Stack:
    """Blocks of 256 KiB whose weights are worth packing."""
    with torch.device("meta" if meta else "cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = models.Stack(5, d=128)
    model.checkpoint = checkpoint
    return model.bfloat16()


class Case:
    """What `infer` and `train` feed it with."""

    @staticmethod
    def inputs(index: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 3, 128, generator=generator).bfloat16().to(device)


def packed_file(model: torch.nn.Module, folder: Path, **options: str) -> Path:
    save_file({n: t.detach().clone() for n, t in model.state_dict().items()}, folder / "m.safetensors")
    report = pack(folder / "m.safetensors", folder / "packed.safetensors", **options)
    assert report.codecs.keys() & {"lossless", "nf4"}, "nothing is packed: the test would show nothing"
    return folder / "packed.safetensors"


VRAM = 700 << 10  # of 1.4 MB


@pairwise(
    device=SOME,
    ram={"all of it": 4 << 20, "some": 600 << 10, "little": 64 << 10},
    options={"lossless": {"codec": "lossless"}, "nf4": {"quant": "nf4"}},
)
def test_a_packed_file_streams_the_values_it_stands_for(options, ram, device, tmp_path: Path):
    model, where = stack().eval(), place(device)
    path = packed_file(model, tmp_path, **options)
    model.load_state_dict(carom.load_file(path))  # lossless: the very same
    expected = infer(model.to(where), Case, where)
    empty = stack(meta=True).eval()
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=ram) as session:
        assert inside(session).streamed
        assert_same(expected, infer(empty, Case, where))
        name = "blocks.2.up.weight"
        assert torch.equal(session.read(name), model.state_dict()[name].cpu())
        report = session.report()
        assert report.vram_peak_bytes <= VRAM
        read = report.disk_bytes_per_step
    if device == "cpu" and ram < 600 << 10:  # what the drive read in a pass, the packed bytes
        assert 0 < read < report.raw_bytes_per_step * 0.8


@each(device=SOME, checkpoint=["non-reentrant", "reentrant"])
def test_lora_trains_on_a_packed_file_as_on_the_loaded_model(checkpoint, device, tmp_path: Path):
    peft = pytest.importorskip("peft")
    where = place(device)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)

    def run(model: torch.nn.Module) -> list:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            wrapped = peft.get_peft_model(model, config)
        model(Case.inputs(0, where))
        return train(wrapped, Case, where)

    path = packed_file(stack(), tmp_path, quant="nf4")
    model = stack(checkpoint)
    model.load_state_dict(carom.load_file(path))
    expected = run(model.to(where))
    empty = stack(checkpoint, meta=True)
    with carom.stream(empty, device=device, vram=VRAM, weights=path, ram=300 << 10) as session:
        assert inside(session).streamed
        assert_same(expected, run(empty))


def test_a_packed_tensor_damaged_while_it_streams_is_an_error_that_names_it(tmp_path: Path):
    path = packed_file(stack(), tmp_path, codec="lossless")
    entry = open_index(path)["blocks.4.down.weight"].file.stored
    flip(path, entry.offset + 500)
    empty = stack(meta=True).eval()
    with (
        carom.stream(empty, device="cpu", vram=VRAM, weights=path, ram=64 << 10),
        torch.no_grad(),
        pytest.raises(WeightsError, match=r"blocks\.4\.down\.weight.*checksum"),
    ):
        empty(Case.inputs(0, torch.device("cpu")))


def test_many_ranges_of_one_tensor_cost_one_read(tmp_path: Path):
    path = tmp_path / "p.safetensors"
    save_file({"w": (torch.randn(1 << 19) * 0.02).bfloat16()}, tmp_path / "s.safetensors")
    pack(tmp_path / "s.safetensors", path, codec="lossless")
    entry = open_index(path)["w"]
    true = carom.load_file(path)["w"].view(torch.uint8)
    with DiskReader(ReaderPolicy(direct=False)) as reader:
        edges = [0, 5, 4096, 4097, 70_001, 500_000, entry.nbytes - 3, entry.nbytes]
        parts = [torch.empty(b - a, dtype=torch.uint8) for a, b in zip(edges, edges[1:], strict=False)]
        handles = [
            reader.submit(entry, p, start=a, nbytes=len(p)) for a, p in zip(edges, parts, strict=False)
        ]
        for handle in handles:
            handle.result()
        assert torch.equal(torch.cat(parts), true)
        assert reader.stats().bytes == entry.file.stored.nbytes


def test_reads_of_packed_tensors_can_be_given_up_and_closed_over(tmp_path: Path):
    path = tmp_path / "p.safetensors"
    save_file(
        {f"w{i}": (torch.randn(1 << 16) * 0.02).bfloat16() for i in range(12)}, tmp_path / "s.safetensors"
    )
    pack(tmp_path / "s.safetensors", path, codec="lossless")
    entries = open_index(path).entries
    for late in (False, True):
        heard = []
        reader = DiskReader(ReaderPolicy(direct=False))
        handles = [reader.submit(e, torch.empty(e.nbytes, dtype=torch.uint8)) for e in entries.values()]
        for handle in handles:
            handle.add_done_callback(heard.append)
        if late:
            handles[0].wait(10)
        handles[-1].cancel()
        reader.close()
        assert all(handle.wait(10) for handle in handles) and set(heard) == set(handles)
        with pytest.raises(CancelledError):
            handles[-1].result()
