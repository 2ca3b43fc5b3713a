"""A ``__torch_function__`` descriptor that hides itself from `torch.overrides.has_torch_function` during a
step.

Python code in torch calls ``has_torch_function`` for two purposes. Most functions call it to let a tensor
subclass run instead of the function. A false negative does no harm there, because the operators that the
function calls ask again. Other code chooses an implementation by the answer: for a subclass,
`nn.TransformerEncoder` does not use nested tensors and `nn.MultiheadAttention` does not use its fast path.
Results would then differ from those of the same model without Carom.
"""

from __future__ import annotations

import dis
import sys
from typing import Any

import torch


class ForOperators(classmethod):
    """A classmethod ``__torch_function__`` that operators see and `torch.overrides.has_torch_function` does
    not.

    Python code in torch that calls ``has_torch_function`` may take a slower or different path if any argument
    is a subclass. During a step (a forward or backward pass), ``has_torch_function`` therefore treats a
    streamed weight as a plain Parameter. The operators that follow still dispatch to the weight's class, one
    by one.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None and _is_calling_has_torch_function(sys._getframe(1)):
            streamed = getattr(instance, "_carom", None)
            if streamed is not None and streamed.runtime.computing():
                return torch._C._disabled_torch_function_impl
        return super().__get__(instance, owner)


# For each code object, by its id: the object itself (so that the id stays valid), and the bytecode ranges in
# which the code calls has_torch_function.
_call_ranges: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
# Functions that call has_torch_function to let a subclass run in their place, and that call no operator which
# would dispatch to the subclass. These functions need the true answer.
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
