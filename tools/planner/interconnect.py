"""How the GPUs of one machine reach each other and host memory, and the rate at which weights come to each of them.

Pure arithmetic: rates are in bytes/s. Sources are named beside the figures; docs/planning.md says which were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import presets
from .pcie import GB
from .presets import Card

KINDS = ("nvlink", "p2p", "none")


@dataclass(frozen=True)
class NvLink:
    """The NVLink of a card.

    `rate`: bytes/s that one GPU can receive by the vendor's figure, which is half of the published sum of both
    directions; `most`: GPUs that are fully connected; `source`: where the figures come from.
    """

    rate: float
    most: int
    source: str


# Share of `NvLink.rate` that an all-gather reaches: on two H200, a unit of 340 MB came at 523 GB/s, of which a GPU
# receives one half from the other: 262 of 450 GB/s. On four it was 3/4 of 419 GB/s, which is 314; the lower share is
# taken. Other cards were not measured.
GATHER_SHARE = 523 / 2 / 450
GATHER_SOURCE = "all-gather measured on two H200 by the authors of Carom, November 2026; the same share is taken for other cards"

_HOPPER = "NVIDIA H100 and H200 data sheets: 900 GB/s in both directions"
NVLINKS: dict[str, NvLink] = {
    "rtx3090": NvLink(
        56.25 * GB, 2, "NVIDIA Ampere GA102 whitepaper: 112.5 GB/s in both directions, two cards"
    ),
    "a100": NvLink(300 * GB, 8, "NVIDIA A100 whitepaper: 600 GB/s in both directions"),
    "h100": NvLink(450 * GB, 8, _HOPPER),
    "h200": NvLink(450 * GB, 8, _HOPPER),
}

# Bytes/s that all GPUs together can read from host memory. Desktop: two channels of DDR5, by the published note.
# Workstations and servers: eight channels of DDR5-4800 (8 x 38.4 GB/s, the vendors' peak of one socket); four H200 were
# measured to read 221 GB/s together, each at the rate of its own link.
DESKTOP_MEMORY = 80 * GB
SERVER_MEMORY = 8 * 38.4 * GB


@dataclass(frozen=True)
class Interconnect:
    """The connections of `gpus` equal GPUs.

    `kind`: "nvlink", "p2p" (over PCIe) or "none"; `nvlink`: bytes/s that a GPU receives in a gather over NVLink (0
    without); `host_memory`: bytes/s that all GPUs together can read from host memory; `source`: of the NVLink figure.
    """

    gpus: int
    kind: str
    nvlink: float
    host_memory: float
    source: str = ""

    def whole_rate(self, link: float) -> float:
        """Return the rate at which each GPU gets weights if each copies all of them over its own link.

        `link`: bytes/s of one GPU's link.
        """
        return min(link, self.host_memory / self.gpus)

    def gather_rate(self, link: float) -> float | None:
        """Return the rate at which each GPU gets weights if each copies 1/N of them and gathers the rest; None where the
        GPUs do not reach each other.

        Host memory is read once. Over PCIe the gathered part arrives over the same link, so only the read of host
        memory becomes less. Over NVLink the link carries 1/N.
        """
        if self.kind == "none":
            return None
        if self.kind == "p2p":
            return min(link, self.host_memory)
        others = self.gpus - 1
        return min(self.gpus * link, self.host_memory, self.nvlink * self.gpus / others if others else link)

    def weight_rate(self, link: float) -> float:
        """Return the rate at which each GPU gets weights that all GPUs need: the faster of the two ways."""
        return max(self.whole_rate(link), self.gather_rate(link) or 0.0)

    def gathers(self, link: float) -> bool:
        """Whether gathering is faster than a copy of everything to each GPU."""
        return (self.gather_rate(link) or 0.0) > self.whole_rate(link)


def nvlink_of(card: Card) -> NvLink | None:
    """Return the NVLink of `card`, which may be a measured one with a marketing name; None where it has none."""
    try:
        preset = presets.find("gpu", card.name, presets.CARDS)
    except ValueError:
        return None
    return NVLINKS.get(preset.name)


def interconnect(
    card: Card, gpus: int, kind: str | None = None, host_memory: float | None = None
) -> Interconnect:
    """Return the connections of `gpus` cards.

    `kind`: "nvlink", "p2p" or "none"; None: NVLink where the card has it for so many GPUs, P2P over PCIe for workstation
    and data centre cards, else none (the drivers of GeForce cards do not offer it). `host_memory`: bytes/s; None: of a
    desktop, or of a server for workstation and data centre cards.

    Raises ValueError for NVLink that the card does not have, and for host memory slower than one link.
    """
    found = nvlink_of(card)
    if kind is None:
        connected = found is not None and gpus <= found.most
        kind = "nvlink" if connected else "p2p" if card.workstation else "none"
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    if kind == "nvlink" and found is None:
        known = ", ".join(NVLINKS)
        raise ValueError(f"{card.title} is not known to have NVLink ({known} have it); use --p2p or --no-p2p")
    if kind == "nvlink" and found is not None and gpus > found.most:
        raise ValueError(
            f"NVLink connects at most {found.most} cards of {card.title}, not {gpus}; use --p2p or --no-p2p"
        )
    memory = host_memory or max(card.link, SERVER_MEMORY if card.workstation else DESKTOP_MEMORY)
    if memory < card.link:
        raise ValueError(
            f"host memory of {memory / GB:g} GB/s is slower than one link of {card.link / GB:g} GB/s; give the rate of all "
            "its channels with --host-memory, or a slower --link"
        )
    rate = found.rate * GATHER_SHARE if kind == "nvlink" and found is not None else 0.0
    return Interconnect(
        gpus, kind, rate, memory, f"{found.source}; {GATHER_SOURCE}" if rate and found else ""
    )
