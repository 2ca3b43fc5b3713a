"""PURE. How Carom's models in one process share the RAM that a node's ``ram`` allows them together.

A model whose weights fit beside those of the other models waits in RAM as a whole. Otherwise its weights stream from
disk through a cache, and models that do not run give RAM up. A diffusion model reads the weights that stream in every
sampler step, so it takes RAM for these. Weights that stay on the device need no RAM while the model runs. Models that wait
keep that RAM, and read less from disk when they return. A text encoder or a VAE reads its weights once for a prompt, so it takes only
what is free, and `least_share` where nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.common.sizes import MIB

LEAST_SHARE = 32  # a model gets at least 1/32 of the RAM, and at least 16 MiB
LEAST_BYTES = 16 * MIB


@dataclass(frozen=True)
class Holder:
    """A model that holds RAM.

    ``nbytes``: what it holds at most; ``waits``: whether it can give RAM up now; ``divides``: whether it can give up a
    part (a cache of weights on disk), not only everything.
    """

    nbytes: int
    waits: bool
    divides: bool


@dataclass(frozen=True)
class Share:
    """``nbytes``: the RAM that a model gets; ``whole``: whether all its weights wait there, none on disk; ``keeps``:
    the bytes that each other model keeps, in their order.
    """

    nbytes: int
    whole: bool
    keeps: tuple[int, ...]


def least_share(limit: int) -> int:
    """Return the bytes that a model gets of ``limit`` where the other models hold everything."""
    return min(limit, max(LEAST_BYTES, limit // LEAST_SHARE))


def divide(limit: int, need: int, streams: int, many_passes: bool, others: Sequence[Holder]) -> Share:
    """Divide ``limit`` bytes between a model of ``need`` bytes that begins to run and ``others``, the longest unused
    first. ``streams``: bytes of the model that do not stay on the device; ``many_passes``: whether the model reads these many
    times in a prompt.
    """
    held = sum(other.nbytes for other in others)
    if need + held <= limit:
        return Share(limit - held, True, tuple(other.nbytes for other in others))
    least = least_share(limit)
    wanted = max(least, streams) if many_passes else least
    keeps = []
    for other in others:
        excess = max(0, wanted + held - limit)
        gives = 0
        if other.waits and excess:
            gives = min(excess, max(0, other.nbytes - least)) if other.divides else other.nbytes
        keeps.append(other.nbytes - gives)
        held -= gives
    return Share(max(least, min(need, limit - held)), False, tuple(keeps))
