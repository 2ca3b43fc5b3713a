"""Tables of known graphics cards, drives and quantisations, each with the source of its figures.

Presets are for planning for a machine that is not at hand; `carom plan --gpu probe` measures the present
machine instead. GB = 1e9 bytes. Sources are named in SOURCES; docs/planning.md says where they disagree.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .pcie import GB, PcieLink

TFLOPS = 1e12

_VENDOR = "; dense bf16 with fp32 accumulation (a peak, not the sparse figure), memory size and bandwidth of the vendor; not measured"
SOURCES = {
    "note": "published design note on partial-resident QLoRA (NVMe to GPU), its preset table: rates and the link of its host",
    "measured": "measured by the authors of Carom, November 2026, one H200 (torch 2.11, CUDA 13.0)",
    "hopper": "the rate measured on an H200, which has the same chip (torch 2.11, CUDA 13.0); memory of the vendor",
    "ampere": "NVIDIA Ampere GA102 GPU Architecture whitepaper" + _VENDOR,
    "a100": "NVIDIA A100 Tensor Core GPU Architecture whitepaper" + _VENDOR,
    "ada": "NVIDIA Ada GPU Architecture whitepaper" + _VENDOR,
    "blackwell": "NVIDIA RTX Blackwell GPU Architecture whitepaper" + _VENDOR,
    "blackwell-pro": "NVIDIA RTX Blackwell PRO GPU Architecture whitepaper" + _VENDOR,
    "specification": "vendor's specification of the card: twice its FP32 shader rate, as the whitepapers have it for other "
    "cards of its chip family" + _VENDOR,
    "amd": "AMD's specification of the card" + _VENDOR,
}


@dataclass(frozen=True)
class Card:
    """A GPU with its published or measured figures.

    `vram`: bytes, with 1e9 bytes for each marketed GB; the 7 % difference to a binary GiB is left to the
    desktop and driver. `bf16`, `nvfp4`: dense FLOP/s (None: not supported or not known); `link`: bytes/s from host
    to device; `slot`: name of the PCIe link that `link` is for ("": a measured or published rate); `good_link`: the
    rate on a better host, where the source names one; `memory`: bytes/s of device memory; `published`: whether the
    card is planned as the published note does, without an efficiency.
    """

    name: str
    title: str
    vram: int
    bf16: float
    link: float
    memory: float
    source: str
    nvfp4: float | None = None
    good_link: float | None = None
    workstation: bool = False  # a workstation or data centre card, which GPUDirect Storage requires
    slot: str = ""
    published: bool = False


@dataclass(frozen=True)
class HostCost:
    """The host seconds that Python takes to issue the forward of a transformer layer.

    `layer`: in inference; `train_layer`: in LoRA training with activation checkpointing (None: as in inference);
    `use`: further seconds for a layer that streams; `source`: where the figures come from.
    """

    layer: float
    use: float
    source: str
    train_layer: float | None = None

    def of(self, mode: str) -> float:
        """Return the seconds for a layer in `mode`, "infer" or "train"."""
        return self.train_layer if mode == "train" and self.train_layer is not None else self.layer

    def scaled(self, layer: float, source: str) -> HostCost:
        """Return the cost on a host that takes `layer` seconds for a layer in inference."""
        slower = layer / self.layer
        return HostCost(layer, self.use * slower, source, self.of("train") * slower)


# `layer` and `use` are medians of the benchmark's cases host-infer-resident, -fetched and -streamed (without
# compression): the seconds of a resident layer, and the additional seconds where each block is copied anew.
# `train_layer` is the forward of the case none-host-train over its 20 blocks.
HOST_COST = HostCost(
    464e-6, 184e-6,
    "measured on the hosts of H200s: benchmarks/records/2026-11-21-h200-host-time.json (inference), "
    "benchmarks/records/2026-11-21-h200-suite-2.json (training): a block of five matrices",
    1656e-6,
)  # fmt: skip


@dataclass(frozen=True)
class Drive:
    """An NVMe drive or array. `rate`: bytes/s of sequential direct reads."""

    name: str
    title: str
    rate: float
    source: str = SOURCES["note"]


def _card(name, title, vram, bf16, link, memory, source, **more) -> Card:
    """Return a Card from figures in GB, TFLOP/s and GB/s; ``link``: a rate, or (PCIe generation, lanes)."""
    for key in ("nvfp4", "good_link"):
        if key in more:
            more[key] *= TFLOPS if key == "nvfp4" else GB
    slot = PcieLink(*link) if isinstance(link, tuple) else None
    return Card(
        name, title, vram * GB, bf16 * TFLOPS, slot.rate if slot else link * GB, memory * GB, SOURCES[source],
        slot=slot.title if slot else "", **more,
    )  # fmt: skip


def _published(name, title, vram, bf16, link, memory, **more) -> Card:
    """Return the variant of a card that reproduces the published note's tables: its rates and its host's link."""
    return _card(
        f"{name}-note", f"{title} (published note)", vram, bf16, link, memory, "note",
        published=True, **more,
    )  # fmt: skip


# Within a maker, ordered by memory and then by speed. The link is that of the card in a slot which offers all that the
# card can use; a slot of an older generation or with fewer lanes is slower (`--link`).
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card("rtx4060", "RTX 4060", 8, 30.2, (4, 8), 272, "specification"),
        _card("rtx3060ti", "RTX 3060 Ti", 8, 32.4, (4, 16), 448, "specification"),
        _card("rtx5060", "RTX 5060", 8, 38.4, (5, 8), 448, "specification"),
        _card("rtx3070", "RTX 3070", 8, 40.6, (4, 16), 448, "ampere"),
        _card("rtx4060ti", "RTX 4060 Ti", 8, 44.1, (4, 8), 288, "specification"),
        _card("rtx3080", "RTX 3080", 10, 59.5, (4, 16), 760, "ampere"),
        _card("rtx3060", "RTX 3060", 12, 25.5, (4, 16), 360, "specification"),
        _card("rtx4070", "RTX 4070", 12, 58.3, (4, 16), 504, "specification"),
        _card("rtx5070", "RTX 5070", 12, 61.7, (5, 16), 672, "blackwell"),
        _card("rtx4060ti-16gb", "RTX 4060 Ti 16 GB", 16, 44.1, (4, 8), 288, "specification"),
        _card("rtx5060ti-16gb", "RTX 5060 Ti 16 GB", 16, 47.4, (5, 8), 448, "specification"),
        _card("rtx5070ti", "RTX 5070 Ti", 16, 87.9, (5, 16), 896, "blackwell"),
        _card("rtx4070tisuper", "RTX 4070 Ti Super", 16, 88.2, (4, 16), 672, "specification"),
        _card("rtx4080", "RTX 4080", 16, 97.5, (4, 16), 717, "ada"),
        _card("rtx5080", "RTX 5080", 16, 112.6, (5, 16), 960, "blackwell"),
        _card("rtx3090", "RTX 3090", 24, 71.2, (4, 16), 936, "ampere"),
        _card("rtx4090", "RTX 4090", 24, 165.2, (4, 16), 1008, "ada"),
        _card("rtx5090", "RTX 5090", 32, 209.5, (5, 16), 1792, "blackwell", nvfp4=567),
        _card("rx9070xt", "Radeon RX 9070 XT", 16, 194.6, (5, 16), 644, "amd"),
        _card("rx7900xtx", "Radeon RX 7900 XTX", 24, 122.8, (4, 16), 960, "amd"),
        _card("l40s", "L40S", 48, 362, (4, 16), 864, "ada", workstation=True),
        _card("a100", "A100 80 GB", 80, 312, (4, 16), 2039, "a100", workstation=True),
        _card("h100", "H100 80 GB", 80, 797, (5, 16), 3350, "hopper", workstation=True),
        _card(
            "rtx-pro-6000",
            "RTX PRO 6000 Blackwell",
            96,
            503.8,
            (5, 16),
            1792,
            "blackwell-pro",
            workstation=True,
        ),
        _card("h200", "H200", 141, 797, 55.5, 4800, "measured", workstation=True),
        _published("rtx4090", "RTX 4090", 24, 160, 11, 1008, good_link=22),
        _published("rtx5090", "RTX 5090", 32, 210, 22, 1792, nvfp4=567, good_link=27),
        _published("a100", "A100 80 GB", 80, 156, 22, 2039, workstation=True),
        _published("h100", "H100 80 GB", 80, 330, 22, 3350, workstation=True),
        _published("rtx-pro-6000", "RTX PRO 6000 Blackwell", 96, 210, 22, 1792, nvfp4=567, workstation=True),
    )
}

# The cards that a plan suggests as larger ones, in this order.
UPGRADES = ("rtx5090", "rtx-pro-6000", "h200")

DRIVES: dict[str, Drive] = {
    drive.name: drive
    for drive in (
        Drive("gen3", "a PCIe Gen3 NVMe drive", 3.5 * GB),
        Drive("gen4", "a PCIe Gen4 NVMe drive", 7 * GB),
        Drive("gen5", "a PCIe Gen5 NVMe drive", 12.5 * GB),
        Drive("2xgen5", "two Gen5 NVMe drives in RAID 0", 25 * GB),
        Drive("5xgen5", "five Gen5 NVMe drives in RAID 0", 49 * GB),
    )
}

# Bits per parameter, scales included. The figures of nf4, nf3 and nf2 follow from the layer sizes in the
# design note: 470 MB for the 855.6 M parameters of a Llama-3-70B layer is 4.39 bits, and the note's GLM-4.7
# layers give the same.
QUANT_BITS: dict[str, float] = {
    "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8,
    "q8_0": 8.5, "q6_k": 6.5625, "q5_k": 5.5, "q4_k": 4.5,
    "nvfp4": 4.5, "mxfp8": 8.25, "nf4": 4.39, "nf3": 3.2, "nf2": 2.244,
}  # fmt: skip
QUANT_SOURCES = {
    "nf4": SOURCES["note"], "nf3": SOURCES["note"], "nf2": SOURCES["note"],
    "q8_0": "GGUF block: 32 int8 + one fp16 scale", "q6_k": "GGUF k-quant super-block: 210 bytes for 256",
    "q5_k": "GGUF k-quant super-block: 176 bytes for 256", "q4_k": "GGUF k-quant super-block: 144 bytes for 256",
    "nvfp4": "4 bits + one fp8 scale for 16", "mxfp8": "8 bits + one e8m0 scale for 32",
}  # fmt: skip

# Size of losslessly compressed bf16 weights (3-bit exponent codes with escapes) over their raw size.
LOSSLESS_RATIO = 0.699
# Unpacked bytes that a step decodes per byte of the card's memory bandwidth: 1196 GB/s on an H200, the median of the
# lossless cases in LOSSLESS_RECORDS. Kernels and copies run beside the decoder there; alone it reaches 2009 GB/s
# (benchmarks/records/2026-11-22-h200-codec-3.json). Other cards are scaled by their memory bandwidth, because decoding
# reads and writes memory and computes little.
LOSSLESS_DECODE_PER_MEMORY = 1196 / 4800
# Share of the link's rate that copies reach beside the decoder, the median of the suites' cases in LOSSLESS_RECORDS.
LOSSLESS_LINK_SHARE = 0.96
LOSSLESS_RECORDS = (
    "2026-11-22-h200-suite-8", "2026-11-22-h200-suite-12",
    "2026-11-22-h200-comfyui-8-true-size", "2026-11-22-h200-comfyui-13", "2026-11-22-h200-comfyui-14",
)  # fmt: skip
# Device bytes of a CUDA context, measured on a machine with a running ComfyUI.
CONTEXT_BYTES = int(0.70 * 2**30)
RAM_STEPS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # GiB; usual sizes of RAM


def _key(text: str) -> str:
    """Return ``text`` without case, punctuation and makers' names, for comparing names."""
    text = re.sub(r"[^a-z0-9]", "", text.lower())
    return re.sub(r"^(nvidia|amd|geforce|radeon)+", "", text)


