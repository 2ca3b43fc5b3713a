"""Decoding of all packed tensors of a unit from a wire buffer into a slot on the device, in as few launches
as possible.

A unit is a module whose weights are copied to the device together; its wire buffer holds the packed bytes and
its slot the decoded bytes. The host parses the headers once, when the unit is loaded; the kernel needs only a
small int64 table with a row for each tensor. Rows of the same dtype, code width and tile size share one Triton
launch, and so do quantised tensors of the same codebook, block size and dtype (in practice, one launch of each
kind decodes a unit).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..common.errors import WeightsError
from .backends import triton_works
from .kbit import Codebook, Layout, codebook_on, dequantize_torch
from .lossless_format import ALIGN, Header
from .lossless_torch import decode_torch

ROW_FIELDS = 16
COPY_BYTES = 64  # bytes of an unpacked tensor that a lane copies


@dataclass(frozen=True)
class LosslessEntry:
    """A losslessly packed tensor: its validated header, and its byte offsets in the buffers of packed and of
    decoded bytes.
    """

    header: Header
    wire_at: int
    out_at: int


@dataclass(frozen=True)
class RawEntry:
    """An unpacked tensor of ``nbytes`` bytes, with its byte offsets in the buffers of packed and of decoded
    bytes.
    """

    nbytes: int
    wire_at: int
    out_at: int


@dataclass(frozen=True)
class KbitEntry:
    """A tensor quantised by a codebook (lossy): its layout, the decoded dtype, and its byte offsets in both
    buffers.
    """

    layout: Layout
    dtype: torch.dtype
    wire_at: int
    out_at: int


PackedEntry = LosslessEntry | KbitEntry
AnyEntry = PackedEntry | RawEntry


def sizes(entry: AnyEntry) -> tuple[int, int]:
    """Return (packed bytes, decoded bytes) of an entry."""
    if isinstance(entry, RawEntry):
        return entry.nbytes, entry.nbytes
    if isinstance(entry, KbitEntry):
        return entry.layout.total, entry.layout.numel * entry.dtype.itemsize
    return entry.header.total, entry.header.raw_nbytes


@dataclass(frozen=True)
class Tuning:
    """The launch parameters of the Triton decoder.

    ``tiles``: the tiles (groups of 32 * lanes elements) that one Triton program decodes. ``warps``: the warps
    of a program (None: as many as give each of a tile's lanes a thread).
    """

    tiles: int = 1
    warps: int | None = None


class _Group(NamedTuple):
    """The tensors that one kernel launch decodes: the header of one of them, the table with a row for each,
    and the number of Triton programs to launch.
    """

    header: Header
    table: torch.Tensor
    programs: int


class WirePiece(NamedTuple):
    """A run of whole packed tensors of a unit, with a decoder that decodes the run from a buffer of its own.

    The run takes the bytes ``start`` to ``end`` of the unit's packed bytes, and ``out_start`` to ``out_end``
    of its decoded bytes.
    """

    start: int
    end: int
    out_start: int
    out_end: int
    decoder: UnitDecoder


class UnitDecoder:
    """A decoder of all packed tensors of a unit, from a buffer of packed bytes (wire) into a buffer of
    decoded bytes (slot).

    Both are 1-D uint8 tensors on the same device. ``method``: "triton", "torch" or "auto" (Triton where it
    works and every offset is 16-byte aligned). Packed tensors must start at multiples of 16 bytes; with
    "torch", offsets of decoded tensors may be any. `prepare` copies a table to the device once. After that,
    Triton launches allocate nothing and never synchronise.
    """

    def __init__(
        self, entries: Sequence[AnyEntry], *, method: str = "auto", tuning: Tuning | None = None
    ) -> None:
        for entry in entries:
            if entry.wire_at % ALIGN or entry.wire_at < 0 or entry.out_at < 0:
                raise WeightsError(
                    f"a packed tensor starts at byte {entry.wire_at} of its unit; start every packed tensor at a multiple of {ALIGN}"
                )
        if method not in ("auto", "triton", "torch"):
            raise ValueError(f"method={method!r}; choose 'auto', 'triton' or 'torch'")
        self.entries = tuple(entries)
        self.method = method
        self.tuning = tuning or Tuning()
        self.wire_bytes = max((e.wire_at + sizes(e)[0] for e in entries), default=0)
        self.out_bytes = max((e.out_at + sizes(e)[1] for e in entries), default=0)
        raw = [entry for entry in entries if isinstance(entry, RawEntry) and entry.nbytes]
        self._packed = [entry for entry in entries if isinstance(entry, LosslessEntry)]
        self._aligned = all(e.out_at % ALIGN == 0 for e in entries if not isinstance(e, RawEntry))
        if method == "triton" and not self._aligned:
            raise ValueError("the Triton decoder needs every tensor at a multiple of 16 bytes in the slot")
        self._quantised: dict[tuple[Codebook, int, torch.dtype], list[KbitEntry]] = {}
        for entry in entries:
            if isinstance(entry, KbitEntry) and entry.layout.numel:
                kind = entry.layout.codebook, entry.layout.block, entry.dtype
                self._quantised.setdefault(kind, []).append(entry)
        # Elements after the last whole group of 8, which torch operations decode.
        self._tails = [e for members in self._quantised.values() for e in members if e.layout.numel % 8]
        # Launches are cached if decoding consists of nothing but copies and kernel launches.
        self._cacheable = not self._tails
        # The first launch also copies the unpacked tensors that are 16-byte aligned in the slot.
        copied_by_launch = [
            entry for entry in raw if self._packed and self._aligned and entry.out_at % ALIGN == 0
        ]
        self._groups = self._make_groups(copied_by_launch)
        # The unpacked tensors that no kernel launch copies: (bytes, offset in the wire buffer, offset in the
        # slot) of each.
        self.raw_copies: Sequence[tuple[int, int, int]] = [
            (entry.nbytes, entry.wire_at, entry.out_at) for entry in raw if entry not in copied_by_launch
        ]
        self._tables: dict[torch.device, list[torch.Tensor]] = {}
        # For each kind of quantised tensors: (table, number of Triton programs).
        self._quantised_tables: dict[torch.device, list[tuple[torch.Tensor, int]]] = {}
        # Cached launches, which take only the addresses of buffers.
        self._cached_launches: list[Callable[..., Any]] | None = None
        self._pieces: tuple[int, list[WirePiece]] | None = None  # the last argument and result of `pieces`

    @property
    def table_bytes(self) -> int:
        """The number of bytes that the tables take on a device."""
        quantised = next(iter(self._quantised_tables.values()), [])
        tables = [*(group.table for group in self._groups), *(table for table, _ in quantised)]
        return sum(table.nbytes for table in tables)

    def pieces(self, most: int) -> list[WirePiece]:
        """Divide the packed bytes into runs of whole tensors of at most ``most`` bytes each, unless one
        tensor is larger.
        """
        if self._pieces is None or self._pieces[0] != most:
            runs: list[list[AnyEntry]] = []
            for entry in self.entries:
                if not runs or entry.wire_at + sizes(entry)[0] - runs[-1][0].wire_at > most:
                    runs.append([])
                runs[-1].append(entry)
            self._pieces = most, [self._piece(run) for run in runs]
        return self._pieces[1]

    def _piece(self, run: Sequence[AnyEntry]) -> WirePiece:
        """Return the entries ``run`` as a piece, with offsets relative to its start and a decoder of
        its own.
        """
        start, out = run[0].wire_at, run[0].out_at
        moved = [replace(entry, wire_at=entry.wire_at - start, out_at=entry.out_at - out) for entry in run]
        part = UnitDecoder(moved, method=self.method, tuning=self.tuning)
        return WirePiece(start, start + part.wire_bytes, out, out + part.out_bytes, part)

    def _make_groups(self, unpacked: Sequence[RawEntry]) -> list[_Group]:
        """Group the lossless entries by kernel launch; the first launch also copies the tensors
        ``unpacked``.
        """
        grouped: dict[tuple[str, int, int], list[LosslessEntry]] = {}
        for entry in self._packed:
            header = entry.header
            grouped.setdefault((header.kind.name, header.k, header.lanes), []).append(entry)
        groups: list[_Group] = []
        for members in grouped.values():
            rows, programs = [], 0
            for entry in members:
                header, wire = entry.header, entry.wire_at
                sections = (128, header.bits_at, header.tiles_at, header.escapes_at, 0)
                rows.append(
                    [programs, header.words // 2, *((wire + at) // ALIGN for at in sections), entry.out_at // ALIGN,
                     header.base, header.tail_count, header.byte_plane_stride // ALIGN, header.tiles,
                     header.escape_bytes, 0, 0, 0]
                )  # fmt: skip
                programs += -(-header.tiles // self.tuning.tiles)
            for plain in unpacked if not groups else ():
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
                programs += -(-plain.nbytes // (COPY_BYTES * members[0].header.lanes))
            groups.append(_Group(members[0].header, torch.tensor(rows, dtype=torch.int64), programs))
        return groups

    def _copy(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the unpacked tensors that no kernel launch copies."""
        for nbytes, wire_at, out_at in self.raw_copies:
            out[out_at : out_at + nbytes].copy_(wire[wire_at : wire_at + nbytes], non_blocking=True)

    def cached_launches(self, wire: torch.Tensor, out: torch.Tensor) -> list[Callable[..., Any]] | None:
        """Return the kernel launches that an earlier call cached, or None if there are none or they do not
        fit these buffers.

        A launch is called as ``launch(wire address, out address, stream=raw handle)``. The caller must copy
        `raw_copies` itself.
        """
        ready = self._cached_launches
        if ready is None or wire.numel() < self.wire_bytes or out.numel() < self.out_bytes:
            return None
        return None if wire.data_ptr() % ALIGN or out.data_ptr() % ALIGN else ready

    def prepare(self, device: torch.device | str) -> None:
        """Copy the tables and codebooks to ``device`` (blocking; once, when the unit is loaded)."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._tables:
            self._tables[device] = [group.table.to(device) for group in self._groups]
            for entry in self.entries:
                if isinstance(entry, KbitEntry):
                    codebook_on(entry.layout.codebook, device)
        if self._quantised and device.type == "cuda" and self._aligned and triton_works():
            self._tables_of_quantised(device)

    def _tables_of_quantised(self, device: torch.device) -> list[tuple[torch.Tensor, int]]:
        """Return the tables of the quantised tensors on ``device``, which are made once."""
        if device not in self._quantised_tables:
            from .kbit_triton import rows_of

            made = []
            for members in self._quantised.values():
                rows, programs = rows_of([(e.layout, e.wire_at, e.out_at) for e in members], device)
                made.append((torch.tensor(rows, dtype=torch.int64, device=device), programs))
            self._quantised_tables[device] = made
        return self._quantised_tables[device]

    def _launch_quantised(self, wire: torch.Tensor, out: torch.Tensor) -> list[Callable[..., Any] | None]:
        """Decode the quantised tensors, with one kernel launch for each kind. Return functions that repeat the
        launches, None for a launch that cannot be repeated.
        """
        if not self._quantised:
            return []
        from .kbit_triton import launcher

        launches = [
            launcher(wire, out, table, programs, *kind)
            for kind, (table, programs) in zip(
                self._quantised, self._tables_of_quantised(wire.device), strict=True
            )
            if programs
        ]
        for entry in self._tails:
            wire_bytes, out_bytes = sizes(entry)
            blob = wire[entry.wire_at : entry.wire_at + wire_bytes]
            target = out[entry.out_at : entry.out_at + out_bytes].view(entry.dtype)
            dequantize_torch(blob, entry.layout, target, entry.layout.numel // 8 * 8)
        return launches

    def __call__(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Decode ``wire`` into ``out`` on the current stream; raise WeightsError where a buffer is too small
        for the entries.
        """
        # Triton launches kernels on the current device, which may be another one than that of the buffers.
        with torch.cuda.device(wire.device) if wire.is_cuda else contextlib.nullcontext():
            self._decode(wire, out)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Decode ``wire`` into ``out``, whose device must be the current one if it is a GPU."""
        ready = self.cached_launches(wire, out)
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
        if not use_triton:
            self._decode_by_torch(wire, out)
            return
        launches = self._launch_quantised(wire, out)
        if self._groups:
            from .lossless_triton import launcher

            self.prepare(wire.device)
            launches += [
                launcher(
                    wire, out, table, group.programs, group.header.kind.name, group.header.k, group.header.lanes,
                    self.tuning.tiles, self.tuning.warps,
                )
                for group, table in zip(self._groups, self._tables[wire.device], strict=True)
            ]  # fmt: skip
        cached = [launch for launch in launches if launch is not None]
        if self._cacheable and launches and len(cached) == len(launches):
            self._cached_launches = cached

    def _decode_by_torch(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Decode all tensors with torch operations."""
        for entry in self.entries:
            wire_bytes, out_bytes = sizes(entry)
            blob = wire[entry.wire_at : entry.wire_at + wire_bytes]
            target = out[entry.out_at : entry.out_at + out_bytes]
            if isinstance(entry, RawEntry):
                target.copy_(blob)
            elif isinstance(entry, KbitEntry):
                dequantize_torch(blob, entry.layout, target.view(entry.dtype))
            else:
                decode_torch(blob, entry.header, target)
