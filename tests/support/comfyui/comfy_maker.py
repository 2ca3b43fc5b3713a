"""A program that writes tiny random models that stock ComfyUI detects: ``python comfy_maker.py COMFYUI_PATH
MODELS_FOLDER``.

It is a separate process, because it imports ComfyUI. Shapes are the smallest that ComfyUI still recognises.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HIDDEN, VECTOR, CONTEXT = 256, 64, 128  # of the Flux-shaped model
LORA_RANK = 4


def main(comfyui: str, folder: str) -> None:
    sys.argv = ["main.py", "--cpu"]
    sys.path.insert(0, comfyui)
    os.chdir(comfyui)
    import comfy.options  # type: ignore[import-not-found]

    comfy.options.enable_args_parsing()
    import torch

    models = Path(folder)
    flux_weights = weights(flux(), 1)
    save(flux_weights, models / "diffusion_models" / "flux.safetensors")
    save(weights(flux(), 2), models / "diffusion_models" / "flux2nd.safetensors")
    for kind, found in quantised(flux_weights):
        save(found, models / "diffusion_models" / f"flux_{kind}.safetensors")
    gguf(flux_weights, models / "diffusion_models" / "flux_q8.gguf", "Q8_0")
    gguf(flux_weights, models / "diffusion_models" / "flux_f16.gguf", "F16")
    save(lora(flux_weights, 3), models / "loras" / "flux.safetensors")
    save(lora(flux_weights, 4), models / "loras" / "other.safetensors")
    for kind in ("rank16", "dora", "lokr", "loha", "oft", "boft", "glora"):
        save(adapters(kind, flux_weights, 20), models / "loras" / f"{kind}.safetensors")
    every = lora(flux_weights, 18, ("",)) | differences(flux_weights, 19)
    save(every, models / "loras" / "every_weight.safetensors")
    save(weights(wan(), 5), models / "diffusion_models" / "wan.safetensors")
    unet = weights(sd15(), 6, torch.float16)
    save(unet, models / "diffusion_models" / "sd15.safetensors")
    save(weights(control(), 11, torch.float16), models / "controlnet" / "sd15.safetensors")
    # What the example workflow of Flux names, of sizes that go with CLIP-L alone.
    save(weights(flux(768, 768), 9), models / "diffusion_models" / "flux1-dev.safetensors")
    save(weights(taesd(16), 10), models / "vae" / "ae.safetensors")
    clip = {
        "text_model." + k.removeprefix("text_model."): v
        for k, v in weights(clip_l(), 7, torch.float16).items()
    }
    save(clip, models / "text_encoders" / "clip_l.safetensors")
    save(
        lora(clip, 17, ("fc1.weight",), "text_encoders.clip_l.transformer."),
        models / "loras" / "clip_l.safetensors",
    )
    for kind, encoder in text_encoders():
        save(encoder, models / "text_encoders" / f"{kind}.safetensors")
    whole = {"model.diffusion_model." + k: v for k, v in unet.items()}
    with_vae = {"first_stage_model." + k: v for k, v in weights(vae(), 12, torch.float16).items()}
    save(weights(vae(), 12, torch.float16), models / "vae" / "sd15.safetensors")
    save(whole | with_vae, models / "checkpoints" / "sd15_vae.safetensors")
    whole.update({"cond_stage_model.transformer." + k: v for k, v in clip.items()})
    whole.update({"first_stage_model." + k: v for k, v in weights(taesd(), 8, torch.float16).items()})
    save(whole, models / "checkpoints" / "sd15.safetensors")


def flux(context: int = CONTEXT, vector: int = VECTOR) -> Any:
    import torch
    from comfy import ops  # type: ignore[import-not-found]
    from comfy.ldm.flux.model import Flux  # type: ignore[import-not-found]

    return Flux(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=vector, context_in_dim=context, hidden_size=HIDDEN,
        mlp_ratio=4.0, num_heads=HIDDEN // 128, depth=3, depth_single_blocks=4, axes_dim=[16, 56, 56], theta=10000,
        patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[], dtype=torch.float32,
        operations=ops.disable_weight_init,
    )  # fmt: skip


def wan() -> Any:
    import torch
    from comfy import ops
    from comfy.ldm.wan.model import WanModel  # type: ignore[import-not-found]

    return WanModel(
        dim=256,
        ffn_dim=512,
        num_heads=2,
        num_layers=4,
        dtype=torch.float32,
        operations=ops.disable_weight_init,
    )


def sd15() -> Any:
    import torch
    from comfy import ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # type: ignore[import-not-found]

    return UNetModel(
        image_size=32, in_channels=4, model_channels=320, out_channels=4, num_res_blocks=[1], channel_mult=(1,),
        num_heads=8, use_spatial_transformer=True, context_dim=768, transformer_depth=[1], transformer_depth_middle=1,
        transformer_depth_output=[1, 1], use_linear_in_transformer=False, legacy=False, dtype=torch.float32,
        operations=ops.disable_weight_init,
    )  # fmt: skip


def control() -> Any:
    import torch
    from comfy import ops
    from comfy.cldm.cldm import ControlNet  # type: ignore[import-not-found]

    return ControlNet(
        image_size=32, in_channels=4, model_channels=320, hint_channels=3, num_res_blocks=[1], channel_mult=(1,),
        num_heads=8, use_spatial_transformer=True, context_dim=768, transformer_depth=[1], transformer_depth_middle=1,
        use_linear_in_transformer=False, legacy=False, dtype=torch.float32, operations=ops.disable_weight_init,
    )  # fmt: skip


def clip_l() -> Any:
    import torch
    from comfy import clip_model, ops, sd1_clip  # type: ignore[import-not-found]

    path = Path(sd1_clip.__file__).with_name("sd1_clip_config.json")
    return clip_model.CLIPTextModel(
        json.loads(path.read_text("utf-8")), torch.float32, "cpu", ops.disable_weight_init
    )


def text_encoders() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, weights): T5 of its true size, and encoders with reduced width only, with a tokenizer if the file
    has one.
    """
    import torch
    from comfy import ops, text_encoders
    from comfy.text_encoders import llama, t5  # type: ignore[import-not-found]
    from comfy_test_nodes import SMALL_ENCODERS

    folder = Path(text_encoders.__path__[0])
    tokens = {"spiece_model": torch.frombuffer(bytearray(pieces()), dtype=torch.uint8)}
    for seed, kind in enumerate(("t5_config_base.json", "t5_config_xxl.json", "umt5_config_xxl.json"), 13):
        sizes = json.loads((folder / kind).read_text("utf-8")) | SMALL_ENCODERS.get(kind, {})
        made = weights(t5.T5(sizes, torch.float32, "cpu", ops.disable_weight_init), seed)
        yield kind.removesuffix(".json").replace("_config", ""), made | (tokens if kind[0] == "u" else {})
    gemma = llama.Gemma2_2B(SMALL_ENCODERS["Gemma2_2B"], torch.float32, "cpu", ops.disable_weight_init)
    yield "gemma2", weights(gemma, 16) | tokens