def nearest(kind: str, asked: str, known: Iterable[str]) -> ValueError:
    """Return the error for an unknown name, with the most similar known names, or all where none is similar."""
    known = list(known)
    near = difflib.get_close_matches(asked[:80].lower(), known, n=3, cutoff=0.5)
    if not near:
        keys = {_key(name): name for name in known}
        near = [keys[key] for key in difflib.get_close_matches(_key(asked[:80]), list(keys), n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return ValueError(f"{kind} {asked[:80]!r} is unknown; {hint}")


def find(kind: str, asked: str, known: dict):
    """Return the entry of `known` named `asked`, ignoring case, blanks and dashes.

    Raises ValueError, with the most similar names, where there is none. `kind`: the noun for the message.
    """
    wanted = _key(asked)
    for name, value in known.items():
        if wanted in (_key(name), _key(getattr(value, "title", name))):
            return value
    raise nearest(kind, asked, known)


@dataclass(frozen=True)
class Quant:
    """The bits per parameter of quantised weights: `dense` for weights that every token uses, `experts` for
    routed experts.
    """

    name: str
    dense: float
    experts: float

    @property
    def is_16bit(self) -> bool:
        """Whether all weights have 16 bits."""
        return self.dense == self.experts == 16


def find_quant(asked: str) -> Quant:
    """Return the quantisation named "nf4" or "nf4+nf2" (dense + experts).

    Raises ValueError with the most similar names.
    """
    parts = asked.lower().split("+")
    if not 1 <= len(parts) <= 2:
        raise ValueError(f"quant {asked[:80]!r} is unknown; write one name, or DENSE+EXPERTS as in nf4+nf2")
    bits = [find("quant", part, QUANT_BITS) for part in parts]
    return Quant(asked.lower(), bits[0], bits[-1])
