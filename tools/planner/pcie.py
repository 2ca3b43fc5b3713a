"""The rate of copies from pinned host memory to a card, by the PCIe generation and the lanes of its slot."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1_000_000_000

# Bytes/s of one lane after line coding, by generation: 8, 16 and 32 GT/s with 128b/130b coding (PCI Express Base
# Specification).
LANE_RATE = {3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130}

# Share of that rate which large copies from pinned memory reach; the rest is packet headers and flow control. Gen5:
# 55.5 of 63.0 GB/s, measured on an H200 (benchmarks/records/2026-11-21-h200-suite-3-codec.json). Gen3 and Gen4: 25 of
# 31.5 GB/s on a desktop's Gen4 x16 slot, as issue 24 of this project gives it; not measured here.
REACHED = {3: 25 / 31.5, 4: 25 / 31.5, 5: 55.5 / 63.0}


@dataclass(frozen=True)
class PcieLink:
    """A PCIe link: its generation (3, 4 or 5) and its number of lanes."""

    generation: int
    lanes: int

    @property
    def title(self) -> str:
        """The usual name, such as "PCIe 4.0 x16"."""
        return f"PCIe {self.generation}.0 x{self.lanes}"

    @property
    def rate(self) -> float:
        """The bytes/s of large copies from pinned memory, rounded to 0.1 GB/s."""
        return round(LANE_RATE[self.generation] * self.lanes * REACHED[self.generation] / GB, 1) * GB
