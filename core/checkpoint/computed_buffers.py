"""Computation of buffers that are in no checkpoint, for modules that were built on the `meta` device.

Rotary frequencies and position ids are non-persistent buffers: a module computes them when it is built, but
on `meta` they have no values. Models that can initialise a single submodule again
(`_init_weights(submodule)`, the convention of transformers' PreTrainedModel) compute them here. For all other
models the error says how to build the module.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..common.errors import WeightsError
from .header import show

_FILL_BYTES = (0xA5, 0x5A)


def compute_buffers(module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return CPU values of the `meta` buffers ``names`` of ``module`` (`ModuleMap.computed`); leave the
    module unchanged.

    The state of torch's CPU random generator is preserved. Raises WeightsError naming the buffers that their
    module does not compute.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    values: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    for path, in_owner in owners.items():
        computed = _compute(module, path, [name.rpartition(".")[2] for name in in_owner])
        if computed is None:
            unknown.extend(in_owner)
        else:
            values.update({f"{path}.{leaf}" if path else leaf: value for leaf, value in computed.items()})
    if unknown:
        raise WeightsError(
            f"{len(unknown)} buffers are on meta and in no file, and their modules do not compute them again: "
            f"{', '.join(show(n) for n in unknown[:8])}{', ...' if len(unknown) > 8 else ''}. Build the module with "
            "parameters on meta but buffers on the CPU (accelerate.init_empty_weights(include_buffers=False)), "
            "or set these buffers yourself."
        )
    return values


def _compute(module: nn.Module, path: str, leaves: list[str]) -> dict[str, torch.Tensor] | None:
    """Return CPU values of the buffers ``leaves`` of the submodule ``path``, or None if their initialiser
    leaves any element unwritten.
    """
    owner = module.get_submodule(path)
    initialize = _find_initializer(module, path)
    # The initialiser may write to any parameter of the submodule, so none of them may hold values already.
    if initialize is None or any(p.device.type != "meta" for p in owner.parameters()):
        return None
    runs = []
    saved = dict(owner._buffers)
    for fill_byte in _FILL_BYTES:
        try:
            for leaf, tensor in saved.items():
                if tensor is None:
                    continue
                if leaf in leaves:
                    count = tensor.numel() * tensor.element_size()
                    filling = torch.full((count,), fill_byte, dtype=torch.uint8)
                    if tensor.dtype == torch.bool:
                        filling = filling & 1
                    owner._buffers[leaf] = filling.view(tensor.dtype).reshape(tensor.shape)
                else:
                    owner._buffers[leaf] = torch.empty_like(tensor, device="meta")
            with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                initialize(owner)
            runs.append({leaf: owner._buffers[leaf] for leaf in leaves})
        except (RuntimeError, AttributeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None
        finally:
            owner._buffers.update(saved)
    first_run, second_run = runs
    # The buffers were filled with different bytes before the two runs. Equal bytes after both show that the
    # initialiser wrote every element.
    for leaf in leaves:
        value, other, like = first_run[leaf], second_run[leaf], saved[leaf]
        if value is None or other is None or like is None or value.device.type == "meta":
            return None
        if (value.dtype, value.shape) != (like.dtype, like.shape) or not torch.equal(
            _bytes(value), _bytes(other)
        ):
            return None
    return {leaf: value for leaf, value in first_run.items() if value is not None}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _find_initializer(module: nn.Module, path: str):
    """Return the `_init_weights` method of the nearest module at or above ``path`` that has one, or None."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        candidate = module.get_submodule(".".join(parts[:length]))
        setup = getattr(candidate, "_init_weights", None)
        if callable(setup):
            return setup
    return None
