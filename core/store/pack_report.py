"""What a packing run did, in figures and words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .header import show
from .index import Index
from .journal import Record
from .layout import Written
from .packed_source import is_lossy
from .transform import Transform


@dataclass(frozen=True)
class LossyTensor:
    """A quantised tensor: ``error`` is the norm of what quantising changed over the tensor's norm; sizes in bytes."""

    name: str
    codec: str
    error: float
    raw_bytes: int
    bytes: int


@dataclass(frozen=True)
class PackReport:
    """What a run did. Sizes in bytes; ``resumed_tensors`` were taken over from a run that had been cut short.

    ``raw_bytes``: of all tensors unpacked; ``tensor_bytes``: of what stands in the file for them; ``codecs``: tensors
    by the codec they got; ``lossy``: some values are not the original's; ``lossy_tensors``: those quantised by this
    run; ``notes``: what stayed as it is though a codec was asked for, and why.
    """

    source: str
    destination: str
    files: list[str]
    codec: str
    tensors: int
    resumed_tensors: int
    raw_bytes: int
    tensor_bytes: int
    padding_bytes: int
    written_bytes: int
    seconds: float
    verified: bool
    lossy: bool
    codecs: dict[str, int]
    lossy_tensors: list[LossyTensor]
    notes: list[str]

    def to_dict(self) -> dict:
        return asdict(self)


def codecs_of(written: Sequence[Written]) -> dict[str, int]:
    """Tensors by codec."""
    return dict(Counter("raw" if w.meta is None else str(w.meta["codec"]) for w in written))


def lossy_tensors(index: Index, written: Sequence[Written]) -> list[LossyTensor]:
    """Those that were quantised, in the file's order."""
    return [
        LossyTensor(w.name, str(w.meta["codec"]), w.meta["error"], index[w.name].nbytes, w.end - w.begin)
        for w in written
        if w.meta is not None and w.meta.get("lossy")
    ]


def is_lossy_result(index: Index, written: Sequence[Written]) -> bool:
    """Whether values of the result are not those that training gave."""
    return is_lossy(index) or any((w.meta or {}).get("lossy") for w in written)


def notes(index: Index, records: Sequence[Record], transform: Transform) -> list[str]:
    """What did not become what was asked for, in words."""
    found: list[str] = []
    if is_lossy(index):
        found.append("the source was quantised (lossy): its values are kept, the original's are not in it")
    if not transform.describes:
        return found
    stayed: dict[str, list[str]] = {}
    bare: Counter[str] = Counter()
    for w in (w for record in records for w in record.written):
        wanted = transform.wanted(index[w.name])
        got = "raw" if w.meta is None else str(w.meta["codec"])
        if wanted == "raw":
            bare[index[w.name].dtype] += transform.name == "lossless"
        elif got != wanted:
            stayed.setdefault(wanted, []).append(w.name)
    for wanted, names in stayed.items():
        why = (
            "packing them would save no page of the file"
            if wanted == "lossless"
            else "they hold NaN or infinities, or quantising them would save no page of the file"
        )
        found.append(f"{len(names)} tensors were not packed as {wanted}: {why} (first {show(names[0])})")
    for dtype, count in sorted(bare.items()):
        if count:
            found.append(f"{count} tensors of {dtype} have no lossless codec and stay raw")
    return found
