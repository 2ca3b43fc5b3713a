"""The index of a safetensors checkpoint: file, byte offset, dtype and shape of each tensor. Reads headers,
never weights.

A model of any size is indexed in the time that reading its headers takes. Everything is validated before it
is used, and each file's identity is kept, so that a file that is replaced or truncated while in use is
noticed (`SourceFile.check`).
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..common.errors import UnsupportedError, WeightsError
from .format_errors import (
    PICKLE_SUFFIXES,
    parse_strict_json,
    pickle_error,
    refuse_other_formats,
    refuse_pickle_name,
    unreadable_error,
)
from .header import MAX_HEADER_BYTES, MAX_TENSORS, check_ranges, parse_header, show

if TYPE_CHECKING:
    import torch

PAD_PREFIX = "__pad__."
PACK_KEY = "carom.pack"
CHECKSUM_KEY = "carom.sha256"
CODEC_KEY, CODEC_VERSION = "carom.codec", 1  # the metadata entry that describes packed tensors: docs/codec.md
MAX_FILES = 10_000

_SHARD = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})\.safetensors")
# The names that transformers and diffusers load by default, for folders that hold several checkpoints.
_DEFAULT_NAMES = ("model", "diffusion_pytorch_model")

_TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip


def format_code(torch_name: str) -> str:
    """Return the safetensors dtype code of a torch dtype's name: "BF16" for "bfloat16"."""
    return next(code for code, name in _TORCH_DTYPES.items() if name == torch_name)


def has_code(torch_name: str) -> bool:
    """Return whether safetensors has a dtype code for the torch dtype of that name."""
    return torch_name in _TORCH_DTYPES.values()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The identity of a file at the time its header was read; ``size`` in bytes, ``mtime_ns`` in
    nanoseconds.
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    device: int

    def check(self, found: os.stat_result | None = None) -> None:
        """Raise WeightsError if the file at the path was replaced or changed since its header was read.

        ``found``: the fstat result of the open file, if the file is open.
        """
        if found is None:
            try:
                found = os.stat(self.path)
            except OSError as error:
                raise WeightsError(
                    f"{self.path}: gone while in use ({error.strerror}); put it back and load it again"
                ) from error
        if (found.st_ino, found.st_dev) != (self.inode, self.device):
            change = "was replaced by another file"
        elif found.st_size != self.size:
            change = f"changed from {self.size} to {found.st_size} bytes"
        elif found.st_mtime_ns != self.mtime_ns:
            change = "was written to"
        else:
            return
        raise WeightsError(f"{self.path}: {change} while in use; leave weights files alone and load it again")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: ``dtype`` is the safetensors code ("BF16"), ``offset`` counts bytes from the start
    of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: SourceFile
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's torch dtype; raises UnsupportedError if this version of torch has none."""
        # Imported here, because `carom pack` works without torch and in a fraction of its memory.
        import torch

        found = getattr(torch, _TORCH_DTYPES.get(self.dtype, ""), None)
        if not isinstance(found, torch.dtype):
            raise UnsupportedError(
                f"tensor {show(self.name)}: torch {torch.__version__} has no dtype for {self.dtype}; "
                "a newer torch may"
            )
        return found

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The tensor's shape in torch, where an element of a 4-bit dtype stands for two."""
        if self.dtype == "F4" and self.shape:
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint by name, in file order; padding that `carom pack` added is left out.

    An entry of a packed tensor describes the decoded tensor (`packed_source`). ``metadata``: the
    `__metadata__` of each file, in the order of ``files``.
    """

    path: str
    files: tuple[SourceFile, ...]
    entries: Mapping[str, TensorEntry]
    metadata: tuple[Mapping[str, str], ...] = field(repr=False)

    def __getitem__(self, name: str) -> TensorEntry:
        try:
            return self.entries[name]
        except KeyError:
            raise WeightsError(
                f"{self.path}: no tensor named {show(name)}{_similar_name_hint(name, self)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors, without padding and headers."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def codec(self) -> str:
        """The codec that `carom pack` was given: "raw", "lossless", or the quantisation
        ("dense=nf4,experts=nf2").
        """
        names = {str(_pack_info(m, self.path).get("codec", "raw")) for m in self.metadata if PACK_KEY in m}
        if len(names) > 1:
            raise WeightsError(
                f"{self.path}: files packed with different codecs {sorted(names)}; pack them again"
            )
        return names.pop() if names else "raw"

    @property
    def lossy(self) -> bool:
        """Whether `carom pack` marked these files as quantised, so that values differ from the original
        checkpoint's.
        """
        return any(_pack_info(m, self.path).get("lossy") is True for m in self.metadata if PACK_KEY in m)

    @property
    def packed(self) -> bool:
        """Whether `carom pack` wrote all of these files."""
        return all(PACK_KEY in metadata for metadata in self.metadata)

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 (hex) of each tensor's bytes by name, for tensors of which `carom pack` recorded
        one.
        """
        found: dict[str, str] = {}
        for metadata in self.metadata:
            if CHECKSUM_KEY in metadata:
                part = parse_strict_json(metadata[CHECKSUM_KEY], f"{self.path}: {CHECKSUM_KEY}")
                if not all(isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v) for v in part.values()):
                    raise WeightsError(f"{self.path}: {CHECKSUM_KEY} is damaged; pack the checkpoint again")
                found.update(part)
        return found

    def check(self) -> None:
        """Raise WeightsError if any file was replaced, truncated or written to since the index was read."""
        for file in self.files:
            file.check()