def pieces() -> bytes:
    """Return a sentencepiece model of the letters of a few words."""
    import io

    import sentencepiece  # type: ignore[import-not-found]

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a lighthouse at night over the sea"] * 8), model_writer=model, vocab_size=32,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def vae() -> Any:
    """Return Stable Diffusion's VAE, whose encoder has a fixed size in ComfyUI."""
    from comfy.ldm.models.autoencoder import AutoencoderKL  # type: ignore[import-not-found]

    sizes = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
        "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    return AutoencoderKL(ddconfig=sizes, embed_dim=4)


def taesd(channels: int = 4) -> Any:
    from comfy.taesd.taesd import TAESD  # type: ignore[import-not-found]

    return TAESD(latent_channels=channels)


def weights(module: Any, seed: int, dtype: Any = None) -> dict[str, Any]:
    """Return seeded random weights: small, so that activations stay finite, and around one for norms."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            found[name] = tensor
            continue
        value = torch.randn(tensor.shape, generator=generator) * 0.05
        if "norm" in name and tensor.dim() == 1 and not name.endswith("bias"):
            value += 1
        found[name] = value.to(dtype or torch.bfloat16)
    return found


def quantised(flux_weights: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (format, weights) with the blocks' linear weights in every quantised format that this ComfyUI knows."""
    import torch
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor  # type: ignore[import-not-found]

    for kind, about in QUANT_ALGOS.items():
        found = dict(flux_weights)
        marker = torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)
        for name, tensor in flux_weights.items():
            if "_blocks." in name and name.endswith(".weight") and tensor.dim() == 2:
                packed = QuantizedTensor.from_float(tensor, about["comfy_tensor_layout"])
                found.update(packed.state_dict(name))
                found[name.removesuffix("weight") + "comfy_quant"] = marker.clone()
        yield kind, found


