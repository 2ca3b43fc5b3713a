"""Benchmark models that take almost no memory or time to build: every block maps the same pages of one file
privately.

A model of 30 GB takes the host memory of one block until its weights are written to or copied, and no time to fill.
All blocks hold the same values, which makes no difference to timings and budgets.
"""

from __future__ import annotations

import functools
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import nn

from .case import Case
from .dit import DTYPE, Dit, _adapt, build, host_empty

ALIGN = 64  # bytes between tensors of a block


class Pages:
    """A temporary file with the weights of one block, which any number of blocks can map."""

    def __init__(self, case: Case) -> None:
        block = build(case.but(mode="infer", depth=1, resident=0)).blocks[0]
        self._weights = [p.detach() for p in block.parameters()]
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as models map the file
        for weight in self._weights:
            self._file.write(weight.contiguous().view(torch.uint8).numpy().tobytes())
            self._file.write(bytes(-self._file.tell() % ALIGN))
        self._file.flush()
        self._nbytes = self._file.tell()

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of a block over a new private mapping of the file."""
        options = (
            {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {"access": mmap.ACCESS_COPY}
        )
        memory = mmap.mmap(self._file.fileno(), self._nbytes, **options)
        offset = 0
        for weight in self._weights:
            yield torch.frombuffer(memory, dtype=DTYPE, count=weight.numel(), offset=offset).view(
                weight.shape
            )
            offset += -(-weight.numel() * weight.element_size() // ALIGN) * ALIGN


def make_model(case: Case, pages: Pages) -> Dit:
    """Return the model of `dit.build` with mapped weights; all blocks hold the same values."""
    with torch.device("meta"):
        model = Dit(case.d, case.depth, case.head_count)
        model.requires_grad_(False)
        if case.mode == "train":
            for block in model.blocks:
                _adapt(block, case.rank, getattr(torch, case.adapter_dtype))
    model.set_checkpointing(case.checkpoint if case.mode == "train" else "off")
    for block in model.blocks:
        mapped = pages.weights()
        _replace(block, functools.partial(_own_or_next, mapped))
    for part in (model.embed, model.head):
        _replace(part, _small)
    return model.train(case.mode == "train")


def _own_or_next(mapped: Iterator[torch.Tensor], meta: torch.Tensor) -> torch.Tensor:
    """Return separate values for an adapter, else the next mapped tensor."""
    return _small(meta) if meta.requires_grad else next(mapped)


def _replace(tree: nn.Module, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for module in tree.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(value(meta), requires_grad=meta.requires_grad))


def _small(meta: torch.Tensor) -> torch.Tensor:
    """Return a tensor with fixed small values of both signs, the same at every call."""
    values = torch.arange(meta.numel(), dtype=torch.int32).remainder_(251).sub_(125).float()
    return host_empty(meta.shape, meta.dtype).copy_(
        values.div_(125 * math.sqrt(meta.shape[-1])).view(meta.shape)
    )
