"""Which weights wait packed, and packing them: on the device where it has room, else on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from .codec.lossless_format import KIND_BY_DTYPE
from .decoder_proof import Proof
from .packed_tensors import PackedTensor, pack
from .sizes import KIB, MIB, format_size
from .store.arena import workers
from .transfer import Engine
from .units import Entry, Unit

OutOfMemory: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
LEAST = 64 * KIB  # bytes; smaller tensors travel as they are
EXPECTED = (
    0.72  # of the bytes that Gaussian-like bf16 weights pack to, and a little: what staging is planned for
)
LEAST_SCRATCH = 4 * MIB
ENOUGH_SCRATCH = 128 * MIB  # with less, tensors come to the device one at a time: steps would be too many


@dataclass(frozen=True)
class Packing:
    """``raw``: names of tensors whose units are not packed; ``keep_raw``: weights keep their plain bytes besides;
    ``auto``: whether units may come to cross as they are where packing does not pay; ``plain``: all do from now on;
    ``here``: whether units may stay on the device packed."""

    raw: frozenset[str] = frozenset()
    keep_raw: bool = False
    auto: bool = False
    plain: bool = False
    here: bool = True

    def leaves(self, name: str) -> bool:
        """Whether the tensor ``name`` crosses as it is."""
        return self.plain or name in self.raw


def packs(entry: Entry) -> bool:
    """Whether the entry's weight is one that may be packed."""
    return not entry.trainable and entry.nbytes >= LEAST and entry.tensor.dtype in KIND_BY_DTYPE


def without_codec(units: Iterable[Unit]) -> list[str]:
    """What to say of weights that are large enough to be packed, and of dtypes that no codec takes."""
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
    """Packs one session's weights while it attaches. ``shelf``: what is packed already, by its object's id; ``room``:
    bytes of the device that may be used meanwhile, ``largest``: of a unit."""

    def __init__(
        self,
        engine: Engine,
        shelf: dict[int, PackedTensor],
        policy: Packing,
        proof: Proof,
        room: int,
        largest: int,
    ) -> None:
        self._engine, self._shelf, self._policy, self._proof = engine, shelf, policy, proof
        # Ahead: two units are on their way, and one is there packed. Else: a tensor or two, and their unit's packed ones.
        self.ahead = not engine.unpacks or room - 3 * largest >= ENOUGH_SCRATCH
        self._largest = largest
        self.scratch_bytes = max(LEAST_SCRATCH, room - (3 if self.ahead else 2) * largest)  # of the device

    def _packs(self, entry: Entry) -> bool:
        """Whether the entry's weight is to be packed now."""
        if id(entry.tensor) in self._shelf or self._proof.broken or self._policy.leaves(entry.name):
            return False
        return packs(entry)

    def bring(self, entry: Entry) -> torch.Tensor | None:
        """The value of a weight that is to be packed, where it is packed; None of one that is not."""
        if not self._packs(entry):
            return None
        value = entry.tensor.detach()
        if not self._engine.unpacks:
            return value if value.device.type == "cpu" else value.cpu()
        try:
            return value.to(self._engine.device)
        except OutOfMemory:
            return value.cpu()

    def bring_in_turn(self, unit: Unit, pool: Executor) -> Iterator[torch.Tensor | None]:
        """`bring` for each of the unit's entries. While one is packed the next is on its way, where no tensor is more than half of the
        largest unit: two of them take no more than one of that size."""
        if any(2 * entry.nbytes > self._largest for entry in unit.entries):
            yield from map(self.bring, unit.entries)
            return
        coming = pool.submit(self.bring, unit.entries[0])
        for following in (*unit.entries[1:], None):
            value = coming.result()
            if following is not None:
                coming = pool.submit(self.bring, following)
            yield value

    def pack(self, entry: Entry, value: torch.Tensor | None, home: torch.device) -> PackedTensor | None:
        """The entry's weight packed, its blob where ``value`` is; None for one that stays as it is. ``home``: its
        device."""
        tensor = entry.tensor
        known = self._shelf.get(id(tensor))
        if known is not None:
            return self.unpacked(known) if self._proof.broken or self._policy.leaves(entry.name) else known
        if value is None or self._proof.broken:
            return None
        with torch.inference_mode(False), torch.no_grad():
            layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            try:
                found = pack(value, max(1, workers() // 2), self.scratch_bytes)
            except OutOfMemory:
                found = pack(value.cpu())
        return None if found is None else PackedTensor(tensor, layout, home, *found)

    def unpacked(self, packed: PackedTensor | None) -> PackedTensor | None:
        """The weight with its bytes as they are; None where the model's object still has them."""
        if packed is None or id(packed.tensor) not in self._shelf:
            return None
        packed.unpack()
        return packed
