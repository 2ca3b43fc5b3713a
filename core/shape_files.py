"""A model's shape read from disk: a .safetensors file, a sharded folder, an index.json or a config.json.

Reads headers only, never weights, and trusts nothing: every length is checked against a limit and against the file
before it is used, shard names may not leave their folder, and no pickle is ever opened. Bad files raise WeightsError.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from . import shapes
from .errors import UnsupportedError, WeightsError
from .shape_configs import generates, shape_of_config
from .shapes import Group, Shape

MAX_HEADER = 100_000_000  # the safetensors format's own limit
MAX_JSON = 64 << 20
MAX_CONFIG = 4 << 20
MAX_SHARDS = 4096
MAX_TENSORS = 1_000_000
MAX_DIM = 1 << 32
# Bits an element takes, by the format's dtype names.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# Of the dtypes that `carom pack` packs, by torch's names; and the names of what only fills pages.
_PACKED_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
_PAD = "__pad__."
_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
# A list's name and a number in it; a model that is itself a list has numbers only ("3.attn.weight").
_LAYER = re.compile(r"(?:(?:^|\.)([a-zA-Z_]\w*)\.|^())(\d{1,5})\.")
# What an image token does not pass: the text stream's own matrices, keys and values of text, and modulation (one vector a
# sample), in the namings of diffusers and of the original checkpoints.
_ASIDE = re.compile(
    r"(?:^|[._])(?:txt_(?:attn|mlp|mod)|add_[qkv]_proj|to_add_out|ff_context|(?:img_)?mod(?:ulation)?\.|adaLN|"
    r"norm1(?:_context)?\.linear|norm\.linear|attn2\.to_[kv]\.|cross_attn\.[kv]\.)"
)
# What looks words up, or gives a probability to each.
_WORDS = ("embed_tokens", "lm_head", "tok_embeddings", "word_embeddings", "shared.weight", "wte.weight")
# Tokens of one sample of a kind, and what it is.
_SAMPLES = {
    "diffusion": (4096 + 512, "1024 x 1024 image with 512 text tokens"),
    "language": (1024, "1024-token sequence"),
    "encoder": (512, "512-token sequence"),
}
_EXPERT = re.compile(r"\.experts?\.")


def is_path(model: str) -> bool:
    """Whether `model` means something on disk rather than a named shape."""
    return (
        os.path.exists(model) or model.endswith((".safetensors", ".json", ".gguf", *_PICKLES)) or "/" in model
    )


def read_shape(path: str | os.PathLike) -> Shape:
    """The shape of what `path` names. Raises WeightsError (bad, hostile, missing) or UnsupportedError (another format)."""
    shape = _read(Path(path))
    if shape.active_params <= 0 or shape.layers <= 0:
        raise WeightsError(f"{path} holds no layers with matrices, so there is nothing to plan")
    return shape


def _read(path: Path) -> Shape:
    if path.suffix.lower() in _PICKLES:
        raise WeightsError(
            f"{path} may hold a pickle, which is never opened; convert it to .safetensors first"
        )
    if path.suffix.lower() == ".gguf":
        raise UnsupportedError(
            f"{path}: GGUF files are not read here; name the shape and --quant q8_0 or q4_k instead"
        )
    try:
        if path.is_dir():
            return _read_folder(path)
        if not path.is_file():
            raise WeightsError(
                f"{path} is not there (or is no regular file); name a file, a folder or a known model"
            )
        if path.name.endswith(".json"):
            data = read_json(path, MAX_JSON)
            if isinstance(data, dict) and "weight_map" in data:
                return _read_index(path, data)
            return shape_of_config(data, str(path))
        return _shape_of_tensors(path.stem, str(path), read_header(path), _config_beside(path.parent))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def read_header(path: Path) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> (bytes, shape) of each tensor of a safetensors file. Reads at most `MAX_HEADER` bytes of it."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise WeightsError(
                f"{path} is no whole safetensors file: its header cannot be {length} bytes long"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: its safetensors header is not JSON ({type(error).__name__})") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise WeightsError(
            f"{path}: its safetensors header is not an object of at most {MAX_TENSORS} tensors"
        )
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__" and not name.startswith(_PAD):
            tensors[name] = _checked(path, name, entry, size - 8 - length)
    if not tensors:
        raise WeightsError(f"{path} holds no tensors")
    for name, meta in _packed(path, header.get("__metadata__")).items():
        if name in tensors:
            tensors[name] = _unpacked(path, name, meta)
    return tensors


def _packed(path: Path, metadata: Any) -> dict[str, Any]:
    """What `carom pack` says of the tensors that it packed by a codec; docs/codec.md has the entry."""
    text = metadata.get("carom.codec") if isinstance(metadata, dict) else None
    if text is None:
        return {}
    try:
        found = json.loads(text)["tensors"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path}: what it says of its packed tensors cannot be read; fetch the file again"
        ) from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path}: what it says of its packed tensors is no object; fetch the file again")
    return found


def _unpacked(path: Path, name: str, meta: Any) -> tuple[int, tuple[int, ...]]:
    """(bytes, shape) that a packed tensor has in RAM and on the link, where it is decoded; WeightsError for a bad one."""
    try:
        nbytes, dims = _PACKED_BYTES[meta["dtype"]], meta["shape"]
        good = 1 <= len(dims) <= 16 and all(type(n) is int and 0 <= n <= MAX_DIM for n in dims)
    except (KeyError, TypeError):
        good = False
    if not good:
        raise WeightsError(
            f"{path}: packed tensor {name[:80]!r} has a bad dtype or shape; fetch the file again"
        )
    return math.prod(dims) * nbytes, tuple(dims)


def _checked(path: Path, name: str, entry: Any, data: int) -> tuple[int, tuple[int, ...]]:
    """One header entry, or WeightsError: types, known dtype, offsets inside the file, length equal to shape x dtype."""
    try:
        bits, dims, (begin, end) = DTYPE_BITS[entry["dtype"]], entry["shape"], entry["data_offsets"]
        good = len(dims) <= 16 and all(
            type(n) is int and 0 <= n <= MAX_DIM for n in (*dims, *([0] if not dims else []))
        )
        good = good and type(begin) is int and type(end) is int and 0 <= begin <= end < 1 << 63
        good = good and (end - begin) * 8 == math.prod(dims) * bits
        cut = good and end > data
    except (KeyError, TypeError, ValueError):
        good = cut = False
    if cut:
        raise WeightsError(
            f"{path}: truncated: tensor {name[:80]!r} ends at data byte {end}, the file holds {data}; fetch the file again"
        )
    if not good:
        raise WeightsError(
            f"{path}: tensor {name[:80]!r} has a bad dtype, shape or place in the file; fetch the file again"
        )
    return end - begin, tuple(dims)


def read_json(path: Path, limit: int) -> Any:
    """JSON of at most `limit` bytes; WeightsError otherwise."""
    with open(path, "rb") as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise WeightsError(f"{path} is larger than {limit} bytes, which no such file needs to be")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON ({type(error).__name__})") from error


def _config_beside(folder: Path) -> dict:
    path = folder / "config.json"
    data = read_json(path, MAX_CONFIG) if path.is_file() else {}
    return data if isinstance(data, dict) else {}


def _read_folder(folder: Path) -> Shape:
    """Index, else the shards there are, else config.json, else the transformer or unet of a diffusers pipeline."""
    entries = sorted(entry.name for _, entry in zip(range(MAX_SHARDS), os.scandir(folder), strict=False))
    for name in entries:
        if name.endswith(".safetensors.index.json"):
            return _read_index(folder / name, read_json(folder / name, MAX_JSON))
    shards = [folder / name for name in entries if name.endswith(".safetensors")]
    if shards:
        return _read_shards(folder, shards)
    if "config.json" in entries:
        return shape_of_config(read_json(folder / "config.json", MAX_CONFIG), str(folder))
    for name in ("transformer", "unet"):
        if name in entries and (folder / name).is_dir() and any((folder / name).iterdir()):
            return _read_folder(folder / name)
    raise WeightsError(f"{folder} holds no .safetensors file, no index and no config.json")


def _read_index(path: Path, data: Any) -> Shape:
    mapping = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise WeightsError(f"{path}: weight_map is missing or not an object of file names")
    names = sorted(set(mapping.values()))
    for name in names:
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise WeightsError(f"{path}: shard {name[:80]!r} is no .safetensors file of the same folder")
    return _read_shards(path.parent, [path.parent / name for name in names])


def _read_shards(folder: Path, shards: list[Path]) -> Shape:
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise WeightsError(f"{folder}: {len(shards)} shards; between 1 and {MAX_SHARDS} are read")
    tensors: dict[str, tuple[int, tuple[int, ...]]] = {}
    for shard in shards:
        if not shard.is_file():
            raise WeightsError(f"shard {shard} is not there; fetch the missing file")
        tensors.update(read_header(shard))
        if len(tensors) > MAX_TENSORS:
            raise WeightsError(f"{folder}: more than {MAX_TENSORS} tensors")
    return _shape_of_tensors(folder.name or str(folder), str(folder), tensors, _config_beside(folder))


def _shape_of_tensors(name: str, source: str, tensors: dict, config: dict) -> Shape:
    """Groups layers that hold the same shapes. A layer is the outermost `list.index.` of a tensor's name."""
    layers: dict[tuple[str, int], list] = defaultdict(list)
    outside = []
    for tensor, (size, dims) in tensors.items():
        if f"{tensor}.absmax" in tensors:  # bitsandbytes keeps two 4-bit weights in a byte
            dims = (2 * dims[0], *dims[1:]) if dims else dims
        match = _LAYER.search(tensor)
        if match:
            layers[tensor[: match.start(3)].rstrip("."), int(match[3])].append((tensor, size, dims))
        else:
            outside.append((tensor, size, dims))
    widths = Counter(min(dims) for _, dims in tensors.values() if len(dims) == 2 and min(dims) > 1)
    # The width most matrices share is what passes from layer to layer; ties go to the larger.
    hidden = max(widths, key=lambda width: (widths[width], width)) if widths else 1
    used = config.get("num_experts_per_tok")
    kind = _kind(tensors, {prefix for prefix, _ in layers}, config)
    alike_by: dict[tuple, list] = defaultdict(list)
    for (prefix, _), members in sorted(layers.items()):
        alike_by[prefix, tuple(sorted((size, dims) for _, size, dims in members))].append(members)
    groups = [
        _group(prefix.rpartition(".")[2] or "layers", len(alike), alike[0], hidden, used, kind)
        for (prefix, _), alike in alike_by.items()
    ]
    if outside:
        rows = sum(math.prod(dims) for tensor, _, dims in outside if "head" in tensor and len(dims) == 2)
        size, params = sum(size for _, size, _ in outside), sum(math.prod(dims) for _, _, dims in outside)
        groups.append(Group("outside the layers", 1, params, rows, repeated=False, stored_bytes=size))
    return Shape(
        name, name, f"read from {source}", kind, tuple(groups), hidden, *_SAMPLES[kind],
        note="" if used or not any(group.expert_params for group in groups)
        else "Experts found but no num_experts_per_tok beside the file: all are counted as in use.",
    )  # fmt: skip


