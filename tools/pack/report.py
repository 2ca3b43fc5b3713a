"""The report of a `carom pack` run: figures for `--json`, and notes on tensors that could not be packed as
requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ...core.checkpoint.header import show
from ...core.checkpoint.index import Index
from ...core.checkpoint.packed_source import is_lossy
from .file_layout import WrittenTensor
from .journal import Record
from .transform import Transform


@dataclass(frozen=True)
class LossyTensor:
    """A quantised tensor with its relative error: the norm of the change, divided by the norm of the tensor.

    ``raw_bytes``: bytes before quantising; ``bytes``: bytes in the file.
    """

    name: str
    codec: str
    error: float
    raw_bytes: int
    bytes: int


@dataclass(frozen=True)
class PackReport:
    """The figures of a run. Sizes are in bytes.

    ``resumed_tensors``: number of tensors written by an earlier, interrupted run; ``raw_bytes``: size of all
    tensors when unpacked; ``tensor_bytes``: their size in the file; ``padding_bytes``: size of the padding
    tensors; ``codecs``: codec name -> number of tensors; ``lossy``: whether some values differ from the
    original's; ``lossy_tensors``: the tensors quantised by this run; ``notes``: which tensors were written
    unchanged although a codec was requested, and why.
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
        """Return the fields as a dict, for JSON."""
        return asdict(self)


def codecs_of(written: Sequence[WrittenTensor]) -> dict[str, int]:
    """Count the tensors by codec; "raw" stands for no codec."""
    return dict(Counter("raw" if w.meta is None else str(w.meta["codec"]) for w in written))


def lossy_tensors(index: Index, written: Sequence[WrittenTensor]) -> list[LossyTensor]:
    """Return the tensors in ``written`` that were quantised, in the order of the file."""
    return [
        LossyTensor(w.name, str(w.meta["codec"]), w.meta["error"], index[w.name].nbytes, w.end - w.begin)
        for w in written
        if w.meta is not None and w.meta.get("lossy")
    ]


def is_lossy_result(index: Index, written: Sequence[WrittenTensor]) -> bool:
    """Return whether some values of the result differ from the original model's, by this quantisation or an
    earlier one.
    """
    return is_lossy(index) or any((w.meta or {}).get("lossy") for w in written)


def notes(index: Index, records: Sequence[Record], transform: Transform) -> list[str]:
    """Return sentences that say which tensors did not get the requested codec, and why."""
    found: list[str] = []
    if is_lossy(index):
        found.append("the source was quantised (lossy): its values are kept, the original's are not in it")
    if not transform.has_metadata:
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
