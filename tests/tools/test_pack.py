"""carom pack: the same tensors in a better order, whole or not at all, whatever interrupts it."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from carom.cli.main import main
from carom.core.checkpoint.direct_io import ALIGN
from carom.core.checkpoint.index import open_index
from carom.core.checkpoint.load_file import load_file
from carom.core.common.errors import UnsupportedError, WeightsError
from carom.tools.pack import journal, output_file, writer
from carom.tools.pack.journal import PackError
from carom.tools.pack.use_order import natural_key, order_from_file, order_of_use
from carom.tools.pack.verify import verify_packed
from carom.tools.pack.writer import OutputTensor, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file as library_load
from safetensors.torch import save_file
from tests_held_open import HeldOpen, windows_error


def llama(layers: int = 3, hidden: int = 48) -> dict[str, torch.Tensor]:
    """Tensors named as a Llama's, of odd sizes and mixed dtypes."""
    torch.manual_seed(0)
    found = {"lm_head.weight": torch.randn(33, hidden), "model.norm.weight": torch.randn(hidden)}
    for i in reversed(range(layers)):
        for name, shape in (
            ("mlp.down_proj", (hidden, 3 * hidden)),
            ("mlp.gate_proj", (3 * hidden, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("self_attn.q_proj", (hidden, hidden)),
        ):
            found[f"model.layers.{i}.{name}.weight"] = torch.randn(shape).bfloat16()
        found[f"model.layers.{i}.input_layernorm.weight"] = torch.randn(hidden)
        found[f"model.layers.{i}.mlp.codes"] = torch.randint(0, 255, (5,), dtype=torch.uint8)
    found["model.embed_tokens.weight"] = torch.randn(33, hidden).half()
    found["empty"] = torch.zeros(0, 7)
    found["scalar"] = torch.tensor(3, dtype=torch.int64)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and torch.equal(a[k].reshape(-1).view(torch.uint8) if a[k].numel() else a[k].view(-1),
                        b[k].reshape(-1).view(torch.uint8) if b[k].numel() else b[k].view(-1))
        for k in a
    )  # fmt: skip


def without_pads(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in tensors.items() if not k.startswith("__pad__.")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.safetensors"
    save_file(llama(), path, {"format": "pt", "note": "hello"})
    return path


def test_packed_file_opens_anywhere_page_aligned_and_in_order_of_use(source: Path, tmp_path: Path):
    target = tmp_path / "packed.safetensors"
    report = pack(source, target, verify=True)
    values = library_load(source)
    assert same(without_pads(library_load(target)), values)
    assert same(load_file(target), values)
    index = open_index(target)
    assert all(e.offset % ALIGN == 0 for e in index.entries.values())
    assert target.stat().st_size % ALIGN == 0
    names = list(index)
    ours = [n for n in names if n.startswith(("model", "lm_head"))]
    assert ours[0] == "model.embed_tokens.weight" and ours[-2:] == ["model.norm.weight", "lm_head.weight"]
    blocks = [n.split(".")[2] for n in names if ".layers." in n]
    assert blocks == sorted(blocks)
    assert report.tensors == len(values) and report.verified and not report.resumed_tensors
    assert report.written_bytes == target.stat().st_size
    with safe_open(target, "pt") as opened:
        assert opened.metadata()["note"] == "hello"
    assert sorted(os.listdir(tmp_path)) == ["packed.safetensors", "source.safetensors"]


def test_without_padding_the_names_are_the_sources_and_elements_stay_aligned(source: Path, tmp_path: Path):
    target = tmp_path / "packed.safetensors"
    report = pack(source, target, pad=False, verify=True)
    assert same(library_load(target), library_load(source))
    assert report.padding_bytes == 0
    for entry in open_index(target).entries.values():
        assert entry.offset % torch.empty(0, dtype=entry.torch_dtype).element_size() == 0
        assert entry.nbytes % ALIGN or entry.offset % ALIGN == 0


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda n: not n.startswith("__")),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3)),
        max_size=10,
    ),
    st.booleans(),
    st.one_of(st.none(), st.sampled_from([ALIGN, 3 * ALIGN, 1 << 20])),
)  # fmt: skip
def test_any_checkpoint_survives_packing_and_repacking(spec, pad, shard_bytes):
    values = {}
    for name, (dtype, shape) in spec.items():
        count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        high = 2 if dtype == torch.bool else 256
        values[name] = torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).reshape(shape)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps mapped files
        source, first, second = (
            os.path.join(folder, n) for n in ("s.safetensors", "folder", "again.safetensors")
        )
        save_file(values, source)
        report = pack(source, first, pad=pad, shard_bytes=shard_bytes, verify=True)
        assert same(load_file(first), values)
        merged = {}
        for file in report.files:
            merged.update(without_pads(library_load(os.path.join(first, file))))
        assert same(merged, values)
        pack(first, second, pad=not pad, verify=True)
        assert same(load_file(second), values)
        pack(second, os.path.join(folder, "third.safetensors"), pad=pad)
        if shard_bytes is None:
            one = Path(folder, "third.safetensors").read_bytes()
            assert one == Path(first, report.files[0]).read_bytes(), (
                "the same bytes whatever the source's order"
            )


