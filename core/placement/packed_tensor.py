"""Defines `PackedTensor`, one weight in packed (losslessly compressed) form, and `PackedLayout`.

A `PackedLayout` gives the positions of a unit's packed and plain tensors in one block of host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch

from ..codec import lossless
from ..codec.lossless import Code
from ..codec.lossless_device import STEP_BYTES, encode_device_blob
from ..codec.lossless_format import Header, parse_header
from ..codec.lossless_torch import decode_torch
from ..codec.unit_decoder import AnyEntry, LosslessEntry, PackedEntry, RawEntry, UnitDecoder, sizes
from ..host.arena import storage_bytes, typed_view
from ..model.units import Entry
from .given_up_bytes import refuse_kernels, show_one

MAX_PACKED_RATIO = 0.95  # a tensor is packed only if it shrinks to this fraction of its bytes
WIRE_ALIGN = 128  # bytes; alignment of packed tensors in a block


@dataclass(eq=False)
class PackedTensor:
    """A weight in packed form.

    ``header``: describes the packed bytes; None if ``blob`` holds the plain bytes.
    ``blob``: the bytes (uint8, host memory).
    ``tensor``: the model's tensor object.
    ``layout``: a meta tensor with the weight's dtype, shape and strides.
    ``origin``: the device to which the value returns at the end.
    ``room``: bytes of the unit's block that packed bytes of the weight may take; 0 outside of a block.
    ``snapshots``: earlier values that refer to the same bytes, which must not be overwritten.
    """

    tensor: torch.Tensor
    layout: torch.Tensor
    origin: torch.device
    header: Header | None
    blob: torch.Tensor
    room: int = 0
    snapshots: WeakSet[PackedTensor] = field(default_factory=WeakSet)

    def lies_in(self, memory: torch.Tensor) -> bool:
        """Return whether the bytes are in ``memory``, a block of host memory."""
        start, blob = memory.data_ptr(), self.blob
        inside = start <= blob.data_ptr() and blob.data_ptr() + blob.numel() <= start + memory.numel()
        return inside and blob.device == memory.device

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded value."""
        return self.layout.numel() * self.layout.element_size()

    def value(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the decoded value as a new tensor on ``device`` (default: the CPU)."""
        with torch.inference_mode(False), torch.no_grad():
            blob = self.blob if device is None or device.type == "cpu" else self.blob.to(device)
            raw = torch.empty(self.nbytes, dtype=torch.uint8, device=blob.device)
            if self.header is None:
                raw.copy_(blob)
            else:
                decoder = UnitDecoder([LosslessEntry(self.header, 0, 0)]) if blob.is_cuda else None
                decode_torch(blob, self.header, raw) if decoder is None else decoder(blob, raw)
            return raw.view(self.layout.dtype).as_strided(self.layout.shape, self.layout.stride())

    def plain(self) -> torch.Tensor:
        """Return the value as a view of the blob, without a copy. To be called only if ``header`` is None."""
        with torch.inference_mode(False), torch.no_grad():
            return typed_view(self.blob, self.layout)

    def unpack(self) -> None:
        """Decode the blob, and store the plain bytes in its place."""
        if self.header is not None:
            self.blob, self.header = storage_bytes(self.value()), None

    def give_up_memory(self) -> None:
        """Release the memory of the model's tensor. The tensor then shows a single NaN (0 for integers),
        expanded to its shape.
        """
        with torch.inference_mode(False), torch.no_grad():
            fill = math.nan if self.layout.is_floating_point() else 0
            one = torch.zeros(1).fill_(fill).to(self.layout.dtype)
            show_one(self.tensor, self.layout, one)

    def refuse_kernels(self) -> None:
        """Let the model's tensor, whose memory was given up, refuse kernels that are given the tensor itself."""
        refuse_kernels(self.tensor, self.layout)


def give_back(
    shelf: dict[int, PackedTensor],
    move: Callable[[torch.Tensor, torch.device], Any],
    only: Callable[[torch.Tensor], bool] = lambda tensor: True,
) -> None:
    """Give every packed weight its bytes again, moved to its original device by ``move`` (a method of the
    engine).

    ``only``: returns whether a weight is to be given its bytes.

    If memory runs out, the remaining weights stay packed, and the call may be repeated.
    """
    for key, packed in list(shelf.items()):
        if not only(packed.tensor):
            continue
        value = packed.value() if packed.header is not None else packed.plain()
        packed.tensor.data = value if packed.origin.type == "cpu" else move(value, packed.origin)
        packed.tensor.__dict__.pop("_carom", None)
        del shelf[key]  # before the bytes, so that the call may be repeated after an interrupt
        # Release the bytes now. Other references to this object may remain until the garbage collector frees
        # the session, and would keep a second copy of the weight in memory.
        packed.blob = torch.empty(0, dtype=torch.uint8)


def pack(
    value: torch.Tensor, threads: int | None = None, scratch: int = 1 << 29, code: Code | None = None
) -> tuple[Header, torch.Tensor] | None:
    """Return header and blob of the elements of a dense tensor in storage order, or None if packing saves too
    little.

    The blob is on the device of ``value``.
    ``scratch``: bytes of temporary memory that packing may use on that device.
    ``code``: the exponent code, by default the best one for ``value``.
    """
    flat = torch.as_strided(value.detach(), (value.numel(),), (1,), value.storage_offset())
    nbytes = flat.numel() * flat.element_size()
    if flat.device.type != "cpu":
        return encode_device_blob(
            flat, code=code, limit=int(MAX_PACKED_RATIO * nbytes), step_elements=scratch // STEP_BYTES
        )
    blob = lossless.encode(flat, threads=threads, code=code, limit=int(MAX_PACKED_RATIO * nbytes))
    return None if blob is None else (parse_header(blob.numpy().data[:128], "weight", blob.numel()), blob)


@dataclass(frozen=True)
class PackedLayout:
    """The layout of a unit's tensors in one block.

    ``places``: the offset of each tensor.
    ``entries``: the decoder's entries.
    ``nbytes``: the total bytes.
    """

    places: list[int]
    entries: list[AnyEntry]
    nbytes: int

    @property
    def packs(self) -> bool:
        """Whether any tensor is packed."""
        return not all(isinstance(entry, RawEntry) for entry in self.entries)


def lay_out_tensors(
    entries: list[Entry], packed: list[PackedTensor | None], rooms: Sequence[int] = ()
) -> PackedLayout:
    """Return the layout of a unit with the packed tensors ``packed`` (None for plain tensors), aligned to
    `WIRE_ALIGN` bytes.

    ``rooms``: the bytes to leave for each packed tensor, by default as many as it has.
    """
    found = [
        None if tensor is None or tensor.header is None else LosslessEntry(tensor.header, 0, 0)
        for tensor in packed
    ]
    return lay_out_packed(entries, found, WIRE_ALIGN, rooms)


def lay_out_packed(
    entries: list[Entry], packed: Sequence[PackedEntry | None], align: int, rooms: Sequence[int] = ()
) -> PackedLayout:
    """Return the layout of a unit: packed tensors start at multiples of ``align`` bytes, and adjacent plain
    tensors lie as in the slot.

    Adjacent plain tensors can thus be copied to the slot at once.
    ``packed``: a decoder's entry for each packed tensor, whose offsets are ignored; None for plain tensors.
    ``rooms``: as in `lay_out_tensors`.
    """
    places: list[int] = []
    wire: list[AnyEntry] = []
    end = 0
    run: tuple[int, int] | None = (
        None  # offsets in the block and in the slot at which the present run of plain tensors starts
    )
    for entry, found, room in zip(entries, packed, rooms or [0] * len(entries), strict=True):
        if found is not None:
            at = -(-end // align) * align
            wire.append(replace(found, wire_at=at, out_at=entry.offset))
            end, run = at + max(room, sizes(found)[0]), None
        else:
            if run is None:
                run = -(-end // align) * align, entry.offset
                wire.append(RawEntry(0, *run))
            at = run[0] + entry.offset - run[1]
            end = at + entry.nbytes
            wire[-1] = RawEntry(end - run[0], *run)
        places.append(at)
    return PackedLayout(places, wire, end)
