"""Merges of a network (LoRA) into weights that stream: each weight is merged on the device, as without offloading.

ai-toolkit merges the network before it makes samples and takes it out afterwards. Its merge reads a weight, adds the
product of the adapter's factors in float32 where the adapter is, and writes the result. The bytes of a streamed weight
are in host memory, often packed. Read there, each weight would be unpacked and converted by the host, and packed by
the host when it is written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..core.session.session import Session
from .attachment import Attachment

Places = dict[int, tuple[Session, str]]


@contextlib.contextmanager
def merging_on_the_device(network: Any, attachments: Iterable[Attachment]) -> Iterator[None]:
    """Let the ``merge_in`` of each module of ``network`` find its streamed weight on the device while the context lasts.

    The values are written back to where the weights wait. Weights on the device, quantised ones and those of parked
    models are merged by ai-toolkit's code alone.
    """
    places = _places(attachments)
    modules = (
        [module for module in network.get_all_modules() if hasattr(module, "merge_in")] if places else []
    )
    for module in modules:
        module.__dict__["merge_in"] = functools.partial(_merge_one, module.merge_in, module, places)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("merge_in", None)


def _places(attachments: Iterable[Attachment]) -> Places:
    """Return session and name of each streamed parameter, by its id."""
    return {
        id(parameter): (attachment.session, name)
        for attachment in attachments
        if attachment.session is not None and not attachment.session.parked
        for name, parameter in attachment.module.named_parameters()
        if getattr(parameter, "_carom", None) is not None
    }


def _merge_one(merge: Callable, module: nn.Module, places: Places, *args: Any, **kwargs: Any) -> Any:
    """Call ``merge``, the ``merge_in`` of ``module``, while the layer has a copy of its weight on the device."""
    layer: nn.Module = module.org_module[0]  # type: ignore[index,assignment]
    weight = layer._parameters.get("weight")
    place = places.get(id(weight))
    up = getattr(module, "lora_up", None)
    if place is None or (isinstance(up, nn.Module) and not any(p.any() for p in up.parameters())):
        return merge(*args, **kwargs)  # an adapter of zeros, as at the first step, changes nothing
    session, name = place
    copy = nn.Parameter(session.read(name, session.device), requires_grad=False)
    version, address = copy._version, copy.data_ptr()
    layer._parameters["weight"] = copy
    try:
        result = merge(*args, **kwargs)
        merged = layer._parameters["weight"]
    finally:
        layer._parameters["weight"] = weight
    # A merge replaces the parameter, writes to it, or replaces its data.
    changed = merged is not copy or copy._version != version or copy.data_ptr() != address
    if merged is not None and changed:
        session.write(name, merged.detach())
    return result
