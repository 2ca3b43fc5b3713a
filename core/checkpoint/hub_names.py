"""The names that transformers gives to a checkpoint's tensors, which differ from the names in files on the
Hugging Face hub.

Hub files keep the tensor names of a model's first release. transformers' loader renames tensors
(`block_sparse_moe` in a Mixtral file is the module's `mlp`) and rearranges the values of some. This module
asks transformers' own conversion tables: names are taken from them, and tensors that the loader would
rearrange are reported so that the caller can refuse them. Nothing is renamed if transformers is not installed
or has no tables. Before version 5.0, the table is a model's `_checkpoint_conversion_mapping`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

logger = logging.getLogger("carom")
_TABLES = "transformers.conversion_mapping"
# Operations that place the bytes of the file's tensors one after another. They count as no rearrangement:
# `mapping.match_module` maps such tensors itself, or refuses them because of their shapes.
_CONCATENATIONS = {"MergeModulelist", "Concatenate", "Chunk"}
# (operation, dimension) lists that stack experts one after another, and within each expert the rows of its
# first part and then those of its second.
_STACKS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


@dataclass(frozen=True)
class HubNames:
    """The changes that transformers' loader makes to the tensors of a file.

    ``renamed``: {name in the file: name in the module} where they differ. ``rearranged``: names in the file
    of tensors whose values the loader changes. ``stacked``: names in the file of expert weights that the
    loader stacks unchanged.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    rearranged: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()


def hub_names(module: nn.Module, names: Iterable[str]) -> HubNames:
    """Return the changes that transformers' loader makes to the tensors called ``names`` for the outermost
    transformers model in ``module``.

    Never raises: any error is logged, and the result is then empty.
    """
    # A process with a transformers model has imported this module already. Importing it here would take
    # seconds in all other processes.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None:
        return HubNames()
    model = next((child for child in module.modules() if isinstance(child, kind)), None)
    if model is None:
        return HubNames()
    try:
        transforms = _transforms(model)
        renames = [t.rename for t in transforms if not t.operations]
        rearranges = [t.matches for t in transforms if not {n for n, _ in t.operations} <= _CONCATENATIONS]
        stacks = [t.matches for t in transforms if t.operations in _STACKS]
        renamed: dict[str, str] = {}
        rearranged, stacked = set(), set()
        for name in sorted(names):  # some of the tables' renamings rely on sorted names
            new = name
            for rename in renames:
                new = rename(new)
            if new != name:
                renamed[name] = new
            if any(matches(new) for matches in rearranges):
                rearranged.add(name)
            if any(matches(new) for matches in stacks):
                stacked.add(name)
        return HubNames(renamed, frozenset(rearranged), frozenset(stacked))
    except Exception as error:  # a transformers version whose tables have another structure
        logger.info("carom: transformers' conversion table for a checkpoint could not be read: %s", error)
        return HubNames()


@dataclass(frozen=True)
class _Transform:
    """A line of a conversion table. ``operations``: (name, dimension) of each operation on the values, empty
    for a renaming.
    """

    rename: Callable[[str], str]
    matches: Callable[[str], bool] = bool
    operations: list[tuple[str, Any]] = field(default_factory=list)


def _transforms(model: Any) -> list[_Transform]:
    """Return the conversion table of ``model``."""
    try:
        tables = importlib.import_module(_TABLES)
    except ImportError:
        patterns = getattr(model, "_checkpoint_conversion_mapping", None) or {}
        return [_Transform(functools.partial(re.sub, old, new)) for old, new in patterns.items()]
    return [_convert_entry(transform) for transform in tables.get_model_conversion_mapping(model)]


def _convert_entry(transform: Any) -> _Transform:
    """Convert an entry of transformers' conversion table to a `_Transform`."""
    return _Transform(
        lambda name: transform.rename_source_key(name)[0],
        lambda name: transform.rename_source_key(name)[1] is not None,
        [(type(done).__name__, getattr(done, "dim", None)) for done in getattr(transform, "operations", ())],
    )
