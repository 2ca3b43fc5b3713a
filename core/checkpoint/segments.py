"""Which bytes of a file fill a tensor of a module: the tensor of the same name, or parts of fused weights.

The parts of a fused weight are whole rows one after another: a fused tensor of the module is filled from parts in
the file, parts of the module are filled from a fused tensor in the file, and experts are stacked into one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .index import TensorEntry

# (name of a fused weight, names of its parts in row order); a name is one part of a dotted tensor name.
FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv", ("q", "k", "v")),
    ("to_qkv", ("to_q", "to_k", "to_v")),
    ("Wqkv", ("Wq", "Wk", "Wv")),
    ("kv_proj", ("k_proj", "v_proj")),
    ("to_kv", ("to_k", "to_v")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
)
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(?:(gate_up_proj)|(down_proj))(?:\.weight)?")
# Names in files of the weights of one expert: first those that fill the stacked down_proj, then those that
# fill the stacked gate_up_proj. Each has two alternatives, the names of most models and those of Mixtral.
_EXPERT_PARTS = (("down_proj",), ("w2",)), (("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of bytes in a file that fills a part of a tensor.

    ``nbytes`` bytes from byte ``start`` of ``entry`` go to byte ``at`` of the tensor's storage.
    """

    entry: TensorEntry
    start: int
    at: int
    nbytes: int


def find_segments(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    keys: Mapping[str, TensorEntry],
    stacked: Collection[str],
) -> tuple[Segment, ...] | None:
    """Return the segments that fill the target called ``name``, or None if the file has none.

    The segments are the tensor of that name, its parts, or a range of a fused tensor.
    """
    if name in keys:
        entry = keys[name]
        return (Segment(entry, 0, 0, entry.nbytes),)
    shape = shapes[name]
    if not shape:
        return None
    name_parts = name.split(".")
    for fused, parts in FUSED:
        for at in (i for i in (-1, -2) if len(name_parts) >= -i):
            if name_parts[at] == fused:
                found = _concatenated_parts([_swap(name_parts, at, p) for p in parts], shape, keys)
            elif name_parts[at] in parts:
                found = _rows_of_fused(
                    _swap(name_parts, at, fused),
                    [_swap(name_parts, at, p) for p in parts],
                    name,
                    shapes,
                    keys,
                )
            else:
                continue
            if found:
                return found
    return _stacked_experts(name, shape, keys, stacked)


def _swap(name_parts: list[str], at: int, new: str) -> str:
    """Return the dotted name of ``name_parts`` with the part number ``at`` replaced by ``new``."""
    changed = list(name_parts)
    changed[at] = new
    return ".".join(changed)


def _concatenated_parts(
    parts: list[str], shape: tuple[int, ...], keys: Mapping[str, TensorEntry]
) -> tuple[Segment, ...] | None:
    """Return the tensors ``parts`` as consecutive segments, or None unless their rows together make up
    ``shape``.
    """
    entries = [keys[p] for p in parts if p in keys]
    if (
        len(entries) != len(parts)
        or any(
            not e.torch_shape or e.torch_shape[1:] != shape[1:] or e.dtype != entries[0].dtype
            for e in entries
        )
        or sum(e.torch_shape[0] for e in entries) != shape[0]
    ):
        return None
    return _concatenate(entries)


def _concatenate(entries: Iterable[TensorEntry]) -> tuple[Segment, ...]:
    """Return a segment for each whole entry, one after another."""
    segments, at = [], 0
    for entry in entries:
        segments.append(Segment(entry, 0, at, entry.nbytes))
        at += entry.nbytes
    return tuple(segments)


def _rows_of_fused(
    fused: str,
    parts: list[str],
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    keys: Mapping[str, TensorEntry],
) -> tuple[Segment, ...] | None:
    """Return the rows of the fused tensor ``fused`` that fill ``name``, or None unless the parts' rows add up
    to its shape.
    """
    if fused not in keys or any(not shapes.get(p) or shapes[p][1:] != shapes[name][1:] for p in parts):
        return None
    entry, rows = keys[fused], [shapes[p][0] for p in parts]
    if entry.torch_shape != (sum(rows), *shapes[name][1:]) or not sum(rows):
        return None
    row_bytes = entry.nbytes // sum(rows)
    before = sum(rows[: parts.index(name)])
    return (Segment(entry, before * row_bytes, 0, shapes[name][0] * row_bytes),)


def _stacked_experts(
    name: str, shape: tuple[int, ...], keys: Mapping[str, TensorEntry], stacked: Collection[str]
) -> tuple[Segment, ...] | None:
    """Return the segments of a 3-D tensor of stacked experts that the file stores one by one
    (`experts.3.up_proj.weight`).
    """
    match = _EXPERT.fullmatch(name)
    if not match or len(shape) != 3:
        return None
    for kinds in _EXPERT_PARTS[bool(match[2])]:
        found = _separate_experts(match[1], kinds, shape, keys)
        # A square matrix might have to be transposed in the stack, and its shape would not show that. So
        # square matrices are accepted only if transformers' loader is known to stack them unchanged.
        if found and (shape[1] != shape[2] or all(segment.entry.name in stacked for segment in found)):
            return found
    return None


def _separate_experts(
    name: str, kinds: tuple[str, ...], shape: tuple[int, ...], keys: Mapping[str, TensorEntry]
) -> tuple[Segment, ...] | None:
    """Return the segments of all experts, whose parts are called ``kinds``, or None if one is missing or does
    not fit.
    """
    entries: list[TensorEntry] = []
    for expert in range(shape[0]):
        part = _concatenated_parts([f"{name}.{expert}.{kind}.weight" for kind in kinds], shape[1:], keys)
        if part is None:
            return None
        entries.extend(s.entry for s in part)
    return _concatenate(entries) if len({e.dtype for e in entries}) == 1 else None
