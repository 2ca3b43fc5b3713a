"""The pooling of several processes that ran the same case: one result with all samples. The module is pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

_LARGEST = (
    "peak_reserved_bytes",
    "peak_allocated_bytes",
    "card_used_bytes",
    "host_rss_bytes",
    "host_peak_rss_bytes",
)


def pooled(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each key, in the order of first appearance. The given entries stay as they are.

    The result is that of the first process that ended well. Its times are taken over the samples of all processes, and
    its memory figures are the largest; `process_ms` lists the median of each process. Fingerprints are those of the
    first process that has any.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry["key"], []).append(entry)
    return [group[0] if len(group) == 1 else _pool(group) for group in groups.values()]


def spread(samples_ms: list[float]) -> dict[str, Any]:
    """Return the minimum, the quartiles [q1, q3] and the samples themselves, in ms."""
    quartiles = (
        statistics.quantiles(samples_ms, n=4, method="inclusive") if len(samples_ms) > 1 else samples_ms * 3
    )
    return {
        "ms_min": min(samples_ms),
        "quartiles_ms": [quartiles[0], quartiles[2]],
        "samples_ms": [round(sample, 4) for sample in samples_ms],
    }


def _pool(group: list[dict[str, Any]]) -> dict[str, Any]:
    done = [entry["result"] for entry in group if entry["result"]["status"] == "ok"]
    if not done:
        return group[0]
    result = dict(done[0])
    result["processes"] = len(done)
    for name in _LARGEST:
        known = [one[name] for one in done if one.get(name) is not None]
        if known:
            result[name] = max(known)
    if all("samples_ms" in one for one in done):
        samples = [sample for one in done for sample in one["samples_ms"]]
        result.update(spread(samples), ms_per_step=statistics.median(samples))
        result["process_ms"] = [one["ms_per_step"] for one in done]
    marked = next((one["fingerprint"] for one in done if one.get("fingerprint")), None)
    if marked:
        result["fingerprint"] = marked
    return {**group[0], "result": result}
