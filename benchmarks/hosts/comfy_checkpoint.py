"""A program that writes a Flux-shaped checkpoint of random bf16 weights: ``python comfy_checkpoint.py COMFYUI FILE
SHAPE_JSON [CLIP_FILE]``.

With ``CLIP_FILE`` it also writes a CLIP-L text encoder (fp16, 246 MB). The program is a separate process, because it
imports ComfyUI for the names and shapes of the model class, on ``meta``. Weights are seeded and Gaussian with
deviation 0.02, so that activations stay finite; the scales of norms are around one.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(comfyui: str, target: str, shape: dict, clip: str = "") -> None:
    started = time.monotonic()
    sys.argv = ["main.py", "--cpu"]
    sys.path.insert(0, comfyui)
    os.chdir(comfyui)
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch
    from comfy import ops
    from comfy.ldm.flux.model import Flux

    hidden = shape["hidden"]
    model = Flux(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=shape["pooled"], context_in_dim=shape["width"],
        hidden_size=hidden, mlp_ratio=4.0, num_heads=hidden // 128, depth=shape["double"],
        depth_single_blocks=shape["single"], axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=True, txt_ids_dims=[], dtype=torch.bfloat16, device="meta", operations=ops.disable_weight_init,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    weights = {}
    for name, tensor in model.state_dict().items():
        value = torch.randn(tensor.shape, generator=generator, device=device) * 0.02
        if "norm" in name and tensor.dim() == 1 and not name.endswith("bias"):
            value += 1
        weights[name] = value.to(torch.bfloat16).cpu()
    path = Path(target)
    if clip:
        from comfy import clip_model, sd1_clip

        config = json.loads(Path(sd1_clip.__file__).with_name("sd1_clip_config.json").read_text("utf-8"))
        encoder = clip_model.CLIPTextModel(config, torch.float32, "meta", ops.disable_weight_init)
        drawn = {}
        for name, tensor in encoder.state_dict().items():
            name = "text_model." + name.removeprefix("text_model.")
            drawn[name] = (torch.randn(tensor.shape, generator=generator, device=device) * 0.02).half().cpu()
        save(drawn, Path(clip))
    save(weights, path)
    count = sum(value.numel() for value in weights.values())
    print(
        f"{count / 1e9:.2f} B parameters, {path.stat().st_size / (1 << 30):.2f} GiB in {time.monotonic() - started:.1f} s"
    )


def save(weights: dict, path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:5])