def open_index(path: str | os.PathLike[str]) -> Index:
    """Return the index of a .safetensors file, of a folder of such files, or of a `*.index.json`.

    Raises WeightsError for files that cannot be read or are invalid, and UnsupportedError for pickle
    checkpoints, which are never opened. Symbolic links are followed (Hugging Face caches consist of them).
    """
    try:
        text = os.fsdecode(os.fspath(path))
        mode = os.stat(text).st_mode
    except (OSError, ValueError, TypeError) as error:
        raise unreadable_error(str(path), error) from error
    if stat.S_ISDIR(mode):
        return _open_folder(text)
    if text.endswith(".json"):
        return _open_map(text)
    return _index_files(text, [text], None)


def read_header(path: str) -> tuple[SourceFile, list[TensorEntry], dict[str, str]]:
    """Return the identity, the tensors (in order of their bytes) and the metadata of a file; raises as
    `open_index` does.
    """
    refuse_pickle_name(path)
    try:
        # O_NONBLOCK: if the path is a FIFO, opening must not wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        fd = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise WeightsError(f"{path}: not a regular file; name a .safetensors file or a folder of them")
        file = SourceFile(path, found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)
        data = _read_header_bytes(fd, file)
    except OSError as error:
        raise unreadable_error(path, error) from error
    finally:
        os.close(fd)
    raw, metadata = parse_header(data, path)
    start = 8 + len(data)
    check_ranges(raw, file.size - start, path)
    raw.sort(key=lambda t: (t.begin, t.end))
    entries = [
        TensorEntry(t.name, t.dtype, t.shape, file, start + t.begin, t.end - t.begin)
        for t in raw
        if not (t.name.startswith(PAD_PREFIX) and PACK_KEY in metadata)
    ]
    return file, entries, metadata


def _read_header_bytes(fd: int, file: SourceFile) -> bytes:
    """Return the JSON bytes of the header, after checking their declared length."""
    start = os.read(fd, 9)
    if len(start) < 8:
        raise WeightsError(
            f"{file.path}: {file.size} bytes are no safetensors file; download or copy it again"
        )
    length = struct.unpack("<Q", start[:8])[0]
    if start[8:] != b"{":
        refuse_other_formats(start, file.path)
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{file.path}: its header claims {length} bytes; at most {MAX_HEADER_BYTES} are taken. "
            "This is no safetensors file, or a damaged one; download or convert it again."
        )
    if length < 2 or 8 + length > file.size:
        raise WeightsError(
            f"{file.path}: its header claims {length} bytes, the file holds {max(file.size - 8, 0)} after the length. "
            "It is truncated or damaged; download or copy it again."
        )
    parts, left = [start[8:]], length - len(start[8:])
    while left > 0:
        part = os.read(fd, min(left, 1 << 24))
        if not part:
            raise WeightsError(f"{file.path}: became shorter while its header was read; copy it again")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _index_files(root: str, paths: Iterable[str], weight_map: Mapping[str, str] | None) -> Index:
    """Return the index of all files ``paths``.

    ``weight_map`` ({tensor name: file name}) decides which file's tensor is used if several have the same
    name.
    """
    files: list[SourceFile] = []
    merged: dict[str, TensorEntry] = {}
    metadata: list[Mapping[str, str]] = []
    for path in paths:
        file, entries, meta = read_header(path)
        files.append(file)
        metadata.append(MappingProxyType(meta))
        for entry in entries:
            chosen = weight_map.get(entry.name) if weight_map else None
            if chosen is not None and chosen != os.path.basename(path):
                continue
            if entry.name in merged:
                raise WeightsError(
                    f"{root}: tensor {show(entry.name)} stands in {os.path.basename(merged[entry.name].file.path)!r} "
                    f"and in {os.path.basename(path)!r}; name one file, or the index.json that decides"
                )
            merged[entry.name] = entry
            if len(merged) > MAX_TENSORS:
                raise WeightsError(f"{root}: more than {MAX_TENSORS} tensors")
    if weight_map:
        absent = [name for name in weight_map if name not in merged]
        if absent:
            raise WeightsError(
                f"{root}: {len(absent)} tensors are not in the file the index names, first {show(absent[0])} in "
                f"{weight_map[absent[0]]!r}; download the folder again"
            )
    if any(CODEC_KEY in meta for meta in metadata):
        from .packed_source import as_decoded  # imported here, because it needs torch

        merged = as_decoded(merged, files, metadata)
    return Index(root, tuple(files), MappingProxyType(merged), tuple(metadata))


