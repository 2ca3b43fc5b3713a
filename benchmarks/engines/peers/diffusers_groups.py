"""The engine diffusers: group offloading by block, with its transfer stream and record_stream, as its guide advises."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from ..case import Case
from ..dit import Dit
from .base import Attached, Engine, Skip


class Diffusers(Engine):
    name = "diffusers"

    def unavailable(self, case: Case) -> str | None:
        if importlib.util.find_spec("diffusers") is None:
            return "not installed (pip install diffusers)"
        if case.resident:
            return "group offloading has no option to keep some blocks resident"
        if case.mode == "train":
            return "its hooks free a block after the forward that backward still needs"
        return None

    def version(self) -> str | None:
        return importlib.metadata.version("diffusers")

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        reason = self.unavailable(case)
        if reason:
            raise Skip(reason)
        from diffusers.hooks import apply_group_offloading

        streams = device.type == "cuda"
        apply_group_offloading(
            model,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            non_blocking=streams,
            use_stream=streams,
            record_stream=streams,
        )
        return Attached(model, case, device)


ENGINE = Diffusers()
