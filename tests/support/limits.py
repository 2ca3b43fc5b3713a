"""Limits of sizes, set so that small models of tests take the paths of large ones."""

from __future__ import annotations

import pytest
from carom.core.placement import packed_tensor, packer, residents


def pack_small_weights(monkeypatch: pytest.MonkeyPatch, least: int = 256, ratio: float | None = 4.0) -> None:
    """Let weights of ``least`` bytes or more be packed, up to ``ratio`` times their bytes (None: as in use)."""
    monkeypatch.setattr(packer, "LEAST", least)
    if ratio is not None:
        monkeypatch.setattr(packed_tensor, "MAX_PACKED_RATIO", ratio)


def units_apart_from(monkeypatch: pytest.MonkeyPatch, nbytes: int = 1) -> None:
    """Let units of ``nbytes`` or more have an allocation of their own on the device, as those of real models do."""
    monkeypatch.setattr(residents, "SMALL_UNIT", nbytes)
