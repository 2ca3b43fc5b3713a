"""Tables of known graphics cards, drives and quantisations, each with the source of its figures.

Presets are for planning for a machine that is not at hand; `carom plan --gpu probe` measures the present
machine instead. GB = 1e9 bytes. Sources are named in SOURCES; docs/planning.md says where they disagree.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

GB = 1_000_000_000
TFLOPS = 1e12

SOURCES = {
    "note": "published design note on partial-resident QLoRA (NVMe to GPU), its preset table",
    "measured": "measured by the authors of Carom, November 2026, one H200 (torch 2.11, CUDA 13.0)",
    "vendor": "vendor's specification: memory size and bandwidth; dense bf16 with fp32 accumulation, a peak and not "
    "measured (GeForce: twice the FP32 shader rate); link as the design note gives for that PCIe generation",
}


@dataclass(frozen=True)
class Card:
    """A GPU with its published or measured figures.

    `vram`: bytes, with 1e9 bytes for each marketed GB; the 7 % difference to a binary GiB is left to the
    desktop and driver. `bf16`, `nvfp4`: FLOP/s (None: not supported or not known); `link`: bytes/s from host
    to device on an ordinary host; `good_link`: the same on a good host, where known to differ; `memory`:
    bytes/s of device memory.
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


@dataclass(frozen=True)
class HostCost:
    """The host seconds that Python takes to issue the forward of a transformer layer (`layer`).

    `use`: further seconds for a layer that streams; `source`: where the figures come from.
    """

    layer: float
    use: float
    source: str


# Medians of the benchmark's cases host-infer-resident, -fetched and -streamed (without compression): the
# seconds of a resident layer, and the additional seconds where each block is copied anew.
HOST_COST = HostCost(
    464e-6, 184e-6, "measured on the host of an H200, benchmarks/records/2026-11-21-h200-host-time.json: a block of five matrices"
)  # fmt: skip


@dataclass(frozen=True)
class Drive:
    """An NVMe drive or array. `rate`: bytes/s of sequential direct reads."""

    name: str
    title: str
    rate: float
    source: str = SOURCES["note"]


def _card(name, title, vram, bf16, link, memory, source, **more) -> Card:
    """Return a Card from figures in GB, TFLOP/s and GB/s."""
    for key in ("nvfp4", "good_link"):
        if key in more:
            more[key] *= TFLOPS if key == "nvfp4" else GB
    return Card(
        name, title, vram * GB, bf16 * TFLOPS, link * GB, memory * GB, SOURCES[source], **more
    )  # fmt: skip


# Within a maker, ordered by memory and then by speed.
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card("rtx4060", "RTX 4060", 8, 30.2, 11, 272, "vendor"),
        _card("rtx3080", "RTX 3080", 10, 59.5, 11, 760, "vendor"),
        _card("rtx3060", "RTX 3060", 12, 25.5, 11, 360, "vendor"),
        _card("rtx4070", "RTX 4070", 12, 58.3, 11, 504, "vendor", good_link=22),
        _card("rtx5070", "RTX 5070", 12, 61.7, 22, 672, "vendor"),
        _card("rtx4060ti-16gb", "RTX 4060 Ti 16 GB", 16, 44.1, 11, 288, "vendor"),
        _card("rtx5060ti-16gb", "RTX 5060 Ti 16 GB", 16, 47.4, 22, 448, "vendor"),
        _card("rx9070xt", "Radeon RX 9070 XT", 16, 194.6, 22, 644, "vendor"),
        _card("rtx4080", "RTX 4080", 16, 97.5, 11, 717, "vendor", good_link=22),
        _card("rtx5070ti", "RTX 5070 Ti", 16, 87.9, 22, 896, "vendor"),
        _card("rtx5080", "RTX 5080", 16, 112.6, 22, 960, "vendor"),
        _card("rx7900xtx", "Radeon RX 7900 XTX", 24, 122.8, 11, 960, "vendor", good_link=22),
        _card("rtx3090", "RTX 3090", 24, 71.2, 11, 936, "vendor", good_link=22),
        _card("rtx4090", "RTX 4090", 24, 160, 11, 1008, "note", good_link=22),
        _card("rtx5090", "RTX 5090", 32, 210, 22, 1792, "note", nvfp4=567, good_link=27),
        _card("l40s", "L40S", 48, 362, 22, 864, "vendor", workstation=True),
        _card("a100", "A100 80 GB", 80, 156, 22, 2039, "note", workstation=True),
        _card("h100", "H100 80 GB", 80, 330, 22, 3350, "note", workstation=True),
        _card(
            "rtx-pro-6000", "RTX PRO 6000 Blackwell", 96, 210, 22, 1792, "note", nvfp4=567, workstation=True
        ),
        _card("h200", "H200", 141, 797, 55.5, 4800, "measured", workstation=True),
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

# Size of losslessly compressed bf16 weights (3-bit exponent codes with escapes) over their raw size, and the
# unpacked bytes that an H200 decodes per byte of its memory bandwidth
# (benchmarks/records/2026-11-22-h200-codec-3.json, triton, k 3, the settings that sessions use). Other cards
# are scaled by their memory bandwidth, because decoding reads and writes memory and computes little.
LOSSLESS_RATIO = 0.699
LOSSLESS_DECODE_PER_MEMORY = 2009.2 / 4800
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
