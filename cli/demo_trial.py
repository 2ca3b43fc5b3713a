"""The demo's experiment: the same inference and LoRA training twice, and what came out, to compare."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .demo_model import Decoder, add_lora

SEED = 20240229
RANK = 8
PASSES = 2  # of inference: the second runs in an order already learnt


@dataclass
class Outcome:
    """All that a run computed, on CPU, and how long its training steps took (seconds)."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)


KINDS = ("outputs", "losses", "gradients", "adapters")


def differences(one: Outcome, other: Outcome) -> dict[str, list[str]]:
    """Names of the tensors that are not equal bit for bit, by kind."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        a, b = getattr(one, kind), getattr(other, kind)
        found[kind] = sorted(
            n for n in a.keys() | b.keys() if n not in a or n not in b or not same_bits(a[n], b[n])
        )
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes: unlike torch.equal, NaN equals itself and -0.0 is not 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def run_inference(
    model: Decoder, device: torch.device, tokens: int, out: Outcome, tick: Callable[[], object]
) -> None:
    """Two passes over different tokens; the logits go to ``out.outputs``."""
    with torch.inference_mode():
        for number in range(PASSES):
            logits = model(sample(model, tokens, number).to(device))
            out.outputs[f"pass {number}"] = logits.cpu()
            tick()


def run_training(
    model: Decoder, device: torch.device, tokens: int, steps: int, out: Outcome, tick: Callable[[], object]
) -> None:
    """AdamW steps on the LoRA adapters, blocks checkpointed; gradients of each step and the adapters go to ``out``.

    The model must carry its adapters already (`add_lora`).
    """
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-3)
    for number in range(steps):
        batch = sample(model, tokens + 1, PASSES + number).to(device)
        synchronize(device)
        start = time.perf_counter()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        synchronize(device)
        out.step_seconds.append(time.perf_counter() - start)
        out.losses[f"step {number}"] = loss.detach().cpu()
        for name, parameter in adapters.items():
            assert parameter.grad is not None, name
            out.gradients[f"step {number}: {name}"] = parameter.grad.cpu().clone()
        optimizer.step()
        optimizer.zero_grad()
        tick()
    out.adapters = {name: p.detach().cpu().clone() for name, p in adapters.items()}


def fresh_adapters(model: Decoder) -> None:
    """Put the same adapters on, every time."""
    add_lora(model, RANK, SEED)


def sample(model: Decoder, tokens: int, number: int) -> Tensor:
    """Seeded token numbers (1, tokens)."""
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randint(model.config.vocabulary, (1, tokens), generator=generator)


def synchronize(device: torch.device) -> None:
    """Wait for the device, for timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give cached device memory back, so that the next run's peak is its own."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On the CPU compute on one thread, inside the ``with`` only.

    It takes somewhat longer on an idle machine; but where cores are shared, threads that meet at the
    end of every small operator wait for the scheduler each time (measured: 20 times slower).
    """
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits twice, inside the ``with`` only.

    Attention's fused backward adds in any order on a GPU; its plain form does not.
    cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it first starts, so the variable must be there by then.
    """
    settings: Any = torch.utils.deterministic  # its attribute is set at run time
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = settings.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # costs time and hides nothing here
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
