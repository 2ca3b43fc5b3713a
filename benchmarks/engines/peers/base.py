"""The interface between the worker and an engine: availability, attaching, one inference, one training step,
detaching.
"""

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
    """Raised if the engine is not installed or cannot run the case; the message says which."""


def mse(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of the benchmark, computed in float32."""
    return F.mse_loss(out.float(), target.float())


class Attached:
    """A model with an engine attached. Engines that run a plain module need no subclass."""

    def __init__(self, model: Dit, case: Case, device: torch.device) -> None:
        self.model = model
        self.case = case
        self.device = device
        # Collected only now, because an engine may replace parameters when it is attached.
        self.adapters = model.adapters()
        self.optimizer: torch.optim.Optimizer | None = None
        if case.mode == "train":
            self.optimizer = torch.optim.AdamW([p for _, p in self.adapters], lr=1e-4, fused=True)

    def infer(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Run one forward without gradients and return the output."""
        with torch.no_grad():
            return self.model(x, c)

    def gradients(self, x: torch.Tensor, c: torch.Tensor, target: torch.Tensor, mark: Mark) -> torch.Tensor:
        """Run forward and backward, leave the gradients in the adapters, and return the loss."""
        loss = mse(self.model(x, c), target)
        mark("forward")
        loss.backward()
        mark("backward")
        return loss.detach()

    def train(self, x: torch.Tensor, c: torch.Tensor, target: torch.Tensor, mark: Mark) -> torch.Tensor:
        """Run one whole training step and return the loss."""
        assert self.optimizer is not None
        loss = self.gradients(x, c, target, mark)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return loss

    def profile(self, step: Callable[[], None]) -> None:
        """Let the engine measure ``step`` for its own report; engines without a report need not."""

    def report(self) -> dict[str, Any] | None:
        """Return the engine's own figures, or None if the engine has none."""
        return None

    def close(self) -> None:
        """Detach the engine and free its memory as far as possible."""


class Engine:
    """An offloading engine. ``name``: its name on the command line."""

    name = ""

    def unavailable(self, case: Case) -> str | None:
        """Return why the engine cannot run `case` here, or None.

        This imports nothing heavy, so that the parent process can call it.
        """
        return None

    def version(self) -> str | None:
        """Return the version or commit of the peer, or None if unknown."""
        return None

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        """Attach the engine to `model`, which is on the host. Raises Skip if the engine cannot run the case."""
        raise NotImplementedError


def move_outside_blocks(model: Dit, device: torch.device) -> None:
    """Move the weights outside the blocks, and the adapters, to `device`; Parameter objects stay the same."""
    model.embed.to(device)
    model.head.to(device)
    for _, parameter in model.adapters():
        parameter.data = parameter.data.to(device)


def even_blocks(depth: int, count: int) -> list[int]:
    """Return `count` of `depth` block numbers, evenly spaced."""
    return sorted({(2 * i + 1) * depth // (2 * count) for i in range(count)}) if count else []


def find_checkout(variable: str, relative: str) -> Path | None:
    """Return the path of the file `relative` in the checkout that environment variable `variable` names; None if
    missing.
    """
    root = os.environ.get(variable)
    path = Path(root) / relative if root else None
    return path if path is not None and path.is_file() else None


def checkout_commit(variable: str) -> str | None:
    """Return the commit of the checkout that `variable` names, from the file COMMIT in it; None if there is no such
    file.
    """
    path = find_checkout(variable, "COMMIT")
    return path.read_text("utf-8").strip()[:40] if path else None


def load_file(name: str, path: Path, package: bool = False) -> ModuleType:
    """Import one file by its path and return the module.

    The package around the file is not imported, because its imports may be heavy. Raises Skip if the file cannot be
    imported.
    """
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
    """Convert the frozen parameters of `module` to buffers, because some engines compute a gradient for every
    parameter.
    """
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                del owner._parameters[name]
                owner.register_buffer(name, parameter.data)
