"""`RootHooks`: what a session puts into its module's tree: wrapped forwards and hooks, to be taken out again."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..model.home import Home
from ..model.interpose import Wrapped, stands_first
from ..streaming.streamer import Streamer
from ..streaming.unit import StreamedUnit
from ..streaming.unit_forward import unit_forward
from .root_forward import Apply, Movable, PassListener, TrueValues, root_forward


class RootHooks:
    """Wraps the root from the first layout to the last; units, residents and state dicts for as long as a layout lasts.

    `listen` comes first. ``owner``: kept alive for as long as the root is wrapped, so that a session lives as long as the
    module that it streams.
    """

    def __init__(self, root: nn.Module) -> None:
        self._module = root
        self._root = Wrapped()
        self._units = Wrapped()
        self._state: list[Any] = []
        self._owner: object = None

    def listen(self, listener: PassListener, movable: Movable, owner: object) -> None:
        """Tell ``listener`` about passes and ``movable`` about moves of the module."""
        self._listener, self._movable, self._owner = listener, movable, owner

    def wrap_root(self) -> None:
        """Wrap the root's forward, also while units are laid out anew or parked: a thread that calls it then waits."""
        if self._root:
            return
        self._root.forward(self._module, root_forward(self._listener), lasts=True)
        self._root.attribute(self._module, "_apply", Apply(self._movable))

    def wrap_units(self, streamer: Streamer, arriving: bool) -> None:
        """Wrap the forwards of streamed units, and (``arriving``) those of residents that are still in their file."""
        if not stands_first(
            self._module
        ):  # somebody wrapped the root since: units are wrapped first, then the root
            self._root.undo()
        for unit in streamer.units:
            for module in unit.unit.modules:
                self._units.forward(module, unit_forward(unit, streamer.runs))
        if arriving:
            streamer.tier.wrap_arriving()
        self.wrap_root()
        true = TrueValues(streamer, _names(self._module, streamer.units))
        self._state = [
            self._module.register_state_dict_pre_hook(true.begin),
            self._module._register_state_dict_hook(true),
        ]

    def unwrap_units(self) -> None:
        """Wrap the root alone. Idempotent."""
        self._units.undo()
        for hook in self._state:
            hook.remove()

    def remove(self) -> None:
        """Remove our wrapper from the root's forward and ``_apply``. Idempotent."""
        self._root.undo()
        self._owner = None


def _names(root: nn.Module, streamed: list[StreamedUnit]) -> dict[str, Home]:
    """Return every streamed tensor by each name that the tensor has in the tree."""
    paths = {id(module): path for path, module in root.named_modules()}
    return {
        f"{paths[id(site.module)]}.{site.name}".lstrip("."): home
        for unit in streamed
        for home in unit.homes
        for site in home.entry.sites
        if id(site.module) in paths
    }
