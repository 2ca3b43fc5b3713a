"""Reading a model's shape from disk: from a .safetensors file, a folder of shards, an index.json or a
config.json.

Only headers are read, never weights. Files may be damaged or hostile: every length is checked against a limit
and against the file's size before use, shard names may not leave their folder, and pickles are never opened.
Bad files raise WeightsError.
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

from ...core.common.errors import UnsupportedError, WeightsError
from . import shapes
from .shape_configs import generates, shape_of_config
from .shapes import Group, Shape

MAX_HEADER = 100_000_000  # the safetensors format's own limit
MAX_JSON = 64 << 20
MAX_CONFIG = 4 << 20
MAX_SHARDS = 4096
MAX_TENSORS = 1_000_000
MAX_DIM = 1 << 32
# Bits per element by dtype name of the safetensors format.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# Bytes per element, by torch's names, of the dtypes that `carom pack` encodes; and the prefix of its padding
# tensors' names.
_PACKED_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
_PAD = "__pad__."
_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
# Matches a layer in a tensor's name: the name of a module list, and an index. In a model that is itself a
# list, names begin with the index ("3.attn.weight").
_LAYER = re.compile(r"(?:(?:^|\.)([a-zA-Z_]\w*)\.|^())(\d{1,5})\.")
# Matrices that an image token is not multiplied with: those of the text stream, the keys and values of text,
# and modulation, which is applied to one vector per sample. The names are those of diffusers and of the
# original checkpoints.
_NOT_FOR_IMAGE_TOKENS = re.compile(
    r"(?:^|[._])(?:txt_(?:attn|mlp|mod)|add_[qkv]_proj|to_add_out|ff_context|(?:img_)?mod(?:ulation)?\.|adaLN|"
    r"norm1(?:_context)?\.linear|norm\.linear|attn2\.to_[kv]\.|cross_attn\.[kv]\.)"
)
# Parts of the names of word embeddings and of output heads over a vocabulary.
_VOCABULARY_NAMES = (
    "embed_tokens",
    "lm_head",
    "tok_embeddings",
    "word_embeddings",
    "shared.weight",
    "wte.weight",
)
# Kind of model -> tokens of one sample, and a description of the sample.
_SAMPLES = {
    "diffusion": (4096 + 512, "1024 x 1024 image with 512 text tokens"),
    "language": (1024, "1024-token sequence"),
    "encoder": (512, "512-token sequence"),
}
_EXPERT = re.compile(r"\.experts?\.")
# Families of diffusion models (`Shape.family`) by parts of tensor names, in diffusers' and in the original checkpoints;
# the first match counts.
_FAMILIES = (
    ("mmdit", re.compile(r"double_blocks\.|single_transformer_blocks\.|joint_blocks\.|add_q_proj|txt_mlp")),
    ("single-stream", re.compile(r"noise_refiner\.")),
    ("unet", re.compile(r"down_blocks\.|input_blocks\.")),
    ("dit", re.compile(r"adaLN|modulation|scale_shift_table|norm1\.linear")),
)


def is_path(model: str) -> bool:
    """Return whether `model` is a path rather than the name of a known shape."""
    return (
        os.path.exists(model) or model.endswith((".safetensors", ".json", ".gguf", *_PICKLES)) or "/" in model
    )


def read_shape(path: str | os.PathLike) -> Shape:
    """Return the shape of the model at `path`.

    Raises WeightsError for a bad, hostile or missing file, and UnsupportedError for another file format.
    """
    shape = _read(Path(path))
    if shape.active_params <= 0 or shape.layers <= 0:
        raise WeightsError(f"{path} holds no layers with matrices, so there is nothing to plan")
    return shape


def _read(path: Path) -> Shape:
    """Return the shape of the model at `path`, by the kind of file or folder."""
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
        return _shape_of_tensors(path.stem, str(path), read_header(path), _folder_config(path.parent))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def read_header(path: Path) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return name -> (bytes, shape) of each tensor of a safetensors file, as unpacked by Carom.

    At most `MAX_HEADER` bytes are read. Raises WeightsError for a bad file.
    """
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
    """Return tensor name -> codec metadata that `carom pack` recorded in the header's metadata (see
    docs/codec.md).
    """
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
    """Return the (bytes, shape) of an encoded tensor after decoding. Raises WeightsError for bad metadata."""
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
    """Return the (bytes, shape) of a header entry.

    Raises WeightsError unless the types are right, the dtype is known, the offsets lie inside the file, and
    the length equals shape x dtype.
    """
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
    """Read and parse a JSON file.

    Raises WeightsError where the file has more than `limit` bytes or is not JSON.
    """
    with open(path, "rb") as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise WeightsError(f"{path} is larger than {limit} bytes, which no such file needs to be")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON ({type(error).__name__})") from error


