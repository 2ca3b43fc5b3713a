"""A weight that waits packed, and how a unit's weights lie one after another in the block that crosses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .codec import lossless
from .codec.lossless_device import encode_there
from .codec.lossless_format import Header, parse_header
from .codec.lossless_torch import decode_torch
from .codec.unit import AnyEntry, RawEntry, UnitDecoder
from .codec.unit import Entry as WireEntry
from .store.arena import own_view, storage_bytes
from .units import Entry

GAIN = 0.95  # of its bytes that a tensor must pack to
WIRE_ALIGN = 128  # bytes; where packed tensors start in a wire
_SCRATCH = 32  # bytes of device memory that packing takes per element at a time


@dataclass(eq=False)
class PackedTensor:
    """A weight that waits packed: ``blob`` (uint8, host) under ``header``, or its plain bytes where that is None.

    ``tensor`` is the model's object; ``layout``: a meta tensor of its dtype, shape and strides; ``home``: its device.
    """

    tensor: torch.Tensor
    layout: torch.Tensor
    home: torch.device
    header: Header | None
    blob: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Of the value."""
        return self.layout.numel() * self.layout.element_size()

    def value(self, device: torch.device | None = None) -> torch.Tensor:
        """The true value, a tensor of its own on ``device`` (default: the CPU)."""
        with torch.inference_mode(False), torch.no_grad():
            blob = self.blob if device is None or device.type == "cpu" else self.blob.to(device)
            raw = torch.empty(self.nbytes, dtype=torch.uint8, device=blob.device)
            if self.header is None:
                raw.copy_(blob)
            else:
                decoder = UnitDecoder([WireEntry(self.header, 0, 0)]) if blob.is_cuda else None
                decode_torch(blob, self.header, raw) if decoder is None else decoder(blob, raw)
            return raw.view(self.layout.dtype).as_strided(self.layout.shape, self.layout.stride())

    def plain(self) -> torch.Tensor:
        """The value where its plain bytes lie, in a storage of its own: no copy. Of one without header."""
        with torch.inference_mode(False), torch.no_grad():
            return own_view(self.blob, self.layout)

    def unpack(self) -> None:
        """From here on it waits as it is."""
        if self.header is not None:
            self.blob, self.header = storage_bytes(self.value()), None

    def give_up_memory(self) -> None:
        """From here on the model's object is without bytes: one NaN stands for all of its elements."""
        with torch.inference_mode(False), torch.no_grad():
            fill = math.nan if self.layout.is_floating_point() else 0
            one = torch.zeros(1).fill_(fill).to(self.layout.dtype)
            self.tensor.data = one.as_strided(self.layout.shape, (0,) * self.layout.dim())


def give_back(shelf: dict[int, PackedTensor], move: Callable[[torch.Tensor, torch.device], Any]) -> None:
    """Every packed weight has its bytes again, where ``move`` (of the engine) brings them. Where memory runs short, the
    rest waits for another call."""
    for key, packed in list(shelf.items()):
        value = packed.value() if packed.header is not None else packed.plain()
        packed.tensor.data = value if packed.home.type == "cpu" else move(value, packed.home)
        packed.tensor.__dict__.pop("_carom", None)
        # Whoever still refers to it (what the session was made of dies in cycles) must not keep the bytes twice.
        packed.blob = torch.empty(0, dtype=torch.uint8)
        del shelf[key]


def pack(
    value: torch.Tensor, threads: int | None = None, scratch: int = 1 << 29
) -> tuple[Header, torch.Tensor] | None:
    """Header and blob, where ``value`` is, of a dense tensor's elements in storage order; None where packing gains too
    little. ``scratch``: bytes of a device that may be used meanwhile."""
    flat = torch.as_strided(value.detach(), (value.numel(),), (1,), value.storage_offset())
    nbytes = flat.numel() * flat.element_size()
    if flat.device.type != "cpu":
        return encode_there(flat, limit=int(GAIN * nbytes), at_once=scratch // _SCRATCH)
    blob = lossless.encode(flat, threads=threads, limit=int(GAIN * nbytes))
    return None if blob is None else (parse_header(blob.numpy().data[:128], "weight", blob.numel()), blob)


@dataclass(frozen=True)
class Laid:
    """Where a unit's tensors lie in its wire, and what decodes them. ``packs``: whether any of them is packed."""

    places: list[int]
    entries: list[AnyEntry]
    nbytes: int

    @property
    def packs(self) -> bool:
        return any(isinstance(entry, WireEntry) for entry in self.entries)


def lay_out(entries: list[Entry], packed: list[PackedTensor | None]) -> Laid:
    """`lay_headers` of what is packed, at multiples of `WIRE_ALIGN`."""
    return lay_headers(entries, [None if found is None else found.header for found in packed], WIRE_ALIGN)


def lay_headers(entries: list[Entry], headers: Sequence[Header | None], align: int) -> Laid:
    """Packed tensors at multiples of ``align``; neighbours that travel as they are lie as in the slot, to be one copy."""
    places: list[int] = []
    wire: list[AnyEntry] = []
    end = 0
    run: tuple[int, int] | None = (
        None  # where the present run of plain tensors starts, in the wire and in the slot
    )
    for entry, header in zip(entries, headers, strict=True):
        if header is not None:
            at = -(-end // align) * align
            wire.append(WireEntry(header, at, entry.offset))
            end, run = at + header.total, None
        else:
            if run is None:
                run = -(-end // align) * align, entry.offset
                wire.append(RawEntry(0, *run))
            at = run[0] + entry.offset - run[1]
            end = at + entry.nbytes
            wire[-1] = RawEntry(end - run[0], *run)
        places.append(at)
    return Laid(places, wire, end)
