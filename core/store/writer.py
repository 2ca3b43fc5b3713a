"""`pack`: rewrites a checkpoint in the order of its use, every tensor on whole 4 KiB pages, checksummed, atomically.

The result is plain safetensors. The format forbids holes, so the data section is brought to a page boundary by
spaces after the header, which the format allows, and each tensor that does not fill its last page is followed by a
U8 tensor called `__pad__.N` that does (docs/pack.md). The header is written last, into space kept for it: offsets
and checksums are known after one pass, and an unfinished file can never be taken for a finished one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..errors import CaromError, UnsupportedError, WeightsError
from ..sizes import format_size
from . import output, pack_report
from .destination import check_destination, copy_side_files, exists, explain, stem_of
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
from .pack_report import PackReport
from .packed_source import require_readable
from .quant import Scheme, parse_scheme
from .rawio import ALIGN
from .transform import Piece, Transform, make_transform
from .verify import Chunks, verify_packed


def pack(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    codec: str = "raw",
    quant: str | Scheme | None = None,
    device: str = "auto",
    order: str | os.PathLike[str] = "auto",
    shard_bytes: int | None = None,
    pad: bool = True,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Rewrite checkpoint ``source`` for streaming.

    ``destination``: a new `.safetensors` file, or else a new folder, which also gets the source folder's small files
    (configs, tokenizers) and, with ``shard_bytes``, several shards and their index. ``order``: "auto" or a file, see
    `order_from_file`. ``codec``: "lossless" packs what gains by it and "raw" leaves it, or unpacks what was packed;
    both keep every bit. ``quant``: "nf4", "nf3", "nf2", or by kind "dense=nf4,experts=nf2" (`quant.parse_scheme`):
    **lossy**, for matrices of linear layers; the rest follows ``codec``. ``device``: "auto" packs large tensors on a
    GPU where there is one, "cpu" on the cores. ``pad=False`` adds no `__pad__` tensors: whole-page tensors come first,
    all others after them. ``verify`` reads the result back from the drive before it gets its name.
    ``progress(done, total)`` gets bytes of the tensors as they are unpacked.

    A run cut short is resumed by the same call. Raises WeightsError for a bad source, PackError for a destination
    that exists, is full or not writable, UnsupportedError for codecs this version lacks, ValueError for settings that
    do not go together. The source is only read.
    """
    transform = make_transform(codec, parse_scheme(quant) if isinstance(quant, str) else quant, device)
    if transform.describes and not pad:
        raise ValueError(
            "--no-pad goes with --codec raw alone: it is for readers that refuse unknown names, and they cannot read "
            "packed tensors either"
        )
    target = os.path.abspath(os.fsdecode(os.fspath(destination)))
    single = target.endswith(".safetensors")
    if single and shard_bytes is not None:
        raise ValueError(f"--shard-size makes several files: name a folder, not {os.path.basename(target)!r}")
    if shard_bytes is not None and shard_bytes < ALIGN:
        raise ValueError(f"a shard of {shard_bytes} bytes is too small; {ALIGN} is the least, 8GiB is usual")
    check_destination(target)
    index = open_index(source)
    require_readable(index)
    run = _Run(index, target, single, transform, order, shard_bytes, pad)
    try:
        return run.go(verify, progress)
    except OSError as error:
        raise explain(error, target, run.needed) from error


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
        self.stem = stem_of(index)
        self.reserve = [self._header_room(names) for names in self.shards]
        self.needed = sum(self.reserve) + sum(
            e.nbytes + (ALIGN if pad else 0) for e in index.entries.values()
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
            entry, meta, shape = self.index[name], None, self.index[name].shape
            if self.transform.wanted(entry) != "raw" and self.transform.describes and entry.nbytes > ALIGN:
                # Longer than any codec's: the longest of each field that there is.
                meta = {"codec": "lossless", "version": 9, "dtype": "float8_e4m3fnuz", "shape": list(shape),
                        "block": 1024, "lossy": True, "error": 0.123456e-100, "crc32": 1 << 32}  # fmt: skip
                shape = (room,) * max(len(shape), 2)
            worst.append(Written(name, entry.dtype, shape, room, room, "0" * 64, meta))
        return whole_pages(len(self._header(worst, True)))

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
        return self._report(files, resumed, time.perf_counter() - began, verify)

    def _report(self, files: list[str], resumed: int, seconds: float, verified: bool) -> PackReport:
        written = [w for record in self.done for w in record.written]
        sizes = [
            os.path.getsize(p)
            for p in ([self.target] if self.single else [os.path.join(self.target, f) for f in files])
        ]
        nbytes = sum(w.end - w.begin for w in written)
        return PackReport(
            self.index.path, self.target, [os.path.basename(self.target)] if self.single else files,
            self.transform.name, len(self.order), resumed, self.index.nbytes, nbytes,
            sum(sizes) - nbytes - sum(self.reserve), sum(sizes), seconds, verified,
            pack_report.is_lossy_result(self.index, written), pack_report.codecs_of(written),
            pack_report.lossy_tensors(self.index, written),
            pack_report.notes(self.index, self.done, self.transform),
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
                    numbers = range(first + len(mine), first + len(names))
                    entries = [self.index[self.order[number][0]] for number in numbers]
                    pieces = self._pieces(entries, chunks)
                    for number, entry, piece in zip(numbers, entries, pieces, strict=True):
                        wrote = self._write_piece(out, piece, self.reserve[shard])
                        copied += entry.nbytes
                        pending.append(Record(number, shard, (wrote,)))
                        if out.uncommitted >= output.SYNC_BYTES:
                            self._commit(out, place, pending)
                        if progress:
                            progress(copied, total)
                    self._commit(out, place, pending)
                    written = [w for r in self.done if r.shard == shard for w in r.written]
                    lossy = pack_report.is_lossy_result(self.index, written)
                    out.finish(self._header(written, lossy), self.reserve[shard])

    def _header(self, written: Sequence[Written], lossy: bool) -> bytes:
        transform = self.transform
        return packed_header(
            written, self.metadata, transform.name, self.pad, lossy=lossy, describes=transform.describes
        )

    def _pieces(self, entries: Sequence[TensorEntry], chunks: Chunks) -> Iterator[Piece]:
        """What ``entries`` become, in turn; the next is made while one is written, where the transform allows it."""
        transform = self.transform
        if not transform.ahead:
            for entry in entries:
                yield transform(entry, chunks.of(entry))
            return
        with ThreadPoolExecutor(1, thread_name_prefix="carom-pack") as pool:

            def make(entry: TensorEntry) -> Piece:
                return transform(entry, chunks.of(entry))

            coming = [pool.submit(make, entry) for entry in entries[:1]]
            for number in range(len(entries)):
                piece = coming.pop().result()
                coming = [pool.submit(make, entry) for entry in entries[number + 1 : number + 2]]
                yield piece

    def _write_piece(self, out: OutputFile, piece: Piece, data: int) -> Written:
        begin, digest = out.at - data, hashlib.sha256()
        for part in piece.parts:
            out.write(part)
            digest.update(part)
        end = out.at - data
        if self.pad:
            out.write(bytes(-out.at % ALIGN))
        return Written(piece.name, piece.dtype, piece.shape, begin, end, digest.hexdigest(), piece.meta)

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
                raise exists(self.target) from None
            except OSError:  # a file system without hard links
                check_destination(self.target)
                os.rename(made, self.target)
        else:
            if len(files) > 1:
                self._write_map(place, files)
            copy_side_files(self.index.path, place.output)
            check_destination(self.target)
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
