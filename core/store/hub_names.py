"""The names under which transformers looks for a checkpoint's tensors: files on the hub keep those of their first release.

Its loader renames (what a Mixtral's file calls `block_sparse_moe` is the module's `mlp`) and rearranges the values of some
tensors. Its own tables are asked: names are taken from them; tensors that it would rearrange are told, so that they can be
refused. Where transformers has no tables (before 5.0: `_checkpoint_conversion_mapping` of a model), or none is installed, nothing
is renamed.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class HubNames:
    """``renamed``: a file's name -> the loader's, where they differ; ``rearranged``: the file's names of tensors whose
    values the loader does not take as they stand."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    rearranged: frozenset[str] = frozenset()


def hub_names(module: nn.Module, names: Iterable[str]) -> HubNames:
    """What transformers' loader makes of a file's ``names`` for the outermost of its models in ``module``. Never raises."""
    hub = sys.modules.get("transformers")  # a model of its own would have imported it
    kind = getattr(hub, "PreTrainedModel", None)
    if kind is None:
        return HubNames()
    model = next((child for child in module.modules() if isinstance(child, kind)), None)
    if model is None:
        return HubNames()
    try:
        renamings, converters = _of_tables(model)
        renamed: dict[str, str] = {}
        rearranged = set()
        for name in sorted(names):  # some renamings count on that order
            new = name
            for rename in renamings:
                new = rename(new)
            if new != name:
                renamed[name] = new
            if any(matches(new) for matches in converters):
                rearranged.add(name)
        return HubNames(renamed, frozenset(rearranged))
    except Exception as error:  # a table of a version that is built otherwise
        logger.info("carom: transformers' names of a checkpoint are not known: %s", error)
        return HubNames()


def _of_tables(model: Any) -> tuple[list[Callable[[str], str]], list[Callable[[str], bool]]]:
    """What renames, and what tells whether a name's values are rearranged."""
    try:
        tables = importlib.import_module(_TABLES)
    except ImportError:
        patterns = getattr(model, "_checkpoint_conversion_mapping", None) or {}
        return [_substitution(old, new) for old, new in patterns.items()], []
    transforms = tables.get_model_conversion_mapping(model)
    renamings = [_renaming(t) for t in transforms if not hasattr(t, "operations")]
    converters = [
        _matching(t)
        for t in transforms
        if not {type(operation).__name__ for operation in getattr(t, "operations", ())} <= _ONE_AFTER_ANOTHER
    ]
    return renamings, converters


def _substitution(old: str, new: str) -> Callable[[str], str]:
    return lambda name: re.sub(old, new, name)


def _renaming(transform: Any) -> Callable[[str], str]:
    return lambda name: transform.rename_source_key(name)[0]


def _matching(transform: Any) -> Callable[[str], bool]:
    return lambda name: transform.rename_source_key(name)[1] is not None
