"""Rows of the records of several GPUs: `group_gpu` (data parallel) and `peers_gpu` (the memory of a second GPU)."""

from __future__ import annotations

from typing import Any

from .rows import Row, pooled

GROUP_CASES = {
    "alone": "Carom, one GPU",
    "whole": "Carom, all GPUs, whole units",
    "gather": "Carom, all GPUs, gathered units",
}


def group_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `group_gpu` record: samples per second. The base is one GPU alone."""
    result = record["result"]
    alone = result["alone"][0]
    size, ranks = alone["weights_bytes"], result["ranks"]
    layers = 2 * int(result["arguments"]["blocks"])
    group = f"{layers} linear layers, {size / 1e9:.1f} GB, LoRA by DistributedDataParallel, {ranks} GPUs"
    rows = []
    for name, case in GROUP_CASES.items():
        if not result.get(name):
            continue
        found = result[name]
        slowest = max(found, key=lambda rank: rank["median_step_seconds"])
        exact = result.get(f"{name}_bit_exact")
        memory = [rank["host_memory"] for rank in found]
        rows.append(
            Row(
                group, case, "samples", "1/s", slowest["samples_per_second"], samples=len(slowest["seconds"]),
                base=alone["samples_per_second"], base_case=GROUP_CASES["alone"],
                device_bytes=slowest["vram_peak_bytes"], same_bits=None if exact is None else all(exact),
                host_bytes=sum(sum(used.values()) for used in memory),
                note="bits beside DistributedDataParallel on resident weights" if exact is not None else "",
            )
        )  # fmt: skip
        rows.append(
            Row(group, case, "bytes of each link in a step", "GB", slowest["wire_bytes_per_step"] / 1e9)
        )
    return rows


def peers_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `peers_gpu` record: steps. The base of a streamed case is that without the second GPU."""
    result = record["result"]
    cases, tokens = result["cases"], result["arguments"]["tokens"]
    rows = []
    for name, found in cases.items():
        if not found.get("seconds"):
            continue
        job = name.split(", ")[0]
        base = cases.get(f"{job}, host", {}).get("median_step_seconds")
        rows.append(
            Row(
                f"transformer, {tokens} tokens, {job}", name, "step", "s",
                **pooled([found["median_step_seconds"]], found["seconds"]),
                base=base, base_case=None if base is None else f"{job}, host",
                device_bytes=found.get("vram_peak_bytes"), same_bits=found.get("bit_exact"),
            )
        )  # fmt: skip
    return rows
