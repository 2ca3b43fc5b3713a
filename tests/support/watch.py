"""Records of what sessions do, kept while a test runs. Only this file names the methods that do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from carom.core.device.slot import SlotState
from carom.core.session.layout_manager import LayoutManager
from carom.core.streaming.run import Run


def watch_changes(monkeypatch: pytest.MonkeyPatch, note: Callable[[], Any] = lambda: 1) -> list[Any]:
    """Return a list that gets ``note()`` whenever a session begins to arrange its weights anew."""
    found: list[Any] = []
    change = LayoutManager.change

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(note())
        return change(self, *arguments, **options)

    monkeypatch.setattr(LayoutManager, "change", noted)
    return found


def watch_uses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that gets ("fetch", name) when the copy of a unit to a slot is issued, and ("end", name) when a use
    of the slot ends.
    """
    found: list[tuple[str, str]] = []
    copy, release = Run.copy_unit, Run.release

    def copies(self: Any, slot: Any, *arguments: Any) -> Any:
        if slot.now.state is SlotState.FILLING:
            found.append(("fetch", slot.unit.name))
        return copy(self, slot, *arguments)

    def ends(self: Any, slot: Any, *arguments: Any) -> Any:
        found.append(("end", slot.unit.name))
        return release(self, slot, *arguments)

    monkeypatch.setattr(Run, "copy_unit", copies)
    monkeypatch.setattr(Run, "release", ends)
    return found
