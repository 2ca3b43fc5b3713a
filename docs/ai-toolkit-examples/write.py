"""Writes the example configs beside this file; their figures are what `carom plan` says when it is run.

    python docs/ai-toolkit-examples/write.py        (after: python -m pip install -e .)

A test runs this too and compares: an example never states an old figure.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB, GB = 1 << 20, 10**9
CARDS = {8: "rtx4060", 12: "rtx4070", 16: "rtx5060ti-16gb", 24: "rtx4090"}
QTYPES = {"bf16": None, "int8": "convrot8"}  # carom plan's name of a width -> ai-toolkit's


@dataclass(frozen=True)
class Model:
    """``text_tokens``: beside the image's; ``patch``: pixels of an image a token covers, each way; ``copies``: models that share vram."""

    name: str
    title: str
    path: str
    arch: str
    text_tokens: int
    patch: int = 16
    scheduler: str = "flowmatch"
    timesteps: str = "weighted"
    extra: tuple[str, ...] = ()
    copies: int = 1


MODELS = (
    Model("flux2-dev", "Flux.2-dev", "black-forest-labs/FLUX.2-dev", "flux2", 512),
    Model("qwen-image", "Qwen-Image", "Qwen/Qwen-Image", "qwen_image", 256),
    Model("z-image", "Z-Image", "Tongyi-MAI/Z-Image", "zimage", 256),
    Model(
        "wan2.2-14b", "Wan 2.2 14B", "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16", "wan22_14b", 0, timesteps="linear",
        extra=("model_kwargs:", "  train_high_noise: true", "  train_low_noise: true"), copies=2,
    ),
    Model("sdxl", "SDXL", "stabilityai/stable-diffusion-xl-base-1.0", "sdxl", 0, patch=32, scheduler="ddpm", timesteps=""),
)  # fmt: skip
# What to train with: (weights, pixels) where it is not bf16 at 1024. Small cards: less RAM, fewer activations.
CHOICES = {
    ("flux2-dev", 8): ("int8", 512), ("flux2-dev", 12): ("int8", 768), ("flux2-dev", 16): ("int8", 1024),
    ("flux2-dev", 24): ("int8", 1024), ("qwen-image", 8): ("int8", 768), ("qwen-image", 12): ("int8", 1024),
    ("wan2.2-14b", 8): ("int8", 512), ("wan2.2-14b", 12): ("int8", 768), ("wan2.2-14b", 16): ("int8", 1024),
    ("wan2.2-14b", 24): ("int8", 1024),
}  # fmt: skip


def plan(arguments: list[str]) -> dict[str, Any]:
    """What `carom plan ... --json` prints."""
    from carom.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["plan", *arguments, "--json"])
    answer = json.loads(out.getvalue())
    if code:
        raise RuntimeError(f"carom plan {' '.join(arguments)}: {answer['message']}")
    return answer


def example(model: Model, card: int) -> str:
    """One config, as YAML text."""
    quant, pixels = CHOICES.get((model.name, card), ("bf16", 1024))
    tokens = (pixels // model.patch) ** 2 + model.text_tokens
    arguments = [model.name, "--quant", quant, "--mode", "train", "--gpu", CARDS[card], "--ram", "128GiB"]
    arguments += ["--tokens", str(tokens)]
    found = plan(arguments)
    if model.copies > 1:  # each may have its part of what the card has for weights
        room = found["vram"]["capacity_bytes"] - found["vram"]["total_bytes"] + found["vram"]["weights_bytes"]
        arguments += ["--vram", f"{room // model.copies // MIB}MiB"]
        found = plan(arguments)
    vram, host = found["vram"], found["host"]
    # Where nothing streams, allocators' rounding must not make it.
    budget = model.copies * (vram["weights_bytes"] // MIB) + (0 if found["streamed_layers"] else 64)
    waits = found["overhead"]
    speed = (
        "as fast as a card that holds it all"
        if waits < 0.005
        else f"{100 * waits:.0f} % over a card that holds it all"
    )
    ram = host["ram_bytes"]
    head = [
        f"{model.title} LoRA on a card of {card} GB, at {pixels} x {pixels}"
        + (", 8-bit weights" if quant == "int8" else ""),
        "",
        f"carom plan {' '.join(arguments)}",
        f"  VRAM {vram['total_bytes'] / GB:.1f} GB of {vram['capacity_bytes'] / GB:.1f} GB, of which weights "
        f"{vram['weights_bytes'] / GB:.1f} GB ({found['resident_layers']} of {found['layers']} layers stay)",
        f"  RAM  {ram / GB:.1f} GB for the weights that stream",
        f"  step {found['step_seconds']:.2g} s, {speed}",
        "These are predictions. Text encoder and VAE come on top, before and after: captions are cached first, then the",
        "text encoder is unloaded and its share of vram goes to the model.",
    ]
    if found["note"]:
        head.append(found["note"])
    if model.copies > 1:
        head.append(
            f"Figures are of one of the {model.copies}: all wait in RAM, and vram is shared between them."
        )
    body = [
        "job: extension",
        "config:",
        f"  name: {model.name.replace('.', '')}-{card}gb",
        "  process:",
        "    - type: sd_trainer",
        "      training_folder: output",
        "      device: cuda:0",
        "      network: {type: lora, linear: 16, linear_alpha: 16}",
        "      save: {dtype: bf16, save_every: 250, max_step_saves_to_keep: 4}",
        "      datasets:",
        "        - folder_path: /path/to/images",
        "          caption_ext: txt",
        "          cache_latents_to_disk: true",
        f"          resolution: [{pixels}]",
        "      train:",
        "        batch_size: 1",
        "        steps: 2000",
        "        gradient_checkpointing: true",
        "        train_unet: true",
        "        train_text_encoder: false",
        "        cache_text_embeddings: true",
        f"        noise_scheduler: {model.scheduler}",
        *([f"        timestep_type: {model.timesteps}"] if model.timesteps else []),
        "        optimizer: adamw8bit",
        "        lr: 1.0e-4",
        "        dtype: bf16",
        "      model:",
        f"        name_or_path: {model.path}",
        f"        arch: {model.arch}",
        *(f"        {line}" for line in model.extra),
        *(["        quantize: true", f"        qtype: {QTYPES[quant]}"] if QTYPES[quant] else []),
        "        offload: bouncing",
        "        offload_kwargs:",
        f"          vram: {budget}MiB  # weights on the card; auto takes what is free",
        "          ram: auto",
        "          # With disk, weights beyond ram are read from a drive at each step, instead of waiting in ordinary",
        "          # memory. Name a folder on a local SSD. auto writes nothing: only weights that are still as they are",
        "          # in the model's .safetensors files are then read from disk.",
        "          # disk: /fast/drive/carom",
        "      sample:",
        f"        sampler: {model.scheduler}",
        "        sample_every: 250",
        f"        width: {pixels}",
        f"        height: {pixels}",
        '        prompts: ["a photo of a red fox in the snow"]',
        "        seed: 42",
        "        guidance_scale: 4",
        "        sample_steps: 25",
    ]
    return "\n".join([*(f"# {line}".rstrip() for line in head), "---", *body]) + "\n"


def examples() -> dict[str, str]:
    """File name -> text, of every model on every card."""
    return {f"{model.name}-{card}gb.yaml": example(model, card) for model in MODELS for card in CARDS}


if __name__ == "__main__":
    for name, text in examples().items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
        print(name)