def _open_map(path: str) -> Index:
    """Return the index of a `*.index.json` as transformers and diffusers write it: {"weight_map": {name: file
    name}}.
    """
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise WeightsError(f"{path}: not a regular file")
            data = file.read(MAX_HEADER_BYTES + 1)
    except (OSError, ValueError) as error:
        raise unreadable_error(path, error) from error
    if len(data) > MAX_HEADER_BYTES:
        raise WeightsError(f"{path}: an index of more than {MAX_HEADER_BYTES} bytes is not taken")
    try:
        weight_map = parse_strict_json(data.decode("utf-8"), path).get("weight_map")
    except UnicodeError:
        raise WeightsError(f"{path}: not UTF-8; download it again") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: has no weight_map; name the index.json of a safetensors checkpoint")
    for name, shard in weight_map.items():
        if isinstance(shard, str):
            refuse_pickle_name(shard)
        if not isinstance(shard, str) or shard in ("", ".", "..") or re.search(r"[/\\\0:]", shard):
            raise WeightsError(
                f"{path}: tensor {show(name)} is said to be in {shard!r:.200}, which is no file name; "
                "shards stand beside their index"
            )
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_FILES:
        raise WeightsError(f"{path}: names {len(shards)} files; at most {MAX_FILES} are taken")
    folder = os.path.dirname(path)
    return _index_files(path, [os.path.join(folder, shard) for shard in shards], weight_map)


def _open_folder(folder: str) -> Index:
    """Return the index of a folder: of its only checkpoint, or of the one with a default name."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable_error(folder, error) from error
    maps = [n for n in names if n.endswith(".safetensors.index.json")]
    files = [n for n in names if n.endswith(".safetensors") and not n.startswith(".")]
    for stem in _DEFAULT_NAMES:
        if f"{stem}.safetensors.index.json" in maps:
            return _open_map(os.path.join(folder, f"{stem}.safetensors.index.json"))
        if f"{stem}.safetensors" in files:
            return _index_files(folder, [os.path.join(folder, f"{stem}.safetensors")], None)
    if len(maps) == 1:
        return _open_map(os.path.join(folder, maps[0]))
    if len(maps) > 1:
        raise WeightsError(f"{folder}: several checkpoints ({', '.join(maps[:5])}); name one of these files")
    if not files:
        raise _no_checkpoint_error(folder, names)
    _require_all_shards(folder, files)
    return _index_files(folder, [os.path.join(folder, name) for name in files[: MAX_FILES + 1]], None)


def _require_all_shards(folder: str, files: list[str]) -> None:
    """Raise WeightsError if a set of files named x-00001-of-00003 is incomplete.

    Without an index.json, the names are all that tells how many files belong to the checkpoint.
    """
    if len(files) > MAX_FILES:
        raise WeightsError(f"{folder}: {len(files)} safetensors files; at most {MAX_FILES} are taken")
    sets: dict[tuple[str, str], set[int]] = {}
    for name in files:
        match = _SHARD.fullmatch(name)
        if match:
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), present in sets.items():
        if len(present) < int(total):
            first = next(i for i in range(1, int(total) + 1) if i not in present)
            raise WeightsError(
                f"{folder}: {int(total) - len(present)} of {int(total)} shards are missing, first "
                f"{stem}-{first:0{len(total)}d}-of-{total}.safetensors; download the folder again"
            )


def _no_checkpoint_error(folder: str, names: list[str]) -> Exception:
    """Return the error for a folder without safetensors files; name subfolders that have some."""
    pickles = [n for n in names if n.lower().endswith(PICKLE_SUFFIXES)]
    if pickles:
        return pickle_error(os.path.join(folder, pickles[0]))
    inner = [n for n in names if os.path.isdir(os.path.join(folder, n))]
    holding = [
        n for n in inner[:100] if any(f.endswith(".safetensors") for f in _list(os.path.join(folder, n)))
    ]
    hint = f"; its subfolders {', '.join(holding[:8])} do: name one of them" if holding else ""
    return WeightsError(f"{folder}: holds no .safetensors file{hint}")


def _list(folder: str) -> list[str]:
    """Return the names in a folder, or an empty list if the folder cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _pack_info(metadata: Mapping[str, str], where: str) -> dict:
    """Return the parsed metadata entry that `carom pack` wrote."""
    return parse_strict_json(metadata[PACK_KEY], f"{where}: {PACK_KEY}")


def _similar_name_hint(name: str, names: Iterable[str]) -> str:
    """Return a hint with a name of ``names`` that ends like ``name``, or an empty string."""
    tail = name.rsplit(".", 2)[-2:]
    near = next((n for n in names if n.rsplit(".", 2)[-2:] == tail), None)
    return f"; there is {show(near)}" if near else ""
