"""The engine ai-toolkit: its `MemoryManager` (`layer_offloading: true`), from the checkout that AI_TOOLKIT_PATH
names.

Only toolkit/memory_management is imported, because the package around it imports the whole trainer. The peer chooses
its resident linears at random; the choice is seeded here.
"""

from __future__ import annotations

import random

import torch

from ..case import Case
from ..dit import Dit
from .base import Attached, Engine, Skip, checkout_commit, find_checkout, load_file, move_outside_blocks

_VARIABLE = "AI_TOOLKIT_PATH"
_FILE = "toolkit/memory_management/__init__.py"


class AiToolkit(Engine):
    name = "ai-toolkit"

    def unavailable(self, case: Case) -> str | None:
        if find_checkout(_VARIABLE, _FILE) is None:
            return f"set {_VARIABLE} to a checkout that has {_FILE}"
        return None

    def version(self) -> str | None:
        return checkout_commit(_VARIABLE)

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        path = find_checkout(_VARIABLE, _FILE)
        if path is None:
            raise Skip(self.unavailable(case) or "")
        manager = load_file("ai_toolkit_memory_management", path, package=True).MemoryManager
        random.seed(case.seed)
        # As in its trainers: attach the transformer without embeddings and head, then move other weights with `.to`.
        manager.attach(
            model,
            device,
            offload_percent=case.streamed / case.depth,
            ignore_modules=[model.embed, model.head],
        )
        model.to(device)
        move_outside_blocks(model, device)
        return Attached(model, case, device)


ENGINE = AiToolkit()