def gguf(flux_weights: dict[str, Any], path: Path, of_blocks: str) -> None:
    """Write llama.cpp's format for node packs that load it; do nothing if the package gguf is not installed.

    ``of_blocks``: the type of the matrices in Flux's blocks. All other tensors are of type F32.
    """
    try:
        import gguf as package  # type: ignore[import-not-found]
    except ImportError:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = package.GGUFWriter(path, "flux")
    for name, tensor in flux_weights.items():
        value = tensor.float().numpy()
        if "_blocks." in name and tensor.dim() == 2:
            kind = package.GGMLQuantizationType[of_blocks]
            writer.add_tensor(name, package.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lora(
    model_weights: dict[str, Any], seed: int, ends: tuple[str, ...] = ("qkv.weight", "linear1.weight", "mlp.0.weight"),
    prefix: str = "diffusion_model.",
) -> dict[str, Any]:  # fmt: skip
    """Return a LoRA of the weights whose names end with one of ``ends``. ``prefix``: of the names in the LoRA."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in model_weights.items():
        if tensor.dim() == 2 and name.endswith(ends):
            base = prefix + name.removesuffix(".weight")
            found[f"{base}.lora_down.weight"] = (
                torch.randn(LORA_RANK, tensor.shape[1], generator=generator) * 0.1
            )
            found[f"{base}.lora_up.weight"] = (
                torch.randn(tensor.shape[0], LORA_RANK, generator=generator) * 0.1
            )
    return found


def adapters(kind: str, flux_weights: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return adapters of a ``kind`` that ComfyUI knows, for some weights of the Flux-shaped model."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Any:
        return torch.randn(shape, generator=generator) * 0.1

    found = {}
    for name, tensor in flux_weights.items():
        if tensor.dim() != 2 or not name.endswith(("qkv.weight", "linear1.weight")):
            continue
        rows, columns = tensor.shape
        alpha, small = torch.tensor(8.0), torch.tensor(0.01)
        up, down = made(rows, 16), made(16, columns)
        parts = {
            "rank16": {"lora_up.weight": up, "lora_down.weight": down, "alpha": alpha},
            "dora": {"lora_up.weight": up, "lora_down.weight": down, "dora_scale": made(rows, 1) + 1},
            "lokr": {
                "lokr_w1": made(8, 8), "lokr_w2_a": made(rows // 8, 4), "lokr_w2_b": made(4, columns // 8), "alpha": alpha,
            },
            "loha": {
                "hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": made(rows, 16), "hada_w2_b": made(16, columns),
                "alpha": alpha,
            },
            "oft": {"oft_blocks": made(rows // 8, 8, 8), "alpha": small},
            "boft": {"oft_blocks": made(2, rows // 8, 8, 8), "alpha": small},
            "glora": {
                "a1.weight": made(16, columns), "a2.weight": made(columns, 16), "b1.weight": made(16, columns),
                "b2.weight": made(rows, 16), "alpha": alpha,
            },
        }[kind]  # fmt: skip
        base = "diffusion_model." + name.removesuffix(".weight")
        found |= {f"{base}.{part}": value for part, value in parts.items()}
    return found


def differences(flux_weights: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return patches that add to the biases and norms, which no low-rank patch reaches."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in flux_weights.items():
        base, _, leaf = name.rpartition(".")
        if tensor.dim() == 1:
            kind = f"{base}.diff_b" if leaf == "bias" else f"{name.removesuffix('.weight')}.diff"
            found[f"diffusion_model.{kind}"] = torch.randn(tensor.shape, generator=generator) * 0.1
    return found


def save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:3])
