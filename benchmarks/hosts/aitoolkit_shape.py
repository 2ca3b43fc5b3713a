"""A program that writes the model and pictures of the benchmark, run with ai-toolkit's Python: ``python
aitoolkit_shape.py PART TESTS_FOLDER TARGET LAYERS PIXELS TEXT_LAYERS``.

The model is a Z-Image in diffusers' format with random bf16 weights and the real widths (3840; 2 + 2 refiners;
captions of 2560). LAYERS is its depth (12: 2.9 B parameters; 0: the tiny model of the tests). The model has a tiny
VAE and a text encoder with TEXT_LAYERS layers in the widths of Qwen3-4B (2560, 9728; the real one has 36), or a tiny
one for 0. Four PIXELS-sized pictures with captions are written too.

PART "transformer" writes TARGET/zimage/transformer. PART "encoder" writes TARGET/zimage/text_encoder if that is not
tiny. PART "rest" writes everything else, and TARGET/small: the same model with a transformer of one thin layer and
the tiny encoder, for the job that only fills caches.
"""

# mypy: ignore-errors
from __future__ import annotations

import sys
from pathlib import Path

WIDTH = 2560


def main(part: str, tests: str, target: str, layers: int, pixels: int, text_layers: int) -> None:
    sys.path.insert(0, tests)
    import torch

    folder = Path(target)
    if part == "transformer":
        if layers:
            write(
                folder / "zimage" / "transformer", dim=3840, n_layers=layers, n_refiner_layers=2, n_heads=30
            )
        return
    if part == "encoder":
        if layers and text_layers:
            write_encoder(folder / "zimage" / "text_encoder", text_layers)
        return
    import aitoolkit_models

    torch.manual_seed(7)
    (folder / "images").mkdir(parents=True)
    aitoolkit_models.images(folder / "images", ((pixels, pixels),) * 4)
    small, model = folder / "small", folder / "zimage"
    model.mkdir(exist_ok=True)
    if layers == 0:
        aitoolkit_models.zimage(model)
        small.symlink_to(model, target_is_directory=True)
        return
    small.mkdir()
    aitoolkit_models.zimage_rest(small, width=WIDTH)
    for item in small.iterdir():
        if item.name != "text_encoder" or not text_layers:
            (model / item.name).symlink_to(item)
    write(small / "transformer", dim=512, n_layers=1, n_refiner_layers=1, n_heads=4)


def write(folder: Path, *, n_heads: int, **shape: int) -> None:
    """Write a transformer with random weights."""
    import torch
    from diffusers import ZImageTransformer2DModel

    with torch.device("meta"):
        model = ZImageTransformer2DModel(
            **shape, n_heads=n_heads, n_kv_heads=n_heads, cap_feat_dim=WIDTH,
            axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512],
        )  # fmt: skip
    fill(model, folder / "diffusion_pytorch_model.safetensors")
    model.save_config(folder)


def write_encoder(folder: Path, layers: int) -> None:
    """Write a Qwen3 with the widths of the real encoder and random weights, and with the vocabulary of the tests."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=9728, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1024, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    fill(model, folder / "model.safetensors")
    config.save_pretrained(folder)


def fill(model, file: Path) -> None:
    """Save ``model`` with random bf16 weights, drawn on a GPU if present, because the host would take minutes."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    weights = {}
    for name, tensor in model.state_dict().items():
        value = torch.randn(tensor.shape, generator=generator, device=device) * 0.02
        if "norm" in name and tensor.dim() == 1 and not name.endswith("bias"):
            value += 1
        weights[name] = value.to(torch.bfloat16).cpu()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, file, {"format": "pt"})
    print(f"{file.parent}: {sum(t.numel() for t in weights.values()) / 1e9:.2f} B parameters")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:7]))
