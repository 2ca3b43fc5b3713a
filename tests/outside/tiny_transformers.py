"""Any architecture of transformers as small as its configuration lets it be, with inputs for it: made in code, no hub."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from outside_harness import Case, Unsupported
from torch import nn

LARGEST = 8 << 20  # bytes of weights of what a sample takes; what stays above has no tiny configuration here

# What makes a configuration small, by the names that configurations use.
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size", "decoder_hidden_size", "embedding_size",
         "word_embed_proj_dim", "hidden_dim", "width", "emb_dim", "encoder_embed_dim", "d_embed", "encoder_dim"), 32
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
         "num_encoder_layers", "depth", "num_blocks", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "layers",
         "num_hidden_groups"), 2
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
         "num_key_value_heads", "encoder_num_attention_heads", "decoder_num_attention_heads", "attention_heads",
         "num_kv_heads", "num_query_heads"), 2
    ),
    **dict.fromkeys(
        ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner", "moe_intermediate_size",
         "encoder_intermediate_size", "decoder_intermediate_size", "mlp_dim", "ffn_hidden_size", "d_inner",
         "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "encoder_feedforward_dim",
         "decoder_feedforward_dim", "dim_feedforward"), 48
    ),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "dim_head", "d_head", "v_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "projection_dim", "proj_codevector_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("vocab_size", "encoder_vocab_size"), 64),
    **dict.fromkeys(("image_size", "img_size"), 32),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("num_conv_pos_embeddings",), 16),
    **dict.fromkeys(("num_conv_pos_embedding_groups",), 2),
    **dict.fromkeys(("num_codevectors_per_group",), 8),
    **dict.fromkeys(("codevector_dim",), 16),
    "patch_size": 8, "num_channels": 3, "sliding_window": 16, "chunk_size": 8, "attention_dropout": 0.0,
    "num_mel_bins": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1,
    "use_cache": False, "image_token_id": 60, "video_token_id": 61, "audio_token_id": 59, "image_token_index": 60,
    "apply_spec_augment": False, "mask_time_prob": 0.0, "layerdrop": 0.0, "use_mamba_kernels": False,
    "use_timm_backbone": False, "num_queries": 8, "type_vocab_size": 2,
}  # fmt: skip


def tiny_config(config_class: type, depth: int = 0) -> Any:
    """A configuration of ``config_class`` with everything that is called in one of the usual ways made small."""
    default = config_class()
    given: dict[str, Any] = {}
    for name, small in SMALL.items():
        had = getattr(default, name, None)
        names = {getattr(default, "attribute_map", {}).get(name, name), name}
        if had is None or isinstance(had, (list, tuple, dict)) or not names & accepted(config_class):
            continue
        given[next(n for n in (name, *names) if n in accepted(config_class))] = small
    for name in getattr(config_class, "sub_configs", {}):
        had = getattr(default, name, None)
        if had is not None and depth < 3:
            given[name] = tiny_config(type(had), depth + 1)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = getattr(default, name, None)
        if kinds and name in accepted(config_class):
            chosen = list(dict.fromkeys(kinds))
            layers = max(2, len(chosen))
            given[name] = (chosen * 2)[:layers]
            for count in ("num_hidden_layers", "n_layer"):
                if count in given:
                    given[count] = layers
    return config_class(**given)


def accepted(config_class: type) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters)
    for one in config_class.__mro__:
        names |= set(getattr(one, "__annotations__", {}))
    return names


def value(config: Any, *names: str, default: int = 0) -> int:
    """The first of ``names`` that the configuration, or one of its parts, has."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for name in names:
        for part in parts:
            found = getattr(part, name, None)
            if isinstance(found, (list, tuple)) and found and isinstance(found[0], int):
                found = found[0]
            if isinstance(found, int):
                return found
    return default


