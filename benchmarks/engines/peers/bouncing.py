"""The engine Carom, used through its public API only."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..case import Case
from ..dit import Dit
from .base import Attached, Engine, Skip

_PACKAGE = __package__.rsplit(".", 3)[0]


class _Attached(Attached):
    def __init__(self, model: Dit, case: Case, device: torch.device, session: Any) -> None:
        super().__init__(model, case, device)
        self.session = session

    def profile(self, step: Callable[[], None]) -> None:
        self.session.profile_step(step)

    def report(self) -> dict[str, Any]:
        return self.session.report().to_dict()

    def close(self) -> None:
        self.session.close()


class Carom(Engine):
    name = "carom"

    def unavailable(self, case: Case) -> str | None:
        package = importlib.import_module(_PACKAGE)
        return None if hasattr(package, "stream") else "this checkout has no engine yet (no carom.stream)"

    def version(self) -> str | None:
        return getattr(importlib.import_module(_PACKAGE), "__version__", None)

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        reason = self.unavailable(case)
        if reason:
            raise Skip(reason)
        session = importlib.import_module(_PACKAGE).stream(
            model,
            device=device,
            vram=case.budget_bytes,
            codec=case.codec,
            granularity=case.granularity,
        )
        return _Attached(model, case, device, session)


ENGINE = Carom()
