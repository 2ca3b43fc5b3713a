"""Where a session stands in its module: at the root from the first layout to the last; in front of units and of state
dicts for as long as a layout lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from . import decide, hooks
from .disk_streamer import DiskStreamer
from .rerun import Reruns
from .streamed import Owner, Streamed
from .streamer import Streamer

if TYPE_CHECKING:
    from .session import Session


class InFront:
    """What a session put into its module's tree, to be taken out again."""

    def __init__(self, session: Session) -> None:
        self._session, self._module = session, session.module
        self._root = hooks.Wrapped()
        self._units = hooks.Wrapped()
        self._state: list[Any] = []

    def at_the_root(self) -> None:
        """See the root's forward, also while units are laid out anew or parked: a thread that calls it then waits."""
        if self._root:
            return
        self._root.forward(self._module, hooks.root_forward(self._session), lasts=True)
        self._root.attribute(self._module, "_apply", hooks.Apply(self._session))

    def of_units(self, streamer: Streamer, streamed: list[Streamed], reruns: Reruns | None) -> None:
        """See the forwards of ``streamed`` units, of residents that may have to come or go, and what state dicts hold."""
        if not hooks.stands_first(self._module):  # somebody stepped in front of it: units go there, then it
            self._root.undo()
        for unit in streamed:
            for module in unit.unit.modules:
                make = hooks.unit_forward(unit)
                if reruns is not None:
                    make = reruns.around(make, module, unit)
                self._units.forward(module, make)
        if reruns is not None:
            reruns.stand_in_front(self._module)
        if isinstance(streamer, DiskStreamer) and not decide.compiled(self._module):
            streamer.residents.stand_in_front()
        self.at_the_root()
        true = hooks.TrueValues(streamer, _names(self._module, streamed))
        self._state = [
            self._module.register_state_dict_pre_hook(true.begin),
            self._module._register_state_dict_hook(true),
        ]

    def step_aside(self) -> None:
        """Stand at the root alone. Idempotent."""
        self._units.undo()
        for hook in self._state:
            hook.remove()

    def leave(self) -> None:
        """Calls of the module are nobody else's. Idempotent."""
        self._root.undo()


def _names(root: nn.Module, streamed: list[Streamed]) -> dict[str, Owner]:
    """Every streamed tensor by each name it has in the tree."""
    paths = {id(module): path for path, module in root.named_modules()}
    return {
        f"{paths[id(site.module)]}.{site.name}".lstrip("."): owner
        for unit in streamed
        for owner in unit.owners
        for site in owner.entry.sites
        if id(site.module) in paths
    }
