"""Rows of the records of the disk tier (`disk_gpu`, `disk_stream`, `disk_read`) and of the codec (`carom codec`)."""

from __future__ import annotations

import statistics
from typing import Any

from .rows import Row, pooled

PLAIN_READ = "best plain read of the run"


def best_plain_rate(result: dict[str, Any]) -> float | None:
    """Return the highest rate in bytes/s of plain direct reads anywhere in a `disk_gpu` run: the sweep over threads and
    block sizes, the reads before and after each part, those into large memory, and those in turns with the reader.
    """
    raw = result.get("raw", {})
    rates = [one["bytes_per_second"] for one in raw.get("sweep", ())] + list(raw.get("beside", ()))
    rates += [raw["into_large_memory"]] if raw.get("into_large_memory") else []
    rates += [one["raw_bytes_per_second"] for one in result.get("rate", {}).get("rounds", ())]
    return max(rates, default=None)


def disk_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `disk_gpu` record. Times of reads are compared with the best plain rate of the whole run."""
    result = record["result"]
    best = best_plain_rate(result)
    found: list[Row] = []
    size = result.get("make", {}).get("weights_bytes")
    if size and "first_output_seconds" in result.get("first_output", {}):
        part = result["first_output"]
        found.append(
            Row(
                f"Llama-shaped, {size / 1e9:.1f} GB, weights read from NVMe",
                "Carom, raw",
                "first output, from the call of stream",
                "s",
                part["first_output_seconds"],
                base=size / best if best else None,
                base_case=PLAIN_READ,
                device_bytes=part["vram_peak_bytes"],
                host_bytes=part["peak_rss_bytes_from_outside"]["all"],
                same_bits=part["bit_exact"],
            )
        )
    if "rate" in result and "bytes_per_second" in result["rate"]:
        part = result["rate"]
        samples = [one["bytes_per_second"] / 1e9 for one in part["rounds"] if "bytes_per_second" in one]
        found.append(
            Row(
                f"Llama-shaped, {part['layers']} layers, a pass in inference",
                "Carom, raw",
                "rate of reading",
                "GB/s",
                **{
                    **pooled([part["bytes_per_second"] / 1e9], samples),
                    "value": part["bytes_per_second"] / 1e9,
                },
                base=best / 1e9 if best else None,
                base_case=PLAIN_READ,
                device_bytes=part["vram_peak_bytes"],
            )
        )
    if "timed" in result.get("lora", {}):
        part = result["lora"]
        seconds = part["timed"]["seconds"]
        bits = part.get("adapters_bit_identical_to_plain")
        found.append(
            Row(
                f"Llama-shaped, {part['layers']} layers, LoRA training",
                "Carom, raw, weights from NVMe",
                "step",
                "s",
                **pooled([statistics.median(seconds)], seconds),
                base=part["disk_bytes_per_step"] / best if best else None,
                base_case=PLAIN_READ,
                device_bytes=part["vram_peak_bytes"],
                same_bits=bits,
            )
        )
    found += _packed(result.get("packed", {}))
    found += _nf4(result.get("nf4", {}))
    failed = [name for name in result if name.endswith("_failed")]
    found += [
        Row(name.removesuffix("_failed"), "Carom", "part", "s", note=f"failed: {result[name]}"[:200])
        for name in failed
    ]
    return found


def _packed(part: dict[str, Any]) -> list[Row]:
    """Return the rows of a raw and a packed file of one model."""
    found = []
    for metric, name in (("first output", "first_output_seconds"), ("pass", "pass_seconds")):
        for kind in ("raw", "packed"):
            if name not in part.get(kind, {}):
                continue
            own = part[kind]
            samples = own["passes_seconds"][1:] if metric == "pass" else ()
            row = pooled([own[name]], samples)
            if kind == "packed":
                row |= {"base": part["raw"][name], "base_case": "raw file"}
            found.append(
                Row(
                    f"Llama-shaped, {part['layers']} layers, {part['weights_bytes'] / 1e9:.1f} GB, read from NVMe",
                    f"Carom, {kind} file of {own['file_bytes'] / 1e9:.2f} GB",
                    metric,
                    "s",
                    **row,
                    device_bytes=own["vram_peak_bytes"],
                    same_bits=own["bit_exact"],
                )
            )
    return found


def _nf4(part: dict[str, Any]) -> list[Row]:
    """Return the rows of LoRA over a file of NF4 codes: the step beside the roofline of the session's report, and the
    bytes of a step.
    """
    if not part.get("timed", {}).get("seconds"):
        return []
    seconds, rss = part["timed"]["seconds"], part.get("peak_rss_bytes_from_outside", {}).get("all")
    budgets = (
        f"{part['vram_budget_bytes'] / 1e9:.3g} GB of vram, {part['ram_budget_bytes'] / 1e9:.3g} GB of ram"
    )
    group = f"Llama-shaped, {part['layers']} layers, {part['file_bytes'] / 1e9:.3g} GB of NF4, LoRA training"
    case = f"Carom, {budgets}"
    same = part.get("compared", {}).get("adapters_bit_identical")
    compared = part.get("compared", {}).get("layers")
    found = [
        Row(
            group,
            case,
            "step",
            "s",
            **pooled([statistics.median(seconds)], seconds),
            floor=part.get("roofline_seconds"),
            device_bytes=part["vram_peak_bytes"],
            host_bytes=rss,
            same_bits=same,
            note="" if same is None else f"bits were compared at {compared} layers",
        )
    ]
    named = (
        ("bytes of the link in a step", "wire_bytes_per_step"),
        ("bytes of the drive in a step", "disk_bytes_per_step"),
    )
    return found + [
        Row(group, case, metric, "GB", part[name] / 1e9) for metric, name in named if name in part
    ]


def stream_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `disk_stream` record."""
    result = record["result"]
    size, raw = result["weights_bytes"], result["raw_bytes_per_second"]
    group = f"linear layers, {size / 1e9:.1f} GB, streamed from NVMe with a RAM budget of {result['ram_budget_bytes'] / 1e9:.2g} GB"
    common: dict[str, Any] = {
        "base_case": "plain read of the same bytes",
        "host_bytes": result["peak_rss_bytes_from_outside"],
        "same_bits": result["bit_exact"],
        "note": "the plain read was measured once, after the passes",
    }
    passes = result["passes_seconds"]
    return [
        Row(group, "Carom", "first output", "s", result["first_output_seconds"], base=size / raw, **common),
        Row(
            group,
            "Carom",
            "pass",
            "s",
            **{**pooled([result["pass_seconds"]], passes), "value": result["pass_seconds"]},
            base=result["disk_bytes_per_step"] / raw,
            **common,
        ),
    ]


