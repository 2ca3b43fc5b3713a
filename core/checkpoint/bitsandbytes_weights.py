"""Finds weights that bitsandbytes saved in a checkpoint (NF4, FP4, int8), and makes them with its parameter classes.

The classes are those of the module's own parameters, so bitsandbytes is never imported here. The format is that of
`Linear4bit` and `Linear8bitLt` state dicts: beside `weight`, 4-bit layers have `weight.absmax`, `weight.quant_map`,
`weight.quant_state.bitsandbytes__nf4` and, with double quantisation, `weight.nested_absmax` and
`weight.nested_quant_map`; int8 layers have `SCB` and `weight_format`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..common.errors import UnsupportedError, WeightsError
from .index import Index, TensorEntry
from .quantised_weights import MadeWeight, QuantisedWeight, require_shape, require_size

_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_NESTED = ("nested_absmax", "nested_quant_map")
_CODES_4BIT, _CODES_8BIT = 16, 256  # entries of the tables that 4-bit codes and 8-bit scales stand for


def find(index: Index) -> Iterator[QuantisedWeight]:
    """Yield the weights of ``index`` that bitsandbytes quantised."""
    for name, entry in index.entries.items():
        head, _, leaf = name.rpartition(".")
        dot = f"{head}." if head else ""
        if any(f"{name}.{part}" in index for part in ("absmax", "quant_map", *_STATES)):
            yield QuantisedWeight(name, "bitsandbytes, 4 bits", _parts_4bit(index, name), _make_4bit)
        elif (
            leaf == "weight"
            and entry.dtype == "I8"
            and (f"{dot}SCB" in index or f"{dot}weight_format" in index)
        ):
            parts = {"weight": entry, "SCB": index.entries.get(f"{dot}SCB")}
            if f"{dot}weight_format" in index:
                parts["weight_format"] = index[f"{dot}weight_format"]
            yield QuantisedWeight(name, "bitsandbytes, int8", parts, _make_8bit)


def _parts_4bit(index: Index, name: str) -> dict[str, TensorEntry | None]:
    """Return the parts of the 4-bit weight ``name``; None for parts that are missing."""
    state = next((part for part in _STATES if f"{name}.{part}" in index), _STATES[0])
    parts = {part: index.entries.get(f"{name}.{part}") for part in ("absmax", "quant_map", state)}
    nested = {part: index.entries.get(f"{name}.{part}") for part in _NESTED}
    return {"weight": index[name], **parts, **(nested if any(nested.values()) else {})}


def _make_4bit(module: nn.Module, name: str, views: Mapping[str, torch.Tensor]) -> MadeWeight:
    """Make a `Params4bit` with its quantisation state."""
    parameter = module._parameters[name]
    assert parameter is not None
    make = getattr(type(parameter), "from_prequantized", None)
    if make is None:
        raise UnsupportedError(
            f"the module's {type(module).__name__} is not a bitsandbytes layer; build it with bitsandbytes.nn.Linear4bit "
            "(transformers: replace_with_bnb_linear), or load the model with its library and stream it with disk='auto'"
        )
    stats = {part: view for part, view in views.items() if part != "weight"}
    made: Any = make(data=views["weight"], quantized_stats=stats, requires_grad=False, device="cpu")
    state = made.quant_state
    require_shape(tuple(state.shape), module, _shaped(parameter))
    _check_sizes(views, state)
    made.module = module
    return MadeWeight(made, {"quant_state": state} if hasattr(module, "quant_state") else {})


def _shaped(parameter: Any) -> torch.Tensor:
    """Return a meta tensor of the shape that ``parameter`` has or, if it is quantised already, stands for."""
    state = getattr(parameter, "quant_state", None)
    return torch.empty(parameter.shape if state is None else state.shape, device="meta")


def _check_sizes(views: Mapping[str, torch.Tensor], state: Any) -> None:
    """Raise WeightsError unless all parts have the sizes and dtypes that bitsandbytes' kernels rely on."""
    if not isinstance(state.blocksize, int) or state.blocksize <= 0:
        raise WeightsError(f"its block size is {state.blocksize!r}; save the checkpoint again")
    values = math.prod(state.shape)
    blocks = -(-values // state.blocksize)
    data = views["weight"]
    require_size("weight (in bytes)", data.numel() * data.element_size(), -(-values // 2))
    require_size("weight.absmax", views["absmax"].numel(), blocks)
    require_size("weight.quant_map", views["quant_map"].numel(), _CODES_4BIT)
    dtypes = {"absmax": torch.float32, "quant_map": torch.float32}
    if state.nested:
        inner = state.state2.blocksize
        if not isinstance(inner, int) or inner <= 0:
            raise WeightsError(f"the block size of its scales is {inner!r}; save the checkpoint again")
        require_size("weight.nested_absmax", views["nested_absmax"].numel(), -(-blocks // inner))
        require_size("weight.nested_quant_map", views["nested_quant_map"].numel(), _CODES_8BIT)
        dtypes |= {"absmax": torch.uint8, "nested_absmax": torch.float32, "nested_quant_map": torch.float32}
    for part, dtype in dtypes.items():
        if views[part].dtype != dtype:
            raise WeightsError(
                f"weight.{part} is {views[part].dtype}, {dtype} is expected; save the checkpoint again"
            )


def _make_8bit(module: nn.Module, name: str, views: Mapping[str, torch.Tensor]) -> MadeWeight:
    """Make an `Int8Params` with its scales."""
    parameter: Any = module._parameters[name]
    if not {"CB", "SCB", "has_fp16_weights"} <= vars(parameter).keys():
        raise UnsupportedError(
            f"the module's {type(module).__name__} is not a bitsandbytes layer; build it with bitsandbytes.nn.Linear8bitLt "
            "(transformers: replace_with_bnb_linear), or load the model with its library and stream it with disk='auto'"
        )
    if parameter.has_fp16_weights:
        raise UnsupportedError(
            "the module's Linear8bitLt keeps 16-bit weights; build it with has_fp16_weights=False"
        )
    if "weight_format" in views and int(views["weight_format"].reshape(-1)[0]):
        raise UnsupportedError(
            "its weight_format is of an older bitsandbytes and has to be rearranged; load the model with its library, "
            "save it again, then stream that file"
        )
    codes, scales = views["weight"], views["SCB"]
    require_shape(tuple(codes.shape), module, parameter)
    require_size("SCB", scales.numel(), codes.shape[0])
    if scales.dtype != torch.float32:
        raise WeightsError(f"SCB is {scales.dtype}, torch.float32 is expected; save the checkpoint again")
    made = type(parameter)(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    state = copy.copy(getattr(module, "state", None))
    if state is None:
        return MadeWeight(made)
    # A layer that was used before holds its weight here. The layer takes over the new weight's tensors at first use.
    state.CB = state.SCB = None
    return MadeWeight(made, {"state": state})