def _kind(names: Collection[str], lists: set[str], config: dict) -> str:
    """`Shape.kind` of tensors so named, in lists of layers so named; ``config`` says it best where there is one."""
    answers = generates(config)
    if answers is None:
        encodes = bool(lists) and all("encoder" in path.split(".") for path in lists)
        if not encodes and not any(word in name for word in _WORDS for name in names):
            return "diffusion"
        answers = not encodes
    # Whatever a model's class is called, with a head over words it answers.
    return "language" if answers or any(name.endswith("lm_head.weight") for name in names) else "encoder"


def _group(name: str, count: int, members: list, hidden: int, used: Any, kind: str) -> Group:
    params = active = expert = routed = adapters = widest = 0
    stored = sum(size for _, size, _ in members)
    indices = set()
    for tensor, _, dims in members:
        elements = math.prod(dims)
        params += elements
        if _EXPERT.search(tensor):
            expert += elements
            match = re.search(r"\.experts?\.(\d{1,5})\.", tensor)
            indices.add(match[1] if match else "all")
            routed = max(routed, dims[0] if match is None and len(dims) == 3 else 0)
        elif len(dims) >= 2:
            active += elements if kind != "diffusion" or not _ASIDE.search(tensor) else 0
            adapters += dims[0] + math.prod(dims[1:])
            widest = max(widest, *dims[:2])
    experts = max(len(indices), routed)
    if expert:
        share = used / experts if type(used) is int and 0 < used <= experts else 1.0
        active += int(expert * share)
    # Keys of a decoder serve several queries each, and its MLP has a gate; T5's encoder calls that wi_1.
    language, gates = (
        kind == "language",
        any("gate" in tensor or "wi_1" in tensor for tensor, _, _ in members),
    )
    kept = shapes.widths(
        hidden, hidden, hidden // 4 if language else hidden, widest,
        gated=language or (kind == "encoder" and gates), modulated=kind == "diffusion",
    )  # fmt: skip
    return Group(
        name, count, params, active, expert, attention_width=hidden, adapter_width=adapters, stored_bytes=stored, **kept
    )  # fmt: skip
