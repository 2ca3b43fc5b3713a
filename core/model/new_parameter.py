"""What ``nn.Parameter(weight)``, and a subclass of `nn.Parameter`, makes of a managed tensor: an ordinary parameter.

torch makes a parameter of a tensor subclass from ``weight.detach()``, demands that the result has the class
of ``weight``, and marks the result as a parameter by its attribute ``_is_param``. The result would therefore
be a managed tensor that belongs to no session. Here the mark gives it the class that the caller asked for, as
torch does for ordinary tensors.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_MAKES_PARAMETER = nn.Parameter.__new__.__code__
_local = threading.local()


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Context in which this thread makes parameters of weights without bytes in host memory as ``meta`` tensors.

    For parameters of which only shape and dtype are used, so that the values need not be read.
    """
    before = getattr(_local, "skips", False)
    _local.skips = True
    try:
        yield
    finally:
        _local.skips = before


class MakesParameters:
    """A mixin of managed tensors: `nn.Parameter` and its subclasses take them as they take ordinary tensors."""

    _carom: Any

    def detach(self) -> torch.Tensor:
        """Return the detached value; for `nn.Parameter`, a tensor that becomes the parameter."""
        caller = sys._getframe(1)
        if caller.f_code is not _MAKES_PARAMETER:
            return torch.Tensor.detach(self)  # type: ignore[arg-type]
        wanted = caller.f_locals["cls"]
        home = getattr(self, "_carom", None)
        own = self.own_value()
        if own is not None:
            value = own
        elif home is not None and not home.has_bytes and getattr(_local, "skips", False):
            value = torch.empty_strided(
                home.host.shape, home.host.stride(), dtype=home.host.dtype, device="meta"
            )
        else:
            value = torch.Tensor.detach(self)  # type: ignore[arg-type]
            if type(value) is not torch.Tensor or (home is not None and home.runtime.computing()):
                # The value is read from where it waits, or it is in a slot, which is overwritten later.
                value = value.clone(memory_format=torch.preserve_format)
        value.__class__ = type(self)  # type: ignore[assignment]
        value.__dict__["_wanted"] = wanted
        return value

    def own_value(self) -> torch.Tensor | None:
        """Return the value of a tensor that has none in its own memory and no home, otherwise None."""
        return None

    @property
    def _is_param(self) -> bool:
        return nn.Parameter in type(self).__mro__

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        wanted = self.__dict__.pop("_wanted", None)
        if wanted is not None:
            self.__class__ = wanted
