"""Which bytes of a checkpoint fill which parameter or buffer of a module; nothing is read and no value touched.

Works for modules on `meta`. Covers prefixes on either side, wrappers that add a name part (PEFT, compile), tied
weights, and fused keys where whole rows follow one another: a fused tensor of the module filled from parts in the
file, parts of the module filled from a fused tensor in the file, and experts stacked into one tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from ..errors import UnsupportedError, WeightsError
from .header import show
from .hub_names import HubNames, hub_names
from .index import Index, TensorEntry
from .packed_source import require_readable

# fused name part -> its parts in row order.
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
# Preferred in this order where several prefixes fit equally well.
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.", "transformer.", "module.")
# Name parts that wrappers add to a module's own names.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:base_layer|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(?:(gate_up_proj)|(down_proj))(?:\.weight)?")
# What one expert's parts are called, those of gate_up_proj last: by most, and by Mixtral.
_EXPERT_PARTS = (("down_proj",), ("w2",)), (("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True, slots=True)
class Segment:
    """``nbytes`` bytes from byte ``start`` of ``entry`` go to byte ``at`` of the target's storage."""

    entry: TensorEntry
    start: int
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bound:
    """A parameter or buffer and where its bytes are. ``name`` is the module's first name of it, ``names`` all of
    them (more than one: tied). ``segments`` cover its contiguous bytes in order, without a gap."""

    name: str
    names: tuple[str, ...]
    is_buffer: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ModuleMap:
    """The whole mapping. ``kept``: tensors the file lacks that hold values already (adapters); ``computed``:
    non-persistent buffers on `meta`, which no file ever holds and their module must compute; ``extra``: names of the
    file that fill nothing; ``prefix``: what was taken from the file's names (or, after "+", put before them)."""

    bound: Mapping[str, Bound]
    kept: tuple[str, ...]
    computed: tuple[str, ...]
    extra: tuple[str, ...]
    prefix: str


@dataclass(frozen=True, slots=True)
class _Target:
    names: tuple[str, ...]
    tensor: torch.Tensor
    is_buffer: bool
    persistent: bool


def match_module(
    module: nn.Module,
    index: Index,
    *,
    prefix: str = "auto",
    rename: Callable[[str], str] | None = None,
    adopt_dtype: bool = False,
) -> ModuleMap:
    """Map every parameter and buffer of ``module`` to bytes of ``index``.

    ``prefix``: taken off the file's names ("" for none); "auto" finds it, also one that the module has and the file
    lacks. ``rename``: applied to the module's names first. ``adopt_dtype``: tensors on `meta` take the file's dtype
    instead of being refused. Raises WeightsError that names tensors on `meta` which the file lacks, and tensors whose
    shape or dtype differs; UnsupportedError for files of an unknown codec, and for tensors that transformers' loader would
    rearrange. Its models' files are looked into under the names that it gives their tensors as well (`hub_names`). Packed tensors count as what they decode to.
    """
    require_readable(index)
    targets = _targets(module)
    wanted = {n: _WRAPPERS.sub("", rename(n) if rename else n) for t in targets for n in t.names}
    hub = hub_names(module, index) if prefix == "auto" and rename is None else HubNames()
    found = _match(targets, wanted, index, index.entries, prefix, adopt_dtype, hub.stacked)
    if hub.renamed and (found.missing or found.kept):
        entries = {hub.renamed.get(name, name): entry for name, entry in index.entries.items()}
        again = _match(targets, wanted, index, entries, prefix, adopt_dtype, hub.stacked)
        if len(again.bound) > len(found.bound):
            found = again
    _refuse_rearranged(index, found, hub.rearranged)
    used = found.used
    extra = tuple(name for name in index if name not in used)
    _complain(index, found.missing, found.wrong, bool(found.bound), found.prefix, extra)
    return ModuleMap(
        MappingProxyType(found.bound), tuple(found.kept), tuple(found.computed), extra, found.prefix
    )


@dataclass
class _Match:
    """What one way of reading the file's names comes to."""

    prefix: str
    bound: dict[str, Bound] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


