"""Defines `bind_file`: lets the weights of a module stream from a safetensors file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from ..checkpoint.computed_buffers import compute_buffers
from ..checkpoint.header import show
from ..checkpoint.index import open_index
from ..checkpoint.mapping import match_module
from ..common.errors import UnsupportedError, WeightsError
from ..model.units import collect
from .bound_checkpoint import Checkpoint, Weights
from .quantised_binding import QuantisedBinding


def bind_file(module: nn.Module, weights: Weights | str | os.PathLike[str]) -> Checkpoint:
    """Bind ``module`` to the weights file ``weights`` (a path or `Weights`).

    Quantised weights of the file (`find_quantised`) are put into the module as their library makes them, as views of
    the mapped file. They stream from the file after `FlattenedWeights` and `QuantisedBinding.bind_inner`.
    Raises WeightsError and UnsupportedError as `open_index`, `match_module`, `compute_buffers` and `QuantisedBinding`
    do, and UnsupportedError for weights of the file that require gradients. After an error the module is unchanged.
    """
    settings = weights if isinstance(weights, Weights) else Weights(weights)
    index = open_index(settings.path)
    try:
        found = match_module(module, index, prefix=settings.prefix, rename=settings.rename)
    except WeightsError as error:
        raise WeightsError(f"{error}{_about_adapters(module)}") from error
    values = compute_buffers(module, found.computed)
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    sites = {id(entry.tensor): entry.sites for entry in collect(module)}
    _refuse_trained({name: tensors[name] for name in found.bound})
    _refuse_layouts({name: tensors[name] for name in found.bound})
    _refuse_whole({name: tensors[name] for name in found.bound})
    checkpoint = Checkpoint(settings)
    checkpoint.laid_out = index.packed
    quantised = QuantisedBinding(module, found.quantised) if found.quantised else None
    notes = _file_notes(found.extra, [tensors[name] for name in found.bound])
    try:
        for bound in found.bound.values():
            checkpoint.bind(bound, tensors[bound.name], sites[id(tensors[bound.name])])
        for name, value in values.items():
            checkpoint.compute(tensors[name], value, sites[id(tensors[name])])
        if quantised is not None:
            quantised.place()
        checkpoint.note(*notes, *([] if quantised is None else [quantised.note]))
    except BaseException:
        checkpoint.unbind()
        if quantised is not None:
            quantised.undo()
        raise
    checkpoint.quantised = quantised
    return checkpoint


def _refuse_trained(tensors: dict[str, torch.Tensor]) -> None:
    """Raise UnsupportedError if some, but not all, floating-point parameters that the file holds require a
    gradient.
    """
    parameters = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.is_floating_point()}
    trained = [name for name, tensor in parameters.items() if tensor.requires_grad]
    if trained and len(trained) < len(parameters):
        raise UnsupportedError(
            f"{len(trained)} weights of the file are to be trained, first {trained[0]}; weights that stream from a "
            "file are frozen. Freeze them (requires_grad_(False)) and train adapters, or load the module first "
            "and stream it without weights="
        )


def _refuse_whole(tensors: dict[str, torch.Tensor]) -> None:
    """Raise UnsupportedError for a parameter of bitsandbytes' 4-bit class if the file holds its weight as one tensor
    that is not quantised.
    """
    for name, tensor in tensors.items():
        if hasattr(type(tensor), "from_prequantized") and tensor.is_meta:
            raise UnsupportedError(
                f"{name} belongs to a quantised layer ({type(tensor).__name__}), and the file holds the weight without its "
                "quantisation state. Name a file that the library saved quantised, or quantise the model with the library "
                "and stream it without weights="
            )


def _refuse_layouts(tensors: dict[str, torch.Tensor]) -> None:
    """Raise UnsupportedError for a meta tensor that is not contiguous, because safetensors files hold
    contiguous tensors.
    """
    for name, tensor in tensors.items():
        if tensor.is_meta and not tensor.is_contiguous():
            raise UnsupportedError(
                f"{name} has strides {tensor.stride()} on meta, files hold contiguous tensors; build it contiguous"
            )


def _file_notes(extra: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return notes on tensors of the file that are not used (``extra``), on weights that are in memory although the
    file holds them, and on weights that require gradients, which they do not while they stream.

    ``tensors``: those of the module whose bytes are in the file, before they are bound.
    """
    notes = []
    if extra:
        names = ", ".join(show(name) for name in extra[:4])
        notes.append(
            f"{len(extra)} tensors of the file have no place in the module and are not read: {names}"
            f"{', ...' if len(extra) > 4 else ''}"
        )
    kept = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
    if kept:
        notes.append(
            f"the module holds {kept} bytes of weights of its own besides; built on meta it would not"
        )
    trained = sum(tensor.requires_grad for tensor in tensors)
    if trained:
        notes.append(f"{trained} weights from the file take no gradients while they stream")
    return notes


def _about_adapters(module: nn.Module) -> str:
    """Return a hint for an error message if some parameters on meta are trainable and others frozen.

    Such a module probably has adapters that were created on the meta device and have no values.
    """
    meta = [parameter.requires_grad for parameter in module.parameters() if parameter.is_meta]
    if not any(meta) or all(meta):
        return ""
    return " Adapters that were added on meta have no values: call carom.stream first, then add the adapters."
