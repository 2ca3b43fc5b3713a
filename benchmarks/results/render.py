"""From a kept record to its rows: which kind of record a file is, and the renderer of each kind."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import render_engines, render_gpus, render_hosts, render_prompts, render_sessions, render_tiers
from .rows import Row


class RecordError(ValueError):
    """A file is no record that this version can read."""


@dataclass(frozen=True)
class Kind:
    """A kind of record. ``name``: the word in the index. ``fits``: whether a record is of this kind."""

    name: str
    fits: Callable[[dict[str, Any]], bool]
    rows: Callable[[dict[str, Any]], list[Row]]


def _tool(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: record.get("tool") in names


# The first kind that fits counts. Records of the first days name no tool and are known by their keys.
KINDS = (
    Kind("engines", _tool("carom bench", "carom benchmark suite", "carom benchmark suite (tiny)"), render_engines.rows),
    Kind("comfyui", _tool("comfy_gpu"), render_hosts.comfy_rows),
    Kind("comfyui prompts", _tool("prompts"), render_prompts.prompt_rows),
    Kind("ai-toolkit", _tool("aitoolkit_gpu"), render_hosts.aitoolkit_rows),
    Kind("auto", _tool("carom auto"), render_sessions.auto_rows),
    Kind("disk", _tool("disk_gpu"), render_tiers.disk_rows),
    Kind("disk stream", _tool("disk_stream"), render_tiers.stream_rows),
    Kind("disk read", _tool("disk_read"), render_tiers.read_rows),
    Kind("several GPUs", _tool("group_gpu"), render_gpus.group_rows),
    Kind("several GPUs", _tool("peers_gpu"), render_gpus.peers_rows),
    Kind("codec", lambda r: r.get("tool") == "carom codec" or _rows_with(r, "gb_per_s"), render_tiers.codec_rows),
    Kind("predict", lambda r: r.get("tool") == "carom predict" or _rows_with(r, "predicted_s"), render_sessions.predict_rows),
    Kind("codec choice", _tool("codec_choice"), render_sessions.codec_choice_rows),
    Kind("host time", _tool("carom host time of two checkouts"), render_sessions.host_time_rows),
    Kind("two commits", _tool("carom two commits in turns"), render_sessions.two_commits_rows),
    Kind("switches", _tool("carom switches"), render_sessions.switches_rows),
    Kind("attaching", _tool("carom attaching"), render_sessions.attaching_rows),
    Kind("session memory", _tool("carom session memory"), render_sessions.session_memory_rows),
    Kind("host calls", _tool("carom host calls"), render_sessions.host_calls_rows),
    Kind("schedules", _tool("carom schedules"), render_sessions.schedule_rows),
    Kind("streamed gradients", lambda r: _rows_with(r, "peak_mib"), render_sessions.gradient_rows),
    Kind("host samples", lambda r: "leases" in r, render_sessions.sample_rows),
)  # fmt: skip


@dataclass(frozen=True)
class Rendered:
    """A record and its rows. For an archive that accompanies a record, ``kind`` is "archive" and ``record`` empty."""

    kind: str
    record: dict[str, Any]
    rows: list[Row]


def read(path: Path) -> Rendered:
    """Read the record at `path` and render it. The rows are never empty.

    Raises RecordError (a ValueError) if the file cannot be read, if it is no record of a known kind, if a value that
    its kind needs is missing, or if it has no case.
    """
    try:
        if path.suffix == ".tgz":
            rows = render_sessions.archive_rows(path)
            if not rows:
                raise RecordError(f"{path} is an empty archive")
            return Rendered("archive", {}, rows)
        record = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tarfile.TarError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(
            f"{path} cannot be read ({why}); name a record, such as one of benchmarks/records/"
        ) from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path} is no record: it is not JSON ({error})") from None
    if isinstance(record, list):  # the first codec records are lists of rows
        record = {"rows": record}
    return rendered(record, str(path))


def rendered(record: Any, name: str = "this run") -> Rendered:
    """Render a record that is called ``name`` in errors. Raises RecordError as `read` does."""
    kind = next((kind for kind in KINDS if isinstance(record, dict) and kind.fits(record)), None)
    if kind is None:
        names = ", ".join(kind.name for kind in KINDS)
        raise RecordError(f"{name} is no record of a known kind ({names}); see benchmarks/README.md")
    try:
        rows = kind.rows(record)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError) as error:
        raise RecordError(
            f"{name} is a broken record of the kind {kind.name!r} ({type(error).__name__}: {error})"
        ) from None
    if not rows:
        raise RecordError(f"{name} is a record of the kind {kind.name!r} without any case")
    return Rendered(kind.name, record, rows)


def _rows_with(record: dict[str, Any], key: str) -> bool:
    rows = record.get("rows")
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], dict) and key in rows[0]
