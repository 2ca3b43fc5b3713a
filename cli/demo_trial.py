"""The runs of `carom demo`: inference and LoRA training whose results can be compared bit for bit between two
runs.
"""

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
PASSES = 2  # passes of inference; in the second one Carom already knows the order in which weights are used


@dataclass
class RunResults:
    """All tensors that a run computed, on CPU, and the seconds of its training steps."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def median_step_seconds(self) -> float:
        """The median duration of a training step, in seconds."""
        return statistics.median(self.step_seconds)


KINDS = ("outputs", "losses", "gradients", "adapters")


def differences(one: RunResults, other: RunResults) -> dict[str, list[str]]:
    """Return, for each kind in KINDS, the names of the tensors that are not equal bit for bit in both runs."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        a, b = getattr(one, kind), getattr(other, kind)
        found[kind] = sorted(
            n for n in a.keys() | b.keys() if n not in a or n not in b or not same_bits(a[n], b[n])
        )
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shape, dtype and bytes are equal; unlike in torch.equal, NaN equals itself and -0.0 is
    not 0.0.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def run_inference(
    model: Decoder, device: torch.device, tokens: int, out: RunResults, tick: Callable[[], object]
) -> None:
    """Run PASSES forwards over different tokens and store the logits in ``out.outputs``; call ``tick`` after
    each.
    """
    with torch.inference_mode():
        for number in range(PASSES):
            logits = model(sample(model, tokens, number).to(device))
            out.outputs[f"pass {number}"] = logits.cpu()
            tick()


def run_training(
    model: Decoder, device: torch.device, tokens: int, steps: int, out: RunResults, tick: Callable[[], object]
) -> None:
    """Train the LoRA adapters with AdamW, and store losses, gradients of each step and trained adapters in
    ``out``.

    The model must already have adapters (`add_lora`). ``tick`` is called after each step.
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
    """Add adapters to the model, with the same values at every call."""
    add_lora(model, RANK, SEED)


def sample(model: Decoder, tokens: int, number: int) -> Tensor:
    """Return token numbers of shape (1, tokens), seeded by ``number``."""
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randint(model.config.vocabulary, (1, tokens), generator=generator)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that host times include its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Free cached device memory and reset the peak, so that the next run's peak is measured alone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Make torch compute on one CPU thread inside the ``with`` block, if ``device`` is the CPU.

    One thread is somewhat slower on an idle machine. On a machine with shared cores, several threads must
    wait for each other at the end of every small operator, which is much slower (measured: 20 times).
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
    """Make torch use deterministic kernels inside the ``with`` block.

    The fused backward of attention adds in varying order on a GPU; the unfused one (SDPBackend.MATH) does
    not. cuBLAS reads the variable CUBLAS_WORKSPACE_CONFIG at its first use in the process, so the variable
    must be set before that.
    """
    settings: Any = torch.utils.deterministic  # typed Any because its attribute is created at run time
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = settings.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # filling would only cost time
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
