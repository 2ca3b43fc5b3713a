"""Decoding all packed tensors of a unit from its wire buffer into its slot, in as few launches as possible.

The host parses headers once, when the unit is loaded; what the device needs of them is a small int64 table. Rows of one
dtype, code width and tile size share one Triton launch (in practice: one launch a unit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..errors import WeightsError
from .backends import triton_works
from .kbit import Layout, dequantize, dequantize_torch
from .lossless_format import ALIGN, Header
from .lossless_torch import decode_torch

ROW_FIELDS = 16
PIECE = 64  # bytes a lane carries of what travels as it is


@dataclass(frozen=True)
class Entry:
    """One packed tensor: its validated header, where its blob lies in the wire buffer and where it goes (bytes)."""

    header: Header
    wire_at: int
    out_at: int


@dataclass(frozen=True)
class RawEntry:
    """One tensor that travels as it is: ``nbytes`` from ``wire_at`` to ``out_at``."""

    nbytes: int
    wire_at: int
    out_at: int


@dataclass(frozen=True)
class KbitEntry:
    """One tensor quantised by a codebook (lossy): its checked layout and the dtype it is decoded to."""

    layout: Layout
    dtype: torch.dtype
    wire_at: int
    out_at: int


AnyEntry = Entry | RawEntry | KbitEntry


def sizes(entry: AnyEntry) -> tuple[int, int]:
    """(bytes on the wire, bytes in the slot)."""
    if isinstance(entry, RawEntry):
        return entry.nbytes, entry.nbytes
    if isinstance(entry, KbitEntry):
        return entry.layout.total, entry.layout.numel * entry.dtype.itemsize
    return entry.header.total, entry.header.raw_nbytes


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of the Triton decoder: tiles a program, warps (None: as many as cover the lanes)."""

    tiles: int = 1
    warps: int | None = None


class _Group(NamedTuple):
    """Tensors that one launch decodes: a header of theirs, their rows, programs."""

    header: Header
    table: torch.Tensor
    programs: int


class Piece(NamedTuple):
    """A run of a unit's tensors: from ``start`` to ``end`` in its wire, from ``out_start`` to ``out_end`` in its slot, and what decodes
    the one from a buffer of its own into the other."""

    start: int
    end: int
    out_start: int
    out_end: int
    decoder: UnitDecoder


