"""Classes `Home` and `ManagedUnit`, and protocol `Runtime`: the objects that managed tensors refer to.

A managed tensor is a weight of the model whose class Carom replaced (see managed_tensor.py and
elsewhere_tensor.py). It refers to a `Home`, which reads and writes the tensor's value while the tensor is not
in a slot. A slot is the device memory that holds a unit (a group of tensors) while the unit is used. The
homes of one unit belong to a `ManagedUnit`. A `ManagedUnit` belongs to a `Runtime`, which copies the unit
into slots.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..common.errors import UnsupportedError
from .gradient_hooks import delay_hooks
from .units import Entry, Unit


class SlotRange(Protocol):
    """The address range of the device memory that holds slots, and the conversion of slot views to autograd
    handles.

    ``low``: the first address.
    ``high``: the address after the last byte.
    ``mapped``: (first address, address after the last byte) of each unit that kernels read from host memory,
    because the slots had no room for it.
    """

    low: int
    high: int
    mapped: list[tuple[int, int]]

    def handle(self, saved: torch.Tensor) -> Any:
        """Return the `managed_tensor.Handle` that autograd saves instead of ``saved``, a view of a slot."""


class Runtime(SlotRange, Protocol):
    """The interface through which managed tensors use the streamer, the object that copies units into slots."""

    closed: bool  # whether the session is closed, so that no unit can be fetched
    lock: threading.RLock  # held while units are fetched

    @property
    def device(self) -> torch.device:
        """The device that the module computes on."""

    def computing(self) -> bool:
        """Return whether this thread is in a step: in a forward of the root module, a unit's forward, or a
        backward pass.
        """

    def in_forward(self) -> bool:
        """Return whether this thread is in a forward of the root module or of a unit."""

    def run_operator(self, func: Callable, args: tuple, kwargs: dict, found: list[Any]) -> Any:
        """Run the operator ``func`` with slot views in place of ``found``, the managed tensors among its
        arguments.
        """

    def addressed(self, tensor: Any) -> torch.Tensor:
        """Return the slot view of ``tensor``, a managed tensor, for code that reads it by its address. The slot stays
        in use until the step's forward or backward ends.
        """


class ManagedUnit:
    """A unit whose tensors are managed by a session.

    ``homes``: one `Home` for each of the unit's entries.
    ``epoch``: a number that is incremented when host bytes may have changed without torch raising a tensor's
    version counter.
    ``trainable``: whether any of the tensors requires a gradient.
    ``in_graphs``: a flag that tells whether an autograd graph still needs the unit.
    """

    def __init__(self, unit: Unit, runtime: Runtime) -> None:
        self.unit, self.runtime = unit, runtime
        self.homes: list[Home] = []
        self.epoch = 0
        self.trainable = False
        self.in_graphs = InGraphs()

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.unit.name

    @property
    def nbytes(self) -> int:
        """Bytes of the unit in a slot, alignment padding included."""
        return self.unit.nbytes

    def version(self) -> int:
        """Return a number that changes whenever `epoch` or the version counter of a host tensor rises."""
        version = self.epoch
        for home in self.homes:
            version += home.host._version
        return version

    def forget(self) -> None:
        """Drop the references to the model's tensors and modules. Called after the session was closed."""
        for home in self.homes:
            home.forget()
        self.homes.clear()
        self.unit.modules, self.unit.entries = [], []

    def note_trainable(self) -> None:
        """Set `trainable` to whether the weight of any home requires a gradient."""
        self.trainable = any(home.trainable for home in self.homes)


