"""Defines `Packer`: decides which weights are packed (compressed losslessly), and encodes them on the device
if its memory suffices, otherwise on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from ..codec.lossless_format import KIND_BY_DTYPE
from ..common.sizes import KIB, MIB, format_size
from ..device.engine import Engine
from ..host.arena import workers
from ..model.units import Entry, Unit
from .decoder_check import DecoderCheck
from .packed_tensor import PackedTensor, pack

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
LEAST = 64 * KIB  # bytes; smaller tensors are not packed
EXPECTED = (
    # The expected packed fraction of bf16 weights with a Gaussian-like distribution, with a small margin. The
    # size of staging memory is planned with this value.
    0.72
)
LEAST_SCRATCH = 4 * MIB
# In bytes. With less scratch memory, tensors are moved to the device one at a time, because otherwise
# encoding would need too many steps.
ENOUGH_SCRATCH = 128 * MIB


@dataclass(frozen=True)
class Packing:
    """The settings of packing.

    ``keep_raw``: weights keep their plain bytes as well.
    ``auto``: it is still being measured whether packed weights make steps faster.
    ``plain``: packed weights do not make steps faster, so all weights are copied to the device unpacked.
    ``stay_on_device``: the packed bytes of units may stay on the device.
    ``residents``: they do, where units can be packed, because measured times showed that this makes steps faster.
    ``one_decoded``: the region (the device memory through which units stream) has room for one decoded unit only, because
    measured times showed that this makes steps faster. The packed bytes of the next unit still cross to staging memory
    while a unit computes, and are decoded after it.
    ``rewritten``: the program will write to weights again and again, so blocks have room for values that pack worse.
    """

    keep_raw: bool = False
    auto: bool = False
    plain: bool = False
    stay_on_device: bool = True
    residents: bool = False
    one_decoded: bool = False
    rewritten: bool = False


def packs(entry: Entry) -> bool:
    """Return whether the entry's weight may be packed: frozen, large enough, and of a supported dtype."""
    return not entry.trainable and entry.nbytes >= LEAST and entry.tensor.dtype in KIND_BY_DTYPE


def host_bytes(unit: Unit, packed: bool) -> int:
    """Return the bytes of host memory that ``unit`` is expected to take, if its weights are ``packed`` or not."""
    if not packed:
        return unit.nbytes
    return sum(round(EXPECTED * entry.nbytes) if packs(entry) else entry.nbytes for entry in unit.entries)


def without_codec(units: Iterable[Unit]) -> list[str]:
    """Return notes for the report on large weights whose dtype no lossless codec supports."""
    found: dict[torch.dtype, list[Entry]] = {}
    for unit in units:
        for entry in unit.entries:
            if not entry.trainable and entry.nbytes >= LEAST and entry.tensor.dtype not in KIND_BY_DTYPE:
                found.setdefault(entry.tensor.dtype, []).append(entry)
    return [
        f"{len(entries)} weights of {str(dtype).removeprefix('torch.')} ({format_size(sum(e.nbytes for e in entries))}) "
        f"have no lossless codec and cross as they are (first {entries[0].name!r})"
        for dtype, entries in found.items()
    ]


class Packer:
    """Encodes the weights of one session while the session is created.

    ``shelf``: weights that are packed already, by the tensor's id.
    ``room``: bytes of device memory that encoding may use.
    ``largest``: bytes of the largest unit.
    """

    def __init__(
        self,
        engine: Engine,
        shelf: dict[int, PackedTensor],
        policy: Packing,
        decoder_check: DecoderCheck,
        room: int,
        largest: int,
    ) -> None:
        self._engine, self._shelf, self._policy, self._decoder_check = engine, shelf, policy, decoder_check
        # Copies a value to the device; replaced by a faster way while a layout is made.
        self.to_device: Callable[[torch.Tensor], torch.Tensor] = lambda value: value.to(engine.device)
        # Encoding needs device memory beside the scratch memory. With a unit moved ahead, it is three times
        # ``largest`` bytes (two units being moved, one being packed). Otherwise it is twice ``largest`` bytes
        # (one or two tensors being moved, and the packed tensors of their unit).
        self.moves_a_unit_ahead = not engine.unpacks or room - 3 * largest >= ENOUGH_SCRATCH
        self._largest = largest
        self.scratch_bytes = max(
            LEAST_SCRATCH, room - (3 if self.moves_a_unit_ahead else 2) * largest
        )  # bytes of temporary device memory

    def _packs(self, entry: Entry) -> bool:
        """Return whether the entry's weight is to be packed now. False if it is packed already, or packing
        was given up.
        """
        if id(entry.tensor) in self._shelf or self._decoder_check.broken or self._policy.plain:
            return False
        return packs(entry)

    def move_value(self, entry: Entry) -> torch.Tensor | None:
        """Return the weight's value on the device that encodes it, or None if the weight is not to be packed
        now.
        """
        if not self._packs(entry):
            return None
        value = entry.tensor.detach()
        if not self._engine.unpacks:
            return value if value.device.type == "cpu" else value.cpu()
        try:
            return self.to_device(value)
        except OutOfMemory:
            return value.cpu()

    def move_values_one_ahead(self, unit: Unit, pool: Executor) -> Iterator[torch.Tensor | None]:
        """Yield `move_value` of each entry. While the caller packs one value, the next is being moved.

        If a tensor takes more than half of the largest unit, values are moved one at a time, so that two
        values never take more memory than the largest unit.
        """
        if any(2 * entry.nbytes > self._largest for entry in unit.entries):
            yield from map(self.move_value, unit.entries)
            return
        coming = pool.submit(self.move_value, unit.entries[0])
        for following in (*unit.entries[1:], None):
            value = coming.result()
            if following is not None:
                coming = pool.submit(self.move_value, following)
            yield value

    def pack(self, entry: Entry, value: torch.Tensor | None, origin: torch.device) -> PackedTensor | None:
        """Return the entry's weight in packed form, with the blob on the device of ``value``, or None if the
        weight stays unpacked.

        ``origin``: the device to which the weight returns at the end.
        """
        tensor = entry.tensor
        known = self._shelf.get(id(tensor))
        if known is not None:
            return self.unpacked(known) if self._decoder_check.broken or self._policy.plain else known
        if value is None or self._decoder_check.broken:
            return None
        with torch.inference_mode(False), torch.no_grad():
            layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            try:
                found = pack(value, max(1, workers() // 2), self.scratch_bytes)
            except OutOfMemory:
                found = pack(value.cpu())
        return None if found is None else PackedTensor(tensor, layout, origin, *found)

    def unpacked(self, packed: PackedTensor | None) -> PackedTensor | None:
        """Unpack a packed weight and return it. Returns None if the model's tensor still has its plain bytes."""
        if packed is None or id(packed.tensor) not in self._shelf:
            return None
        packed.unpack()
        return packed
