"""`RootHooks`: the wrapped forwards and hooks that a session puts into its module tree, and their removal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ..model.home import Home
from ..model.interpose import Wrapped, stands_first
from ..model.quantized import FlattenedWeights
from ..model.unit_weights import layers_of, readers_of, with_weights
from ..model.units import Unit
from .root_apply import Apply, Movable
from .root_forward import PartForward, PassListener, TrueValues, part_pass, root_forward
from .streamer import Streamer
from .unit import StreamedUnit
from .unit_forward import UnitForward


class RootHooks:
    """The wrapped forwards and hooks in a session's module tree.

    The root (the module that the session streams) stays wrapped from the first layout until the session
    closes. The forwards of units and the state dict are wrapped while a layout is in effect. Forwards of other modules
    are wrapped so that a call outside the root's forward is a pass. `listen` must be called before the other methods.
    """

    def __init__(self, root: nn.Module) -> None:
        self._module = root
        self._root = Wrapped()
        self._units = Wrapped()
        # Wrappers of earlier layouts, by module. The next layout sets the same wrappers again, because code that
        # torch.compile compiled is valid only for these.
        self._unit_wrappers: dict[nn.Module, tuple[UnitForward, Any]] = {}
        self._part_wrappers: dict[nn.Module, tuple[PartForward, Any]] = {}
        self._state: list[Any] = []

    def listen(self, listener: PassListener, movable: Movable) -> None:
        """Set the objects to call: ``listener`` around each pass, and ``movable`` when the module is moved to
        another device.

        The wrapped root refers to them, so the parts of a session live as long as its module.
        """
        self._listener, self._movable = listener, movable

    def wrap_root(self) -> None:
        """Wrap the root's forward and ``_apply``, unless they are wrapped already.

        The root stays wrapped while a layout is replaced or the session is parked. So a thread that calls the
        root meanwhile waits for the layout.
        """
        if self._root:
            return
        self._root.forward(self._module, root_forward(self._listener), lasts=True)
        self._root.attribute(self._module, "_apply", Apply(self._movable))

    def follow_root(self) -> None:
        """Wrap the root's forward again if other code has wrapped or replaced it since. Called at a pass of a part: the
        root's forward may run without the session's wrapper (`Accelerator.unwrap_model` removes wrappers that were put
        there later than its own).
        """
        if not stands_first(self._module):
            self._root.undo()
            self.wrap_root()

    def wrap_units(
        self,
        streamer: Streamer,
        arriving: Callable[[], None] | None,
        units: Sequence[Unit] = (),
        quantized: FlattenedWeights | None = None,
        residents: Sequence[Unit] = (),
    ) -> None:
        """Wrap the forwards of streamed units and of the root, and register state dict hooks.

        ``arriving``: wraps modules whose weights stay on the device but have not been read from their file yet, None
        if there are none.
        ``units``: the units of the carving. The outermost modules below the root that contain units are wrapped too.
        Units that stay on the device are wrapped until their first use only, if ``arriving`` or ``residents`` says so.
        ``quantized``: the module's quantised weights.
        ``residents``: units that stay on the device, of which the first uses are to be recorded.
        """
        if not stands_first(self._module):
            # Other code has wrapped the root meanwhile: wrap the units first, and then the root again.
            self._root.undo()
        for unit in streamer.units:
            layers = [] if quantized is None else layers_of(unit.unit, quantized)
            readers = readers_of(unit.unit, layers, self._module)
            for index, module in enumerate((*unit.unit.modules, *readers)):
                if any(layer.module is not module for layer in layers):
                    self._units.forward(module, with_weights(layers))
                place = (type(self._module).__qualname__, unit.unit.name, index)
                self._wrap_unit(module, unit, streamer, place)
        inner = {id(module) for unit in units for module in unit.modules}
        for module in _outermost(self._module):
            if id(module) not in inner and not inner.isdisjoint(map(id, module.modules())):
                self._wrap_part(module, streamer)
        self._forget_removed()
        if arriving is not None:
            arriving()
        self.wrap_root()
        true = TrueValues(streamer, _names(self._module, streamer.units))
        self._state = [
            self._module.register_state_dict_pre_hook(true.begin),
            self._module._register_state_dict_hook(true),
        ]
        streamer.watch(residents, self._module)

    def wrap_parked(self) -> None:
        """Wrap the root's forward and the forwards of all modules below it, for a parked session: the first call of any
        of them moves the weights to the device again.
        """
        for module in self._module.modules():
            if module is not self._module and _has_forward(module):
                self._wrap_part(module, None)
        self._forget_removed()
        self.wrap_root()

    def _wrap_unit(self, module: nn.Module, unit: StreamedUnit, streamer: Streamer, place: tuple) -> None:
        """Wrap the forward of ``module``, one of the modules of ``unit``. ``place``: as in `UnitForward`."""
        wrapper, front = self._unit_wrappers.get(module) or (UnitForward(place), None)
        wrapper.connect(unit, streamer)
        as_pass = part_pass(self._listener, module, wrapper)
        front = self._units.forward(module, lambda inner: wrapper.wrap(inner, as_pass), earlier=front)
        self._unit_wrappers[module] = wrapper, front

    def _wrap_part(self, module: nn.Module, streamer: Streamer | None) -> None:
        """Wrap the forward of a module below the root that is no part of a streamed unit."""
        wrapper, front = self._part_wrappers.get(module) or (PartForward(), None)
        wrapper.connect(streamer)
        as_pass = part_pass(self._listener, module, wrapper)
        front = self._units.forward(
            module, lambda inner: wrapper.wrap(inner, as_pass), traced=True, earlier=front
        )
        self._part_wrappers[module] = wrapper, front

    def _forget_removed(self) -> None:
        """Forget the wrappers of modules that are no longer in the tree, so that these modules can be freed."""
        present = set(self._module.modules())
        for wrappers in (self._unit_wrappers, self._part_wrappers):
            for module in wrappers.keys() - present:
                del wrappers[module]

    def unwrap_units(self) -> None:
        """Remove all wrappers and hooks, except that the root's forward stays wrapped. Idempotent."""
        self._units.undo()
        for unit, _ in self._unit_wrappers.values():
            unit.disconnect()
        for part, _ in self._part_wrappers.values():
            part.connect(None)
        for hook in self._state:
            hook.remove()

    def remove(self) -> None:
        """Remove all of the session's wrappers and hooks. Idempotent."""
        self.unwrap_units()
        self._root.undo()
        self._unit_wrappers, self._part_wrappers = {}, {}

    def forget(self) -> None:
        """Drop the references to the module and to the objects that were called. Called after `remove`."""
        self._state = []
        del self._module, self._listener, self._movable


def _has_forward(module: nn.Module) -> bool:
    """Return whether the class of ``module`` has a forward. Containers such as ModuleList have none."""
    return type(module).forward is not nn.Module.forward


def _outermost(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules below ``root`` that have a forward and lie in no other such module."""
    for child in root.children():
        if _has_forward(child):
            yield child
        else:
            yield from _outermost(child)


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
