"""A custom node pack for the benchmark in the real ComfyUI; the benchmark copies this file to custom_nodes,
beside device_time.py.

One node samples like KSampler, with random conditioning instead of a text encoder's, and returns its times and
memory.
"""

# mypy: ignore-errors
from __future__ import annotations

import hashlib
import time

import torch

from .device_time import DeviceTime

PROFILED = 2  # the last iterations but one of a profiled prompt


class Sample:
    """A node that runs Euler steps at cfg 1.

    An event is recorded on the computing stream between steps, and nothing waits before the end. With ``profile``, the
    kernels of two iterations are recorded; the times of such a prompt are not compared.
    """

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "sample", "carom-bench", True

    @classmethod
    def INPUT_TYPES(cls):
        number = ("INT", {"default": 8, "min": 1, "max": 1 << 16})
        return {
            "required": {
                "model": ("MODEL",), "tokens": number, "width": number, "pooled": number, "side": number,
                "seed": ("INT", {"default": 0}), "steps": number,
            },
            "optional": {"profile": ("BOOLEAN", {"default": False}), "trace": ("STRING", {"default": ""})},
        }  # fmt: skip

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def sample(self, model, tokens, width, pooled, side, seed, steps, profile=False, trace=""):
        import comfy.model_management
        import comfy.sample

        device = comfy.model_management.get_torch_device()
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        generator = torch.Generator().manual_seed(7)
        extra = {"pooled_output": torch.randn(1, pooled, generator=generator)}
        condition = [[torch.randn(1, tokens, width, generator=generator), extra]]
        latent = torch.zeros(1, 16, side, side)
        noise = comfy.sample.prepare_noise(latent, seed)
        marks, stepped = [], []
        device_time, profiled = DeviceTime(), []

        def mark(*_):
            stepped.append(time.time())
            if profile and len(stepped) == steps - 1 - PROFILED:
                device_time.start()
            elif profile and len(stepped) == steps - 1:
                profiled.append(device_time.stop(PROFILED, trace))
            if on_gpu:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                marks.append(event)
            else:
                marks.append(time.perf_counter())

        started = time.time()
        result = comfy.sample.sample(
            model, noise, steps, 1.0, "euler", "simple", condition, condition, latent, denoise=1.0, seed=seed,
            callback=mark, disable_pbar=True,
        )  # fmt: skip
        result = result.cpu().contiguous()
        ended = time.time()
        if on_gpu:
            torch.cuda.synchronize(device)
        pairs = list(zip(marks, marks[1:], strict=False))
        told = {
            "hash": hashlib.sha256(result.view(torch.uint8).numpy().tobytes()).hexdigest(),
            "finite": bool(torch.isfinite(result.float()).all()),
            "iterations_s": [1e-3 * a.elapsed_time(b) if on_gpu else b - a for a, b in pairs],
            "profile": profiled[0] if profiled else None,
            "started": started,
            "ended": ended,
            "first_step_s": stepped[0] - started,
            "class": type(model).__name__,
            "loaded_bytes": int(model.loaded_size()),
            "model_bytes": int(comfy.model_management.module_size(model.model)),
            "torch_peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
            "torch_peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        }
        streaming = model.model.__dict__.get("_carom_streaming")
        report = None if streaming is None else streaming.report()
        told["report"] = None if report is None else report.to_dict()
        return {"ui": {"told": [told]}}


NODE_CLASS_MAPPINGS = {"CaromBenchSample": Sample}
