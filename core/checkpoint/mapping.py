"""The mapping from a checkpoint's bytes to the parameters and buffers of a module. Reads no weights, changes
no values.

Works for modules on `meta`. Handles name prefixes on either side, name parts that wrappers add (PEFT,
torch.compile), tied weights, and fused weights and stacked experts (`segments.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from ..common.errors import UnsupportedError, WeightsError
from .header import show
from .hub_names import HubNames, hub_names
from .index import Index, TensorEntry
from .packed_source import require_readable
from .quantised_weights import QuantisedWeight, find_quantised
from .segments import Segment, find_segments

# Prefixes of tensor names, preferred in this order where several fit equally well.
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.", "transformer.", "module.")
# Name parts that wrappers add to a module's names.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:base_layer|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A parameter or buffer together with the file bytes that fill it.

    ``name``: the first name in the module. ``names``: all names (more than one if the tensor is tied).
    ``segments`` cover the tensor's contiguous bytes in order, without a gap.
    """

    name: str
    names: tuple[str, ...]
    is_buffer: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ModuleMap:
    """The mapping of all parameters and buffers of a module.

    ``kept``: names of tensors that the file lacks and that hold values already (adapters). ``computed``:
    names of non-persistent buffers on `meta`, which no file ever holds and which their module must compute.
    ``quantised``: parameters that are several tensors in the file, by their first name in the module.
    ``extra``: names in the file that fill nothing. ``prefix``: the prefix that was removed from the file's
    names, or "+" and the prefix that was added to them.
    """

    bound: Mapping[str, BoundTensor]
    kept: tuple[str, ...]
    computed: tuple[str, ...]
    extra: tuple[str, ...]
    prefix: str
    quantised: Mapping[str, QuantisedWeight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter or buffer of the module with all of its names."""

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
    """Map every parameter and buffer of ``module`` to bytes of the files in ``index``.

    ``prefix``: removed from the file's names ("" for none); "auto" finds the prefix, also one that the module
    has and the file lacks. ``rename``: a function applied to the module's names first. ``adopt_dtype``:
    tensors on `meta` take the file's dtype instead of being refused. Files of transformers models are also
    searched under the names that transformers' loader gives their tensors (`hub_names`). Packed tensors are
    treated as their decoded tensors. Weights that a library quantised and saved as several tensors are mapped as a
    whole (`find_quantised`).

    Raises WeightsError naming tensors on `meta` that the file lacks, and tensors whose shape or dtype
    differs; UnsupportedError for files of an unknown codec, and for tensors that transformers' loader would
    rearrange.
    """
    require_readable(index)
    targets = _targets(module)
    wanted = {n: _WRAPPERS.sub("", rename(n) if rename else n) for t in targets for n in t.names}
    quantised = find_quantised(index)
    whole = {name: weight.entry for name, weight in quantised.items()}
    entries = {**index.entries, **{name: entry for name, entry in whole.items() if entry is not None}}
    hub = hub_names(module, entries) if prefix == "auto" and rename is None else HubNames()
    found = _match(targets, wanted, index, entries, prefix, adopt_dtype, hub.stacked, quantised)
    if hub.renamed and (found.missing or found.kept):
        entries = {hub.renamed.get(name, name): entry for name, entry in entries.items()}
        renamed = _match(targets, wanted, index, entries, prefix, adopt_dtype, hub.stacked, quantised)
        if renamed.count > found.count:
            found = renamed
    _refuse_rearranged(index, found, hub.rearranged)
    used = found.used
    extra = tuple(name for name in index if name not in used)
    _raise_mismatches(index, found.missing, found.wrong, found.count > 0, found.prefix, extra)
    return ModuleMap(
        MappingProxyType(found.bound),
        tuple(found.kept),
        tuple(found.computed),
        extra,
        found.prefix,
        MappingProxyType(found.quantised),
    )


@dataclass
class _MatchResult:
    """The outcome of matching a module with the file's names under one prefix."""

    prefix: str
    bound: dict[str, BoundTensor] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    quantised: dict[str, QuantisedWeight] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of the module's tensors that the file holds."""
        return len(self.bound) + len(self.quantised)


def _match(
    targets: list[_Target],
    wanted: Mapping[str, str],
    index: Index,
    entries: Mapping[str, TensorEntry],
    prefix: str,
    adopt_dtype: bool,
    stacked: Collection[str],
    quantised: Mapping[str, QuantisedWeight],
) -> _MatchResult:
    """Match the module's tensors ``targets`` with the file's ``entries`` by name; return the matches and the
    mismatches. ``quantised``: the weights among ``entries`` that stand for several tensors of the file.
    """
    keys, chosen = _entries_by_module_name(index.path, entries, set(wanted.values()), prefix)
    shapes = {wanted[n]: tuple(t.tensor.shape) for t in targets for n in t.names}
    weights = {n: quantised[entry.name] for n, entry in keys.items() if entry.name in quantised}
    keys = {n: entry for n, entry in keys.items() if n not in weights}
    found = _MatchResult(chosen)
    for target in targets:
        names = [wanted[n] for n in target.names]
        weight = None if target.is_buffer else next((weights[n] for n in names if n in weights), None)
        if weight is not None:
            found.used.update(part.name for part in weight.parts.values() if part is not None)
            found.quantised[target.names[0]] = weight
            continue
        segments = next((f for n in names if (f := find_segments(n, shapes, keys, stacked))), None)
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


def _refuse_rearranged(index: Index, found: _MatchResult, rearranged: Collection[str]) -> None:
    """Raise UnsupportedError if a matched tensor is one whose values transformers' loader would rearrange."""
    for bound in found.bound.values():
        for segment in bound.segments:
            if segment.entry.name in rearranged:
                raise UnsupportedError(
                    f"{index.path}: transformers rearranges {show(segment.entry.name)} when it loads it; load the model "
                    "with from_pretrained and save its state_dict() with safetensors, then stream that file"
                )


def _targets(module: nn.Module) -> list[_Target]:
    """Return the parameters and buffers in the module's order, each once with all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[torch.Tensor, bool]] = {}
    non_persistent: set[str] = set()
    for path, child in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        non_persistent.update(dot + n for n in child._non_persistent_buffers_set)
    for items, is_buffer in (
        (module.named_parameters(remove_duplicate=False), False),
        (module.named_buffers(remove_duplicate=False), True),
    ):
        for name, tensor in items:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = (tensor, is_buffer)
    return [
        _Target(tuple(n), *tensors[key], persistent=any(name not in non_persistent for name in n))
        for key, n in names.items()
    ]


def _entries_by_module_name(
    path: str, entries: Mapping[str, TensorEntry], wanted: set[str], prefix: str
) -> tuple[dict[str, TensorEntry], str]:
    """Return the file's entries by the names that the module gives them, and the prefix by which the names
    differ.

    The prefix is "+x" if the module's names have the prefix x and the file's do not.
    """
    if prefix != "auto":
        return {n[len(prefix) :]: e for n, e in entries.items() if n.startswith(prefix)}, prefix
    votes: Counter[str] = Counter()
    for name in entries:
        for candidate, rest in _splits_at_dots(name):
            votes[candidate] += rest in wanted
    for name in wanted:
        for candidate, rest in _splits_at_dots(name):
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
        # Entries that have the module's full name already (such as a head beside the base model) are used
        # too.
        under = {chosen[1:] + n: e for n, e in entries.items()}
        return {**under, **{n: e for n, e in entries.items() if n in wanted}}, chosen
    return _entries_by_module_name(path, entries, wanted, chosen)


def _splits_at_dots(name: str) -> Iterable[tuple[str, str]]:
    """Yield every way to split ``name`` at a dot: (head with its dot, rest), the empty head first."""
    at = 0
    while True:
        yield name[:at], name[at:]
        at = name.find(".", at) + 1
        if not at:
            return


def _bind(
    target: _Target,
    segments: tuple[Segment, ...],
    names: list[str],
    keys: Mapping[str, TensorEntry],
    adopt_dtype: bool,
) -> BoundTensor | str:
    """Return the `BoundTensor` of a target, or a sentence that says how the file's tensor differs from it."""
    tensor, first = target.tensor, segments[0].entry
    shape = tuple(tensor.shape)
    # The rules for fused tensors have compared shapes already.
    same_name = any(keys.get(name) is first for name in names)
    if same_name and first.torch_shape != shape:
        return f"{target.names[0]} has shape {list(shape)}, the file's {show(first.name)} {list(first.torch_shape)}"
    dtype = first.torch_dtype
    if dtype != tensor.dtype and not (adopt_dtype and tensor.device.type == "meta"):
        return f"{target.names[0]} is {tensor.dtype}, the file's {show(first.name)} {dtype}"
    nbytes = sum(s.nbytes for s in segments)
    return BoundTensor(target.names[0], target.names, target.is_buffer, dtype, shape, nbytes, segments)


def _raise_mismatches(
    index: Index, missing: list[str], wrong: list[str], any_bound: bool, prefix: str, extra: tuple[str, ...]
) -> None:
    """Raise one WeightsError that names all tensors that are missing or differ."""
    if not any_bound and not wrong:
        raise WeightsError(
            f"{index.path}: none of its {len(index)} tensors fits the module (file: {_first_names(list(extra))}; "
            f"module: {_first_names(missing)}). Is it another model's? prefix= or rename= help where only names differ."
        )
    if wrong:
        raise WeightsError(
            f"{index.path}: {len(wrong)} tensors differ from the module: {'; '.join(wrong[:8])}"
            f"{'; ...' if len(wrong) > 8 else ''}. Build the module as the file is (module.to(dtype), its config) "
            "or name its own file."
        )
    if missing:
        raise WeightsError(
            f"{index.path}: lacks {len(missing)} tensors of the module: {_first_names(missing)}; it has {len(extra)} others: "
            f"{_first_names(list(extra))} (prefix {show(prefix)}). prefix= or rename= help where only names differ."
        )


def _first_names(names: list[str]) -> str:
    """Return the first names of a list as text for an error message."""
    return (", ".join(show(n, 80) for n in names[:8]) or "none") + (", ..." if len(names) > 8 else "")
