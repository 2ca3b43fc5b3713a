"""`choose`: decides how a job's `offload` mode runs on its device. Each fallback is recorded with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.common.errors import CaromError
from . import device_trial
from .options import Policy

PACKED = "codec: lossless unpacks into torch's memory"
ALONE = "the aimdo pool alone keeps the weights, and nothing streams but what it gives up"
STOCK = "ai-toolkit's own layer offloading does it"


@dataclass(frozen=True)
class Choice:
    """The decision for a job.

    ``pool``: "torch", "aimdo", or "" if Carom does not work on the device; ``alone``: whether all weights go to
    comfy-aimdo's pool whole, and only the pool evicts them; ``lines``: one line for the job's log for each fallback.
    """

    pool: str = "torch"
    alone: bool = False
    lines: tuple[str, ...] = ()


def choose(policy: Policy, device: torch.device) -> Choice:
    """Return the choice for ``policy`` on ``device``.

    Mode "bouncing" needs no trial. For the modes "aimdo" and "auto", trials on the device show what works.
    """
    if policy.mode == "bouncing":
        return Choice()
    down: list[str] = []

    def step(reason: str, instead: str) -> None:
        down.append(f"offload: {policy.mode}: {reason}; {instead}")

    reason = PACKED if policy.codec == "lossless" else _why_not(lambda: device_trial.works_in_pool(device))
    if reason is None:
        return Choice("aimdo")
    step(f"no aimdo pool here ({reason})", "bouncing with torch's allocator takes its place")
    if policy.mode == "aimdo":
        return Choice("torch", lines=tuple(down))
    reason = _why_not(lambda: device_trial.works(device))
    if reason is None:
        return Choice("torch", lines=tuple(down))
    why = f"bouncing does not work here ({reason})"
    if (
        policy.codec != "lossless"
        and _why_not(lambda: device_trial.works_in_pool(device, streaming=False)) is None
    ):
        step(why, ALONE)
        return Choice("aimdo", alone=True, lines=tuple(down))
    step(why, STOCK)
    return Choice("", lines=tuple(down))


def _why_not(attempt: Callable[[], None]) -> str | None:
    """Call ``attempt`` and return the reason of its failure, None if it succeeds."""
    try:
        attempt()
    except (CaromError, RuntimeError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None
