"""How much of a card's rate for matrix products a model reaches, by model family.

A step consists of more than matrix products: norms, activations, modulation, rotary embeddings, adapters and the gaps
between kernels take time, too. The efficiency of a family is the time that the matrix products of a step (attention
included) would take at the card's dense rate, divided by the time that the step took with all weights on the card. The
planner divides by it.

The figures come from records in benchmarks/records/ and from the published note, each named below. A test computes
them again from their sources. They hold for steps of a few thousand tokens. On other cards they are an estimate: the
other kernels are limited by memory bandwidth, of which an RTX 4090 has as many bytes per FLOP as the H200 that was
measured (6.1 and 6.0 bytes per 1000 FLOPs).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """The share of a card's dense rate that a family reaches in inference and in LoRA training, between 0 and 1.

    `source`: where the figures come from.
    """

    infer: float
    train: float
    source: str

    def of(self, mode: str) -> float:
        """Return the share in `mode`, "infer" or "train"."""
        return self.train if mode == "train" else self.infer


# Measured in both modes. The ratio of the two serves for families that were measured in inference alone.
_DIT_INFER, _DIT_TRAIN = 0.70, 0.60
_TRAIN_OVER_INFER = _DIT_TRAIN / _DIT_INFER

MEASURED: dict[str, Efficiency] = {
    "dit": Efficiency(
        _DIT_INFER, _DIT_TRAIN,
        "a DiT of 20 blocks, 4096 tokens, without offloading: benchmarks/records/2026-11-22-h200-suite-8.json (inference), "
        "benchmarks/records/2026-11-22-h200-suite-12.json (training)",
    ),
    "mmdit": Efficiency(
        0.51, 0.51 * _TRAIN_OVER_INFER,
        "a Flux.1 of 24 blocks in ComfyUI, 4608 tokens, all weights on the card: "
        "benchmarks/records/2026-11-22-h200-comfyui-4.json; training not measured: inference times the DiT's ratio",
    ),
    "decoder": Efficiency(
        0.85, 0.85 * _TRAIN_OVER_INFER,
        "a Llama-3-70B layer in NF4 on an RTX 4090, one pass: the measured rows of the published design note on "
        "partial-resident QLoRA; training not measured: inference times the DiT's ratio",
    ),
}  # fmt: skip

# For families without a measurement of their own: single-stream transformers (Z-Image), U-Nets, encoders and models
# that are not recognised. No record has a step of a Z-Image that the card limits: the host limits those of ai-toolkit.
DEFAULT = Efficiency(
    statistics.median(found.infer for found in MEASURED.values()),
    statistics.median(found.train for found in MEASURED.values()),
    "this kind of model was not measured: the median of the measured kinds (DiT, Flux, decoder)",
)

# The published note counts matrix products alone, so its cards are planned without an efficiency.
PUBLISHED = Efficiency(1.0, 1.0, "the published note counts matrix products at the card's full rate")


def efficiency_of(family: str) -> Efficiency:
    """Return the efficiency of a `Shape.family`; `DEFAULT` for one that was not measured."""
    return MEASURED.get(family, DEFAULT)


def effective_rate(matrix_rate: float, dense_bf16: float, share: float) -> float:
    """Return the FLOP/s of a step whose matrix products run at `matrix_rate` FLOP/s.

    `dense_bf16`: FLOP/s of the card's bf16 matrix products; `share`: the efficiency, measured with these. The kernels
    that are no matrix products take the same time in every number format, so a faster format, such as NVFP4, gains less
    than its rate promises.
    """
    return 1.0 / (1.0 / matrix_rate + (1.0 / share - 1.0) / dense_bf16)
