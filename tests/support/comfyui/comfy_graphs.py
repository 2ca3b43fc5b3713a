"""`Graph`: prompts for the real ComfyUI server with its tiny models, of the stock loader and of Carom's."""

from __future__ import annotations

import os
from typing import Any

from tests_comfy_server import Server, node

SHAPES = {"flux": "1,16,16,16", "wan": "1,16,1,8,8", "sd15": "1,4,16,16"}
CONDITIONS = {"flux": (128, 64), "wan": (4096, 64), "sd15": (768, 768)}
CODEC = os.environ.get("CAROM_TEST_CODEC", "auto")  # of Carom's loader in these prompts
LIMITS = {"flux": "8MiB", "wan": "9MiB", "sd15": "20MiB"}


class Graph:
    """A prompt: a loader, what is done to its model, a sampler, and the hash of the latent."""

    def __init__(self, family: str, loader: dict, seed: int = 1, steps: int = 2, cfg: float = 1.0) -> None:
        width, pooled = CONDITIONS[family]
        self.nodes: dict[str, dict] = {
            "load": loader,
            "cond": node("CaromTestConditioning", tokens=8, width=width, pooled=pooled, seed=5),
            "latent": node("CaromTestLatent", shape=SHAPES[family]),
        }
        self.model: list[Any] = ["load", 0]
        self.seed, self.steps, self.cfg = seed, steps, cfg
        self.positive: list[Any] = ["cond", 0]

    def then(self, kind: str, **inputs: Any) -> Graph:
        name = f"m{len(self.nodes)}"
        self.nodes[name] = node(kind, model=self.model, **inputs)
        self.model = [name, 0]
        return self

    def prompt(self) -> dict:
        nodes = dict(self.nodes)
        nodes["sample"] = node(
            "KSampler", model=self.model, positive=self.positive, negative=["cond", 0], latent_image=["latent", 0],
            seed=self.seed, steps=self.steps, cfg=self.cfg, sampler_name="euler", scheduler="simple", denoise=1.0,
        )  # fmt: skip
        nodes["hash"] = node("CaromTestHash", value=["sample", 0], model=self.model)
        return nodes


def stock(family: str, name: str = "", dtype: str = "default", **options: Any) -> Graph:
    loader = node("UNETLoader", unet_name=f"{name or family}.safetensors", weight_dtype=dtype)
    return Graph(family, loader, **options)


def ours(
    family: str, name: str = "", dtype: str = "default", vram: str = "", mode: str = "stream", **options: Any
):
    loader = node(
        "CaromLoadDiffusionModel", unet_name=f"{name or family}.safetensors", weight_dtype=dtype, mode=mode,
        vram=vram or LIMITS[family], codec=CODEC,
    )  # fmt: skip
    return Graph(family, loader, **options)


def hash_of(server: Server, graph: Graph) -> str:
    told = server.run(graph.prompt())["hash"]
    assert told["finite"] == [True]
    return told["hash"][0]


def told_by(server: Server, graph: Graph) -> dict:
    return server.run(graph.prompt())["hash"]


def lora(graph: Graph, name: str = "flux", strength: float = 0.8) -> Graph:
    return graph.then("LoraLoaderModelOnly", lora_name=f"{name}.safetensors", strength_model=strength)