def _match(
    targets: list[_Target],
    wanted: Mapping[str, str],
    index: Index,
    entries: Mapping[str, TensorEntry],
    prefix: str,
    adopt_dtype: bool,
    stacked: Collection[str],
) -> _Match:
    keys, chosen = _keys(index.path, entries, set(wanted.values()), prefix)
    shapes = {wanted[n]: tuple(t.tensor.shape) for t in targets for n in t.names}
    found = _Match(chosen)
    for target in targets:
        names = [wanted[n] for n in target.names]
        segments = next((f for n in names if (f := _find(n, shapes, keys, stacked))), None)
        if segments is not None:
            found.used.update(s.entry.name for s in segments)
            found.used.update(keys[n].name for n in names if n in keys)
            result = _bind(target, segments, names, keys, adopt_dtype)
            if isinstance(result, str):
                found.wrong.append(result)
            else:
                found.bound[result.name] = result
        elif target.tensor.device.type != "meta":
            found.kept.append(target.names[0])
        elif target.persistent:
            found.missing.append(target.names[0])
        else:
            found.computed.append(target.names[0])
    return found


def _refuse_rearranged(index: Index, found: _Match, rearranged: Collection[str]) -> None:
    for bound in found.bound.values():
        for segment in bound.segments:
            if segment.entry.name in rearranged:
                raise UnsupportedError(
                    f"{index.path}: transformers rearranges {show(segment.entry.name)} when it loads it; load the model "
                    "with from_pretrained and save its state_dict() with safetensors, then stream that file"
                )


def _targets(module: nn.Module) -> list[_Target]:
    """Parameters and buffers, each once with all its names, in the module's order."""
    names: dict[int, list[str]] = {}
    about: dict[int, tuple[torch.Tensor, bool]] = {}
    volatile: set[str] = set()
    for path, child in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        volatile.update(dot + n for n in child._non_persistent_buffers_set)
    for items, is_buffer in (
        (module.named_parameters(remove_duplicate=False), False),
        (module.named_buffers(remove_duplicate=False), True),
    ):
        for name, tensor in items:
            names.setdefault(id(tensor), []).append(name)
            about[id(tensor)] = (tensor, is_buffer)
    return [
        _Target(tuple(n), *about[key], persistent=any(name not in volatile for name in n))
        for key, n in names.items()
    ]


def _keys(
    path: str, entries: Mapping[str, TensorEntry], wanted: set[str], prefix: str
) -> tuple[dict[str, TensorEntry], str]:
    """The file's entries under the module's names, and the prefix that led there ("+x" where the module has it)."""
    if prefix != "auto":
        return {n[len(prefix) :]: e for n, e in entries.items() if n.startswith(prefix)}, prefix
    votes: Counter[str] = Counter()
    for name in entries:
        for candidate, rest in _heads(name):
            votes[candidate] += rest in wanted
    for name in wanted:
        for candidate, rest in _heads(name):
            if candidate and rest in entries:
                votes["+" + candidate] += 1
    top = max(votes.values(), default=0)
    best = [p for p, count in votes.items() if count == top] if top else [""]
    chosen = next((p for p in PREFIXES if p in best), None)
    if chosen is None:
        if len(best) > 1:
            raise WeightsError(
                f"{path}: the module fits under several prefixes ({', '.join(sorted(map(show, best))[:6])}); "
                "say which with prefix="
            )
        chosen = best[0]
    if chosen.startswith("+"):
        # What the file has under the module's full name (a head beside the base model) counts as well.
        under = {chosen[1:] + n: e for n, e in entries.items()}
        return {**under, **{n: e for n, e in entries.items() if n in wanted}}, chosen
    return _keys(path, entries, wanted, chosen)


def _heads(name: str) -> Iterable[tuple[str, str]]:
    """Every way to cut ``name`` at a dot: (head with its dot, rest), the empty head first."""
    at = 0
    while True:
        yield name[:at], name[at:]
        at = name.find(".", at) + 1
        if not at:
            return


def _find(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    keys: Mapping[str, TensorEntry],
    stacked: Collection[str],
) -> tuple[Segment, ...] | None:
    """Where the target called ``name`` lies: itself, its parts, or a range of a fused tensor; None if nowhere."""
    if name in keys:
        entry = keys[name]
        return (Segment(entry, 0, 0, entry.nbytes),)
    shape = shapes[name]
    if not shape:
        return None
    pieces = name.split(".")
    for fused, parts in FUSED:
        for at in (i for i in (-1, -2) if len(pieces) >= -i):
            if pieces[at] == fused:
                found = _parts_rows([_swap(pieces, at, p) for p in parts], shape, keys)
            elif pieces[at] in parts:
                found = _fused_rows(
                    _swap(pieces, at, fused), [_swap(pieces, at, p) for p in parts], name, shapes, keys
                )
            else:
                continue
            if found:
                return found
    return _stacked_experts(name, shape, keys, stacked)