def inputs_for(model: nn.Module) -> dict[str, Any]:
    """Inputs by the names of ``model``'s forward."""
    config, names = model.config, inspect.signature(model.forward).parameters
    words = lambda length=9: torch.randint(3, 50, (2, length))  # noqa: E731
    given: dict[str, Any] = {}
    main = getattr(model, "main_input_name", "input_ids")
    for name in dict.fromkeys((main, "input_ids", "pixel_values", "input_features", "input_values")):
        if name not in names or (
            name != main
            and names[name].default is not inspect.Parameter.empty
            and given
            and not needs(config, name)
        ):
            continue
        if name == "input_ids":
            given[name] = words()
        elif name == "pixel_values":
            size = value(config, "image_size", "img_size", default=32)
            given[name] = torch.randn(
                2, value(config, "num_channels", "in_channels", "in_chans", default=3), size, size
            )
        elif name == "input_features":
            given[name] = torch.randn(
                2, value(config, "num_mel_bins", "feature_size", "input_dim", default=16), 64
            )
        elif name == "input_values":
            given[name] = torch.randn(2, 800)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        given["decoder_input_ids"] = words(5)
    if "use_cache" in names:
        given["use_cache"] = False
    return given


def needs(config: Any, name: str) -> bool:
    parts = getattr(config, "sub_configs", {})
    return name == "pixel_values" and "vision_config" in parts and "text_config" in parts


def alternatives(model: nn.Module) -> Iterator[Callable[[], dict[str, Any]]]:
    """Inputs for ``model``, the likeliest first: as they are named, words alone, clips, longer sounds, patches, series."""
    config, names = model.config, inspect.signature(model.forward).parameters
    size = value(config, "image_size", "img_size", default=32)
    channels = value(config, "num_channels", "in_channels", "in_chans", default=3)

    def also(**more: Callable[[], torch.Tensor]) -> Callable[[], dict[str, Any]]:
        return lambda: inputs_for(model) | {name: made() for name, made in more.items() if name in names}

    def words_alone() -> dict[str, Any]:
        return {
            name: given
            for name, given in inputs_for(model).items()
            if name not in ("pixel_values", "input_features")
        }

    yield lambda: inputs_for(model)
    if "input_ids" in names:
        yield words_alone
    for name in ("pixel_values", "pixel_values_videos"):
        for frames in (value(config, "num_frames", default=2), 2):
            if name in names:
                yield also(**{name: lambda n=frames: torch.randn(2, n, channels, size, size)})
    if "input_features" in names:
        mels = value(config, "num_mel_bins", default=16)
        yield also(
            input_features=lambda: torch.randn(2, mels, 2 * value(config, "max_source_positions", default=64))
        )
        yield also(input_features=lambda: torch.randn(2, 64, mels))
    if "grid_thw" in names:
        patch = value(config, "patch_size", default=8) ** 2 * value(config, "temporal_patch_size", default=1)
        flat = dict.fromkeys(("hidden_states", "pixel_values"), lambda: torch.randn(16, channels * patch))
        yield also(grid_thw=lambda: torch.tensor([[1, 4, 4]]), **flat)
    if "past_values" in names:
        length = value(config, "context_length", default=32)
        yield also(past_values=lambda: torch.randn(2, length, value(config, "num_input_channels", default=1)))
    if "bbox" in names:
        yield also(bbox=lambda: torch.randint(0, 30, (2, 9, 1)).expand(-1, -1, 4))


def inputs_that_run(make: Callable[[], nn.Module]) -> Callable[[], dict[str, Any]]:
    """The first alternative that the model takes; raises what it said to the first, if it takes none."""
    torch.manual_seed(0)
    model = make().eval()
    said = None
    for inputs in alternatives(model):
        try:
            with torch.no_grad():
                model(**inputs())
            return inputs
        except Exception as error:
            said = said or error
    assert said is not None
    raise said


def case_of(kind: str, largest: int = LARGEST) -> Case:
    """Raises Unsupported where no tiny model of ``kind`` can be made, or none runs."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = MODEL_MAPPING_NAMES[kind]
    try:
        config = tiny_config(CONFIG_MAPPING[kind])
        model_class = getattr(transformers, names if isinstance(names, str) else names[0])
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:
        raise Unsupported(f"{type(error).__name__}: {error}") from error
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > largest:
        raise Unsupported(f"{size} bytes of weights")
    try:
        inputs = inputs_that_run(lambda: model_class(config))
    except Exception as error:
        raise Unsupported(f"the plain run fails: {type(error).__name__}: {error}") from error
    return Case(kind, lambda: model_class(config), inputs)