def read_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a `disk_read` record: the reader beside plain loops."""
    result = record["result"]
    return [
        Row(f"{result['bytes'] / 1e9:.1f} GB", name, "rate of reading", "GB/s", rate / 1e9, samples=result["rounds"],
            base=result["raw"] / 1e9, base_case=PLAIN_READ)
        for name, rate in result["bytes_per_second"].items()
    ]  # fmt: skip


def codec_rows(record: dict[str, Any]) -> list[Row]:
    """Return the rows of a codec record: rates of raw bf16 bytes. Decoding on the device is compared with a device
    copy of the same bytes.
    """
    rows = record["rows"]
    copy = next((row["gb_per_s"] for row in rows if row["what"] == "device copy"), None)
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        on_host = row["what"].startswith("cpu")
        settings = ", ".join(
            f"{key} {value}"
            for key, value in row.items()
            if key not in ("what", "gb_per_s", "ratio") and value is not None
        )
        group = "codec, on the CPU" if on_host else "codec, on the device"
        case = row["what"] + (f", {settings}" if settings else "")
        found[group, case] = Row(
            group, case, "rate of raw bytes", "GB/s", row["gb_per_s"],
            base=None if on_host or row["what"] == "device copy" else copy,
            base_case=None if on_host or row["what"] == "device copy" else "device copy",
            note=f"{row['ratio']:.3f} of the bytes" if row.get("ratio") else "",
        )  # fmt: skip
    return list(found.values())