def _swap(pieces: list[str], at: int, new: str) -> str:
    changed = list(pieces)
    changed[at] = new
    return ".".join(changed)


def _parts_rows(
    parts: list[str], shape: tuple[int, ...], keys: Mapping[str, TensorEntry]
) -> tuple[Segment, ...] | None:
    """``parts`` one after another, if they make up ``shape`` by rows."""
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
    segments, at = [], 0
    for entry in entries:
        segments.append(Segment(entry, 0, at, entry.nbytes))
        at += entry.nbytes
    return tuple(segments)


def _fused_rows(
    fused: str,
    parts: list[str],
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    keys: Mapping[str, TensorEntry],
) -> tuple[Segment, ...] | None:
    """The rows of ``fused`` that are ``name``, if the module's parts together have its shape."""
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
    """Experts that the file holds one by one (`experts.3.up_proj.weight`) and the module as one 3-D tensor."""
    match = _EXPERT.fullmatch(name)
    if not match or len(shape) != 3:
        return None
    for kinds in _EXPERT_PARTS[bool(match[2])]:
        found = _one_by_one(match[1], kinds, shape, keys)
        # A square matrix might be stored transposed in the stack, and only the model's own loader knows.
        if found and (shape[1] != shape[2] or all(segment.entry.name in stacked for segment in found)):
            return found
    return None


def _one_by_one(
    name: str, kinds: tuple[str, ...], shape: tuple[int, ...], keys: Mapping[str, TensorEntry]
) -> tuple[Segment, ...] | None:
    entries: list[TensorEntry] = []
    for expert in range(shape[0]):
        part = _parts_rows([f"{name}.{expert}.{kind}.weight" for kind in kinds], shape[1:], keys)
        if part is None:
            return None
        entries.extend(s.entry for s in part)
    return _concatenate(entries) if len({e.dtype for e in entries}) == 1 else None


def _bind(
    target: _Target,
    segments: tuple[Segment, ...],
    names: list[str],
    keys: Mapping[str, TensorEntry],
    adopt_dtype: bool,
) -> Bound | str:
    """The `Bound`, or what is wrong with it in words."""
    tensor, first = target.tensor, segments[0].entry
    shape = tuple(tensor.shape)
    itself = any(keys.get(name) is first for name in names)  # fused rules have compared shapes already
    if itself and first.torch_shape != shape:
        return f"{target.names[0]} has shape {list(shape)}, the file's {show(first.name)} {list(first.torch_shape)}"
    dtype = first.torch_dtype
    if dtype != tensor.dtype and not (adopt_dtype and tensor.device.type == "meta"):
        return f"{target.names[0]} is {tensor.dtype}, the file's {show(first.name)} {dtype}"
    nbytes = sum(s.nbytes for s in segments)
    return Bound(target.names[0], target.names, target.is_buffer, dtype, shape, nbytes, segments)


def _complain(
    index: Index, missing: list[str], wrong: list[str], any_bound: bool, prefix: str, extra: tuple[str, ...]
) -> None:
    """Raise one WeightsError for all that does not fit."""
    if not any_bound and not wrong:
        raise WeightsError(
            f"{index.path}: none of its {len(index)} tensors fits the module (file: {_some(list(extra))}; "
            f"module: {_some(missing)}). Is it another model's? prefix= or rename= help where only names differ."
        )
    if wrong:
        raise WeightsError(
            f"{index.path}: {len(wrong)} tensors differ from the module: {'; '.join(wrong[:8])}"
            f"{'; ...' if len(wrong) > 8 else ''}. Build the module as the file is (module.to(dtype), its config) "
            "or name its own file."
        )
    if missing:
        raise WeightsError(
            f"{index.path}: lacks {len(missing)} tensors of the module: {_some(missing)}; it has {len(extra)} others: "
            f"{_some(list(extra))} (prefix {show(prefix)}). prefix= or rename= help where only names differ."
        )


def _some(names: list[str]) -> str:
    return (", ".join(show(n, 80) for n in names[:8]) or "none") + (", ..." if len(names) > 8 else "")
