"""Tiny random models in diffusers' folder format, and job files for them, for the tests with a real ai-toolkit.

`python aitoolkit_models.py FOLDER`, run with ai-toolkit's own Python, writes FOLDER/zimage, FOLDER/sd1 and
FOLDER/images.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WORDS = [
    "a",
    "photo",
    "of",
    "red",
    "blue",
    "cat",
    "dog",
    "house",
    "tree",
    "with",
    "the",
    "and",
    "picture",
    "person",
    "sks",
    "in",
    "on",
    "under",
    "bright",
    "dark",
]


def main(folder: Path) -> None:
    import torch

    torch.manual_seed(7)
    for make in (zimage, sd1, sdxl, flux, images):
        target = folder / make.__name__
        if not (target / "done").exists():
            target.mkdir(parents=True, exist_ok=True)
            make(target)
            (target / "done").write_text("")


def images(
    folder: Path, sizes: tuple[tuple[int, int], ...] = ((64, 64), (64, 64), (96, 64), (64, 64))
) -> None:
    """Write noisy pictures with captions; by default four, of two sizes."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(3)
    for index, size in enumerate(sizes):
        pixels = draw.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(" ".join(draw.choice(WORDS, 6)))


def _vae(channels: int) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=[8, 8, 8, 8], down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        latent_channels=channels, norm_num_groups=4, layers_per_block=1, sample_size=64,
    )  # fmt: skip


def zimage(folder: Path) -> None:
    """Write a Z-Image of about 20 M parameters, wide enough that quantised weights are worth streaming."""
    from diffusers import ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        dim=512, n_layers=4, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=256,
        axes_dims=[32, 48, 48], axes_lens=[256, 64, 64],
    )  # fmt: skip
    _shake(transformer)
    transformer.save_pretrained(folder / "transformer")
    zimage_rest(folder, width=256)


def zimage_deep(folder: Path, layers: int = 48, encoder_layers: int = 3, width: int = 256) -> None:
    """Write a Z-Image with many layers, of about 13 MB each: large beside what else a job keeps in memory.

    ``encoder_layers``, ``width``: of the text encoder. A layer that is 1024 wide has about 50 MB.
    """
    import torch
    from diffusers import ZImageTransformer2DModel

    torch.manual_seed(7)
    transformer = ZImageTransformer2DModel(
        dim=512, n_layers=layers, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=width,
        axes_dims=[32, 48, 48], axes_lens=[256, 64, 64],
    )  # fmt: skip
    _shake(transformer)
    transformer.save_pretrained(folder / "transformer")
    zimage_rest(folder, width, encoder_layers, intermediate=4 * width)


