"""`share_attributes`: a second module object with the attributes of a module, which does not keep the module alive."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_originals: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def share_attributes(module: nn.Module) -> nn.Module:
    """Return a module object of the same class with the same ``__dict__`` as ``module``.

    Children, parameters, hooks and wrapped forwards are those of ``module``, whichever of the two objects
    changes them. A session holds the result instead of its module. The module, which holds the session
    through its wrapped forward, is then in no reference cycle, and is freed when its user drops it.
    """
    kind: Any = type(module)
    if hasattr(kind, "__del__"):
        kind = type(kind.__name__, (kind,), {"__del__": lambda self: None})
    found: nn.Module = object.__new__(kind)
    object.__setattr__(found, "__dict__", module.__dict__)
    _originals[found] = weakref.ref(module)
    return found


def forward_of(module: nn.Module) -> Any:
    """Return the forward of ``module``; for a result of `share_attributes`, a `weakref.WeakMethod` of the original's.

    A forward that is an attribute of the module itself is returned as it is.
    """
    reference = _originals.get(module)
    original = None if reference is None else reference()
    if original is None or "forward" in module.__dict__:
        return module.forward
    return weakref.WeakMethod(original.forward)


def original_of(module: nn.Module) -> nn.Module:
    """Return the module from which `share_attributes` made ``module``, as long as it exists, else ``module``."""
    reference = _originals.get(module)
    original = None if reference is None else reference()
    return module if original is None else original
