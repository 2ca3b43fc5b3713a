"""transformers' architectures with tiny configurations, streamed at 27 % and at the least budget."""

from __future__ import annotations

import random

import pytest
import torch
from outside_harness import COUNT, SEED, Case, Unsupported, assert_same_everywhere
from torch import nn

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: its models are not run"
)

from outside_tiny_transformers import case_of  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES  # noqa: E402

transformers.logging.set_verbosity_error()
KINDS = sorted(MODEL_MAPPING_NAMES)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
TEXT = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_key_value_heads": 1,
    **SMALL,
}


def words(length: int = 9) -> torch.Tensor:
    return torch.randint(3, 40, (2, length))


def named(name: str, **config: object) -> nn.Module:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind = getattr(transformers, f"{name}ForConditionalGeneration", None) or getattr(
        transformers, f"{name}Model"
    )
    return kind(getattr(transformers, f"{name}Config")(**config))


def image_and_words(size: int, **more: object) -> dict:
    ids = words()[:1]
    ids[0, 2:6] = 60  # the image's place
    return {"input_ids": ids, "pixel_values": torch.randn(size), "use_cache": False, **more}


# What issue 21 names: a table that another unit's forward is given, and views of weights that autograd saves.
NAMED = [
    Case(
        "SEW-D",
        lambda: named(
            "SEWD", vocab_size=32, num_hidden_layers=2, conv_dim=(16, 16, 32), conv_stride=(4, 2, 2), conv_kernel=(8, 3, 2),
            squeeze_factor=2, max_position_embeddings=512, position_buckets=128, num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2, mask_time_prob=0.0, apply_spec_augment=False, **SMALL,
        ),
        lambda: (torch.randn(2, 600),), input_gradients=False,
    ),
    Case(
        "Nemotron-H",
        lambda: named(
            "NemotronH", layers_block_type=["linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
            head_dim=16, ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=8,
            n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, num_experts_per_tok=2,
            **TEXT,
        ),
        lambda: {"input_ids": words(), "use_cache": False},
    ),
    Case(
        "LFM2-VL",
        lambda: named(
            "Lfm2Vl", text_config={
                "model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
                "block_multiple_of": 16, **TEXT,
            },
            vision_config={"model_type": "siglip2_vision_model", "num_hidden_layers": 2, "patch_size": 4, "num_patches": 16, **SMALL},
            image_token_id=60, projector_hidden_size=32,
        ),
        lambda: image_and_words(
            (1, 16, 48), spatial_shapes=torch.tensor([[4, 4]]), pixel_attention_mask=torch.ones(1, 16, dtype=torch.long),
        ),
    ),
    Case(
        "LFM3-VL",
        lambda: named(
            "Lfm3Vl", text_config={
                "model_type": "lfm3", "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "head_dim": 16, **TEXT,
            },
            vision_config={"num_hidden_layers": 3, "num_key_value_heads": 1, "patch_size": 4, **SMALL},
            image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63, projector_hidden_size=32,
        ),
        lambda: image_and_words((16, 96), image_grid_thw=torch.tensor([[1, 4, 4]])),
    ),
    Case(
        "CLIP",
        lambda: named(
            "CLIP", text_config={"num_hidden_layers": 2, "max_position_embeddings": 16, **TEXT},
            vision_config={"num_hidden_layers": 2, "image_size": 16, "patch_size": 4, **SMALL}, projection_dim=16,
        ),
        lambda: {"input_ids": words(), "pixel_values": torch.randn(2, 3, 16, 16)},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_the_named_ones(case):
    assert_same_everywhere(case)


@pytest.mark.parametrize("draw", range(COUNT))
def test_a_sample(draw):
    """One architecture by the seed: the first of a shuffled list of which a tiny model can be made; others are printed."""
    for kind in random.Random(1000 * SEED + draw).sample(KINDS, len(KINDS)):
        try:
            case = case_of(kind)
        except Unsupported as reason:
            print(f"{kind}: no tiny model of it: {reason}")
            continue
        print(f"compared: {kind}")
        return assert_same_everywhere(case)
    raise AssertionError("no architecture can be made tiny")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture(kind):
    try:
        case = case_of(kind, largest=24 << 20)
    except Unsupported as reason:
        pytest.skip(f"no tiny model of it: {reason}")
    assert_same_everywhere(case)
