"""Decorators that keep the Python frames of Carom's own functions out of the graphs that torch.compile
records, and the recognition of compiled modules.

The module does not import torch._dynamo, because that import is slow and is needed only if the user compiles.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn

_eval_frame: Any = getattr(torch._C._dynamo, "eval_frame", None)
# The function skip_code of torch 2.6, which lets the compiler skip a frame; None in later releases.
# `untraced` then relies on the attribute _torchdynamo_disable, which breaks the graph at the function.
_skip_code: Any = getattr(_eval_frame, "skip_code", None)
# A function that returns None while no compilation can be running on this thread.
compiling: Callable[[], Any] = getattr(
    _eval_frame, "get_eval_frame_callback", lambda: sys.modules.get("torch._dynamo")
)
# Code objects of wrappers, by the code object of the definition and the place in a model: see `untraced`.
_codes: dict[tuple, types.CodeType] = {}
_IN_PLACE = "_compiled_call_impl"  # set by nn.Module.compile in the module's __dict__


class CompiledParts:
    """Tells whether torch.compile compiled ``root`` or a module below it. Fast enough to run before every forward.

    A compiled module that another module wraps from outside (`torch.compile(root)`) is not found: calls of it show in
    `compiling`.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._wrapped = any("_orig_mod" in module._modules for module in modules)
        self._dicts = [module.__dict__ for module in modules]

    def found(self) -> bool:
        """Return whether a module is compiled now. Modules that joined the tree since the construction do not count."""
        if self._wrapped:
            return True
        # A tree has thousands of modules, so the loop runs in C.
        if "torch._dynamo" not in sys.modules or not any(map(contains, self._dicts, repeat(_IN_PLACE))):
            return False
        return any(attributes.get(_IN_PLACE) is not None for attributes in self._dicts)


def quiet(function: Callable) -> Callable:
    """Return a wrapper of ``function`` that torch.compile does not trace, neither ``function`` nor the
    functions that it calls.

    While no compilation can be running on this thread, the wrapper calls ``function`` directly, without
    importing the compiler.
    """
    guarded: list[Callable] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling() is None:
            return function(*args, **kwargs)
        if not guarded:
            guarded.append(torch.compiler.disable(function))
        return guarded[0](*args, **kwargs)

    pass_over(call.__code__)  # compiling this frame would take more time than a small graph
    return _marked(call)


def untraced(function: Callable, place: tuple | None = None) -> Callable:
    """Mark ``function`` so that torch.compile neither inlines nor compiles its frame.

    Functions that ``function`` calls may be compiled. Returns ``function`` itself.
    ``place``: the place of the function's module in a model, the same in each model of the same kind. What is compiled
    for one such model then serves the next, where its guards hold.
    """
    if _skip_code is not None:
        _skip_code(function.__code__)
        return _marked(function)
    # torch.compile counts recompilations for each code object, up to a limit. If the wrappers of all units shared one
    # code object, a few kinds of units would reach the limit, and later units would run uncompiled. So each function
    # gets a copy of its code object.
    code = function.__code__.replace()  # type: ignore[attr-defined]
    if place is not None:
        code = _codes.setdefault((function.__code__, place), code)  # type: ignore[attr-defined]
    function.__code__ = code  # type: ignore[attr-defined]
    return _marked(function)


def _marked(function: Callable) -> Callable:
    """Let torch.compile break graphs at calls of ``function``. Returns ``function`` itself."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    # The reason that torch states in its error if a graph break is forbidden (fullgraph=True).
    function._torchdynamo_disable_msg = "carom streams this module"  # type: ignore[attr-defined]
    return function


def pass_over(code: types.CodeType) -> None:
    """Tell torch.compile to skip frames of ``code`` and to compile the functions that these frames call.

    Does the same as torch._dynamo.eval_frame.skip_code of torch 2.13, without importing the compiler. Must
    not be used for frames that call a module's forward, because torch.compile compiles forwards of torch.nn
    modules only if it traces the calling frame.
    """
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        action = _eval_frame._FrameAction
        strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _eval_frame.set_code_exec_strategy(code, strategy)