def _folder_config(folder: Path) -> dict:
    """Return the config.json of the folder, or {} where there is none."""
    path = folder / "config.json"
    data = read_json(path, MAX_CONFIG) if path.is_file() else {}
    return data if isinstance(data, dict) else {}


def _read_folder(folder: Path) -> Shape:
    """Return the shape from the folder's shard index, else its .safetensors files, else its config.json.

    Otherwise read the folder `transformer` or `unet` inside, as in a diffusers pipeline.
    """
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
    """Return the shape from the shards that the index ``data`` names. Raises WeightsError for a bad index."""
    mapping = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise WeightsError(f"{path}: weight_map is missing or not an object of file names")
    names = sorted(set(mapping.values()))
    for name in names:
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise WeightsError(f"{path}: shard {name[:80]!r} is no .safetensors file of the same folder")
    return _read_shards(path.parent, [path.parent / name for name in names])


def _read_shards(folder: Path, shards: list[Path]) -> Shape:
    """Return the shape from the headers of all ``shards``."""
    if not 1 <= len(shards) <= MAX_SHARDS:
        raise WeightsError(f"{folder}: {len(shards)} shards; between 1 and {MAX_SHARDS} are read")
    tensors: dict[str, tuple[int, tuple[int, ...]]] = {}
    for shard in shards:
        if not shard.is_file():
            raise WeightsError(f"shard {shard} is not there; fetch the missing file")
        tensors.update(read_header(shard))
        if len(tensors) > MAX_TENSORS:
            raise WeightsError(f"{folder}: more than {MAX_TENSORS} tensors")
    return _shape_of_tensors(folder.name or str(folder), str(folder), tensors, _folder_config(folder))


def _shape_of_tensors(name: str, source: str, tensors: dict, config: dict) -> Shape:
    """Return the shape of a model with these ``tensors`` (name -> (bytes, shape)).

    Tensors belong to the same layer if the outermost `list.index.` in their names is the same. Layers of one
    list with the same tensor shapes form a group.
    """
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
    # The hidden width is the one that most matrices share; among equals, the largest.
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
        name, name, f"read from {source}", kind, tuple(groups), hidden, *_SAMPLES[kind], family=_family(tensors, kind),
        note="" if used or not any(group.expert_params for group in groups)
        else "Experts found but no num_experts_per_tok beside the file: all are counted as in use.",
    )  # fmt: skip


def _family(names: Collection[str], kind: str) -> str:
    """Return the `Shape.family` of a model by the names of its tensors; "" for a diffusion model of an unknown kind."""
    if kind != "diffusion":
        return "decoder" if kind == "language" else "encoder"
    return next((family for family, sign in _FAMILIES if any(sign.search(name) for name in names)), "")


def _kind(names: Collection[str], lists: set[str], config: dict) -> str:
    """Return the `Shape.kind` of a model, from its config, or from the names of its tensors and of its lists
    of layers.
    """
    answers = generates(config)
    if answers is None:
        encodes = bool(lists) and all("encoder" in path.split(".") for path in lists)
        if not encodes and not any(word in name for word in _VOCABULARY_NAMES for name in names):
            return "diffusion"
        answers = not encodes
    # A model with an output head over a vocabulary generates tokens, whatever its class is called.
    return "language" if answers or any(name.endswith("lm_head.weight") for name in names) else "encoder"


def _group(name: str, count: int, members: list, hidden: int, used: Any, kind: str) -> Group:
    """Return the group of ``count`` layers like the one whose tensors are ``members``: (name, bytes, shape)
    each.

    ``used``: number of experts that a token uses, from the config; ``kind``: `Shape.kind`.
    """
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
            active += elements if kind != "diffusion" or not _NOT_FOR_IMAGE_TOKENS.search(tensor) else 0
            adapters += dims[0] + math.prod(dims[1:])
            widest = max(widest, *dims[:2])
    experts = max(len(indices), routed)
    if expert:
        share = used / experts if type(used) is int and 0 < used <= experts else 1.0
        active += int(expert * share)
    # A decoder has fewer keys than queries (here a quarter) and a gated MLP. T5's encoder calls the gate's
    # matrix wi_1.
    language, gates = (
        kind == "language",
        any("gate" in tensor or "wi_1" in tensor for tensor, _, _ in members),
    )
    kept = shapes.widths(
        hidden, hidden, hidden // 4 if language else hidden, widest,
        gated=language or (kind == "encoder" and gates), modulated=kind == "diffusion",
    )  # fmt: skip
    return Group(
        name, count, params, active, expert, attention_width=hidden, adapter_width=adapters, stored_bytes=stored,
        largest=max((math.prod(dims) for _, _, dims in members), default=0), **kept,
    )  # fmt: skip
