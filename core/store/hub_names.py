"""The names under which transformers looks for a checkpoint's tensors: files on the hub keep those of their first release.

Its loader renames (what a Mixtral's file calls `block_sparse_moe` is the module's `mlp`) and rearranges the values of some
tensors. Its own tables are asked: names are taken from them; tensors that it would rearrange are told, so that they can be
refused. Where transformers has no tables (before 5.0: `_checkpoint_conversion_mapping` of a model), or none is installed, nothing
is renamed.
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
# Operations whose result is the file's bytes one tensor after another: `mapping` knows them, or refuses by shape.
_ONE_AFTER_ANOTHER = {"MergeModulelist", "Concatenate", "Chunk"}
# With their dimension: experts one after another, of each its first part's rows and then its second's.
_STACKS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


@dataclass(frozen=True)
class HubNames:
    """``renamed``: a file's name -> the loader's, where they differ. Of the file's names: ``rearranged`` are of tensors
    whose values the loader does not take as they stand, ``stacked`` of experts that it stacks as they stand."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    rearranged: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()


def hub_names(module: nn.Module, names: Iterable[str]) -> HubNames:
    """What transformers' loader makes of a file's ``names`` for the outermost of its models in ``module``. Never raises."""
    # A model of its own has imported this; to ask the package itself would import it now, for seconds.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None:
        return HubNames()
    model = next((child for child in module.modules() if isinstance(child, kind)), None)
    if model is None:
        return HubNames()
    try:
        transforms = _transforms(model)
        renames = [t.rename for t in transforms if not t.operations]
        rearranges = [t.matches for t in transforms if not {n for n, _ in t.operations} <= _ONE_AFTER_ANOTHER]
        stacks = [t.matches for t in transforms if t.operations in _STACKS]
        renamed: dict[str, str] = {}
        rearranged, stacked = set(), set()
        for name in sorted(names):  # some renamings count on that order
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
    except Exception as error:  # a table of a version that is built otherwise
        logger.info("carom: transformers' names of a checkpoint are not known: %s", error)
        return HubNames()


@dataclass(frozen=True)
class _Transform:
    """One line of a table. ``operations``: names and dimensions of what is done to values, none for a mere renaming."""

    rename: Callable[[str], str]
    matches: Callable[[str], bool] = bool
    operations: list[tuple[str, Any]] = field(default_factory=list)


def _transforms(model: Any) -> list[_Transform]:
    try:
        tables = importlib.import_module(_TABLES)
    except ImportError:
        patterns = getattr(model, "_checkpoint_conversion_mapping", None) or {}
        return [_Transform(functools.partial(re.sub, old, new)) for old, new in patterns.items()]
    return [_known(transform) for transform in tables.get_model_conversion_mapping(model)]


def _known(transform: Any) -> _Transform:
    return _Transform(
        lambda name: transform.rename_source_key(name)[0],
        lambda name: transform.rename_source_key(name)[1] is not None,
        [(type(done).__name__, getattr(done, "dim", None)) for done in getattr(transform, "operations", ())],
    )