class Home:
    """The object that reads and writes the value of one managed tensor while the value is not in a slot.

    ``host``: the tensor in host memory that holds the value.
    ``tensor``: the model's own Parameter or buffer object.
    ``keeps_writes``: whether values that the model writes to the weight during a step can be stored.
    ``has_bytes``: whether ``tensor`` has its value in its own storage.
    """

    __slots__ = ("unit", "runtime", "entry", "host", "tensor", "trainable", "_no_swap")
    keeps_writes = True
    has_bytes = True

    def __init__(self, unit: ManagedUnit, entry: Entry, host: torch.Tensor) -> None:
        self.unit, self.runtime, self.entry, self.host = unit, unit.runtime, entry, host
        self.tensor = entry.tensor
        self.trainable = entry.trainable
        # This weak reference makes torch.utils.swap_tensors refuse the tensor.
        self._no_swap = weakref.ref(self.tensor)

    def forget(self) -> None:
        """Drop the reference to the model's tensor, which may refer to this object."""
        self.tensor = self.host
        self.entry = replace(self.entry, tensor=self.host, sites=[])

    def value(self) -> torch.Tensor:
        """Return the tensor that represents the weight in a state dict."""
        return self.host.detach()

    def read(self) -> torch.Tensor:
        """Return the weight's present value as a CPU tensor that the caller must not write to."""
        return self.host

    def keep(self, value: torch.Tensor) -> None:
        """Store ``value``, a CPU tensor with the value that the model wrote to the weight's slot."""
        self.host.copy_(value)

    def dress(self, view: torch.Tensor) -> None:
        """Copy the Python attributes that the model set on the weight to ``view``, which represents the
        weight in a slot.
        """
        view.__dict__.update(
            {name: value for name, value in self.tensor.__dict__.items() if name != "_carom"}
        )

    def set_trainable(self, trainable: bool) -> None:
        """Record a change of the weight's ``requires_grad``.

        From the next run of the unit's forward on, gradients of the weight are copied to the host if
        ``trainable``, and are not copied otherwise.
        """
        self.trainable = trainable
        if trainable:
            delay_hooks(self.tensor)
        self.unit.note_trainable()

    def set_data(self, new: torch.Tensor) -> None:
        """Perform ``parameter.data = new``: overwrite the weight's host bytes in place.

        Raises UnsupportedError for another shape, dtype or device, and while an autograd graph needs the
        present value.
        """
        runtime = self.runtime
        device = runtime.device
        if (
            new.device == device
            and device.type != "cpu"
            and (new.shape, new.dtype) != (self.host.shape, self.host.dtype)
        ):
            return  # the .to() of a submodule moved and converted the weight, which stays streamed
        if new.device.type not in ("cpu", device.type) or (new.shape, new.dtype) != (
            self.host.shape,
            self.host.dtype,
        ):
            raise UnsupportedError(
                f"{self.entry.name} is streamed as {self.host.dtype} {tuple(self.host.shape)}; it cannot become "
                f"{new.dtype} {tuple(new.shape)} on {new.device} while attached: close the session first"
            )
        if getattr(new, "_carom", None) is self or runtime.low <= new.data_ptr() < runtime.high:
            # The .to() of a submodule moved the weight to the compute device. The weight stays streamed.
            return
        self.refuse_in_graphs()
        self.unit.epoch += 1
        if new.device.type != "cpu":
            new = new.cpu()
        if new.data_ptr() != self.host.data_ptr():
            with torch.no_grad():
                self.host.copy_(new)

    def refuse_in_graphs(self) -> None:
        """Raise UnsupportedError while an autograd graph needs the value that the caller is about to replace."""
        if self.unit.in_graphs:
            raise UnsupportedError(
                f"{self.entry.name}.data is replaced while a graph that was made before still needs the old value: call "
                "backward() first, drop what keeps the graph, or run that forward under torch.no_grad()"
            )


class InGraphs:
    """A flag that is true while any autograd graph still needs a unit in backward.

    Every handle that such a graph saves holds a reference to one token object. The flag is a weak reference
    to the token.
    """

    __slots__ = ("_reference",)

    def __init__(self) -> None:
        self._reference: Callable[[], Any] = _nothing

    def token(self) -> Any:
        """Return the token object. The flag is true as long as any reference to the token exists."""
        token = self._reference()
        if token is None:
            token = _Token()
            self._reference = weakref.ref(token)
        return token

    def __bool__(self) -> bool:
        return self._reference() is not None


class _Token:
    """An object without state whose only purpose is to be referenced."""

    __slots__ = ("__weakref__",)


def _nothing() -> None:
    """Return None, as a weak reference to a dead object does."""
