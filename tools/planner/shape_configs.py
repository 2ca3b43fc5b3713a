"""Reading a model's shape from a config.json in the format of transformers or diffusers.

Every value is checked, because the file may be damaged or hostile; a bad value raises WeightsError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.common.errors import UnsupportedError, WeightsError
from . import shapes
from .shapes import Shape

# Endings of transformers class names of models that generate a token at a time.
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def generates(config: dict) -> bool | None:
    """Return whether the model of a transformers config.json generates a token at a time; None where that is
    unknown.
    """
    names = config.get("architectures")
    if "_class_name" in config or not isinstance(names, list) or not names:
        return None
    return any(str(name).endswith(_GENERATING) for name in names)


def _number(config: dict, *names: str, default: int | None = None, most: int = 1 << 24) -> int:
    """Return the integer under the first of `names` that the config has, else `default`.

    Raises WeightsError where the value is not an integer from 0 to `most`, or where there is neither a value
    nor a default.
    """
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or not 0 <= value <= most:
                raise WeightsError(
                    f"config.json: {name}={str(value)[:40]!r} is no whole number from 0 to {most}"
                )
            return value
    if default is None:
        raise WeightsError(f"config.json: {names[0]} is missing, so the model's shape is not known")
    return default


def shape_of_config(config: Any, source: str) -> Shape:
    """Return the shape that a transformers or diffusers config.json describes; `source`: the path, for
    messages.

    Raises WeightsError for a bad config, and UnsupportedError for a diffusers class that is not known here.
    """
    if not isinstance(config, dict):
        raise WeightsError(f"{source}: not a JSON object")
    cls, read = str(config.get("_class_name", ""))[:80], f"read from {source}"
    name = Path(source).parent.name if source.endswith(".json") else Path(source).name
    name = name or "model"
    if cls in ("FluxTransformer2DModel", "Flux2Transformer2DModel"):
        hidden = _number(config, "num_attention_heads", most=4096) * _number(
            config, "attention_head_dim", most=4096
        )
        build = shapes.flux1 if cls.startswith("FluxT") else shapes.flux2
        return build(
            name, name, read, _layers(config), _number(config, "num_single_layers", most=10_000), hidden
        )
    if cls in ("QwenImageTransformer2DModel", "WanTransformer3DModel"):
        hidden = _number(config, "num_attention_heads", most=4096) * _number(
            config, "attention_head_dim", most=4096
        )
        if cls.startswith("Qwen"):
            return shapes.qwen_image(name, name, read, _layers(config), hidden)
        return shapes.wan(name, name, read, _layers(config), hidden, _number(config, "ffn_dim"))
    if cls == "ZImageTransformer2DModel":
        hidden, refiners = _number(config, "dim"), 2 * _number(config, "n_refiner_layers", most=10_000)
        return shapes.z_image(
            name, name, read, _layers(config, "n_layers"), refiners, hidden, hidden * 8 // 3
        )
    if cls:
        raise UnsupportedError(
            f"{source}: {cls} is not known by its config; give its .safetensors file or folder"
        )
    text = config.get("text_config")
    return _text_config(text if isinstance(text, dict) else config, name, read, generates(config) is False)


def _layers(config: dict, *names: str) -> int:
    """Return the number of layers, under the first of `names` that the config has. Raises WeightsError for 0."""
    count = _number(config, *(names or ("num_layers",)), most=10_000)
    if not count:
        raise WeightsError("config.json: a model without layers")
    return count


def _text_config(config: dict, name: str, source: str, encodes: bool) -> Shape:
    """Return the shape of a transformers text model; `encodes`: whether the model is an encoder."""
    hidden, layers = (
        _number(config, "hidden_size", "d_model"),
        _layers(config, "num_hidden_layers", "num_layers"),
    )
    heads = _number(config, "num_attention_heads", "num_heads", most=1 << 16)
    if not hidden or not heads:
        raise WeightsError("config.json: hidden_size and num_attention_heads must be at least 1")
    kv_heads = _number(config, "num_key_value_heads", default=heads, most=1 << 16)
    head_dim = _number(config, "head_dim", "d_kv", default=hidden // heads, most=1 << 16)
    ff = _number(config, "intermediate_size", "d_ff")
    experts = _number(config, "n_routed_experts", "num_local_experts", "num_experts", default=0, most=1 << 16)
    used = min(_number(config, "num_experts_per_tok", default=experts, most=1 << 16), experts)
    expert_ff = _number(config, "moe_intermediate_size", default=ff)
    shared = _number(config, "n_shared_experts", default=0, most=1 << 10) * expert_ff
    dense = min(
        layers, _number(config, "first_k_dense_replace", default=0 if experts else layers, most=10_000)
    )
    # The MLP of a decoder is gated; the config of a T5 encoder says whether its MLP is.
    gated = not encodes or config.get("is_gated_act") is True
    groups = []
    if dense or not experts:
        groups.append(
            shapes.language_layer(
                "dense layer", dense or layers, hidden, heads, kv_heads, head_dim, ff, gated=gated
            )
        )
    if experts and layers > dense:
        groups.append(
            shapes.language_layer(
                "MoE layer", layers - dense, hidden, heads, kv_heads, head_dim, ff,
                experts=experts, used=used, expert_ff=expert_ff, shared_ff=shared,
            )
        )  # fmt: skip
    vocabulary = _number(config, "vocab_size", default=0)
    if encodes:
        return shapes.encoder(name, name, source, tuple(groups), hidden, vocabulary)
    return shapes.language_model(
        name, name, source, tuple(groups), hidden, vocabulary, kv_heads * head_dim,
        tied=config.get("tie_word_embeddings") is True,
    )  # fmt: skip
