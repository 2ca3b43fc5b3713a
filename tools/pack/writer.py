"""`pack`: rewrites a checkpoint atomically, with tensors in order of use, on whole 4 KiB pages, and with
checksums.

The result is a plain safetensors file. The format forbids gaps between tensors. Therefore spaces after the
header, which the format allows, move the data section to a page boundary, and each tensor that does not fill
its last page is followed by a U8 tensor called `__pad__.N` that fills it (docs/pack.md). The header is
written last, into space reserved at the start of the file: offsets and checksums are then known after a
single pass, and an unfinished file can never be mistaken for a finished one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...core.checkpoint.direct_io import ALIGN
from ...core.checkpoint.header import MAX_HEADER_BYTES, show
from ...core.checkpoint.index import PAD_PREFIX, Index, TensorEntry, open_index, read_header
from ...core.checkpoint.packed_source import require_readable
from ...core.common.errors import CaromError, UnsupportedError, WeightsError
from ...core.common.held_files import rename, retry_while_in_use
from ...core.common.sizes import format_size
from . import output_file, report
from .destination import check_destination, copy_side_files, exists_error, explain_os_error, file_stem
from .file_layout import (
    VERSION,
    WrittenTensor,
    merged_metadata,
    packed_header,
    split_shards,
    whole_pages,
    whole_pages_first,
)
from .journal import PackError, Record, WorkFolder
from .output_file import OutputFile, sync_folder
from .quant_scheme import QuantScheme, parse_scheme
from .report import PackReport
from .transform import OutputTensor, Transform, make_transform
from .use_order import order_from_file, order_of_use
from .verify import ChunkReader, verify_packed


def pack(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    codec: str = "raw",
    quant: str | QuantScheme | None = None,
    device: str = "auto",
    order: str | os.PathLike[str] = "auto",
    shard_bytes: int | None = None,
    pad: bool = True,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Rewrite checkpoint ``source`` for streaming and return a report. The source is only read.

    ``destination``: a new `.safetensors` file, or else a new folder, which also gets the source folder's
    small files (configs, tokenizers) and, with ``shard_bytes``, several shards and their index. ``order``:
    "auto" or a file (see `order_from_file`). ``codec``: "lossless" compresses the tensors that become
    smaller, "raw" writes all tensors unpacked; both keep every bit. ``quant``: "nf4", "nf3", "nf2", or by
    kind, as in "dense=nf4,experts=nf2" (see `quant_scheme.parse_scheme`): **lossy** quantisation of the
    matrices of linear layers; all other tensors follow ``codec``. ``device``: "auto" encodes large tensors on
    a GPU where there is one, "cpu" on the CPU cores. ``pad=False`` adds no `__pad__` tensors and writes
    tensors of whole pages before all others. ``verify`` reads the result back from the drive before the
    result gets its final name. ``progress(done, total)`` is called with unpacked bytes of tensors.

    The same call resumes a run that was interrupted. Raises WeightsError for a bad source, PackError for a
    destination that exists, is full or not writable, UnsupportedError for codecs that this version lacks, and
    ValueError for settings that contradict each other.
    """
    transform = make_transform(codec, parse_scheme(quant) if isinstance(quant, str) else quant, device)
    if transform.has_metadata and not pad:
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
    run = _PackRun(index, target, single, transform, order, shard_bytes, pad)
    try:
        return run.execute(verify, progress)
    except OSError as error:
        raise explain_os_error(error, target, run.needed) from error


