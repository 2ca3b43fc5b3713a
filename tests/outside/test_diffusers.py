"""diffusers' models with tiny configurations made here, streamed at 27 % and at the least budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from outside_harness import COUNT, Case, assert_same_everywhere, sampled
from torch import nn

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: its models are not run")


def model(name: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        if not hasattr(diffusers, name):
            pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
        return getattr(diffusers, name)(**config)

    return make


def step(
    *shape: int, words: tuple[int, ...] = (), of: int = 2, **more: Callable[[], Any]
) -> Callable[[], dict]:
    """Inputs of a denoiser: what ``more`` makes beside hidden states of ``shape``, a timestep and ``words``."""

    def inputs() -> dict:
        given: dict[str, Any] = {
            "hidden_states": torch.randn(of, *shape),
            "timestep": torch.randint(1, 900, (of,)).float(),
        }
        if words:
            given["encoder_hidden_states"] = torch.randn(of, *words)
        return given | {name: made() for name, made in more.items()} | {"return_dict": False}

    return inputs


def image(*shape: int) -> Callable[[], dict]:
    return lambda: {"sample": torch.randn(1, *shape), "return_dict": False}


def unet(*shape: int, words: tuple[int, ...] = ()) -> Callable[[], dict]:
    def inputs() -> dict:
        given = {"sample": torch.randn(1, *shape), "timestep": torch.tensor(7), "return_dict": False}
        return given | ({"encoder_hidden_states": torch.randn(1, *words)} if words else {})

    return inputs


BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
HUNYUAN = {
    "sample_size": 16, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 3, "in_channels": 4,
    "cross_attention_dim": 8, "cross_attention_dim_t5": 64, "pooled_projection_dim": 4, "hidden_size": 24, "text_len": 4,
    "text_len_t5": 4, "use_style_cond_and_image_meta_size": False,
}  # fmt: skip

# What issue 21 names: a pooling head over four linears, views that the forward keeps, a view that outlives its use in
# front of all decoder layers, and a convolution that runs several times in a block that does too.
NAMED = [
    Case(
        "HunyuanDiT2DModel", model("HunyuanDiT2DModel", **HUNYUAN),
        step(
            4, 16, 16, words=(4, 8), text_embedding_mask=lambda: torch.ones(2, 4),
            encoder_hidden_states_t5=lambda: torch.randn(2, 4, 64), text_embedding_mask_t5=lambda: torch.ones(2, 4),
            image_rotary_emb=lambda: [torch.ones(64, 8), torch.zeros(64, 8)],
        ),
    ),
    *(
        Case(
            f"PriorTransformer {width}",
            model(
                "PriorTransformer", num_attention_heads=2, attention_head_dim=width // 2, num_layers=2, embedding_dim=width,
                num_embeddings=7, additional_embeddings=4,
            ),
            lambda width=width: {
                "hidden_states": torch.randn(2, width), "timestep": torch.tensor(3), "proj_embedding": torch.randn(2, width),
                "encoder_hidden_states": torch.randn(2, 7, width), "return_dict": False,
            },
        )
        for width in (8, 64)
    ),
    Case(
        "AutoencoderRAE",
        model(
            "AutoencoderRAE", encoder_hidden_size=64, encoder_patch_size=14, encoder_num_hidden_layers=2,
            decoder_hidden_size=128, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
            decoder_intermediate_size=1024, patch_size=4, encoder_input_size=28, image_size=8,
        ),
        lambda: {"sample": torch.rand(1, 3, 28, 28), "return_dict": False},
    ),
    Case(
        "AutoencoderKLMagvit",
        model("AutoencoderKLMagvit", latent_channels=4, block_out_channels=(8, 8, 16, 16), norm_num_groups=4, layers_per_block=1),
        lambda: {"sample": torch.randn(1, 3, 9, 16, 16), "return_dict": False}, modes=("infer", "full"),
    ),
]  # fmt: skip

OTHERS = [
    Case("AutoencoderKL", model("AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, **BLOCKS), image(3, 16, 16)),
    Case("AsymmetricAutoencoderKL", model("AsymmetricAutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(8, 16), layers_per_down_block=1, up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(8, 16), layers_per_up_block=1, norm_num_groups=4), image(3, 16, 16)),
    Case("AutoencoderTiny", model("AutoencoderTiny", encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 2), num_decoder_blocks=(2, 1)), image(3, 16, 16), modes=("infer", "full")),
    Case("AutoencoderKLTemporalDecoder", model("AutoencoderKLTemporalDecoder", down_block_types=("DownEncoderBlock2D",) * 2, block_out_channels=(32, 64), layers_per_block=1, latent_channels=4), lambda: {"sample": torch.randn(2, 3, 16, 16), "num_frames": 2, "return_dict": False}),
    Case("AutoencoderKLWan", model("AutoencoderKLWan", base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]), image(3, 5, 16, 16), modes=("infer", "full")),
    Case("AutoencoderKLCogVideoX", model("AutoencoderKLCogVideoX", down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4), image(3, 8, 16, 16), modes=("infer", "full")),
    Case("AutoencoderDC", model("AutoencoderDC", in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), downsample_block_type="conv", upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu"), image(3, 16, 16)),
    Case("VQModel", model("VQModel", down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=3, num_vq_embeddings=16, **BLOCKS), image(3, 16, 16)),
    Case("UNet2DModel", model("UNet2DModel", sample_size=16, in_channels=3, out_channels=3, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, **BLOCKS), unet(3, 16, 16)),
    Case("UNet2DConditionModel", model("UNet2DConditionModel", sample_size=16, cross_attention_dim=8, attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **BLOCKS), unet(4, 16, 16, words=(4, 8))),
    Case("UNet3DConditionModel", model("UNet3DConditionModel", sample_size=8, cross_attention_dim=8, attention_head_dim=4, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), **BLOCKS), unet(4, 2, 8, 8, words=(4, 8))),
    Case("DiTTransformer2DModel", model("DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=8), lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.randint(0, 900, (2,)), "class_labels": torch.randint(0, 4, (2,)), "return_dict": False}),
    Case("PixArtTransformer2DModel", model("PixArtTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2, cross_attention_dim=16, caption_channels=8, use_additional_conditions=False), step(4, 8, 8, words=(4, 8), added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None})),
    Case("SD3Transformer2DModel", model("SD3Transformer2DModel", sample_size=16, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=32, out_channels=4, pos_embed_max_size=32), step(4, 8, 8, words=(6, 16), pooled_projections=lambda: torch.randn(2, 32))),
    Case("FluxTransformer2DModel", model("FluxTransformer2DModel", patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)), step(16, 4, words=(6, 16), of=1, pooled_projections=lambda: torch.randn(1, 16), txt_ids=lambda: torch.zeros(6, 3), img_ids=lambda: torch.rand(16, 3))),
    Case("AuraFlowTransformer2DModel", model("AuraFlowTransformer2DModel", sample_size=16, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, out_channels=4, pos_embed_max_size=256), step(4, 16, 16, words=(6, 32))),
    Case("SanaTransformer2DModel", model("SanaTransformer2DModel", patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8, sample_size=8), step(4, 8, 8, words=(4, 8))),
    Case("CogVideoXTransformer3DModel", model("CogVideoXTransformer3DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=8, num_layers=2, sample_width=8, sample_height=8, sample_frames=8, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8), step(2, 4, 8, 8, words=(8, 8))),
    Case("WanTransformer3DModel", model("WanTransformer3DModel", patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=64, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32), step(4, 2, 8, 8, words=(6, 16))),
    Case("LTXVideoTransformer3DModel", model("LTXVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, num_layers=2, qk_norm="rms_norm_across_heads", caption_channels=16), step(8, 4, words=(6, 16), encoder_attention_mask=lambda: torch.ones(2, 6), num_frames=lambda: 2, height=lambda: 2, width=lambda: 2)),
    Case("MochiTransformer3DModel", model("MochiTransformer3DModel", patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=4, max_sequence_length=16), step(4, 2, 8, 8, words=(16, 16), encoder_attention_mask=lambda: torch.ones(2, 16).bool())),
    Case("ControlNetModel", model("ControlNetModel", cross_attention_dim=8, attention_head_dim=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), conditioning_embedding_out_channels=(8, 16), **BLOCKS), lambda: unet(4, 8, 8, words=(4, 8))() | {"controlnet_cond": torch.randn(1, 3, 16, 16)}),
    Case("T2IAdapter", model("T2IAdapter", in_channels=3, channels=[8, 8, 16, 16], num_res_blocks=1, downscale_factor=8), lambda: {"x": torch.randn(1, 3, 32, 32)}, modes=("infer", "full")),
    Case("Transformer2DModel", model("Transformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=8, norm_num_groups=4, num_layers=2, cross_attention_dim=8), lambda: {"hidden_states": torch.randn(1, 8, 8, 8), "encoder_hidden_states": torch.randn(1, 4, 8), "return_dict": False}),
]  # fmt: skip


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_the_named_ones(case):
    assert_same_everywhere(case)


@pytest.mark.parametrize("case", sampled(OTHERS, COUNT), ids=lambda case: case.name)
def test_a_sample(case):
    assert_same_everywhere(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_all(case):
    assert_same_everywhere(case)
