"""`pack`: rewrites a checkpoint in the order of its use, every tensor on whole 4 KiB pages, checksummed, atomically.

The result is plain safetensors. The format forbids holes, so the data section is brought to a page boundary by
spaces after the header, which the format allows, and each tensor that does not fill its last page is followed by a
U8 tensor called `__pad__.N` that does (docs/pack.md). The header is written last, into space kept for it: offsets
and checksums are known after one pass, and an unfinished file can never be taken for a finished one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from ..errors import CaromError, UnsupportedError, WeightsError
from ..sizes import format_size
from . import output
from .header import MAX_HEADER_BYTES, show
from .index import PAD_PREFIX, Index, TensorEntry, open_index, read_header
from .journal import PackError, Record, Workplace
from .layout import (
    VERSION,
    Written,
    merged_metadata,
    packed_header,
    split_shards,
    whole_pages,
    whole_pages_first,
)
from .order import order_from_file, order_of_use
from .output import OutputFile, sync_folder
from .rawio import ALIGN
from .verify import Chunks, verify_packed

_SIDE_SUFFIXES = (
    ".json", ".txt", ".model", ".md", ".jinja", ".tiktoken", ".yaml", ".yml", ".vocab", ".merges", ".py",
)  # fmt: skip
_SIDE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to be written: its header entry and its bytes in parts. A part is used up before the next is asked for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Iterable[memoryview | bytes]


class Transform(Protocol):
    """What turns a source tensor into tensors of the packed file; the seam where codecs come in.

    ``name`` stands in the file as its codec. `most` bounds how many tensors one becomes, and ``longer`` how many
    characters their names are longer, so that room for the header can be kept before sizes are known. Calling it
    gives the pieces in turn, from the tensor's bytes in parts; the total must not exceed the source's by more than
    ``growth`` bytes a tensor.
    """

    name: str
    longer: int
    growth: int

    def most(self, entry: TensorEntry) -> int: ...

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> Iterator[Piece]: ...


class _Raw:
    """Every tensor as it is."""

    name, longer, growth = "raw", 0, 0

    def most(self, entry: TensorEntry) -> int:
        return 1

    def __call__(self, entry: TensorEntry, parts: Iterator[memoryview]) -> Iterator[Piece]:
        yield Piece(entry.name, entry.dtype, entry.shape, parts)


TRANSFORMS: dict[str, Transform] = {"raw": _Raw()}


@dataclass(frozen=True)
class PackReport:
    """What a run did. Sizes in bytes; ``resumed_tensors`` were taken over from a run that had been cut short."""

    source: str
    destination: str
    files: list[str]
    codec: str
    tensors: int
    resumed_tensors: int
    tensor_bytes: int
    padding_bytes: int
    written_bytes: int
    seconds: float
    verified: bool

    def to_dict(self) -> dict:
        return asdict(self)


def pack(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    codec: str = "raw",
    order: str | os.PathLike[str] = "auto",
    shard_bytes: int | None = None,
    pad: bool = True,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Rewrite checkpoint ``source`` for streaming.

    ``destination``: a new `.safetensors` file, or else a new folder, which also gets the source folder's small files
    (configs, tokenizers) and, with ``shard_bytes``, several shards and their index. ``order``: "auto" or a file, see
    `order_from_file`. ``pad=False`` adds no `__pad__` tensors: whole-page tensors come first, all others after them.
    ``verify`` reads the result back from the drive before it gets its name. ``progress(done, total)`` gets source bytes.

    A run cut short is resumed by the same call. Raises WeightsError for a bad source, PackError for a destination
    that exists, is full or not writable, UnsupportedError for codecs this version lacks. The source is only read.
    """
    if codec not in TRANSFORMS:
        raise UnsupportedError(
            f"codec {codec!r}: this version of carom packs {', '.join(sorted(TRANSFORMS))} only; use --codec raw"
        )
    target = os.path.abspath(os.fsdecode(os.fspath(destination)))
    single = target.endswith(".safetensors")
    if single and shard_bytes is not None:
        raise ValueError(f"--shard-size makes several files: name a folder, not {os.path.basename(target)!r}")
    if shard_bytes is not None and shard_bytes < ALIGN:
        raise ValueError(f"a shard of {shard_bytes} bytes is too small; use 1GiB or more")
    _check_destination(target)
    index = open_index(source)
    if index.codec != "raw":
        raise UnsupportedError(
            f"{index.path}: is packed with codec {index.codec!r}, which this version cannot undo"
        )
    run = _Run(index, target, single, TRANSFORMS[codec], order, shard_bytes, pad)
    try:
        return run.go(verify, progress)
    except OSError as error:
        raise _explain(error, target, run.needed) from error


