"""`RootHooks`: the wrapped forwards and hooks that a session puts into its module tree, and their removal."""

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
    """The wrapped forwards and hooks in a session's module tree.

    The root (the module that the session streams) stays wrapped from the first layout until the session
    closes. The forwards of units and the state dict are wrapped while a layout is in effect. `listen` must be
    called before the other methods.
    """

    def __init__(self, root: nn.Module) -> None:
        self._module = root
        self._root = Wrapped()
        self._units = Wrapped()
        self._state: list[Any] = []
        self._owner: object = None

    def listen(self, listener: PassListener, movable: Movable, owner: object) -> None:
        """Set the objects to call: ``listener`` around each pass, and ``movable`` when the module is moved to
        another device.

        ``owner`` is referenced as long as the root is wrapped, so that a session lives as long as its module.
        """
        self._listener, self._movable, self._owner = listener, movable, owner

    def wrap_root(self) -> None:
        """Wrap the root's forward and ``_apply``, unless they are wrapped already.

        The root stays wrapped while a layout is replaced or the session is parked. So a thread that calls the
        root meanwhile waits for the layout.
        """
        if self._root:
            return
        self._root.forward(self._module, root_forward(self._listener), lasts=True)
        self._root.attribute(self._module, "_apply", Apply(self._movable))

    def wrap_units(self, streamer: Streamer, arriving: bool) -> None:
        """Wrap the forwards of streamed units and of the root, and register state dict hooks.

        ``arriving``: whether to wrap also modules whose weights stay on the device but have not been read
        from their file yet.
        """
        if not stands_first(
            self._module
        ):  # other code has wrapped the root meanwhile: wrap the units first, and then the root again
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
        """Remove all wrappers and hooks of a layout. The root's forward stays wrapped. Idempotent."""
        self._units.undo()
        for hook in self._state:
            hook.remove()

    def remove(self) -> None:
        """Remove the session's wrappers from the root's forward and ``_apply``. Idempotent."""
        self._root.undo()
        self._owner = None


def _names(root: nn.Module, streamed: list[StreamedUnit]) -> dict[str, Home]:
    """Return the homes (the objects that read host values) of all streamed tensors, by every name of the
    tensor in ``root``.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    return {
        f"{paths[id(site.module)]}.{site.name}".lstrip("."): home
        for unit in streamed
        for home in unit.homes
        for site in home.entry.sites
        if id(site.module) in paths
    }
