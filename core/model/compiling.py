"""Decorators that keep Carom's own frames out of torch.compile's graphs without importing torch._dynamo."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_eval_frame: Any = getattr(torch._C._dynamo, "eval_frame", None)
# Exists in torch 2.6. Later releases trace Carom's frames, and also break the graph there.
_skip_code: Any = getattr(_eval_frame, "skip_code", None)
# Returns None while no compilation can be running on this thread.
compiling: Callable[[], Any] = getattr(
    _eval_frame, "get_eval_frame_callback", lambda: sys.modules.get("torch._dynamo")
)


def quiet(function: Callable) -> Callable:
    """Return ``function`` wrapped so that torch.compile traces neither ``function`` nor the functions that it
    calls.

    While no compilation can be running on this thread the wrapper calls ``function`` directly, without
    importing the compiler.
    """
    guarded: list[Callable] = []

    @untraced
    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling() is None:
            return function(*args, **kwargs)
        if not guarded:
            guarded.append(torch.compiler.disable(function))
        return guarded[0](*args, **kwargs)

    return call


def untraced(function: Callable) -> Callable:
    """Mark ``function`` so that torch.compile neither inlines nor compiles its frame; functions that it calls
    may be compiled.

    Returns ``function`` itself.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    # The reason that torch gives in its error where a graph may not break (fullgraph=True).
    function._torchdynamo_disable_msg = "carom streams this module"  # type: ignore[attr-defined]
    if _skip_code is not None:
        _skip_code(function.__code__)
    else:
        # torch.compile counts recompilations by code object. If all units shared one code object, a few kinds
        # of units would reach the limit, and later units would run uncompiled. So each function gets a copy
        # of its code object.
        function.__code__ = function.__code__.replace()  # type: ignore[attr-defined]
    return function


def pass_over(code: types.CodeType) -> None:
    """Tell torch.compile to skip frames of ``code`` and to compile the functions that they call.

    Does the same as torch._dynamo.eval_frame.skip_code of torch 2.13, without importing the compiler. Must
    not be used for frames that call a module's forward: torch.compile takes up forwards of torch.nn only from
    a frame that it traces.
    """
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        action = _eval_frame._FrameAction
        strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _eval_frame.set_code_exec_strategy(code, strategy)
