"""PURE: which few long reads bring many tensors, and what packing would save of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .index import SourceFile, TensorEntry
from .rawio import ALIGN


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [``offset``, ``offset + nbytes``) of ``file``: ``entries`` in order, with gaps of at most the asked size."""

    file: SourceFile
    offset: int
    nbytes: int
    entries: tuple[TensorEntry, ...]


def spans(entries: Iterable[TensorEntry], max_gap: int = ALIGN - 1) -> tuple[Span, ...]:
    """``entries`` as contiguous runs, sorted by file and offset; runs less than ``max_gap`` bytes apart are one.

    The default gap is what `carom pack` puts between tensors at most. Read with `DiskReader.submit_range` into memory
    whose address agrees with the offset modulo 4096, a span needs no second buffer even where its tensors are
    aligned to nothing; entry ``e`` then stands at ``e.offset - span.offset``.
    """
    found: list[Span] = []
    for entry in sorted(entries, key=lambda e: (e.file.path, e.offset)):
        if found and found[-1].file == entry.file:
            last = found[-1]
            if entry.offset - (last.offset + last.nbytes) <= max_gap:
                nbytes = max(last.nbytes, entry.offset + entry.nbytes - last.offset)
                found[-1] = Span(last.file, last.offset, nbytes, (*last.entries, entry))
                continue
        found.append(Span(entry.file, entry.offset, entry.nbytes, (entry,)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PackingGain:
    """``reads``: spans that one pass over the units takes; ``packed_reads``: after packing in their order;
    ``copied_bytes``: bytes of tensors on no page boundary, which a read tensor by tensor copies once more."""

    reads: int
    packed_reads: int
    copied_bytes: int


def packing_gain(units: Iterable[Iterable[TensorEntry]]) -> PackingGain:
    """What packing would save of a pass that reads ``units`` one after another."""
    groups = [list(unit) for unit in units]
    return PackingGain(
        reads=sum(len(spans(group)) for group in groups),
        packed_reads=sum(1 for group in groups if group),
        copied_bytes=sum(e.nbytes for group in groups for e in group if e.offset % ALIGN),
    )
