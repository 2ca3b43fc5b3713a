"""The cases of `prompts`: sequences of prompts, and their graphs for ComfyUI with stock's loaders or with Carom's nodes.

The module is pure. It is also loaded by its path, so it imports nothing of Carom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODELS = ("a", "b")
LORAS = ("first", "second")
CLIP_TYPE = "mochi"  # T5 XXL alone, and no pooled output, which Flux takes as zeros


@dataclass(frozen=True)
class Sizes:
    """Sizes of the files and of the work.

    ``hidden``, ``double``, ``single``: the two Flux-shaped models; ``text``: changes of T5 XXL's configuration;
    ``width``: its output; ``tokens``: of a text; ``channels``: of the VAE's decoder; ``side``: of the latent, in units of
    8 pixels; ``decoded``: the side of the part of the latent that the VAE decodes; ``steps``: of a prompt, divided among
    its models.
    """

    hidden: int = 3072
    double: int = 8
    single: int = 16
    text: tuple[tuple[str, int], ...] = ()
    width: int = 4096
    tokens: int = 512
    pooled: int = 768
    channels: int = 128
    side: int = 128
    decoded: int = 108  # ComfyUI estimates 3.0 GiB for it in bf16
    steps: int = 20


_TINY_TEXT = (("d_model", 64), ("d_kv", 16), ("num_heads", 4), ("vocab_size", 1024))
TINY = Sizes(256, 3, 4, _TINY_TEXT, width=64, tokens=8, pooled=64, channels=32, side=8, decoded=8, steps=4)


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text, the models that sample in turn, LoRA (name, strength), and whether the VAE decodes."""

    text: str
    models: tuple[str, ...] = MODELS
    loras: tuple[tuple[str, float], ...] = ()
    decodes: bool = False


@dataclass(frozen=True)
class Case:
    """A sequence of prompts in one process.

    ``encoder``: whether Carom loads the text encoder too; ``behind``: whether Carom's node stands behind the stock
    loader; ``ram``: limit of the process's memory in bytes, by a control group.
    """

    name: str
    prompts: tuple[Prompt, ...]
    encoder: bool = False
    behind: bool = False
    ram: int | None = None


def cases(count: int) -> dict[str, Case]:
    """Return all cases by name; ``count``: prompts of those whose prompts differ in their texts only."""
    new = tuple(Prompt(f"a lighthouse, view {number}") for number in range(count))
    one = tuple(Prompt(prompt.text, ("a",)) for prompt in new)
    first, second = LORAS
    with_lora = [(), ((first, 1.0),), ((first, 1.0),), ((first, 0.6),), ((first, 0.6), (second, 0.8)), ()]
    found = (
        Case("two-models", new),
        Case("one-model", one),
        Case("encoder", new, encoder=True),
        Case("behind-loader", new, behind=True),
        Case("lora", tuple(Prompt(f"a harbour, view {n}", ("a",), lora) for n, lora in enumerate(with_lora))),
        Case("decode", tuple(Prompt(prompt.text, ("a",), decodes=True) for prompt in new)),
        Case("same-text", (new[0],) * count),
        Case(
            "switch-back", tuple(Prompt(f"a pier, view {n}", (MODELS[n % 2],)) for n in range(max(count, 3)))
        ),
        Case("ram-32GB", new, ram=32_000_000_000),
        Case("ram-16GB", new, ram=16_000_000_000),
    )
    return {case.name: case for case in found}


@dataclass(frozen=True)
class Way:
    """How the models are loaded: ``carom``: by Carom's nodes, with these values of their widgets; ``merges_little``: whether
    stock's low-VRAM path is chosen for LoRA, which is the reference where ComfyUI has no dynamic path (the CPU).
    """

    carom: bool
    mode: str = "auto"
    vram: str = "auto"
    codec: str = "auto"
    merges_little: bool = False


def graph(case: Case, number: int, sizes: Sizes, way: Way) -> dict[str, Any]:
    """Return the graph of prompt ``number`` of ``case``, as ComfyUI's page would send it."""
    prompt, nodes = case.prompts[number], {}
    widgets = {"mode": way.mode, "vram": way.vram, "codec": way.codec}

    def node(name: str, kind: str, **inputs: Any) -> list[Any]:
        nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, 0]

    if way.carom and case.encoder:
        clip = node("clip", "CaromLoadCLIP", clip_name="text.safetensors", type=CLIP_TYPE, **widgets)
    else:
        clip = node("clip", "CLIPLoader", clip_name="text.safetensors", type=CLIP_TYPE)
    condition = node("encode", "CLIPTextEncode", clip=clip, text=prompt.text)
    latent = node("empty", "CaromBenchLatent", side=sizes.side)
    steps, latents = sizes.steps // len(prompt.models), []
    for turn, name in enumerate(prompt.models):
        last = turn == len(prompt.models) - 1
        file = f"{name}.safetensors"
        if way.carom and not case.behind:
            model = node(
                f"load_{name}", "CaromLoadDiffusionModel", unet_name=file, weight_dtype="default", **widgets
            )
        else:
            model = node(f"load_{name}", "UNETLoader", unet_name=file, weight_dtype="default")
        if way.carom and case.behind:
            model = node(f"offload_{name}", "CaromOffload", model=model, **widgets)
        for lora, strength in prompt.loras:
            model = node(
                f"lora_{name}_{lora}", "LoraLoaderModelOnly", model=model, lora_name=f"{lora}.safetensors",
                strength_model=strength,
            )  # fmt: skip
        if prompt.loras and way.merges_little:
            model = node(f"low_{name}", "CaromBenchLowVram", model=model)
        latent = node(
            f"sample_{turn}", "KSamplerAdvanced", model=model, add_noise="disable" if turn else "enable",
            noise_seed=number, steps=steps * len(prompt.models), cfg=1.0, sampler_name="euler", scheduler="simple",
            positive=condition, negative=condition, latent_image=latent, start_at_step=turn * steps,
            end_at_step=(turn + 1) * steps, return_with_leftover_noise="disable" if last else "enable",
        )  # fmt: skip
        latents.append(latent)
    told = {f"latent_{turn}": latent for turn, latent in enumerate(latents)}
    if prompt.decodes:
        part = node("part", "CaromBenchPart", latent=latent, side=sizes.decoded)
        vae = node("vae", "VAELoader", vae_name="vae.safetensors")
        told["image"] = node("decode", "VAEDecode", samples=part, vae=vae)
    node("tell", "CaromBenchTell", conditioning=condition, **told)
    return nodes
