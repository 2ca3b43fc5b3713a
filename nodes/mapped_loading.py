"""`mapped_weights`: lets ComfyUI's loaders build a model whose weights are views of the memory-mapped file.

ComfyUI's dynamic loaders assign the tensors of a file to the modules. Its static loaders (on a CPU, on AMD before
ROCm 7.14, with ``--disable-dynamic-vram``) copy every tensor into memory of its own, so a model takes its whole size of
RAM before any session exists. Views take no RAM that the system cannot take back, and a session reads them from the file
where they exceed its budget. Tensors that have to be converted are written to disk in batches if they exceed it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .inference_tensors import is_plain
from .spilled_batches import in_batches


@contextlib.contextmanager
def mapped_weights(ram: str) -> Iterator[None]:
    """Context in which modules that this thread loads keep the tensors of their state dicts instead of copies of them.

    A tensor of another dtype or memory layout than the module's is converted, as without this context. Modules that are
    on a device are loaded as without it. ``ram``: the value of the node's ``ram`` widget. Converted tensors of a model
    that exceeds it are written to disk (see `in_batches`, which also tells the errors).
    """
    own, thread = nn.Module.load_state_dict, threading.get_ident()

    def load(module: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign or threading.get_ident() != thread:
            return own(module, state_dict, strict, assign)
        return _assigned(own, module, state_dict, strict, ram)

    nn.Module.load_state_dict = load  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.load_state_dict = own  # type: ignore[method-assign]


def _assigned(own: Any, module: nn.Module, state_dict: Mapping[str, Any], strict: bool, ram: str) -> Any:
    """Load ``state_dict`` into ``module`` by assignment; return what ``own``, torch's ``load_state_dict``, returns."""
    names: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    names.update(module.named_buffers(remove_duplicate=False))
    if any(tensor.device.type not in ("cpu", "meta") for tensor in names.values()):
        return own(module, state_dict, strict)
    values = type(state_dict)() if isinstance(state_dict, dict) else {}
    values.update(state_dict)
    values.update(_converted(names, state_dict, ram))
    if hasattr(state_dict, "_metadata"):
        values._metadata = state_dict._metadata  # type: ignore[attr-defined]
    result = own(module, values, strict, True)
    _tie(module, names, values)
    return result


@torch.inference_mode(False)
@torch.no_grad()
def _converted(
    names: Mapping[str, torch.Tensor], state_dict: Mapping[str, Any], ram: str
) -> dict[str, torch.Tensor]:
    """Return copies of the tensors whose dtype or memory layout is not that of the module's tensors ``names``."""
    differing = {name: names[name] for name, value in state_dict.items() if _differs(value, names.get(name))}
    made = (
        (name, torch.empty_like(current, device="cpu").copy_(state_dict[name]))
        for name, current in differing.items()
    )
    nbytes = sum(current.nbytes for current in differing.values())
    return in_batches(made, nbytes, sum(tensor.nbytes for tensor in names.values()), ram)


def _differs(value: Any, current: torch.Tensor | None) -> bool:
    """Return whether ``value`` has another dtype or memory layout than ``current``, and can be converted."""
    if not isinstance(value, torch.Tensor) or current is None or not (is_plain(value) and is_plain(current)):
        return False
    if value.shape != current.shape or value.is_meta or value.device.type != "cpu":
        return False
    return (value.dtype, value.stride()) != (current.dtype, current.stride())


def _tie(module: nn.Module, before: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    """Let names that shared a parameter share it again. Assignment gives each name a parameter of its own."""
    groups: dict[int, list[str]] = {}
    for name, tensor in before.items():
        groups.setdefault(id(tensor), []).append(name)
    for names in groups.values():
        loaded = [name for name in names if name in values]
        if len(names) == 1 or not loaded:
            continue
        shared = _table(module, loaded[-1])  # a copy into shared memory leaves the value that was copied last
        for name in names:
            _table(module, name)[name.rpartition(".")[2]] = shared[loaded[-1].rpartition(".")[2]]


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    """Return the table, ``_parameters`` or ``_buffers``, of the submodule that holds the tensor ``name``."""
    owner = module.get_submodule(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
    return table
