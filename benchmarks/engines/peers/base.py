"""What the worker asks of an engine: can it run, attach it, one inference, one training step, detach."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..case import Case
from ..dit import Dit

Mark = Callable[[str], None]


class Skip(Exception):
    """The engine is not installed, or cannot run the case; the message says which."""


def mse(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of the bench, in float32."""
    return F.mse_loss(out.float(), target.float())


class Attached:
    """A model with an engine on it. Engines that run a plain module need nothing but this."""

    def __init__(self, model: Dit, case: Case, device: torch.device) -> None:
        self.model = model
        self.case = case
        self.device = device
        # Taken now: an engine may have replaced parameters while it attached itself.
        self.adapters = model.adapters()
        self.optimizer: torch.optim.Optimizer | None = None
        if case.mode == "train":
            self.optimizer = torch.optim.AdamW([p for _, p in self.adapters], lr=1e-4, fused=True)

    def infer(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """One forward without gradients."""
        with torch.no_grad():
            return self.model(x, c)

    def gradients(self, x: torch.Tensor, c: torch.Tensor, target: torch.Tensor, mark: Mark) -> torch.Tensor:
        """Forward and backward; leaves the gradients in the adapters, returns the loss."""
        loss = mse(self.model(x, c), target)
        mark("forward")
        loss.backward()
        mark("backward")
        return loss.detach()

    def train(self, x: torch.Tensor, c: torch.Tensor, target: torch.Tensor, mark: Mark) -> torch.Tensor:
        """One whole training step; returns the loss."""
        assert self.optimizer is not None
        loss = self.gradients(x, c, target, mark)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return loss

    def report(self) -> dict[str, Any] | None:
        """The engine's own figures, where it keeps any."""
        return None

    def close(self) -> None:
        """Detach and free what can be freed."""


class Engine:
    """`name` as the command line has it."""

    name = ""

    def unavailable(self, case: Case) -> str | None:
        """Why it cannot run `case` here, or None. Imports nothing heavy, so that the parent may ask."""
        return None

    def version(self) -> str | None:
        """The version or commit of the peer, where it says."""
        return None

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        """Put the engine on `model` (on the host). Raises Skip where it turns out not to be able to."""
        raise NotImplementedError


def move_outside_blocks(model: Dit, device: torch.device) -> None:
    """Move what no block owns, and the adapters, to `device`; Parameter objects stay."""
    model.embed.to(device)
    model.head.to(device)
    for _, parameter in model.adapters():
        parameter.data = parameter.data.to(device)


def even_blocks(depth: int, count: int) -> list[int]:
    """`count` of `depth` block numbers, evenly spread."""
    return sorted({(2 * i + 1) * depth // (2 * count) for i in range(count)}) if count else []


def find_checkout(variable: str, relative: str) -> Path | None:
    """The file `relative` of the checkout that environment `variable` names, or None."""
    root = os.environ.get(variable)
    path = Path(root) / relative if root else None
    return path if path is not None and path.is_file() else None


def checkout_commit(variable: str) -> str | None:
    """The commit of such a checkout, from its COMMIT file where a copy has one."""
    path = find_checkout(variable, "COMMIT")
    return path.read_text("utf-8").strip()[:40] if path else None


def load_file(name: str, path: Path, package: bool = False) -> ModuleType:
    """Import one file by its path, without the package around it, whose imports may be heavy."""
    import sys

    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if package else None
    )
    if spec is None or spec.loader is None:
        raise Skip(f"{path.name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise Skip(f"{path.name} does not import: {type(error).__name__}: {error}") from error
    return module


def frozen_to_buffers(module: nn.Module) -> None:
    """Turn frozen parameters of `module` into buffers: engines that differentiate every parameter leave them be."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                del owner._parameters[name]
                owner.register_buffer(name, parameter.data)
