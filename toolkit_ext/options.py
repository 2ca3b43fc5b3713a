"""PURE. Reading of the YAML's model section: `offload`, `offload_kwargs` and ai-toolkit's own offloading keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.common.errors import UnsupportedError
from ..core.common.sizes import parse_size, suggest_size

MODES = ("bouncing", "aimdo", "auto", "off")
OPTIONS = ("vram", "ram", "disk", "codec", "granularity", "priority")
CODECS = ("auto", "raw", "lossless")
GRANULARITIES = ("auto", "block", "phase", "layer")
PRIORITIES = ("normal", "high", "low")
PERCENTS = ("layer_offloading_transformer_percent", "layer_offloading_text_encoder_percent")


@dataclass(frozen=True)
class Policy:
    """The offload settings of one process of a job.

    ``mode``: one of `MODES` except "off"; ``vram``, ``ram``: as in `carom.stream`, for all models of the process
    together; ``disk``, ``codec``, ``granularity``: as in `carom.stream`; ``priority``: the rank of the transformer that
    trains among the models that share the budget.
    ``transformer_percent``, ``text_encoder_percent``: ai-toolkit's share (0 to 1) of the weights to stream. They are
    None if the YAML gives no share, if ``layer_offloading`` is not true, or if ``vram`` overrules the share.
    ``remarks``: one line for each key in the YAML or the environment that has no effect.
    """

    mode: str
    vram: int | str = "auto"
    ram: int | str = "auto"
    disk: str | None = None
    codec: str = "auto"
    granularity: str = "auto"
    priority: str = "normal"
    transformer_percent: float | None = None
    text_encoder_percent: float | None = None
    remarks: tuple[str, ...] = ()


def read(model: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Policy | None:
    """Return the policy of a YAML ``model`` section, None if ai-toolkit runs without Carom.

    Raises UnsupportedError, which names the allowed values, for an unknown `offload`, an unknown option, a bad value,
    or settings under which no weight would be offloaded.
    """
    mode = model.get("offload")
    if mode is None and model.get("offload_kwargs"):
        raise UnsupportedError(
            f"model.offload_kwargs does nothing without model.offload; write offload: {MODES[0]}, or remove offload_kwargs"
        )
    if mode is None or mode is False:  # YAML reads a bare `off` as false
        mode = "off"
    if mode not in MODES:
        raise UnsupportedError(f"model.offload: {mode!r} is not known; write one of {_list(MODES)}")
    options = model.get("offload_kwargs")
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise UnsupportedError(f"model.offload_kwargs: {options!r} is not a mapping of {_list(OPTIONS)}")
    for name in options:
        if name not in OPTIONS:
            raise UnsupportedError(
                f"model.offload_kwargs: {name!r} is not known; the options are {_list(OPTIONS)}"
            )
    values = {name: value for name, value in options.items() if value is not None}
    vram, ram = _size("vram", values.get("vram", "auto"), 1), _size("ram", values.get("ram", "auto"), 0)
    disk = _disk(values.get("disk"))
    codec = _choice("codec", values.get("codec", "auto"), CODECS)
    granularity = _choice("granularity", values.get("granularity", "auto"), GRANULARITIES)
    priority = _choice("priority", values.get("priority", "normal"), PRIORITIES)
    if mode == "off":
        return None
    # ai-toolkit's UI writes both percents into every job, so they count only if `layer_offloading` is true.
    counts = model.get("layer_offloading") is True
    percents = [_percent(name, model.get(name)) if counts else None for name in PERCENTS]
    if all(percent == 0 for percent in percents):
        raise UnsupportedError(
            f"model.{PERCENTS[0]} and {PERCENTS[1]} are both 0, so that nothing would be offloaded; remove them or offload"
        )
    remarks = _remarks(vram, percents, environ or {})
    if vram != "auto":
        percents = [None if percent else percent for percent in percents]
    return Policy(mode, vram, ram, disk, codec, granularity, priority, percents[0], percents[1], remarks)


def _remarks(
    vram: int | str, percents: Sequence[float | None], environ: Mapping[str, str]
) -> tuple[str, ...]:
    lines = []
    for name, percent in zip(PERCENTS, percents, strict=True):
        if vram != "auto" and percent:
            lines.append(f"offload_kwargs.vram and {name} contradict each other; vram wins")
    if "AI_TOOLKIT_OFFLOAD_DEPTH" in environ:
        lines.append(
            "AI_TOOLKIT_OFFLOAD_DEPTH is for the stock manager; Carom looks ahead as far as its slots go"
        )
    return tuple(lines)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UnsupportedError(
            f"model.offload_kwargs.{name}: {value!r} is not known; write one of {_list(allowed)}"
        )
    return value


def _size(name: str, value: Any, least: int) -> int | str:
    """Return ``value`` if it is "auto" or a size of at least ``least`` bytes; raise UnsupportedError otherwise.

    A bare number of a few bytes is also refused, because its unit is probably missing.
    """
    if value == "auto":
        return "auto"
    setting = f"model.offload_kwargs.{name}"
    try:
        nbytes = parse_size(value, whole=1 << 40, setting=setting)
    except ValueError as error:
        raise UnsupportedError(f"{error}, or 'auto'") from error
    if nbytes < least:
        raise UnsupportedError(
            f"{setting}: {value!r} leaves no room for weights; write a size such as 12GiB, or auto"
        )
    meant = suggest_size(value)
    if meant is not None:
        raise UnsupportedError(f"{setting}: {value} means {nbytes} bytes; did you mean {meant}?")
    return value if isinstance(value, str) else int(value)


def _disk(value: Any) -> str | None:
    """Return None, "auto" or the absolute path of the folder ``value``; raise UnsupportedError for other values."""
    if value is None or value == "auto":
        return value
    setting = "model.offload_kwargs.disk"
    if not isinstance(value, str) or not value.strip():
        raise UnsupportedError(
            f"{setting}: {value!r} is not known; write auto, the path of a folder, or null"
        )
    folder = Path(value).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise UnsupportedError(f"{setting}: {value!r} is a file; write the path of a folder")
    return str(folder)


def _percent(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= 1
        or math.isnan(value)
    ):
        raise UnsupportedError(f"model.{name}: {value!r} is not a share between 0 and 1")
    return float(value)
