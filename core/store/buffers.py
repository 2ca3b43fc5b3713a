"""Values of buffers that no checkpoint holds, for modules built on `meta`.

Rotary frequencies and position ids are non-persistent: a module computes them when it is built, and on `meta` that
leaves nothing. Models that can set up a single submodule again (`_init_weights(submodule)`, the convention of
transformers' PreTrainedModel) compute them here; for all others the error says how to build the module.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import WeightsError
from .header import show

_POISONS = (0xA5, 0x5A)


def compute_buffers(module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """CPU values of the `meta` buffers ``names`` of ``module`` (`ModuleMap.computed`); the module is left as it was.

    Nothing random is drawn. Raises WeightsError that names the buffers which their module does not compute.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    values: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    for path, mine in owners.items():
        found = _compute(module, path, [name.rpartition(".")[2] for name in mine])
        if found is None:
            unknown.extend(mine)
        else:
            values.update({f"{path}.{leaf}" if path else leaf: value for leaf, value in found.items()})
    if unknown:
        raise WeightsError(
            f"{len(unknown)} buffers are on meta, are in no file, and their modules do not compute them again: "
            f"{', '.join(show(n) for n in unknown[:8])}{', ...' if len(unknown) > 8 else ''}. Build the module with "
            "parameters on meta but buffers on the CPU (accelerate.init_empty_weights(include_buffers=False)), "
            "or set these buffers yourself."
        )
    return values


def _compute(module: nn.Module, path: str, leaves: list[str]) -> dict[str, torch.Tensor] | None:
    """The owner's buffers ``leaves``, or None if it cannot compute every element of them."""
    owner = module.get_submodule(path)
    setup = _setup_of(module, path)
    # Setting up may write to anything below the owner; values that are there already must not be touched.
    if setup is None or any(p.device.type != "meta" for p in owner.parameters()):
        return None
    results = []
    before = dict(owner._buffers)
    for poison in _POISONS:
        try:
            for leaf, tensor in before.items():
                if tensor is None:
                    continue
                if leaf in leaves:
                    count = tensor.numel() * tensor.element_size()
                    raw = torch.full((count,), poison, dtype=torch.uint8)
                    if tensor.dtype == torch.bool:
                        raw = raw & 1
                    owner._buffers[leaf] = raw.view(tensor.dtype).reshape(tensor.shape)
                else:
                    owner._buffers[leaf] = torch.empty_like(tensor, device="meta")
            with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                setup(owner)
            results.append({leaf: owner._buffers[leaf] for leaf in leaves})
        except (RuntimeError, AttributeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None
        finally:
            owner._buffers.update(before)
    first, second = results
    # Different fillings before and the same bytes after: every element was written.
    for leaf in leaves:
        one, two, like = first[leaf], second[leaf], before[leaf]
        if one is None or two is None or like is None or one.device.type == "meta":
            return None
        if (one.dtype, one.shape) != (like.dtype, like.shape) or not torch.equal(_bytes(one), _bytes(two)):
            return None
    return {leaf: value for leaf, value in first.items() if value is not None}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _setup_of(module: nn.Module, path: str):
    """`_init_weights` of the nearest module above ``path`` (or at it) that has one."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        candidate = module.get_submodule(".".join(parts[:length]))
        setup = getattr(candidate, "_init_weights", None)
        if callable(setup):
            return setup
    return None