class _Run:
    """One call of `pack`."""

    def __init__(
        self,
        index: Index,
        target: str,
        single: bool,
        transform: Transform,
        order: str | os.PathLike[str],
        shard_bytes: int | None,
        pad: bool,
    ) -> None:
        self.index, self.target, self.single, self.transform, self.pad = index, target, single, transform, pad
        names = list(index)
        names = order_of_use(names) if order == "auto" else order_from_file(order, names)
        if not pad:
            names = whole_pages_first(names, index)
        self.shards = split_shards(names, index, shard_bytes)
        self.order = [(name, shard) for shard, names in enumerate(self.shards) for name in names]
        self.metadata = merged_metadata(index)
        self.stem = _stem(index)
        self.reserve = [self._header_room(names) for names in self.shards]
        self.needed = sum(self.reserve) + sum(
            e.nbytes + transform.growth + (ALIGN if pad else 0) for e in index.entries.values()
        )
        self.done: list[Record] = []

    def _file_name(self, shard: int) -> str:
        if len(self.shards) == 1:
            return f"{self.stem}.safetensors"
        return f"{self.stem}-{shard + 1:05d}-of-{len(self.shards):05d}.safetensors"

    def _fingerprint(self) -> str:
        """Of all that decides the result; a source touched since, or another option, makes another one."""
        files = [(f.path, f.size, f.mtime_ns, f.inode) for f in self.index.files]
        what = [
            VERSION,
            files,
            self.order,
            self.transform.name,
            self.pad,
            self.single,
            self.metadata,
            self.stem,
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def _header_room(self, names: list[str]) -> int:
        """Bytes to keep before the data: a header of the widest numbers that this shard could need."""
        room = (1 << 60) + 1  # no whole page, so that every padding entry is counted
        worst = []
        for name in names:
            entry = self.index[name]
            for number in range(self.transform.most(entry)):
                longer = name + "x" * self.transform.longer + (str(number) if number else "")
                shape = entry.shape if self.transform.name == "raw" else (room,) * max(len(entry.shape), 2)
                worst.append(Written(longer, entry.dtype, shape, room, room, "0" * 64))
        return whole_pages(len(packed_header(worst, self.metadata, self.transform.name, self.pad)))

    def go(self, verify: bool, progress: Callable[[int, int], None] | None) -> PackReport:
        began = time.perf_counter()
        for room, names in zip(self.reserve, self.shards, strict=True):
            if room > MAX_HEADER_BYTES:
                raise UnsupportedError(
                    f"{len(names)} tensors need a header of {format_size(room)}; use --shard-size for several files"
                )
        clash = [name for name in self.index if name.startswith(PAD_PREFIX)]
        if clash:
            raise WeightsError(
                f"{self.index.path}: {show(clash[0])} is a name Carom uses for padding; rename it"
            )
        place = Workplace(self.target, self._fingerprint())
        try:
            self._require_space(place)
            if not self._still_there(place):
                place.restart(self._fingerprint())
            self.done = list(place.records)
            resumed = len(self.done)
            self._write_all(place, progress)
            self.index.check()
            files = [self._file_name(i) for i in range(len(self.shards))]
            if verify:
                try:
                    self._verify(place, files)
                except CaromError:
                    place.remove()  # kept, it would be taken over and fail again
                    raise
            self._publish(place, files)
        except BaseException:
            place.close()
            raise
        place.remove()
        tensors = [w for record in self.done for w in record.written]
        sizes = [
            os.path.getsize(p)
            for p in ([self.target] if self.single else [os.path.join(self.target, f) for f in files])
        ]
        nbytes = sum(w.end - w.begin for w in tensors)
        return PackReport(
            self.index.path, self.target, [os.path.basename(self.target)] if self.single else files,
            self.transform.name, len(self.order), resumed, nbytes, sum(sizes) - nbytes - sum(self.reserve),
            sum(sizes), time.perf_counter() - began, verify,
        )  # fmt: skip

    def _still_there(self, place: Workplace) -> bool:
        """Whether the files hold as many bytes as the journal speaks of."""
        for shard, room in enumerate(self.reserve):
            end = max((w.end for r in place.records if r.shard == shard for w in r.written), default=0)
            path = os.path.join(place.output, self._file_name(shard))
            if end and (not os.path.exists(path) or os.path.getsize(path) < room + end):
                return False
        return True

    def _require_space(self, place: Workplace) -> None:
        free = shutil.disk_usage(place.path).free
        have = sum(os.path.getsize(os.path.join(place.output, n)) for n in os.listdir(place.output))
        if self.needed - have > free:
            if not place.records:
                place.remove()
            raise PackError(
                f"{os.path.dirname(self.target)}: packing needs {format_size(self.needed - have)} "
                f"({self.needed - have} bytes), {format_size(free)} are free; free some space or pack to another drive"
            )

    def _write_all(self, place: Workplace, progress: Callable[[int, int], None] | None) -> None:
        copied = sum(self.index[name].nbytes for name, _ in self.order[: len(self.done)])
        total = self.index.nbytes
        if progress:
            progress(copied, total)
        with Chunks() as chunks:
            for shard, names in enumerate(self.shards):
                first = next((i for i, (_, s) in enumerate(self.order) if s == shard), len(self.order))
                mine = [r for r in self.done if r.shard == shard]
                written = [w for r in mine for w in r.written]
                with OutputFile(os.path.join(place.output, self._file_name(shard))) as out:
                    at = max((w.end for w in written), default=0)
                    out.resume(self.reserve[shard] + (whole_pages(at) if self.pad else at))
                    pending: list[Record] = []
                    for number in range(first + len(mine), first + len(names)):
                        entry = self.index[self.order[number][0]]
                        pieces = []
                        for piece in self.transform(entry, chunks.of(entry)):
                            pieces.append(self._write_piece(out, piece, self.reserve[shard]))
                        copied += entry.nbytes
                        pending.append(Record(number, shard, tuple(pieces)))
                        if out.uncommitted >= output.SYNC_BYTES:
                            self._commit(out, place, pending)
                        if progress:
                            progress(copied, total)
                    self._commit(out, place, pending)
                    records = [r for r in self.done if r.shard == shard]
                    out.finish(
                        packed_header(
                            [w for r in records for w in r.written],
                            self.metadata,
                            self.transform.name,
                            self.pad,
                        ),
                        self.reserve[shard],
                    )

    def _write_piece(self, out: OutputFile, piece: Piece, data: int) -> Written:
        begin, digest = out.at - data, hashlib.sha256()
        for part in piece.parts:
            out.write(part)
            digest.update(part)
        end = out.at - data
        if self.pad:
            out.write(bytes(-out.at % ALIGN))
        return Written(piece.name, piece.dtype, piece.shape, begin, end, digest.hexdigest())

    def _commit(self, out: OutputFile, place: Workplace, pending: list[Record]) -> None:
        if out.unsynced:
            out.sync()
        out.uncommitted = 0
        for record in pending:
            place.add(record)
        self.done.extend(pending)
        pending.clear()

    def _verify(self, place: Workplace, files: list[str]) -> None:
        for file in files:
            verify_packed(os.path.join(place.output, file))
        names = {e.name for f in files for e in read_header(os.path.join(place.output, f))[1]}
        if names != {w.name for r in self.done for w in r.written}:
            raise PackError(f"{self.target}: the packed files do not hold what was written; pack again")

    def _publish(self, place: Workplace, files: list[str]) -> None:
        """Give the result its name, in one step, never over something that stands there."""
        if self.single:
            made = os.path.join(place.output, files[0])
            try:
                os.link(made, self.target)  # unlike a rename it fails where something stands
            except FileExistsError:
                raise _exists(self.target) from None
            except OSError:  # a file system without hard links
                _check_destination(self.target)
                os.rename(made, self.target)
        else:
            if len(files) > 1:
                self._write_map(place, files)
            _copy_side_files(self.index.path, place.output)
            _check_destination(self.target)
            os.rename(place.output, self.target)
        sync_folder(os.path.dirname(self.target))

    def _write_map(self, place: Workplace, files: list[str]) -> None:
        weight_map = {w.name: files[r.shard] for r in self.done for w in r.written}
        total = sum(w.end - w.begin for r in self.done for w in r.written)
        value = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with open(
            os.path.join(place.output, f"{self.stem}.safetensors.index.json"), "w", encoding="utf-8"
        ) as file:
            json.dump(value, file, indent=2, ensure_ascii=False)


def _stem(index: Index) -> str:
    """The name under which transformers or diffusers look for this checkpoint."""
    names = [os.path.basename(index.path), *(os.path.basename(f.path) for f in index.files)]
    return (
        "diffusion_pytorch_model" if any(n.startswith("diffusion_pytorch_model") for n in names) else "model"
    )


def _copy_side_files(source: str, folder: str) -> None:
    """Configs and tokenizers beside the source's weights, so that the packed folder loads like the source."""
    base = source if os.path.isdir(source) else os.path.dirname(os.path.abspath(source))
    if not os.path.isdir(source) and not source.endswith(".json"):
        return  # a lone file: what lies beside it may be anything
    for name in sorted(os.listdir(base)):
        path, copy = os.path.join(base, name), os.path.join(folder, name)
        if not name.endswith(_SIDE_SUFFIXES) or name.endswith(".index.json") or os.path.lexists(copy):
            continue
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode) and found.st_size <= _SIDE_BYTES:
            shutil.copyfile(path, copy)


