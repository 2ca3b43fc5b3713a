"""A ``__torch_function__`` descriptor that hides itself from `torch.overrides.has_torch_function` during a
step.

Code in torch calls ``has_torch_function`` for two purposes. Most functions ask in order to let a subclass run
in their place. A negative answer does no harm to these functions, because the operators that they call ask
again. Other code chooses an implementation by the answer: `nn.TransformerEncoder` gives up nested tensors and
`nn.MultiheadAttention` its fast path, and results would differ from those of the same model without Carom.
"""

from __future__ import annotations

import dis
import sys
from typing import Any

import torch


class ForOperators(classmethod):
    """A classmethod ``__torch_function__`` that operators see and `torch.overrides.has_torch_function` does
    not.

    Python code in torch that calls ``has_torch_function`` takes a slower or different path if any argument is
    a subclass (`nn.TransformerEncoder` gives up its nested tensors). During a step a streamed weight answers
    as the plain Parameter that it stands for. The operators that follow still dispatch to this class, one by
    one.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None and _is_calling_has_torch_function(sys._getframe(1)):
            streamed = getattr(instance, "_carom", None)
            if streamed is not None and streamed.runtime.computing():
                return torch._C._disabled_torch_function_impl
        return super().__get__(instance, owner)


# By the id of a code object: the object (so that the id stays valid) and the bytecode ranges in which it
# calls has_torch_function.
_call_ranges: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
# These functions call has_torch_function in order to let a subclass run in their place, and they call no
# operator that would dispatch to the subclass. So these functions have to get the true answer.
_DELEGATING = {
    function.__code__
    for function in (torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
}  # fmt: skip


def _is_calling_has_torch_function(frame: Any) -> bool:
    """Return whether the instruction that ``frame`` is executing belongs to a call of has_torch_function."""
    known = _call_ranges.get(id(frame.f_code))
    if known is None:
        known = _call_ranges[id(frame.f_code)] = frame.f_code, _calls_of_has_torch_function(frame.f_code)
    return any(first <= frame.f_lasti <= last for first, last in known[1])


def _calls_of_has_torch_function(code: Any) -> list[tuple[int, int]]:
    """Return the bytecode ranges of the calls of has_torch_function in ``code``.

    Each range is (offset where the function's name is loaded, offset of the call).
    """
    if code in _DELEGATING or not any(name.startswith("has_torch_function") for name in code.co_names):
        return []
    calls: list[tuple[int, int]] = []
    loaded: int | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD") and str(instruction.argval).startswith("has_torch_function"):
            loaded = instruction.offset
        elif loaded is not None and instruction.opname.startswith("CALL"):
            calls.append((loaded, instruction.offset))
            loaded = None
    return calls