def zimage_rest(folder: Path, width: int, layers: int = 3, intermediate: int = 1024) -> None:
    """Write the other parts of a Z-Image: a text encoder whose captions are ``width`` wide, a tiny VAE, a scheduler."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=width, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
        )
    )  # fmt: skip
    encoder.save_pretrained(folder / "text_encoder")
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "[PAD]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.chat_template = "{% for m in messages %}the {{ m['content'] }} and{% endfor %}"
    fast.save_pretrained(folder / "tokenizer")
    vae = _vae(16)
    vae.register_to_config(scaling_factor=0.3611, shift_factor=0.1159)
    vae.save_pretrained(folder / "vae")
    (folder / "scheduler").mkdir(exist_ok=True)
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ZImagePipeline"}))


def sd1(folder: Path) -> None:
    """Write a Stable Diffusion 1 of about 3 M parameters."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        block_out_channels=(32, 64, 64, 64), layers_per_block=1, cross_attention_dim=64, attention_head_dim=4,
        norm_num_groups=8, sample_size=8,
    )  # fmt: skip
    _shake(unet)
    unet.save_pretrained(folder / "unet")
    _clip(folder, "")
    _vae(4).save_pretrained(folder / "vae")
    _ddim(folder)
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "feature_extractor": [None, None]}
    index |= {"safety_checker": [None, None], "requires_safety_checker": False}
    index |= {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
    index |= {"scheduler": ["diffusers", "DDIMScheduler"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {"text_encoder": ["transformers", "CLIPTextModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))


def sdxl(folder: Path) -> None:
    """Write a Stable Diffusion XL of about 3 M parameters, with its two text encoders."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        block_out_channels=(32, 64, 64), layers_per_block=1, cross_attention_dim=128, attention_head_dim=4,
        norm_num_groups=8, sample_size=8, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=64 + 6 * 8, use_linear_projection=True,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    )  # fmt: skip
    _shake(unet)
    unet.save_pretrained(folder / "unet")
    _clip(folder, "")
    _clip(folder, "_2", projected=True)
    _vae(4).save_pretrained(folder / "vae")
    _ddim(folder)
    index: dict[str, Any] = {"_class_name": "StableDiffusionXLPipeline", "feature_extractor": [None, None]}
    index |= {"image_encoder": [None, None], "force_zeros_for_empty_prompt": True}
    index |= {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
    index |= {"scheduler": ["diffusers", "DDIMScheduler"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "text_encoder": ["transformers", "CLIPTextModel"],
    }
    index |= {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
    (folder / "model_index.json").write_text(json.dumps(index))


def flux(folder: Path) -> None:
    """Write a Flux.1 of about 5 M parameters, with a CLIP and a T5."""
    from diffusers import FluxTransformer2DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    transformer = FluxTransformer2DModel(
        in_channels=64, num_layers=3, num_single_layers=3, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=64, pooled_projection_dim=64, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    _shake(transformer)
    transformer.save_pretrained(folder / "transformer")
    _clip(folder, "")
    encoder = T5EncoderModel(
        T5Config(
            vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip
    encoder.save_pretrained(folder / "text_encoder_2")
    pieces = [(piece, -1.0) for piece in ("<pad>", "</s>", "<unk>", *(f"\u2581{word}" for word in WORDS))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )
    fast.save_pretrained(folder / "tokenizer_2")
    vae = _vae(16)
    vae.register_to_config(scaling_factor=0.3611, shift_factor=0.1159)
    vae.save_pretrained(folder / "vae")
    (folder / "scheduler").mkdir(exist_ok=True)
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))


def _clip(folder: Path, number: str, projected: bool = False) -> None:
    """Write a tiny CLIP to ``text_encoder`` + number, and its tokenizer, which splits words into letters."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    place = folder / f"tokenizer{number}"
    place.mkdir(exist_ok=True)
    (place / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(vocabulary)}))
    (place / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>"}
    config |= {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    encoder = kind(
        CLIPTextConfig(
            vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=77, bos_token_id=52, eos_token_id=53, projection_dim=64,
        )
    )  # fmt: skip
    encoder.save_pretrained(folder / f"text_encoder{number}")


def _ddim(folder: Path) -> None:
    from diffusers import DDIMScheduler

    DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False
    ).save_pretrained(folder / "scheduler")


def _shake(model: Any) -> None:
    """Make all weights nonzero, because a final layer of zeros would hide every earlier difference."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.02)


def job(name: str, kind: str, models: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return a job that trains a LoRA on ``kind`` ("zimage", "sd1", "sdxl" or "flux") for a few steps.

    ``changes``: section -> its changed keys.
    """
    model: dict[str, Any] = {"name_or_path": str(models / kind)}
    if kind != "sd1":
        model["arch"] = kind
    flow = kind in ("zimage", "flux")
    process: dict[str, Any] = {
        "type": "sd_trainer",
        "training_folder": str(output),
        "device": "cpu",
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "save": {"dtype": "float32", "save_every": 1000, "max_step_saves_to_keep": 1},
        "datasets": [
            {
                "folder_path": str(models / f"images-{kind}"), "caption_ext": "txt", "resolution": [64],
                "cache_latents_to_disk": True,
            }
        ],
        "train": {
            "batch_size": 1, "steps": 3, "gradient_checkpointing": True, "train_unet": True,
            "train_text_encoder": False, "noise_scheduler": "flowmatch" if flow else "ddpm",
            "optimizer": "adamw", "lr": 1e-3, "dtype": "float32", "disable_sampling": True,
        },
        "model": model,
        "sample": {
            "sampler": "flowmatch" if flow else "ddim", "sample_every": 2, "width": 64, "height": 64,
            "prompts": ["a red cat"], "neg": "", "seed": 42, "guidance_scale": 3, "sample_steps": 2,
        },
    }  # fmt: skip
    for section, keys in changes.items():
        if isinstance(keys, dict):
            process[section] = {**process.get(section, {}), **keys}
        else:
            process[section] = keys
    return {"job": "extension", "config": {"name": name, "process": [process]}, "meta": {"name": "[name]"}}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
