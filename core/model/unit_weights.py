"""Quantised weights of a streamed unit for the whole run of the unit, and not only for the forwards of its layers.

A module may read the quantised weight of another without calling it: a DoRA layer dequantises the weight of its base
layer. While the unit (a group of tensors that are copied to the device together) runs, the attribute of each layer is
therefore the weight made of the slot's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import managed_tensor
from .compiling import compiling, quiet, untraced
from .quantized import FlattenedModule, FlattenedWeights, is_inner, pack_inner_tensors
from .units import Unit

if TYPE_CHECKING:
    from .home import SlotRange


def layers_of(unit: Unit, quantized: FlattenedWeights) -> list[FlattenedModule]:
    """Return the layers whose quantised weights lie in ``unit`` with all of their inner tensors."""
    inside = {
        (id(site.module), site.name) for entry in unit.entries for site in entry.sites if is_inner(site.name)
    }
    modules = {module for module, _ in inside}
    return [
        layer
        for layer in quantized.layers
        if id(layer.module) in modules
        and all(
            (id(layer.module), name) in inside for weight in layer.weights.values() for name in weight.buffers
        )
    ]


def readers_of(unit: Unit, layers: Iterable[FlattenedModule], root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules besides those of ``unit`` in whose forward the unit has to be on the device: modules around a
    single layer that have no other frozen tensors, as the LoRA and DoRA layers around their base layer.
    """
    layer_ids = {id(layer.module) for layer in layers}
    if len(unit.modules) != 1 or id(unit.modules[0]) not in layer_ids:
        return
    own = {id(entry.tensor) for entry in unit.entries}
    for module in root.modules():
        if module is root or id(module) in layer_ids or type(module).forward is nn.Module.forward:
            continue
        parts = list(module.modules())
        if not any(part is unit.modules[0] for part in parts):
            continue
        tensors = [
            t
            for part in parts
            for t in (*part._parameters.values(), *part._buffers.values())
            if t is not None
        ]
        if all(t.requires_grad or id(t) in own for t in tensors):
            yield module


def with_weights(layers: list[FlattenedModule]) -> Callable[[Callable], Callable]:
    """Return a wrapper of the forward of a unit's module, which sets the quantised weights of ``layers`` for the
    duration of the call.
    """

    def begin() -> SlotRange | None:
        """Set the weights. Return the slots for which saved-tensor hooks were pushed, None if none were pushed."""
        slots = managed_tensor.streaming() if torch.is_grad_enabled() else None
        weights = [weight for layer in layers for weight in layer.begin_run()]
        if slots is not None:
            pack_inner_tensors(slots, weights)
        return slots

    def end(slots: SlotRange | None) -> None:
        if slots is not None:
            managed_tensor.pop_handles(slots)
        for layer in layers:
            layer.end_run()

    quiet_begin, quiet_end = quiet(begin), quiet(end)

    def make(inner: Callable) -> Callable:
        @untraced
        def forward(*args: Any, **kwargs: Any) -> Any:
            plain, slots = compiling() is None, None
            try:
                slots = begin() if plain else quiet_begin()
                return inner(*args, **kwargs)
            finally:
                (end if plain else quiet_end)(slots)

        return forward

    return make