def test_shards_stay_in_bounds_and_load_with_transformers_names(source: Path, tmp_path: Path):
    report = pack(source, tmp_path / "out", shard_bytes=40_000)
    assert len(report.files) > 2
    for name in report.files:
        index = open_index(tmp_path / "out" / name)
        assert sum(e.nbytes + -e.nbytes % ALIGN for e in index.entries.values()) <= 40_000 or len(index) == 1
    mapped = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(mapped["weight_map"]) == set(llama())
    assert same(load_file(tmp_path / "out"), llama())


def test_mixed_shards_and_side_files_become_one_folder(tmp_path: Path):
    source, values = tmp_path / "hub", llama()
    blobs = tmp_path / "blobs"
    source.mkdir(), blobs.mkdir()
    names = sorted(values)
    parts = {"x-00001-of-00002.safetensors": names[::2], "x-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():  # a Hugging Face cache: links to blobs
        save_file({n: values[n] for n in part}, blobs / file[2:7])
        (source / file).symlink_to(blobs / file[2:7])
    weight_map = {n: f for f, part in parts.items() for n in part}
    (source / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    (source / "config.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"never copied")
    pack(source, tmp_path / "out", verify=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert same(load_file(tmp_path / "out"), values)


def test_packed_folder_loads_with_transformers(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, vocab_size=30)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    for options in ({}, {"shard_bytes": 30_000}, {"pad": False}):
        out = tmp_path / f"out{len(os.listdir(tmp_path))}"
        pack(tmp_path / "hf", out, **options)
        again, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        ids = torch.arange(8)[None]
        assert not info["missing_keys"]
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)


# --- destinations -----------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(source: Path, tmp_path: Path):
    before = source.read_bytes()
    for name in ("file.safetensors", "folder", "link.safetensors"):
        target = tmp_path / name
        if name == "folder":
            target.mkdir()
        elif name.startswith("link"):
            target.symlink_to(tmp_path / "nowhere")
        else:
            target.write_bytes(b"mine")
        with pytest.raises(PackError, match="exists already"):
            pack(source, target)
    with pytest.raises(PackError, match="exists already"):
        pack(source, source)
    assert (tmp_path / "file.safetensors").read_bytes() == b"mine" and source.read_bytes() == before


def test_destination_that_appears_meanwhile_is_not_overwritten(source: Path, tmp_path: Path):
    target = tmp_path / "packed.safetensors"

    def intrude(done: int, total: int) -> None:
        if done == total:
            target.write_bytes(b"mine")

    with pytest.raises(PackError, match="exists already"):
        pack(source, target, progress=intrude)
    assert target.read_bytes() == b"mine"


def test_bad_destinations_are_errors_in_words(source: Path, tmp_path: Path):
    for target, words in (
        (tmp_path / "no" / "such" / "x.safetensors", "no such folder"),
        (source / "x.safetensors", "cannot be written|not a folder"),
        (tmp_path / ("x" * 300 + ".safetensors"), "too long"),
        (tmp_path / ("x" * 5000), "too long"),
        (str(tmp_path / "a\0b"), "cannot be written"),
    ):
        with pytest.raises(PackError, match=words):
            pack(source, target)
    with pytest.raises(ValueError, match="name a folder"):
        pack(source, tmp_path / "x.safetensors", shard_bytes=1 << 20)
    with pytest.raises(ValueError, match="too small"):
        pack(source, tmp_path / "x", shard_bytes=5)


def test_longest_possible_and_non_ascii_names_work(source: Path, tmp_path: Path):
    for stem in ("模" * 80, "x" * 243, "ünïcödé 🎱"):
        target = tmp_path / f"{stem}.safetensors"
        pack(source, target)
        assert same(load_file(target), llama())


@pytest.mark.parametrize(
    "number, words",
    [(errno.EROFS, "read-only"), (errno.EACCES, "access is denied" if os.name == "nt" else "no permission")],
)
def test_read_only_folder_is_an_error_in_words(
    number: int, words: str, source: Path, tmp_path: Path, monkeypatch
):
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(PackError, match=words):
        pack(source, tmp_path / "packed.safetensors")
    assert os.listdir(tmp_path) == ["source.safetensors"]


def hold_results(monkeypatch, times: int | None) -> None:
    """Let another program hold the finished files, as a virus scanner does on Windows, for ``times`` renames or links."""
    left = [times]

    def refusing(call):
        def checked(path, target):
            if left[0] != 0:
                left[0] = None if left[0] is None else left[0] - 1
                raise windows_error(32, path)
            return call(path, target)

        return checked

    for name in ("link", "rename"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))


@pytest.mark.parametrize("name", ["packed.safetensors", "packed"])
def test_a_program_that_holds_the_finished_file_for_a_moment_does_no_harm(
    name: str, source: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("carom.core.common.held_files.WAIT_SECONDS", 60)
    hold_results(monkeypatch, times=2)
    pack(source, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == [name, "source.safetensors"]


def test_a_program_that_holds_a_file_of_the_work_folder_for_a_moment_leaves_no_folder(
    source: Path, tmp_path: Path, monkeypatch
):
    held = HeldOpen(monkeypatch)

    def hold_journal(done: int, total: int) -> None:
        if done == total:
            held.hold(work_folder(tmp_path) / "journal.jsonl", times=1)

    pack(source, tmp_path / "packed.safetensors", progress=hold_journal)
    assert held.refused == 1 and sorted(os.listdir(tmp_path)) == ["packed.safetensors", "source.safetensors"]


def test_an_unfinished_file_that_is_held_for_a_moment_is_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch
):
    with pytest.raises(Stop):
        pack(source, tmp_path / "packed.safetensors", progress=stop_at(0.5))
    refused = []

    def opened(path, *rest, **options):
        if path not in refused:
            refused.append(path)
            raise windows_error(32, path)
        return open(path, *rest, **options)

    for module in (output_file, journal):
        monkeypatch.setattr(module, "open", opened, raising=False)
    pack(source, tmp_path / "packed.safetensors")
    assert len(refused) == 2 and same(load_file(tmp_path / "packed.safetensors"), llama())


def test_a_program_that_keeps_the_finished_file_is_named_and_the_next_run_goes_on(
    source: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("carom.core.common.held_files.WAIT_SECONDS", 0.05)
    with monkeypatch.context() as patches:
        hold_results(patches, times=None)
        with pytest.raises(PackError, match="in use by another program.*goes on where it stopped"):
            pack(source, tmp_path / "packed.safetensors")
    report = pack(source, tmp_path / "packed.safetensors")
    assert report.resumed_tensors == report.tensors and same(
        load_file(tmp_path / "packed.safetensors"), llama()
    )


def test_codecs_of_later_versions_are_refused_plainly(source: Path, tmp_path: Path):
    with pytest.raises(UnsupportedError, match="'zip'.*packs raw, lossless"):
        pack(source, tmp_path / "x.safetensors", codec="zip")
    assert os.listdir(tmp_path) == ["source.safetensors"]


@pytest.mark.parametrize("when", [0, 1])
def test_source_that_is_touched_meanwhile_is_noticed(when: int, source: Path, tmp_path: Path):
    def touch(done: int, total: int) -> None:
        if done == when * total:
            os.utime(source, ns=(1, 1))

    with pytest.raises(WeightsError, match="written to while in use"):
        pack(source, tmp_path / "x.safetensors", progress=touch)
    assert not (tmp_path / "x.safetensors").exists()


# --- interruptions ----------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop_at(share: float):
    def progress(done: int, total: int) -> None:
        if done >= share * total:
            raise Stop

    return progress


def work_folder(folder: Path) -> Path:
    return next(p for p in folder.iterdir() if p.name.startswith(".carom-pack-"))


def test_interrupted_run_is_resumed_to_the_same_bytes(source: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(output_file, "SYNC_BYTES", 1)
    target = tmp_path / "packed.safetensors"
    with pytest.raises(Stop):
        pack(source, target, progress=stop_at(0.5))
    assert not target.exists()
    report = pack(source, target, verify=True)
    assert 0 < report.resumed_tensors < report.tensors
    pack(source, tmp_path / "straight.safetensors")
    assert target.read_bytes() == (tmp_path / "straight.safetensors").read_bytes()
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".carom")]


@pytest.mark.parametrize(
    "damage", ["torn line", "garbage line", "other option", "source touched", "file lost", "garbage"]
)
def test_journal_that_cannot_be_trusted_costs_work_never_truth(
    damage: str, source: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(output_file, "SYNC_BYTES", 1)
    target = tmp_path / "packed.safetensors"
    with pytest.raises(Stop):
        pack(source, target, progress=stop_at(0.5))
    place = work_folder(tmp_path)
    journal = place / "journal.jsonl"
    options = {}
    if damage == "torn line":
        journal.write_bytes(journal.read_bytes()[:-20])
    elif damage == "garbage line":
        lines = journal.read_bytes().split(b"\n")
        journal.write_bytes(b"\n".join([*lines[:3], b"[3]", *lines[3:]]))
    elif damage == "other option":
        options = {"pad": False}
    elif damage == "source touched":
        save_file({k: v + 1 if v.is_floating_point() else v for k, v in llama().items()}, source)
    elif damage == "file lost":
        os.unlink(place / "output" / "model.safetensors")
    else:
        journal.write_bytes(os.urandom(1000))
    report = pack(source, target, verify=True, **options)
    assert same(load_file(target), library_load(source))
    assert (report.resumed_tensors > 0) == (damage in ("torn line", "garbage line"))


KILLED = """
import os, signal, sys
sys.path.insert(0, {package!r})
from carom.tools.pack import output_file, writer
output_file.SYNC_BYTES = 1
def progress(done, total):
    if done >= {share} * total:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows ends a process with either
writer.pack({source!r}, {target!r}, shard_bytes={shard}, progress=progress)
"""


@pytest.mark.parametrize("share, shard", [(0.0, None), (0.4, 50_000), (1.0, None)])
def test_killed_while_packing_then_run_again(
    share: float, shard, source: Path, package: Path, tmp_path: Path
):
    before = source.read_bytes()
    target = tmp_path / ("packed" if shard else "packed.safetensors")
    code = KILLED.format(
        package=str(package), share=share, source=str(source), target=str(target), shard=shard
    )
    for _ in range(2 if shard else 1):  # once more: killed while what a killed one left is taken up
        died = subprocess.run([sys.executable, "-c", code], timeout=100)
        assert died.returncode in (-9, signal.SIGTERM, -signal.SIGTERM)  # Linux; Windows; the Windows shape
        assert not target.exists()
    assert source.read_bytes() == before
    report = pack(source, target, shard_bytes=shard, verify=True)
    assert (report.resumed_tensors > 0) == (share > 0)
    assert same(load_file(target), llama())
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".carom")]


def test_two_runs_to_one_destination_do_not_mix(source: Path, tmp_path: Path):
    target = tmp_path / "packed.safetensors"

    def second(done: int, total: int) -> None:
        with pytest.raises(PackError, match="another process is packing"):
            pack(source, target)

    pack(source, target, progress=second)
    assert same(load_file(target), llama())


def test_too_little_space_is_said_before_anything_is_written(source: Path, tmp_path: Path, monkeypatch):
    usage = writer.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(PackError, match=r"packing needs .* free some space"):
        pack(source, tmp_path / "packed.safetensors")
    assert os.listdir(tmp_path) == ["source.safetensors"]


def test_disk_that_fills_up_meanwhile_is_said_and_resumed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(output_file, "SYNC_BYTES", 1)
    source, small = tmp_path / "source.safetensors", tmp_path / "small"
    values = {f"layers.{i}.weight": torch.randn(64, 1024) for i in range(16)}  # 4 MiB
    save_file(values, source)
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    try:
        with pytest.raises(PackError, match="packing needs"):
            pack(source, small / "packed.safetensors")
        usage = writer.shutil.disk_usage(tmp_path)
        with monkeypatch.context() as patch:  # the space vanishes after the check
            patch.setattr(writer.shutil, "disk_usage", lambda _: usage)
            with pytest.raises(PackError, match="became full.*goes on where it stopped"):
                pack(source, small / "packed.safetensors")
        assert not (small / "packed.safetensors").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True)
        report = pack(source, small / "packed.safetensors", verify=True)
        assert report.resumed_tensors > 0
        assert same(load_file(small / "packed.safetensors"), values)
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        with pytest.raises(PackError, match="read-only"):
            pack(source, small / "other.safetensors")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_full_disk_on_the_last_bytes_is_said(source: Path, tmp_path: Path, monkeypatch):
    def full(self, header, room):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(output_file.OutputFile, "finish", full)
        with pytest.raises(PackError, match="became full"):
            pack(source, tmp_path / "packed.safetensors")
    assert pack(source, tmp_path / "packed.safetensors", verify=True).resumed_tensors > 0


def test_file_too_large_for_the_file_system_advises_shards(source: Path, tmp_path: Path, monkeypatch):
    def large(self, data):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(output_file.OutputFile, "write", large)
    with pytest.raises(PackError, match="--shard-size"):
        pack(source, tmp_path / "packed.safetensors")


# --- verification -----------------------------------------------------------------------------------------------


def test_one_flipped_bit_is_found_and_named(source: Path, tmp_path: Path):
    target = tmp_path / "packed.safetensors"
    pack(source, target)
    assert verify_packed(target)[0] == len(llama())
    entry = open_index(target)["model.layers.1.self_attn.q_proj.weight"]
    with open(target, "r+b") as file:
        file.seek(entry.offset + 100)
        byte = file.read(1)[0]
        file.seek(entry.offset + 100)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(PackError, match=r"1 tensors differ.*'model.layers.1.self_attn.q_proj.weight'"):
        verify_packed(target)


def test_bytes_that_the_drive_changed_do_not_get_the_name(source: Path, tmp_path: Path, monkeypatch):
    true_finish = output_file.OutputFile.finish

    def finish(self, header, room):
        true_finish(self, header, room)
        self._file.seek(room + 5)
        self._file.write(b"\xde\xad")

    with monkeypatch.context() as patch:
        patch.setattr(output_file.OutputFile, "finish", finish)
        with pytest.raises(PackError, match="differ from what was packed"):
            pack(source, tmp_path / "packed.safetensors", verify=True)
    assert os.listdir(tmp_path) == ["source.safetensors"]
    pack(source, tmp_path / "packed.safetensors", verify=True)


def test_verifying_what_was_not_packed_says_so(source: Path):
    with pytest.raises(PackError, match="no checksum"):
        verify_packed(source)


# --- codecs' seam, order, command -------------------------------------------------------------------------------


class Halves:
    """Keeps every other byte of a tensor: a size known only after the fact, by a codec that nobody can read."""

    name, has_metadata, runs_ahead = "halves", False, True

    def __call__(self, entry, parts):
        half = b"".join(bytes(p) for p in parts)[::2]
        return OutputTensor(entry.name, "U8", (len(half),), [half])

    def wanted(self, entry):
        return "halves"


def test_a_transforms_sizes_are_known_afterwards_and_its_codec_is_refused_where_it_is_unknown(
    source: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(writer, "make_transform", lambda *_: Halves())
    target = tmp_path / "packed.safetensors"
    pack(source, target, codec="halves", verify=True)
    packed = library_load(target)
    for name, value in llama().items():
        if value.numel():
            assert torch.equal(packed[name], value.reshape(-1).view(torch.uint8)[::2])
    for read in (load_file, lambda path: pack(path, tmp_path / "again.safetensors")):
        with pytest.raises(UnsupportedError, match="halves.*update Carom"):
            read(target)


@pytest.mark.parametrize(
    "names",
    [
        "model.embed_tokens.weight model.layers.0.input_layernorm.weight model.layers.0.self_attn.q_proj.weight "
        "model.layers.0.self_attn.k_proj.weight model.layers.0.self_attn.v_proj.weight "
        "model.layers.0.self_attn.o_proj.weight model.layers.0.post_attention_layernorm.weight "
        "model.layers.0.mlp.gate_proj.weight model.layers.0.mlp.up_proj.weight model.layers.0.mlp.down_proj.weight "
        "model.layers.2.mlp.up_proj.weight model.layers.10.mlp.up_proj.weight model.norm.weight lm_head.weight",
        "transformer.wte.weight transformer.wpe.weight transformer.h.0.ln_1.weight transformer.h.0.attn.c_attn.weight "
        "transformer.h.0.ln_2.weight transformer.h.0.mlp.c_fc.weight transformer.h.0.mlp.c_proj.weight "
        "transformer.h.11.ln_1.weight transformer.ln_f.weight lm_head.weight",
        "img_in.weight time_in.in_layer.weight double_blocks.0.img_attn.qkv.weight double_blocks.18.img_attn.qkv.weight "
        "single_blocks.0.linear1.weight single_blocks.37.linear2.weight final_layer.linear.weight",
        "conv_in.weight time_embedding.linear_1.weight down_blocks.0.resnets.0.conv1.weight "
        "down_blocks.0.attentions.0.proj_in.weight mid_block.resnets.0.conv1.weight up_blocks.0.resnets.0.conv1.weight "
        "conv_norm_out.weight conv_out.weight",
        "model.diffusion_model.input_blocks.2.0.in_layers.0.weight model.diffusion_model.input_blocks.10.0.in_layers.0.weight "
        "model.diffusion_model.middle_block.0.in_layers.0.weight model.diffusion_model.output_blocks.0.0.in_layers.0.weight "
        "model.diffusion_model.out.0.weight first_stage_model.decoder.conv_in.weight",
        "embeddings.word_embeddings.weight encoder.layer.0.attention.self.query.weight "
        "encoder.layer.0.attention.output.dense.weight encoder.layer.0.intermediate.dense.weight "
        "encoder.layer.0.output.dense.weight encoder.layer.5.output.dense.weight pooler.dense.weight",
    ],
)  # fmt: skip
def test_published_names_come_in_the_order_of_their_forward_pass(names: str):
    wanted = names.split()
    assert order_of_use(reversed(wanted)) == wanted


@given(
    st.lists(
        st.one_of(st.text(max_size=12), st.from_regex(r"[a-b]?[0-9]{1,3}(\.[0-9]{1,3})?")),
        unique=True,
        max_size=12,
    )
)
def test_order_is_a_permutation_whatever_the_names(names):
    assert sorted(order_of_use(names)) == sorted(names)
    assert order_of_use(names) == order_of_use(sorted(names))
    plain = [n for n in names if n.isascii() and n.isdigit()]
    assert [int(n) for n in sorted(plain, key=natural_key)] == sorted(map(int, plain))


def test_a_number_of_any_length_sorts():
    assert order_of_use(["1" * 9000, "2"]) == ["2", "1" * 9000]


def test_order_can_be_given(source: Path, tmp_path: Path):
    order = tmp_path / "order.txt"
    order.write_text("# heads first\nlm_head.weight\nmodel.layers.2.*\n\n", "utf-8")
    pack(source, tmp_path / "p.safetensors", order=order)
    names = list(open_index(tmp_path / "p.safetensors"))
    assert names[0] == "lm_head.weight" and all(n.startswith("model.layers.2.") for n in names[1:7])
    assert set(names) == set(llama())
    order.write_text(json.dumps(["scalar"]), "utf-8")
    assert order_from_file(order, list(llama()))[0] == "scalar"
    for text, words in (
        ("nothing.like.it", "fits no tensor"),
        ("[1]", "neither a list"),
        ("[", "neither a list"),
    ):
        order.write_text(text, "utf-8")
        with pytest.raises(WeightsError, match=words):
            pack(source, tmp_path / "q.safetensors", order=order)
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(WeightsError, match="cannot be read"):
            order_from_file(bad, [])


def test_load_file_gives_independent_tensors_and_words_for_what_does_not_fit(source: Path, tmp_path: Path):
    values = load_file(source)
    assert same(values, llama())
    for value in values.values():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    with pytest.raises(WeightsError):
        load_file(tmp_path / "none")


def test_command_packs_verifies_and_reports(carom_cli, source: Path, tmp_path: Path, capsys):
    target = tmp_path / "packed.safetensors"
    done = carom_cli("pack", str(source), str(target), "--verify", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["verified"] and result["tensors"] == len(llama()) and result["peak_rss_bytes"] > 0
    # The same program, without another import of torch for each line.
    assert main(["pack", str(target), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(llama())
    assert main(["pack", str(source), str(tmp_path / "folder"), "--shard-size", "64KiB", "--no-pad"]) == 0
    text = capsys.readouterr()
    assert "tensors" in text.out and text.err == ""
    for arguments, code, words in (
        (("pack", str(source), str(target)), 1, "exists already"),
        (("pack", str(source)), 2, "name a destination"),
        (("pack", str(source), str(tmp_path / "y"), "--shard-size", "big"), 2, "--shard-size"),
        (("pack", str(source), str(tmp_path / "y"), "--codec", "zip"), 2, "packs raw, lossless"),
        (("pack", str(source), str(tmp_path / "y"), "--quant", "nf5"), 2, "dense=nf4,experts=nf2"),
        (("pack", str(tmp_path / "none"), str(tmp_path / "y")), 1, "no such file"),
    ):
        assert main(list(arguments)) == code
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said


def test_an_interrupted_command_says_that_it_can_go_on(source: Path, tmp_path: Path, monkeypatch, capsys):
    from carom.cli import main as entry

    def interrupted(_out, _piece, _reserve):
        raise KeyboardInterrupt

    target = tmp_path / "packed.safetensors"
    monkeypatch.setattr(writer._PackRun, "_write_tensor", staticmethod(interrupted))
    assert entry.main(["pack", str(source), str(target)]) == 1
    said = capsys.readouterr().err
    assert f"{target} was not made" in said and "the same command goes on" in said and not target.exists()
    monkeypatch.undo()
    assert entry.main(["pack", str(source), str(target)]) == 0 and target.exists()


@pytest.mark.skipif(os.name == "nt", reason="a pseudo terminal of POSIX")
def test_progress_bar_shows_on_a_terminal(source: Path, tmp_path: Path, root: Path):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "carom").symlink_to(root)
    import fcntl
    import pty
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    run = subprocess.Popen(
        [sys.executable, "-m", "carom", "pack", str(source), str(tmp_path / "x.safetensors")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "path")}, stderr=follower, stdout=subprocess.DEVNULL,
        cwd=tmp_path / "path",
    )  # fmt: skip
    os.close(follower)
    shown = ""
    try:
        while part := os.read(leader, 1 << 16):
            shown += part.decode()
    except OSError:  # how a terminal without its other end says that nothing follows
        pass
    os.close(leader)
    assert run.wait(60) == 0
    assert "100%" in shown


def test_memory_stays_small_whatever_the_file(carom_cli, tmp_path: Path):
    """One tensor of 400 MiB: less than half of it is ever held, torch's own memory included."""
    source = tmp_path / "big.safetensors"
    size = 400 << 20
    head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(source, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    done = carom_cli("pack", str(source), str(tmp_path / "p.safetensors"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_rss_bytes"] < 200 << 20