class UnitDecoder:
    """Decodes ``entries`` from a wire buffer into a slot; both are 1-D uint8 tensors on one device.

    ``method``: "triton", "torch" or "auto" (Triton where it works and every offset is 16-byte aligned). Blobs must
    start at multiples of 16 in the wire buffer; places in the slot may be anything for "torch". `prepare` moves the table
    to the device once; after it, calls allocate nothing with Triton and never synchronise.
    """

    def __init__(
        self, entries: Sequence[AnyEntry], *, method: str = "auto", tuning: Tuning | None = None
    ) -> None:
        for entry in entries:
            if entry.wire_at % ALIGN or entry.wire_at < 0 or entry.out_at < 0:
                raise WeightsError(
                    f"a packed tensor starts at byte {entry.wire_at} of its unit; start every one at a multiple of {ALIGN}"
                )
        if method not in ("auto", "triton", "torch"):
            raise ValueError(f"method={method!r}; choose 'auto', 'triton' or 'torch'")
        self.entries = tuple(entries)
        self.method = method
        self.tuning = tuning or Tuning()
        self.wire_bytes = max((e.wire_at + sizes(e)[0] for e in entries), default=0)
        self.out_bytes = max((e.out_at + sizes(e)[1] for e in entries), default=0)
        raw = [entry for entry in entries if isinstance(entry, RawEntry) and entry.nbytes]
        self._packed = [entry for entry in entries if isinstance(entry, Entry)]
        self._aligned = all(e.out_at % ALIGN == 0 for e in entries if not isinstance(e, RawEntry))
        if method == "triton" and not self._aligned:
            raise ValueError("the Triton decoder needs every tensor at a multiple of 16 bytes in the slot")
        # Launches are remembered where nothing but copies and launches is needed.
        self._again = not any(isinstance(entry, KbitEntry) for entry in entries)
        # What travels as it is goes along with the first launch, where it lies as Triton wants it.
        along = [entry for entry in raw if self._packed and self._aligned and entry.out_at % ALIGN == 0]
        self._groups = self._make_groups(along)
        # Bytes, from where in the wire, to where: of what has to be copied beside the launches.
        self.as_it_is: Sequence[tuple[int, int, int]] = [
            (entry.nbytes, entry.wire_at, entry.out_at) for entry in raw if entry not in along
        ]
        self._tables: dict[torch.device, list[torch.Tensor]] = {}
        self._ready: list[Callable[..., Any]] | None = None  # launches that need no more than addresses
        self._pieces: tuple[int, list[Piece]] | None = None  # as `pieces` gave them last

    @property
    def table_bytes(self) -> int:
        """Device bytes that the tables take."""
        return sum(group.table.numel() * 8 for group in self._groups)

    def pieces(self, most: int) -> list[Piece]:
        """The wire in runs of whole tensors, each of at most ``most`` bytes unless one tensor is larger."""
        if self._pieces is None or self._pieces[0] != most:
            runs: list[list[AnyEntry]] = []
            for entry in self.entries:
                if not runs or entry.wire_at + sizes(entry)[0] - runs[-1][0].wire_at > most:
                    runs.append([])
                runs[-1].append(entry)
            self._pieces = most, [self._piece(run) for run in runs]
        return self._pieces[1]

    def _piece(self, run: Sequence[AnyEntry]) -> Piece:
        start, out = run[0].wire_at, run[0].out_at
        moved = [replace(entry, wire_at=entry.wire_at - start, out_at=entry.out_at - out) for entry in run]
        part = UnitDecoder(moved, method=self.method, tuning=self.tuning)
        return Piece(start, start + part.wire_bytes, out, out + part.out_bytes, part)

    def _make_groups(self, along: Sequence[RawEntry]) -> list[_Group]:
        grouped: dict[tuple[str, int, int], list[Entry]] = {}
        for entry in self._packed:
            header = entry.header
            grouped.setdefault((header.kind.name, header.k, header.lanes), []).append(entry)
        groups: list[_Group] = []
        for members in grouped.values():
            rows, programs = [], 0
            for entry in members:
                header, wire = entry.header, entry.wire_at
                places = (128, header.bits_at, header.tiles_at, header.escapes_at, 0)
                rows.append(
                    [programs, header.words // 2, *((wire + at) // ALIGN for at in places), entry.out_at // ALIGN,
                     header.base, header.tail_count, header.byte_plane_stride // ALIGN, header.tiles,
                     header.escape_bytes, 0, 0, 0]
                )  # fmt: skip
                programs += -(-header.tiles // self.tuning.tiles)
            for plain in along if not groups else ():
                rows.append(
                    [
                        programs,
                        0,
                        plain.wire_at // ALIGN,
                        *([0] * 4),
                        plain.out_at // ALIGN,
                        *([0] * 5),
                        plain.nbytes,
                        0,
                        0,
                    ]
                )
                programs += -(-plain.nbytes // (PIECE * members[0].header.lanes))
            groups.append(_Group(members[0].header, torch.tensor(rows, dtype=torch.int64), programs))
        return groups

    def _copy(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """What is copied beside the launches."""
        for nbytes, wire_at, out_at in self.as_it_is:
            out[out_at : out_at + nbytes].copy_(wire[wire_at : wire_at + nbytes], non_blocking=True)

    def again(self, wire: torch.Tensor, out: torch.Tensor) -> list[Callable[..., Any]] | None:
        """Launches of ``(wire address, out address, stream=raw handle)`` that unpack what is packed, as a call on the
        same device has done before; None where there was none. What is in `as_it_is` is left to the caller."""
        ready = self._ready
        if ready is None or wire.numel() < self.wire_bytes or out.numel() < self.out_bytes:
            return None
        return None if wire.data_ptr() % ALIGN or out.data_ptr() % ALIGN else ready

    def prepare(self, device: torch.device | str) -> None:
        """Copies the tables to ``device`` (blocking; once, when the unit is attached)."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._tables:
            self._tables[device] = [group.table.to(device) for group in self._groups]

    def __call__(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes on the current stream. Raises WeightsError where a buffer is too small for the entries."""
        ready = self.again(wire, out)
        if ready is not None:
            self._copy(wire, out)
            for launch in ready:
                launch(wire.data_ptr(), out.data_ptr())
            return
        if wire.numel() < self.wire_bytes or out.numel() < self.out_bytes:
            raise WeightsError(
                f"unit buffers hold {wire.numel()} and {out.numel()} bytes, its tensors need {self.wire_bytes} packed "
                f"and {self.out_bytes} raw"
            )
        use_triton = self.method == "triton" or (
            self.method == "auto" and self._aligned and wire.is_cuda and triton_works()
            and wire.data_ptr() % ALIGN == 0 and out.data_ptr() % ALIGN == 0
        )  # fmt: skip
        if use_triton:
            self._copy(wire, out)
        for entry in self.entries:
            if isinstance(entry, Entry):
                continue
            wire_bytes, out_bytes = sizes(entry)
            blob = wire[entry.wire_at : entry.wire_at + wire_bytes]
            target = out[entry.out_at : entry.out_at + out_bytes]
            if isinstance(entry, RawEntry):
                if not use_triton:
                    target.copy_(blob)
            elif use_triton:
                dequantize(blob, entry.layout, target.view(entry.dtype))
            else:
                dequantize_torch(blob, entry.layout, target.view(entry.dtype))
        if use_triton and self._groups:
            from .lossless_triton import launcher

            self.prepare(wire.device)
            launches = [
                launcher(
                    wire, out, table, group.programs, group.header.kind.name, group.header.k, group.header.lanes,
                    self.tuning.tiles, self.tuning.warps,
                )
                for group, table in zip(self._groups, self._tables[wire.device], strict=True)
            ]  # fmt: skip
            again = [launch for launch in launches if launch is not None]
            if self._again and len(again) == len(launches):
                self._ready = again
            return
        for entry in self._packed:
            header = entry.header
            blob = wire[entry.wire_at : entry.wire_at + header.total]
            decode_torch(blob, header, out[entry.out_at : entry.out_at + header.raw_nbytes])
