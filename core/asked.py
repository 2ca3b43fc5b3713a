"""Who asks a streamed weight whether it overrides operators: operators are told yes, code that chooses a path no.

``torch.overrides.has_torch_function`` is asked in two ways. Functions ask in order to let a subclass answer in their stead;
since the operators that they call ask again, nothing is lost when they are told no. Other code chooses a path by it:
`nn.TransformerEncoder` gives up nested tensors, `nn.MultiheadAttention` its fast path, and results differ.
"""

from __future__ import annotations

import dis
import sys
from typing import Any

import torch


class ForOperators(classmethod):
    """A ``__torch_function__`` that operators see and ``torch.overrides.has_torch_function`` does not.

    Code in torch asks that function whether its arguments are plain tensors, and takes another path where they are not
    (`nn.TransformerEncoder` gives up its nested tensors). Within a step a streamed weight answers as the plain
    parameter that it stands for; the operators that follow bounce one by one.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None and _is_asked(sys._getframe(1)):
            streamed = getattr(instance, "_carom", None)
            if streamed is not None and streamed.streamer.runs.computing():
                return torch._C._disabled_torch_function_impl
        return super().__get__(instance, owner)


# Where a function's code calls has_torch_function: offsets in its bytecode, by the code's id. The code is kept alive.
_asking: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
# These ask in order to let a subclass answer in their stead, and do not call an operator that would.
_LET_ANSWER = {
    function.__code__
    for function in (torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
}  # fmt: skip


def _is_asked(frame: Any) -> bool:
    """Whether ``frame`` is just calling has_torch_function."""
    known = _asking.get(id(frame.f_code))
    if known is None:
        known = _asking[id(frame.f_code)] = frame.f_code, _calls_of_has_torch_function(frame.f_code)
    return any(first <= frame.f_lasti <= last for first, last in known[1])


def _calls_of_has_torch_function(code: Any) -> list[tuple[int, int]]:
    """From loading the function's name to the call that follows, for each such call in ``code``."""
    if code in _LET_ANSWER or not any(name.startswith("has_torch_function") for name in code.co_names):
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
