"""Runs of tensors as few long reads."""

from __future__ import annotations

from pathlib import Path

import torch
from carom.core.store.index import SourceFile, TensorEntry, open_index
from carom.core.store.rawio import ALIGN, aligned_buffer
from carom.core.store.reader import DiskReader
from carom.core.store.spans import packing_gain, spans
from carom.core.store.writer import pack
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

FILES = [SourceFile(p, 1 << 40, 0, 0, 0) for p in ("a", "b")]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 50), st.integers(0, 9)), max_size=30),
    st.integers(0, 9),
)
def test_spans_hold_every_tensor_once_and_are_far_apart(raw, gap):
    entries = [TensorEntry(str(i), "U8", (n,), FILES[f], o, n) for i, (f, o, n) in enumerate(raw)]
    found = spans(entries, gap)
    assert sorted(e.name for s in found for e in s.entries) == sorted(e.name for e in entries)
    for span in found:
        assert all(e.file == span.file for e in span.entries)
        assert span.offset == min(e.offset for e in span.entries)
        assert span.offset + span.nbytes == max(e.offset + e.nbytes for e in span.entries)
    for one, two in zip(found, found[1:], strict=False):
        assert one.file != two.file or two.offset - one.offset - one.nbytes > gap


def test_packing_turns_scattered_blocks_into_one_read_each(tmp_path: Path):
    torch.manual_seed(0)
    values = {f"{k}.{i}.weight": torch.randn(50, 31) for k in ("q", "up", "a") for i in range(4)}
    values = {f"layers.{k.split('.')[1]}.{k.split('.')[0]}.weight": v for k, v in values.items()}
    values = {k: v.double() if ".up." in k else v for k, v in values.items()}  # the library sorts by dtype
    save_file(values, tmp_path / "s.safetensors")
    pack(tmp_path / "s.safetensors", tmp_path / "p.safetensors")

    def units(name: str):
        index = open_index(tmp_path / name)
        return [[e for n, e in index.entries.items() if n.startswith(f"layers.{i}.")] for i in range(4)]

    before, after = packing_gain(units("s.safetensors")), packing_gain(units("p.safetensors"))
    assert before.reads > after.reads == after.packed_reads == 4
    assert before.copied_bytes > after.copied_bytes == 0
    with DiskReader() as reader:
        for unit in units("p.safetensors"):
            (span,) = spans(unit)
            slot = aligned_buffer(span.nbytes)
            reader.submit_range(span.file, span.offset, span.nbytes, slot).result(20)
            for entry in span.entries:
                at = entry.offset - span.offset
                raw = torch.frombuffer(
                    slot, dtype=entry.torch_dtype, offset=at, count=values[entry.name].numel()
                )
                assert at % ALIGN == 0 and torch.equal(raw.reshape(entry.shape), values[entry.name])
