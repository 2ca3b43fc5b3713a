"""Defines `QuantisedWeight`: a weight that a library quantised and saved as several tensors of a safetensors file.

`bitsandbytes_weights` and `torchao_weights` find such weights in an index by the names of their parts, and make them
with the library's own functions. Nothing of a library is imported before a weight of it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..common.commit_memory import with_advice
from ..common.errors import CaromError, UnsupportedError, WeightsError
from .header import show
from .index import Index, TensorEntry
from .packed_source import PackedSource


@dataclass(frozen=True)
class MadeWeight:
    """A quantised weight as its library makes it.

    ``attributes``: further attributes of the module that its library sets together with the weight, by name.
    """

    parameter: nn.Parameter
    attributes: Mapping[str, Any] = field(default_factory=dict)


# Makes the weight for a module from the views of its parts. The string is the name of the parameter in the module.
Make: TypeAlias = "Callable[[nn.Module, str, Mapping[str, torch.Tensor]], MadeWeight]"


@dataclass(frozen=True)
class QuantisedWeight:
    """A quantised weight in a file.

    ``name``: the name that the weight would have in the file if it were one tensor.
    ``kind``: library and format, for messages.
    ``parts``: the tensors of the file that the weight consists of, by the library's names for them. A part that the
    format requires and the file lacks is None.
    """

    name: str
    kind: str
    parts: Mapping[str, TensorEntry | None]
    make: Make

    @property
    def entry(self) -> TensorEntry | None:
        """An entry with the weight's name, for matching names only. None if the file holds no part."""
        found = next((part for part in self.parts.values() if part is not None), None)
        return None if found is None else replace(found, name=self.name)

    def build(self, module: nn.Module, name: str, mapped: MappedTensors) -> MadeWeight:
        """Return the weight as parameter ``name`` of ``module``, made of views of the mapped file.

        Raises WeightsError that names the weight if a part is missing or damaged, and UnsupportedError if the module
        is not of the library or the library is not installed.
        """
        missing = [part for part, entry in self.parts.items() if entry is None]
        if missing:
            raise WeightsError(
                f"{show(self.name)} is quantised ({self.kind}), but the file lacks its {', '.join(map(show, missing))}; "
                "download or save the checkpoint again"
            )
        views = {part: mapped.view(entry) for part, entry in self.parts.items() if entry is not None}
        try:
            return self.make(module, name, views)
        except CaromError as error:
            raise type(error)(f"{show(self.name)} ({self.kind}): {error}") from error
        except Exception as error:  # what a library raises for damaged parts is not specified
            raise WeightsError(
                f"{show(self.name)} ({self.kind}): {type(error).__name__}: {str(error)[:200]}. The file is damaged, or this "
                "version of the library cannot read it; save the checkpoint again with the installed version"
            ) from error


class MappedTensors:
    """Views of tensors in mapped files. Opening a view reads nothing; its bytes are read when they are used.

    ``entries``: the entry of each view that was opened, by the address of its first byte.
    """

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}
        self.entries: dict[int, TensorEntry] = {}

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """Return a view of the tensor ``entry``. Raises WeightsError if its file cannot be opened or was changed,
        and UnsupportedError if the tensor is packed.
        """
        if isinstance(entry.file, PackedSource):
            raise UnsupportedError(
                f"{show(entry.name)} is part of a quantised weight and was packed by `carom pack`; name the file that is "
                "not packed (`carom pack --codec raw` writes it)"
            )
        path = entry.file.path
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, "pt")
            entry.file.check()
            tensor: torch.Tensor = self._files[path].get_tensor(entry.name)
        except (OSError, SafetensorError) as error:
            message = f"{path}: {show(entry.name)} cannot be mapped: {error}"
            raise WeightsError(with_advice(message, error)) from error
        if tensor.numel():
            self.entries[tensor.data_ptr()] = entry
        return tensor


def find_quantised(index: Index) -> dict[str, QuantisedWeight]:
    """Return the quantised weights of a checkpoint by name. Reads nothing.

    Raises WeightsError for metadata that is damaged.
    """
    from . import bitsandbytes_weights, torchao_weights

    weights = [*bitsandbytes_weights.find(index), *torchao_weights.find(index)]
    return {weight.name: weight for weight in weights}


def expected_shapes(module: nn.Module, parameter: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes that the dequantised weight may have: the parameter's own, and that of a linear layer whose
    parameter holds codes already.
    """
    rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
    linear = [(rows, columns)] if isinstance(rows, int) and isinstance(columns, int) else []
    return [tuple(parameter.shape), *linear]


def require_shape(shape: tuple[int, ...], module: nn.Module, parameter: torch.Tensor) -> None:
    """Raise WeightsError unless a dequantised weight of this shape fits the parameter of ``module``."""
    expected = expected_shapes(module, parameter)
    if shape not in expected:
        raise WeightsError(
            f"the file's has shape {list(shape)}, the module's {list(expected[-1])}; build the module as the file is"
        )


def require_size(part: str, found: int, expected: int) -> None:
    """Raise WeightsError unless ``part`` has the expected number of elements."""
    if found != expected:
        raise WeightsError(
            f"{part} has {found} elements, {expected} are expected; download or save the checkpoint again"
        )
