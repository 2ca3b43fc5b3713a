"""An extension for the matrix's copy of ai-toolkit (folder ``extensions``) that makes steps of a job run out of
memory.

CAROM_TEST_OOM lists the steps, for example "1:forward,3:backward". The error is raised in the middle of the model, in
the forward or in its recomputation.
"""

# mypy: ignore-errors
from __future__ import annotations

import functools
import os

import torch


def fail_in(model: torch.nn.Module, at_call: int) -> None:
    """Raise an out-of-memory error after a middle block has run, once it was called ``at_call`` times before."""
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    block = blocks[len(blocks) // 2]
    calls = [0]

    def hook(*_):
        calls[0] += 1
        if calls[0] > at_call:
            handle.remove()
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. (on purpose)")

    handle = block.register_forward_hook(hook)


def watch(process, when: dict[int, str]) -> None:
    plain = process.hook_train_loop

    def hook_train_loop(*args, **kwargs):
        if process.step_num in when:
            # checkpointed: the first call is the forward's, the second the backward's
            fail_in(process.sd.unet, 0 if when.pop(process.step_num) == "forward" else 1)
        return plain(*args, **kwargs)

    process.hook_train_loop = hook_train_loop


def wrap(owner) -> None:
    run = owner.run

    @functools.wraps(run)
    def watched(self, *args, **kwargs):
        said = [word.split(":") for word in os.environ["CAROM_TEST_OOM"].split(",")]
        watch(self, {int(step): part for step, part in said})
        return run(self, *args, **kwargs)

    owner.run = watched


if os.environ.get("CAROM_TEST_OOM"):
    from jobs.process.BaseSDTrainProcess import BaseSDTrainProcess

    if not torch.cuda.is_available():
        torch.cuda.ipc_collect = lambda: None  # which ai-toolkit calls then, and which needs a GPU
    wrap(BaseSDTrainProcess)
