"""The safetensors index: takes what the format allows, refuses all else in words, whatever the bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from carom.core.checkpoint import header as header_module
from carom.core.checkpoint.format_errors import pickle_error
from carom.core.checkpoint.header import DTYPE_BITS, parse_header
from carom.core.checkpoint.index import _TORCH_DTYPES, open_index
from carom.core.common.errors import UnsupportedError, WeightsError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

spec = importlib.util.spec_from_file_location(
    "fuzz_index", Path(__file__).parents[1] / "support" / "fuzz_index.py"
)
fuzz_index = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz_index)


def entry(dtype="U8", shape=(4,), begin=0, end=4) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(path: Path, head: bytes | dict, data: bytes = b"", length: int | None = None) -> Path:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


A = b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'

# name -> (header, data, what the message must say)
HOSTILE = {
    "length over the file": (b"{" + A + b"}", b"1234", "claims 99999", 99999),
    "length over the cap": (b"{" + A + b"}", b"1234", "at most 100000000", 1 << 40),
    "length of all ones": (b"{" + A + b"}", b"1234", "claims", (1 << 64) - 1),
    "length of zero": (b"", b"", "claims 0 bytes", 0),
    "overlapping": ({"a": entry(), "b": entry("U8", (4,), 2, 6)}, bytes(6), "'a' and 'b' overlap"),
    "twice the same range": ({"a": entry(), "b": entry()}, bytes(4), "overlap"),
    "hole": ({"a": entry(), "b": entry("U8", (4,), 8, 12)}, bytes(12), "4 bytes before tensor 'b'"),
    "hole at the start": ({"a": entry("U8", (4,), 4, 8)}, bytes(8), "4 bytes before tensor 'a'"),
    "bytes after the last tensor": ({"a": entry()}, bytes(9), "5 bytes after the last tensor"),
    "truncated data": ({"a": entry("F32", (100,), 0, 400)}, bytes(399), "truncated.*'a'"),
    "end before begin": ({"a": entry("U8", (4,), 4, 0)}, bytes(4), "before its begin"),
    "negative offset": ({"a": entry("U8", (4,), -4, 0)}, bytes(4), "non-negative integer"),
    "negative dimension": ({"a": entry("U8", (-4,), 0, 4)}, bytes(4), "non-negative integer"),
    "fractional dimension": ({"a": entry("U8", (4.0,), 0, 4)}, bytes(4), "non-negative integer"),
    "boolean dimension": ({"a": entry("U8", (True,), 0, 1)}, bytes(1), "non-negative integer"),
    "NaN offset": (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[NaN,4]}}', bytes(4), "non-negative integer"),
    "leading zero": (b'{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}', bytes(4), "bad safetensors header"),
    "huge dimension": ({"a": entry("U8", (1 << 62, 8), 0, 4)}, bytes(4), "takes None bytes"),
    "huge product hidden by a zero": ({"a": entry("U8", (1 << 62, 0, 1 << 62), 0, 0)}, b"", "takes None bytes"),
    "integer of 30 digits": ({"a": entry("U8", (4,), 0, 10**30)}, bytes(4), "at most 19 digits"),
    "integer of 100000 digits": (b'{"a":{"dtype":"U8","shape":[' + b"1" * 100000 + b'],"data_offsets":[0,4]}}', b"", "digits"),
    "shape product not the range": ({"a": entry("F32", (2,), 0, 4)}, bytes(4), "takes 8 bytes, its range is 4"),
    "odd count of 4-bit elements": ({"a": entry("F4", (3,), 0, 1)}, bytes(1), "takes None bytes"),
    "unknown dtype": ({"a": entry("F33", (4,), 0, 4)}, bytes(4), "unknown dtype 'F33'"),
    "65 dimensions": ({"a": entry("U8", (1,) * 65, 0, 1)}, bytes(1), "more than 64 numbers"),
    "duplicate key": (b"{" + A + b"," + A + b"}", bytes(4), "'a' stands twice"),
    "duplicate key by escape": (b"{" + A + b"," + A.replace(b'"a"', b'"\\u0061"') + b"}", bytes(4), "stands twice"),
    "duplicate field": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4), "repeated field"),
    "unknown field": (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}}', bytes(4), "unknown .*field 'x'"),
    "missing field": (b'{"a":{"dtype":"U8","shape":[4]}}', bytes(4), "lacks dtype, shape or two"),
    "one offset": (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0]}}', bytes(4), "two data_offsets"),
    "three offsets": (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,1,4]}}', bytes(4), "more than 2 numbers"),
    "deep JSON": (b'{"a":' * 50000, b"", "bad safetensors header"),
    "deep list": (b'{"a":{"dtype":"U8","shape":' + b"[" * 50000, b"", "bad safetensors header"),
    "deep metadata": (b'{"__metadata__":{"a":' + b"[" * 50000, b"", "bad safetensors header"),
    "metadata number": (b'{"__metadata__":{"a":1},' + A + b"}", bytes(4), "expected '\"'"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{},' + A + b"}", bytes(4), "__metadata__ stands twice"),
    "metadata key twice": (b'{"__metadata__":{"k":"1","k":"2"},' + A + b"}", bytes(4), "'k' twice"),
    "non-UTF-8 name": (b"{" + A.replace(b'"a"', b'"\xff\xfe"') + b"}", bytes(4), "not valid UTF-8"),
    "overlong UTF-8 name": (b"{" + A.replace(b'"a"', b'"\xc0\x80"') + b"}", bytes(4), "not valid UTF-8"),
    "lone surrogate": (b"{" + A.replace(b'"a"', b'"\\ud800"') + b"}", bytes(4), "not valid UTF-8"),
    "raw control character": (b"{" + A.replace(b'"a"', b'"\x01"') + b"}", bytes(4), "not valid UTF-8"),
    "name of a megabyte": (b"{" + A.replace(b'"a"', b'"' + b"a" * (1 << 20) + b'"') + b"}", bytes(4), "a name of 1048576 bytes"),
    "string without end": (b'{"a', b"", "never ends"),
    "a list": (b"[" + A + b"]", bytes(4), "does not begin"),
    "leading space": (b" {" + A + b"}", bytes(4), "does not begin"),
    "text after the end": (b"{" + A + b"}x", bytes(4), "after the closing"),
    "unclosed": (b"{" + A, bytes(4), "expected ','"),
    "trailing comma": (b"{" + A + b",}", bytes(4), "expected '\"'"),
    "empty file": (None, b"", "no safetensors file"),
    "seven bytes": (None, b"1234567", "no safetensors file"),
    "text file": (None, b"hello, this is a text file, not weights", "at most 100000000"),
    "git lfs pointer": (None, b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_in_words(case: str, tmp_path: Path):
    head, data, words, *length = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    if head is None:
        path.write_bytes(data)
    else:
        write(path, head, data, *length)
    began = time.process_time()
    with pytest.raises(WeightsError, match=words) as caught:
        open_index(path)
    assert time.process_time() - began < 2
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_names_in_errors_cannot_reach_the_terminal_raw(tmp_path: Path):
    bad = write(tmp_path / "m.safetensors", {"\x1b[31m" + "x" * 5000: entry("U8", (5,), 0, 4)}, bytes(4))
    with pytest.raises(WeightsError) as caught:
        open_index(bad)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "head",
    [
        b'{"' + b"a" * 5_000_000,
        b"{" + b'"a":{"dtype":"U8","shape":[' + b"0," * 5_000_000,
        b"{" + b'"__metadata__":{"a":"' + b"\\\\" * 5_000_000 + b'"',
        b"{" + b" " * 10_000_000,
        b"{" * 10_000_000,
        b'{"__metadata__":{' + b",".join(b'"%x":""' % i for i in range(60_000)),
    ],
)
def test_ten_megabytes_of_nonsense_cost_little_time_and_memory(head: bytes, tmp_path: Path):
    import tracemalloc

    path = write(tmp_path / "m.safetensors", head)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(WeightsError):
            open_index(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(head) and peak < 150_000_000
    assert time.process_time() - began < 20


def test_too_many_tensors_are_refused_before_they_are_held(monkeypatch):
    monkeypatch.setattr(header_module, "MAX_TENSORS", 10)
    many = {str(i): entry("U8", (0,), 0, 0) for i in range(12)}
    with pytest.raises(WeightsError, match="more than 10 tensors"):
        parse_header(json.dumps(many).encode(), "f")


def test_dtype_table_is_that_of_the_library(tmp_path: Path):
    for code, name in _TORCH_DTYPES.items():
        dtype = getattr(torch, name)
        count = 8 if code != "F4" else 4
        save_file(
            {"t": torch.empty(count, dtype=torch.uint8).view(torch.uint8).repeat(8).view(dtype)},
            tmp_path / "t",
        )
        found = open_index(tmp_path / "t")["t"]
        assert (found.dtype, found.torch_dtype) == (code, dtype)
        with safe_open(tmp_path / "t", "pt") as other:
            assert found.torch_shape == tuple(other.get_tensor("t").shape)
    assert set(DTYPE_BITS) - set(_TORCH_DTYPES) == {"F6_E2M3", "F6_E3M2"}


def test_dtype_unknown_to_torch_is_indexed_and_named_when_asked_for(tmp_path: Path):
    found = open_index(write(tmp_path / "m", {"six": entry("F6_E2M3", (4,), 0, 3)}, bytes(3)))["six"]
    with pytest.raises(UnsupportedError, match="'six'.*F6_E2M3"):
        found.torch_dtype  # noqa: B018


names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(lambda n: n != "__metadata__")
tensors = st.dictionaries(
    names,
    st.tuples(st.sampled_from(sorted(_TORCH_DTYPES)), st.lists(st.integers(0, 5), max_size=4)),
    max_size=8,
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tensors,
    st.dictionaries(names, st.text(st.characters(exclude_categories=("Cs",)), max_size=30), max_size=3),
)
def test_index_agrees_with_the_library_on_what_it_writes(spec, metadata):
    values = {}
    for i, (name, (code, shape)) in enumerate(spec.items()):
        dtype = getattr(torch, _TORCH_DTYPES[code])
        shape = shape or [1] * (code == "F4")  # half a byte alone cannot be written
        raw = torch.arange(i, i + 16 * 625).to(torch.uint8)
        count = 1
        for dim in shape:
            count *= dim
        size = torch.empty(0, dtype=dtype).element_size()
        values[name] = raw[: count * size].clone().view(dtype).reshape(shape)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = os.path.join(folder, "m.safetensors")
        save_file(values, path, metadata or None)  # {} makes the library write bad JSON for no tensors
        found = open_index(path)
        data = Path(path).read_bytes()
        assert set(found) == set(values)
        assert dict(found.metadata[0]) == metadata
        with safe_open(path, "pt") as other:
            for name, item in found.entries.items():
                theirs = other.get_tensor(name)
                assert (item.torch_shape, item.torch_dtype) == (tuple(theirs.shape), theirs.dtype)
                assert data[item.offset : item.offset + item.nbytes] == (
                    theirs.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    if theirs.numel()
                    else b""
                )


def test_fuzz_finds_nothing_in_a_few_hundred_runs():
    """So many, not so long: .ci/run goes on for a minute."""
    result = fuzz_index.fuzz(seconds=120, seed=int(os.environ.get("CAROM_FUZZ_SEED", "1")), most=600)
    assert result["runs"] == 600 and result["arcs"] > 150


def test_fuzz_notices_a_parser_that_lets_an_overlap_pass(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(fuzz_index.index, "check_ranges", lambda *a: None)
    bad = write(tmp_path / "x", {"a": entry(), "b": entry("U8", (4,), 2, 6)}, bytes(6)).read_bytes()
    with pytest.raises(Exception, match="invalid offset"):
        fuzz_index.check(bad, str(tmp_path / "in"))


# --- paths ------------------------------------------------------------------------------------------------------


def save(path: Path, **values: torch.Tensor) -> Path:
    save_file(values, path)
    return path


def test_every_bad_path_is_an_error_in_words(tmp_path: Path):
    for path, words in (
        (tmp_path / "no", "no such file"),
        (tmp_path, "holds no .safetensors"),
        ("/dev/zero", "not a regular file"),
        ("x" * 5000, "too long"),
        (str(tmp_path / ("x" * 300)), "too long"),
        ("a\0b", "cannot be read"),
        (12, "cannot be read"),
    ):
        with pytest.raises(WeightsError, match=words):
            open_index(path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(WeightsError, match="circle"):
        open_index(tmp_path / "loop")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo.safetensors")
        with pytest.raises(WeightsError, match="not a regular file"):
            open_index(tmp_path / "fifo.safetensors")


def test_file_without_permission_is_named(tmp_path: Path, monkeypatch):
    path = save(tmp_path / "m.safetensors", a=torch.zeros(2))
    path.chmod(0)
    # Root may read all, and on Windows chmod forbids writing alone; what the system says to others is played.
    if not hasattr(os, "geteuid") or os.geteuid() == 0:

        def refuse(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WeightsError, match="access is denied" if os.name == "nt" else "no permission"):
        open_index(path)


def test_symlinks_non_ascii_and_long_paths_are_followed(tmp_path: Path):
    folder = tmp_path / "modèle 模型 🎱"
    folder.mkdir()
    for _ in range(4):
        folder = folder / ("long-" * 40)
        folder.mkdir()
    path = save(folder / "gewicht-ü.safetensors", a=torch.zeros(2))
    (tmp_path / "blob").symlink_to(path)
    assert len(str(path)) > 800
    assert set(open_index(path)) == set(open_index(tmp_path / "blob")) == {"a"}


@pytest.mark.parametrize("name", ["m.pt", "m.bin", "m.ckpt", "M.PTH", "m.safetensors", "m"])
def test_pickle_checkpoints_are_refused_unread_with_the_way_to_convert_them(name: str, tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    path = tmp_path / name
    for zipped in (True, False):
        torch.save({"a": torch.zeros(2), "b": Bomb()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(UnsupportedError, match=r"pickle.*weights_only=True.*save_file"):
            open_index(path)


def test_the_conversion_that_is_advised_works(tmp_path: Path):
    import re
    import shlex

    source, tied = tmp_path / "old.pt", torch.arange(6.0)
    torch.save({"state_dict": {"a": tied, "b": tied, "c": tied.reshape(2, 3).t()}}, source)
    with pytest.raises(UnsupportedError) as caught:
        open_index(source)
    command = shlex.split(re.search(r"python -c .*", str(caught.value))[0])
    subprocess.run([sys.executable, *command[1:]], check=True, cwd=tmp_path, timeout=120)
    assert open_index(tmp_path / "model.safetensors")["c"].shape == (3, 2)


def test_gguf_is_refused_by_name(tmp_path: Path):
    (tmp_path / "m").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnsupportedError, match="GGUF"):
        open_index(tmp_path / "m")


# --- folders ----------------------------------------------------------------------------------------------------


def sharded(folder: Path, stem: str = "model") -> dict[str, str]:
    where = {"a": f"{stem}-00001-of-00002.safetensors", "b": f"{stem}-00002-of-00002.safetensors"}
    for name, file in where.items():
        save(folder / file, **{name: torch.full((3,), float(ord(name)))})
    return where


def put_map(folder: Path, value: object, name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def test_sharded_folder_with_and_without_its_map(tmp_path: Path):
    where = sharded(tmp_path)
    assert set(open_index(tmp_path)) == {"a", "b"}
    path = put_map(tmp_path, {"weight_map": where})
    for given_path in (tmp_path, path):
        found = open_index(given_path)
        assert {n: os.path.basename(e.file.path) for n, e in found.entries.items()} == where
    assert len(found.files) == 2 and found.nbytes == 24


def test_map_decides_where_a_name_stands_twice(tmp_path: Path):
    save(tmp_path / "one.safetensors", a=torch.zeros(2), b=torch.zeros(2))
    save(tmp_path / "two.safetensors", a=torch.ones(2))
    with pytest.raises(WeightsError, match="'a' stands in 'one.safetensors' and in 'two.safetensors'"):
        open_index(tmp_path)
    put_map(tmp_path, {"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}})
    assert open_index(tmp_path)["a"].file.path.endswith("two.safetensors")


def test_default_file_is_taken_beside_other_variants(tmp_path: Path):
    save(tmp_path / "model.safetensors", a=torch.zeros(2))
    save(tmp_path / "model.fp16.safetensors", a=torch.zeros(2).half())
    assert open_index(tmp_path)["a"].dtype == "F32"


def test_missing_shard_is_named(tmp_path: Path):
    where = sharded(tmp_path)
    os.unlink(tmp_path / where["a"])
    with pytest.raises(WeightsError, match="1 of 2 shards are missing, first model-00001-of-00002"):
        open_index(tmp_path)
    put_map(tmp_path, {"weight_map": where})
    with pytest.raises(WeightsError, match="model-00001-of-00002.safetensors: no such file"):
        open_index(tmp_path)


@pytest.mark.parametrize(
    "value, words",
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, "no file name"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no file name"),
        ({"weight_map": {"a": ".."}}, "no file name"),
        ({"weight_map": {"a": "c:\\x.safetensors"}}, "no file name"),
        ({"weight_map": {"a": 3}}, "no file name"),
        ({"weight_map": {"a": "x\0"}}, "no file name"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": [1]}, "no weight_map"),
        ([1], "not a JSON object"),
        (b"\xff", "not UTF-8"),
        (b"{", "not valid JSON"),
        (b"[" * 200000, "not valid JSON"),
        (b'{"weight_map":{"a":"x","a":"y"}}', "stands twice"),
        (b'{"a":' + b"9" * 10000 + b"}", "not valid JSON"),
        ({"weight_map": {"zz": "model-00001-of-00002.safetensors"}}, "first 'zz' in 'model-00001"),
    ],
)
def test_hostile_map_is_refused_in_words(value: object, words: str, tmp_path: Path):
    sharded(tmp_path)
    put_map(tmp_path, value)
    with pytest.raises(WeightsError, match=words):
        open_index(tmp_path)


@pytest.mark.parametrize(
    ("path", "argument"),
    [
        (r"C:\my models\a.pt", r'"C:\my models\a.pt"'),
        ("$(reboot).pt", "'$(reboot).pt'"),
        ("a\n.pt", r"'a\n.pt'"),
    ],
)
def test_the_command_that_converts_a_pickle_has_its_path_quoted_for_every_shell(path: str, argument: str):
    assert str(pickle_error(path)).endswith(f" {argument} model.safetensors")


def test_map_to_pickles_is_refused_with_the_way_out(tmp_path: Path):
    put_map(tmp_path, {"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}})
    with pytest.raises(UnsupportedError, match="pickle"):
        open_index(tmp_path)
    os.unlink(tmp_path / "model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="pickle"):
        open_index(tmp_path)


def test_pipeline_folder_names_the_subfolders_that_hold_weights(tmp_path: Path):
    (tmp_path / "transformer").mkdir()
    save(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", a=torch.zeros(1))
    with pytest.raises(WeightsError, match="subfolders transformer do"):
        open_index(tmp_path)
    assert "a" in open_index(tmp_path / "transformer")


def test_two_maps_in_one_folder_ask_which(tmp_path: Path):
    for stem in ("x", "y"):
        put_map(tmp_path, {"weight_map": sharded(tmp_path, stem)}, f"{stem}.safetensors.index.json")
    with pytest.raises(WeightsError, match="several checkpoints"):
        open_index(tmp_path)


def test_replaced_cut_or_written_file_is_noticed(tmp_path: Path):
    def fresh():
        return open_index(save(tmp_path / "m.safetensors", a=torch.zeros(1000)))

    found = fresh()
    found.check()
    other = save(tmp_path / "n.safetensors", a=torch.ones(1000))
    os.replace(other, tmp_path / "m.safetensors")
    with pytest.raises(WeightsError, match="replaced by another file while in use"):
        found.check()
    found = fresh()
    os.truncate(tmp_path / "m.safetensors", 500)
    with pytest.raises(WeightsError, match="changed from 40.. to 500 bytes"):
        found.check()
    found = fresh()
    os.utime(tmp_path / "m.safetensors", ns=(1, 1))
    with pytest.raises(WeightsError, match="written to"):
        found.check()
    found = fresh()
    os.unlink(tmp_path / "m.safetensors")
    with pytest.raises(WeightsError, match="gone while in use"):
        found.check()


def test_unknown_name_suggests_one_that_ends_alike(tmp_path: Path):
    found = open_index(save(tmp_path / "m.safetensors", **{"model.layers.0.q.weight": torch.zeros(1)}))
    with pytest.raises(WeightsError, match="there is 'model.layers.0.q.weight'"):
        found["layers.0.q.weight"]


def test_thirty_thousand_tensors_are_indexed_in_seconds(tmp_path: Path):
    many = {
        f"model.layers.{i // 99}.mlp.experts.{i % 99}.up_proj.weight": entry("U8", (1, 1), i, i + 1)
        for i in range(30_000)
    }
    path = write(tmp_path / "m.safetensors", many, bytes(30_000))
    began = time.process_time()
    assert len(open_index(path)) == 30_000
    assert time.process_time() - began < 3  # 0.3 s on an idle machine