class _PackRun:
    """One call of `pack`: the planned layout of the output and the records of the tensors written so far."""

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
        self.stem = file_stem(index)
        self.reserve = [self._header_room(names) for names in self.shards]
        self.needed = sum(self.reserve) + sum(
            e.nbytes + (ALIGN if pad else 0) for e in index.entries.values()
        )
        self.done: list[Record] = []

    def _file_name(self, shard: int) -> str:
        """Return the file name of a shard, as model hubs number shards."""
        if len(self.shards) == 1:
            return f"{self.stem}.safetensors"
        return f"{self.stem}-{shard + 1:05d}-of-{len(self.shards):05d}.safetensors"

    def _fingerprint(self) -> str:
        """Return a hash of everything that determines the result: the source files' sizes and times, and all
        options.
        """
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
        """Return the bytes to reserve for the shard's header: an upper bound, with the longest possible
        numbers.
        """
        # A long offset, and no multiple of a page, so that every padding entry is counted.
        room = (1 << 60) + 1
        worst = []
        for name in names:
            entry, meta, shape = self.index[name], None, self.index[name].shape
            if self.transform.wanted(entry) != "raw" and self.transform.has_metadata and entry.nbytes > ALIGN:
                # Longer than any real metadata: the longest value of each field over all codecs.
                meta = {"codec": "lossless", "version": 9, "dtype": "float8_e4m3fnuz", "shape": list(shape),
                        "block": 1024, "lossy": True, "error": 0.123456e-100, "crc32": 1 << 32}  # fmt: skip
                shape = (room,) * max(len(shape), 2)
            worst.append(WrittenTensor(name, entry.dtype, shape, room, room, "0" * 64, meta))
        return whole_pages(len(self._header(worst, True)))

    def execute(self, verify: bool, progress: Callable[[int, int], None] | None) -> PackReport:
        """Write, optionally verify, and publish the result, resuming an interrupted run; return the report."""
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
        place = WorkFolder(self.target, self._fingerprint())
        try:
            self._require_space(place)
            if not self._has_recorded_bytes(place):
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
                    place.remove()  # a later run would resume from the damaged files and fail again
                    raise
            self._publish(place, files)
        except BaseException:
            place.close()
            raise
        place.remove()
        return self._report(files, resumed, time.perf_counter() - began, verify)

    def _report(self, files: list[str], resumed: int, seconds: float, verified: bool) -> PackReport:
        """Return the report of this run."""
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
            report.is_lossy_result(self.index, written), report.codecs_of(written),
            report.lossy_tensors(self.index, written),
            report.notes(self.index, self.done, self.transform),
        )  # fmt: skip

    def _has_recorded_bytes(self, place: WorkFolder) -> bool:
        """Return whether the files in the work folder contain all bytes that the journal records as written."""
        for shard, room in enumerate(self.reserve):
            end = max((w.end for r in place.records if r.shard == shard for w in r.written), default=0)
            path = os.path.join(place.output, self._file_name(shard))
            if end and (not os.path.exists(path) or os.path.getsize(path) < room + end):
                return False
        return True

    def _require_space(self, place: WorkFolder) -> None:
        """Raise PackError unless the drive has space for the bytes that are still to be written."""
        free = shutil.disk_usage(place.path).free
        have = sum(os.path.getsize(os.path.join(place.output, n)) for n in os.listdir(place.output))
        if self.needed - have > free:
            if not place.records:
                place.remove()
            raise PackError(
                f"{os.path.dirname(self.target)}: packing needs {format_size(self.needed - have)} "
                f"({self.needed - have} bytes), {format_size(free)} are free; free some space or pack to another drive"
            )

    def _write_all(self, place: WorkFolder, progress: Callable[[int, int], None] | None) -> None:
        """Write all tensors that the journal does not record yet, and each shard's header."""
        copied = sum(self.index[name].nbytes for name, _ in self.order[: len(self.done)])
        total = self.index.nbytes
        if progress:
            progress(copied, total)
        with ChunkReader() as chunks:
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
                    tensors = self._tensors(entries, chunks)
                    for number, entry, tensor in zip(numbers, entries, tensors, strict=True):
                        wrote = self._write_tensor(out, tensor, self.reserve[shard])
                        copied += entry.nbytes
                        pending.append(Record(number, shard, (wrote,)))
                        if out.uncommitted >= output_file.SYNC_BYTES:
                            self._commit(out, place, pending)
                        if progress:
                            progress(copied, total)
                    self._commit(out, place, pending)
                    written = [w for r in self.done if r.shard == shard for w in r.written]
                    lossy = report.is_lossy_result(self.index, written)
                    out.finish(self._header(written, lossy), self.reserve[shard])

    def _header(self, written: Sequence[WrittenTensor], lossy: bool) -> bytes:
        """Return the header of a shard with the tensors ``written``."""
        transform = self.transform
        return packed_header(
            written, self.metadata, transform.name, self.pad, lossy=lossy, has_metadata=transform.has_metadata
        )

    def _tensors(self, entries: Sequence[TensorEntry], chunks: ChunkReader) -> Iterator[OutputTensor]:
        """Yield the transformed ``entries`` in order; where the transform allows, convert the next while one
        is written.
        """
        transform = self.transform
        if not transform.runs_ahead:
            for entry in entries:
                yield transform(entry, chunks.read(entry))
            return
        with ThreadPoolExecutor(1, thread_name_prefix="carom-pack") as pool:

            def make(entry: TensorEntry) -> OutputTensor:
                """Read and convert the tensor ``entry``."""
                return transform(entry, chunks.read(entry))

            pending = [pool.submit(make, entry) for entry in entries[:1]]
            for number in range(len(entries)):
                tensor = pending.pop().result()
                pending = [pool.submit(make, entry) for entry in entries[number + 1 : number + 2]]
                yield tensor

    def _write_tensor(self, out: OutputFile, tensor: OutputTensor, data: int) -> WrittenTensor:
        """Write ``tensor`` and its padding to ``out``; ``data``: offset of the data section in the file."""
        begin, digest = out.at - data, hashlib.sha256()
        for part in tensor.parts:
            out.write(part)
            digest.update(part)
        end = out.at - data
        if self.pad:
            out.write(bytes(-out.at % ALIGN))
        return WrittenTensor(
            tensor.name, tensor.dtype, tensor.shape, begin, end, digest.hexdigest(), tensor.meta
        )

    def _commit(self, out: OutputFile, place: WorkFolder, pending: list[Record]) -> None:
        """Sync the file, then record the ``pending`` tensors in the journal."""
        if out.unsynced:
            out.sync()
        out.uncommitted = 0
        for record in pending:
            place.add(record)
        self.done.extend(pending)
        pending.clear()

    def _verify(self, place: WorkFolder, files: list[str]) -> None:
        """Read ``files`` back and raise PackError where they differ from what was written."""
        for file in files:
            verify_packed(os.path.join(place.output, file))
        names = {e.name for f in files for e in read_header(os.path.join(place.output, f))[1]}
        if names != {w.name for r in self.done for w in r.written}:
            raise PackError(f"{self.target}: the packed files do not hold what was written; pack again")

    def _publish(self, place: WorkFolder, files: list[str]) -> None:
        """Move the result to its final name in one atomic step.

        Raises PackError where something exists under that name.
        """
        if self.single:
            made = os.path.join(place.output, files[0])
            try:
                # Unlike a rename, a hard link fails where the target exists.
                retry_while_in_use(lambda: os.link(made, self.target))
            except FileExistsError:
                raise exists_error(self.target) from None
            except OSError:  # the file system has no hard links
                check_destination(self.target)
                rename(made, self.target)
        else:
            if len(files) > 1:
                self._write_shard_index(place, files)
            copy_side_files(self.index.path, place.output)
            check_destination(self.target)
            rename(place.output, self.target)
        sync_folder(os.path.dirname(self.target))

    def _write_shard_index(self, place: WorkFolder, files: list[str]) -> None:
        """Write the index.json that maps each tensor to its shard."""
        weight_map = {w.name: files[r.shard] for r in self.done for w in r.written}
        total = sum(w.end - w.begin for r in self.done for w in r.written)
        value = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with open(
            os.path.join(place.output, f"{self.stem}.safetensors.index.json"), "w", encoding="utf-8"
        ) as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
