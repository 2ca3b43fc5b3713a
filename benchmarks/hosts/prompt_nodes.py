"""Nodes of `prompts` in the process that runs ComfyUI: an empty latent, a part of one, and the hashes of results.

The module is loaded by its path, so it imports nothing of Carom.
"""

# mypy: ignore-errors
from __future__ import annotations

import hashlib

import torch

told: dict = {}  # the hashes of the prompt that runs, by the name of the result


def _takes(**kinds):
    """Return INPUT_TYPES of a node whose inputs have these types; those that are called ``image`` or ``latent_N`` may lack."""
    needed = {name: (kind,) for name, kind in kinds.items() if not name.startswith(("image", "latent_"))}
    others = {name: (kind,) for name, kind in kinds.items() if name not in needed}
    return classmethod(lambda _class: {"required": needed, "optional": others})


class Latent:
    """A node that returns an empty latent of a 16-channel model."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "make", "carom-bench"
    INPUT_TYPES = _takes(side="INT")

    def make(self, side):
        return ({"samples": torch.zeros(1, 16, side, side)},)


class Part:
    """A node that returns the upper left part of a latent."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "cut", "carom-bench"
    INPUT_TYPES = _takes(latent="LATENT", side="INT")

    def cut(self, latent, side):
        return ({"samples": latent["samples"][:, :, :side, :side]},)


class LowVram:
    """A node that makes stock's patcher load as if nothing fitted, so that no LoRA is merged."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "choose", "carom-bench"
    INPUT_TYPES = _takes(model="MODEL")

    def choose(self, model):
        made = model.clone()
        own = type(made)
        made.__class__ = type(
            own.__name__, (own,), {"load": lambda self, to=None, *a, **k: own.load(self, to, 1)}
        )
        return (made,)


class Tell:
    """A node that puts the hashes of its inputs into `told`, and whether they are finite."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "tell", "carom-bench", True
    INPUT_TYPES = _takes(conditioning="CONDITIONING", latent_0="LATENT", latent_1="LATENT", image="IMAGE")

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def tell(self, conditioning, **results):
        results = {"conditioning": conditioning[0][0], **results}
        for name, value in results.items():
            value = value["samples"] if isinstance(value, dict) else value
            value = value.detach().cpu().contiguous()
            digest = hashlib.sha256(value.view(torch.uint8).numpy().tobytes()).hexdigest()
            told[name] = {"hash": digest, "finite": bool(torch.isfinite(value.float()).all())}
        return {}


NODES = {
    "CaromBenchLatent": Latent,
    "CaromBenchPart": Part,
    "CaromBenchLowVram": LowVram,
    "CaromBenchTell": Tell,
}
