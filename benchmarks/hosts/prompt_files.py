"""A program that writes files of `prompts`: ``python prompt_files.py COMFYUI JOBS_JSON``.

Each job names the ``kind``, the ``file``, the ``seed`` and the sizes (see `prompt_cases.Sizes`). Weights are random,
seeded and Gaussian. The program imports ComfyUI for the names and shapes of the weights, on ``meta``.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

DEVIATION = 0.02  # activations stay finite
RANK = 16


def main(comfyui: str, jobs: list[dict]) -> None:
    sys.argv = ["main.py", "--cpu"]
    sys.path.insert(0, comfyui)
    os.chdir(comfyui)
    import comfy.options

    comfy.options.enable_args_parsing()
    for job in jobs:
        make(job)


def make(job):
    """Write the file of ``job``: to a temporary name first, then renamed."""
    import torch
    from safetensors.torch import save_file

    path, started = Path(job["file"]), time.monotonic()
    shapes = {"model": model_shapes, "text": text_shapes, "vae": vae_shapes, "lora": lora_shapes}[
        job["kind"]
    ](job)
    device = "cuda" if torch.cuda.is_available() and not job["cpu"] else "cpu"
    generator = torch.Generator(device).manual_seed(job["seed"])
    weights = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator, device=device) * DEVIATION
        if "norm" in name and len(shape) == 1 and not name.endswith("bias"):
            value += 1
        fp8 = job["kind"] == "text"
        weights[name] = value.to(torch.float8_e4m3fn if fp8 else torch.bfloat16).cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    save_file(weights, unfinished)
    os.replace(unfinished, path)
    print(
        f"{path.name}: {path.stat().st_size / 1e9:.2f} GB in {time.monotonic() - started:.1f} s", flush=True
    )


def model_shapes(job):
    """Return the shapes of a Flux-shaped model."""
    import torch
    from comfy import ops
    from comfy.ldm.flux.model import Flux

    hidden = job["hidden"]
    model = Flux(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=job["pooled"], context_in_dim=job["width"],
        hidden_size=hidden, mlp_ratio=4.0, num_heads=hidden // 128, depth=job["double"],
        depth_single_blocks=job["single"], axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=True, txt_ids_dims=[], dtype=torch.bfloat16, device="meta", operations=ops.disable_weight_init,
    )  # fmt: skip
    return shapes_of(model)


def text_shapes(job):
    """Return the shapes of T5 XXL's encoder."""
    import torch
    from comfy import ops
    from comfy.text_encoders import t5

    config = json.loads(Path(t5.__file__).with_name("t5_config_xxl.json").read_text("utf-8"))
    return shapes_of(t5.T5(config | dict(job["text"]), torch.float32, "meta", ops.disable_weight_init))


def vae_shapes(job):
    """Return the shapes of the decoder of a 16-channel VAE."""
    import torch
    from comfy.ldm.modules.diffusionmodules.model import Decoder

    with torch.device("meta"):
        decoder = Decoder(
            ch=job["channels"], out_ch=3, ch_mult=(1, 2, 4, 4), num_res_blocks=2, attn_resolutions=[], in_channels=3,
            resolution=256, z_channels=16, double_z=True, dropout=0.0,
        )  # fmt: skip
    return {f"decoder.{name}": shape for name, shape in shapes_of(decoder).items()}


def lora_shapes(job):
    """Return the shapes of a LoRA on all linear weights of the model's blocks."""
    found = {}
    for name, shape in model_shapes(job).items():
        if "_blocks." in name and name.endswith(".weight") and len(shape) == 2:
            base = f"diffusion_model.{name.removesuffix('.weight')}"
            found[f"{base}.lora_down.weight"] = (RANK, shape[1])
            found[f"{base}.lora_up.weight"] = (shape[0], RANK)
    return found


def shapes_of(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
