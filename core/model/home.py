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
from operator import attrgetter
from typing import Any, Protocol

import torch

from ..common.errors import UnsupportedError
from .gradient_hooks import delay_hooks
from .units import Entry, Unit, is_dense


class SlotRange(Protocol):
    """The address range of the device memory that holds slots, and the conversion of slot views to autograd
    handles.

    ``low``: the first address.
    ``high``: the address after the last byte.
    """

    low: int
    high: int

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

    def forget_views(self, unit: ManagedUnit) -> None:
        """Forget the views of slots that were made for ``unit``, because the strides of one of its weights changed."""

    def finish_copies(self) -> None:
        """Wait until no copy reads host memory."""

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a copy of it in host memory if it is on a device."""

    def addressed(self, tensor: Any) -> torch.Tensor:
        """Return the slot view of ``tensor``, a managed tensor, for code that reads it by its address. The slot stays
        in use until the step's forward or backward ends.
        """


_version_of = attrgetter("host._version")


class ManagedUnit:
    """A unit whose tensors are managed by a session.

    ``index``: the unit's position among the streamed units of its layout.
    ``homes``: one `Home` for each of the unit's entries.
    ``epoch``: a number that is incremented when host bytes may have changed without torch raising a tensor's
    version counter.
    ``trainable``: whether any of the tensors requires a gradient.
    ``in_graphs``: a flag that tells whether an autograd graph still needs the unit.
    ``assigned``: the homes of weights whose ``.data`` the program replaced, each with the tensor that was assigned.
    ``adopted``: those of them whose bytes are in the assigned tensor's memory, each with the address that the bytes had
    before.
    """

    def __init__(self, unit: Unit, runtime: Runtime, index: int) -> None:
        self.unit, self.runtime, self.index = unit, runtime, index
        self.homes: list[Home] = []
        self.epoch = 0
        self.trainable = False
        self.in_graphs = InGraphs()
        self.assigned: dict[Home, torch.Tensor] = {}
        self.adopted: dict[Home, int] = {}

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
        version = self.epoch + sum(map(_version_of, self.homes))
        if self.assigned:
            version += sum(tensor._version for tensor in self.assigned.values())
        return version

    def forget(self) -> None:
        """Drop the references to the model's tensors and modules. Called after the session was closed."""
        for home in self.homes:
            home.forget()
        self.homes.clear()
        self.assigned.clear()
        self.adopted.clear()
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
    ``assignments``: how often ``tensor.data`` was replaced, if the weight has no bytes.
    """

    __slots__ = ("unit", "runtime", "entry", "host", "tensor", "trainable", "assignments", "_no_swap")
    keeps_writes = True
    has_bytes = True

    def __init__(self, unit: ManagedUnit, entry: Entry, host: torch.Tensor) -> None:
        self.unit, self.runtime, self.entry, self.host = unit, unit.runtime, entry, host
        self.tensor = entry.tensor
        self.trainable = entry.tensor.requires_grad
        self.assignments = 0
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
        """Perform ``parameter.data = new``: the weight shares the memory of ``new`` from now on, as without Carom. Code
        that kept the former ``parameter.data`` (averages of weights that are swapped in) keeps the former value.

        Raises UnsupportedError for another shape, dtype or device, for a tensor with gaps or overlaps in memory, and
        while an autograd graph needs the present value.
        """
        given = getattr(new, "_carom", None)
        if given is not None and given is not self:
            new = given.read()
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
        if given is self or runtime.low <= new.data_ptr() < runtime.high:
            # The .to() of a submodule moved the weight to the compute device. The weight stays streamed.
            return
        if not is_dense(new):
            raise UnsupportedError(
                f"{self.entry.name}.data is replaced by a tensor whose elements overlap or do not lie together in memory: "
                "assign a copy of it (tensor.contiguous())"
            )
        self.refuse_in_graphs()
        self._adopt(new)

    def _adopt(self, new: torch.Tensor) -> None:
        """Let the weight use the memory of ``new``, a dense tensor of the weight's shape and dtype."""
        unit = self.unit
        with self.runtime.lock, torch.inference_mode(False), torch.no_grad():
            new = self.runtime.in_host_memory(new)
            if new.is_inference():
                new = new.clone(memory_format=torch.preserve_format)
            if self in unit.adopted:
                self.runtime.finish_copies()  # from the memory that may be freed now
            before, strides, address = unit.version(), self.host.stride(), self.host.data_ptr()
            with torch._C.DisableTorchFunctionSubclass():
                self.tensor.data = new
                self.host = self.tensor.detach()
            unit.assigned[self] = new
            address = unit.adopted.setdefault(self, address)
            if self.host.data_ptr() == address:  # the former value was assigned again
                del unit.adopted[self]
            unit.epoch += max(0, before - unit.version()) + 1  # the version never falls
            if self.host.stride() != strides:
                self.runtime.forget_views(unit)

    def moved(self, host: torch.Tensor) -> None:
        """Note that the weight's bytes are in the memory of ``host`` now, where the unit's other bytes are."""
        self.host = host
        assigned = self.unit.assigned.pop(self, None)
        if assigned is not None:
            self.unit.adopted.pop(self, None)
            self.unit.epoch += assigned._version + 1

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