def _check_destination(target: str) -> None:
    if os.path.lexists(target):
        raise _exists(target)
    parent = os.path.dirname(target)
    try:
        if not stat.S_ISDIR(os.stat(parent).st_mode):
            raise PackError(f"{parent}: not a folder; choose another destination")
        os.lstat(target)
    except FileNotFoundError:
        if not os.path.isdir(parent):
            raise PackError(f"{parent}: no such folder; create it first") from None
    except (OSError, ValueError) as error:
        raise _explain(error, target, 0) from error


def _exists(target: str) -> PackError:
    return PackError(
        f"{target}: exists already, and nothing is overwritten; move it away or choose another name"
    )


def _explain(error: OSError | ValueError, target: str, needed: int) -> PackError:
    number = getattr(error, "errno", 0)
    advice = {
        errno.ENOSPC: f"the drive became full; packing needs {format_size(needed)} in all. Free some space and run the "
        "same command again: it goes on where it stopped (the unfinished part is the folder .carom-pack-* beside it)",
        errno.EFBIG: "the file system takes no file that large; pack to a folder with --shard-size 2GiB",
        errno.EROFS: "the file system is read-only; choose another destination",
        errno.EACCES: "no permission to write there; change the folder's permissions or choose another destination",
        errno.EPERM: "no permission to write there; change the folder's permissions or choose another destination",
        errno.ENAMETOOLONG: "the name or path is too long for this file system; choose a shorter one",
    }
    if hasattr(errno, "EDQUOT"):
        advice[errno.EDQUOT] = advice[errno.ENOSPC].replace("drive became full", "quota is used up")
    return PackError(f"{target[:300]}: {advice.get(number or 0, f'cannot be written: {error}')}")
